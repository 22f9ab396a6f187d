package placement

import (
	"errors"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// migTables are all tables of the catalogue by the key of their product.
func migTables() map[string]*gpu.MIGTable {
	tables := make(map[string]*gpu.MIGTable)
	for _, p := range gpu.Products() {
		if p.MIG != nil {
			tables[p.Key] = p.MIG
		}
	}
	return tables
}

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

// bestRoom tries every order and place, and returns -1 where there is none.
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

// failer is a test of either kind.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
}

// checkArranged compares an answer with that of trying everything.
func checkArranged(t failer, table *gpu.MIGTable, have []gpu.MIGInstance, add []int) {
	t.Helper()
	haveBefore, addBefore := slices.Clone(have), slices.Clone(add)
	got, err := ArrangeMIG(table, have, add)
	if !slices.Equal(have, haveBefore) || !slices.Equal(add, addBefore) {
		t.Fatalf("the arguments were changed: %v, %v", have, add)
	}
	want := bestRoom(table, have, add)
	if err != nil {
		if want >= 0 || !errors.Is(err, ErrUnavailable) {
			t.Fatalf("%v beside %v: refused (%v), and there is a way that leaves %d", add, have, err, want)
		}
		if !slices.ContainsFunc(add, func(id int) bool { return strings.Contains(err.Error(), "MIG device "+table.ByID(id).Name+" ") }) {
			t.Fatalf("%v beside %v: %v, which names no profile that was asked for", add, have, err)
		}
		return
	}
	geometry := slices.Clone(have)
	var made []int
	for _, in := range got {
		if err := table.Check(geometry, in); err != nil {
			t.Fatalf("%v cannot be created in this order: %v", got, err)
		}
		geometry = append(geometry, in)
		made = append(made, in.ProfileID)
	}
	slices.Sort(made)
	slices.Sort(addBefore)
	if !slices.Equal(made, addBefore) {
		t.Fatalf("made are %v, want %v", made, addBefore)
	}
	if room := roomLeft(table, geometry); room != want || MIGRoom(table, geometry) != want {
		t.Fatalf("%v leaves %d (MIGRoom says %d), and %d is possible", got, room, MIGRoom(table, geometry), want)
	}
}

func TestArrangeMIGLeavesTheMostRoomForEverySmallRequest(t *testing.T) {
	for key, table := range migTables() {
		t.Run(key, func(t *testing.T) {
			for i, p := range table.Profiles {
				checkArranged(t, table, nil, []int{p.ID})
				for j, q := range table.Profiles[i:] {
					checkArranged(t, table, nil, []int{q.ID, p.ID})
					for _, r := range table.Profiles[i+j:] {
						checkArranged(t, table, nil, []int{q.ID, r.ID, p.ID})
					}
				}
			}
		})
	}
}

