package machine

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"reflect"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Capture writes a machine as a description, so that what was seen on it can be
// replayed anywhere: a machine that is made from the text reads as m does, also in
// the numbers of its MIG instances, with two exceptions. UUIDs are others; those in
// names of NVSwitch domains and in reasons become made-up ones, the same for the
// same, that count from 00000000-0000-0000-0000-000000000001. And the health of
// single MIG devices, which only a health tracker knows, is left out.
//
// The same machine gives the same text. Capture reads its text back, and fails
// where the description has no word for something in the machine; the error names
// it. A machine without GPUs cannot be described.
func Capture(name string, m *gpu.Machine, host Host) ([]byte, error) {
	if err := m.Validate(); err != nil {
		return nil, fmt.Errorf("capture: %w", err)
	}
	if len(m.GPUs) == 0 {
		return nil, errors.New("capture: the machine has no GPUs")
	}
	m = anonymous(m)
	// Without root complexes the text is shorter, and often they are those that the
	// reader makes up.
	var err error
	for _, roots := range []bool{false, true} {
		var text []byte
		if text, err = newCapture(m, roots).text(name, host); err == nil {
			err = readsAs(text, m)
		}
		if err == nil {
			return text, nil
		}
	}
	return nil, fmt.Errorf("capture: the machine cannot be described: %w", err)
}

// readsAs checks that a description makes a machine.
func readsAs(text []byte, want *gpu.Machine) error {
	desc, err := ParseDescription("captured", text)
	if err != nil {
		return err
	}
	got, err := New(desc, "").Read()
	if err != nil {
		return err
	}
	return difference(want, anonymous(&got))
}

// difference names the first thing in which two machines differ.
func difference(want, got *gpu.Machine) error {
	if want.Driver != got.Driver || want.CUDA != got.CUDA || want.Board != got.Board {
		return fmt.Errorf("driver %q, CUDA %q, board %q would read as %q, %q, %q", want.Driver, want.CUDA, want.Board, got.Driver, got.CUDA, got.Board)
	}
	if len(want.GPUs) != len(got.GPUs) {
		return fmt.Errorf("%d GPUs would be %d", len(want.GPUs), len(got.GPUs))
	}
	for i := range want.GPUs {
		a, b := reflect.ValueOf(want.GPUs[i]), reflect.ValueOf(got.GPUs[i])
		for f := range a.NumField() {
			if x, y := a.Field(f).Interface(), b.Field(f).Interface(); !reflect.DeepEqual(x, y) {
				return fmt.Errorf("GPU %d: %s %+v would read as %+v", i, a.Type().Field(f).Name, x, y)
			}
		}
		for j := range i {
			if x, y := want.Links.At(i, j), got.Links.At(i, j); x != y {
				return fmt.Errorf("link of GPUs %d and %d: %+v would read as %+v", j, i, x, y)
			}
		}
	}
	return nil
}

var uuidForm = regexp.MustCompile(`[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}`)

// anonymous is the machine without what names this one and no other.
func anonymous(m *gpu.Machine) *gpu.Machine {
	names := make(map[string]string)
	hide := func(text string) string {
		return uuidForm.ReplaceAllStringFunc(text, func(uuid string) string {
			uuid = strings.ToLower(uuid)
			if names[uuid] == "" {
				names[uuid] = fmt.Sprintf("00000000-0000-0000-0000-%012d", len(names)+1)
			}
			return names[uuid]
		})
	}
	plain := *m
	plain.Board = hide(m.Board)
	plain.GPUs = slices.Clone(m.GPUs)
	for i := range plain.GPUs {
		g := &plain.GPUs[i]
		g.UUID = ""
		g.NVSwitch, g.Health.Reason = hide(g.NVSwitch), hide(g.Health.Reason)
		var devices []gpu.MIGDevice
		for _, d := range g.MIG.Devices {
			d.UUID, d.Health = "", gpu.Health{}
			devices = append(devices, d)
		}
		g.MIG.Devices = devices
	}
	return &plain
}

// capture is a description in the making.
type capture struct {
	m *gpu.Machine
	// roots says that root complexes are written.
	roots bool
	// groups are the groups with the index of the first GPU of each.
	groups []*group
	first  []int
	// rootOf is the root complex that each GPU will have.
	rootOf []string
}

