package gpu

import (
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
)

func TestCatalogueNamesAreUnique(t *testing.T) {
	keys, names := make(map[string]bool), make(map[string]bool)
	for _, p := range Products() {
		if keys[p.Key] {
			t.Errorf("key %s is there twice", p.Key)
		}
		keys[p.Key] = true
		if ProductByKey(p.Key) == nil || ProductByKey(p.Key).Key != p.Key {
			t.Errorf("ProductByKey(%q) finds another", p.Key)
		}
		if len(p.Names) == 0 || p.MemoryMiB < 1 || p.Compute.Family() == "undefined" {
			t.Errorf("%s: incomplete: %+v", p.Key, p)
		}
		for _, n := range p.Names {
			if names[n] {
				t.Errorf("name %s is there twice", n)
			}
			names[n] = true
			if got := ProductByName(n); got == nil || got.Key != p.Key {
				t.Errorf("ProductByName(%q) = %v, want %s", n, got, p.Key)
			}
		}
	}
	for _, key := range []string{"V100", "T4", "A10G", "A100-40", "A100-80", "A30", "L40S", "H100-80", "H100-94", "H200", "B200", "RTX-PRO-6000"} {
		if !keys[key] {
			t.Errorf("no product %s", key)
		}
	}
	if ProductByKey("H9000") != nil || ProductByName("") != nil {
		t.Error("an unknown product is found")
	}
}

// tables are the products that can be cut.
func tables() map[string]*MIGTable {
	all := make(map[string]*MIGTable)
	for _, p := range Products() {
		if p.MIG != nil {
			all[p.Key] = p.MIG
		}
	}
	return all
}

func TestMIGTablesAreConsistent(t *testing.T) {
	for key, table := range tables() {
		ids, names := make(map[int]bool), make(map[string]bool)
		for i := range table.Profiles {
			p := &table.Profiles[i]
			if ids[p.ID] || names[p.Name] {
				t.Errorf("%s: profile %s (%d) is there twice", key, p.Name, p.ID)
			}
			ids[p.ID], names[p.Name] = true, true
			if table.ByID(p.ID) != p || table.ByName(p.Name) != p {
				t.Errorf("%s: %s is not found by id and name", key, p.Name)
			}
			if !slices.IsSortedFunc(p.Placements, func(a, b Placement) int { return a.Start - b.Start }) {
				t.Errorf("%s: placements of %s are not sorted", key, p.Name)
			}
			for _, at := range p.Placements {
				if at.Start < 0 || at.Size < 1 || at.Start+at.Size > table.Units || at.Size != p.Placements[0].Size {
					t.Errorf("%s: %s at %s leaves the GPU's %d units or differs in size", key, p.Name, at, table.Units)
				}
			}
			if got := mostAlone(table, p, nil); got != p.Max {
				t.Errorf("%s: %s fits %d times, the table says %d", key, p.Name, got, p.Max)
			}
		}
		if !slices.IsSortedFunc(table.Profiles, func(a, b MIGProfile) int { return a.ID - b.ID }) {
			t.Errorf("%s: profiles are not sorted by id", key)
		}
	}
}

// mostAlone is the largest number of instances of one profile, by trying all
// ways to place them.
func mostAlone(table *MIGTable, p *MIGProfile, have []MIGInstance) int {
	best := len(have)
	for _, at := range table.Free(have, p.ID) {
		best = max(best, mostAlone(table, p, append(slices.Clone(have), MIGInstance{p.ID, at})))
	}
	return best
}

