package sharing

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Plan says what a node with the given machine offers under the configuration.
// Unhealthy and lost GPUs keep their devices, which carry the state: who serves
// the plan decides what to withhold.
//
// The error is of type Errors where the configuration is at fault, by itself or
// for this machine: a breach of migStrategy "single", one name for two
// resources, two exclusive views of a GPU, MPS. Any other error is that of
// gpu.Machine.Validate. Warnings are about settings that do nothing on this
// machine, and GPUs that are left out.
func (c *Config) Plan(m *gpu.Machine) (*Plan, []Warning, error) {
	if errs := c.validate(); len(errs) > 0 {
		return nil, nil, errs
	}
	if err := m.Validate(); err != nil {
		return nil, nil, fmt.Errorf("machine: %w", err)
	}
	if c.MPS != nil {
		return nil, nil, Errors{c.problem(mpsKey, "MPS is not served; share by %s instead, with the same resources", timeSlicingKey)}
	}
	p := planner{Config: c, bases: make(map[string][]device)}
	p.collect(m)
	p.share()
	if len(p.errs) > 0 {
		p.errs.byLine()
		return nil, nil, p.errs
	}
	slices.SortFunc(p.plan.Resources, func(a, b Resource) int { return strings.Compare(a.Name, b.Name) })
	warningsByLine(p.warnings)
	return &p.plan, p.warnings, nil
}

// planner makes one plan.
type planner struct {
	*Config
	plan     Plan
	warnings []Warning
	errs     Errors
	// whole are the GPUs that are offered whole, in index order.
	whole []device
	// bases are the devices before sharing by resource name, in the order of the
	// plan.
	bases map[string][]device
}

// device is a whole GPU or a MIG device with all names that a list may use.
type device struct {
	Device
	names []string
}

func (p *planner) warn(key, format string, args ...any) {
	p.warnings = append(p.warnings, p.warning(key, format, args...))
}

func (p *planner) fail(key, format string, args ...any) {
	p.errs = append(p.errs, p.problem(key, format, args...))
}

const migStrategyKey = "flags.migStrategy"

// collect fills bases.
func (p *planner) collect(m *gpu.Machine) {
	strategy := p.Flags.MIGStrategy
	anyMIG := slices.ContainsFunc(m.GPUs, func(g gpu.GPU) bool { return g.MIG.Enabled })
	if strategy == MIGSingle && anyMIG {
		p.checkSingle(m)
	}
	for i := range m.GPUs {
		g := &m.GPUs[i]
		switch {
		case !g.MIG.Enabled && strategy == MIGSingle && anyMIG:
			// A breach, unless the GPU is lost: then its mode may not be known.
			p.warn(migStrategyKey, "GPU %d (%s) is lost and not known to be in MIG mode, while others are; it is left out", g.Index, g.UUID)
		case !g.MIG.Enabled:
			d := wholeGPU(g)
			p.whole = append(p.whole, d)
			p.base(p.Resources.GPUs, g.Name, gpuName, d)
		case strategy == MIGNone:
			p.warn(migStrategyKey, "GPU %d (%s) is in MIG mode and cannot be used as a whole; it is left out; set single or mixed to offer its MIG devices, or turn its MIG mode off", g.Index, g.UUID)
		case len(g.MIG.Devices) == 0:
			p.warn(migStrategyKey, "GPU %d (%s) is in MIG mode and has no MIG devices; it is left out", g.Index, g.UUID)
		default:
			for j := range g.MIG.Devices {
				d := &g.MIG.Devices[j]
				name := gpuName
				if strategy == MIGMixed {
					name = domain + gpu.MIGResource(d.Profile)
				}
				p.base(p.Resources.MIG, d.Profile, name, migDevice(g, d))
			}
		}
	}
}