// document is a description as it is written.
type document struct {
	Name         string       `yaml:"name"`
	InstanceType string       `yaml:"instanceType,omitempty"`
	Board        *string      `yaml:"board,omitempty"`
	CPUs         int          `yaml:"cpus"`
	Memory       string       `yaml:"memory"`
	NUMANodes    int          `yaml:"numaNodes"`
	Driver       string       `yaml:"driver"`
	CUDA         string       `yaml:"cuda"`
	GPUs         []*group     `yaml:"gpus"`
	Links        []*yaml.Node `yaml:"links,omitempty"`
}

// group is an entry of gpus. What the reader would make up by itself is nil.
type group struct {
	Product     string       `yaml:"product,omitempty"`
	Name        *string      `yaml:"name,omitempty"`
	Count       int          `yaml:"count,omitempty"`
	MemoryMiB   *int         `yaml:"memoryMiB,omitempty"`
	Compute     string       `yaml:"compute,omitempty"`
	Minor       *yaml.Node   `yaml:"minor,omitempty"`
	PCIBusID    *yaml.Node   `yaml:"pciBusID,omitempty"`
	PCIDeviceID *yaml.Node   `yaml:"pciDeviceID,omitempty"`
	PCIClass    *yaml.Node   `yaml:"pciClass,omitempty"`
	NUMA        int          `yaml:"numa"`
	PCIeRoot    *yaml.Node   `yaml:"pcieRoot,omitempty"`
	PCIe        string       `yaml:"pcie,omitempty"`
	NVSwitch    *string      `yaml:"nvswitch,omitempty"`
	NVLinks     int          `yaml:"nvlinks,omitempty"`
	MIGCapable  *bool        `yaml:"migCapable,omitempty"`
	MIGEnabled  *bool        `yaml:"migEnabled,omitempty"`
	MIGPending  *bool        `yaml:"migPending,omitempty"`
	MIG         []*yaml.Node `yaml:"mig,omitempty"`
	Lost        string       `yaml:"lost,omitempty"`
	Unhealthy   string       `yaml:"unhealthy,omitempty"`
	Recovery    string       `yaml:"recovery,omitempty"`
}

// text and number are YAML scalars.
func text(s string) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!str", Value: s}
}

func number(i int) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: strconv.Itoa(i)}
}

func hexadecimal(i uint16) *yaml.Node {
	return &yaml.Node{Kind: yaml.ScalarNode, Tag: "!!int", Value: fmt.Sprintf("0x%04x", i)}
}

// mapping is a YAML mapping on one line.
type mapping struct{ yaml.Node }

func newMapping() *mapping {
	return &mapping{yaml.Node{Kind: yaml.MappingNode, Style: yaml.FlowStyle}}
}

func (m *mapping) add(key string, value *yaml.Node) {
	m.Content = append(m.Content, text(key), value)
}

// oneOrList is a YAML list on one line, or its only item.
func oneOrList(items []*yaml.Node) *yaml.Node {
	if len(items) == 1 {
		return items[0]
	}
	return &yaml.Node{Kind: yaml.SequenceNode, Style: yaml.FlowStyle, Content: items}
}

// unless returns nil for the value that the reader would take by itself.
func unless[T comparable](value, otherwise T) *T {
	if value == otherwise {
		return nil
	}
	return &value
}

// newCapture groups the GPUs: those next to each other that are described alike and
// of which all pairs are at one level.
func newCapture(m *gpu.Machine, roots bool) *capture {
	c := &capture{m: m, roots: roots, rootOf: make([]string, len(m.GPUs))}
	for i := range m.GPUs {
		g := describe(m, i)
		if last := len(c.groups) - 1; last >= 0 {
			first := c.first[last]
			before := *c.groups[last]
			before.Count = 0
			if reflect.DeepEqual(&before, g) && c.alike(first, i) {
				c.groups[last].Count = i - first + 1
				continue
			}
		}
		c.groups, c.first = append(c.groups, g), append(c.first, i)
	}
	for k, g := range c.groups {
		c.place(g, c.first[k])
	}
	return c
}

// alike says whether a GPU is at the level of the GPUs before it, from first, to
// each of them.
func (c *capture) alike(first, i int) bool {
	level := c.m.Links.At(first, first+1).PCIe
	for j := first; j < i; j++ {
		if c.m.Links.At(j, i).PCIe != level {
			return false
		}
	}
	return true
}

