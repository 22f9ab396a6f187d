package agent

import (
	"testing"

	"github.com/google/go-cmp/cmp"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// read reads a simulated machine from a description.
func read(t *testing.T, yaml string) *gpu.Machine {
	t.Helper()
	desc, err := machine.ParseDescription("machine.yaml", []byte(yaml))
	if err != nil {
		t.Fatal(err)
	}
	m, err := machine.New(desc, "test").Read()
	if err != nil {
		t.Fatal(err)
	}
	return &m
}

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

const header = "name: test\ncpus: 8\nmemory: 64Gi\ngpus:\n"

func TestLabels(t *testing.T) {
	a100 := map[string]string{
		"nvidia.com/gpu.present": "true", "nvidia.com/gpu.family": "ampere",
		"nvidia.com/gpu.compute.major": "8", "nvidia.com/gpu.compute.minor": "0",
		"nvidia.com/gpu.memory": "40960", "nvidia.com/gpu.count": "2", "nvidia.com/gpu.replicas": "1",
		"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB", "nvidia.com/gpu.sharing-strategy": "none",
		"nvidia.com/mig.capable": "true",
	}
	with := func(changes map[string]string) map[string]string {
		labels := make(map[string]string)
		for k, v := range a100 {
			labels[k] = v
		}
		for k, v := range changes {
			if v == "" {
				delete(labels, "nvidia.com/"+k)
			} else {
				labels["nvidia.com/"+k] = v
			}
		}
		return labels
	}
	const pair = "- {product: NVIDIA A100-SXM4-40GB, count: 2}\n"
	for _, c := range []struct {
		name, machine, config string
		want                  map[string]string
	}{
		{"whole GPUs", pair, "", a100},
		{
			"time-sliced", pair, "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 4}]}}",
			with(map[string]string{"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"}),
		},
		{
			"time-sliced under another name", pair, "sharing: {timeSlicing: {renameByDefault: true, resources: [{name: nvidia.com/gpu, replicas: 4}]}}",
			with(map[string]string{"gpu.replicas": "4", "gpu.sharing-strategy": "time-slicing"}),
		},
		{
			"exclusive view beside slots", pair, "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}, {name: nvidia.com/gpu-exclusive, replicas: 1}]}}",
			with(map[string]string{"gpu.product": "NVIDIA-A100-SXM4-40GB-SHARED", "gpu.replicas": "2", "gpu.sharing-strategy": "time-slicing"}),
		},
		{
			"single MIG", "- {product: NVIDIA A100-SXM4-40GB, count: 2, mig: [{profile: 3g.20gb, count: 2}]}\n", "flags: {migStrategy: single}",
			with(map[string]string{"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "gpu.count": "4", "gpu.memory": "19968", "mig.strategy": "single"}),
		},
		{
			"mixed MIG", "- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 1g.5gb+me, start: 0}, {profile: 3g.20gb, start: 4}]}\n- {product: NVIDIA A100-SXM4-40GB}\n", "flags: {migStrategy: mixed}",
			with(map[string]string{
				"mig.strategy":      "mixed",
				"mig-3g.20gb.count": "1", "mig-3g.20gb.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "mig-3g.20gb.memory": "19968",
				"mig-3g.20gb.replicas": "1", "mig-3g.20gb.sharing-strategy": "none",
				"mig-1g.5gb.me.count": "1", "mig-1g.5gb.me.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.me", "mig-1g.5gb.me.memory": "4864",
				"mig-1g.5gb.me.replicas": "1", "mig-1g.5gb.me.sharing-strategy": "none",
			}),
		},
		{
			"single MIG with a media engine", "- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 1g.5gb+me, start: 0}]}\n", "flags: {migStrategy: single}",
			with(map[string]string{"gpu.product": "NVIDIA-A100-SXM4-40GB-MIG-1g.5gb.me", "gpu.count": "1", "gpu.memory": "4864", "mig.strategy": "single"}),
		},
		{
			"mixed MIG on all GPUs, some slices shared under another name", "- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 3g.20gb, count: 2}]}\n",
			"flags: {migStrategy: mixed}\nsharing: {timeSlicing: {resources: [{name: nvidia.com/mig-3g.20gb, rename: nvidia.com/small, devices: ['0:0'], replicas: 4}]}}",
			with(map[string]string{
				"gpu.count": "1", "gpu.replicas": "0", "mig.strategy": "mixed",
				"mig-3g.20gb.count": "2", "mig-3g.20gb.product": "NVIDIA-A100-SXM4-40GB-MIG-3g.20gb", "mig-3g.20gb.memory": "19968",
				"mig-3g.20gb.replicas": "4", "mig-3g.20gb.sharing-strategy": "time-slicing",
			}),
		},
		{"two models: the first counts", pair + "- {product: T4, count: 3}\n", "", a100},
	} {
		m := read(t, header+c.machine)
		p, config := plan(t, m, c.config)
		got := Labels(m, p, string(config.Flags.MIGStrategy))
		if diff := cmp.Diff(c.want, got); diff != "" {
			t.Errorf("%s (-want +got):\n%s", c.name, diff)
		}
		for k, v := range got {
			if problems := append(validation.IsQualifiedName(k), validation.IsValidLabelValue(v)...); len(problems) > 0 {
				t.Errorf("%s: label %s=%s: %v", c.name, k, v, problems)
			}
			if !ownedLabel.MatchString(k) {
				t.Errorf("%s: label %s would never be removed", c.name, k)
			}
		}
	}
	if got := Labels(&gpu.Machine{}, &sharing.Plan{}, "none"); got != nil {
		t.Errorf("a node without GPUs gets %v", got)
	}
}

// TestLabelsOfAGPUThatNeverAnswered: such a GPU has no name, and must not take
// the labels of the others away.
func TestLabelsOfAGPUThatNeverAnswered(t *testing.T) {
	m := read(t, header+"- {product: T4, count: 3}\n")
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
		desc, err := machine.Builtin(name)
		if err != nil {
			t.Fatal(err)
		}
		m, err := machine.New(desc, name).Read()
		if err != nil {
			t.Fatal(err)
		}
		p, _ := plan(t, &m, "flags: {migStrategy: mixed}")
		for k, v := range Labels(&m, p, "mixed") {
			if problems := append(validation.IsQualifiedName(k), validation.IsValidLabelValue(v)...); len(problems) > 0 {
				t.Errorf("%s: label %s=%s: %v", name, k, v, problems)
			}
		}
	}
}

func TestShorten(t *testing.T) {
	long := "NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition-MIG-1g.24gb.me.all-SHARED"
	if got := shorten(long); len(validation.IsValidLabelValue(got)) > 0 || len(got) < 60 {
		t.Errorf("got %q", got)
	}
}

func TestLabelChange(t *testing.T) {
	text := func(s string) *string { return &s }
	have := map[string]string{
		"nvidia.com/gpu.count": "4", "nvidia.com/gpu.product": "T4", "nvidia.com/mig-1g.5gb.count": "7",
		"nvidia.com/mig.config": "all-1g.5gb", "nvidia.com/gpu.deploy.dcgm": "true", "team": "a",
	}
	want := map[string]string{"nvidia.com/gpu.count": "3", "nvidia.com/gpu.product": "T4", "nvidia.com/gpu.present": "true"}
	got := labelChange(have, want)
	expected := map[string]*string{"nvidia.com/gpu.count": text("3"), "nvidia.com/gpu.present": text("true"), "nvidia.com/mig-1g.5gb.count": nil}
	if diff := cmp.Diff(expected, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if got := labelChange(want, want); len(got) > 0 {
		t.Errorf("no change gives %v", got)
	}
}
