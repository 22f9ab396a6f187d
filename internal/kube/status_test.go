package kube

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/machine/machinetest"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

func quantity(t *testing.T, text string) resource.Quantity {
	t.Helper()
	q, err := resource.ParseQuantity(text)
	if err != nil {
		t.Fatal(err)
	}
	return q
}

// uuid is as long as a driver's.
func uuid(kind string, n int) string {
	return fmt.Sprintf("%s-%08x-1111-2222-3333-444444444444", kind, n)
}

// plan is what a node offers that shares its GPUs among so many.
func plan(t *testing.T, m *gpu.Machine, replicas int) *sharing.Plan {
	t.Helper()
	config := sharing.Default()
	config.Flags.MIGStrategy = sharing.MIGMixed
	if replicas > 1 {
		config.TimeSlicing = &sharing.Sharing{Resources: []sharing.SharedResource{{Name: "nvidia.com/gpu", Replicas: replicas}}}
	}
	p, _, err := config.Plan(m)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func size(t *testing.T, s v1alpha1.GPUNodeStatus) int {
	t.Helper()
	data, err := json.Marshal(s)
	if err != nil {
		t.Fatal(err)
	}
	return len(data)
}

func TestStatus(t *testing.T) {
	m := machinetest.Read(t, `
- product: T4
- product: A100-40
  mig: [{profile: 3g.20gb, start: 4}, {profile: 1g.5gb, start: 0}]
- product: A100-40
`)
	m.GPUs[0].Health = gpu.Health{State: gpu.Unhealthy, Reason: "XID 48"}
	m.GPUs[1].MIG.Devices[1].Health = gpu.Health{State: gpu.Unhealthy}
	m.GPUs[2].MIG.Enabled = true // off after the next reset
	held := gpu.DeviceID{Base: m.GPUs[1].MIG.Devices[0].UUID, Slot: gpu.NoSlot}
	since := time.Date(2026, 1, 2, 3, 4, 5, 678, time.FixedZone("", 3600))
	p := plan(t, m, 4)
	s := Status(NodeFacts{
		Machine: m, Plan: p,
		Holders:  []Holder{{Namespace: "ml", Pod: "train", Container: "main", Resource: "nvidia.com/mig-3g.20gb", Device: held, GPU: m.GPUs[1].UUID}},
		Cordoned: map[string]bool{m.GPUs[2].UUID: true},
		Fault: func(uuid string) (time.Time, string) {
			if uuid == m.GPUs[0].UUID {
				return since, "reset the GPU"
			}
			return time.Time{}, "unused"
		},
	})
	at := metav1.NewTime(since.UTC().Truncate(time.Second))
	if diff := cmp.Diff(v1alpha1.Health{State: v1alpha1.Unhealthy, Reason: "XID 48", Since: &at, Action: "reset the GPU"}, s.GPUs[0].Health); diff != "" {
		t.Errorf("health of GPU 0 (-want +got)\n%s", diff)
	}
	if s.GPUs[0].MIG != nil {
		t.Errorf("a T4 has %+v", s.GPUs[0].MIG)
	}
	var devices []string
	for _, d := range s.GPUs[1].MIG.Devices {
		text := fmt.Sprintf("%s %d:%d", d.Profile, d.Start, d.Size)
		if d.Health != nil {
			text += fmt.Sprintf(" %s %q", d.Health.State, d.Health.Reason)
		}
		devices = append(devices, text)
	}
	if diff := cmp.Diff([]string{"3g.20gb 4:4", `1g.5gb 0:1 Unhealthy "no reason known"`}, devices); diff != "" {
		t.Errorf("MIG devices (-want +got)\n%s", diff)
	}
	free := make(map[string][]int32)
	for _, f := range s.GPUs[1].MIG.Free {
		free[f.Profile] = f.Starts
	}
	// Of 7 slices 4 are taken, of 8 units 0 and 4 to 7.
	want := map[string][]int32{"1g.5gb": {1, 2, 3}, "1g.5gb+me": {1, 2, 3}, "1g.10gb": {2}, "2g.10gb": {2}}
	if diff := cmp.Diff(want, free); diff != "" {
		t.Errorf("free places (-want +got)\n%s", diff)
	}
	if g := s.GPUs[2]; !g.Cordoned || g.MIG.Pending == nil || *g.MIG.Pending || !g.MIG.Enabled {
		t.Errorf("GPU 2 is %+v, %+v", g, g.MIG)
	}
	wantHolders := []v1alpha1.Holder{{Resource: "nvidia.com/mig-3g.20gb", Device: held.String(), Namespace: "ml", Pod: "train", Container: "main"}}
	if diff := cmp.Diff(wantHolders, s.GPUs[1].Holders); diff != "" {
		t.Errorf("holders (-want +got)\n%s", diff)
	}
	// GPU 0 and the MIG device of GPU 1 are unhealthy, GPU 2 is cordoned.
	wantSummary := v1alpha1.GPUNodeSummary{
		GPUs: 3, Unhealthy: 2, Sharing: "time-slicing x4 (1 of 3 GPUs)", MIG: "1x3g.20gb,1x1g.5gb",
		Product: "1x Tesla T4, 2x NVIDIA A100-SXM4-40GB",
	}
	if diff := cmp.Diff(wantSummary, s.Summary); diff != "" {
		t.Errorf("summary (-want +got)\n%s", diff)
	}
	wantResources := []v1alpha1.Resource{
		{Name: "nvidia.com/gpu", Strategy: "time-slicing", Replicas: 4, Devices: 4, GPUs: []int32{0}},
		{Name: "nvidia.com/mig-1g.5gb", Strategy: "none", Replicas: 1, Devices: 1, GPUs: []int32{1}},
		{Name: "nvidia.com/mig-3g.20gb", Strategy: "none", Replicas: 1, Devices: 1, Offered: 1, GPUs: []int32{1}},
	}
	if diff := cmp.Diff(wantResources, s.Resources); diff != "" {
		t.Errorf("resources (-want +got)\n%s", diff)
	}
}

// TestWithheldDevicesAreNotOffered: they count as devices, not as offered.
func TestWithheldDevicesAreNotOffered(t *testing.T) {
	m := machinetest.Read(t, "- {product: T4, count: 2}\n")
	p := plan(t, m, 4)
	withheld := map[string]string{p.Resources[0].Devices[0].ID.String(): "cordoned", p.Resources[0].Devices[5].ID.String(): "the exclusive view is in use"}
	s := Status(NodeFacts{Machine: m, Plan: p, Withheld: map[string]map[string]string{"nvidia.com/gpu": withheld}})
	if r := s.Resources[0]; r.Devices != 8 || r.Offered != 6 {
		t.Errorf("%d of %d are offered, want 6 of 8", r.Offered, r.Devices)
	}
}

// full is a node of so many GPUs with 10 slots each, every one held.
func full(t *testing.T, gpus int, name func(kind string, n int) string) NodeFacts {
	t.Helper()
	m := machinetest.Read(t, "- {product: H100-80}\n")
	for i := 1; i < gpus; i++ {
		g := m.GPUs[0]
		g.Index, g.UUID = i, uuid("GPU", i)
		m.GPUs = append(m.GPUs, g)
	}
	m.Links = gpu.NewLinks(gpus)
	for i := range m.GPUs {
		for j := range i {
			m.Links.Merge(i, j, gpu.Link{NVLinks: 18, PCIe: gpu.PCIeInternal})
		}
	}
	f := NodeFacts{Machine: m, Plan: plan(t, m, 10)}
	for i, d := range f.Plan.Resources[0].Devices {
		f.Holders = append(f.Holders, Holder{
			Namespace: name("namespace", i), Pod: name("pod", i), Container: name("container", i),
			Resource: f.Plan.Resources[0].Name, Device: d.ID, GPU: d.GPU,
		})
	}
	return f
}

func TestStatusOf16GPUsOf10SlotsIsBelow128KiB(t *testing.T) {
	f := full(t, 16, func(kind string, n int) string {
		return fmt.Sprintf("%s-of-ordinary-length-%d-7c9d8f6b5-x2x4z", kind, n)
	})
	s := Status(f)
	if n := size(t, s); n > 128<<10 {
		t.Errorf("%d bytes", n)
	}
	held := 0
	for _, g := range s.GPUs {
		held += len(g.Holders)
	}
	if held != 160 || s.Omitted != "" {
		t.Errorf("%d of 160 holders are told, omitted: %q", held, s.Omitted)
	}
}

// TestStatusOfTheLargestNodeCanBeStored: whatever there is, etcd takes the status,
// no held GPU seems free, and what is left out is told.
func TestStatusOfTheLargestNodeCanBeStored(t *testing.T) {
	long := map[string]int{"namespace": maxNamespace, "pod": maxPod, "container": maxContainer}
	f := full(t, maxGPUs+1, func(kind string, n int) string {
		return fmt.Sprintf("%0*d", long[kind], n)
	})
	name := f.Plan.Resources[0].Name
	for i := range f.Machine.GPUs {
		g := &f.Machine.GPUs[i]
		g.Name, g.NVSwitch, g.PCIeRoot = strings.Repeat("ü", 300), strings.Repeat("s", 300), strings.Repeat("r", 300)
		g.Health = gpu.Health{State: gpu.Unhealthy, Reason: strings.Repeat("x", 2000)}
		for j := range maxMIGDevices + 1 {
			g.MIG.Devices = append(g.MIG.Devices, gpu.MIGDevice{
				Index: j, UUID: uuid("MIG", 100*i+j), Profile: strings.Repeat("1g.5gb", 20), Placement: gpu.Placement{Start: j, Size: 1},
			})
		}
		for j := range 2000 {
			f.Holders = append(f.Holders, Holder{
				Namespace: strings.Repeat("n", maxNamespace), Pod: fmt.Sprintf("%0*d", maxPod, j), Container: strings.Repeat("c", maxContainer),
				Resource: name, Device: gpu.DeviceID{Base: g.UUID, Slot: j}, GPU: g.UUID,
			})
		}
	}
	for i := range maxResources {
		f.Plan.Resources = append(f.Plan.Resources, sharing.Resource{Name: fmt.Sprintf("example.com/%0*d", 50, i), Devices: f.Plan.Resources[0].Devices})
	}
	f.Fault = func(string) (time.Time, string) { return time.Unix(1e9, 0), strings.Repeat("a", 300) }
	s := Status(f)
	if n := size(t, s); n > 1<<20 {
		t.Errorf("%d bytes", n)
	}
	for i := range s.GPUs {
		if len(s.GPUs[i].Holders) == 0 {
			t.Errorf("GPU %d seems free", i)
		}
	}
	if want := []int{maxGPUs, maxGPUs * (maxGPUs - 1) / 2, maxResources}; !cmp.Equal(want, []int{len(s.GPUs), len(s.Links), len(s.Resources)}) {
		t.Errorf("%d GPUs, %d links, %d resources, want %v", len(s.GPUs), len(s.Links), len(s.Resources), want)
	}
	for _, what := range []string{"1 GPUs", "64 MIG devices", "1 resources", "holders"} {
		if !strings.Contains(s.Omitted, what) {
			t.Errorf("omitted is %q, without %s", s.Omitted, what)
		}
	}
	if s.Summary.Unhealthy != maxGPUs || s.Summary.Free != 0 {
		t.Errorf("summary %+v", s.Summary)
	}
	if _, err := Machine(&s); err != nil {
		t.Errorf("what is written is not read: %v", err)
	}
}

// drawMachine draws a machine of which a status tells all that there is to placement.
func drawMachine(t *rapid.T) *gpu.Machine {
	text := rapid.StringMatching(`[ -~]{0,20}`)
	health := rapid.Custom(func(t *rapid.T) gpu.Health {
		if rapid.Bool().Draw(t, "healthy") {
			return gpu.Health{}
		}
		return gpu.Health{
			State: rapid.SampledFrom([]gpu.HealthState{gpu.Unhealthy, gpu.Lost}).Draw(t, "state"), Reason: rapid.StringMatching(`[ -~]{1,20}`).Draw(t, "reason"),
		}
	})
	n := rapid.IntRange(0, 6).Draw(t, "GPUs")
	m := &gpu.Machine{Driver: text.Draw(t, "driver"), CUDA: rapid.StringMatching(`[0-9.]{0,8}`).Draw(t, "CUDA"), Links: gpu.NewLinks(n)}
	products := gpu.Products()
	for i := range n {
		product := rapid.SampledFrom(products).Draw(t, "product")
		g := gpu.GPU{
			Index: i, UUID: uuid("GPU", i), Name: rapid.SampledFrom(append(product.Names, "no product")).Draw(t, "name"),
			MemoryMiB: rapid.IntRange(0, 1<<20).Draw(t, "memory"), PCIBusID: text.Draw(t, "bus"), PCIeRoot: text.Draw(t, "root"),
			NVSwitch: text.Draw(t, "domain"), NVLinks: rapid.IntRange(0, 18).Draw(t, "NVLinks"), NUMA: rapid.IntRange(-1, 3).Draw(t, "NUMA"),
			Health: health.Draw(t, "health"),
		}
		if major := rapid.IntRange(0, 12).Draw(t, "major"); major > 0 {
			g.Compute = gpu.ComputeCapability{Major: major, Minor: rapid.IntRange(0, 9).Draw(t, "minor")}
		}
		for j := range i {
			m.Links.Merge(i, j, gpu.Link{NVLinks: rapid.IntRange(0, 4).Draw(t, "links"), PCIe: gpu.PCIeLevel(rapid.IntRange(0, 6).Draw(t, "level"))})
		}
		if product.MIG != nil {
			g.MIG = gpu.MIGState{Capable: true, Enabled: rapid.Bool().Draw(t, "mode"), Pending: rapid.Bool().Draw(t, "pending")}
			for range rapid.IntRange(0, 7).Draw(t, "instances") {
				p := rapid.SampledFrom(product.MIG.Profiles).Draw(t, "profile")
				free := product.MIG.Free(g.MIG.Geometry(), p.ID)
				if !g.MIG.Enabled || len(free) == 0 {
					continue
				}
				j := len(g.MIG.Devices)
				d := gpu.MIGDevice{
					Index: j, UUID: uuid("MIG", 100*i+j), ProfileID: p.ID, Profile: p.Name, MemoryMiB: p.MemoryMiB,
					Placement: rapid.SampledFrom(free).Draw(t, "place"),
				}
				if g.Health.OK() { // the verdict on the GPU covers it
					d.Health = health.Draw(t, "health")
				}
				g.MIG.Devices = append(g.MIG.Devices, d)
			}
		}
		m.GPUs = append(m.GPUs, g)
	}
	return m
}

// TestMachineReadsWhatStatusWrites: through JSON and back, the machine is the same
// in all that placement looks at.
func TestMachineReadsWhatStatusWrites(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawMachine(t)
		data, err := json.Marshal(Status(NodeFacts{Machine: m}))
		if err != nil {
			t.Fatal(err)
		}
		var s v1alpha1.GPUNodeStatus
		if err := json.Unmarshal(data, &s); err != nil {
			t.Fatal(err)
		}
		got, err := Machine(&s)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(m, got, cmp.AllowUnexported(gpu.Links{}), equateEmpty); diff != "" {
			t.Errorf("(-told +read)\n%s", diff)
		}
	})
}

