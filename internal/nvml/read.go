package nvml

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

const (
	// maxLinks is above the number of NVLinks of any GPU; asking for one that a
	// GPU lacks is harmless.
	maxLinks = 36
	// localSwitch names the NVSwitch domain of a node whose GPUs report no fabric
	// of their own (before Hopper) or one without a name (a single node).
	localSwitch = "nvswitch"
	lostReason  = "GPU is lost"
)

// reading is what one GPU says of itself.
type reading struct {
	device device
	gpu    gpu.GPU
	// peers counts the NVLinks to other GPUs by their PCI bus id.
	peers map[string]int
	// switches is the number of NVLinks to NVSwitches.
	switches int
	// err is why the GPU counts as lost.
	err error
}

// Read reads the whole machine. It fails only where the driver does not answer;
// the CUDA version is "" where that alone cannot be read.
func (m *Machine) Read() (gpu.Machine, error) {
	var machine gpu.Machine
	err := m.use(func() (err error) {
		machine, err = m.read()
		return err
	})
	return machine, err
}

func (m *Machine) read() (gpu.Machine, error) {
	version, err := m.driver.driverVersion()
	if err != nil {
		return gpu.Machine{}, fmt.Errorf("NVIDIA driver: read version: %w", err)
	}
	n, err := m.driver.count()
	if err != nil {
		return gpu.Machine{}, fmt.Errorf("NVIDIA driver: count GPUs: %w", err)
	}
	machine := gpu.Machine{Driver: version, Board: m.readBoard(), GPUs: make([]gpu.GPU, n), Links: gpu.NewLinks(n)}
	if cuda, err := m.driver.cudaVersion(); err == nil {
		machine.CUDA = fmt.Sprintf("%d.%d", cuda/1000, cuda%1000/10)
	}
	readings := make([]reading, n)
	answered := make(map[string]bool)
	for i := range n {
		readings[i] = m.readGPU(i)
		if readings[i].err == nil {
			answered[readings[i].gpu.UUID] = true
		}
	}
	readLinks(readings, machine.Links)
	for i, r := range readings {
		machine.GPUs[i] = r.gpu
		if r.err != nil {
			machine.GPUs[i] = m.lost(i, r, answered)
		}
	}
	m.last = machine.GPUs
	// The caller may do with its own what it likes.
	machine.GPUs = slices.Clone(m.last)
	return machine, nil
}

// readBoard is the machine's name in its firmware, "" where there is none, as in
// some virtual machines.
func (m *Machine) readBoard() string {
	text, err := os.ReadFile(filepath.Join(m.sysfs, "class", "dmi", "id", "product_name"))
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}

// lost is a GPU that does not answer, with what was known of it.
func (m *Machine) lost(index int, r reading, answered map[string]bool) gpu.GPU {
	g := gpu.GPU{UUID: r.gpu.UUID, Minor: -1, NUMA: -1}
	for i, known := range m.last {
		// A GPU that does not even tell its UUID is the one that was at its place,
		// unless that one answers from another.
		if known.UUID == r.gpu.UUID || r.gpu.UUID == "" && i == index && !answered[known.UUID] {
			g = known
		}
	}
	if g.UUID == "" {
		g.UUID = "GPU-unknown-" + strconv.Itoa(index)
	}
	g.Index = index
	g.Health = gpu.Health{State: gpu.Lost, Reason: lostReason}
	if !errors.Is(r.err, gpu.ErrLost) {
		g.Health.Reason = "cannot be read: " + r.err.Error()
	}
	return g
}

func (m *Machine) readGPU(index int) reading {
	d, err := m.driver.device(index)
	if err != nil {
		return reading{err: err}
	}
	r := reading{device: d, gpu: gpu.GPU{Index: index}, peers: make(map[string]int)}
	g := &r.gpu
	for _, query := range []struct {
		what string
		read func() error
	}{
		{"UUID", func() (err error) { g.UUID, err = d.uuid(); return err }},
		{"name", func() (err error) { g.Name, err = d.name(); return err }},
		{"minor number", func() (err error) { g.Minor, err = d.minor(); return err }},
		{"memory", func() error { return readMemory(d, g) }},
		{"compute capability", func() (err error) { g.Compute.Major, g.Compute.Minor, err = d.capability(); return err }},
		{"PCI address", func() error { return m.readPCI(d, g) }},
		{"recovery action", func() error { return readRecovery(d, g) }},
		{"MIG devices", func() error { return readMIG(d, g) }},
		{"NVLinks", r.readNVLinks},
	} {
		if err := query.read(); err != nil {
			r.err = fmt.Errorf("%s: %w", query.what, err)
			return r
		}
	}
	return r
}

// readMemory takes a GPU without memory of its own as having none.
func readMemory(d device, g *gpu.GPU) error {
	bytes, err := d.memory()
	if errors.Is(err, gpu.ErrNotSupported) {
		return nil
	}
	g.MemoryMiB = int(bytes >> 20)
	return err
}

// readRecovery takes a driver that does not say what must be done as one that says
// nothing must. Only the GPU itself being lost is an error. The numbers are NVML's,
// also those that package gpu has no name for: whatever a driver wants done, the GPU
// does not work as it should.
func readRecovery(d device, g *gpu.GPU) error {
	action, err := d.recovery()
	switch {
	case errors.Is(err, gpu.ErrLost):
		return err
	case err == nil:
		g.Recovery = gpu.Recovery(action)
	}
	return nil
}

func (p pciInfo) String() string {
	return fmt.Sprintf("%04x:%02x:%02x.0", p.domain, p.bus, p.device)
}

