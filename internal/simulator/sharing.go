package simulator

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

// Sharing says how the needs of jobs become requests. Jobs that need a part of
// one GPU are the ones that it is about; the others ask for what they need.
type Sharing struct {
	// Name is how users know it.
	Name string
	// Slots is the number of time-slicing slots of each GPU, 0 for none. A job
	// gets a slot where its memory is no more than a slot's part: nothing else
	// keeps it from taking its neighbours' memory.
	Slots int
	// MIG gives a job the smallest profile that has its memory and its compute.
	MIG bool
	// Shares gives a job the part of a GPU that it needs, by compute and by
	// memory.
	Shares bool
}

var sharings = []Sharing{
	{Name: "exclusive"},
	{Name: "time-slicing", Slots: 10},
	{Name: "mig", MIG: true},
	{Name: "time-slicing+mig", Slots: 10, MIG: true},
	{Name: "shares", Shares: true},
}

// Sharings lists the built-in ways of sharing.
func Sharings() []Sharing { return slices.Clone(sharings) }

// SharingByName returns a built-in way of sharing.
func SharingByName(name string) (Sharing, error) {
	names := make([]string, len(sharings))
	for i, s := range sharings {
		if s.Name == name {
			return s, nil
		}
		names[i] = s.Name
	}
	return Sharing{}, fmt.Errorf("no sharing %q: use one of %s", name, strings.Join(names, ", "))
}

// nodes returns the nodes as the sharing has them.
func (s Sharing) nodes(specs []placement.NodeSpec) []placement.NodeSpec {
	specs = slices.Clone(specs)
	for i := range specs {
		specs[i].Slots = s.Slots
	}
	return specs
}

// request is what a job asks for. The first node with GPUs stands for all as to
// the size of a slot and the MIG table.
func (s Sharing) request(job *trace.Job, nodes []placement.NodeSpec) placement.Request {
	r := job.Request
	if r.Count != 1 || r.Milli == 0 || r.Milli == placement.Whole || s.Shares {
		return r
	}
	for i := range nodes {
		n := &nodes[i]
		if n.GPUs == 0 {
			continue
		}
		if s.Slots > 1 && r.GPUMemoryMiB*s.Slots <= n.GPUMemoryMiB {
			r.Milli, r.GPUMemoryMiB, r.Slot = 0, 0, true
			return r
		}
		if s.MIG && n.MIG != nil {
			if p := profileFor(n.MIG, job); p != nil {
				r.Milli, r.GPUMemoryMiB, r.Profile = 0, 0, p.Name
				return r
			}
		}
		break
	}
	r.Milli = placement.Whole
	return r
}

// profileFor returns the smallest profile without extras that has the memory and
// the compute for a job, nil where only a whole GPU would do.
func profileFor(t *gpu.MIGTable, job *trace.Job) *gpu.MIGProfile {
	var best *gpu.MIGProfile
	for i := range t.Profiles {
		p := &t.Profiles[i]
		if strings.ContainsAny(p.Name, "+-") || p.Slices == t.Slices ||
			p.MemoryMiB < job.Request.GPUMemoryMiB || p.Slices*placement.Whole < job.Activity*t.Slices {
			continue
		}
		if best == nil || p.Slices < best.Slices || p.Slices == best.Slices && p.MemoryMiB < best.MemoryMiB {
			best = p
		}
	}
	return best
}

// Interference is how much jobs slow each other down on one GPU.
//
// Under time-slicing, and for shares, which are time-sliced too, a job alone runs
// at full speed. With others, the GPU switches between them: a job loses Least of
// its time where the others hardly do anything, rising to Most where they keep a
// whole GPU busy; and where all together want more than the GPU has, each gets
// its part of it. A MIG device costs MIGLeast to MIGMost, the more the smaller it
// is, and a job that wants more compute than its slices gets what they have.
type Interference struct {
	Least, Most       float64
	MIGLeast, MIGMost float64
}

// DefaultInterference is what practitioners report: 20 to 50 % per sharer under
// contention with time-slicing, 5 to 10 % with MIG.
var DefaultInterference = Interference{Least: 0.2, Most: 0.5, MIGLeast: 0.05, MIGMost: 0.1}

// timeSliced is the speed of a job that wants activity of a GPU on which others
// want the rest, in thousandths.
func (f Interference) timeSliced(activity, others int) float64 {
	if others == 0 {
		return 1
	}
	overhead := f.Least + (f.Most-f.Least)*min(1, float64(others)/placement.Whole)
	crowd := max(1, float64(activity+others)/placement.Whole)
	return 1 / (crowd * (1 + overhead))
}

// mig is the speed of a job on a MIG device of so many of the GPU's slices.
func (f Interference) mig(activity, slices, of int) float64 {
	overhead := f.MIGMost - (f.MIGMost-f.MIGLeast)*float64(slices)/float64(of)
	short := max(1, float64(activity*of)/float64(slices*placement.Whole))
	return 1 / (short * (1 + overhead))
}