// place completes a group by what differs between its GPUs, and by their level.
func (c *capture) place(g *group, first int) {
	count := max(1, g.Count)
	gpus := c.m.GPUs[first : first+count]
	level := c.m.Links.At(first, first+1).PCIe
	shared := !c.roots && count > 1 && level >= gpu.PCIeHostBridge
	var minors, buses, roots []*yaml.Node
	usualMinors, usualBuses, oneRoot := true, true, true
	for i := range gpus {
		minors, buses, roots = append(minors, number(gpus[i].Minor)), append(buses, text(gpus[i].PCIBusID)), append(roots, text(gpus[i].PCIeRoot))
		usualMinors = usualMinors && gpus[i].Minor == first+i
		usualBuses = usualBuses && gpus[i].PCIBusID == madeUpBusID(first+i)
		oneRoot = oneRoot && gpus[i].PCIeRoot == gpus[0].PCIeRoot
		switch {
		case c.roots:
			c.rootOf[first+i] = gpus[i].PCIeRoot
		case shared:
			c.rootOf[first+i] = madeUpRoot(first)
		default:
			c.rootOf[first+i] = madeUpRoot(first + i)
		}
	}
	if !usualMinors {
		g.Minor = oneOrList(minors)
	}
	if !usualBuses {
		g.PCIBusID = oneOrList(buses)
	}
	switch {
	case c.roots && oneRoot:
		g.PCIeRoot = roots[0]
	case c.roots:
		g.PCIeRoot = oneOrList(roots)
	}
	if gpus[0].Health.State == gpu.Lost {
		return // of a lost GPU no level is known
	}
	for b := first; b < first+count; b++ {
		for a := first; a < b; a++ {
			if shared || c.byRule(a, b) != level {
				g.PCIe = level.String()
			}
		}
	}
}

// byRule is the level that the reader takes for a pair of two groups.
func (c *capture) byRule(a, b int) gpu.PCIeLevel {
	return defaultPCIe(&gpu.GPU{NUMA: c.m.GPUs[a].NUMA, PCIeRoot: c.rootOf[a]}, &gpu.GPU{NUMA: c.m.GPUs[b].NUMA, PCIeRoot: c.rootOf[b]})
}

// links lists the pairs that are not as their groups or the rule say.
func (c *capture) links() []*yaml.Node {
	groupOf := make([]*group, 0, len(c.m.GPUs))
	for _, g := range c.groups {
		for range max(1, g.Count) {
			groupOf = append(groupOf, g)
		}
	}
	var lines []*yaml.Node
	for a := range c.m.GPUs {
		for b := a + 1; b < len(c.m.GPUs); b++ {
			if c.m.GPUs[a].Health.State == gpu.Lost || c.m.GPUs[b].Health.State == gpu.Lost {
				continue
			}
			link := c.m.Links.At(a, b)
			level := c.byRule(a, b).String()
			if groupOf[a] == groupOf[b] && groupOf[a].PCIe != "" {
				level = groupOf[a].PCIe
			}
			if link.NVLinks == 0 && link.PCIe.String() == level {
				continue
			}
			l := newMapping()
			l.add("a", number(a))
			l.add("b", number(b))
			if link.NVLinks > 0 {
				l.add("nvlinks", number(link.NVLinks))
			}
			if link.PCIe.String() != level {
				l.add("pcie", text(link.PCIe.String()))
			}
			lines = append(lines, &l.Node)
		}
	}
	return lines
}

// describe describes one GPU but for what place adds.
func describe(m *gpu.Machine, index int) *group {
	g := &m.GPUs[index]
	direct := 0
	for j := range m.GPUs {
		direct += m.Links.At(index, j).NVLinks
	}
	d := &group{NUMA: g.NUMA}
	u := unit{product: gpu.ProductByName(g.Name)}
	if u.product != nil && g.NVLinks > u.product.NVLinks {
		u.product = nil // the catalogue does not know this board well enough
	}
	var usual gpu.GPU
	if u.product != nil {
		d.Product = g.Name
		usual = gpu.GPU{Name: g.Name, MemoryMiB: u.product.MemoryMiB, Compute: u.product.Compute}
		usual.MIG.Capable = u.product.MIG != nil
		if len(u.product.PCIDeviceIDs) > 0 {
			usual.PCIDeviceID = u.product.PCIDeviceIDs[0]
		}
	}
	// A GPU that is no product has all of these, unless it is lost.
	required := u.product == nil && g.Health.State != gpu.Lost
	if required || g.Name != usual.Name {
		d.Name = &g.Name
	}
	if required || g.MemoryMiB != usual.MemoryMiB {
		d.MemoryMiB = &g.MemoryMiB
	}
	if required || g.Compute != usual.Compute {
		d.Compute = g.Compute.String()
	}
	if g.PCIDeviceID != usual.PCIDeviceID {
		d.PCIDeviceID = hexadecimal(g.PCIDeviceID)
	}
	if g.PCIClass != defaultClass {
		d.PCIClass = hexadecimal(g.PCIClass)
	}
	if others := g.NVLinks - direct; others > 0 {
		d.NVSwitch = &g.NVSwitch
		if u.product == nil || others != u.product.NVLinks {
			d.NVLinks = others
		}
	}
	d.MIGCapable = unless(g.MIG.Capable, usual.MIG.Capable)
	d.MIGEnabled = unless(g.MIG.Enabled, len(g.MIG.Devices) > 0)
	d.MIGPending = unless(g.MIG.Pending, g.MIG.Enabled)
	u.gpu = *g
	d.MIG = describeMIG(&u)
	switch g.Health.State {
	case gpu.Lost:
		d.Lost = cmp.Or(g.Health.Reason, lostReason)
	case gpu.Unhealthy:
		d.Unhealthy = g.Health.Reason
	}
	if g.Recovery != gpu.RecoveryNone {
		d.Recovery = g.Recovery.String()
	}
	return d
}

