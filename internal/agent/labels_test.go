package agent

import (
	"maps"
	"regexp/syntax"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/machine/machinetest"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// plan plans a machine by a config.
func plan(t *testing.T, m *gpu.Machine, yaml string) (*sharing.Plan, *sharing.Config) {
	t.Helper()
	config, _, err := sharing.Parse("config.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	p, _, err := config.Plan(m)
	if err != nil {
		t.Fatal(err)
	}
	return p, config
}

func TestLabels(t *testing.T) {
	const model = "ashlar.dev/gpu.NVIDIA-A100-SXM4-40GB."
	a100 := map[string]string{
		"nvidia.com/gpu.present": "true", "nvidia.com/gpu.family": "ampere",
		"nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "0",
		"nvidia.com/gpu.memory": "40960", "nvidia.com/gpu.count": "2", "nvidia.com/gpu.replicas": "1",
		"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.sharing-strategy": "none",
		"nvidia.com/mig.capable": "true", "nvidia.com/mps.capable": "false", "nvidia.com/vgpu.present": "false",
		"nvidia.com/gpu.machine": "PowerEdge-R7525", "nvidia.com/gpu.mode": "compute",
		"nvidia.com/cuda.driver.major": "580", "nvidia.com/cuda.driver.minor": "95", "nvidia.com/cuda.driver.rev": "05",
		"nvidia.com/cuda.driver-version.major": "580", "nvidia.com/cuda.driver-version.minor": "95",
		"nvidia.com/cuda.driver-version.revision": "05", "nvidia.com/cuda.driver-version.full": "580.95.05",
		"nvidia.com/cuda.runtime.major": "13", "nvidia.com/cuda.runtime.minor": "0",
		"nvidia.com/cuda.runtime-version.major": "13", "nvidia.com/cuda.runtime-version.minor": "0",
		"nvidia.com/cuda.runtime-version.full": "13.0",
		model + "count":                        "2", model + "memory": "40960", model + "replicas": "1",
	}
	// with changes labels of nvidia.com/, or of the key that is given in full; ""
	// takes one away.
	with := func(changes map[string]string) map[string]string {
		labels := maps.Clone(a100)
		for k, v := range changes {
			if !strings.HasPrefix(k, modelLabel) {
				k = labelDomain + k
			}
			if v == "" {
				delete(labels, k)
			} else {
				labels[k] = v
			}
		}
		return labels
	}
	invalid := with(map[string]string{
		"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-INVALID", "gpu.count": "0", "gpu.replicas": "0", "gpu.memory": "0",
		"mig.strategy": "single", model + "replicas": "0",
	})
	invalid["nvidia.com/gpu.sharing-strategy"] = ""
	const pair = "- {product: NVIDIA A100-SXM4-40GB, count: 2}\n"
	const halves = "- {product: NVIDIA A100-SXM4-40GB, count: 2, mig: [{profile: 3g.20gb, count: 2}]}\n"
	for _, c := range []struct {
		name, machine, config string
		edit                  func(*gpu.Machine)
		want                  map[string]string
	}{
		{name: "whole GPUs", machine: pair, want: a100},
		{
			name: "time-sliced", machine: pair, config: "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}",
			want: with(map[string]string{
				"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing", model + "replicas": "4",
			}),
		},
		{
			name: "time-sliced under another name", machine: pair, config: "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}",
			want: with(map[string]string{"gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing", model + "replicas": "4"}),
		},
		{
			name: "exclusive view beside slots", machine: pair, config: "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}, {name: nvidia.com/gpu-exclusive, replicas: 1}]}}",
			want: with(map[string]string{
				"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.replicas": "2", "gpu.sharing-strategy": "time-slicing", model + "replicas": "2",
			}),
		},
		{
			name: "MIG mode that is not served", machine: halves,
			want: with(map[string]string{"gpu.replicas": "0", model + "replicas": "0"}),
		},
		{
			name: "single without MIG is as none", machine: pair, config: "flags: {migStrategy: single}",
			want: with(map[string]string{"mig.strategy": "single"}),
		},
		{
			name: "single MIG", machine: halves, config: "flags: {migStrategy: single}",
			edit: func(m *gpu.Machine) {
				m.GPUs[0].MIG.Devices[0].Attributes = gpu.MIGAttributes{SMs: 42, Slices: 3, ComputeSlices: 3, CopyEngines: 3, Decoders: 2, JPEG: 1}
			},
			want: with(map[string]string{
				"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "gpu.count": "4", "gpu.memory": "19968", "mig.strategy": "single",
				"gpu.multiprocessors": "42", "gpu.slices.gi": "3", "gpu.slices.ci": "3",
				"gpu.engines.copy": "3", "gpu.engines.decoder": "2", "gpu.engines.jpeg": "1",
			}),
		},
		{
			name: "single MIG, time-sliced", machine: halves, config: "flags: {migStrategy: single}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}]}}",
			edit: func(m *gpu.Machine) { m.GPUs[0].MIG.Devices[0].Attributes = gpu.MIGAttributes{} },
			want: with(map[string]string{
				"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb-SHARED", "gpu.count": "4", "gpu.memory": "19968", "mig.strategy": "single",
				"gpu.replicas": "3", "gpu.sharing-strategy": "time-slicing", model + "replicas": "3",
			}),
		},
		{
			name: "single MIG of which one GPU is not in MIG mode", config: "flags: {migStrategy: single}",
			machine: "- {product: NVIDIA A100-SXM4-40GB}\n- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 3g.20gb, count: 2}]}\n", want: invalid,
		},
		{
			name: "single MIG of which one GPU is empty", machine: halves, config: "flags: {migStrategy: single}",
			edit: func(m *gpu.Machine) { m.GPUs[1].MIG.Devices = nil }, want: invalid,
		},
		{
			name: "single MIG of two kinds", config: "flags: {migStrategy: single}",
			machine: "- {product: NVIDIA A100-SXM4-40GB, count: 2, mig: [{profile: 3g.20gb, start: 0}, {profile: 2g.10gb, start: 4}]}\n", want: invalid,
		},
		{
			name: "single MIG beside another model, which is lost", config: "flags: {migStrategy: single}",
			machine: "- {product: T4}\n- {product: NVIDIA A100-SXM4-40GB, count: 2, mig: [{profile: 3g.20gb, count: 2}]}\n",
			edit: func(m *gpu.Machine) {
				m.GPUs[0].Health.State = gpu.Lost
				m.GPUs[1].MIG.Devices[0].Attributes = gpu.MIGAttributes{}
			},
			want: with(map[string]string{
				"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "gpu.count": "4", "gpu.memory": "19968", "mig.strategy": "single",
				"ashlar.dev/gpu.Tesla-T4.count": "1", "ashlar.dev/gpu.Tesla-T4.memory": "15360", "ashlar.dev/gpu.Tesla-T4.replicas": "0",
			}),
		},
		{
			name: "mixed MIG", config: "flags: {migStrategy: mixed}",
			machine: "- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 1g.5gb+me, start: 0}, {profile: 3g.20gb, start: 4}]}\n- {product: NVIDIA A100-SXM4-40GB}\n",
			edit: func(m *gpu.Machine) {
				m.GPUs[0].MIG.Devices[0].Attributes = gpu.MIGAttributes{
					SMs: 14, Slices: 1, ComputeSlices: 1, CopyEngines: 1, Decoders: 1, Encoders: 2, JPEG: 1, OFA: 1,
				}
				m.GPUs[0].MIG.Devices[1].Attributes = gpu.MIGAttributes{}
			},
			want: with(map[string]string{
				"mig.strategy":      "mixed",
				"mig-3g.20gb.count": "1", "mig-3g.20gb.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "mig-3g.20gb.memory": "19968",
				"mig-3g.20gb.replicas": "1", "mig-3g.20gb.sharing-strategy": "none",
				"mig-1g.5gb.me.count": "1", "mig-1g.5gb.me.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.me", "mig-1g.5gb.me.memory": "4864",
				"mig-1g.5gb.me.replicas": "1", "mig-1g.5gb.me.sharing-strategy": "none",
				"mig-1g.5gb.me.multiprocessors": "14", "mig-1g.5gb.me.slices.gi": "1", "mig-1g.5gb.me.slices.ci": "1",
				"mig-1g.5gb.me.engines.copy": "1", "mig-1g.5gb.me.engines.decoder": "1", "mig-1g.5gb.me.engines.encoder": "2",
				"mig-1g.5gb.me.engines.jpeg": "1", "mig-1g.5gb.me.engines.ofa": "1",
			}),
		},
		{
			name: "single MIG with a media engine", machine: "- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 1g.5gb+me, start: 0}]}\n", config: "flags: {migStrategy: single}",
			edit: func(m *gpu.Machine) { m.GPUs[0].MIG.Devices[0].Attributes = gpu.MIGAttributes{} },
			want: with(map[string]string{
				"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.me", "gpu.count": "1", "gpu.memory": "4864", "mig.strategy": "single", model + "count": "1",
			}),
		},
		{
			name: "mixed MIG on all GPUs, some slices shared under another name", machine: "- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 3g.20gb, count: 2}]}\n",
			config: "flags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/mig-3g.20gb, rename: nvidia.com/small, devices: ['0:0'], replicas: 4}]}}",
			edit:   func(m *gpu.Machine) { m.GPUs[0].MIG.Devices[0].Attributes = gpu.MIGAttributes{} },
			want: with(map[string]string{
				"gpu.count": "1", "gpu.replicas": "0", "mig.strategy": "mixed", model + "count": "1", model + "replicas": "0",
				"mig-3g.20gb.count": "2", "mig-3g.20gb.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "mig-3g.20gb.memory": "19968",
				"mig-3g.20gb.replicas": "4", "mig-3g.20gb.sharing-strategy": "time-slicing",
			}),
		},
		{
			name: "two models: the first counts", machine: pair + "- {product: T4, count: 3}\n",
			want: with(map[string]string{
				"ashlar.dev/gpu.Tesla-T4.count": "3", "ashlar.dev/gpu.Tesla-T4.memory": "15360", "ashlar.dev/gpu.Tesla-T4.replicas": "1",
			}),
		},
		{
			name: "two models, the second one shared", machine: "- {product: NVIDIA A100-SXM4-40GB, count: 2}\n- {product: T4}\n",
			config: "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, devices: [2], replicas: 5}]}}",
			want: with(map[string]string{
				"ashlar.dev/gpu.Tesla-T4.count": "1", "ashlar.dev/gpu.Tesla-T4.memory": "15360", "ashlar.dev/gpu.Tesla-T4.replicas": "5",
			}),
		},
		{
			name: "nothing is known", machine: pair,
			edit: func(m *gpu.Machine) {
				m.Driver, m.CUDA, m.Board = "R580", "", " ® "
				for i := range m.GPUs {
					m.GPUs[i].PCIClass, m.GPUs[i].Compute, m.GPUs[i].MemoryMiB = 0, gpu.ComputeCapability{}, 0
				}
			},
			want: with(map[string]string{
				"cuda.driver.major": "", "cuda.driver.minor": "", "cuda.driver.rev": "",
				"cuda.driver-version.major": "", "cuda.driver-version.minor": "", "cuda.driver-version.revision": "", "cuda.driver-version.full": "",
				"cuda.runtime.major": "", "cuda.runtime.minor": "", "cuda.runtime-version.major": "", "cuda.runtime-version.minor": "", "cuda.runtime-version.full": "",
				"gpu.machine": "unknown", "gpu.mode": "unknown", "gpu.memory": "", "gpu.family": "", "gpu.compute.major": "", "gpu.compute.minor": "",
				model + "memory": "",
			}),
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			m := machinetest.Read(t, c.machine)
			m.Driver, m.CUDA, m.Board = "580.95.05", "13.0", "PowerEdge R7525"
			for i := range m.GPUs {
				m.GPUs[i].PCIClass = 0x0302
			}
			if c.edit != nil {
				c.edit(m)
			}
			config, _, err := sharing.Parse("config.yaml", []byte(c.config))
			if err != nil {
				t.Fatal(err)
			}
			p, _, err := config.Plan(m)
			if _, broken := c.want["nvidia.com/gpu.product"]; !broken || (err != nil) != strings.HasSuffix(c.want["nvidia.com/gpu.product"], "INVALID") {
				t.Fatalf("the plan's error is %v", err)
			}
			if diff := cmp.Diff(c.want, Labels(m, p, string(config.Flags.MIGStrategy))); diff != "" {
				t.Errorf("(-want +got):\n%s", diff)
			}
		})
	}
	if got := Labels(&gpu.Machine{}, &sharing.Plan{}, "none"); got != nil {
		t.Errorf("a node without GPUs gets %v", got)
	}
}

// TestLabelsOfTheNode: what is about all GPUs together.
func TestLabelsOfTheNode(t *testing.T) {
	const cluster = "a1b2c3d4-0102-0304-0506-0708090a0b0c"
	for name, c := range map[string]struct {
		edit func(*gpu.Machine)
		key  string
		want string
	}{
		"a driver of two numbers":           {func(m *gpu.Machine) { m.Driver = "550.1" }, "cuda.driver-version.full", "550.1"},
		"a driver without a revision":       {func(m *gpu.Machine) { m.Driver = "550.1" }, "cuda.driver-version.revision", ""},
		"a driver of four numbers":          {func(m *gpu.Machine) { m.Driver = "1.2.3.4" }, "cuda.driver-version.full", "absent"},
		"graphics":                          {func(m *gpu.Machine) { m.GPUs[0].PCIClass, m.GPUs[1].PCIClass = 0x0300, 0x0300 }, "gpu.mode", "graphics"},
		"graphics and compute":              {func(m *gpu.Machine) { m.GPUs[0].PCIClass = 0x0300 }, "gpu.mode", "unknown"},
		"another class":                     {func(m *gpu.Machine) { m.GPUs[0].PCIClass, m.GPUs[1].PCIClass = 0x0380, 0x0380 }, "gpu.mode", "unknown"},
		"the class of one that never spoke": {func(m *gpu.Machine) { m.GPUs[1] = gpu.GPU{Index: 1, UUID: "GPU-x"} }, "gpu.mode", "compute"},
		"a clique":                          {func(m *gpu.Machine) { m.GPUs[0].NVSwitch = cluster + ".7" }, "gpu.clique", cluster + ".7"},
		"a clique of both":                  {func(m *gpu.Machine) { m.GPUs[0].NVSwitch, m.GPUs[1].NVSwitch = cluster+".7", cluster+".7" }, "gpu.clique", cluster + ".7"},
		"two cliques":                       {func(m *gpu.Machine) { m.GPUs[0].NVSwitch, m.GPUs[1].NVSwitch = cluster+".7", cluster+".8" }, "gpu.clique", "absent"},
		"a local NVSwitch":                  {func(m *gpu.Machine) { m.GPUs[0].NVSwitch = "nvswitch" }, "gpu.clique", "absent"},
		"no NVSwitch":                       {func(*gpu.Machine) {}, "gpu.clique", "absent"},
		"a guest":                           {func(m *gpu.Machine) { m.GPUs[1].Name = "NVIDIA A100-40C" }, "vgpu.present", "absent"},
		"no time":                           {func(*gpu.Machine) {}, "gfd.timestamp", "absent"},
	} {
		t.Run(name, func(t *testing.T) {
			m := machinetest.Read(t, "- {product: A100-40, count: 2}\n")
			for i := range m.GPUs {
				m.GPUs[i].PCIClass = 0x0302
			}
			c.edit(m)
			got, ok := Labels(m, nil, "none")[labelDomain+c.key]
			if !ok {
				got = "absent"
			}
			if got != c.want {
				t.Errorf("%s is %q, want %q", c.key, got, c.want)
			}
		})
	}
}

// TestLabelsWithoutAPlanThatFits: the labels follow the machine where the plan is
// none or an older one.
func TestLabelsWithoutAPlanThatFits(t *testing.T) {
	m := machinetest.Read(t, "- {product: A100-40, count: 2, mig: [{profile: 3g.20gb, count: 2}]}\n")
	p, _ := plan(t, m, "flags: {migStrategy: single}")
	now := *m
	now.GPUs = slices.Clone(m.GPUs)
	now.GPUs[1].MIG.Devices = nil
	for name, p := range map[string]*sharing.Plan{"none": nil, "the last": p, "the rest of the last": remaining(p, &now)} {
		got := Labels(&now, p, "single")
		if got["nvidia.com/gpu.product"] != "NVIDIA-A100-SXM4-40GB-MIG-INVALID" || got["nvidia.com/gpu.count"] != "0" || got["nvidia.com/gpu.replicas"] != "0" {
			t.Errorf("%s: got %v", name, got)
		}
	}
	gone := &gpu.Machine{GPUs: m.GPUs[:1], Links: gpu.NewLinks(1)}
	if got := Labels(gone, p, "single"); got["nvidia.com/gpu.count"] != "2" || got["nvidia.com/gpu.replicas"] != "1" {
		t.Errorf("a plan with GPUs that are gone gives %v", got)
	}
	if got := Labels(m, nil, "mixed"); got["nvidia.com/mig-3g.20gb.count"] != "4" || got["nvidia.com/mig-3g.20gb.replicas"] != "0" {
		t.Errorf("mixed without a plan gives %v", got)
	}
}

// TestLabelsOfAGPUThatNeverAnswered: such a GPU has no name, and must not take
// the labels of the others away.
func TestLabelsOfAGPUThatNeverAnswered(t *testing.T) {
	m := machinetest.Read(t, "- {product: T4, count: 3}\n")
	m.GPUs[0] = gpu.GPU{Index: 0, UUID: "GPU-unknown-0", Minor: -1, Health: gpu.Health{State: gpu.Lost}}
	p, _ := plan(t, m, "")
	got := Labels(m, p, "none")
	if got["nvidia.com/gpu.product"] != "Tesla-T4" || got["nvidia.com/gpu.count"] != "2" || got["nvidia.com/gpu.family"] != "turing" {
		t.Errorf("got %v", got)
	}
	for i := range m.GPUs {
		m.GPUs[i].Name = ""
	}
	if got := Labels(m, p, "none"); got != nil {
		t.Errorf("GPUs without names give %v", got)
	}
}

func TestLabelsOfEveryBuiltinMachineAreValid(t *testing.T) {
	for _, name := range machine.BuiltinNames() {
		m := machinetest.Builtin(t, name)
		p, _ := plan(t, m, "flags: {migStrategy: mixed}")
		for k, v := range Labels(m, p, "mixed") {
			if problems := append(validation.IsQualifiedName(k), validation.IsValidLabelValue(v)...); len(problems) > 0 {
				t.Errorf("%s: label %s=%s: %v", name, k, v, problems)
			}
		}
	}
}

// drawMachine draws a machine, as wild as drivers may report one.
func drawMachine(t *rapid.T) *gpu.Machine {
	text := rapid.OneOf(rapid.StringN(0, 90, -1), rapid.StringMatching(`[A-Za-z0-9 ._()-]{0,90}`))
	name := rapid.OneOf(rapid.SampledFrom([]string{
		"", "Tesla T4", "NVIDIA A100-SXM4-40GB", "NVIDIA RTX PRO 6000 Blackwell Server Edition",
		"NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", "®", "--",
	}), text)
	profile := rapid.OneOf(rapid.SampledFrom([]string{"1g.5gb", "1g.5gb+me", "3g.20gb", "1g.24gb+me.all", "2g.48gb-me"}), text)
	few := rapid.IntRange(0, 3)
	class := rapid.SampledFrom([]uint16{0, 0x0300, 0x0302})
	m := &gpu.Machine{
		Driver: rapid.OneOf(rapid.SampledFrom([]string{"580.95.05", "550.1"}), text).Draw(t, "driver"),
		CUDA:   rapid.OneOf(rapid.Just("13.0"), text).Draw(t, "CUDA"),
		Board:  text.Draw(t, "board"),
	}
	n := rapid.IntRange(0, 4).Draw(t, "GPUs")
	m.Links = gpu.NewLinks(n)
	for i := range n {
		g := gpu.GPU{
			Index: i, UUID: "GPU-" + string(rune('a'+i)), Name: name.Draw(t, "name"), MemoryMiB: few.Draw(t, "memory"),
			Compute:  gpu.ComputeCapability{Major: rapid.IntRange(0, 14).Draw(t, "major"), Minor: few.Draw(t, "minor")},
			PCIClass: class.Draw(t, "class"), NVSwitch: rapid.SampledFrom([]string{"", "nvswitch", "01234567-89ab-cdef-0123-456789abcdef.3"}).Draw(t, "domain"),
			Health: gpu.Health{State: rapid.SampledFrom([]gpu.HealthState{gpu.Healthy, gpu.Unhealthy, gpu.Lost}).Draw(t, "health")},
		}
		g.MIG.Capable = rapid.Bool().Draw(t, "capable")
		if g.MIG.Capable && rapid.Bool().Draw(t, "MIG mode") {
			g.MIG.Enabled = true
			for j := range few.Draw(t, "MIG devices") {
				g.MIG.Devices = append(g.MIG.Devices, gpu.MIGDevice{
					Index: j, UUID: "MIG-" + string(rune('a'+i)) + string(rune('0'+j)), ProfileID: few.Draw(t, "profile"), Profile: profile.Draw(t, "profile"),
					MemoryMiB: few.Draw(t, "memory"), Attributes: gpu.MIGAttributes{
						SMs: few.Draw(t, "SMs"), Slices: few.Draw(t, "slices"), ComputeSlices: few.Draw(t, "slices"), CopyEngines: few.Draw(t, "copy"),
						Decoders: few.Draw(t, "decoders"), Encoders: few.Draw(t, "encoders"), JPEG: few.Draw(t, "JPEG"), OFA: few.Draw(t, "OFA"),
					},
				})
			}
		}
		m.GPUs = append(m.GPUs, g)
	}
	return m
}

// TestLabelsOfAnyMachine: whatever a driver reports, the apiserver accepts the
// labels, they can be taken away again, and they say the same each time.
func TestLabelsOfAnyMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawMachine(t)
		config := sharing.Default()
		config.Flags.MIGStrategy = rapid.SampledFrom([]sharing.MIGStrategy{sharing.MIGNone, sharing.MIGSingle, sharing.MIGMixed}).Draw(t, "strategy")
		if rapid.Bool().Draw(t, "shared") {
			config.TimeSlicing = &sharing.Sharing{
				RenameByDefault: rapid.Bool().Draw(t, "renamed"),
				Resources:       []sharing.SharedResource{{Name: "nvidia.com/gpu", Replicas: rapid.IntRange(2, 4).Draw(t, "replicas")}},
			}
		}
		p, _, err := config.Plan(m)
		if config.Flags.MIGStrategy == sharing.MIGSingle && breaksSingle(m) != (err != nil) {
			t.Fatalf("labels say that the rules of single are broken: %v; the plan's error is %v", breaksSingle(m), err)
		}
		got := Labels(m, p, string(config.Flags.MIGStrategy))
		for k, v := range got {
			if problems := append(validation.IsQualifiedName(k), validation.IsValidLabelValue(v)...); len(problems) > 0 {
				t.Errorf("label %s=%s: %v", k, v, problems)
			}
			if !ownedLabel.MatchString(k) {
				t.Errorf("label %s would never be taken away", k)
			}
		}
		if again := Labels(m, p, string(config.Flags.MIGStrategy)); !maps.Equal(got, again) {
			t.Errorf("the labels of one machine differ: %s", cmp.Diff(got, again))
		}
		if labels := labelChange(got, nil); len(labels) != len(got) {
			t.Errorf("%d of %d labels can be taken away", len(labels), len(got))
		}
	})
}

