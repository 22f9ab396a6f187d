package gpu

import (
	"fmt"
	"slices"
	"strings"
)

// Placement is an interval of a GPU's memory units: [Start, Start+Size).
type Placement struct{ Start, Size int }

// Overlaps says whether two placements share a memory unit.
func (p Placement) Overlaps(q Placement) bool {
	return p.Start < q.Start+q.Size && q.Start < p.Start+p.Size
}

func (p Placement) String() string { return fmt.Sprintf("%d:%d", p.Start, p.Size) }

// MIGProfile is a shape in which a product can be cut.
type MIGProfile struct {
	// ID is the hardware id: what nvidia-smi shows, GPU instances carry and
	// `nvidia-smi mig -cgi` takes. It identifies the profile of one product.
	ID int
	// Constant is NVML's NVML_GPU_INSTANCE_PROFILE_* number, the argument of
	// profile queries. It is another number than ID.
	Constant int
	// Name is for people: "1g.5gb", "1g.10gb+me". It is derived from the memory
	// size and changes with the driver: match on ID.
	Name string
	// Slices is the number of compute slices it takes.
	Slices int
	// Max is the largest number of instances of it on one GPU.
	Max int
	// MemoryMiB is the memory that NVML reports for it.
	MemoryMiB int
	// SMs is the number of multiprocessors, 0 where it is not known.
	SMs int
	// Placements are the legal places in ascending order. All have one size.
	Placements []Placement
	// Unverified marks a row that was inferred and not read from a device or
	// from NVIDIA's documents.
	Unverified bool
}

// Resource is the profile's part of a resource name: "mig-1g.10gb.me" for
// "1g.10gb+me".
func (p *MIGProfile) Resource() string { return MIGResource(p.Name) }

// MIGResource turns a profile's display name into the resource name, without a
// domain, that NVIDIA's device plugin gives it.
func MIGResource(profile string) string {
	return "mig-" + strings.ReplaceAll(profile, "+", ".")
}

// MIGTable says how a product can be cut. Two rules hold: placements must not
// overlap, and the compute slices together must not exceed Slices. Two 3g
// profiles fill an A100's 8 memory units with 6 of its 7 slices, so neither
// rule follows from the other.
type MIGTable struct {
	// Units is the number of memory units, 8 on an A100.
	Units int
	// Slices is the number of compute slices, 7 on an A100.
	Slices int
	// ResetForMode says that switching MIG mode needs a reset of the GPU
	// (Ampere). Later products switch while idle.
	ResetForMode bool
	// Profiles are sorted by ID.
	Profiles []MIGProfile
}

// ByID returns the profile with the given hardware id, or nil.
func (t *MIGTable) ByID(id int) *MIGProfile {
	for i := range t.Profiles {
		if t.Profiles[i].ID == id {
			return &t.Profiles[i]
		}
	}
	return nil
}

// ByName returns the profile with the given display name, or nil. It is for
// what people type; programs use ByID.
func (t *MIGTable) ByName(name string) *MIGProfile {
	for i := range t.Profiles {
		if t.Profiles[i].Name == name {
			return &t.Profiles[i]
		}
	}
	return nil
}

// Names lists the display names in the order of the table.
func (t *MIGTable) Names() []string {
	names := make([]string, len(t.Profiles))
	for i := range t.Profiles {
		names[i] = t.Profiles[i].Name
	}
	return names
}

// MIGInstance is one instance in a geometry.
type MIGInstance struct {
	ProfileID int
	Placement Placement
}

// Check returns nil where the instance can be added to the geometry, and else
// says why not: an unknown profile, an illegal placement, an overlap, too few
// compute slices, too many of its kind.
func (t *MIGTable) Check(geometry []MIGInstance, add MIGInstance) error {
	p := t.ByID(add.ProfileID)
	if p == nil {
		return fmt.Errorf("no MIG profile with id %d", add.ProfileID)
	}
	if !slices.Contains(p.Placements, add.Placement) {
		return fmt.Errorf("profile %s cannot be placed at %s", p.Name, add.Placement)
	}
	used, same := 0, 0
	for _, have := range geometry {
		q := t.ByID(have.ProfileID)
		if q == nil {
			return fmt.Errorf("no MIG profile with id %d", have.ProfileID)
		}
		if have.Placement.Overlaps(add.Placement) {
			return fmt.Errorf("profile %s at %s overlaps %s at %s", p.Name, add.Placement, q.Name, have.Placement)
		}
		used += q.Slices
		if q.ID == p.ID {
			same++
		}
	}
	if same >= p.Max {
		return fmt.Errorf("profile %s: at most %d on one GPU", p.Name, p.Max)
	}
	if used+p.Slices > t.Slices {
		return fmt.Errorf("profile %s needs %d compute slices, %d of %d are free", p.Name, p.Slices, t.Slices-used, t.Slices)
	}
	return nil
}

// Free lists the placements where an instance of the profile can be added to
// the geometry, in ascending order.
func (t *MIGTable) Free(geometry []MIGInstance, profileID int) []Placement {
	p := t.ByID(profileID)
	if p == nil {
		return nil
	}
	var free []Placement
	for _, at := range p.Placements {
		if t.Check(geometry, MIGInstance{ProfileID: profileID, Placement: at}) == nil {
			free = append(free, at)
		}
	}
	return free
}

// Geometry returns the instances of a GPU's MIG devices.
func (m *MIGState) Geometry() []MIGInstance {
	g := make([]MIGInstance, len(m.Devices))
	for i, d := range m.Devices {
		g[i] = MIGInstance{ProfileID: d.ProfileID, Placement: d.Placement}
	}
	return g
}
