package mig

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
)

// products are one description of each way to be cut: with a reset for the mode
// and without, of 8, 4 and 12 units.
var products = []string{"NVIDIA A100-SXM4-40GB", "NVIDIA H100 80GB HBM3", "NVIDIA A30", "NVIDIA RTX PRO 6000 Blackwell Server Edition"}

var (
	errCrash = errors.New("the process died")
	errFault = errors.New("the driver refuses")
)

// mortal is hardware that lets the process die, or refuses, at a given call.
// Calls are counted twice: before they take effect, and after.
type mortal struct {
	*machine.Machine
	left int // calls until it happens, negative for never
	err  error
	dead bool
}

func (m *mortal) count() error {
	if m.dead {
		return errCrash
	}
	if m.left == 0 {
		m.dead = errors.Is(m.err, errCrash)
		m.left--
		return m.err
	}
	m.left--
	return nil
}

func (m *mortal) Read() (gpu.Machine, error) {
	if err := m.count(); err != nil {
		return gpu.Machine{}, err
	}
	return m.Machine.Read()
}

// around makes a change of which the process may not hear.
func (m *mortal) around(change func() error) error {
	if err := m.count(); err != nil {
		return err
	}
	if err := change(); err != nil {
		return err
	}
	return m.count()
}

func (m *mortal) SetMIGMode(uuid string, on bool) error {
	return m.around(func() error { return m.Machine.SetMIGMode(uuid, on) })
}

func (m *mortal) Reset(uuid string) error {
	return m.around(func() error { return m.Machine.Reset(uuid) })
}

func (m *mortal) DestroyMIG(uuid string) error {
	return m.around(func() error { return m.Machine.DestroyMIG(uuid) })
}

func (m *mortal) CreateMIG(uuid string, in gpu.MIGInstance) (gpu.MIGDevice, error) {
	var made gpu.MIGDevice
	err := m.around(func() (err error) {
		made, err = m.Machine.CreateMIG(uuid, in)
		return err
	})
	return made, err
}

// same says whether a GPU has a geometry.
func same(s *gpu.MIGState, want Geometry) bool {
	have := GeometryOf(s)
	if have.Enabled != want.Enabled || s.Pending != want.Enabled || len(have.Instances) != len(want.Instances) {
		return false
	}
	for _, in := range want.Instances {
		if !slices.Contains(have.Instances, in) {
			return false
		}
	}
	return true
}

// scene is a GPU with a geometry, and a change of it.
type scene struct {
	machine *machine.Machine
	change  *Change
	gpu     string
}

type fataler interface {
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

// cutGPU makes a machine with one GPU that is cut.
func cutGPU(t fataler, product string, enabled bool, geometry []gpu.MIGInstance) *machine.Machine {
	desc, err := machine.ParseDescription("m.yaml", []byte("name: m\ncpus: 8\nmemory: 64Gi\ngpus:\n- {product: "+product+"}\n"))
	if err != nil {
		t.Fatal(err)
	}
	m := machine.New(desc, "seed")
	read, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	uuid := read.GPUs[0].UUID
	if !enabled {
		return m
	}
	if err := errors.Join(m.SetMIGMode(uuid, true), m.Reset(uuid)); err != nil {
		t.Fatal(err)
	}
	for _, in := range geometry {
		if _, err := m.CreateMIG(uuid, in); err != nil {
			t.Fatal(err)
		}
	}
	return m
}

// newScene draws a geometry and a target, or returns nil where they are the same.
func newScene(t *rapid.T) *scene {
	product := rapid.SampledFrom(products).Draw(t, "product")
	table := gpu.ProductByName(product).MIG
	draw := func(label string) (bool, []gpu.MIGInstance) {
		var geometry []gpu.MIGInstance
		if !rapid.Bool().Draw(t, label+" enabled") {
			return false, nil
		}
		for range rapid.IntRange(0, 5).Draw(t, label) {
			p := rapid.SampledFrom(table.Profiles).Draw(t, label+" profile")
			if free := table.Free(geometry, p.ID); len(free) > 0 {
				geometry = append(geometry, gpu.MIGInstance{ProfileID: p.ID, Placement: rapid.SampledFrom(free).Draw(t, label+" place")})
			}
		}
		return true, geometry
	}
	enabled, before := draw("before")
	m := cutGPU(t, product, enabled, before)
	read, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	target := Target{}
	target.Enabled, target.Instances = draw("wanted")
	if rapid.Bool().Draw(t, "places are free") {
		for _, in := range target.Instances {
			target.Profiles = append(target.Profiles, in.ProfileID)
		}
		target.Instances = nil
	}
	change, err := PlanGPU(&read.GPUs[0], table, target, nil)
	if err != nil {
		t.Fatal(err)
	}
	if change == nil {
		return nil
	}
	return &scene{machine: m, change: change, gpu: read.GPUs[0].UUID}
}

// check fails unless the GPU is cut as before or as wanted, with the devices that
// are in both, and no journal is left.
func (s *scene) check(t fataler, dir, when string) (done bool) {
	read, err := s.machine.Read()
	if err != nil {
		t.Fatal(err)
	}
	g := &read.GPUs[0]
	done = same(&g.MIG, s.change.Wanted)
	if !done && !same(&g.MIG, s.change.Before) {
		t.Fatalf("%s: between %s and %s: %s (pending %t)", when, s.change.Before, s.change.Wanted, GeometryOf(&g.MIG), g.MIG.Pending)
	}
	for _, kept := range s.change.Kept {
		if read.Parent(kept) == nil {
			t.Fatalf("%s: device %s was destroyed, and is in both geometries", when, kept)
		}
	}
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		t.Fatal(err)
	}
	for _, e := range entries {
		if filepath.Ext(e.Name()) == recordSuffix {
			t.Fatalf("%s: the journal is left", when)
		}
	}
	return done
}

