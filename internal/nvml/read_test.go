package nvml

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

const (
	a100 = "NVIDIA A100-SXM4-40GB"
	h100 = "NVIDIA H100 80GB HBM3"
	t4   = "Tesla T4"
)

var equal = cmp.AllowUnexported(gpu.Links{})

func read(t *testing.T, m *Machine) gpu.Machine {
	t.Helper()
	got, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	if err := got.Validate(); err != nil {
		t.Fatal(err)
	}
	return got
}

// sysfs adds a PCI device to a fake /sys.
func sysfs(t *testing.T, root, bus, host, numa string) {
	t.Helper()
	folder := filepath.Join(root, "devices", host, "0000:00:01.0", bus)
	links := filepath.Join(root, "bus", "pci", "devices")
	for _, dir := range []string{folder, links} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(folder, "numa_node"), []byte(numa), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, "class"), []byte("0x030200\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	target := filepath.Join("..", "..", "..", "devices", host, "0000:00:01.0", bus)
	if err := os.Symlink(target, filepath.Join(links, bus)); err != nil {
		t.Fatal(err)
	}
}

func TestRead(t *testing.T) {
	a, b, c := newFakeGPU("a", a100, 0x10), newFakeGPU("b", a100, 0x20), newFakeGPU("c", t4, 0x30)
	c.major = 7
	a.links = []fakeLink{toGPU(0x20), {inactive: true}, toGPU(0x20)}
	b.links = []fakeLink{toGPU(0x10), toGPU(0x10)}
	f := newFake(a, b, c)
	both(a, b, 20)
	both(a, c, 40)
	both(b, c, 50)
	m := f.machine(t)
	sysfs(t, m.sysfs, "0000:10:00.0", "pci0000:0f", "1\n")
	sysfs(t, m.sysfs, "0000:20:00.0", "pci0000:1f", "-1\n")
	dmi := filepath.Join(m.sysfs, "class", "dmi", "id")
	mustDo(t, os.MkdirAll(dmi, 0o755))
	mustDo(t, os.WriteFile(filepath.Join(dmi, "product_name"), []byte(" PowerEdge R7525 \n"), 0o644))
	want := gpu.Machine{Driver: "580.95.05", CUDA: "13.0", Board: "PowerEdge R7525", Links: gpu.NewLinks(3), GPUs: []gpu.GPU{
		{
			Index: 0, UUID: "GPU-a", Minor: 0, Name: a100, MemoryMiB: 40960, Compute: gpu.ComputeCapability{Major: 8},
			PCIBusID: "0000:10:00.0", PCIDeviceID: 0x20b0, PCIClass: 0x0302, NUMA: 1, PCIeRoot: "pci0000:0f", NVLinks: 2, MIG: gpu.MIGState{Capable: true},
		},
		{
			Index: 1, UUID: "GPU-b", Minor: 1, Name: a100, MemoryMiB: 40960, Compute: gpu.ComputeCapability{Major: 8},
			PCIBusID: "0000:20:00.0", PCIDeviceID: 0x20b0, PCIClass: 0x0302, NUMA: -1, PCIeRoot: "pci0000:1f", NVLinks: 2, MIG: gpu.MIGState{Capable: true},
		},
		{
			Index: 2, UUID: "GPU-c", Minor: 2, Name: t4, MemoryMiB: 15360, Compute: gpu.ComputeCapability{Major: 7},
			PCIBusID: "0000:30:00.0", PCIDeviceID: 0x20b0, NUMA: -1,
		},
	}}
	want.Links.Merge(0, 1, gpu.Link{NVLinks: 2, PCIe: gpu.PCIeMultiple})
	want.Links.Merge(0, 2, gpu.Link{PCIe: gpu.PCIeNode})
	want.Links.Merge(1, 2, gpu.Link{PCIe: gpu.PCIeSystem})
	if diff := cmp.Diff(want, read(t, m), equal); diff != "" {
		t.Error(diff)
	}
}

func TestReadFailsOnlyWithTheDriver(t *testing.T) {
	for _, method := range []string{"driverVersion", "count"} {
		f := newFake(newFakeGPU("a", t4, 1))
		m := f.machine(t)
		f.errs[method] = errUnknown
		if _, err := m.Read(); err == nil {
			t.Errorf("%s: no error", method)
		}
	}
	f := newFake(newFakeGPU("a", t4, 1))
	f.errs["cudaVersion"] = errUnknown
	if got := read(t, f.machine(t)); got.CUDA != "" || !got.GPUs[0].Health.OK() {
		t.Errorf("CUDA %q, %v", got.CUDA, got.GPUs[0].Health)
	}
}

