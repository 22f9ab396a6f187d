package nvml

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

func mustDo(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantError checks the kind of an error and what it names.
func wantError(t *testing.T, err, kind error, names ...string) {
	t.Helper()
	if !errors.Is(err, kind) {
		t.Errorf("got %v, want %v", err, kind)
		return
	}
	for _, name := range names {
		if !strings.Contains(err.Error(), name) {
			t.Errorf("%q does not name %q", err, name)
		}
	}
}

func second[T any](_ T, err error) error { return err }

func TestOpenFails(t *testing.T) {
	f := newFake()
	f.errs["start"] = errUnknown
	if _, err := open(f, "/sys", nil); !errors.Is(err, errUnknown) {
		t.Error(err)
	}
}

func TestWaitEvent(t *testing.T) {
	a, b := newFakeGPU("a", h100, 1), newFakeGPU("b", h100, 2)
	f := newFake(a, b)
	m := f.machine(t)
	if _, ok, err := m.WaitEvent(0); ok || err != nil {
		t.Fatalf("%v, %v", ok, err)
	}
	f.xids <- xid{b, 79, noInstance, noInstance}
	f.xids <- xid{a, 94, 3, 0}
	b.errs["uuid"] = errLost // it has just fallen off the bus
	for _, want := range []gpu.Event{
		{GPU: "GPU-b", XID: 79, GI: gpu.AnyInstance, CI: gpu.AnyInstance},
		{GPU: "GPU-a", XID: 94, GI: 3, CI: 0},
	} {
		got, ok, err := m.WaitEvent(time.Minute)
		if !ok || err != nil || got != want {
			t.Errorf("got %v, %v, %v; want %v", got, ok, err, want)
		}
	}
	if diff := cmp.Diff([]string{"GPU-a", "GPU-b"}, f.watched); diff != "" {
		t.Errorf("watched:\n%s", diff)
	}
	f.xids <- xid{newFakeGPU("c", h100, 3), 13, noInstance, noInstance}
	if got, ok, err := m.WaitEvent(time.Minute); !ok || err != nil || got.GPU != "GPU-c" {
		t.Errorf("of a GPU that was not watched: %v, %v, %v", got, ok, err)
	}
	stranger := newFakeGPU("d", h100, 4)
	stranger.errs["uuid"] = errLost
	f.xids <- xid{stranger, 13, noInstance, noInstance}
	wantError(t, third(m.WaitEvent(time.Minute)), gpu.ErrLost, "XID 13")
}

func third[T, U any](_ T, _ U, err error) error { return err }

func TestWatching(t *testing.T) {
	a, b, c := newFakeGPU("a", h100, 1), newFakeGPU("b", h100, 2), newFakeGPU("c", h100, 3)
	f := newFake(a, b, c)
	m := f.machine(t)
	a.errs["watch"] = gpu.ErrNotSupported
	b.errs["device"] = errLost
	c.errs["watch"] = errUnknown
	if _, ok, err := m.WaitEvent(time.Millisecond); ok || err != nil {
		t.Fatalf("nothing to watch: %v, %v", ok, err)
	}
	b.without("device")
	c.without("watch")
	mustDo(t, third(m.WaitEvent(0)))
	if diff := cmp.Diff([]string{"GPU-b", "GPU-c"}, f.watched); diff != "" {
		t.Errorf("after they came back:\n%s", diff)
	}
	// A lost GPU spoils the wait until it is dropped.
	f.xids <- errLost
	wantError(t, third(m.WaitEvent(time.Minute)), gpu.ErrLost)
	b.errs["device"] = errLost
	mustDo(t, third(m.WaitEvent(0)))
	if diff := cmp.Diff([]string{"GPU-c"}, f.watched); diff != "" {
		t.Errorf("after one was lost:\n%s", diff)
	}
	f.xids <- errUnknown
	wantError(t, third(m.WaitEvent(time.Minute)), errUnknown)
	f.errs["count"] = errUnknown
	wantError(t, third(m.WaitEvent(0)), errUnknown)
}

func TestCloseEndsEverything(t *testing.T) {
	for _, watch := range []error{nil, gpu.ErrNotSupported} {
		g := newFakeGPU("a", h100, 1)
		g.errs["watch"] = watch
		f := newFake(g)
		m := f.machine(t)
		mustDo(t, third(m.WaitEvent(0)))
		waiting := make(chan error)
		go func() { waiting <- third(m.WaitEvent(time.Hour)) }()
		mustDo(t, m.Close())
		mustDo(t, m.Close())
		for name, err := range map[string]error{
			"waiting": <-waiting, "WaitEvent": third(m.WaitEvent(0)), "Read": second(m.Read()), "Reset": m.Reset("GPU-a"),
			"SetMIGMode": m.SetMIGMode("GPU-a", true), "CreateMIG": second(m.CreateMIG("GPU-a", oneAt0)),
			"DestroyMIG": m.DestroyMIG("MIG-"), "Processes": second(m.Processes("GPU-a")),
		} {
			if !errors.Is(err, os.ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if diff := cmp.Diff([]string{"start", "stop"}, f.calls); diff != "" {
			t.Error(diff)
		}
	}
}

func TestConcurrentUse(t *testing.T) {
	f, _ := pairs()
	m := f.machine(t)
	var work sync.WaitGroup
	for range 4 {
		work.Go(func() {
			for range 20 {
				if _, err := m.Read(); err != nil {
					t.Error(err)
				}
				if _, err := m.Processes("GPU-1"); err != nil {
					t.Error(err)
				}
			}
		})
		work.Go(func() {
			for range 20 {
				if _, _, err := m.WaitEvent(time.Millisecond); err != nil {
					t.Error(err)
				}
			}
		})
	}
	m.resetTool = func(string) error { return nil }
	for range 5 {
		if err := m.Reset("GPU-0"); err != nil {
			t.Error(err)
		}
	}
	work.Wait()
}

func TestFind(t *testing.T) {
	f, g := pairs()
	m := f.machine(t)
	wantError(t, m.SetMIGMode("GPU-none", true), gpu.ErrNotFound, "GPU-none")
	wantError(t, second(m.Processes("GPU-none")), gpu.ErrNotFound, "GPU-none")
	read(t, m)
	g[2].errs["device"] = errLost
	for name, err := range map[string]error{
		"SetMIGMode": m.SetMIGMode("GPU-2", true), "CreateMIG": second(m.CreateMIG("GPU-2", oneAt0)),
		"Reset": m.Reset("GPU-2"), "Processes": second(m.Processes("GPU-2")),
	} {
		t.Run(name, func(t *testing.T) { wantError(t, err, gpu.ErrLost, "GPU 2 (GPU-2): ") })
	}
	g[0].errs["uuid"] = errLost // as much lost to a search
	mustDo(t, second(m.Processes("GPU-1")))
	f.errs["count"] = errUnknown
	wantError(t, m.Reset("GPU-1"), errUnknown)
}

func TestProcesses(t *testing.T) {
	g := newFakeGPU("a", h100, 1)
	g.procs = []process{
		{10, 3 << 20, noInstance, noInstance},
		{11, unknownMemory, 2, 0},
		{10, 5<<20 + 1, noInstance, noInstance}, // as compute and as graphics
		{10, 1 << 20, 2, 0},
	}
	m := newFake(g).machine(t)
	got, err := m.Processes("GPU-a")
	mustDo(t, err)
	want := []gpu.Process{
		{PID: 10, MemoryMiB: 5, GI: gpu.AnyInstance, CI: gpu.AnyInstance},
		{PID: 11, GI: 2},
		{PID: 10, MemoryMiB: 1, GI: 2},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	g.errs["processes"] = errUnknown
	wantError(t, second(m.Processes("GPU-a")), errUnknown, "GPU 0 (GPU-a): list processes")
}

// Of an 8-unit product.
var (
	oneAt0   = gpu.MIGInstance{ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}}
	threeAt4 = gpu.MIGInstance{ProfileID: 9, Placement: gpu.Placement{Start: 4, Size: 4}}
)

func TestSetMIGMode(t *testing.T) {
	busy := []process{{1, 0, noInstance, noInstance}}
	for _, c := range []struct {
		name             string
		board            string
		change           func(*fakeGPU)
		on               bool
		err              error
		enabled, pending bool // afterwards
	}{
		{"at once", h100, func(*fakeGPU) {}, true, nil, true, true},
		{"off at once", h100, func(g *fakeGPU) { g.enabled, g.pending = true, true }, false, nil, false, false},
		{"needs a reset", a100, func(g *fakeGPU) { g.activation = gpu.ErrInUse }, true, nil, false, true},
		{"the driver itself resets", a100, func(*fakeGPU) {}, true, nil, true, true},
		{"unknown product, pending", "NVIDIA Z1000", func(g *fakeGPU) { g.migCapable, g.activation = true, gpu.ErrInUse }, true, nil, false, true},
		{"another client", h100, func(g *fakeGPU) { g.activation = gpu.ErrInUse }, true, gpu.ErrInUse, false, false},
		{"process", h100, func(g *fakeGPU) { g.procs = busy }, true, gpu.ErrInUse, false, false},
		{"has it already", h100, func(g *fakeGPU) { g.enabled, g.pending, g.procs = true, true, busy }, true, nil, true, true},
		{"takes back", a100, func(g *fakeGPU) { g.enabled, g.procs = true, busy }, true, nil, true, true},
		{"off with devices", h100, func(g *fakeGPU) { g.enabled, g.pending = true, true; g.cut(19, 0, 1, 1, 1) }, false, gpu.ErrInUse, true, true},
		{"no MIG", t4, func(*fakeGPU) {}, true, gpu.ErrNotSupported, false, false},
		{"driver refuses", h100, func(g *fakeGPU) { g.errs["setMIGMode"] = errUnknown }, true, errUnknown, false, false},
		{"processes unknown", h100, func(g *fakeGPU) { g.errs["processes"] = errUnknown }, true, errUnknown, false, false},
		{"devices unknown", h100, func(g *fakeGPU) { g.enabled, g.pending, g.errs["migMax"] = true, true, errUnknown }, false, errUnknown, true, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newFakeGPU("a", c.board, 1)
			c.change(g)
			err := newFake(g).machine(t).SetMIGMode("GPU-a", c.on)
			if c.err == nil {
				mustDo(t, err)
			} else {
				wantError(t, err, c.err, "GPU 0 (GPU-a): set MIG mode")
			}
			if g.enabled != c.enabled || g.pending != c.pending {
				t.Errorf("enabled %v, pending %v; want %v, %v", g.enabled, g.pending, c.enabled, c.pending)
			}
		})
	}
}

// Compute instances of one GPU instance take its slices once.
func TestCreateMIGBesideAnInstanceWithTwoComputeInstances(t *testing.T) {
	g := newFakeGPU("a", h100, 1)
	g.enabled, g.pending = true, true
	g.cut(5, 0, 4, 4, 2, 2)
	m := newFake(g).machine(t)
	if got := read(t, m).GPUs[0].MIG.Devices; len(got) != 2 || got[1].Profile != "2c.4g.40gb" {
		t.Fatalf("before: %+v", got)
	}
	mustDo(t, second(m.CreateMIG("GPU-a", threeAt4)))
}

func TestCreateMIG(t *testing.T) {
	g := newFakeGPU("a", h100, 1)
	m := newFake(g).machine(t)
	wantError(t, second(m.CreateMIG("GPU-a", oneAt0)), gpu.ErrInvalid, "GPU 0 (GPU-a): create MIG device", "MIG mode is off")
	g.enabled, g.pending = true, true
	got, err := m.CreateMIG("GPU-a", threeAt4)
	mustDo(t, err)
	want := gpu.MIGDevice{UUID: "MIG-GPU-a-1-0", GI: 1, ProfileID: 9, Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, MemoryMiB: 40779,
		Attributes: gpu.MIGAttributes{SMs: 42, Slices: 3, ComputeSlices: 3, CopyEngines: 3}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
	if compute := g.instances[0].compute; len(compute) != 1 || compute[0].slices != 3 {
		t.Errorf("compute instances: %v", compute)
	}
	if diff := cmp.Diff([]gpu.MIGDevice{want}, read(t, m).GPUs[0].MIG.Devices); diff != "" {
		t.Error(diff)
	}
	wantError(t, second(m.CreateMIG("GPU-a", threeAt4)), gpu.ErrInvalid, "3g.40gb at 4:4 overlaps 3g.40gb at 4:4")
	wantError(t, second(m.CreateMIG("GPU-a", gpu.MIGInstance{ProfileID: 98})), gpu.ErrInvalid, "no MIG profile with id 98")
	if len(g.instances) != 1 || g.created != 1 {
		t.Errorf("refused, yet made: %v", g.instances)
	}
	none := newFakeGPU("b", t4, 2)
	wantError(t, second(newFake(none).machine(t).CreateMIG("GPU-b", oneAt0)), gpu.ErrNotSupported, "the product cannot do MIG")
}

// A profile that the driver knows and the catalogue does not is the driver's to
// judge.
func TestCreateMIGOfUnknownProfile(t *testing.T) {
	g := newFakeGPU("a", h100, 1)
	g.enabled = true
	g.profiles[30] = profile{77, 2}
	m := newFake(g).machine(t)
	in := gpu.MIGInstance{ProfileID: 77, Placement: gpu.Placement{Start: 2, Size: 2}}
	got, err := m.CreateMIG("GPU-a", in)
	mustDo(t, err)
	if got.ProfileID != 77 || got.Profile != "2g.20gb" || got.Placement != in.Placement {
		t.Errorf("got %+v", got)
	}
	g.errs["createInstance"] = gpu.ErrInvalid
	wantError(t, second(m.CreateMIG("GPU-a", in)), gpu.ErrInvalid, "profile 77 at 2:2")
}

func TestCreateMIGUndoes(t *testing.T) {
	for _, c := range []struct {
		method string
		err    error
		left   bool // the GPU instance
	}{
		{"createInstance", errUnknown, false},
		{"createCompute", errUnknown, false},
		{"computeProfile", gpu.ErrNotSupported, false},
		// Asked for after the creation:
		{"name", errUnknown, false},
		{"memory", errUnknown, false},
		{"migDevice", gpu.ErrNotFound, false},
		{"destroyInstance", errUnknown, true},
		{"destroyCompute", errUnknown, true},
	} {
		t.Run(c.method, func(t *testing.T) {
			g := newFakeGPU("a", h100, 1)
			g.enabled = true
			m := newFake(g).machine(t)
			g.errs[c.method] = c.err
			if c.method == "destroyInstance" {
				g.errs["createCompute"] = errUnknown
			}
			if c.method == "destroyCompute" {
				g.errs["memory"] = errUnknown
			}
			err := second(m.CreateMIG("GPU-a", oneAt0))
			wantError(t, err, c.err, "GPU-a")
			if left := len(g.instances) > 0; left != c.left {
				t.Errorf("left behind: %v", g.instances)
			}
			if c.left && !strings.Contains(err.Error(), "GPU instance 1 is left") {
				t.Errorf("the error does not say what is left: %v", err)
			}
		})
	}
}

func TestDestroyMIG(t *testing.T) {
	cut := func() (*fakeDriver, *fakeGPU) {
		plain, g := newFakeGPU("a", t4, 1), newFakeGPU("b", h100, 2)
		g.enabled = true
		g.cut(19, 0, 1, 1, 1)
		g.cut(14, 2, 2, 2, 1, 1)
		return newFake(plain, g), g
	}
	f, g := cut()
	m := f.machine(t)
	wantError(t, m.DestroyMIG("MIG-none"), gpu.ErrNotFound, "MIG-none")
	g.procs = []process{{1, 0, 2, 0}}
	wantError(t, m.DestroyMIG("MIG-GPU-b-2-0"), gpu.ErrInUse, "GPU 1 (GPU-b): destroy MIG device", "MIG-GPU-b-2-0")
	mustDo(t, m.DestroyMIG("MIG-GPU-b-2-1"))
	if len(g.instances) != 2 || len(g.instances[1].compute) != 1 {
		t.Errorf("the instance that another compute instance fills: %v", g.instances)
	}
	mustDo(t, m.DestroyMIG("MIG-GPU-b-1-0"))
	g.procs = []process{{1, 0, noInstance, noInstance}} // in no one knows which
	wantError(t, m.DestroyMIG("MIG-GPU-b-2-0"), gpu.ErrInUse)
	g.procs = nil
	mustDo(t, m.DestroyMIG("MIG-GPU-b-2-0"))
	if len(g.instances) != 0 {
		t.Errorf("left: %v", g.instances)
	}

	for _, c := range []struct {
		method string
		err    error
		says   string
	}{
		{"processes", errUnknown, "list processes"},
		{"destroyCompute", gpu.ErrInUse, "MIG-GPU-b-1-0"},
		{"destroyInstance", gpu.ErrInUse, "GPU instance 1 is left without a compute instance"},
		{"migMax", errUnknown, "list MIG devices"},
		{"uuid", gpu.ErrLost, "GPU 1 (GPU-b)"},
		{"device", gpu.ErrLost, "GPU 1 (GPU-b)"},
	} {
		f, g := cut()
		m := f.machine(t)
		read(t, m)
		g.errs[c.method] = c.err
		t.Run(c.method, func(t *testing.T) { wantError(t, m.DestroyMIG("MIG-GPU-b-1-0"), c.err, c.says) })
	}
}

func TestReset(t *testing.T) {
	g := newFakeGPU("a", a100, 1)
	f := newFake(g)
	m := f.machine(t)
	mustDo(t, third(m.WaitEvent(0)))
	var reset []string
	m.resetTool = func(uuid string) error {
		if f.started {
			t.Error("the library uses the GPU during the reset")
		}
		reset = append(reset, uuid)
		g.enabled = g.pending
		return nil
	}
	g.procs = []process{{1, 0, noInstance, noInstance}}
	wantError(t, m.Reset("GPU-a"), gpu.ErrInUse, "GPU 0 (GPU-a): reset")
	g.procs = nil
	g.pending = true
	mustDo(t, m.Reset("GPU-a"))
	if !slices.Equal(reset, []string{"GPU-a"}) || !read(t, m).GPUs[0].MIG.Enabled {
		t.Errorf("reset %v, MIG %+v", reset, read(t, m).GPUs[0].MIG)
	}
	mustDo(t, third(m.WaitEvent(0)))
	if diff := cmp.Diff([]string{"GPU-a"}, f.watched); diff != "" {
		t.Errorf("watched after the reset:\n%s", diff)
	}

	m.resetTool = func(string) error { return gpu.ErrInUse }
	wantError(t, m.Reset("GPU-a"), gpu.ErrInUse, "GPU 0 (GPU-a): reset")
	read(t, m)
	m.resetTool = func(string) error { return nil }
	f.errs["start"] = errUnknown
	wantError(t, m.Reset("GPU-a"), errUnknown, "the driver does not start again")
	if _, err := m.Read(); err == nil {
		t.Error("read a driver that did not start")
	}
}

func TestResetTool(t *testing.T) {
	bin := t.TempDir()
	t.Setenv("PATH", bin)
	wantError(t, runResetTool("GPU-a"), gpu.ErrNotSupported, "nvidia-smi", "PATH")
	script := func(text string) {
		t.Helper()
		mustDo(t, os.WriteFile(filepath.Join(bin, "nvidia-smi"), []byte("#!/bin/sh\n"+text), 0o755))
	}
	script(`test "$*" = "--gpu-reset -i GPU-a"`)
	mustDo(t, runResetTool("GPU-a"))
	script(`echo "GPU 0 is currently in use by another process."; exit 1`)
	wantError(t, runResetTool("GPU-a"), gpu.ErrInUse, "another process")
	script(`echo "no permission"; exit 4`)
	if err := runResetTool("GPU-a"); err == nil || errors.Is(err, gpu.ErrInUse) || !strings.Contains(err.Error(), "exit status 4: no permission") {
		t.Error(err)
	}
}