// replay makes the same scene again.
func (s *scene) replay(t fataler) *scene {
	read, err := s.machine.Read()
	if err != nil {
		t.Fatal(err)
	}
	product := read.GPUs[0].Name
	again := *s
	again.machine = cutGPU(t, product, s.change.Before.Enabled, s.change.Before.Instances)
	return &again
}

func TestACrashAtAnyCallEndsInOneOfTheTwoGeometries(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first := newScene(t)
		if first == nil {
			return
		}
		for at := 0; ; at++ {
			s := first.replay(t)
			dir, err := os.MkdirTemp("", "journal")
			if err != nil {
				t.Fatal(err)
			}
			hardware := &mortal{Machine: s.machine, left: at, err: errCrash}
			err = NewExecutor(hardware, dir).Apply(s.change)
			survived := hardware.left >= 0
			if survived && err != nil {
				t.Fatalf("without a crash: %v", err)
			}
			// The next process may die as well, at any of its own calls.
			for again := range 3 {
				next := &mortal{Machine: s.machine, left: at % (again + 5), err: errCrash}
				if again == 2 {
					next.left = -1
				}
				if _, err := NewExecutor(next, dir).Recover(); err != nil && again == 2 {
					t.Fatalf("recovery after a crash at call %d: %v", at, err)
				}
			}
			done := s.check(t, dir, fmt.Sprintf("crash at call %d", at))
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if survived {
				if !done {
					t.Fatal("without a crash it is not cut as wanted")
				}
				return
			}
		}
	})
}

func TestAStepThatFailsPutsTheGPUBack(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		first := newScene(t)
		if first == nil {
			return
		}
		for at := 0; ; at++ {
			s := first.replay(t)
			dir, err := os.MkdirTemp("", "journal")
			if err != nil {
				t.Fatal(err)
			}
			hardware := &mortal{Machine: s.machine, left: at, err: errFault}
			err = NewExecutor(hardware, dir).Apply(s.change)
			failed := hardware.left < 0
			if failed != errors.Is(err, errFault) {
				t.Fatalf("fault at call %d: %v", at, err)
			}
			s.check(t, dir, fmt.Sprintf("fault at call %d", at))
			if err := os.RemoveAll(dir); err != nil {
				t.Fatal(err)
			}
			if !failed {
				return
			}
		}
	})
}

func TestADeviceInUseStopsTheChange(t *testing.T) {
	before := []gpu.MIGInstance{{ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}}, {ProfileID: 9, Placement: gpu.Placement{Start: 4, Size: 4}}}
	m := cutGPU(t, products[0], true, before)
	read, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	g := &read.GPUs[0]
	busy := g.MIG.Devices[1]
	if err := m.SetProcesses(g.UUID, []gpu.Process{{PID: 1, GI: busy.GI, CI: busy.CI}}); err != nil {
		t.Fatal(err)
	}
	change, err := PlanGPU(g, gpu.ProductByName(g.Name).MIG, Target{Enabled: true, Profiles: []int{14, 14}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	if err := NewExecutor(m, dir).Apply(change); !errors.Is(err, gpu.ErrInUse) {
		t.Errorf("error is %v", err)
	}
	after, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	if !same(&after.GPUs[0].MIG, change.Before) || after.Parent(busy.UUID) == nil {
		t.Errorf("the GPU is %s", GeometryOf(&after.GPUs[0].MIG))
	}
}

func TestAGPUWhoseChangeHasNotEndedIsNotChangedAgain(t *testing.T) {
	m := cutGPU(t, products[0], false, nil)
	read, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	g := &read.GPUs[0]
	change, err := PlanGPU(g, gpu.ProductByName(g.Name).MIG, Target{Enabled: true, Profiles: []int{9}}, nil)
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	x := NewExecutor(&mortal{Machine: m, left: 3, err: errCrash}, dir)
	if err := x.Apply(change); !errors.Is(err, errCrash) {
		t.Fatalf("error is %v", err)
	}
	y := NewExecutor(m, dir)
	if pending, err := y.Pending(); err != nil || !slices.Equal(pending, []string{g.UUID}) {
		t.Errorf("pending are %v (%v)", pending, err)
	}
	if err := y.Apply(change); err == nil {
		t.Error("it was changed again")
	}
	if err := m.SetLost(g.UUID, true); err != nil {
		t.Fatal(err)
	}
	if _, err := y.Recover(); !errors.Is(err, gpu.ErrLost) {
		t.Errorf("recovery of a lost GPU: %v", err)
	}
	if err := m.SetLost(g.UUID, false); err != nil {
		t.Fatal(err)
	}
	outcomes, err := y.Recover()
	if err != nil || len(outcomes) != 1 || !outcomes[0].Done {
		t.Errorf("outcome %v, %v", outcomes, err)
	}
	if err := os.WriteFile(filepath.Join(dir, "GPU-x"+recordSuffix), []byte("{"), 0o600); err != nil {
		t.Fatal(err)
	}
	if _, err := y.Recover(); err == nil {
		t.Error("a damaged journal is passed over")
	}
}
