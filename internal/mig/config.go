package mig

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/nearest"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// MaxSize is the largest file that ParseConfig reads, in bytes: the limit of a
// Kubernetes ConfigMap.
const MaxSize = 1 << 20

// maxCount is more than any GPU can have of one profile.
const maxCount = 64

// Config is a file of named configs.
type Config struct {
	file    string
	configs map[string][]entry
}

// entry is one item of a named config.
type entry struct {
	line int
	// filters are device and vendor ids, and of the subsystem; empty for any.
	filters []filter
	all     bool
	devices []int
	enabled bool
	// counts are the devices by profile name.
	counts []count
}

type filter struct {
	device uint32
	// subsystem says that the filter names one, which is not read here.
	subsystem bool
}

type count struct {
	profile string
	n       int
	line    int
}

// ParseConfig reads a file in the format of mig-parted, version v1. The name of
// the file is for messages. All problems are in the error, each with its line.
func ParseConfig(file string, data []byte) (*Config, error) {
	p := parser{file: file}
	if len(data) > MaxSize {
		return nil, fmt.Errorf("%s: is %d bytes long, more than the %d that a ConfigMap can hold", file, len(data), MaxSize)
	}
	var document yaml.Node
	if err := yaml.Unmarshal(data, &document); err != nil {
		return nil, fmt.Errorf("%s: %w", file, err)
	}
	if len(document.Content) == 0 {
		return nil, fmt.Errorf("%s: is empty; give version and mig-configs", file)
	}
	c := &Config{file: file, configs: make(map[string][]entry)}
	top := p.fields(document.Content[0], "the file", "version", "mig-configs")
	if v := top["version"]; v == nil {
		p.add(1, "version is missing: write version: v1")
	} else if v.Value != "v1" {
		p.add(v.Line, "version is %q, and v1 is the only one", v.Value)
	}
	configs := top["mig-configs"]
	if configs == nil {
		p.add(1, "mig-configs is missing")
	} else {
		for _, f := range p.pairs(configs, "mig-configs") {
			name := f.key.Value
			if _, twice := c.configs[name]; twice {
				p.add(f.key.Line, "mig-configs.%s is there twice", name)
			}
			if f.value.Kind != yaml.SequenceNode || len(f.value.Content) == 0 {
				p.add(f.value.Line, "mig-configs.%s is not a list of at least one entry", name)
			}
			c.configs[name] = nil
			for i, item := range f.value.Content {
				if f.value.Kind == yaml.SequenceNode {
					c.configs[name] = append(c.configs[name], p.entry(item, fmt.Sprintf("mig-configs.%s[%d]", name, i)))
				}
			}
		}
	}
	if len(p.errs) > 0 {
		return nil, errors.Join(p.errs...)
	}
	return c, nil
}

type parser struct {
	file string
	errs []error
}

func (p *parser) add(line int, format string, args ...any) {
	const most = 50
	if len(p.errs) < most {
		p.errs = append(p.errs, fmt.Errorf("%s:%d: %s", p.file, line, fmt.Sprintf(format, args...)))
	}
}

type pair struct{ key, value *yaml.Node }

// pairs are the keys of a mapping. An alias stands for what it names.
func (p *parser) pairs(n *yaml.Node, what string) []pair {
	n = resolve(n)
	if n.Kind != yaml.MappingNode {
		p.add(n.Line, "%s is not a mapping of keys to values", what)
		return nil
	}
	var list []pair
	for i := 0; i+1 < len(n.Content); i += 2 {
		if n.Content[i].Kind != yaml.ScalarNode {
			p.add(n.Content[i].Line, "%s has a key that is not a text", what)
			continue
		}
		list = append(list, pair{n.Content[i], resolve(n.Content[i+1])})
	}
	return list
}

func resolve(n *yaml.Node) *yaml.Node {
	for n.Kind == yaml.AliasNode {
		n = n.Alias
	}
	return n
}

// fields are the values of a mapping with known keys.
func (p *parser) fields(n *yaml.Node, what string, known ...string) map[string]*yaml.Node {
	values := make(map[string]*yaml.Node)
	for _, f := range p.pairs(n, what) {
		key := f.key.Value
		switch {
		case !slices.Contains(known, key):
			hint := "known are " + strings.Join(known, ", ")
			if word := nearest.Word(key, known); word != "" {
				hint = "did you mean " + word + "?"
			}
			p.add(f.key.Line, "%s has the unknown key %s; %s", what, key, hint)
		case values[key] != nil:
			p.add(f.key.Line, "%s has the key %s twice", what, key)
		default:
			values[key] = f.value
		}
	}
	return values
}