// readPCI reads the address, and from sysfs what lies around it.
func (m *Machine) readPCI(d device, g *gpu.GPU) error {
	info, err := d.pci()
	if err != nil {
		return err
	}
	g.PCIBusID = info.String()
	g.PCIDeviceID = uint16(info.id >> 16)
	dir := filepath.Join(m.sysfs, "bus", "pci", "devices", g.PCIBusID)
	g.NUMA = -1
	if text, err := os.ReadFile(filepath.Join(dir, "numa_node")); err == nil {
		if node, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && node >= 0 {
			g.NUMA = node
		}
	}
	// The class has the programming interface in its last byte.
	if text, err := os.ReadFile(filepath.Join(dir, "class")); err == nil {
		if class, err := strconv.ParseUint(strings.TrimSpace(string(text)), 0, 24); err == nil {
			g.PCIClass = uint16(class >> 8)
		}
	}
	// The link leads through the bridges from the root complex down.
	if target, err := os.Readlink(dir); err == nil {
		parts := strings.Split(target, "/")
		if i := slices.IndexFunc(parts, func(p string) bool { return strings.HasPrefix(p, "pci") }); i >= 0 {
			g.PCIeRoot = parts[i]
		}
	}
	return nil
}

func readMIG(d device, g *gpu.GPU) error {
	enabled, pending, err := d.migMode()
	if errors.Is(err, gpu.ErrNotSupported) {
		return nil
	}
	if err != nil {
		return err
	}
	g.MIG = gpu.MIGState{Capable: true, Enabled: enabled, Pending: pending}
	if !enabled {
		return nil
	}
	g.MIG.Devices, err = readMIGDevices(d, g.Name, g.MemoryMiB)
	return err
}

// readMIGDevices lists the MIG devices. Those that vanish meanwhile are left out.
func readMIGDevices(d device, name string, memoryMiB int) ([]gpu.MIGDevice, error) {
	n, err := d.migMax()
	if err != nil {
		return nil, err
	}
	var devices []gpu.MIGDevice
	for i := range n {
		raw, err := d.migDevice(i)
		if errors.Is(err, gpu.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%d: %w", i, err)
		}
		in, err := d.instance(raw.gi)
		if errors.Is(err, gpu.ErrNotFound) {
			continue
		}
		if err != nil {
			return nil, fmt.Errorf("%d: GPU instance %d: %w", i, raw.gi, err)
		}
		complete(d, name, in.profileID, &raw)
		devices = append(devices, gpu.MIGDevice{
			Index: len(devices), UUID: raw.uuid, GI: raw.gi, CI: raw.ci,
			ProfileID: in.profileID, Profile: profileName(d, name, memoryMiB, in.profileID, &raw),
			Placement: gpu.Placement{Start: in.start, Size: in.size}, MemoryMiB: raw.memoryMiB, Attributes: raw.attributes,
		})
	}
	return devices, nil
}

// readNVLinks counts the links by what they lead to. A link that cannot be read is
// left out; only the GPU itself being lost is an error.
func (r *reading) readNVLinks() error {
	for l := range maxLinks {
		active, err := r.device.linkActive(l)
		if errors.Is(err, gpu.ErrLost) {
			return err
		}
		if err != nil || !active {
			continue
		}
		r.gpu.NVLinks++
		other, err := r.device.linkRemote(l)
		switch {
		case errors.Is(err, gpu.ErrLost):
			return err
		case err != nil:
		case other.kind == remoteGPU:
			r.peers[other.pci.String()]++
		case other.kind == remoteSwitch:
			r.switches++
		}
	}
	if r.switches == 0 {
		return nil
	}
	f, err := r.device.fabric()
	if errors.Is(err, gpu.ErrLost) {
		return err
	}
	r.gpu.NVSwitch = switchDomain(f, err)
	return nil
}

// switchDomain names the NVSwitch domain of a GPU with links to switches, by what
// the query of its fabric answered.
func switchDomain(f fabric, err error) string {
	switch {
	case errors.Is(err, gpu.ErrNotSupported):
		return localSwitch
	case err != nil || !f.completed:
		return "" // until it is let into the fabric it reaches no other GPU
	case f.cluster == [16]byte{}:
		return localSwitch
	}
	c := f.cluster
	return fmt.Sprintf("%x-%x-%x-%x-%x.%d", c[:4], c[4:6], c[6:8], c[8:10], c[10:], f.clique)
}

// levels are the PCIe levels by NVML's NVML_TOPOLOGY_* numbers.
var levels = map[int]gpu.PCIeLevel{
	0: gpu.PCIeInternal, 10: gpu.PCIeSingle, 20: gpu.PCIeMultiple,
	30: gpu.PCIeHostBridge, 40: gpu.PCIeNode, 50: gpu.PCIeSystem,
}

// readLinks fills in the links of all GPUs that answer, and counts an NVLink that
// one side reports for both.
func readLinks(readings []reading, links gpu.Links) {
	byBus := make(map[string]int)
	for i, r := range readings {
		if r.err == nil {
			byBus[r.gpu.PCIBusID] = i
		}
	}
	for i, r := range readings {
		if r.err != nil {
			continue
		}
		for bus, n := range r.peers {
			if j, ok := byBus[bus]; ok {
				links.Merge(i, j, gpu.Link{NVLinks: n})
			}
		}
		for j := range i {
			if readings[j].err != nil {
				continue
			}
			// Whichever of the two the trouble is with, the link alone is unknown.
			if level, err := r.device.ancestor(readings[j].device); err == nil {
				links.Merge(i, j, gpu.Link{PCIe: levels[level]})
			}
		}
	}
	for i := range readings {
		r := &readings[i]
		n := r.switches
		for j := range readings {
			n += links.At(i, j).NVLinks
		}
		r.gpu.NVLinks = max(r.gpu.NVLinks, n)
	}
}
