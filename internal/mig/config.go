package mig

import (
	"cmp"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/nearest"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// Config is a file of named configs.
type Config struct {
	file    string
	configs map[string][]entry
}

// entry is one item of a named config.
type entry struct {
	line int
	// filters narrow the entry to models; empty for any.
	filters []filter
	all     bool
	devices []int
	enabled bool
	// counts are the devices by profile name.
	counts []count
}

type filter struct {
	// device is the PCI id of the device above that of the vendor.
	device uint32
	// subsystem says that the filter names one, too. It is not read from GPUs.
	subsystem bool
}

type count struct {
	profile string
	n       int
	line    int
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
// a GPU the last counts.
//
// Profiles are named as the catalogue names them, with + or . before attributes.
// The memory in a name is rounded, and not by all drivers alike: a name counts
// also for the only profile that has the same slices and attributes, and the same
// memory but for a sixteenth.
//
// An entry for all GPUs passes over those that cannot do MIG, or that are lost
// before they told their model. One that names such a GPU by its index must not
// want MIG mode of it. Of a model that can do MIG and is not in the catalogue
// nothing but MIG mode off can be wanted, where it is off.
func (c *Config) Targets(name string, m *gpu.Machine) ([]*Target, error) {
	entries, ok := c.configs[name]
	if !ok {
		return nil, fmt.Errorf("%s has no config %s; there are: %s", c.file, quoted(name), strings.Join(c.namesNear(name), ", "))
	}
	targets := make([]*Target, len(m.GPUs))
	for _, e := range entries {
		for _, i := range e.devices {
			if i >= len(m.GPUs) {
				return nil, fmt.Errorf("%s:%d: devices names GPU %d, the machine has %d", c.file, e.line, i, len(m.GPUs))
			}
		}
		for i := range m.GPUs {
			named := slices.Contains(e.devices, i)
			if !e.all && !named {
				continue
			}
			t, line, err := e.target(&m.GPUs[i], named)
			if err != nil {
				return nil, fmt.Errorf("%s:%d: GPU %d: %w", c.file, line, i, err)
			}
			if t != nil {
				targets[i] = t
			}
		}
	}
	return targets, nil
}

// namesNear lists the configs, those first that are like the name.
func (c *Config) namesNear(name string) []string {
	names := c.Names()
	distance := make(map[string]int, len(names))
	for _, n := range names {
		distance[n] = nearest.Distance(cut(name), cut(n))
	}
	slices.SortStableFunc(names, func(a, b string) int { return distance[a] - distance[b] })
	return names
}

// target is what the entry wants of a GPU, nil where it passes over it. The line is
// that of an error.
func (e *entry) target(g *gpu.GPU, named bool) (*Target, int, error) {
	if match, err := e.matches(g); err != nil || !match {
		return nil, e.line, err
	}
	if !g.MIG.Capable {
		if !named || !e.enabled {
			return nil, 0, nil
		}
		return nil, e.line, fmt.Errorf("%s cannot do MIG; leave it out of devices", cmp.Or(g.Name, "a GPU that does not answer"))
	}
	product := gpu.ProductByName(g.Name)
	if product == nil || product.MIG == nil {
		if !e.enabled && !g.MIG.Enabled && !g.MIG.Pending {
			return nil, 0, nil
		}
		return nil, e.line, fmt.Errorf("the MIG profiles of %s are not known; keep the entry off it by devices or device-filter", quoted(g.Name))
	}
	t := &Target{Enabled: e.enabled}
	for _, c := range e.counts {
		id, err := profileOf(product.MIG, c.profile)
		if err != nil {
			return nil, c.line, fmt.Errorf("%s %w", g.Name, err)
		}
		t.Profiles = append(t.Profiles, slices.Repeat([]int{id}, c.n)...)
	}
	if _, err := placement.ArrangeMIG(product.MIG, nil, t.Profiles); err != nil {
		return nil, e.line, fmt.Errorf("the devices do not fit on %s together: %w", g.Name, err)
	}
	return t, 0, nil
}

// matches says whether the filters let a GPU through. One that matches by a filter
// with a subsystem may not be meant.
func (e *entry) matches(g *gpu.GPU) (bool, error) {
	const nvidia = 0x10de
	id := uint32(g.PCIDeviceID)<<16 | nvidia
	match := len(e.filters) == 0
	unsure := false
	for _, f := range e.filters {
		if f.device == id {
			match = match || !f.subsystem
			unsure = unsure || f.subsystem
		}
	}
	if unsure && !match {
		return false, fmt.Errorf("device-filter names a subsystem of 0x%08X, which is not read; leave out what is after the colon", id)
	}
	return match, nil
}

// profileName is the parts of a name such as "2g.48gb+me.all".
type profileName struct {
	slices, memory int
	attributes     string
}

var profilePattern = regexp.MustCompile(`^([1-9])g\.([1-9][0-9]{0,3})gb(?:[+.]([a-z][a-z.]*)|(-[a-z][a-z.]*))?$`)

// computePattern is the beginning of a name with compute instances.
var computePattern = regexp.MustCompile(`^[1-9]c\.`)

func parseProfile(name string) (profileName, error) {
	if computePattern.MatchString(name) {
		return profileName{}, fmt.Errorf("%s: compute instances are not supported; name the profile of the GPU instance, such as %q", quoted(name), "2g.10gb")
	}
	m := profilePattern.FindStringSubmatch(name)
	if m == nil {
		return profileName{}, fmt.Errorf("%s is not the name of a MIG profile; write one such as %q or %q", quoted(name), "1g.5gb", "1g.10gb+me")
	}
	// The pattern says that these are numbers.
	n, _ := strconv.Atoi(m[1])
	memory, _ := strconv.Atoi(m[2])
	attributes := m[4]
	if m[3] != "" {
		attributes = "+" + m[3]
	}
	return profileName{n, memory, attributes}, nil
}

// profileOf finds a profile by its name.
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
		// GB200 says 1g.23gb or 1g.24gb, 4g.93gb or 4g.95gb. More than that can be
		// another profile: the 1g.18gb of an H200 is not the 1g.20gb of an A100.
		if diff := have.memory - want.memory; 16*max(diff, -diff) <= max(have.memory, want.memory) {
			near = append(near, t.Profiles[i].ID)
		}
	}
	if len(near) == 1 {
		return near[0], nil
	}
	return 0, fmt.Errorf("has no MIG profile %s; there are: %s", name, strings.Join(t.Names(), ", "))
}