func (p *parser) entry(n *yaml.Node, what string) entry {
	e := entry{line: n.Line}
	fields := p.fields(n, what, "device-filter", "devices", "mig-enabled", "mig-devices")
	if f := fields["device-filter"]; f != nil {
		e.filters = p.filters(f, what+".device-filter")
	}
	switch d := fields["devices"]; {
	case d == nil:
		p.add(e.line, "%s.devices is missing: write all or a list of indices", what)
	case d.Kind == yaml.ScalarNode && d.Value == "all":
		e.all = true
	case d.Kind == yaml.SequenceNode:
		for _, item := range d.Content {
			i, err := strconv.Atoi(resolve(item).Value)
			if err != nil || i < 0 {
				p.add(item.Line, "%s.devices has %q, which is not an index from 0", what, resolve(item).Value)
			}
			e.devices = append(e.devices, i)
		}
	default:
		p.add(d.Line, "%s.devices is neither all nor a list of indices", what)
	}
	switch m := fields["mig-enabled"]; {
	case m == nil:
		p.add(e.line, "%s.mig-enabled is missing: write true or false", what)
	case m.Tag != "!!bool":
		p.add(m.Line, "%s.mig-enabled is %q, neither true nor false", what, m.Value)
	default:
		e.enabled = strings.EqualFold(m.Value, "true")
	}
	devices := fields["mig-devices"]
	switch {
	case devices == nil && e.enabled:
		p.add(e.line, "%s.mig-devices is missing: name profiles and counts, or write {} for none", what)
	case devices != nil:
		e.counts = p.counts(devices, what+".mig-devices")
		if !e.enabled && len(e.counts) > 0 {
			p.add(devices.Line, "%s.mig-devices must be empty, since mig-enabled is false", what)
		}
	}
	return e
}

func (p *parser) counts(n *yaml.Node, what string) []count {
	var counts []count
	sum := 0
	seen := make(map[string]bool)
	for _, f := range p.pairs(n, what) {
		name := f.key.Value
		c, err := strconv.Atoi(f.value.Value)
		switch {
		case f.value.Kind != yaml.ScalarNode || err != nil || c < 0 || c > maxCount:
			p.add(f.value.Line, "%s.%s is %q, not a number from 0 to %d", what, name, f.value.Value, maxCount)
		case seen[name]:
			p.add(f.key.Line, "%s has %s twice", what, name)
		}
		if _, err := parseProfile(name); err != nil {
			p.add(f.key.Line, "%s: %v", what, err)
		}
		seen[name] = true
		sum += c
		if c > 0 {
			counts = append(counts, count{name, c, f.key.Line})
		}
	}
	if len(seen) > 0 && sum == 0 {
		p.add(n.Line, "%s has no device: give a count above 0, or write {} for none", what)
	}
	return counts
}

var filterPattern = regexp.MustCompile(`^0x([0-9A-Fa-f]{8})(:0x[0-9A-Fa-f]{8})?$`)

func (p *parser) filters(n *yaml.Node, what string) []filter {
	items := []*yaml.Node{n}
	if n.Kind == yaml.SequenceNode {
		items = n.Content
	}
	var filters []filter
	for _, item := range items {
		item = resolve(item)
		m := filterPattern.FindStringSubmatch(item.Value)
		if item.Kind != yaml.ScalarNode || m == nil {
			p.add(item.Line, "%s has %q: write \"0xDDDDVVVV\", the PCI ids of device and vendor", what, item.Value)
			continue
		}
		id, err := strconv.ParseUint(m[1], 16, 32)
		if err != nil {
			continue // the pattern says that it is one
		}
		filters = append(filters, filter{uint32(id), m[2] != ""})
	}
	return filters
}

// Names lists the configs in alphabetical order.
func (c *Config) Names() []string { return slices.Sorted(maps.Keys(c.configs)) }

// Target is what is wanted of one GPU.
type Target struct {
	// Enabled is the wanted MIG mode.
	Enabled bool
	// Profiles are the ids of the wanted devices, one for each, whose places are
	// free to choose. They are used where Instances is empty.
	Profiles []int
	// Instances are the wanted devices with their places.
	Instances []gpu.MIGInstance
}