// TestOwnedLabelsAreWritten: nothing is owned that is never written.
func TestOwnedLabelsAreWritten(t *testing.T) {
	written := make(map[string]string)
	m := machinetest.Read(t, "- {product: T4}\n- {product: A100-40, mig: [{profile: 1g.5gb+me, start: 0}]}\n")
	m.Driver, m.CUDA = "580.95.05", "13.0"
	g := &m.GPUs[1]
	g.NVSwitch = "01234567-89ab-cdef-0123-456789abcdef.3"
	g.MIG.Devices[0].Attributes = gpu.MIGAttributes{SMs: 1, Slices: 1, ComputeSlices: 1, CopyEngines: 1, Decoders: 1, Encoders: 1, JPEG: 1, OFA: 1}
	m.GPUs[0].Health.State = gpu.Lost // so that it is no breach of single
	for _, strategy := range []string{"single", "mixed"} {
		p, _ := plan(t, m, "flags: {migStrategy: "+strategy+"}")
		maps.Copy(written, Labels(m, p, strategy))
	}
	pattern := strings.NewReplacer(profileName, `1g\.5gb\.me`, modelName, "Tesla-T4").Replace(ownedLabel.String())
	tree, err := syntax.Parse(pattern, syntax.Perl)
	if err != nil {
		t.Fatal(err)
	}
	keys := expand(tree)
	if len(keys) < 50 {
		t.Fatalf("the pattern matches %q and nothing else", keys)
	}
	for _, key := range keys {
		if _, ok := written[key]; !ok {
			t.Errorf("%s is owned and was not written", key)
		}
	}
}

