package sharing

import (
	"fmt"
	"maps"
	"math/rand"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// drawMachine makes up to 6 GPUs of up to three models, some cut at random.
func drawMachine(t *rapid.T) *gpu.Machine {
	n := rapid.IntRange(0, 6).Draw(t, "gpus")
	m := machine(max(n, 1), "A100-40")
	m.GPUs, m.Links = m.GPUs[:n], gpu.NewLinks(n)
	for i := range m.GPUs {
		g := &m.GPUs[i]
		g.Name = gpu.ProductByKey(rapid.SampledFrom([]string{"A100-40", "A100-40", "A10G", "H100-80"}).Draw(t, "product")).Names[0]
		g.Health.State = rapid.SampledFrom([]gpu.HealthState{gpu.Healthy, gpu.Healthy, gpu.Unhealthy, gpu.Lost}).Draw(t, "health")
		table := gpu.ProductByName(g.Name).MIG
		if table == nil || !rapid.Bool().Draw(t, "mig") {
			continue
		}
		cut(g)
		for range rapid.IntRange(0, 4).Draw(t, "instances") {
			p := rapid.SampledFrom(table.Profiles).Draw(t, "profile")
			if free := table.Free(g.MIG.Geometry(), p.ID); len(free) > 0 {
				j := len(g.MIG.Devices)
				g.MIG.Devices = append(g.MIG.Devices, gpu.MIGDevice{
					Index: j, UUID: testUUID("MIG", 100*i+j), GI: j, ProfileID: p.ID, Profile: p.Name, Placement: free[0],
				})
			}
		}
	}
	return m
}

// drawConfig makes a configuration that is valid but for clashes of names.
func drawConfig(t *rapid.T) *Config {
	names := []string{"nvidia.com/gpu", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-3g.20gb", "nvidia.com/a", "example.com/b"}
	name := rapid.SampledFrom(names)
	c := Default()
	c.Flags.MIGStrategy = rapid.SampledFrom([]MIGStrategy{MIGNone, MIGSingle, MIGMixed, MIGMixed}).Draw(t, "strategy")
	patterns := rapid.SliceOfN(rapid.Custom(func(t *rapid.T) ResourcePattern {
		return ResourcePattern{rapid.SampledFrom([]string{"*", "*A100*", "NVIDIA A10G", "1g*", "*gb"}).Draw(t, "pattern"), name.Draw(t, "name")}
	}), 0, 2)
	c.Resources = Resources{GPUs: patterns.Draw(t, "gpus"), MIG: patterns.Draw(t, "mig")}
	entry := rapid.Custom(func(t *rapid.T) SharedResource {
		e := SharedResource{Name: name.Draw(t, "name"), Replicas: rapid.IntRange(2, 5).Draw(t, "replicas")}
		if rapid.IntRange(0, 3).Draw(t, "exclusive") == 0 {
			e.Name, e.Replicas = rapid.SampledFrom([]string{"nvidia.com/x", "nvidia.com/y"}).Draw(t, "name"), 1
		} else if rapid.Bool().Draw(t, "rename") {
			e.Rename = rapid.SampledFrom([]string{"nvidia.com/r", "nvidia.com/s", "nvidia.com/a"}).Draw(t, "new name")
		}
		switch rapid.IntRange(0, 3).Draw(t, "devices") {
		case 0:
			e.Devices.Count = rapid.IntRange(1, 7).Draw(t, "count")
		case 1:
			e.Devices.List = rapid.SliceOfNDistinct(rapid.SampledFrom([]string{
				"0", "1", "2", "0:0", "1:1", testUUID("GPU", 0), testUUID("GPU", 3), testUUID("MIG", 0), testUUID("GPU", 77),
			}), 1, 4, rapid.ID).Draw(t, "list")
		}
		return e
	})
	if entries := rapid.SliceOfNDistinct(entry, 0, 4, func(e SharedResource) string { return e.Name }).Draw(t, "entries"); len(entries) > 0 {
		c.TimeSlicing = &Sharing{
			Resources: entries, RenameByDefault: rapid.Bool().Draw(t, "rename by default"),
			FailRequestsGreaterThanOne: rapid.Bool().Draw(t, "fail"),
		}
	}
	return c
}

func TestPlanInvariants(t *testing.T) {
	planned, refused := 0, 0
	rapid.Check(t, func(t *rapid.T) {
		m, c := drawMachine(t), drawConfig(t)
		plan, warnings, err := c.Plan(m)
		again, warnings2, err2 := c.Plan(m)
		if !cmp.Equal(plan, again) || !cmp.Equal(warnings, warnings2) || fmt.Sprint(err) != fmt.Sprint(err2) {
			t.Fatal("the same input gave another output")
		}
		if err != nil {
			if plan != nil {
				t.Fatal("both a plan and an error")
			}
			refused++
			return
		}
		planned++
		checkPlan(t, c, m, plan)
	})
	t.Logf("%d plans, %d refusals", planned, refused)
	if planned == 0 || refused == 0 {
		t.Error("the cases are all of one kind")
	}
}

type fataler interface{ Fatalf(string, ...any) }

// checkPlan asserts what must hold for every plan.
func checkPlan(t fataler, c *Config, m *gpu.Machine, plan *Plan) {
	replicas := make(map[string]int) // by name of the shared resource
	if c.TimeSlicing != nil {
		for i := range c.TimeSlicing.Resources {
			e := &c.TimeSlicing.Resources[i]
			replicas[c.TimeSlicing.sharedName(e)] = e.Replicas
		}
	}
	if !slices.IsSortedFunc(plan.Resources, func(a, b Resource) int { return strings.Compare(a.Name, b.Name) }) {
		t.Fatalf("resources are not sorted")
	}
	homes := map[bool]map[string]string{false: {}, true: {}} // exclusive? -> base -> resource
	names := make(map[string]bool)
	shared := make(map[string]bool) // bases with slots
	for _, r := range plan.Resources {
		if names[r.Name] || len(r.Devices) == 0 {
			t.Fatalf("resource %s is there twice or empty", r.Name)
		}
		names[r.Name] = true
		slots := make(map[string]int)
		ids := make(map[gpu.DeviceID]bool)
		last := [3]int{-1, -1, -1}
		for _, d := range r.Devices {
			if ids[d.ID] {
				t.Fatalf("%s has device %s twice", r.Name, d.ID)
			}
			ids[d.ID] = true
			if id, err := gpu.ParseDeviceID(d.ID.String()); err != nil || id != d.ID {
				t.Fatalf("id %s does not survive: %v", d.ID, err)
			}
			g := m.Parent(d.ID.Base)
			if g == nil || g.UUID != d.GPU {
				t.Fatalf("%s: device %s is not of GPU %s of this machine", r.Name, d.ID, d.GPU)
			}
			if whole := d.ID.Base == g.UUID; whole == g.MIG.Enabled {
				t.Fatalf("%s: device %s is whole: %v, MIG mode is %v", r.Name, d.ID, whole, g.MIG.Enabled)
			}
			if d.Health != g.Health || d.NUMA != g.NUMA {
				t.Fatalf("%s: device %s differs from its GPU", r.Name, d.ID)
			}
			if home, ok := homes[r.Exclusive][d.ID.Base]; ok && home != r.Name {
				t.Fatalf("device %s is in %s and %s", d.ID, home, r.Name)
			}
			homes[r.Exclusive][d.ID.Base] = r.Name
			if d.ID.Slot != gpu.NoSlot {
				slots[d.ID.Base]++
				shared[d.ID.Base] = true
			}
			at := [3]int{g.Index, 0, d.ID.Slot}
			fmt.Sscanf(d.Index, "%d:%d", &at[0], &at[1])
			if at[0] != g.Index || slices.Compare(last[:], at[:]) >= 0 {
				t.Fatalf("%s: device %s (%s) is out of order", r.Name, d.ID, d.Index)
			}
			last = at
		}
		for base, n := range slots {
			if n != r.Replicas || n != replicas[r.Name] {
				t.Fatalf("%s: %s has %d slots, the resource says %d, the configuration %d", r.Name, base, n, r.Replicas, replicas[r.Name])
			}
		}
		if (r.Strategy == TimeSlicing) != (len(slots) > 0) || r.Strategy == None && (r.Replicas != 1 || r.FailRequestsGreaterThanOne) {
			t.Fatalf("%s: strategy %s, %d replicas, %d devices shared", r.Name, r.Strategy, r.Replicas, len(slots))
		}
	}
	for base := range homes[true] {
		if !shared[base] || homes[false][base] == "" {
			t.Fatalf("the exclusive view of %s is not of a shared GPU", base)
		}
	}
	// Nothing disappears: what can be offered is.
	for _, g := range m.GPUs {
		if !g.MIG.Enabled && c.Flags.MIGStrategy != MIGSingle && homes[false][g.UUID] == "" {
			t.Fatalf("GPU %d is not offered", g.Index)
		}
		for _, d := range g.MIG.Devices {
			if c.Flags.MIGStrategy != MIGNone && homes[false][d.UUID] == "" {
				t.Fatalf("MIG device %d:%d is not offered", g.Index, d.Index)
			}
		}
	}
}

// The order of maps and of map keys in the file must not show.
func TestParseIgnoresKeyOrder(t *testing.T) {
	parts := map[string]string{
		"version":   "version: v1\n",
		"flags":     "flags: {migStrategy: mixed, mofedEnabled: true}\n",
		"resources": "resources: {gpus: [{pattern: '*A100*', name: a100}]}\n",
		"sharing":   "sharing: {timeSlicing: {resources: [{name: a100, replicas: 3}, {name: alone, replicas: 1}]}}\n",
	}
	want, _, err := Parse("f", []byte(strings.Join(slices.Collect(maps.Values(parts)), "")))
	if err != nil {
		t.Fatal(err)
	}
	rapid.Check(t, func(t *rapid.T) {
		order := rapid.Permutation(slices.Sorted(maps.Keys(parts))).Draw(t, "order")
		var text strings.Builder
		for _, key := range order {
			text.WriteString(parts[key])
		}
		got, _, err := Parse("f", []byte(text.String()))
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(want, got, ignorePlaces); diff != "" {
			t.Fatalf("(-want +got):\n%s", diff)
		}
	})
}

// Any change of one byte is read or refused in full.
func TestParseMutations(t *testing.T) {
	random := rand.New(rand.NewSource(1))
	for _, file := range testFiles(t, "testdata/good/*.yaml", 10) {
		data, err := os.ReadFile(file)
		if err != nil {
			t.Fatal(err)
		}
		for range 100 {
			changed := slices.Clone(data)
			changed[random.Intn(len(changed))] = "\n:-[]{}*&!|>'\"#x0 "[random.Intn(17)]
			checkParse(t, changed)
		}
	}
}

func checkParse(t testing.TB, data []byte) {
	t.Helper()
	c, _, err := Parse("f", data)
	if err != nil {
		if c != nil {
			t.Fatalf("both a configuration and an error")
		}
		checkProblems(t, err, string(data))
		return
	}
	if errs := c.validate(); len(errs) > 0 {
		t.Fatalf("accepted, but not valid: %v", errs)
	}
	for _, m := range []*gpu.Machine{mixed(), allMIG(), fourA10G()} {
		if plan, _, err := c.Plan(m); err == nil {
			checkPlan(t, c, m, plan)
		} else if plan != nil {
			t.Fatalf("both a plan and an error")
		}
	}
}

func FuzzParse(f *testing.F) {
	for _, pattern := range []string{"testdata/good/*.yaml", "testdata/bad/*.yaml"} {
		for _, file := range testFiles(f, pattern, 10) {
			data, err := os.ReadFile(file)
			if err != nil {
				f.Fatal(err)
			}
			f.Add(data)
		}
	}
	f.Fuzz(func(t *testing.T, data []byte) { checkParse(t, data) })
}