func TestMIGGeometries(t *testing.T) {
	table := ProductByKey("A100-40").MIG
	id := func(name string) int { return table.ByName(name).ID }
	for _, c := range []struct {
		name     string
		geometry []MIGInstance
		add      MIGInstance
		want     string // part of the error, "" for none
	}{
		{"3g beside 4g", []MIGInstance{{id("4g.20gb"), Placement{0, 4}}}, MIGInstance{id("3g.20gb"), Placement{4, 4}}, ""},
		{"two 3g fill the memory", []MIGInstance{{id("3g.20gb"), Placement{0, 4}}, {id("3g.20gb"), Placement{4, 4}}}, MIGInstance{id("1g.5gb"), Placement{6, 1}}, "overlaps"},
		{"1g at 0 blocks 4g", []MIGInstance{{id("1g.5gb"), Placement{0, 1}}}, MIGInstance{id("4g.20gb"), Placement{0, 4}}, "overlaps"},
		{"1g at 6 leaves 4g", []MIGInstance{{id("1g.5gb"), Placement{6, 1}}}, MIGInstance{id("4g.20gb"), Placement{0, 4}}, ""},
		{"no such place", nil, MIGInstance{id("2g.10gb"), Placement{6, 2}}, "cannot be placed at 6:2"},
		{"one media engine", []MIGInstance{{id("1g.5gb+me"), Placement{0, 1}}}, MIGInstance{id("1g.5gb+me"), Placement{1, 1}}, "at most 1"},
		{"no such profile", nil, MIGInstance{99, Placement{0, 1}}, "no MIG profile with id 99"},
	} {
		err := table.Check(c.geometry, c.add)
		if (err == nil) != (c.want == "") || err != nil && !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %q", c.name, err, c.want)
		}
	}
	// 1g with double memory takes two units and one slice, so slices are left over
	// and memory is not.
	var have []MIGInstance
	for _, start := range []int{0, 2, 4, 6} {
		have = append(have, MIGInstance{id("1g.10gb"), Placement{start, 2}})
	}
	if free := table.Free(have, id("1g.5gb")); len(free) != 0 {
		t.Errorf("after four 1g.10gb, 1g.5gb is free at %v", free)
	}
}

// TestGeometriesNeverOverlap cuts GPUs at random and looks at units and slices
// in the plainest way.
func TestGeometriesNeverOverlap(t *testing.T) {
	all := tables()
	var keys []string
	for key := range all {
		keys = append(keys, key)
	}
	slices.Sort(keys)
	rapid.Check(t, func(t *rapid.T) {
		table := all[rapid.SampledFrom(keys).Draw(t, "product")]
		var have []MIGInstance
		for range rapid.IntRange(0, 20).Draw(t, "steps") {
			p := rapid.SampledFrom(table.Profiles).Draw(t, "profile")
			add := MIGInstance{p.ID, rapid.SampledFrom(p.Placements).Draw(t, "placement")}
			if slices.Contains(table.Free(have, p.ID), add.Placement) != (table.Check(have, add) == nil) {
				t.Fatalf("Free and Check disagree on %v after %v", add, have)
			}
			if table.Check(have, add) == nil {
				have = append(have, add)
			}
		}
		units := make([]int, table.Units)
		used := 0
		for _, g := range have {
			used += table.ByID(g.ProfileID).Slices
			for u := g.Placement.Start; u < g.Placement.Start+g.Placement.Size; u++ {
				units[u]++
			}
		}
		if used > table.Slices || slices.Max(units) > 1 {
			t.Fatalf("%v uses %d of %d slices, units %v", have, used, table.Slices, units)
		}
	})
}

func TestMIGResource(t *testing.T) {
	if got := MIGResource("1g.10gb+me"); got != "mig-1g.10gb.me" {
		t.Errorf("got %s", got)
	}
}

func TestFamilies(t *testing.T) {
	for key, want := range map[string]string{"V100": "volta", "T4": "turing", "A10G": "ampere", "L40S": "ada-lovelace", "H200": "hopper", "B200": "blackwell", "RTX-PRO-6000": "blackwell"} {
		if got := ProductByKey(key).Compute.Family(); got != want {
			t.Errorf("%s is of family %s, want %s", key, got, want)
		}
	}
	if got := (ComputeCapability{Major: 99}).Family(); got != "undefined" {
		t.Errorf("99.0 is of family %s", got)
	}
}

func TestLinksAreSymmetric(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		n := rapid.IntRange(0, 6).Draw(t, "gpus")
		links := NewLinks(n)
		best := make(map[[2]int]Link)
		for range rapid.IntRange(0, 20).Draw(t, "reports") {
			i, j := rapid.IntRange(-1, 7).Draw(t, "i"), rapid.IntRange(-1, 7).Draw(t, "j")
			report := Link{NVLinks: rapid.IntRange(0, 18).Draw(t, "nvlinks"), PCIe: PCIeLevel(rapid.IntRange(0, 6).Draw(t, "pcie"))}
			links.Merge(i, j, report)
			if i != j && min(i, j) >= 0 && max(i, j) < n {
				pair := [2]int{min(i, j), max(i, j)}
				best[pair] = Link{max(best[pair].NVLinks, report.NVLinks), max(best[pair].PCIe, report.PCIe)}
			}
		}
		for i := range n {
			for j := range n {
				if got, want := links.At(i, j), best[[2]int{min(i, j), max(i, j)}]; got != want {
					t.Fatalf("At(%d, %d) = %v, want %v", i, j, got, want)
				}
			}
		}
	})
}