// expand lists the texts that a pattern without repetition matches.
func expand(r *syntax.Regexp) []string {
	switch r.Op {
	case syntax.OpLiteral:
		return []string{string(r.Rune)}
	case syntax.OpCapture:
		return expand(r.Sub[0])
	case syntax.OpConcat:
		texts := []string{""}
		for _, sub := range r.Sub {
			var longer []string
			for _, head := range texts {
				for _, tail := range expand(sub) {
					longer = append(longer, head+tail)
				}
			}
			texts = longer
		}
		return texts
	case syntax.OpAlternate:
		var texts []string
		for _, sub := range r.Sub {
			texts = append(texts, expand(sub)...)
		}
		return texts
	case syntax.OpCharClass:
		var texts []string
		for i := 0; i < len(r.Rune); i += 2 {
			for c := r.Rune[i]; c <= r.Rune[i+1]; c++ {
				texts = append(texts, string(c))
			}
		}
		return texts
	}
	return []string{""}
}

func TestLabelsOfOthersAreNotOwned(t *testing.T) {
	for _, key := range []string{
		"nvidia.com/gpu.deploy.driver", "nvidia.com/gpu.deploy.mig-manager", "nvidia.com/gpu.deploy.count", "nvidia.com/gpu.workload.config",
		"nvidia.com/mig.config", "nvidia.com/mig.config.state", "nvidia.com/mig-manager.count", "nvidia.com/mig-1g.5gb", "nvidia.com/mig-1g.5gb.config",
		"nvidia.com/device-plugin.config", "nvidia.com/gfd.timestamp", "nvidia.com/gpu", "nvidia.com/gpu.count.old", "nvidia.com/cuda.driver",
		"nvidia.com/vgpu.host-driver-version", "nvidia.com/gpu-driver-upgrade-state", "x.nvidia.com/gpu.count", "nvidia.com/gpuxcount",
		"ashlar.dev/mig.on-demand", "ashlar.dev/gpu.count", "ashlar.dev/gpu..count", "ashlar.dev/gpu.T4.color", "ashlar.dev/gpu-cordon", "ashlar.dev/count",
		"ashlar.dev/pool", "gpu.count", "team", "kubernetes.io/hostname",
	} {
		if ownedLabel.MatchString(key) {
			t.Errorf("%s is owned", key)
		}
		if change := labelChange(map[string]string{key: "x"}, nil); len(change) > 0 {
			t.Errorf("%s would be taken away", key)
		}
	}
}

