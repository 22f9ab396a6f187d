package mig

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sort"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/ashlar-gpu/ashlar/internal/nearest"
)

// MaxSize is the largest file that ParseConfig reads, in bytes: the limit of a
// Kubernetes ConfigMap.
const MaxSize = 1 << 20

// maxCount is more than any GPU can have of one profile.
const maxCount = 64

// ParseConfig reads a file in the format of mig-parted, version v1:
//
//	version: v1
//	mig-configs:
//	  some-name:                      # entries in order; the last for a GPU counts
//	  - device-filter: "0x20B010DE"   # or a list; default: any model
//	    devices: all                  # or a list of indices
//	    mig-enabled: true
//	    mig-devices: {1g.5gb: 2}      # {} for none; left out where mig-enabled is false
//
// The name of the file is for messages. The error has all problems, 50 at most,
// each as FILE:LINE: TEXT; of a file that is not valid YAML only that is said.
//
// Aliases, anchors and tags of YAML are refused: a small file can grow through them
// without bound.
func ParseConfig(file string, data []byte) (*Config, error) {
	p := &parser{file: file, configs: make(map[string][]entry)}
	if len(data) > MaxSize {
		return nil, fmt.Errorf("%s: is %d bytes long, more than the %d that a ConfigMap can hold", file, len(data), MaxSize)
	}
	documents, err := decode(string(data))
	if err != nil {
		return nil, fmt.Errorf("%s: yaml: line %d: %s", file, syntaxLine(string(data), err), decoderLine.ReplaceAllString(err.Error(), ""))
	}
	switch {
	case len(documents) == 0:
		return nil, fmt.Errorf("%s: is empty; give version and mig-configs", file)
	case len(documents) > 1:
		return nil, fmt.Errorf("%s:%d: is a second YAML document; a config is one, without --- inside", file, documents[1].Line)
	}
	p.top(documents[0])
	if len(p.errs) > 0 {
		return nil, errors.Join(p.errs...)
	}
	return &Config{file: file, configs: p.configs}, nil
}

// decode returns the top node of each YAML document that is not empty.
func decode(text string) ([]*yaml.Node, error) {
	decoder := yaml.NewDecoder(strings.NewReader(text))
	var tops []*yaml.Node
	for {
		var document yaml.Node
		if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
			return tops, nil
		} else if err != nil {
			return nil, err
		}
		if top := document.Content[0]; !isNull(top) {
			tops = append(tops, top)
		}
	}
}

// The decoder puts a line into its messages that is often the one where the
// enclosing block begins, and counted from 0.
var decoderLine = regexp.MustCompile(`^yaml: (line \d+: )?`)

// syntaxLine is the line that ends the shortest beginning of the text which fails
// the same way.
func syntaxLine(text string, err error) int {
	lines := strings.SplitAfter(text, "\n")
	ends := make([]int, len(lines))
	for i, end := 0, 0; i < len(lines); i++ {
		end += len(lines[i])
		ends[i] = end
	}
	return 1 + sort.Search(len(ends)-1, func(i int) bool {
		_, e := decode(text[:ends[i]])
		return e != nil && e.Error() == err.Error()
	})
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// parser collects the configs of a file, and what is wrong.
type parser struct {
	file    string
	configs map[string][]entry
	errs    []error
}

func (p *parser) add(line int, format string, args ...any) {
	const most = 50
	if len(p.errs) < most {
		p.errs = append(p.errs, fmt.Errorf("%s:%d: %s", p.file, line, fmt.Sprintf(format, args...)))
	}
}

// plain refuses what YAML has beyond values.
func (p *parser) plain(n *yaml.Node, what string) bool {
	var kind string
	switch {
	case n.Kind == yaml.AliasNode:
		kind = "aliases (*)"
	case n.Anchor != "":
		kind = "anchors (&)"
	case n.Style&yaml.TaggedStyle != 0:
		kind = "tags (!)"
	default:
		return true
	}
	p.add(n.Line, "%s has YAML %s, which are not supported; write the value out", what, kind)
	return false
}

type field struct{ key, value *yaml.Node }

// fields are the keys of a mapping, each once. It returns false where the node is
// none.
func (p *parser) fields(n *yaml.Node, what string) ([]field, bool) {
	if !p.plain(n, what) {
		return nil, false
	}
	if n.Kind != yaml.MappingNode {
		p.add(n.Line, "%s is %s, not a mapping of keys to values", what, describe(n))
		return nil, false
	}
	var fields []field
	first := make(map[string]int)
	for i := 0; i+1 < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		switch line := first[key.Value]; {
		case !p.plain(key, what) || !p.plain(value, what+"."+short(key.Value)):
		case key.Kind != yaml.ScalarNode || key.Value == "":
			p.add(key.Line, "%s has a key that is %s; a key must be a word", what, describe(key))
		case key.Tag == "!!merge":
			p.add(key.Line, "%s has a YAML merge key, which is not supported; write the keys out", what)
		case line > 0:
			p.add(key.Line, "%s.%s is there twice, first at line %d; keep one", what, short(key.Value), line)
		default:
			first[key.Value] = key.Line
			fields = append(fields, field{key, value})
		}
	}
	return fields, true
}