// checkSingle reports what keeps the MIG devices of a machine from being one
// resource. A lost GPU cannot breach the rules by what is not known of it: it
// would take the healthy ones with it.
func (p *planner) checkSingle(m *gpu.Machine) {
	const remedy = "set flags.migStrategy to mixed"
	var first *gpu.GPU // that has MIG devices
	for i := range m.GPUs {
		g := &m.GPUs[i]
		lost := g.Health.State == gpu.Lost
		switch {
		case !g.MIG.Enabled && !lost:
			p.fail(migStrategyKey, "single needs all GPUs in MIG mode or none, GPU %d (%s) is not in MIG mode while others are; turn its MIG mode on, or %s", g.Index, g.UUID, remedy)
		case g.MIG.Enabled && len(g.MIG.Devices) == 0 && !lost:
			p.fail(migStrategyKey, "single needs MIG devices on every GPU, GPU %d (%s) has none; create them, or %s", g.Index, g.UUID, remedy)
		}
		if !g.MIG.Enabled {
			continue
		}
		for j := range g.MIG.Devices {
			if first == nil {
				first = g
			}
			// Profile ids are those of one product.
			if d, want := &g.MIG.Devices[j], &first.MIG.Devices[0]; g.Name != first.Name || d.ProfileID != want.ProfileID {
				p.fail(migStrategyKey, "single needs MIG devices of one type, GPU %d (%s, %s) has a %s and GPU %d (%s) a %s; make them alike, or %s",
					g.Index, g.UUID, g.Name, d.Profile, first.Index, first.Name, want.Profile, remedy)
				break
			}
		}
	}
}

func wholeGPU(g *gpu.GPU) device {
	index := strconv.Itoa(g.Index)
	return device{
		Device{ID: gpu.DeviceID{Base: g.UUID, Slot: gpu.NoSlot}, GPU: g.UUID, Index: index, NUMA: g.NUMA, Health: g.Health},
		[]string{index, g.UUID},
	}
}

func migDevice(g *gpu.GPU, d *gpu.MIGDevice) device {
	index := fmt.Sprintf("%d:%d", g.Index, d.Index)
	return device{
		Device{ID: gpu.DeviceID{Base: d.UUID, Slot: gpu.NoSlot}, GPU: g.UUID, Index: index, NUMA: g.NUMA, Health: g.HealthOf(d.UUID)},
		[]string{index, d.UUID, fmt.Sprintf("MIG-%s/%d/%d", g.UUID, d.GI, d.CI)},
	}
}

// base puts a device under the name of the first pattern that matches its kind.
func (p *planner) base(patterns []ResourcePattern, kind, name string, d device) {
	for _, pattern := range patterns {
		if matches(pattern.Pattern, kind) {
			name = pattern.Name
			break
		}
	}
	p.bases[name] = append(p.bases[name], d)
}

// matches says whether the pattern, with "*" for any text, is the whole of s.
func matches(pattern, s string) bool {
	head, rest, wild := strings.Cut(pattern, "*")
	if !wild {
		return pattern == s
	}
	s, ok := strings.CutPrefix(s, head)
	if !ok {
		return false
	}
	parts := strings.Split(rest, "*")
	last := len(parts) - 1
	for _, part := range parts[:last] { // the earliest place leaves most to the others
		if _, s, ok = strings.Cut(s, part); !ok {
			return false
		}
	}
	return strings.HasSuffix(s, parts[last])
}

// share turns bases into the resources of the plan.
func (p *planner) share() {
	var sharing Sharing
	if p.TimeSlicing != nil {
		sharing = *p.TimeSlicing
	}
	shared := make(map[string]bool)  // UUIDs of what is time-sliced
	planned := make(map[string]bool) // names of bases that an entry shares
	for i := range sharing.Resources {
		e, key := &sharing.Resources[i], entryKey(timeSlicingKey, i)
		if e.exclusive() {
			continue
		}
		devices := p.bases[e.Name]
		if len(devices) == 0 {
			p.warn(key+".name", "this node has no %s, it has %s; the entry is skipped", e.Name,
				cmp.Or(strings.Join(p.baseNames(), ", "), "no resource at all"))
			continue
		}
		planned[e.Name] = true
		covered := p.pick(devices, e.Devices, key+".devices", "the devices of "+e.Name)
		for uuid := range covered {
			shared[uuid] = true
		}
		p.timeSlice(&sharing, e, key, covered)
	}
	for _, name := range p.baseNames() {
		if !planned[name] {
			p.add(Resource{Name: name, Strategy: None, Replicas: 1, Devices: slots(p.bases[name], nil, 0)})
		}
	}
	p.exclusive(sharing.Resources, shared)
}