func TestLevels(t *testing.T) {
	for number, want := range map[int]gpu.PCIeLevel{
		0: gpu.PCIeInternal, 10: gpu.PCIeSingle, 20: gpu.PCIeMultiple, 30: gpu.PCIeHostBridge,
		40: gpu.PCIeNode, 50: gpu.PCIeSystem, 60: gpu.PCIeUnknown,
	} {
		a, b := newFakeGPU("a", t4, 1), newFakeGPU("b", t4, 2)
		f := newFake(a, b)
		both(a, b, number)
		if got := read(t, f.machine(t)).Links.At(0, 1).PCIe; got != want {
			t.Errorf("level %d: %v, want %v", number, got, want)
		}
	}
}

// pairs is a machine of four GPUs, each linked to its neighbour twice, all on one
// host bridge.
func pairs() (*fakeDriver, []*fakeGPU) {
	g := []*fakeGPU{newFakeGPU("0", a100, 1), newFakeGPU("1", a100, 2), newFakeGPU("2", a100, 3), newFakeGPU("3", a100, 4)}
	f := newFake(g...)
	for i := range g {
		g[i].links = []fakeLink{toGPU(g[i^1].pciInfo.bus), toGPU(g[i^1].pciInfo.bus)}
		for j := range i {
			both(g[i], g[j], 30)
		}
	}
	return f, g
}

// withLost is the machine with GPU 2 lost and all else as it was.
func withLost(before gpu.Machine, reason string) gpu.Machine {
	after := before
	after.GPUs = append([]gpu.GPU(nil), before.GPUs...)
	after.GPUs[2].Health = gpu.Health{State: gpu.Lost, Reason: reason}
	// The neighbour's own NVLinks are still up.
	after.Links = gpu.NewLinks(len(before.GPUs))
	for i := range before.GPUs {
		for j := range i {
			if i != 2 && j != 2 {
				after.Links.Merge(i, j, before.Links.At(i, j))
			}
		}
	}
	return after
}

func TestLostGPU(t *testing.T) {
	for _, method := range []string{"device", "uuid", "name", "memory", "pci", "migMode"} {
		t.Run(method, func(t *testing.T) {
			f, g := pairs()
			m := f.machine(t)
			before := read(t, m)
			g[2].errs[method] = errLost
			for range 2 { // it must not be forgotten later either
				if diff := cmp.Diff(withLost(before, "GPU is lost"), read(t, m), equal); diff != "" {
					t.Error(diff)
				}
			}
			g[2].without(method)
			if diff := cmp.Diff(before, read(t, m), equal); diff != "" {
				t.Errorf("found again:\n%s", diff)
			}
		})
	}
}

func TestUnreadableGPU(t *testing.T) {
	for method, what := range map[string]string{
		"name": "name", "minor": "minor number", "memory": "memory", "capability": "compute capability", "pci": "PCI address", "migMode": "MIG devices",
	} {
		f, g := pairs()
		m := f.machine(t)
		before := read(t, m)
		g[2].errs[method] = errUnknown
		want := withLost(before, "cannot be read: "+what+": NVML: ERROR_UNKNOWN")
		if diff := cmp.Diff(want, read(t, m), equal); diff != "" {
			t.Errorf("%s:\n%s", method, diff)
		}
	}
}

func TestLostFromTheStart(t *testing.T) {
	f, g := pairs()
	g[2].errs["device"] = errLost
	m := f.machine(t)
	want := gpu.GPU{Index: 2, UUID: "GPU-unknown-2", Minor: -1, NUMA: -1, Health: gpu.Health{State: gpu.Lost, Reason: "GPU is lost"}}
	got := read(t, m)
	if diff := cmp.Diff(want, got.GPUs[2]); diff != "" {
		t.Error(diff)
	}
	for _, i := range []int{0, 1, 3} {
		if !got.GPUs[i].Health.OK() {
			t.Errorf("GPU %d: %v", i, got.GPUs[i].Health)
		}
	}
	// It says its name and no more.
	g[2].without("device")
	g[2].errs["pci"] = errLost
	want.UUID = "GPU-2"
	if diff := cmp.Diff(want, read(t, m).GPUs[2]); diff != "" {
		t.Error(diff)
	}
	g[2].without("pci")
	if got := read(t, m).GPUs[2]; !got.Health.OK() || got.UUID != "GPU-2" {
		t.Errorf("found: %+v", got)
	}
}