// object are the values of a mapping with known keys, nil where the node is no
// mapping.
func (p *parser) object(n *yaml.Node, what string, known ...string) map[string]*yaml.Node {
	fields, ok := p.fields(n, what)
	if !ok {
		return nil
	}
	values := make(map[string]*yaml.Node)
	for _, f := range fields {
		if slices.Contains(known, f.key.Value) {
			values[f.key.Value] = f.value
			continue
		}
		hint := "known are " + strings.Join(known, ", ")
		if word := nearest.Word(f.key.Value, known); word != "" {
			hint = "did you mean " + word + "?"
		}
		p.add(f.key.Line, "%s has the unknown key %s; %s", what, short(f.key.Value), hint)
	}
	return values
}

// list are the items of a list that have no aliases, anchors or tags.
func (p *parser) list(n *yaml.Node, what string) []*yaml.Node {
	var items []*yaml.Node
	for i, item := range n.Content {
		if p.plain(item, fmt.Sprintf("%s[%d]", what, i)) {
			items = append(items, item)
		}
	}
	return items
}

func (p *parser) top(n *yaml.Node) {
	keys := p.object(n, "the file", "version", "mig-configs")
	if keys == nil {
		return
	}
	switch v := keys["version"]; {
	case v == nil:
		p.add(n.Line, "version is missing; write version: v1")
	case v.Kind != yaml.ScalarNode || v.Value != "v1":
		p.add(v.Line, "version is %s; v1 is the only one", describe(v))
	}
	configs := keys["mig-configs"]
	if configs == nil {
		p.add(n.Line, "mig-configs is missing; give each config a name under it")
		return
	}
	fields, ok := p.fields(configs, "mig-configs")
	if ok && len(configs.Content) == 0 {
		p.add(configs.Line, "mig-configs is empty; give at least one config")
	}
	for _, f := range fields {
		what := "mig-configs." + short(f.key.Value)
		if f.value.Kind != yaml.SequenceNode || len(f.value.Content) == 0 {
			p.add(f.value.Line, "%s is not a list of at least one entry but %s", what, describe(f.value))
			continue
		}
		for i, item := range f.value.Content {
			p.configs[f.key.Value] = append(p.configs[f.key.Value], p.entry(item, fmt.Sprintf("%s[%d]", what, i)))
		}
	}
}

func (p *parser) entry(n *yaml.Node, what string) entry {
	e := entry{line: n.Line}
	keys := p.object(n, what, "device-filter", "devices", "mig-enabled", "mig-devices")
	if keys == nil {
		return e
	}
	if f := keys["device-filter"]; f != nil {
		e.filters = p.filters(f, what+".device-filter")
	}
	if d := keys["devices"]; d != nil {
		e.all, e.devices = p.devices(d, what+".devices")
	} else {
		p.add(n.Line, "%s.devices is missing; write all, or a list of indices", what)
	}
	switch on := keys["mig-enabled"]; {
	case on == nil:
		p.add(n.Line, "%s.mig-enabled is missing; write true or false", what)
		return e
	case on.Kind != yaml.ScalarNode || on.Tag != "!!bool":
		p.add(on.Line, "%s.mig-enabled is %s, neither true nor false", what, describe(on))
		return e
	default:
		e.enabled = strings.EqualFold(on.Value, "true")
	}
	devices := keys["mig-devices"]
	switch {
	case devices == nil || isNull(devices):
		if e.enabled {
			p.add(n.Line, "%s.mig-devices is missing; name profiles and counts, or write {} for none", what)
		}
	case e.enabled:
		e.counts = p.counts(devices, what+".mig-devices")
	case devices.Kind != yaml.MappingNode || len(devices.Content) > 0:
		p.add(devices.Line, "%s.mig-devices must be empty or left out, since mig-enabled is false", what)
	}
	return e
}