func TestArrangeMIGLeavesTheMostRoomBesideWhatIsThere(t *testing.T) {
	tables := migTables()
	var keys []string
	for key := range tables {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	rapid.Check(t, func(t *rapid.T) {
		table := tables[rapid.SampledFrom(keys).Draw(t, "product")]
		ids := func(label string, most int) []int {
			var ids []int
			for _, p := range rapid.SliceOfN(rapid.SampledFrom(table.Profiles), 0, most).Draw(t, label) {
				ids = append(ids, p.ID)
			}
			return ids
		}
		var have []gpu.MIGInstance
		for _, id := range ids("have", 4) {
			if free := table.Free(have, id); len(free) > 0 {
				have = append(have, gpu.MIGInstance{ProfileID: id, Placement: rapid.SampledFrom(free).Draw(t, "at")})
			}
		}
		checkArranged(t, table, have, ids("add", 4))
	})
}

func TestArrangeMIGDoesNotDependOnTheOrderOfTheRequest(t *testing.T) {
	table := migTables()["A100-40"]
	rapid.Check(t, func(t *rapid.T) {
		add := []int{19, 19, 20, 15, 14}
		want, err := ArrangeMIG(table, nil, add)
		if err != nil {
			t.Fatal(err)
		}
		got, err := ArrangeMIG(table, nil, rapid.Permutation(add).Draw(t, "order"))
		if diff := cmp.Diff(want, got); err != nil || diff != "" {
			t.Fatalf("%v: %s", err, diff)
		}
	})
}

func TestArrangeMIG(t *testing.T) {
	at := func(id, start, size int) gpu.MIGInstance {
		return gpu.MIGInstance{ProfileID: id, Placement: gpu.Placement{Start: start, Size: size}}
	}
	for _, c := range []struct {
		name, product string
		have          []gpu.MIGInstance
		add           []int
		want          []gpu.MIGInstance
		err           error
		text          string
	}{
		{
			// A driver takes start 0, which leaves no 4g.
			name: "a small device goes where it is in nobody's way", product: "A100-40",
			add: []int{19}, want: []gpu.MIGInstance{at(19, 6, 1)},
		},
		{
			name: "two 3g fill the memory with a slice to spare", product: "A100-40",
			add: []int{9, 9}, want: []gpu.MIGInstance{at(9, 0, 4), at(9, 4, 4)},
		},
		{name: "nothing", product: "A100-40", have: []gpu.MIGInstance{at(9, 0, 4)}},
		{
			name: "the largest come first", product: "A100-40", add: []int{19, 14, 9, 19},
			want: []gpu.MIGInstance{at(9, 4, 4), at(14, 0, 2), at(19, 2, 1), at(19, 3, 1)},
		},
		{
			name: "units of three", product: "RTX-PRO-6000", have: []gpu.MIGInstance{at(14, 3, 3)}, add: []int{5, 47},
			want: []gpu.MIGInstance{at(5, 6, 6), at(47, 0, 3)},
		},
		{
			name: "no place", product: "A100-40", have: []gpu.MIGInstance{at(19, 6, 1)}, add: []int{9, 9}, err: ErrUnavailable,
			text: "devices not available: no place for a MIG device 3g.20gb beside 1g.5gb, 3g.20gb",
		},
		{
			name: "no slices", product: "A100-40", add: []int{0, 19}, err: ErrUnavailable,
			text: "devices not available: no place for a MIG device 1g.5gb beside 7g.40gb",
		},
		{
			name: "too many of a kind", product: "A100-40", add: []int{20, 20}, err: ErrUnavailable,
			text: "devices not available: no place for a MIG device 1g.5gb+me beside 1g.5gb+me",
		},
		{
			name: "unknown", product: "A100-40", add: []int{77}, err: ErrInvalid,
			text: "invalid request: no MIG profile with id 77",
		},
		{
			name: "beside something unknown", product: "A100-40", have: []gpu.MIGInstance{at(77, 0, 1)}, add: []int{19}, err: ErrInvalid,
			text: "invalid request: no MIG profile with id 77",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ArrangeMIG(migTables()[c.product], c.have, c.add)
			if !errors.Is(err, c.err) || err != nil && err.Error() != c.text {
				t.Fatalf("error %v, want %q", err, c.text)
			}
			if diff := cmp.Diff(c.want, got); diff != "" && len(got)+len(c.want) > 0 {
				t.Error(diff)
			}
		})
	}
}

// TestArrangeMIGRefusesAnyNumberAtOnce would not end if it tried places.
func TestArrangeMIGRefusesAnyNumberAtOnce(t *testing.T) {
	for key, table := range migTables() {
		for _, p := range table.Profiles {
			many := slices.Repeat([]int{p.ID, table.Profiles[0].ID, table.Profiles[len(table.Profiles)-1].ID}, 10_000)
			if _, err := ArrangeMIG(table, nil, many); !errors.Is(err, ErrUnavailable) {
				t.Errorf("%s: %v", key, err)
			}
		}
	}
}

func BenchmarkArrangeMIG(b *testing.B) {
	for _, c := range []struct {
		name, product string
		add           []int
	}{
		{"balanced", "A100-40", []int{19, 19, 14, 9}},
		{"the most ways", "A100-40", []int{19, 19, 19, 20, 15}},
		{"twelve units", "RTX-PRO-6000", []int{14, 21, 47, 67}},
	} {
		b.Run(c.name, func(b *testing.B) {
			table := gpu.ProductByKey(c.product).MIG
			b.ReportAllocs()
			for b.Loop() {
				if _, err := ArrangeMIG(table, nil, c.add); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