// equateEmpty takes no GPUs for an empty list of them.
var equateEmpty = cmp.FilterValues(func(x, y []gpu.GPU) bool { return len(x)+len(y) == 0 }, cmp.Ignore())

// TestStatusOfABuiltinMachineIsRead: each of them, as the agent sees it.
func TestStatusOfABuiltinMachineIsRead(t *testing.T) {
	for _, name := range machine.BuiltinNames() {
		m := machinetest.Builtin(t, name)
		s := Status(NodeFacts{Machine: m, Plan: plan(t, m, 10)})
		got, err := Machine(&s)
		if err != nil {
			t.Errorf("%s: %v", name, err)
			continue
		}
		for i := range m.GPUs {
			for j := range m.GPUs {
				if want, got := m.LinkScore(i, j), got.LinkScore(i, j); want != got {
					t.Errorf("%s: GPUs %d and %d are worth %d, were %d", name, i, j, got, want)
				}
			}
			if !cmp.Equal(m.GPUs[i].MIG.Geometry(), got.GPUs[i].MIG.Geometry()) || m.GPUs[i].MemoryMiB != got.GPUs[i].MemoryMiB {
				t.Errorf("%s: GPU %d is read as %+v, is %+v", name, i, got.GPUs[i], m.GPUs[i])
			}
		}
	}
}