func TestLongProducts(t *testing.T) {
	const name = "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition"
	for suffix, want := range map[string]string{
		"":                            name,
		"-MIG-1g.24gb.me.all":         name + "-MIG-1g.24gb.me.all",
		"-MIG-1g.24gb.me.all-SHARED":  "NVIDIA-RTX-PRO-6000-Blackwell-Server-MIG-1g.24gb.me.all-SHARED",
		"-" + strings.Repeat("x", 70): strings.Repeat("x", 62),
	} {
		if got := suffixed(name, suffix); got != want {
			t.Errorf("got %q, want %q", got, want)
		}
	}
}

func TestLabelChange(t *testing.T) {
	text := func(s string) *string { return &s }
	have := map[string]string{
		"nvidia.com/gpu.count": "4", "nvidia.com/gpu.product": "T4", "nvidia.com/mig-1g.5gb.count": "7", "ashlar.dev/gpu.T4.count": "4",
		"nvidia.com/mig.config": "all-1g.5gb", "nvidia.com/gpu.deploy.dcgm": "true", "team": "a",
	}
	want := map[string]string{
		"nvidia.com/gpu.count": "3", "nvidia.com/gpu.product": "T4", "nvidia.com/gpu.present": "true", "nvidia.com/gpu.sharing-strategy": "",
	}
	got := labelChange(have, want)
	expected := map[string]*string{
		"nvidia.com/gpu.count": text("3"), "nvidia.com/gpu.present": text("true"), "nvidia.com/gpu.sharing-strategy": text(""),
		"nvidia.com/mig-1g.5gb.count": nil, "ashlar.dev/gpu.T4.count": nil,
	}
	if diff := cmp.Diff(expected, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := labelChange(want, want); len(got) > 0 {
		t.Errorf("no change gives %v", got)
	}
}
