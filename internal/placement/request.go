package placement

import (
	"fmt"
	"slices"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Whole is a whole GPU in thousandths.
const Whole = 1000

// Request is what one pod asks of a node. The zero value asks for nothing and
// fits anywhere.
type Request struct {
	// MilliCPU is in thousandths of a core, MemoryMiB in MiB of host memory.
	MilliCPU, MemoryMiB int
	// Count is the number of devices. Each is on a GPU of its own, but for MIG
	// devices, which may share one.
	Count int
	// Milli is the share of each GPU in thousandths, 1 to Whole. It is 0 where
	// Slot or Profile says what a device is, and where Count is 0.
	Milli int
	// GPUMemoryMiB is the memory of each GPU that a share needs; 0 leaves memory
	// out of account. A whole GPU brings all of its memory.
	GPUMemoryMiB int
	// Slot asks for time-slicing slots, one of NodeSpec.Slots of a GPU.
	Slot bool
	// Profile asks for MIG devices by the name of their profile, "1g.5gb".
	Profile string
	// Products are the models that will do, sorted; empty means any.
	Products []string
	// Links is the poorest connection that the GPUs of the pod may have with
	// each other.
	Links LinkClass
}

// LinkClass is the class of the weakest link in a set of GPUs.
type LinkClass int

// The classes, the poorest first.
const (
	// AnyLink puts no condition on the links.
	AnyLink LinkClass = iota
	// SameNUMA: no pair of GPUs crosses CPUs.
	SameNUMA
	// NVLinked: every pair has an NVLink or a common NVSwitch.
	NVLinked
)

func (c LinkClass) String() string {
	switch c {
	case AnyLink:
		return "any"
	case SameNUMA:
		return "numa"
	case NVLinked:
		return "nvlink"
	}
	return fmt.Sprintf("LinkClass(%d)", int(c))
}

// Validate names the first field of the request that cannot be meant.
func (r *Request) Validate() error {
	bad := func(field string, value any, remedy string) error {
		return fmt.Errorf("%w: %s is %v: %s", ErrInvalid, field, value, remedy)
	}
	switch {
	case r.MilliCPU < 0:
		return bad("MilliCPU", r.MilliCPU, "give 0 or more")
	case r.MemoryMiB < 0:
		return bad("MemoryMiB", r.MemoryMiB, "give 0 or more")
	case r.Count < 0 || r.Count > MaxGPUs:
		return bad("Count", r.Count, fmt.Sprintf("give 0 to %d", MaxGPUs))
	case r.GPUMemoryMiB < 0:
		return bad("GPUMemoryMiB", r.GPUMemoryMiB, "give 0 or more")
	case r.Links < AnyLink || r.Links > NVLinked:
		return bad("Links", r.Links, "use AnyLink, SameNUMA or NVLinked")
	case r.Count == 0 && (r.Milli != 0 || r.Slot || r.Profile != "" || r.GPUMemoryMiB != 0):
		return bad("Count", 0, "give the number of devices, or none of Milli, Slot, Profile and GPUMemoryMiB")
	case r.Count > 0 && r.kinds() != 1:
		return bad("Milli", r.Milli, "give exactly one of Milli, Slot and Profile")
	case r.Milli < 0 || r.Milli > Whole:
		return bad("Milli", r.Milli, fmt.Sprintf("give 1 to %d", Whole))
	case (r.Profile != "" || r.Slot) && r.GPUMemoryMiB != 0:
		return bad("GPUMemoryMiB", r.GPUMemoryMiB, "a slot or MIG profile brings its own memory: give 0")
	case r.Profile != "" && r.Links != AnyLink:
		return bad("Links", r.Links, "MIG devices reach no other GPU: leave it out")
	case !slices.IsSorted(r.Products):
		return bad("Products", r.Products, "sort them")
	}
	return nil
}

func (r *Request) kinds() int {
	n := 0
	for _, has := range []bool{r.Milli != 0, r.Slot, r.Profile != ""} {
		if has {
			n++
		}
	}
	return n
}

// Whole says whether the request is for whole GPUs.
func (r *Request) Whole() bool { return r.Count > 0 && r.Milli == Whole }

// MaxGPUs is the largest number of GPUs of one node.
const MaxGPUs = 16

// NodeSpec is a node as it is when nothing runs on it.
type NodeSpec struct {
	// Name is unique in a cluster.
	Name string
	// MilliCPU and MemoryMiB are what pods can have. Pods is how many, 0 for no
	// limit.
	MilliCPU, MemoryMiB, Pods int
	// GPUs is the number of GPUs, all of one model, 0 to MaxGPUs.
	GPUs int
	// Product is their model, "" where GPUs is 0.
	Product string
	// GPUMemoryMiB is the memory of each, 0 where it is not known: then no
	// request is refused for want of it.
	GPUMemoryMiB int
	// Slots is the number of time-slicing slots of each GPU; 0 and 1 mean that
	// it gives none.
	Slots int
	// MIG is how a GPU can be cut, nil for one that cannot.
	MIG *gpu.MIGTable
	// Machine has the links and the health of the GPUs; nil stands for healthy
	// GPUs that are all linked alike, by Links.
	Machine *gpu.Machine
	Links   LinkClass
}