func TestMachineRefuses(t *testing.T) {
	good := func() *v1alpha1.GPUNodeStatus {
		m := machinetest.Read(t, "- {product: A100-40, mig: [{profile: 3g.20gb, start: 4}]}\n- {product: T4}\n")
		s := Status(NodeFacts{Machine: m})
		return &s
	}
	if _, err := Machine(good()); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		want  string
		spoil func(*v1alpha1.GPUNodeStatus)
	}{
		{"status.gpus: 65 GPUs", func(s *v1alpha1.GPUNodeStatus) { s.GPUs = make([]v1alpha1.GPU, 65) }},
		{"status.gpus: gpu 1 has index 0", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].Index = 0 }},
		{"status.gpus: gpu 1: UUID", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].UUID = s.GPUs[0].UUID }},
		{"status.gpus[1].uuid: device id \"\"", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].UUID = "" }},
		{"status.gpus[1].uuid: \"MIG-a\"", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].UUID = "MIG-a" }},
		{"status.gpus[1].uuid: \"GPU-a::1\"", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].UUID = "GPU-a::1" }},
		{"status.gpus[1].memoryMiB: -1", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].MemoryMiB = -1 }},
		{"status.gpus[1].memoryMiB", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].MemoryMiB = 1 << 40 }},
		{"status.gpus[1].nvlinks: -1", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].NVLinks = -1 }},
		{"status.gpus[1].numa: -1", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].NUMA = new(int32(-1)) }},
		{"status.gpus[1].compute: \"8\"", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].Compute = "8" }},
		{"status.gpus[1].compute: \"08.0\"", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].Compute = "08.0" }},
		{"status.gpus[1].health.state: \"Sick\"", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[1].Health.State = "Sick" }},
		{"status.gpus[0].mig.devices: 17", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[0].MIG.Devices = make([]v1alpha1.MIGDevice, 17) }},
		{"status.gpus[0].mig.devices[0].uuid", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[0].MIG.Devices[0].UUID = "GPU-a" }},
		{"status.gpus[0].mig.devices[0].profileID: -1", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[0].MIG.Devices[0].ProfileID = -1 }},
		{"status.gpus[0].mig.devices[0].start: -1", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[0].MIG.Devices[0].Start = -1 }},
		{"status.gpus[0].mig.devices[0].start: 64", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[0].MIG.Devices[0].Start = 64 }},
		{"status.gpus[0].mig.devices[0].size: 0", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[0].MIG.Devices[0].Size = 0 }},
		{"status.gpus[0].mig.devices[0].size: 61", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[0].MIG.Devices[0].Size = 61 }},
		{"status.gpus[0].mig.devices[0].memoryMiB: -1", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[0].MIG.Devices[0].MemoryMiB = -1 }},
		{"status.gpus[0].mig.devices[0].health.state", func(s *v1alpha1.GPUNodeStatus) { s.GPUs[0].MIG.Devices[0].Health = &v1alpha1.Health{} }},
		{"status.links[0]: 1 and 0", func(s *v1alpha1.GPUNodeStatus) { s.Links = []v1alpha1.Link{{A: 1, B: 0}} }},
		{"status.links[0]: 0 and 2", func(s *v1alpha1.GPUNodeStatus) { s.Links = []v1alpha1.Link{{A: 0, B: 2}} }},
		{"status.links[0].pcie: \"pix\"", func(s *v1alpha1.GPUNodeStatus) { s.Links = []v1alpha1.Link{{A: 0, B: 1, PCIe: "pix"}} }},
		{"status.links[0].nvlinks: -1", func(s *v1alpha1.GPUNodeStatus) { s.Links = []v1alpha1.Link{{A: 0, B: 1, NVLinks: -1}} }},
	} {
		s := good()
		c.spoil(s)
		m, err := Machine(s)
		if err == nil || !strings.HasPrefix(err.Error(), c.want) {
			t.Errorf("the error is %v, want %s", err, c.want)
		}
		if m != nil {
			t.Errorf("%s: a machine comes with the error", c.want)
		}
	}
}