// describeMIG lists MIG devices in their order, each with its place.
func describeMIG(u *unit) []*yaml.Node {
	var lines []*yaml.Node
	var above []instance
	for _, d := range u.gpu.MIG.Devices {
		l := newMapping()
		l.add("profile", text(d.Profile))
		in := instance{GI: d.GI, CI: d.CI, MIG: gpu.MIGInstance{ProfileID: d.ProfileID, Placement: d.Placement}}
		var known *gpu.MIGProfile
		if table := u.table(); table != nil {
			known = table.ByID(d.ProfileID)
		}
		asCatalogue := known != nil && d.CI == 0 && d.Profile == known.Name && d.MemoryMiB == known.MemoryMiB &&
			d.Attributes == u.product.Attributes(known) && u.fits(above, in.MIG) == nil &&
			!(&gpuState{Instances: above}).hasInstance(d.GI, gpu.AnyInstance)
		if !asCatalogue {
			l.add("id", number(d.ProfileID))
		}
		l.add("start", number(d.Placement.Start))
		if !asCatalogue && (known == nil || d.Placement.Size != known.Placements[0].Size) {
			l.add("size", number(d.Placement.Size))
		}
		if d.GI != freeGI(above) {
			l.add("gi", number(d.GI))
		}
		if d.CI != 0 {
			l.add("ci", number(d.CI))
		}
		if !asCatalogue {
			in.As = &reported{Profile: d.Profile}
			describeReported(l, u, &d, known)
		}
		above = append(above, in)
		lines = append(lines, &l.Node)
	}
	return lines
}

// describeReported adds what a driver reports and the catalogue does not say so.
func describeReported(l *mapping, u *unit, d *gpu.MIGDevice, known *gpu.MIGProfile) {
	memory, attributes := 0, gpu.MIGAttributes{}
	if known != nil {
		memory, attributes = known.MemoryMiB, u.product.Attributes(known)
	}
	if d.MemoryMiB != memory {
		l.add("memoryMiB", number(d.MemoryMiB))
	}
	if d.Attributes == attributes {
		return
	}
	parts := newMapping()
	for _, part := range partsOf(&d.Attributes) {
		if *part.number != 0 {
			parts.add(part.name, number(*part.number))
		}
	}
	l.add("attributes", &parts.Node)
}

// text writes the description.
func (c *capture) text(name string, host Host) ([]byte, error) {
	d := document{
		Name: name, CPUs: host.CPUs, Memory: host.Memory, NUMANodes: max(1, host.NUMANodes),
		Driver: c.m.Driver, CUDA: c.m.CUDA, GPUs: c.groups, Links: c.links(),
	}
	instanceType := cmp.Or(host.InstanceType, name)
	if instanceType != name {
		d.InstanceType = instanceType
	}
	d.Board = unless(c.m.Board, instanceType)
	for i := range c.m.GPUs {
		d.NUMANodes = max(d.NUMANodes, c.m.GPUs[i].NUMA+1)
	}
	var out bytes.Buffer
	encoder := yaml.NewEncoder(&out)
	encoder.SetIndent(2)
	encoder.CompactSeqIndent()
	if err := encoder.Encode(&d); err != nil {
		return nil, err
	}
	if err := encoder.Close(); err != nil {
		return nil, err
	}
	return out.Bytes(), nil
}