func (p *parser) devices(n *yaml.Node, what string) (all bool, indices []int) {
	if n.Kind == yaml.ScalarNode && n.Value == "all" {
		return true, nil
	}
	if n.Kind != yaml.SequenceNode {
		p.add(n.Line, "%s is neither all nor a list of indices but %s", what, describe(n))
		return false, nil
	}
	for _, item := range p.list(n, what) {
		i, ok := number(item)
		if !ok {
			p.add(item.Line, "%s has %s, which is not the index of a GPU; they are from 0", what, describe(item))
		}
		indices = append(indices, i)
	}
	return false, indices
}

func (p *parser) counts(n *yaml.Node, what string) []count {
	fields, ok := p.fields(n, what)
	if !ok {
		return nil
	}
	var counts []count
	zeros := 0
	for _, f := range fields {
		if _, err := parseProfile(f.key.Value); err != nil {
			p.add(f.key.Line, "%s: %v", what, err)
			continue
		}
		switch c, ok := number(f.value); {
		case !ok || c > maxCount:
			p.add(f.value.Line, "%s.%s is %s, not a number from 0 to %d", what, f.key.Value, describe(f.value), maxCount)
		case c == 0:
			zeros++
		default:
			counts = append(counts, count{f.key.Value, c, f.key.Line})
		}
	}
	if zeros > 0 && zeros == len(fields) {
		p.add(n.Line, "%s has no device; give a count above 0, or write {} for none", what)
	}
	return counts
}

var filterPattern = regexp.MustCompile(`^0[xX]([0-9A-Fa-f]{8})(:0[xX][0-9A-Fa-f]{8})?$`)

// filters reads one filter or a list. None at all, as mig-parted has it, is any
// model.
func (p *parser) filters(n *yaml.Node, what string) []filter {
	items := []*yaml.Node{n}
	if n.Kind == yaml.SequenceNode {
		items = p.list(n, what)
	} else if n.Kind == yaml.ScalarNode && n.Tag == "!!str" && n.Value == "" {
		return nil
	}
	var filters []filter
	for _, item := range items {
		m := filterPattern.FindStringSubmatch(item.Value)
		if item.Kind != yaml.ScalarNode || m == nil {
			p.add(item.Line, "%s has %s; write the PCI ids of device and vendor, such as \"0x20B010DE\"", what, describe(item))
			continue
		}
		// The pattern says that it is a number of 32 bits.
		id, _ := strconv.ParseUint(m[1], 16, 32)
		filters = append(filters, filter{uint32(id), m[2] != ""})
	}
	return filters
}

// number reads a whole number from 0, written as one writes it.
func number(n *yaml.Node) (int, bool) {
	i, err := strconv.Atoi(n.Value)
	ok := err == nil && i >= 0 && n.Kind == yaml.ScalarNode && n.Tag == "!!int" && strconv.Itoa(i) == n.Value
	return i, ok
}

// describe names a value for a message.
func describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode && len(n.Content) == 0:
		return "an empty list"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case isNull(n):
		return "empty"
	}
	return quoted(n.Value)
}

const maxShown = 100 // bytes; no profile, key or usual name is longer

// quoted shows text of the file in a message, cut where it is long.
func quoted(s string) string {
	if len(s) > maxShown {
		return strconv.Quote(cut(s)) + "..."
	}
	return strconv.Quote(s)
}

func cut(s string) string { return s[:min(len(s), maxShown)] }

// short is a name of the file as part of a path.
func short(s string) string {
	if q := quoted(s); q != `"`+s+`"` {
		return q
	}
	return s
}
