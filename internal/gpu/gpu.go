package gpu

import (
	"fmt"
	"strconv"
)

// Machine is what one node has, as read at one moment. It is a value: readers
// never see it change.
type Machine struct {
	// Driver is the driver version, for example "580.95.05".
	Driver string
	// CUDA is the highest CUDA version that the driver supports, "major.minor".
	CUDA string
	// Board is the name that the host's firmware gives the machine, "" where it is
	// not known.
	Board string
	// GPUs are in index order: GPUs[i].Index == i.
	GPUs []GPU
	// Links has one row and column per GPU, in the same order.
	Links Links
}

// GPU is one physical GPU.
type GPU struct {
	// Index is the position that NVML gives it, from 0.
	Index int
	// UUID is NVML's "GPU-..." name. It is unique in the world and the key of
	// all accounting.
	UUID string
	// Minor is the number of its device node, /dev/nvidia<Minor>.
	Minor int
	// Name is the marketing name that NVML reports, for example
	// "NVIDIA A100-SXM4-40GB".
	Name string
	// MemoryMiB is the whole framebuffer.
	MemoryMiB int
	// Compute is the CUDA compute capability.
	Compute ComputeCapability
	// PCIBusID is "domain:bus:device.function", lower case.
	PCIBusID string
	// PCIDeviceID is the 16-bit PCI device id.
	PCIDeviceID uint16
	// PCIClass is the PCI class and subclass, 0x0300 for a VGA and 0x0302 for a 3D
	// controller, 0 where it is not known.
	PCIClass uint16
	// NUMA is the NUMA node next to the GPU, -1 where it is not known.
	NUMA int
	// PCIeRoot names the root complex, "" where it is not known.
	PCIeRoot string
	// NVSwitch names the NVSwitch domain, "" for none. GPUs of one domain reach
	// each other at full NVLink bandwidth.
	NVSwitch string
	// NVLinks is the number of active NVLinks, to peers and switches together.
	NVLinks int
	// MIG is the state of Multi-Instance GPU.
	MIG MIGState
	// Health is the state of the GPU and so of all its views.
	Health Health
	// Recovery is what the driver says must be done with the GPU.
	Recovery Recovery
}

// ComputeCapability is a CUDA compute capability such as 8.0.
type ComputeCapability struct{ Major, Minor int }

func (c ComputeCapability) String() string { return fmt.Sprintf("%d.%d", c.Major, c.Minor) }

// MIGState says how a GPU is cut.
type MIGState struct {
	// Capable is true where the product can do MIG at all.
	Capable bool
	// Enabled is the current mode. While it is on, the GPU as a whole cannot be
	// used: only its MIG devices can.
	Enabled bool
	// Pending is the mode after the next reset. It differs from Enabled only on
	// products whose mode change needs a reset.
	Pending bool
	// Devices are the MIG devices in index order.
	Devices []MIGDevice
}

// MIGDevice is one hardware slice that a container can be given: a GPU
// instance with one compute instance that fills it.
type MIGDevice struct {
	// Index is the position under the parent, from 0; the "j" in "i:j".
	Index int
	// UUID is NVML's "MIG-..." name.
	UUID string
	// GI and CI are the ids of the GPU instance and the compute instance.
	GI, CI int
	// ProfileID is the hardware id of the profile (see MIGProfile.ID).
	ProfileID int
	// Profile is the display name of the profile, such as "1g.5gb". Never
	// decide by it: names drift with the driver.
	Profile string
	// Placement is where the slice lies on the GPU.
	Placement Placement
	// MemoryMiB is the memory of the slice.
	MemoryMiB int
	// Attributes are what else the slice has.
	Attributes MIGAttributes
	// Health is the state of the slice alone. That of its GPU counts as well.
	Health Health
}

// MIGAttributes are the parts of a MIG device. What is not known is 0.
type MIGAttributes struct {
	// SMs is the number of multiprocessors.
	SMs int
	// Slices are the compute slices of the GPU instance, ComputeSlices those of the
	// compute instance.
	Slices, ComputeSlices int
	// The numbers of engines: copy, video decoder and encoder, JPEG decoder, optical
	// flow.
	CopyEngines, Decoders, Encoders, JPEG, OFA int
}

// Recovery is what a driver says must be done with a GPU before it works as it
// should: NVML's "GPU recovery action". The zero value is that nothing must, or
// that the driver does not say.
type Recovery int