// Targets returns what a named config wants of each GPU of the machine, in the
// order of indices; nil for a GPU that it leaves as it is. Of several entries for
// a GPU the last counts. An entry for all GPUs passes over those that cannot do
// MIG, or that are lost before they told their model; one that names such a GPU by
// its index is an error.
func (c *Config) Targets(name string, m *gpu.Machine) ([]*Target, error) {
	entries, ok := c.configs[name]
	if !ok {
		names := c.Names()
		slices.SortStableFunc(names, func(a, b string) int {
			return cmp.Compare(nearest.Distance(name, a), nearest.Distance(name, b))
		})
		return nil, fmt.Errorf("%s has no config %q; there are: %s", c.file, name, strings.Join(names, ", "))
	}
	targets := make([]*Target, len(m.GPUs))
	for _, e := range entries {
		for _, i := range e.devices {
			if i >= len(m.GPUs) {
				return nil, fmt.Errorf("%s:%d: devices names GPU %d, the machine has %d", c.file, e.line, i, len(m.GPUs))
			}
		}
		for i := range m.GPUs {
			g := &m.GPUs[i]
			named := slices.Contains(e.devices, i)
			if !e.all && !named || !matches(e.filters, g) {
				continue
			}
			t, err := e.target(g, named)
			if err != nil {
				return nil, fmt.Errorf("%s:%d: GPU %d: %w", c.file, e.line, i, err)
			}
			if t != nil {
				targets[i] = t
			}
		}
	}
	return targets, nil
}

func matches(filters []filter, g *gpu.GPU) bool {
	const nvidia = 0x10de
	id := uint32(g.PCIDeviceID)<<16 | nvidia
	return len(filters) == 0 || slices.ContainsFunc(filters, func(f filter) bool { return f.device == id })
}

// target is what the entry wants of a GPU, nil where it passes over it.
func (e *entry) target(g *gpu.GPU, named bool) (*Target, error) {
	if slices.ContainsFunc(e.filters, func(f filter) bool { return f.subsystem }) {
		return nil, errors.New("device-filter names a subsystem, which is not read: leave out what is after the colon")
	}
	product := gpu.ProductByName(g.Name)
	if !g.MIG.Capable || product == nil || product.MIG == nil {
		switch {
		case !named || !e.enabled && !g.MIG.Capable:
			return nil, nil //nolint:nilnil // nil is documented as "left as it is"
		case !g.MIG.Capable:
			return nil, fmt.Errorf("%s cannot do MIG: leave it out of devices", cmp.Or(g.Name, "a GPU that does not answer"))
		}
		return nil, fmt.Errorf("the MIG profiles of %s are not known: leave it out of devices", g.Name)
	}
	t := &Target{Enabled: e.enabled}
	for _, c := range e.counts {
		id, err := profileOf(product.MIG, c.profile)
		if err != nil {
			return nil, err
		}
		for range c.n {
			t.Profiles = append(t.Profiles, id)
		}
	}
	if _, err := placement.ArrangeMIG(product.MIG, nil, t.Profiles); err != nil {
		return nil, err
	}
	return t, nil
}

// profileName is the parts of a name such as "2g.48gb+me.all".
type profileName struct {
	slices, memory int
	attributes     string
}

var profilePattern = regexp.MustCompile(`^([1-9])g\.([1-9][0-9]{0,3})gb(?:([+.])([a-z][a-z.]*)|(-[a-z][a-z.]*))?$`)

func parseProfile(name string) (profileName, error) {
	m := profilePattern.FindStringSubmatch(name)
	if m == nil {
		return profileName{}, fmt.Errorf("%q is not the name of a MIG profile: write one such as 1g.5gb or 1g.10gb+me", name)
	}
	var p profileName
	// The pattern says that these are numbers.
	p.slices, _ = strconv.Atoi(m[1])
	p.memory, _ = strconv.Atoi(m[2])
	p.attributes = m[5]
	if m[4] != "" {
		p.attributes = "+" + m[4]
	}
	return p, nil
}

// profileOf finds a profile by its name. The memory in it is rounded, and drivers
// do not round alike: where no name is the same, the profile counts that has the
// same slices and attributes and about the same memory, if there is one such.
func profileOf(t *gpu.MIGTable, name string) (int, error) {
	want, err := parseProfile(name)
	if err != nil {
		return 0, err
	}
	var near []int
	for i := range t.Profiles {
		have, err := parseProfile(t.Profiles[i].Name)
		if err != nil || have.slices != want.slices || have.attributes != want.attributes {
			continue
		}
		if have == want {
			return t.Profiles[i].ID, nil
		}
		if diff := have.memory - want.memory; 8*max(diff, -diff) <= want.memory {
			near = append(near, t.Profiles[i].ID)
		}
	}
	if len(near) == 1 {
		return near[0], nil
	}
	return 0, fmt.Errorf("has no MIG profile %s; there are: %s", name, strings.Join(t.Names(), ", "))
}