// After the driver starts anew the GPUs may be numbered otherwise.
func TestLostGPUIsNotGivenTheNameOfAnother(t *testing.T) {
	f, g := pairs()
	m := f.machine(t)
	read(t, m)
	f.gpus = []*fakeGPU{g[0], g[2], g[1]}
	for i, g := range f.gpus {
		g.index = i
	}
	g[1].errs["device"] = errLost // at the index where GPU-2 was
	got := read(t, m)
	if got.GPUs[1].UUID != "GPU-2" || got.GPUs[2].UUID != "GPU-unknown-2" || got.GPUs[2].Health.State != gpu.Lost {
		t.Errorf("GPU 1 is %s, GPU 2 is %s", got.GPUs[1].UUID, got.GPUs[2].UUID)
	}
}

func TestLinkQueries(t *testing.T) {
	link := func(nvlinks int, level gpu.PCIeLevel) gpu.Link { return gpu.Link{NVLinks: nvlinks, PCIe: level} }
	for _, c := range []struct {
		name    string
		change  func(g []*fakeGPU)
		first   gpu.Link // of GPUs 0 and 1
		nvlinks int      // of GPU 0
	}{
		{"both report", func([]*fakeGPU) {}, link(2, gpu.PCIeHostBridge), 2},
		{"one reports none", func(g []*fakeGPU) { g[0].links = nil }, link(2, gpu.PCIeHostBridge), 2},
		{"one reports fewer", func(g []*fakeGPU) { g[0].links = g[0].links[:1] }, link(2, gpu.PCIeHostBridge), 2},
		{"a state fails on one side", func(g []*fakeGPU) { g[0].links[1].stateErr = errUnknown }, link(2, gpu.PCIeHostBridge), 2},
		{"a remote fails on both sides", func(g []*fakeGPU) { g[0].links[1].err, g[1].links[0].err = errUnknown, errUnknown }, link(1, gpu.PCIeHostBridge), 2},
		{"all NVLinks fail", func(g []*fakeGPU) {
			for _, g := range g[:2] {
				g.links[0].stateErr, g.links[1].stateErr = errUnknown, errUnknown
			}
		}, link(0, gpu.PCIeHostBridge), 0},
		{"the level fails", func(g []*fakeGPU) { delete(g[0].levels, 1); delete(g[1].levels, 0) }, link(2, gpu.PCIeUnknown), 2},
		{"to something else", func(g []*fakeGPU) { g[0].links = append(g[0].links, fakeLink{}, toGPU(0x99)) }, link(2, gpu.PCIeHostBridge), 4},
	} {
		t.Run(c.name, func(t *testing.T) {
			f, g := pairs()
			c.change(g)
			got := read(t, f.machine(t))
			if got.Links.At(0, 1) != c.first || got.Links.At(1, 0) != c.first {
				t.Errorf("link 0-1: %v and %v, want %v", got.Links.At(0, 1), got.Links.At(1, 0), c.first)
			}
			if got.GPUs[0].NVLinks != c.nvlinks {
				t.Errorf("GPU 0 has %d NVLinks, want %d", got.GPUs[0].NVLinks, c.nvlinks)
			}
			if want := link(2, gpu.PCIeHostBridge); got.Links.At(2, 3) != want {
				t.Errorf("link 2-3 changed to %v", got.Links.At(2, 3))
			}
			for _, g := range got.GPUs {
				if !g.Health.OK() {
					t.Errorf("GPU %d: %v", g.Index, g.Health)
				}
			}
		})
	}
	for name, change := range map[string]func(l *fakeLink){
		"state": func(l *fakeLink) { l.stateErr = errLost }, "remote": func(l *fakeLink) { l.err = errLost },
	} {
		t.Run(name+" says lost", func(t *testing.T) {
			f, g := pairs()
			m := f.machine(t)
			before := read(t, m)
			change(&g[2].links[0])
			if diff := cmp.Diff(withLost(before, "GPU is lost"), read(t, m), equal); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestNVSwitch(t *testing.T) {
	cluster := [16]byte{0xaa, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}
	for _, c := range []struct {
		name   string
		fabric fabric
		err    error
		want   string
	}{
		{"no fabric manager registers this product", fabric{}, gpu.ErrNotSupported, "nvswitch"},
		{"one node", fabric{completed: true}, nil, "nvswitch"},
		{"many nodes", fabric{completed: true, cluster: cluster, clique: 7}, nil, "aa010203-0405-0607-0809-0a0b0c0d0e0f.7"},
		{"not let in yet", fabric{cluster: cluster}, nil, ""},
		{"query fails", fabric{completed: true}, errUnknown, ""},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newFakeGPU("a", h100, 1)
			g.links = []fakeLink{toSwitch, toSwitch, toSwitch}
			g.fabricInfo, g.errs["fabric"] = c.fabric, c.err
			got := read(t, newFake(g).machine(t)).GPUs[0]
			if got.NVSwitch != c.want || got.NVLinks != 3 || !got.Health.OK() {
				t.Errorf("domain %q, %d NVLinks, %v; want %q, 3, healthy", got.NVSwitch, got.NVLinks, got.Health, c.want)
			}
		})
	}
	g := newFakeGPU("a", h100, 1)
	g.fabricInfo = fabric{completed: true, cluster: cluster}
	delete(g.errs, "fabric")
	if got := read(t, newFake(g).machine(t)).GPUs[0]; got.NVSwitch != "" {
		t.Errorf("without a link to a switch: domain %q", got.NVSwitch)
	}
	g.links, g.errs["fabric"] = []fakeLink{toSwitch}, errLost
	if got := read(t, newFake(g).machine(t)).GPUs[0]; got.Health.State != gpu.Lost {
		t.Errorf("fabric query says lost: %v", got.Health)
	}
}

func TestRecovery(t *testing.T) {
	for _, c := range []struct {
		action int
		err    error
		want   gpu.Recovery
		health gpu.HealthState
	}{
		{0, nil, gpu.RecoveryNone, gpu.Healthy},
		{1, nil, gpu.RecoveryReset, gpu.Healthy},
		{4, nil, gpu.RecoveryDrainReset, gpu.Healthy},
		{6, nil, gpu.Recovery(6), gpu.Healthy}, // what has no name here is not swallowed
		{1, gpu.ErrNotSupported, gpu.RecoveryNone, gpu.Healthy},
		{1, errUnknown, gpu.RecoveryNone, gpu.Healthy},
		{1, errLost, gpu.RecoveryNone, gpu.Lost},
	} {
		g := newFakeGPU("a", h100, 1)
		g.action, g.errs["recovery"] = c.action, c.err
		if got := read(t, newFake(g).machine(t)).GPUs[0]; got.Recovery != c.want || got.Health.State != c.health {
			t.Errorf("action %d, %v: %v, %v; want %v, %v", c.action, c.err, got.Recovery, got.Health, c.want, c.health)
		}
	}
}

func TestMemoryNotSupported(t *testing.T) {
	g := newFakeGPU("a", "NVIDIA GB10", 1)
	g.errs["memory"] = gpu.ErrNotSupported
	if got := read(t, newFake(g).machine(t)).GPUs[0]; !got.Health.OK() || got.MemoryMiB != 0 {
		t.Errorf("%d MiB, %v", got.MemoryMiB, got.Health)
	}
}

func TestReadMIG(t *testing.T) {
	g := newFakeGPU("a", a100, 1)
	g.enabled, g.pending = true, false
	g.cut(9, 4, 4, 3, 3)
	g.cut(19, 0, 1, 1, 1)
	g.cut(14, 2, 2, 2)    // without a compute instance it is no device
	g.cut(20, 1, 1, 1, 1) // media engines
	g.holes = []int{1}
	m := newFake(g).machine(t)
	want := gpu.MIGState{Capable: true, Enabled: true, Devices: []gpu.MIGDevice{
		{Index: 0, UUID: "MIG-GPU-a-1-0", GI: 1, ProfileID: 9, Profile: "3g.20gb", Placement: gpu.Placement{Start: 4, Size: 4}, MemoryMiB: 20480,
			Attributes: gpu.MIGAttributes{SMs: 42, Slices: 3, ComputeSlices: 3, CopyEngines: 3}},
		{Index: 1, UUID: "MIG-GPU-a-2-0", GI: 2, ProfileID: 19, Profile: "1g.5gb", Placement: gpu.Placement{Start: 0, Size: 1}, MemoryMiB: 5120,
			Attributes: gpu.MIGAttributes{SMs: 14, Slices: 1, ComputeSlices: 1, CopyEngines: 1}},
		{Index: 2, UUID: "MIG-GPU-a-4-0", GI: 4, ProfileID: 20, Profile: "1g.5gb+me", Placement: gpu.Placement{Start: 1, Size: 1}, MemoryMiB: 5120,
			Attributes: gpu.MIGAttributes{SMs: 14, Slices: 1, ComputeSlices: 1, CopyEngines: 1}},
	}}
	if diff := cmp.Diff(want, read(t, m).GPUs[0].MIG); diff != "" {
		t.Error(diff)
	}
	// Instances that go away between two queries are gone, not a fault.
	g.errs["instance"] = gpu.ErrNotFound
	if got := read(t, m).GPUs[0]; len(got.MIG.Devices) != 0 || !got.Health.OK() {
		t.Errorf("vanished: %+v", got)
	}
	g.without("instance")
	for _, method := range []string{"migMax", "migDevice", "instance"} {
		before := read(t, m).GPUs[0]
		g.errs[method] = errUnknown
		got := read(t, m).GPUs[0]
		if got.Health.State != gpu.Lost {
			t.Errorf("%s fails: %v", method, got.Health)
		}
		if diff := cmp.Diff(before.MIG, got.MIG); diff != "" {
			t.Errorf("%s fails: MIG devices are forgotten:\n%s", method, diff)
		}
		g.without(method)
	}
}

func TestAttributesNotSupported(t *testing.T) {
	for _, c := range []struct {
		name, board string
		memoryMiB   int
		want        gpu.MIGDevice
	}{
		{"catalogue", a100, 40960, gpu.MIGDevice{
			ProfileID: 14, Profile: "2g.10gb", MemoryMiB: 9856, Attributes: gpu.MIGAttributes{Slices: 2, CopyEngines: 2, Decoders: 1},
		}},
		{"unknown board", "NVIDIA Z1000", 8192, gpu.MIGDevice{
			ProfileID: 14, Profile: "2g.0gb", Attributes: gpu.MIGAttributes{Slices: 2},
		}},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newFakeGPU("a", c.board, 1)
			g.migCapable, g.enabled, g.silent, g.memoryMiB = true, true, true, c.memoryMiB
			g.profiles[1] = profile{14, 2}
			g.cut(14, 2, 2, 2, 1)
			got := read(t, newFake(g).machine(t)).GPUs[0]
			c.want.UUID, c.want.GI, c.want.Placement = "MIG-GPU-a-1-0", 1, gpu.Placement{Start: 2, Size: 2}
			if diff := cmp.Diff([]gpu.MIGDevice{c.want}, got.MIG.Devices); diff != "" || !got.Health.OK() {
				t.Errorf("%v\n%s", got.Health, diff)
			}
		})
	}
}

