package machine

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// failer is a test of either kind.
type failer interface {
	Helper()
	Errorf(format string, args ...any)
}

// checkGeometry counts the memory units and compute slices of a GPU's MIG
// devices, without the checks that the machine itself uses.
func checkGeometry(t failer, g gpu.GPU) {
	t.Helper()
	if len(g.MIG.Devices) == 0 {
		return
	}
	table := gpu.ProductByName(g.Name).MIG
	if !g.MIG.Enabled || table == nil {
		t.Errorf("GPU %d has MIG devices, MIG mode is %v", g.Index, g.MIG.Enabled)
		return
	}
	owner := make([]string, table.Units)
	slices, kinds, instances := 0, make(map[int]int), make(map[int]bool)
	for _, d := range g.MIG.Devices {
		p := table.ByID(d.ProfileID)
		slices += p.Slices
		if kinds[p.ID]++; kinds[p.ID] > p.Max {
			t.Errorf("GPU %d has %d of %s", g.Index, kinds[p.ID], p.Name)
		}
		if instances[d.GI] {
			t.Errorf("GPU %d: GI %d is there twice", g.Index, d.GI)
		}
		instances[d.GI] = true
		for u := d.Placement.Start; u < d.Placement.Start+d.Placement.Size; u++ {
			if owner[u] != "" {
				t.Errorf("GPU %d: unit %d is of %s and %s", g.Index, u, owner[u], d.UUID)
			}
			owner[u] = d.UUID
		}
	}
	if slices > table.Slices {
		t.Errorf("GPU %d: %d slices are taken of %d", g.Index, slices, table.Slices)
	}
}

// pairOfMachines does everything on a machine in memory and on one in a folder.
type pairOfMachines struct {
	t              *rapid.T
	dir            string
	memory, folder *Machine
	// used are the MIG UUIDs ever seen, by what they were.
	used map[string]string
}

// same runs an operation on both; they must agree on how it ends.
func (p *pairOfMachines) same(what string, op func(*Machine) error) {
	p.t.Helper()
	a, b := op(p.memory), op(p.folder)
	if (a == nil) != (b == nil) || a != nil && a.Error() != b.Error() {
		p.t.Fatalf("%s: in memory %v, in a folder %v", what, a, b)
	}
	if a == nil {
		return
	}
	for _, kind := range []error{gpu.ErrNotFound, gpu.ErrLost, gpu.ErrInUse, gpu.ErrNotSupported, gpu.ErrInvalid, errDriverDown} {
		if errors.Is(a, kind) {
			return
		}
	}
	p.t.Fatalf("%s: an error of no known kind: %v", what, a)
}

// check compares the machines and asserts what holds always.
func (p *pairOfMachines) check() gpu.Machine {
	p.t.Helper()
	// Read would hide all of it while the driver is down.
	var states [2]gpu.Machine
	for i, m := range []*Machine{p.memory, p.folder} {
		s, err := m.view()
		if err != nil {
			p.t.Fatal(err)
		}
		states[i] = s.machine(m.hardware)
	}
	if diff := cmp.Diff(states[0], states[1], equal); diff != "" {
		p.t.Fatalf("in memory and in a folder:\n%s", diff)
	}
	m := states[0]
	if err := m.Validate(); err != nil {
		p.t.Fatal(err)
	}
	for _, g := range m.GPUs {
		checkGeometry(p.t, g)
		for _, d := range g.MIG.Devices {
			was := strconv.Itoa(g.Index) + "/" + strconv.Itoa(d.GI) + "/" + d.Placement.String()
			if old, ok := p.used[d.UUID]; ok && old != was {
				p.t.Fatalf("UUID %s was %s and is %s", d.UUID, old, was)
			}
			p.used[d.UUID] = was
		}
	}
	return m
}

func (p *pairOfMachines) reopen() {
	p.t.Helper()
	if err := p.folder.Close(); err != nil {
		p.t.Fatal(err)
	}
	var err error
	if p.folder, err = Open(p.dir); err != nil {
		p.t.Fatal(err)
	}
}

