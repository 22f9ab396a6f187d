package mig

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// Geometry is how a GPU is cut.
type Geometry struct {
	Enabled   bool              `json:"enabled"`
	Instances []gpu.MIGInstance `json:"instances,omitempty"`
}

// GeometryOf is how a GPU is cut now.
func GeometryOf(s *gpu.MIGState) Geometry {
	return Geometry{Enabled: s.Enabled, Instances: s.Geometry()}
}

func (g Geometry) String() string {
	if !g.Enabled {
		return "MIG off"
	}
	texts := make([]string, len(g.Instances))
	for i, in := range g.Instances {
		texts[i] = fmt.Sprintf("%d at %s", in.ProfileID, in.Placement)
	}
	return "MIG on, profiles " + strings.Join(texts, ", ")
}

// Change is what one GPU needs to be cut as is wanted.
type Change struct {
	// GPU is the UUID, Index the index of the GPU.
	GPU   string
	Index int
	// Before and Wanted are the geometries. What is in both stays.
	Before, Wanted Geometry
	// Destroyed and Kept are the UUIDs of the devices that go and that stay.
	Destroyed, Kept []string
	// NeedsIdle says that the GPU must not be in use at all, since its MIG mode
	// changes.
	NeedsIdle bool
}

// PlanGPU compares a GPU with what is wanted of it. Held are the UUIDs of devices
// in use. Of the ways to get the wanted devices it takes the one that destroys the
// fewest held devices, then the fewest devices, and then leaves the most room (see
// placement.ArrangeMIG). It returns nil where nothing is to be done, and an error
// where the wanted devices do not fit on the GPU together.
func PlanGPU(g *gpu.GPU, t *gpu.MIGTable, target Target, held map[string]bool) (*Change, error) {
	c := &Change{GPU: g.UUID, Index: g.Index, Before: GeometryOf(&g.MIG), Wanted: Geometry{Enabled: target.Enabled}}
	keep := make([]bool, len(g.MIG.Devices))
	var err error
	switch {
	case !target.Enabled:
	case len(target.Instances) > 0:
		err = c.exact(g, t, target.Instances, keep)
	default:
		err = c.choose(g, t, target.Profiles, held, keep)
	}
	if err != nil {
		return nil, fmt.Errorf("GPU %d (%s): %w", g.Index, g.UUID, err)
	}
	for i, d := range g.MIG.Devices {
		if keep[i] {
			c.Kept = append(c.Kept, d.UUID)
		} else {
			c.Destroyed = append(c.Destroyed, d.UUID)
		}
	}
	c.NeedsIdle = g.MIG.Enabled != target.Enabled
	if _, more := nextStep(&g.MIG, c.Wanted); !more {
		return nil, nil //nolint:nilnil // nil is documented as "nothing to do"
	}
	return c, nil
}

// alone says whether the device is the only one of its GPU instance. Others, made
// by hand, share an instance; they are never what is wanted.
func alone(devices []gpu.MIGDevice, i int) bool {
	for j := range devices {
		if j != i && devices[j].GI == devices[i].GI {
			return false
		}
	}
	return true
}

// exact takes the wanted places as they are.
func (c *Change) exact(g *gpu.GPU, t *gpu.MIGTable, wanted []gpu.MIGInstance, keep []bool) error {
	for _, in := range wanted {
		if err := t.Check(c.Wanted.Instances, in); err != nil {
			return err
		}
		c.Wanted.Instances = append(c.Wanted.Instances, in)
	}
	for i, d := range g.MIG.Devices {
		keep[i] = alone(g.MIG.Devices, i) && slices.Contains(wanted, gpu.MIGInstance{ProfileID: d.ProfileID, Placement: d.Placement})
	}
	return nil
}

// choose finds places for the wanted profiles. It tries every set of present
// devices to keep: there are seven at most.
func (c *Change) choose(g *gpu.GPU, t *gpu.MIGTable, profiles []int, held map[string]bool, keep []bool) error {
	devices := g.MIG.Devices
	var present []int
	for i := range devices {
		if alone(devices, i) && t.ByID(devices[i].ProfileID) != nil {
			present = append(present, i)
		}
	}
	type cost struct{ held, destroyed, room int }
	var best *cost
	var failure error
	for set := range 1 << len(present) {
		rest := slices.Clone(profiles)
		var kept []gpu.MIGInstance
		now := cost{destroyed: len(devices)}
		for _, d := range devices {
			if held[d.UUID] {
				now.held++
			}
		}
		fits := true
		for bit, i := range present {
			if set&(1<<bit) == 0 {
				continue
			}
			at := slices.Index(rest, devices[i].ProfileID)
			if at < 0 {
				fits = false
				break
			}
			rest = slices.Delete(rest, at, at+1)
			kept = append(kept, gpu.MIGInstance{ProfileID: devices[i].ProfileID, Placement: devices[i].Placement})
			now.destroyed--
			if held[devices[i].UUID] {
				now.held--
			}
		}
		if !fits {
			continue
		}
		made, err := placement.ArrangeMIG(t, kept, rest)
		if err != nil {
			failure = err
			continue
		}
		geometry := append(kept, made...)
		for _, p := range t.Profiles {
			now.room += p.Slices * p.Slices * len(t.Free(geometry, p.ID))
		}
		if best == nil || now.held < best.held || now.held == best.held &&
			(now.destroyed < best.destroyed || now.destroyed == best.destroyed && now.room > best.room) {
			best = &now
			c.Wanted.Instances = geometry
			clear(keep)
			for bit, i := range present {
				keep[i] = set&(1<<bit) != 0
			}
		}
	}
	if best == nil {
		return failure
	}
	return nil
}

// op is a single call to the hardware.
type op int

const (
	setMode op = iota
	reset
	destroy
	create
)

// step is the next call that brings a GPU nearer to a geometry.
type step struct {
	op       op
	on       bool
	uuid     string
	instance gpu.MIGInstance
}

func (s step) String() string {
	switch s.op {
	case setMode:
		return fmt.Sprintf("set MIG mode %t", s.on)
	case reset:
		return "reset"
	case destroy:
		return "destroy " + s.uuid
	default:
		return fmt.Sprintf("create profile %d at %s", s.instance.ProfileID, s.instance.Placement)
	}
}

// nextStep is the next step from a state to a geometry, false where it is there.
// It depends on nothing else, so that it does not matter where one begins: what is
// not wanted is destroyed first, and then what is wanted is made in order.
func nextStep(s *gpu.MIGState, want Geometry) (step, bool) {
	if want.Enabled && !s.Enabled {
		if !s.Pending {
			return step{op: setMode, on: true}, true
		}
		return step{op: reset}, true
	}
	missing := slices.Clone(want.Instances)
	for i, d := range s.Devices {
		at := slices.Index(missing, gpu.MIGInstance{ProfileID: d.ProfileID, Placement: d.Placement})
		if at < 0 || !alone(s.Devices, i) {
			return step{op: destroy, uuid: d.UUID}, true
		}
		missing = slices.Delete(missing, at, at+1)
	}
	switch {
	case s.Pending != want.Enabled:
		return step{op: setMode, on: want.Enabled}, true
	case s.Enabled != want.Enabled:
		return step{op: reset}, true
	case len(missing) > 0:
		return step{op: create, instance: missing[0]}, true
	}
	return step{}, false
}