// timeSlice adds the resource of an entry, two where it renames some of the
// devices.
func (p *planner) timeSlice(s *Sharing, e *SharedResource, key string, covered map[string]bool) {
	devices, name := p.bases[e.Name], s.sharedName(e)
	if name != e.Name {
		if len(p.bases[name]) > 0 {
			p.fail(key+".rename", "%s is the name of other devices of this node; choose another", name)
		}
		rest := slices.DeleteFunc(slices.Clone(devices), func(d device) bool { return covered[d.ID.Base] })
		devices = slices.DeleteFunc(slices.Clone(devices), func(d device) bool { return !covered[d.ID.Base] })
		p.add(Resource{Name: e.Name, Strategy: None, Replicas: 1, Devices: slots(rest, nil, 0)})
	}
	r := Resource{Name: name, Strategy: None, Replicas: 1, Devices: slots(devices, covered, e.Replicas)}
	if len(covered) > 0 {
		r.Strategy, r.Replicas, r.FailRequestsGreaterThanOne = TimeSlicing, e.Replicas, s.FailRequestsGreaterThanOne
	}
	p.add(r)
}

// exclusive adds the exclusive views of the GPUs that are shared.
func (p *planner) exclusive(entries []SharedResource, shared map[string]bool) {
	gpus := slices.DeleteFunc(slices.Clone(p.whole), func(d device) bool { return !shared[d.ID.Base] })
	viewed := make(map[string]string) // UUID of a GPU -> name of its exclusive view
	for i := range entries {
		e, key := &entries[i], entryKey(timeSlicingKey, i)
		if !e.exclusive() {
			continue
		}
		if len(gpus) == 0 {
			p.warn(key+".name", "no whole GPU of this node is shared, so there is nothing to give out exclusively; %s is not offered", e.Name)
			continue
		}
		covered := p.pick(gpus, e.Devices, key+".devices", "the shared GPUs")
		r := Resource{Name: e.Name, Strategy: None, Replicas: 1, Exclusive: true}
		for _, d := range gpus {
			if !covered[d.ID.Base] {
				continue
			}
			if other, twice := viewed[d.GPU]; twice {
				p.fail(key+".devices", "GPU %s has an exclusive view already, %s; set devices of both apart", d.Index, other)
			}
			viewed[d.GPU] = e.Name
			r.Devices = append(r.Devices, d.Device)
		}
		p.add(r)
	}
}

// pick returns the UUIDs of the devices that are selected. The key is that of
// the selection, and of is what it selects from, for warnings.
func (p *planner) pick(devices []device, d Devices, key, of string) map[string]bool {
	picked := make(map[string]bool)
	if len(d.List) > 0 {
		for i, name := range d.List {
			at := fmt.Sprintf("%s[%d]", key, i)
			j := slices.IndexFunc(devices, func(d device) bool { return slices.Contains(d.names, name) })
			switch {
			case j < 0:
				p.warn(at, "%s is none of %s on this node; it is skipped", name, of)
			case picked[devices[j].ID.Base]:
				p.warn(at, "%s is device %s, which the list names already; remove one", name, devices[j].Index)
			default:
				picked[devices[j].ID.Base] = true
			}
		}
		return picked
	}
	if d.Count > 0 {
		if d.Count > len(devices) {
			p.warn(key, "selects the first %d of %s, this node has %d; all are taken", d.Count, of, len(devices))
		}
		devices = devices[:min(d.Count, len(devices))]
	}
	for _, d := range devices {
		picked[d.ID.Base] = true
	}
	return picked
}

// slots returns the devices, those that are covered as n slots each.
func slots(devices []device, covered map[string]bool, n int) []Device {
	var all []Device
	for _, d := range devices {
		if !covered[d.ID.Base] {
			all = append(all, d.Device)
			continue
		}
		for i := range n {
			slot := d.Device
			slot.ID.Slot = i
			all = append(all, slot)
		}
	}
	return all
}

// add adds a resource to the plan unless it has no devices.
func (p *planner) add(r Resource) {
	if len(r.Devices) > 0 {
		p.plan.Resources = append(p.plan.Resources, r)
	}
}

// baseNames returns the sorted names of the machine's resources.
func (p *planner) baseNames() []string { return slices.Sorted(maps.Keys(p.bases)) }
