package gpu

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/nvml"
	"github.com/ashlar-gpu/ashlar/internal/visible"
)

var links = cmp.AllowUnexported(gpu.Links{})

// open opens the driver, or skips the test.
func open(t *testing.T) *nvml.Machine {
	t.Helper()
	m, err := nvml.Open()
	if err != nil {
		if os.Getenv("ASHLAR_TEST_GPU") != "" {
			t.Fatalf("$ASHLAR_TEST_GPU is set: %v", err)
		}
		t.Skipf("this host has no NVIDIA GPU that can be used: %v", err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

// read reads the machine, which must have a GPU.
func read(t *testing.T, m *nvml.Machine) gpu.Machine {
	t.Helper()
	got, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	if err := got.Validate(); err != nil {
		t.Fatal(err)
	}
	if len(got.GPUs) == 0 {
		t.Skip("the driver lists no GPUs")
	}
	return got
}

var (
	uuidForm    = regexp.MustCompile(`^(GPU|MIG)-[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}$`)
	versionForm = regexp.MustCompile(`^[0-9]+\.[0-9]+(\.[0-9]+)?$`)
	busForm     = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.0$`)
)

func TestDiscovery(t *testing.T) {
	m := open(t)
	got := read(t, m)
	t.Logf("driver %s, CUDA %s, board %q, %d GPUs", got.Driver, got.CUDA, got.Board, len(got.GPUs))
	if !versionForm.MatchString(got.Driver) || !versionForm.MatchString(got.CUDA) {
		t.Errorf("driver %q, CUDA %q", got.Driver, got.CUDA)
	}
	for _, g := range got.GPUs {
		t.Logf("%+v", g)
		if g.Health.State == gpu.Lost {
			continue // nothing of it need be known
		}
		if !uuidForm.MatchString(g.UUID) || g.Name == "" || g.Minor < 0 || g.Compute.Major < 1 || !busForm.MatchString(g.PCIBusID) || g.PCIDeviceID == 0 {
			t.Errorf("GPU %d: something is not known: %+v", g.Index, g)
		}
		if g.Compute.Family() == "undefined" {
			t.Errorf("GPU %d: compute capability %s is of no family", g.Index, g.Compute)
		}
		if _, err := os.Stat(filepath.Join("/sys/bus/pci/devices", g.PCIBusID)); err != nil {
			t.Logf("GPU %d: no sysfs: %v", g.Index, err)
		} else if g.PCIClass>>8 != 0x03 || !strings.HasPrefix(g.PCIeRoot, "pci") {
			t.Errorf("GPU %d: PCI class %#04x, root complex %q", g.Index, g.PCIClass, g.PCIeRoot)
		}
		checkProduct(t, g)
		for _, d := range g.MIG.Devices {
			if d.Profile == "" || d.MemoryMiB < 1 || d.Placement.Size < 1 || d.Attributes.Slices < d.Attributes.ComputeSlices {
				t.Errorf("GPU %d: something of a MIG device is not known: %+v", g.Index, d)
			}
		}
	}
}

// checkProduct compares a GPU with the catalogue, where that knows it.
func checkProduct(t *testing.T, g gpu.GPU) {
	t.Helper()
	p := gpu.ProductByName(g.Name)
	if p == nil {
		t.Logf("GPU %d: the catalogue has no %s", g.Index, g.Name)
		return
	}
	if g.Compute != p.Compute || g.NVLinks > p.NVLinks || g.MIG.Enabled && p.MIG == nil {
		t.Errorf("GPU %d: compute capability %s, %d NVLinks, MIG mode %v; the catalogue's %s has %s, %d, profiles %v",
			g.Index, g.Compute, g.NVLinks, g.MIG.Enabled, p.Key, p.Compute, p.NVLinks, p.MIG != nil)
	}
	// A product has boards with more memory; ECC takes some of it.
	if g.MemoryMiB < p.MemoryMiB*9/10 {
		t.Errorf("GPU %d: %d MiB, the catalogue's %s has %d", g.Index, g.MemoryMiB, p.Key, p.MemoryMiB)
	}
}

// Nothing here changes between two readings but what goes wrong.
func TestReadingsAgree(t *testing.T) {
	m := open(t)
	if diff := cmp.Diff(read(t, m), read(t, m), links); diff != "" {
		t.Errorf("(-first +second)\n%s", diff)
	}
}

func TestHealth(t *testing.T) {
	for _, g := range read(t, open(t)).GPUs {
		t.Logf("GPU %d: %s %q, recovery: %s", g.Index, g.Health.State, g.Health.Reason, g.Recovery)
		if g.Health.OK() != (g.Health.Reason == "") {
			t.Errorf("GPU %d: state %s with reason %q", g.Index, g.Health.State, g.Health.Reason)
		}
		if g.Health.State == gpu.Unhealthy {
			t.Errorf("GPU %d: a reading is no verdict: %+v", g.Index, g.Health)
		}
		if g.Recovery < gpu.RecoveryNone || strings.HasPrefix(g.Recovery.String(), "Recovery(") {
			t.Errorf("GPU %d: a recovery action without a name: %s", g.Index, g.Recovery)
		}
	}
}

func TestWaitEvent(t *testing.T) {
	m := open(t)
	known := read(t, m)
	for range 3 {
		event, ok, err := m.WaitEvent(200 * time.Millisecond)
		if err != nil {
			t.Fatal(err)
		}
		if ok && known.ByUUID(event.GPU) == nil {
			t.Errorf("an event of a GPU that is not there: %+v", event)
		}
	}
	// An event that comes while this runs is no fault of the test, but it ends the
	// waiting too; Close does as well.
	ended := make(chan error)
	go func() {
		for {
			if _, _, err := m.WaitEvent(time.Minute); err != nil {
				ended <- err
				return
			}
		}
	}()
	if err := m.Close(); err != nil {
		t.Error(err)
	}
	if err := <-ended; !errors.Is(err, os.ErrClosed) {
		t.Errorf("after Close: %v", err)
	}
}

func TestProcesses(t *testing.T) {
	m := open(t)
	for _, g := range read(t, m).GPUs {
		if g.Health.State == gpu.Lost {
			continue
		}
		processes, err := m.Processes(g.UUID)
		if err != nil && g.MIG.Enabled && os.Geteuid() != 0 {
			t.Logf("GPU %d: the processes of all MIG devices are for root: %v", g.Index, err)
			continue
		}
		if err != nil {
			t.Errorf("GPU %d: %v", g.Index, err)
		}
		for _, p := range processes {
			if p.PID < 1 || p.MemoryMiB < 0 || p.MemoryMiB > g.MemoryMiB || (p.GI != gpu.AnyInstance) && !g.MIG.Enabled {
				t.Errorf("GPU %d: %+v", g.Index, p)
			}
		}
	}
	if _, err := m.Processes("GPU-00000000-0000-0000-0000-000000000000"); !errors.Is(err, gpu.ErrNotFound) {
		t.Errorf("of another GPU: %v", err)
	}
}

// withoutUUIDs is a machine without what a capture leaves out.
func withoutUUIDs(m gpu.Machine) gpu.Machine {
	m.GPUs = slices.Clone(m.GPUs)
	for i := range m.GPUs {
		g := &m.GPUs[i]
		g.UUID = ""
		if g.NVSwitch != "" {
			g.NVSwitch = "domain"
		}
		g.MIG.Devices = slices.Clone(g.MIG.Devices)
		for j := range g.MIG.Devices {
			g.MIG.Devices[j].UUID = ""
		}
	}
	return m
}

func TestCaptureIsReplayed(t *testing.T) {
	want := read(t, open(t))
	text, err := machine.Capture("captured", &want, machine.Host{CPUs: runtime.NumCPU(), Memory: "1Gi", NUMANodes: 1})
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("\n%s", text)
	desc, err := machine.ParseDescription("captured.yaml", text)
	if err != nil {
		t.Fatal(err)
	}
	got, err := machine.New(desc, "replayed").Read()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(withoutUUIDs(want), withoutUUIDs(got), links); diff != "" {
		t.Errorf("(-read +replayed)\n%s", diff)
	}
	for _, g := range want.GPUs {
		if strings.Contains(string(text), strings.TrimPrefix(g.UUID, "GPU-")) {
			t.Errorf("has the UUID of GPU %d", g.Index)
		}
	}
}

func TestValidate(t *testing.T) {
	m := read(t, open(t))
	nodes, err := visible.Nodes("/")
	if err != nil {
		t.Fatal(err)
	}
	var ids []string
	lost := false
	for _, g := range m.GPUs {
		lost = lost || g.Health.State == gpu.Lost
		if !g.MIG.Enabled {
			ids = append(ids, g.UUID)
		}
		for _, d := range g.MIG.Devices {
			ids = append(ids, d.UUID)
		}
	}
	if lost || len(ids) == 0 {
		t.Skip("a GPU is lost, or in MIG mode without MIG devices")
	}
	compare := func(ids []string) visible.Report {
		var environ []string
		if len(ids) > 0 {
			environ = []string{visible.Variable("nvidia.com/gpu") + "=" + strings.Join(ids, ",")}
		}
		allocated, err := visible.Allocated(environ)
		if err != nil {
			t.Fatal(err)
		}
		return visible.Compare(allocated, visible.Seen{GPUs: m.GPUs, Nodes: nodes})
	}
	// A GPU that is in MIG mode and not cut is visible through its device node alone.
	uncut := slices.ContainsFunc(m.GPUs, func(g gpu.GPU) bool { return g.MIG.Enabled && len(g.MIG.Devices) == 0 })
	if got := compare(ids); got.OK == uncut {
		t.Errorf("all that is visible was given: %+v", got)
	}
	if got := compare(ids[1:]); got.OK {
		t.Errorf("%s was not given and is visible: %+v", ids[0], got)
	}
	if got := compare(append(ids, "GPU-00000000-0000-0000-0000-000000000000")); got.OK {
		t.Errorf("a GPU was given that is not visible: %+v", got)
	}
}
