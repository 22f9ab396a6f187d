package placement

import (
	"errors"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// roomLeft is an independent count of what can still be made.
func roomLeft(t *gpu.MIGTable, geometry []gpu.MIGInstance) int {
	sum := 0
	for _, p := range t.Profiles {
		for _, at := range p.Placements {
			if t.Check(geometry, gpu.MIGInstance{ProfileID: p.ID, Placement: at}) == nil {
				sum += p.Slices * p.Slices
			}
		}
	}
	return sum
}

// bestRoom tries every order and place.
func bestRoom(t *gpu.MIGTable, geometry []gpu.MIGInstance, add []int) int {
	if len(add) == 0 {
		return roomLeft(t, geometry)
	}
	best := -1
	for _, at := range t.ByID(add[0]).Placements {
		in := gpu.MIGInstance{ProfileID: add[0], Placement: at}
		if t.Check(geometry, in) == nil {
			best = max(best, bestRoom(t, append(geometry[:len(geometry):len(geometry)], in), add[1:]))
		}
	}
	return best
}

func TestArrangeMIGLeavesTheMostRoom(t *testing.T) {
	var tables []*gpu.MIGTable
	for _, p := range gpu.Products() {
		if p.MIG != nil {
			tables = append(tables, p.MIG)
		}
	}
	rapid.Check(t, func(t *rapid.T) {
		table := rapid.SampledFrom(tables).Draw(t, "table")
		var have []gpu.MIGInstance
		draw := func(label string, most int) []int {
			var ids []int
			for range rapid.IntRange(0, most).Draw(t, label) {
				ids = append(ids, rapid.SampledFrom(table.Profiles).Draw(t, label).ID)
			}
			return ids
		}
		for _, id := range draw("have", 3) {
			if free := table.Free(have, id); len(free) > 0 {
				have = append(have, gpu.MIGInstance{ProfileID: id, Placement: rapid.SampledFrom(free).Draw(t, "at")})
			}
		}
		add := draw("add", 4)
		before := append([]gpu.MIGInstance(nil), have...)
		got, err := ArrangeMIG(table, have, add)
		if diff := cmp.Diff(before, have); diff != "" {
			t.Fatalf("the geometry was changed: %s", diff)
		}
		want := bestRoom(table, have, add)
		if err != nil {
			if want >= 0 || !errors.Is(err, ErrUnavailable) {
				t.Fatalf("refused (%v), and there is a way that leaves %d", err, want)
			}
			return
		}
		geometry := have
		counts := make(map[int]int)
		for _, in := range got {
			if err := table.Check(geometry, in); err != nil {
				t.Fatalf("%v cannot be created in this order: %v", got, err)
			}
			geometry = append(geometry[:len(geometry):len(geometry)], in)
			counts[in.ProfileID]++
		}
		for _, id := range add {
			counts[id]--
		}
		for id, n := range counts {
			if n != 0 {
				t.Fatalf("profile %d: %d too many", id, n)
			}
		}
		if room := roomLeft(table, geometry); room != want {
			t.Fatalf("%v leaves %d, %d is possible", got, room, want)
		}
	})
}

func TestArrangeMIGKeepsLargeProfilesPossible(t *testing.T) {
	a100 := gpu.ProductByKey("A100-40").MIG
	got, err := ArrangeMIG(a100, nil, []int{19})
	if err != nil {
		t.Fatal(err)
	}
	// A driver takes start 0, which leaves no 4g.
	if diff := cmp.Diff([]gpu.MIGInstance{{ProfileID: 19, Placement: gpu.Placement{Start: 6, Size: 1}}}, got); diff != "" {
		t.Error(diff)
	}
	if _, err := ArrangeMIG(a100, got, []int{9, 9}); !errors.Is(err, ErrUnavailable) {
		t.Errorf("two 3g beside a 1g: %v", err)
	}
	if _, err := ArrangeMIG(a100, nil, []int{77}); !errors.Is(err, ErrInvalid) {
		t.Errorf("profile 77: %v", err)
	}
}

func BenchmarkArrangeMIG(b *testing.B) {
	table := gpu.ProductByKey("A100-40").MIG
	for b.Loop() {
		if _, err := ArrangeMIG(table, nil, []int{19, 19, 14, 9}); err != nil {
			b.Fatal(err)
		}
	}
}
