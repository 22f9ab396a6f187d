package localcluster

import (
	"errors"
	"fmt"
	"regexp"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
)

// maxNodes bounds the nodes of one cluster: each is a kubelet of about 90 MB.
const maxNodes = 64

// NodeSpec asks for nodes of one kind.
type NodeSpec struct {
	// Machine is the name of a built-in machine or the path of a description.
	Machine string
	// Count is the number of nodes, at least 1.
	Count int
	// Config is the path of a device-plugin config, "" for the default. The agent
	// watches the file, so editing it changes the node.
	Config string
	// Name is the name of the node, with -1, -2, ... where Count is above 1; ""
	// for one made from Machine.
	Name   string
	Labels map[string]string
	Taints []corev1.Taint
}

// ParseNodeSpec reads
//
//	MACHINE[=COUNT][,config=FILE][,name=NAME][,label=KEY=VALUE]...[,taint=KEY=VALUE:EFFECT]...
func ParseNodeSpec(text string) (NodeSpec, error) {
	spec, err := parseNodeSpec(text)
	if err != nil {
		return NodeSpec{}, fmt.Errorf("node %q: %w", text, err)
	}
	return spec, nil
}

func parseNodeSpec(text string) (NodeSpec, error) {
	head, rest, _ := strings.Cut(text, ",")
	machine, count, counted := strings.Cut(head, "=")
	spec := NodeSpec{Machine: machine, Count: 1, Labels: make(map[string]string)}
	if machine == "" {
		return spec, errors.New("no machine; want MACHINE[=COUNT][,config=FILE][,name=NAME][,label=K=V][,taint=K=V:EFFECT]")
	}
	if counted {
		n, err := strconv.Atoi(count)
		if err != nil || n < 1 || n > maxNodes {
			return spec, fmt.Errorf("count %q is not a number from 1 to %d", count, maxNodes)
		}
		spec.Count = n
	}
	if rest == "" {
		return spec, nil
	}
	for option := range strings.SplitSeq(rest, ",") {
		key, value, _ := strings.Cut(option, "=")
		if value == "" {
			return spec, fmt.Errorf("option %q has no value", option)
		}
		switch key {
		case "config":
			spec.Config = value
		case "name":
			if problems := validation.IsDNS1123Subdomain(value); len(problems) > 0 {
				return spec, fmt.Errorf("name %q: %s", value, problems[0])
			}
			spec.Name = value
		case "label":
			k, v, _ := strings.Cut(value, "=")
			if problems := append(validation.IsQualifiedName(k), validation.IsValidLabelValue(v)...); len(problems) > 0 {
				return spec, fmt.Errorf("label %q: %s", value, problems[0])
			}
			spec.Labels[k] = v
		case "taint":
			taint, err := parseTaint(value)
			if err != nil {
				return spec, err
			}
			spec.Taints = append(spec.Taints, taint)
		default:
			return spec, fmt.Errorf("unknown option %q; want config, name, label or taint", key)
		}
	}
	return spec, nil
}

func parseTaint(text string) (corev1.Taint, error) {
	pair, effect, ok := strings.Cut(text, ":")
	key, value, _ := strings.Cut(pair, "=")
	if problems := append(validation.IsQualifiedName(key), validation.IsValidLabelValue(value)...); !ok || len(problems) > 0 {
		return corev1.Taint{}, fmt.Errorf("taint %q: want KEY=VALUE:EFFECT", text)
	}
	switch e := corev1.TaintEffect(effect); e {
	case corev1.TaintEffectNoSchedule, corev1.TaintEffectPreferNoSchedule, corev1.TaintEffectNoExecute:
		return corev1.Taint{Key: key, Value: value, Effect: e}, nil
	}
	return corev1.Taint{}, fmt.Errorf("taint %q: effect %q is none of NoSchedule, PreferNoSchedule, NoExecute", text, effect)
}

var notNodeName = regexp.MustCompile(`[^a-z0-9-]+`)

// nodeNames gives every node of the specs its name, in order.
func nodeNames(specs []NodeSpec) ([][]string, error) {
	if len(specs) == 0 {
		return nil, errors.New("no nodes: name at least one machine with --node")
	}
	used := make(map[string]bool)
	total := 0
	next := make(map[string]int)
	names := make([][]string, len(specs))
	for i, spec := range specs {
		base := spec.Name
		if base == "" {
			file := spec.Machine[strings.LastIndex(spec.Machine, "/")+1:]
			file = strings.TrimSuffix(strings.TrimSuffix(file, ".yaml"), ".yml")
			base = strings.Trim(notNodeName.ReplaceAllString(strings.ToLower(file), "-"), "-")
		}
		for range spec.Count {
			name := base
			if spec.Name == "" || spec.Count > 1 {
				next[base]++
				name = fmt.Sprintf("%s-%d", base, next[base])
			}
			if used[name] {
				return nil, fmt.Errorf("node name %q is given twice", name)
			}
			used[name] = true
			names[i] = append(names[i], name)
			total++
		}
	}
	if total > maxNodes {
		return nil, fmt.Errorf("%d nodes: at most %d fit in one local cluster", total, maxNodes)
	}
	return names, nil
}
