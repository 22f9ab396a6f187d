package machine

import (
	"fmt"
	"slices"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// hardware is what never changes in a machine.
type hardware struct {
	driver, cuda, board string
	units               []unit
	links               gpu.Links
}

// unit is one GPU as it was built in.
type unit struct {
	// gpu has everything but what depends on seed and state: UUIDs, MIG modes and
	// devices, health, recovery.
	gpu gpu.GPU
	// product is nil where the catalogue does not know the GPU.
	product *gpu.Product
	// delivered is the state that the description asks for, without UUIDs.
	delivered gpuState
}

// what names the kind of the GPU in messages.
func (u *unit) what() string {
	if u.product != nil {
		return u.product.Key
	}
	return u.gpu.Name
}

// table is how the GPU can be cut, nil where that is not known.
func (u *unit) table() *gpu.MIGTable {
	if u.product == nil || !u.gpu.MIG.Capable {
		return nil
	}
	return u.product.MIG
}

// maxNVLinks is above the number of NVLinks of any GPU.
const maxNVLinks = 64

// nvlinks is the number of NVLinks that the GPU can have.
func (u *unit) nvlinks() int {
	if u.product != nil {
		return u.product.NVLinks
	}
	return maxNVLinks
}

// fits says whether the catalogue allows an instance beside others. Of those that it
// does not know only the place counts.
func (u *unit) fits(have []instance, add gpu.MIGInstance) error {
	table := u.table()
	if table == nil {
		return fmt.Errorf("the catalogue does not know the MIG profiles of %s: %w", u.gpu.Name, gpu.ErrNotSupported)
	}
	var known []gpu.MIGInstance
	for i, in := range have {
		switch {
		case slices.ContainsFunc(have[:i], func(other instance) bool { return other.GI == in.GI }):
			// Another compute instance of the same GPU instance.
		case table.ByID(in.MIG.ProfileID) != nil:
			known = append(known, in.MIG)
		case in.MIG.Placement.Overlaps(add.Placement):
			return fmt.Errorf("place %s overlaps %s at %s", add.Placement, in.As.Profile, in.MIG.Placement)
		}
	}
	return table.Check(known, add)
}

// migDevice is an instance as a driver reports it.
func (u *unit) migDevice(in *instance, index int) gpu.MIGDevice {
	d := gpu.MIGDevice{
		Index: index, UUID: in.UUID, GI: in.GI, CI: in.CI, ProfileID: in.MIG.ProfileID, Placement: in.MIG.Placement,
	}
	if in.As != nil {
		d.Profile, d.MemoryMiB, d.Attributes = in.As.Profile, in.As.MemoryMiB, in.As.Attributes
		return d
	}
	p := u.product.MIG.ByID(in.MIG.ProfileID)
	d.Profile, d.MemoryMiB, d.Attributes = p.Name, p.MemoryMiB, u.product.Attributes(p)
	return d
}