func TestAnyOrderOfOperations(t *testing.T) {
	root := t.TempDir()
	descriptions := []*Description{
		mustBuiltin(t, "a30x4"), mustBuiltin(t, "mixed-2"),
		mustParse(t, `{name: cut, cpus: 8, memory: 64Gi, gpus: [
			{product: H100-80, migEnabled: true, mig: [{profile: 3g.40gb, start: 4}, {profile: 1g.10gb, count: 2}]},
			{product: RTX-PRO-6000, migEnabled: true}]}`),
	}
	rapid.Check(t, func(t *rapid.T) {
		dir, err := os.MkdirTemp(root, "m")
		if err != nil {
			t.Fatal(err)
		}
		desc := rapid.SampledFrom(descriptions).Draw(t, "machine")
		p := &pairOfMachines{t: t, dir: filepath.Join(dir, "machine"), memory: New(desc, "s"), used: make(map[string]string)}
		if err := Init(p.dir, desc, "s"); err != nil {
			t.Fatal(err)
		}
		if p.folder, err = Open(p.dir); err != nil {
			t.Fatal(err)
		}
		defer func() { p.folder.Close() }()
		now := p.check()

		anyGPU := rapid.Custom(func(t *rapid.T) gpu.GPU { return rapid.SampledFrom(now.GPUs).Draw(t, "gpu") })
		anyMIG := func(t *rapid.T) (gpu.GPU, gpu.MIGDevice) {
			g := anyGPU.Draw(t, "gpu")
			if len(g.MIG.Devices) == 0 {
				return g, gpu.MIGDevice{UUID: "MIG-none", GI: gpu.AnyInstance, CI: gpu.AnyInstance}
			}
			return g, rapid.SampledFrom(g.MIG.Devices).Draw(t, "mig")
		}
		create := func(t *rapid.T) {
			g := anyGPU.Draw(t, "gpu")
			in := gpu.MIGInstance{ProfileID: 19, Placement: gpu.Placement{Size: 1}}
			if table := gpu.ProductByName(g.Name).MIG; table != nil {
				profile := rapid.SampledFrom(table.Profiles).Draw(t, "profile")
				in = gpu.MIGInstance{ProfileID: profile.ID, Placement: rapid.SampledFrom(profile.Placements).Draw(t, "place")}
			}
			p.same("create", func(m *Machine) error {
				d, err := m.CreateMIG(g.UUID, in)
				if _, again := p.used[d.UUID]; err == nil && again {
					t.Fatalf("created UUID %s was used before", d.UUID)
				}
				return err
			})
		}
		t.Repeat(map[string]func(*rapid.T){
			"create": create,
			"fill":   create, // more often, so that GPUs get full
			"mode": func(t *rapid.T) {
				uuid, on := anyGPU.Draw(t, "gpu").UUID, rapid.Bool().Draw(t, "on")
				p.same("mode", func(m *Machine) error { return m.SetMIGMode(uuid, on) })
			},
			"destroy": func(t *rapid.T) {
				_, d := anyMIG(t)
				p.same("destroy", func(m *Machine) error { return m.DestroyMIG(d.UUID) })
			},
			"reset": func(t *rapid.T) {
				uuid := anyGPU.Draw(t, "gpu").UUID
				p.same("reset", func(m *Machine) error { return m.Reset(uuid) })
			},
			"processes": func(t *rapid.T) {
				g, d := anyMIG(t)
				var processes []gpu.Process
				for pid := range rapid.IntRange(0, 2).Draw(t, "processes") {
					processes = append(processes, gpu.Process{PID: pid + 1, GI: d.GI, CI: d.CI})
				}
				p.same("processes", func(m *Machine) error { return m.SetProcesses(g.UUID, processes) })
			},
			"lost": func(t *rapid.T) {
				uuid, lost := anyGPU.Draw(t, "gpu").UUID, rapid.Bool().Draw(t, "lost")
				p.same("lost", func(m *Machine) error { return m.SetLost(uuid, lost) })
			},
			"recovery": func(t *rapid.T) {
				uuid, action := anyGPU.Draw(t, "gpu").UUID, gpu.Recovery(rapid.IntRange(-1, 5).Draw(t, "action"))
				p.same("recovery", func(m *Machine) error { return m.SetRecovery(uuid, action) })
			},
			"driver": func(t *rapid.T) {
				down := rapid.Bool().Draw(t, "down")
				p.same("driver", func(m *Machine) error { return m.DriverDown(down) })
			},
			"link": func(t *rapid.T) {
				i, j, failing := rapid.IntRange(-1, 4).Draw(t, "i"), rapid.IntRange(-1, 4).Draw(t, "j"), rapid.Bool().Draw(t, "failing")
				p.same("link", func(m *Machine) error { return m.FailLinkQuery(i, j, failing) })
			},
			"xid": func(t *rapid.T) {
				g, d := anyMIG(t)
				p.same("xid", func(m *Machine) error { return m.InjectXID(g.UUID, 13, d.GI, d.CI) })
			},
			"reopen": func(*rapid.T) { p.reopen() },
			"":       func(*rapid.T) { now = p.check() },
		})
		p.reopen()
		p.check()
	})
}
