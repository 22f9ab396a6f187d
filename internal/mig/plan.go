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
	// Enabled is the MIG mode.
	Enabled bool `json:"enabled"`
	// Instances are the GPU instances.
	Instances []gpu.MIGInstance `json:"instances,omitempty"`
}

// GeometryOf is how a GPU is cut now. Compute instances that share a GPU instance
// are one.
func GeometryOf(s *gpu.MIGState) Geometry {
	g := Geometry{Enabled: s.Enabled}
	for i := range s.Devices {
		if !sharesBefore(s.Devices, i) {
			g.Instances = append(g.Instances, instanceOf(&s.Devices[i]))
		}
	}
	return g
}

func (g Geometry) String() string {
	if !g.Enabled {
		return "MIG off"
	}
	if len(g.Instances) == 0 {
		return "MIG on, no devices"
	}
	texts := make([]string, len(g.Instances))
	for i, in := range g.Instances {
		texts[i] = fmt.Sprintf("%d at %s", in.ProfileID, in.Placement)
	}
	return "MIG on, profiles " + strings.Join(texts, ", ")
}

func instanceOf(d *gpu.MIGDevice) gpu.MIGInstance {
	return gpu.MIGInstance{ProfileID: d.ProfileID, Placement: d.Placement}
}

// sharesBefore says whether one of the devices before it is in the same GPU
// instance.
func sharesBefore(devices []gpu.MIGDevice, i int) bool {
	return slices.ContainsFunc(devices[:i], func(d gpu.MIGDevice) bool { return d.GI == devices[i].GI })
}

// whole says whether the device fills its GPU instance. Others, made by hand, leave
// some of its slices to others or to nobody; they are never what is wanted.
func whole(devices []gpu.MIGDevice, i int) bool {
	d := &devices[i]
	if n := d.Attributes.ComputeSlices; n > 0 && n < d.Attributes.Slices {
		return false
	}
	return !sharesBefore(devices, i) && !slices.ContainsFunc(devices[i+1:], func(e gpu.MIGDevice) bool { return e.GI == d.GI })
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
// placement.MIGRoom). It returns nil where nothing is to be done, and an error
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
	if _, more := nextStep(&g.MIG, c.Wanted, forward); !more {
		return nil, nil //nolint:nilnil // nil is documented as "nothing to do"
	}
	return c, nil
}

// exact takes the wanted places as they are.
func (c *Change) exact(g *gpu.GPU, t *gpu.MIGTable, wanted []gpu.MIGInstance, keep []bool) error {
	for _, in := range wanted {
		if err := t.Check(c.Wanted.Instances, in); err != nil {
			return err
		}
		c.Wanted.Instances = append(c.Wanted.Instances, in)
	}
	for i := range g.MIG.Devices {
		keep[i] = whole(g.MIG.Devices, i) && slices.Contains(wanted, instanceOf(&g.MIG.Devices[i]))
	}
	return nil
}

// choose finds places for the wanted profiles. It tries every set of present
// devices to keep: there are seven at most, and most sets are not wanted.
func (c *Change) choose(g *gpu.GPU, t *gpu.MIGTable, profiles []int, held map[string]bool, keep []bool) error {
	devices := g.MIG.Devices
	var present []int
	for i := range devices {
		if whole(devices, i) && t.ByID(devices[i].ProfileID) != nil {
			present = append(present, i)
		}
	}
	// A cost is compared from the left.
	type cost [3]int
	var best cost
	var bestSet []bool
	for set := range 1 << len(present) {
		kept := make([]bool, len(devices))
		for bit, i := range present {
			kept[i] = set&(1<<bit) != 0
		}
		geometry, err := keeping(devices, t, profiles, kept)
		if err != nil && set == 0 {
			return err // where nothing is in the way, they do not fit either
		}
		if err != nil {
			continue
		}
		now := cost{2: -placement.MIGRoom(t, geometry)}
		for i, d := range devices {
			if !kept[i] {
				now[1]++
				if held[d.UUID] {
					now[0]++
				}
			}
		}
		if bestSet == nil || slices.Compare(now[:], best[:]) < 0 {
			best, bestSet, c.Wanted.Instances = now, kept, geometry
		}
	}
	copy(keep, bestSet)
	return nil
}

// keeping is a geometry with the wanted profiles that has the kept devices. It fails
// where a kept device is not wanted, or the others do not fit beside them.
func keeping(devices []gpu.MIGDevice, t *gpu.MIGTable, profiles []int, kept []bool) ([]gpu.MIGInstance, error) {
	rest := slices.Clone(profiles)
	var geometry []gpu.MIGInstance
	for i := range devices {
		if !kept[i] {
			continue
		}
		at := slices.Index(rest, devices[i].ProfileID)
		if at < 0 {
			return nil, fmt.Errorf("%w: %s is not wanted", placement.ErrUnavailable, devices[i].UUID)
		}
		rest = slices.Delete(rest, at, at+1)
		geometry = append(geometry, instanceOf(&devices[i]))
	}
	made, err := placement.ArrangeMIG(t, geometry, rest)
	return append(geometry, made...), err
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

// direction is the way of a change.
type direction int

const (
	// forward is to what is wanted: devices that fill their GPU instances.
	forward direction = iota
	// back is to what was before. A GPU instance that is there then stays, with the
	// compute instances that are in it.
	back
)

// nextStep is the next step from a state to a geometry, false where it is there.
// It depends on nothing else, so that it does not matter where one begins: what is
// not wanted is destroyed first, and then what is wanted is made in order. Each
// geometry on the way is a part of a legal one, and so is legal.
func nextStep(s *gpu.MIGState, to Geometry, way direction) (step, bool) {
	if to.Enabled && !s.Enabled {
		if !s.Pending {
			return step{op: setMode, on: true}, true
		}
		return step{op: reset}, true
	}
	missing := slices.Clone(to.Instances)
	for i := range s.Devices {
		if sharesBefore(s.Devices, i) {
			continue // the one before it stays, or it would be the next to go
		}
		at := slices.Index(missing, instanceOf(&s.Devices[i]))
		if at < 0 || way == forward && !whole(s.Devices, i) {
			return step{op: destroy, uuid: s.Devices[i].UUID}, true
		}
		missing = slices.Delete(missing, at, at+1)
	}
	switch {
	case s.Pending != to.Enabled:
		return step{op: setMode, on: to.Enabled}, true
	case s.Enabled != to.Enabled:
		return step{op: reset}, true
	case len(missing) > 0:
		return step{op: create, instance: missing[0]}, true
	}
	return step{}, false
}