func TestProfileNames(t *testing.T) {
	for _, c := range []struct {
		name  string
		board string
		id    int
		ci    int // slices of the compute instance, of 2
		want  string
	}{
		{"catalogue", a100, 14, 2, "2g.10gb"},
		{"part of an instance", a100, 14, 1, "1c.2g.10gb"},
		{"id that the catalogue lacks", a100, 77, 2, "2g.10gb"},
		{"id that nobody knows", a100, 99, 2, "2g.10gb"},
		{"unknown board", "NVIDIA Z1000", 14, 2, "2g.2gb"},
		{"unknown board, variant", "NVIDIA Z1000", 78, 2, "2g.2gb+me"},
		{"unknown board, part of a variant", "NVIDIA Z1000", 78, 1, "1c.2g.2gb+me"},
		{"unknown board and id", "NVIDIA Z1000", 99, 2, "2g.2gb"},
	} {
		t.Run(c.name, func(t *testing.T) {
			g := newFakeGPU("a", c.board, 1)
			if c.board != a100 {
				g.memoryMiB = 8192
			}
			g.migCapable, g.enabled = true, true
			g.profiles[1], g.profiles[8], g.profiles[25] = profile{14, 2}, profile{78, 2}, profile{77, 2}
			g.cut(c.id, 0, 2, 2, c.ci)
			got := read(t, newFake(g).machine(t)).GPUs[0]
			if !got.Health.OK() || len(got.MIG.Devices) != 1 || got.MIG.Devices[0].Profile != c.want || got.MIG.Devices[0].ProfileID != c.id {
				t.Errorf("got %+v, %v; want %s", got.MIG.Devices, got.Health, c.want)
			}
		})
	}
}

// Names that are made must be those that the catalogue has.
func TestMadeNamesAgreeWithCatalogue(t *testing.T) {
	checked := 0
	for _, product := range gpu.Products() {
		if product.MIG == nil {
			continue
		}
		for _, p := range product.MIG.Profiles {
			checked++
			got := sizeName(p.Slices, p.MemoryMiB, product.MemoryMiB) + suffixes[p.Constant]
			if got != p.Name {
				t.Errorf("%s: profile %d is made into %s, the catalogue says %s", product.Key, p.ID, got, p.Name)
			}
		}
	}
	if checked == 0 {
		t.Error("no profile was checked")
	}
	if got := sizeName(1, 5000, 0); got != "1g.5gb" {
		t.Errorf("of a GPU with unknown memory: %s", got)
	}
}
