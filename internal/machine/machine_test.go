package machine

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// equal compares machines, whose links have no exported fields.
var equal = cmp.AllowUnexported(gpu.Links{})

// opened makes a machine in a folder.
func opened(t testing.TB, d *Description, seed string) (*Machine, string) {
	t.Helper()
	dir := filepath.Join(t.TempDir(), "machine")
	if err := Init(dir, d, seed); err != nil {
		t.Fatal(err)
	}
	return reopened(t, dir), dir
}

func reopened(t testing.TB, dir string) *Machine {
	t.Helper()
	m, err := Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// each runs a test in memory and in a folder.
func each(t *testing.T, builtin string, test func(t *testing.T, m *Machine)) {
	t.Helper()
	d := mustBuiltin(t, builtin)
	t.Run("memory", func(t *testing.T) { test(t, New(d, "node-1")) })
	t.Run("folder", func(t *testing.T) {
		m, _ := opened(t, d, "node-1")
		test(t, m)
	})
}

func mustDo(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// wantError checks the kind of an error and that it names the GPU.
func wantError(t testing.TB, err, kind error, names string) {
	t.Helper()
	if !errors.Is(err, kind) || !strings.Contains(err.Error(), names) {
		t.Errorf("got %v, want %q and the name %s", err, kind, names)
	}
}

// Of an 8-unit product.
var (
	oneAt0   = gpu.MIGInstance{ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}}
	oneAt1   = gpu.MIGInstance{ProfileID: 19, Placement: gpu.Placement{Start: 1, Size: 1}}
	twoAt2   = gpu.MIGInstance{ProfileID: 14, Placement: gpu.Placement{Start: 2, Size: 2}}
	threeAt4 = gpu.MIGInstance{ProfileID: 9, Placement: gpu.Placement{Start: 4, Size: 4}}
	threeAt0 = gpu.MIGInstance{ProfileID: 9, Placement: gpu.Placement{Start: 0, Size: 4}}
)

func TestUUIDs(t *testing.T) {
	d := mustBuiltin(t, "p4d.24xlarge")
	form := regexp.MustCompile(`^GPU-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	seen := make(map[string]bool)
	for _, seed := range []string{"node-1", "node-2", ""} {
		first, again := read(t, New(d, seed)), read(t, New(d, seed))
		if diff := cmp.Diff(first, again, equal); diff != "" {
			t.Errorf("seed %q makes two machines:\n%s", seed, diff)
		}
		for _, g := range first.GPUs {
			if seen[g.UUID] || !form.MatchString(g.UUID) {
				t.Errorf("seed %q, GPU %d: UUID %s is not new or not of the usual form", seed, g.Index, g.UUID)
			}
			seen[g.UUID] = true
		}
	}
}

func TestMIG(t *testing.T) {
	each(t, "dgx-h100", func(t *testing.T, m *Machine) {
		uuid := read(t, m).GPUs[3].UUID
		_, err := m.CreateMIG(uuid, oneAt0)
		wantError(t, err, gpu.ErrInvalid, "GPU 3 ("+uuid+"): create MIG device: MIG mode is off")
		mustDo(t, m.SetMIGMode(uuid, true))
		if g := read(t, m).GPUs[3]; !g.MIG.Enabled || !g.MIG.Pending {
			t.Fatalf("this product switches at once: %+v", g.MIG)
		}
		first, err := m.CreateMIG(uuid, oneAt0)
		mustDo(t, err)
		second, err := m.CreateMIG(uuid, twoAt2)
		mustDo(t, err)
		third, err := m.CreateMIG(uuid, threeAt4)
		mustDo(t, err)
		for _, c := range []struct {
			add    gpu.MIGInstance
			reason string
		}{
			{oneAt0, "overlaps"},
			{gpu.MIGInstance{ProfileID: 99}, "no MIG profile with id 99"},
			{gpu.MIGInstance{ProfileID: 19, Placement: gpu.Placement{Start: 7, Size: 1}}, "cannot be placed"},
		} {
			_, err := m.CreateMIG(uuid, c.add)
			wantError(t, err, gpu.ErrInvalid, uuid)
			wantError(t, err, gpu.ErrInvalid, c.reason)
		}
		want := []gpu.MIGDevice{
			{Index: 0, UUID: first.UUID, GI: 1, ProfileID: 19, Profile: "1g.10gb", Placement: gpu.Placement{Start: 0, Size: 1}, MemoryMiB: 9984,
				Attributes: gpu.MIGAttributes{SMs: 16, Slices: 1, ComputeSlices: 1, CopyEngines: 1, Decoders: 1, JPEG: 1}},
			{Index: 1, UUID: second.UUID, GI: 2, ProfileID: 14, Profile: "2g.20gb", Placement: gpu.Placement{Start: 2, Size: 2}, MemoryMiB: 20096,
				Attributes: gpu.MIGAttributes{SMs: 32, Slices: 2, ComputeSlices: 2, CopyEngines: 2, Decoders: 2, JPEG: 2}},
			{Index: 2, UUID: third.UUID, GI: 3, ProfileID: 9, Profile: "3g.40gb", Placement: gpu.Placement{Start: 4, Size: 4}, MemoryMiB: 40448,
				Attributes: gpu.MIGAttributes{SMs: 60, Slices: 3, ComputeSlices: 3, CopyEngines: 3, Decoders: 3, JPEG: 3}},
		}
		if diff := cmp.Diff(want, []gpu.MIGDevice{first, second, third}); diff != "" {
			t.Errorf("created:\n%s", diff)
		}
		if diff := cmp.Diff(want, read(t, m).GPUs[3].MIG.Devices); diff != "" {
			t.Errorf("read:\n%s", diff)
		}
		// Indices close the gap; GIs stay, and a free one is used again; UUIDs never.
		mustDo(t, m.DestroyMIG(first.UUID))
		again, err := m.CreateMIG(uuid, oneAt0)
		mustDo(t, err)
		want = append(want[1:], want[0])
		for i := range want {
			want[i].Index = i
		}
		want[2].UUID = again.UUID
		if diff := cmp.Diff(want, read(t, m).GPUs[3].MIG.Devices); diff != "" {
			t.Errorf("after one is replaced:\n%s", diff)
		}
		if again.UUID == first.UUID {
			t.Errorf("UUID %s is used twice", again.UUID)
		}
		wantError(t, m.DestroyMIG(first.UUID), gpu.ErrNotFound, first.UUID)
		wantError(t, m.SetMIGMode(uuid, false), gpu.ErrInUse, uuid)
		for _, d := range want {
			mustDo(t, m.DestroyMIG(d.UUID))
		}
		mustDo(t, m.SetMIGMode(uuid, false))
		if got := read(t, m).GPUs[3].MIG; got.Enabled || got.Pending || len(got.Devices) > 0 {
			t.Errorf("switched off: %+v", got)
		}
	})
}

func TestMIGSliceBudget(t *testing.T) {
	m := New(mustBuiltin(t, "dgx-h100"), "n")
	uuid := read(t, m).GPUs[0].UUID
	mustDo(t, m.SetMIGMode(uuid, true))
	for _, in := range []gpu.MIGInstance{threeAt0, threeAt4} {
		_, err := m.CreateMIG(uuid, in)
		mustDo(t, err)
	}
	// All memory is taken with a slice to spare.
	_, err := m.CreateMIG(uuid, oneAt1)
	wantError(t, err, gpu.ErrInvalid, uuid)
}

func TestMIGModeNeedsReset(t *testing.T) {
	each(t, "p4d.24xlarge", func(t *testing.T, m *Machine) {
		uuid := read(t, m).GPUs[0].UUID
		mode := func(enabled, pending bool, devices int) {
			t.Helper()
			got := read(t, m).GPUs[0].MIG
			if got.Enabled != enabled || got.Pending != pending || len(got.Devices) != devices {
				t.Errorf("enabled %v, pending %v, %d devices; want %v, %v, %d",
					got.Enabled, got.Pending, len(got.Devices), enabled, pending, devices)
			}
		}
		mustDo(t, m.SetMIGMode(uuid, true))
		mode(false, true, 0)
		_, err := m.CreateMIG(uuid, oneAt0)
		wantError(t, err, gpu.ErrInvalid, uuid)
		mustDo(t, m.SetMIGMode(uuid, false))
		mode(false, false, 0)
		mustDo(t, m.SetMIGMode(uuid, true))
		mustDo(t, m.Reset(uuid))
		mode(true, true, 0)

		d, err := m.CreateMIG(uuid, oneAt0)
		mustDo(t, err)
		wantError(t, m.SetMIGMode(uuid, false), gpu.ErrInUse, uuid)
		mode(true, true, 1)
		mustDo(t, m.DestroyMIG(d.UUID))
		mustDo(t, m.SetMIGMode(uuid, false))
		mode(true, false, 0)
		// Until the reset the mode is on, and what is made then does not outlive it.
		_, err = m.CreateMIG(uuid, oneAt0)
		mustDo(t, err)
		mustDo(t, m.Reset(uuid))
		mode(false, false, 0)
	})
}

func TestNotSupported(t *testing.T) {
	m := New(mustBuiltin(t, "g4dn.xlarge"), "n")
	uuid := read(t, m).GPUs[0].UUID
	wantError(t, m.SetMIGMode(uuid, true), gpu.ErrNotSupported, uuid)
	_, err := m.CreateMIG(uuid, oneAt0)
	wantError(t, err, gpu.ErrNotSupported, uuid)
	mustDo(t, m.Reset(uuid))
}

func TestNotFound(t *testing.T) {
	m := New(mustBuiltin(t, "g4dn.xlarge"), "n")
	const uuid = "GPU-00000000-0000-0000-0000-000000000000"
	for name, err := range map[string]error{
		"SetMIGMode":     m.SetMIGMode(uuid, true),
		"CreateMIG":      second(m.CreateMIG(uuid, oneAt0)),
		"DestroyMIG":     m.DestroyMIG(uuid),
		"Reset":          m.Reset(uuid),
		"Processes":      second(m.Processes(uuid)),
		"SetLost":        m.SetLost(uuid, true),
		"SetUnhealthy":   m.SetUnhealthy(uuid, "hot"),
		"ClearUnhealthy": m.ClearUnhealthy(uuid),
		"SetRecovery":    m.SetRecovery(uuid, gpu.RecoveryReset),
		"InjectXID":      m.InjectXID(uuid, 79, gpu.AnyInstance, gpu.AnyInstance),
		"SetProcesses":   m.SetProcesses(uuid, nil),
	} {
		t.Run(name, func(t *testing.T) { wantError(t, err, gpu.ErrNotFound, uuid) })
	}
}

func second[T any](_ T, err error) error { return err }

func TestInUse(t *testing.T) {
	each(t, "dgx-h100", func(t *testing.T, m *Machine) {
		uuid := read(t, m).GPUs[0].UUID
		whole := []gpu.Process{{PID: 7, MemoryMiB: 100, GI: gpu.AnyInstance, CI: gpu.AnyInstance}}
		mustDo(t, m.SetProcesses(uuid, whole))
		got, err := m.Processes(uuid)
		mustDo(t, err)
		if diff := cmp.Diff(whole, got); diff != "" {
			t.Error(diff)
		}
		wantError(t, m.SetMIGMode(uuid, true), gpu.ErrInUse, uuid)
		wantError(t, m.Reset(uuid), gpu.ErrInUse, uuid)
		mustDo(t, m.SetProcesses(uuid, nil))
		mustDo(t, m.SetMIGMode(uuid, true))
		busy, err := m.CreateMIG(uuid, oneAt0)
		mustDo(t, err)
		idle, err := m.CreateMIG(uuid, oneAt1)
		mustDo(t, err)
		wantError(t, m.SetProcesses(uuid, whole), gpu.ErrInvalid, uuid)
		wantError(t, m.SetProcesses(uuid, []gpu.Process{{PID: 0, GI: busy.GI, CI: busy.CI}}), gpu.ErrInvalid, uuid)
		mustDo(t, m.SetProcesses(uuid, []gpu.Process{{PID: 8, MemoryMiB: 5, GI: busy.GI, CI: busy.CI}}))
		wantError(t, m.DestroyMIG(busy.UUID), gpu.ErrInUse, uuid)
		wantError(t, m.Reset(uuid), gpu.ErrInUse, uuid)
		mustDo(t, m.DestroyMIG(idle.UUID))
		mustDo(t, m.SetProcesses(uuid, nil))
		mustDo(t, m.Reset(uuid))
		if got := read(t, m).GPUs[0].MIG; !got.Enabled || len(got.Devices) != 0 {
			t.Errorf("after a reset: %+v", got)
		}
		mustDo(t, m.SetMIGMode(uuid, false))
		wantError(t, m.SetProcesses(uuid, []gpu.Process{{PID: 8, GI: 1, CI: 0}}), gpu.ErrInvalid, uuid)
	})
}

func TestLost(t *testing.T) {
	each(t, "dgx1-v100", func(t *testing.T, m *Machine) {
		before := read(t, m)
		uuid := before.GPUs[2].UUID
		mustDo(t, m.SetLost(uuid, true))
		want := before
		want.GPUs = slices.Clone(before.GPUs)
		want.GPUs[2].Health = gpu.Health{State: gpu.Lost, Reason: "GPU is lost"}
		want.Links = gpu.NewLinks(8)
		for i := range 8 {
			for j := range i {
				if i != 2 && j != 2 {
					want.Links.Merge(i, j, before.Links.At(i, j))
				}
			}
		}
		if diff := cmp.Diff(want, read(t, m), equal); diff != "" {
			t.Error(diff)
		}
		wantError(t, m.SetMIGMode(uuid, true), gpu.ErrLost, uuid)
		wantError(t, second(m.CreateMIG(uuid, oneAt0)), gpu.ErrLost, uuid)
		wantError(t, m.Reset(uuid), gpu.ErrLost, uuid)
		wantError(t, second(m.Processes(uuid)), gpu.ErrLost, uuid)
		mustDo(t, m.Reset(before.GPUs[3].UUID))
		mustDo(t, m.SetLost(uuid, false))
		if diff := cmp.Diff(before, read(t, m), equal); diff != "" {
			t.Errorf("found again:\n%s", diff)
		}
	})
}

func TestLostWithMIGDevices(t *testing.T) {
	m := New(mustBuiltin(t, "dgx-h100"), "n")
	uuid := read(t, m).GPUs[0].UUID
	mustDo(t, m.SetMIGMode(uuid, true))
	d, err := m.CreateMIG(uuid, oneAt0)
	mustDo(t, err)
	mustDo(t, m.SetLost(uuid, true))
	wantError(t, m.DestroyMIG(d.UUID), gpu.ErrLost, uuid)
	if got := read(t, m).GPUs[0].MIG.Devices; len(got) != 1 || got[0].UUID != d.UUID {
		t.Errorf("a lost GPU's MIG devices: %v", got)
	}
}

func TestFailLinkQuery(t *testing.T) {
	each(t, "dgx1-v100", func(t *testing.T, m *Machine) {
		before := read(t, m)
		mustDo(t, m.FailLinkQuery(3, 0, true))
		mustDo(t, m.FailLinkQuery(0, 3, true))
		after := read(t, m)
		for i := range 8 {
			for j := range 8 {
				want := before.Links.At(i, j)
				if pairOf(i, j) == (pair{0, 3}) {
					want = gpu.Link{}
				}
				if got := after.Links.At(i, j); got != want {
					t.Errorf("link %d-%d: %v, want %v", i, j, got, want)
				}
			}
		}
		if diff := cmp.Diff(before.GPUs, after.GPUs); diff != "" {
			t.Errorf("GPUs changed:\n%s", diff)
		}
		mustDo(t, m.FailLinkQuery(0, 3, false))
		if diff := cmp.Diff(before, read(t, m), equal); diff != "" {
			t.Errorf("works again:\n%s", diff)
		}
		for _, c := range [][2]int{{0, 8}, {-1, 0}, {4, 4}} {
			wantError(t, m.FailLinkQuery(c[0], c[1], true), gpu.ErrNotFound, fmt.Sprint(c[1]))
		}
	})
}

func TestUnhealthy(t *testing.T) {
	each(t, "g5.12xlarge", func(t *testing.T, m *Machine) {
		uuid := read(t, m).GPUs[1].UUID
		wantError(t, m.SetUnhealthy(uuid, ""), gpu.ErrInvalid, uuid)
		mustDo(t, m.SetUnhealthy(uuid, "row remap failed"))
		want := gpu.Health{State: gpu.Unhealthy, Reason: "row remap failed"}
		mustDo(t, m.Reset(uuid))
		if got := read(t, m).GPUs[1].Health; got != want {
			t.Errorf("got %v, want %v", got, want)
		}
		mustDo(t, m.ClearUnhealthy(uuid))
		if got := read(t, m).GPUs[1].Health; !got.OK() {
			t.Errorf("got %v, want healthy", got)
		}
	})
}

func TestRecovery(t *testing.T) {
	each(t, "g5.12xlarge", func(t *testing.T, m *Machine) {
		uuid := read(t, m).GPUs[1].UUID
		wantError(t, m.SetRecovery(uuid, -1), gpu.ErrInvalid, uuid)
		for _, c := range []struct{ action, afterReset gpu.Recovery }{
			{gpu.RecoveryReset, gpu.RecoveryNone}, {gpu.RecoveryDrainReset, gpu.RecoveryNone},
			{gpu.RecoveryReboot, gpu.RecoveryReboot}, {gpu.RecoveryDrainP2P, gpu.RecoveryDrainP2P},
		} {
			mustDo(t, m.SetRecovery(uuid, c.action))
			if got := read(t, m).GPUs[1]; got.Recovery != c.action || !got.Health.OK() {
				t.Errorf("%v: got %v, %v", c.action, got.Recovery, got.Health)
			}
			mustDo(t, m.Reset(uuid))
			if got := read(t, m).GPUs[1].Recovery; got != c.afterReset {
				t.Errorf("%v: after a reset %v, want %v", c.action, got, c.afterReset)
			}
		}
		mustDo(t, m.SetRecovery(uuid, gpu.RecoveryNone))
		if got := read(t, m).GPUs[1].Recovery; got != gpu.RecoveryNone {
			t.Errorf("got %v", got)
		}
	})
}

func TestDriverDown(t *testing.T) {
	each(t, "g5.12xlarge", func(t *testing.T, m *Machine) {
		before := read(t, m)
		uuid := before.GPUs[0].UUID
		mustDo(t, m.DriverDown(true))
		for name, err := range map[string]error{
			"Read": second(m.Read()), "SetMIGMode": m.SetMIGMode(uuid, true), "CreateMIG": second(m.CreateMIG(uuid, oneAt0)),
			"DestroyMIG": m.DestroyMIG("MIG-"), "Reset": m.Reset(uuid), "Processes": second(m.Processes(uuid)),
		} {
			if !errors.Is(err, errDriverDown) {
				t.Errorf("%s: %v", name, err)
			}
		}
		if _, ok, err := m.WaitEvent(0); ok || !errors.Is(err, errDriverDown) {
			t.Errorf("WaitEvent: %v, %v", ok, err)
		}
		mustDo(t, m.DriverDown(false))
		if diff := cmp.Diff(before, read(t, m), equal); diff != "" {
			t.Error(diff)
		}
	})
}

func TestEvents(t *testing.T) {
	each(t, "dgx-h100", func(t *testing.T, m *Machine) {
		uuid := read(t, m).GPUs[0].UUID
		mustDo(t, m.SetMIGMode(uuid, true))
		d, err := m.CreateMIG(uuid, oneAt0)
		mustDo(t, err)
		if _, ok, err := m.WaitEvent(0); ok || err != nil {
			t.Fatalf("an event from nothing: %v, %v", ok, err)
		}
		mustDo(t, m.InjectXID(uuid, 79, gpu.AnyInstance, gpu.AnyInstance))
		mustDo(t, m.InjectXID(uuid, 94, d.GI, d.CI))
		mustDo(t, m.InjectXID(uuid, 95, d.GI, gpu.AnyInstance))
		wantError(t, m.InjectXID(uuid, 0, gpu.AnyInstance, gpu.AnyInstance), gpu.ErrInvalid, uuid)
		wantError(t, m.InjectXID(uuid, 1, d.GI+1, d.CI), gpu.ErrNotFound, uuid)
		wantError(t, m.InjectXID(uuid, 1, gpu.AnyInstance, 0), gpu.ErrNotFound, uuid)
		var got []gpu.Event
		for {
			e, ok, err := m.WaitEvent(0)
			mustDo(t, err)
			if !ok {
				break
			}
			got = append(got, e)
		}
		want := []gpu.Event{
			{GPU: uuid, XID: 79, GI: gpu.AnyInstance, CI: gpu.AnyInstance},
			{GPU: uuid, XID: 94, GI: d.GI, CI: d.CI},
			{GPU: uuid, XID: 95, GI: d.GI, CI: gpu.AnyInstance},
		}
		if diff := cmp.Diff(want, got); diff != "" {
			t.Error(diff)
		}
	})
}

func TestEventLogIsBounded(t *testing.T) {
	each(t, "g4dn.xlarge", func(t *testing.T, m *Machine) {
		uuid := read(t, m).GPUs[0].UUID
		const over = 10
		for xid := 1; xid <= maxEvents+over; xid++ {
			mustDo(t, m.InjectXID(uuid, xid, gpu.AnyInstance, gpu.AnyInstance))
		}
		for xid := over + 1; xid <= maxEvents+over; xid++ {
			if e, ok, err := m.WaitEvent(0); !ok || err != nil || e.XID != xid {
				t.Fatalf("got %v, %v, %v, want XID %d", e, ok, err, xid)
			}
		}
		if _, ok, err := m.WaitEvent(0); ok || err != nil {
			t.Errorf("more events than are kept: %v, %v", ok, err)
		}
	})
}

func TestEventsOfAnotherHandle(t *testing.T) {
	m, dir := opened(t, mustBuiltin(t, "g5.12xlarge"), "n")
	uuid := read(t, m).GPUs[1].UUID
	mustDo(t, m.InjectXID(uuid, 13, gpu.AnyInstance, gpu.AnyInstance))
	late := reopened(t, dir)
	if _, ok, err := late.WaitEvent(0); ok || err != nil {
		t.Fatalf("an event from before the handle was opened: %v, %v", ok, err)
	}
	result := make(chan gpu.Event, 1)
	go func() {
		defer close(result)
		if e, ok, err := late.WaitEvent(time.Minute); ok && err == nil {
			result <- e
		}
	}()
	mustDo(t, m.InjectXID(uuid, 79, gpu.AnyInstance, gpu.AnyInstance))
	if e := <-result; e.XID != 79 || e.GPU != uuid {
		t.Errorf("got %v", e)
	}
}

func TestClose(t *testing.T) {
	each(t, "g5.12xlarge", func(t *testing.T, m *Machine) {
		uuid := read(t, m).GPUs[0].UUID
		waiting := make(chan error)
		go func() {
			_, _, err := m.WaitEvent(time.Minute)
			waiting <- err
		}()
		mustDo(t, m.Close())
		mustDo(t, m.Close())
		for name, err := range map[string]error{
			"waiting": <-waiting, "WaitEvent": func() error { _, _, err := m.WaitEvent(0); return err }(),
			"Read": second(m.Read()), "Reset": m.Reset(uuid), "SetLost": m.SetLost(uuid, true), "Processes": second(m.Processes(uuid)),
		} {
			if !errors.Is(err, os.ErrClosed) {
				t.Errorf("%s: %v", name, err)
			}
		}
	})
}

func TestInitTwice(t *testing.T) {
	d := mustBuiltin(t, "g4dn.xlarge")
	m, dir := opened(t, d, "n")
	uuid := read(t, m).GPUs[0].UUID
	mustDo(t, m.SetUnhealthy(uuid, "hot"))
	if err := Init(dir, mustBuiltin(t, "a30x4"), "other"); !errors.Is(err, fs.ErrExist) || !strings.Contains(err.Error(), dir) {
		t.Errorf("got %v", err)
	}
	if got := read(t, m); len(got.GPUs) != 1 || got.GPUs[0].Health.Reason != "hot" {
		t.Errorf("the machine that was there is now %+v", got)
	}
	if err := Init(filepath.Join(t.TempDir(), "x"), &Description{}, "n"); err == nil {
		t.Error("an empty description makes a machine")
	}
}

func TestOpenErrors(t *testing.T) {
	if _, err := Open(t.TempDir()); !errors.Is(err, fs.ErrNotExist) || !strings.Contains(err.Error(), "is not the folder of a simulated machine") {
		t.Errorf("empty folder: %v", err)
	}
	for _, c := range []struct{ file, text, want string }{
		{descriptionFile, "name: m", "machine.yaml:1: cpus: is missing"},
		{stateFile, "{", "state.json: unexpected end of JSON input; remove its folder"},
		{stateFile, `{"version": 2}`, "state.json: version 2, want 1"},
		{stateFile, `{"version": 1, "gpus": []}`, "state.json: is of 0 GPUs, the machine has 4"},
		{stateFile, `{"version": 1, "gpus": [{}, {}, {}, {}], "events": [{}]}`, "eventCount is 0, but 1 events are listed"},
		{stateFile, `{"version": 1, "gpus": [{"instances": [{}]}, {}, {}, {}]}`, "gpu 0: 1 MIG instances, MIG mode is off"},
		{
			stateFile, `{"version": 1, "gpus": [{"migEnabled": true, "instances": [
				{"gi": 1, "mig": {"ProfileID": 14, "Placement": {"Start": 0, "Size": 1}}}, {"gi": 1, "mig": {"ProfileID": 14, "Placement": {"Start": 1, "Size": 1}}}
			]}, {}, {}, {}]}`, "gpu 0: MIG instance 1: GI 1, CI 0 is there twice",
		},
		{stateFile, `{"version": 1, "gpus": [{"migEnabled": true, "instances": [{"mig": {"ProfileID": 1}}]}, {}, {}, {}]}`, "gpu 0: MIG instance 0: no MIG profile with id 1"},
	} {
		_, dir := opened(t, mustBuiltin(t, "a30x4"), "n")
		mustDo(t, os.WriteFile(filepath.Join(dir, c.file), []byte(c.text), 0o644))
		if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%s: got %v, want %s", c.text, err, c.want)
		}
	}
	_, dir := opened(t, mustBuiltin(t, "g4dn.xlarge"), "n")
	mustDo(t, os.WriteFile(filepath.Join(dir, stateFile), []byte(`{"version": 1, "gpus": [{"migEnabled": true}]}`), 0o644))
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "the product cannot do MIG") {
		t.Errorf("MIG on a T4: %v", err)
	}
}

// Handles of one folder, as processes would have them, must not lose each
// other's changes.
func TestConcurrentHandles(t *testing.T) {
	m, dir := opened(t, mustBuiltin(t, "dgx-h100"), "n")
	machine := read(t, m)
	const handles, rounds = 8, 10
	var work sync.WaitGroup
	for i := range handles {
		handle := reopened(t, dir)
		uuid := machine.GPUs[i].UUID
		work.Go(func() {
			if err := handle.SetMIGMode(uuid, true); err != nil {
				t.Error(err)
			}
			for range rounds {
				d, err := handle.CreateMIG(uuid, oneAt0)
				if err == nil {
					err = handle.DestroyMIG(d.UUID)
				}
				if err == nil {
					err = handle.InjectXID(uuid, 13, gpu.AnyInstance, gpu.AnyInstance)
				}
				if _, readErr := handle.Read(); err != nil || readErr != nil {
					t.Error(err, readErr)
				}
			}
			if _, err := handle.CreateMIG(uuid, threeAt4); err != nil {
				t.Error(err)
			}
		})
	}
	work.Wait()
	events := 0
	for {
		_, ok, err := m.WaitEvent(0)
		mustDo(t, err)
		if !ok {
			break
		}
		events++
	}
	if events != handles*rounds {
		t.Errorf("%d events, want %d", events, handles*rounds)
	}
	for _, g := range read(t, m).GPUs {
		if len(g.MIG.Devices) != 1 || g.MIG.Devices[0].ProfileID != threeAt4.ProfileID {
			t.Errorf("GPU %d: %v", g.Index, g.MIG.Devices)
		}
	}
}

const killedEnv = "ASHLAR_TEST_KILLED_MACHINE"

// TestKilled ends a process that changes a machine as fast as it can, and looks
// at what it leaves.
func TestKilled(t *testing.T) {
	if dir := os.Getenv(killedEnv); dir != "" {
		changeForever(t, dir)
	}
	m, dir := opened(t, mustBuiltin(t, "dgx-h100"), "n")
	uuid := read(t, m).GPUs[0].UUID
	mustDo(t, m.SetMIGMode(uuid, true))
	for range 3 {
		cmd := exec.Command(os.Args[0], "-test.run=^TestKilled$")
		cmd.Env = append(os.Environ(), killedEnv+"="+dir)
		mustDo(t, cmd.Start())
		// Until it is at work.
		if _, ok, err := m.WaitEvent(time.Minute); !ok || err != nil {
			t.Fatalf("%v, %v", ok, err)
		}
		mustDo(t, cmd.Process.Kill())
		_ = cmd.Wait() // says that it was killed
		got := read(t, reopened(t, dir))
		checkGeometry(t, got.GPUs[0])
		if got.GPUs[0].UUID != uuid {
			t.Errorf("UUID was %s, is %s", uuid, got.GPUs[0].UUID)
		}
		// The lock went with the process.
		for _, d := range got.GPUs[0].MIG.Devices {
			mustDo(t, m.DestroyMIG(d.UUID))
		}
		for { // forget the events of this round
			if _, ok, err := m.WaitEvent(0); !ok || err != nil {
				mustDo(t, err)
				break
			}
		}
	}
}

func changeForever(t *testing.T, dir string) {
	m := reopened(t, dir)
	uuid := read(t, m).GPUs[0].UUID
	for {
		d, err := m.CreateMIG(uuid, oneAt0)
		mustDo(t, err)
		mustDo(t, m.InjectXID(uuid, 13, gpu.AnyInstance, gpu.AnyInstance))
		mustDo(t, m.DestroyMIG(d.UUID))
	}
}

func TestStateIsReadable(t *testing.T) {
	m, dir := opened(t, mustBuiltin(t, "a30x4"), "n")
	mustDo(t, m.SetUnhealthy(read(t, m).GPUs[2].UUID, "hot"))
	data, err := os.ReadFile(filepath.Join(dir, stateFile))
	mustDo(t, err)
	var state struct {
		Seed string
		GPUs []struct{ Unhealthy string }
	}
	mustDo(t, json.Unmarshal(data, &state))
	if state.Seed != "n" || len(state.GPUs) != 4 || state.GPUs[2].Unhealthy != "hot" {
		t.Errorf("state: %+v", state)
	}
	text, err := os.ReadFile(filepath.Join(dir, descriptionFile))
	mustDo(t, err)
	want, err := BuiltinYAML("a30x4")
	mustDo(t, err)
	if diff := cmp.Diff(string(want), string(text)); diff != "" {
		t.Errorf("the description in the folder:\n%s", diff)
	}
}
