package mig

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

func TestHeldDevicesStayWhereTheyCan(t *testing.T) {
	one := func(start int) gpu.MIGInstance {
		return gpu.MIGInstance{ProfileID: 19, Placement: gpu.Placement{Start: start, Size: 1}}
	}
	m := cutGPU(t, products[0], true, []gpu.MIGInstance{one(0), one(1), one(2), one(5)})
	read, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	g := &read.GPUs[0]
	table := gpu.ProductByName(g.Name).MIG
	held := map[string]bool{g.MIG.Devices[2].UUID: true}
	for _, test := range []struct {
		name     string
		profiles []int
		kept     []string
	}{
		{"one of four stays: the one that is held", []int{19}, []string{g.MIG.Devices[2].UUID}},
		// A 3g needs units 0-3 or 4-7: with the held one in the first, the one at 5 goes.
		{"what is in the way of a large one goes, the held one stays", []int{19, 19, 19, 9}, []string{g.MIG.Devices[0].UUID, g.MIG.Devices[1].UUID, g.MIG.Devices[2].UUID}},
		{"nothing can stay", []int{0}, nil},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := PlanGPU(g, table, Target{Enabled: true, Profiles: test.profiles}, held)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(test.kept, c.Kept); diff != "" {
				t.Error(diff)
			}
			if c.NeedsIdle {
				t.Error("the whole GPU must be idle, and its mode stays")
			}
			if n := len(c.Kept) + len(c.Destroyed); n != 4 {
				t.Errorf("%d of 4 devices are spoken of", n)
			}
		})
	}
	if c, err := PlanGPU(g, table, Target{Enabled: true, Profiles: []int{19, 19, 19, 19}}, nil); err != nil || c != nil {
		t.Errorf("what is there already needs %+v (%v)", c, err)
	}
	if c, err := PlanGPU(g, table, Target{}, nil); err != nil || !c.NeedsIdle || len(c.Destroyed) != 4 {
		t.Errorf("to be made whole it needs %+v (%v)", c, err)
	}
	if _, err := PlanGPU(g, table, Target{Enabled: true, Profiles: []int{9, 9, 9}}, nil); err == nil {
		t.Error("three 3g fit")
	}
}

// Of all sets of devices that could stay, none loses fewer that are held, or as
// many of these and fewer in all.
func TestThePlanDestroysAsLittleAsPossible(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := gpu.ProductByName(products[0]).MIG
		var geometry []gpu.MIGInstance
		for range rapid.IntRange(0, 6).Draw(t, "devices") {
			p := rapid.SampledFrom(table.Profiles).Draw(t, "profile")
			if free := table.Free(geometry, p.ID); len(free) > 0 {
				geometry = append(geometry, gpu.MIGInstance{ProfileID: p.ID, Placement: rapid.SampledFrom(free).Draw(t, "place")})
			}
		}
		m := cutGPU(t, products[0], true, geometry)
		read, err := m.Read()
		if err != nil {
			t.Fatal(err)
		}
		g := &read.GPUs[0]
		held := make(map[string]bool)
		for _, d := range g.MIG.Devices {
			held[d.UUID] = rapid.Bool().Draw(t, "held")
		}
		var profiles []int
		for range rapid.IntRange(0, 4).Draw(t, "wanted") {
			profiles = append(profiles, rapid.SampledFrom(table.Profiles).Draw(t, "wanted profile").ID)
		}
		// The dumb way: every way to place the wanted ones, whatever is there.
		best := [2]int{1 << 10, 1 << 10}
		var try func(rest []int, made []gpu.MIGInstance)
		try = func(rest []int, made []gpu.MIGInstance) {
			if len(rest) == 0 {
				cost := [2]int{}
				for _, d := range g.MIG.Devices {
					stays := false
					for _, in := range made {
						stays = stays || in == gpu.MIGInstance{ProfileID: d.ProfileID, Placement: d.Placement}
					}
					if !stays {
						cost[1]++
						if held[d.UUID] {
							cost[0]++
						}
					}
				}
				if cost[0] < best[0] || cost[0] == best[0] && cost[1] < best[1] {
					best = cost
				}
				return
			}
			for _, at := range table.Free(made, rest[0]) {
				try(rest[1:], append(made[:len(made):len(made)], gpu.MIGInstance{ProfileID: rest[0], Placement: at}))
			}
		}
		try(profiles, nil)
		c, err := PlanGPU(g, table, Target{Enabled: true, Profiles: profiles}, held)
		if err != nil {
			if best[0] < 1<<10 {
				t.Fatalf("refused, and there is a way: %v", err)
			}
			return
		}
		got := [2]int{}
		if c != nil {
			for _, uuid := range c.Destroyed {
				got[1]++
				if held[uuid] {
					got[0]++
				}
			}
		}
		if got != best {
			t.Fatalf("%v held and all devices go, %v is possible", got, best)
		}
	})
}