// The actions, in NVML's order.
const (
	RecoveryNone Recovery = iota
	RecoveryReset
	RecoveryReboot
	RecoveryDrainP2P
	RecoveryDrainReset
)

func (r Recovery) String() string {
	switch r {
	case RecoveryNone:
		return "none"
	case RecoveryReset:
		return "reset the GPU"
	case RecoveryReboot:
		return "reboot the node"
	case RecoveryDrainP2P:
		return "drain peer-to-peer traffic"
	case RecoveryDrainReset:
		return "drain and reset the GPU"
	}
	return "Recovery(" + strconv.Itoa(int(r)) + ")"
}

// HealthState is the state of a GPU. The zero value is Healthy.
type HealthState int

// The states of a GPU.
const (
	Healthy HealthState = iota
	// Unhealthy: the GPU answers, but work must not be put on it.
	Unhealthy
	// Lost: the GPU no longer answers. Of its other fields only those that were
	// known before can be trusted.
	Lost
)

func (s HealthState) String() string {
	switch s {
	case Healthy:
		return "Healthy"
	case Unhealthy:
		return "Unhealthy"
	case Lost:
		return "Lost"
	}
	return "HealthState(" + strconv.Itoa(int(s)) + ")"
}

// Health is the state of a GPU with its reason.
type Health struct {
	State HealthState
	// Reason is one short stable phrase, "" when healthy.
	Reason string
}

// OK says whether work may be put on the GPU.
func (h Health) OK() bool { return h.State == Healthy }

// HealthOf is what counts for the base of a device id: the health of the GPU,
// and where that is well and the base is one of its MIG devices, that one's.
func (g *GPU) HealthOf(base string) Health {
	if g.Health.OK() {
		for i := range g.MIG.Devices {
			if g.MIG.Devices[i].UUID == base {
				return g.MIG.Devices[i].Health
			}
		}
	}
	return g.Health
}

// ByUUID returns the GPU with the given UUID, or nil.
func (m *Machine) ByUUID(uuid string) *GPU {
	for i := range m.GPUs {
		if m.GPUs[i].UUID == uuid {
			return &m.GPUs[i]
		}
	}
	return nil
}

// Parent returns the GPU that the base of a device id lives on: the GPU itself
// or the parent of the MIG device with that UUID. It returns nil for a device
// that the machine does not have.
func (m *Machine) Parent(base string) *GPU {
	for i := range m.GPUs {
		if m.GPUs[i].UUID == base {
			return &m.GPUs[i]
		}
		for _, d := range m.GPUs[i].MIG.Devices {
			if d.UUID == base {
				return &m.GPUs[i]
			}
		}
	}
	return nil
}

// LinkScore is the quality of the connection between GPUs i and j in the
// points of Link.Score. Two GPUs of one NVSwitch domain score as if every
// NVLink of the poorer one led to the other.
func (m *Machine) LinkScore(i, j int) int {
	if i == j {
		return 0
	}
	link := m.Links.At(i, j)
	a, b := &m.GPUs[i], &m.GPUs[j]
	if a.NVSwitch != "" && a.NVSwitch == b.NVSwitch {
		link.NVLinks = max(link.NVLinks, min(a.NVLinks, b.NVLinks))
	}
	return link.Score()
}

// Validate reports the first thing that makes the machine unusable as a base
// of accounting: GPUs out of order, a name given twice, links of another size.
func (m *Machine) Validate() error {
	seen := make(map[string]bool)
	unique := func(what, uuid string) error {
		if uuid == "" {
			return fmt.Errorf("%s has no UUID", what)
		}
		if seen[uuid] {
			return fmt.Errorf("%s: UUID %s is given twice", what, uuid)
		}
		seen[uuid] = true
		return nil
	}
	for i, g := range m.GPUs {
		what := fmt.Sprintf("gpu %d", i)
		if g.Index != i {
			return fmt.Errorf("%s has index %d", what, g.Index)
		}
		if err := unique(what, g.UUID); err != nil {
			return err
		}
		for j, d := range g.MIG.Devices {
			what := fmt.Sprintf("gpu %d: mig device %d", i, j)
			if d.Index != j {
				return fmt.Errorf("%s has index %d", what, d.Index)
			}
			if err := unique(what, d.UUID); err != nil {
				return err
			}
		}
	}
	if m.Links.Len() != len(m.GPUs) {
		return fmt.Errorf("links are for %d GPUs, the machine has %d", m.Links.Len(), len(m.GPUs))
	}
	return nil
}
