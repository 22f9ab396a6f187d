package sharing

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"text/tabwriter"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Plan says which resources a node offers and which devices each consists of.
type Plan struct {
	// Resources are sorted by name. A resource without devices is left out.
	Resources []Resource
}

// Resource is an extended resource of the node.
type Resource struct {
	// Name is the full name, such as "nvidia.com/gpu".
	Name string
	// Strategy is how its devices are shared.
	Strategy Strategy
	// Replicas is the number of slots per GPU or MIG device, 1 when not shared.
	// Where `devices` of the config limits sharing to some GPUs, it is the
	// number on those.
	Replicas int
	// Exclusive marks a second, unshared view of GPUs that another resource
	// shares. While one view of a GPU is in use, the other is withdrawn.
	Exclusive bool
	// FailRequestsGreaterThanOne refuses containers that ask for several slots.
	FailRequestsGreaterThanOne bool
	// Devices are sorted by GPU index, MIG index, slot.
	Devices []Device
}

// Strategy is a way of sharing, in the words of the label
// nvidia.com/gpu.sharing-strategy.
type Strategy string

// The strategies.
const (
	None        Strategy = "none"
	TimeSlicing Strategy = "time-slicing"
	MPS         Strategy = "mps"
)

// Device is what the kubelet hands out: a view of one GPU.
type Device struct {
	// ID is the kubelet's name for it.
	ID gpu.DeviceID
	// GPU is the UUID of the physical GPU.
	GPU string
	// Index is "i" for GPU i and "i:j" for its MIG device j.
	Index string
	// NUMA is the NUMA node of the GPU, -1 where it is not known.
	NUMA int
	// Health is that of the GPU.
	Health gpu.Health
}

// WriteTable writes one line per resource, for people. GPUS counts physical
// GPUs. It returns the error of the writer.
func (p *Plan) WriteTable(w io.Writer) error {
	t := tabwriter.NewWriter(w, 0, 0, 2, ' ', 0)
	fmt.Fprintln(t, "RESOURCE\tDEVICES\tGPUS\tSHARING\tNOTE")
	for i := range p.Resources {
		r := &p.Resources[i]
		gpus := make(map[string]bool)
		for _, d := range r.Devices {
			gpus[d.GPU] = true
		}
		shared := string(r.Strategy)
		if r.Strategy != None {
			shared = fmt.Sprintf("%s x%d", r.Strategy, r.Replicas)
		}
		fmt.Fprintf(t, "%s\t%d\t%d\t%s\t%s\n", r.Name, len(r.Devices), len(gpus), shared, cmp.Or(strings.Join(r.notes(), "; "), "-"))
	}
	return t.Flush()
}

// notes are the remarks of the table.
func (r *Resource) notes() []string {
	var notes []string
	if r.Exclusive {
		notes = append(notes, "exclusive view of shared GPUs")
	}
	if r.FailRequestsGreaterThanOne {
		notes = append(notes, "one per container")
	}
	whole := 0
	bad := make(map[string]bool)
	for _, d := range r.Devices {
		if d.ID.Slot == gpu.NoSlot {
			whole++
		}
		if index, _, _ := strings.Cut(d.Index, ":"); !d.Health.OK() && !bad[index] {
			bad[index] = true
			note := fmt.Sprintf("GPU %s is %s", index, strings.ToLower(d.Health.State.String()))
			if d.Health.Reason != "" {
				note += " (" + d.Health.Reason + ")"
			}
			notes = append(notes, note)
		}
	}
	if r.Strategy != None && whole > 0 {
		notes = append(notes, fmt.Sprintf("%d not shared", whole))
	}
	return notes
}
