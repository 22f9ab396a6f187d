package machine

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Limits of a description. They are far above what is built and keep a typing
// error from becoming a machine of millions of GPUs.
const (
	maxDescription = 1 << 20 // bytes
	maxGPUs        = 64
	maxCPUs        = 1 << 16
	maxNUMANodes   = 64
	maxMemoryMiB   = 1 << 30
	maxMinor       = 1 << 20
	maxInstanceID  = 1023
	maxProblems    = 20
)

const (
	defaultDriver = "580.95.05"
	defaultCUDA   = "13.0"
	// defaultClass is the PCI class of a 3D controller.
	defaultClass = 0x0302
)

// ParseDescription reads a description; the package's documentation lists the
// keys. The error has one line per problem, "FILE:LINE: FIELD: what is wrong and
// what to do"; file is used for that alone.
func ParseDescription(file string, data []byte) (*Description, error) {
	if len(data) > maxDescription {
		return nil, fmt.Errorf("%s: a machine description has at most %d bytes, this has %d", file, maxDescription, len(data))
	}
	p := parser{file: file}
	root, err := p.document(data)
	if err != nil {
		return nil, err
	}
	d := p.description(root)
	if len(p.problems) > 0 {
		return nil, errors.Join(p.problems...)
	}
	d.text = slices.Clone(data)
	return d, nil
}

// parser turns YAML nodes into a Description and collects what is wrong.
type parser struct {
	file     string
	problems []error
}

func (p *parser) fail(n *yaml.Node, field, format string, args ...any) {
	if len(p.problems) == maxProblems {
		return // nobody reads more at once
	}
	if field != "" {
		field += ": "
	}
	p.problems = append(p.problems, fmt.Errorf("%s:%d: %s%s", p.file, n.Line, field, fmt.Sprintf(format, args...)))
}

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// document returns the one value of a YAML file.
func (p *parser) document(data []byte) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(strings.NewReader(string(data)))
	var doc, next yaml.Node
	err := decoder.Decode(&doc)
	if errors.Is(err, io.EOF) || err == nil && len(doc.Content) == 0 {
		return nil, fmt.Errorf("%s: is empty; a machine needs at least name, cpus, memory and gpus", p.file)
	}
	if err == nil {
		if err = decoder.Decode(&next); errors.Is(err, io.EOF) {
			return doc.Content[0], nil
		} else if err == nil {
			return nil, fmt.Errorf("%s:%d: a second document; put each machine in a file of its own", p.file, next.Line)
		}
	}
	// The parser puts the line into its text.
	text, line := err.Error(), ""
	if m := yamlLine.FindStringSubmatch(text); m != nil {
		text = text[len(m[0]):]
		if m[1] != "" {
			line = ":" + m[1]
		}
	}
	return nil, fmt.Errorf("%s%s: not valid YAML: %s", p.file, line, text)
}

// object returns the values of a mapping by key, without those that are null. It
// has no entry for what the file does not say.
func (p *parser) object(path string, n *yaml.Node, known ...string) map[string]*yaml.Node {
	n = value(n)
	if n.Kind != yaml.MappingNode {
		p.fail(n, path, "want a mapping with keys of %s", strings.Join(known, ", "))
		return nil
	}
	values := make(map[string]*yaml.Node)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], value(n.Content[i+1])
		switch {
		case !slices.Contains(known, k.Value):
			p.fail(k, path, "unknown key %s: %s", quoted(k.Value), oneOf(k.Value, known))
		case values[k.Value] != nil:
			p.fail(k, join(path, k.Value), "is given twice, first in line %d; remove one", values[k.Value].Line)
		case v.Tag != "!!null":
			values[k.Value] = v
		}
	}
	return values
}

// list returns the items of a sequence; none of nil.
func (p *parser) list(path string, n *yaml.Node) []*yaml.Node {
	if n == nil {
		return nil
	}
	if n.Kind != yaml.SequenceNode {
		p.fail(n, path, "want a list")
		return nil
	}
	return n.Content
}

// number reads a whole number in a range, or returns the default for nil.
func (p *parser) number(path string, n *yaml.Node, least, most, otherwise int) int {
	if n == nil {
		return otherwise
	}
	i, err := strconv.Atoi(n.Value)
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || err != nil || i < least || i > most {
		p.fail(n, path, "want a whole number from %d to %d, not %s", least, most, quoted(n.Value))
		return otherwise
	}
	return i
}

// text reads one line of text, or returns the default for nil. Numbers are
// taken as written, so that cuda: 13.0 needs no quotes.
func (p *parser) text(path string, n *yaml.Node, otherwise string) string {
	if n == nil {
		return otherwise
	}
	if n.Kind != yaml.ScalarNode || n.Value == "" || strings.ContainsFunc(n.Value, func(r rune) bool { return r < ' ' }) {
		p.fail(n, path, "want one line of text")
		return otherwise
	}
	return n.Value
}