func TestLinkScore(t *testing.T) {
	m := Machine{GPUs: []GPU{{NVSwitch: "s", NVLinks: 12}, {NVSwitch: "s", NVLinks: 12}, {NVLinks: 4}}, Links: NewLinks(3)}
	m.Links.Merge(0, 1, Link{PCIe: PCIeSystem})
	m.Links.Merge(0, 2, Link{NVLinks: 4, PCIe: PCIeNode})
	for _, c := range []struct{ i, j, want int }{{0, 1, 1210}, {1, 0, 1210}, {0, 2, 420}, {1, 2, 0}, {1, 1, 0}} {
		if got := m.LinkScore(c.i, c.j); got != c.want {
			t.Errorf("LinkScore(%d, %d) = %d, want %d", c.i, c.j, got, c.want)
		}
	}
}

func TestPCIeLevelNames(t *testing.T) {
	for l := PCIeUnknown; l <= PCIeInternal; l++ {
		if got, ok := ParsePCIeLevel(l.String()); !ok || got != l {
			t.Errorf("%s is read as %v", l, got)
		}
	}
	if _, ok := ParsePCIeLevel("NVL"); ok {
		t.Error("NVL is read")
	}
}

func TestMachineValidate(t *testing.T) {
	good := func() *Machine {
		return &Machine{GPUs: []GPU{
			{Index: 0, UUID: "GPU-0", MIG: MIGState{Devices: []MIGDevice{{Index: 0, UUID: "MIG-0"}}}},
			{Index: 1, UUID: "GPU-1"},
		}, Links: NewLinks(2)}
	}
	for _, c := range []struct {
		name  string
		spoil func(*Machine)
		want  string
	}{
		{"good", func(*Machine) {}, ""},
		{"order", func(m *Machine) { m.GPUs[1].Index = 0 }, "gpu 1 has index 0"},
		{"twice", func(m *Machine) { m.GPUs[1].UUID = "GPU-0" }, "gpu 1: UUID GPU-0 is given twice"},
		{"none", func(m *Machine) { m.GPUs[0].UUID = "" }, "gpu 0 has no UUID"},
		{"mig twice", func(m *Machine) { m.GPUs[0].MIG.Devices[0].UUID = "GPU-0" }, "gpu 0: mig device 0: UUID GPU-0 is given twice"},
		{"mig order", func(m *Machine) { m.GPUs[0].MIG.Devices[0].Index = 3 }, "gpu 0: mig device 0 has index 3"},
		{"links", func(m *Machine) { m.Links = NewLinks(3) }, "links are for 3 GPUs, the machine has 2"},
	} {
		m := good()
		c.spoil(m)
		got := ""
		if err := m.Validate(); err != nil {
			got = err.Error()
		}
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
	}
	m := good()
	if m.Parent("MIG-0") != &m.GPUs[0] || m.Parent("GPU-1") != &m.GPUs[1] || m.Parent("GPU-2") != nil || m.ByUUID("MIG-0") != nil {
		t.Error("Parent or ByUUID finds the wrong GPU")
	}
}

func FuzzParseDeviceID(f *testing.F) {
	for _, s := range []string{"GPU-a", "GPU-a::3", "MIG-b::0", "GPU-a::", "GPU-a::-1", "GPU-a::01", "GPU-a::1::2", "", "::1", "nvidia0"} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, s string) {
		id, err := ParseDeviceID(s)
		if err != nil {
			return
		}
		if id.String() != s {
			t.Errorf("%q is read as %+v, which is written %q", s, id, id)
		}
		if id.Slot < NoSlot || !strings.HasPrefix(id.Base, "GPU-") && !strings.HasPrefix(id.Base, "MIG-") {
			t.Errorf("%q is read as %+v", s, id)
		}
	})
}