// maybe is text that may be empty, for what is not known.
func (p *parser) maybe(path string, n *yaml.Node, otherwise string) string {
	if n != nil && n.Kind == yaml.ScalarNode && n.Value == "" {
		return ""
	}
	return p.text(path, n, otherwise)
}

// id reads a number of 16 bits, usually written with 0x.
func (p *parser) id(path string, n *yaml.Node, otherwise uint16) uint16 {
	if n == nil {
		return otherwise
	}
	i, err := strconv.ParseUint(n.Value, 0, 16)
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || err != nil {
		p.fail(n, path, "want a number from 0 to 0xffff, not %s", quoted(n.Value))
	}
	return uint16(i)
}

// each returns the value of a key for each of the GPUs of a group: its own where the
// file has a list, and else the same one.
func (p *parser) each(path string, n *yaml.Node, count int) []*yaml.Node {
	values := make([]*yaml.Node, count)
	if n != nil && n.Kind == yaml.SequenceNode {
		if len(n.Content) != count {
			p.fail(n, path, "lists %d, the group has %d GPUs", len(n.Content), count)
			return values
		}
		for i := range values {
			values[i] = value(n.Content[i])
		}
		return values
	}
	for i := range values {
		values[i] = n
	}
	return values
}

func (p *parser) yes(path string, n *yaml.Node, otherwise bool) bool {
	if n == nil {
		return otherwise
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" {
		p.fail(n, path, "want true or false, not %s", quoted(n.Value))
		return otherwise
	}
	return strings.EqualFold(n.Value, "true")
}

// pcieLevels are the names that a description may use.
var pcieLevels = func() []string {
	var names []string
	for l := gpu.PCIeUnknown; l <= gpu.PCIeInternal; l++ {
		names = append(names, l.String())
	}
	return names
}()

// pcie reads a PCIe level, or returns nil for nil.
func (p *parser) pcie(path string, n *yaml.Node) *gpu.PCIeLevel {
	if n == nil {
		return nil
	}
	level, ok := gpu.ParsePCIeLevel(n.Value)
	if !ok {
		p.fail(n, path, "no PCIe level is named %s: %s", quoted(n.Value), oneOf(n.Value, pcieLevels))
	}
	return &level
}

// value follows an alias to what it stands for.
func value(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// quoted shows text of the file in a message, cut where it is long.
func quoted(s string) string {
	const most = 60 // bytes
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strconv.Quote(s)
}

var quantity = regexp.MustCompile(`^[1-9][0-9]{0,11}([KMGT]i|[kMGT])?$`)

func (p *parser) description(root *yaml.Node) *Description {
	keys := p.object("", root, "name", "instanceType", "board", "cpus", "memory", "numaNodes", "driver", "cuda", "gpus", "links")
	if keys == nil {
		return nil
	}
	for _, k := range []string{"name", "cpus", "memory", "gpus"} {
		if keys[k] == nil {
			p.fail(root, k, "is missing")
		}
	}
	d := &Description{Name: p.text("name", keys["name"], ""), Host: Host{
		CPUs:      p.number("cpus", keys["cpus"], 1, maxCPUs, 1),
		Memory:    p.text("memory", keys["memory"], ""),
		NUMANodes: p.number("numaNodes", keys["numaNodes"], 1, maxNUMANodes, 1),
	}}
	d.InstanceType = p.text("instanceType", keys["instanceType"], d.Name)
	d.hardware.board = p.maybe("board", keys["board"], d.InstanceType)
	if d.Memory != "" && !quantity.MatchString(d.Memory) {
		p.fail(keys["memory"], "memory", "%s is not a quantity such as 512Gi", quoted(d.Memory))
	}
	d.hardware.driver = p.version("driver", keys["driver"], driverVersion, defaultDriver)
	if v := keys["cuda"]; v == nil || v.Kind != yaml.ScalarNode || v.Value != "" {
		d.hardware.cuda = p.version("cuda", v, cudaVersion, defaultCUDA)
	}
	p.gpus(d, keys["gpus"], keys["links"])
	return d
}

// What NVML reports: GPU feature discovery refuses to label with anything else.
var (
	driverVersion = regexp.MustCompile(`^[0-9]+\.[0-9]+(\.[0-9]+)?$`)
	cudaVersion   = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)
)

func (p *parser) version(path string, n *yaml.Node, form *regexp.Regexp, otherwise string) string {
	v := p.text(path, n, otherwise)
	if !form.MatchString(v) {
		p.fail(n, path, "%s is not a version such as %s", quoted(v), otherwise)
	}
	return v
}
