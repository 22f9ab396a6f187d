package e2e

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/machine/machinetest"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// putGPUNode patches a GPUNode, or its status, so that the apiserver refuses fields
// that it does not know.
func (c *cluster) putGPUNode(name, subresource string, patch any) error {
	c.t.Helper()
	data, err := json.Marshal(patch)
	if err != nil {
		c.t.Fatal(err)
	}
	return c.client.Discovery().RESTClient().Patch(types.MergePatchType).
		AbsPath("/apis/ashlar.dev/v1alpha1/gpunodes", name, subresource).Param("fieldValidation", "Strict").
		Body(data).Do(c.t.Context()).Error()
}

// worst is a node that has more of everything, and longer names, than a GPUNode
// holds, in characters of several bytes.
func worst() kube.NodeFacts {
	long := strings.Repeat("日本", 400)
	m := &gpu.Machine{Driver: long, CUDA: long, Links: gpu.NewLinks(80)}
	f := kube.NodeFacts{
		Machine: m, Plan: &sharing.Plan{}, Withheld: map[string]map[string]string{},
		Fault: func(string) (time.Time, string) { return time.Unix(1e9, 5), long },
	}
	for i := range 80 {
		g := gpu.GPU{
			Index: i, UUID: fmt.Sprintf("GPU-%092d", i), Name: fmt.Sprint(i) + long, MemoryMiB: 1 << 30, PCIBusID: long, PCIeRoot: long, NVSwitch: long,
			NVLinks: 18, NUMA: i, Compute: gpu.ComputeCapability{Major: 10, Minor: 3}, MIG: gpu.MIGState{Capable: true, Enabled: true},
		}
		if i%2 == 0 {
			g.Health = gpu.Health{State: gpu.Lost, Reason: long}
		}
		for j := range 20 {
			g.MIG.Devices = append(g.MIG.Devices, gpu.MIGDevice{
				Index: j, UUID: fmt.Sprintf("MIG-%092d", 100*i+j), Profile: long, Placement: gpu.Placement{Start: j, Size: 1}, MemoryMiB: 1 << 20,
				Health: gpu.Health{State: gpu.Unhealthy, Reason: long},
			})
		}
		for j := range 100 {
			f.Holders = append(f.Holders, kube.Holder{
				Namespace: strings.Repeat("n", 63), Pod: strings.Repeat("p", 253), Container: strings.Repeat("c", 63),
				Resource: "nvidia.com/gpu", Device: gpu.DeviceID{Base: g.UUID, Slot: j}, GPU: g.UUID,
			})
		}
		for j := range i {
			m.Links.Merge(i, j, gpu.Link{NVLinks: 18, PCIe: gpu.PCIeInternal})
		}
		m.GPUs = append(m.GPUs, g)
	}
	for i := range 300 {
		r := sharing.Resource{Name: fmt.Sprintf("example.com/%063d", i), Strategy: sharing.TimeSlicing, Replicas: 10}
		for j := range m.GPUs {
			r.Devices = append(r.Devices, sharing.Device{ID: gpu.DeviceID{Base: m.GPUs[j].UUID, Slot: 0}, GPU: m.GPUs[j].UUID})
		}
		f.Plan.Resources = append(f.Plan.Resources, r)
	}
	return f
}

// TestTheApiserverTakesEveryStatus: of each machine and of the worst one, with no
// field that it does not know, and gives it back as it was.
func TestTheApiserverTakesEveryStatus(t *testing.T) {
	c := up(t, "g4dn.xlarge,name=n")
	const name = "schema"
	c.kubectl(fmt.Sprintf(`{"apiVersion": "ashlar.dev/v1alpha1", "kind": "GPUNode", "metadata": {"name": %q}}`, name), "create", "-f", "-")
	facts := map[string]kube.NodeFacts{"the worst": worst()}
	for _, name := range machine.BuiltinNames() {
		m := machinetest.Builtin(t, name)
		p, _, err := sharing.Default().Plan(m)
		if err != nil {
			t.Fatal(err)
		}
		facts[name] = kube.NodeFacts{Machine: m, Plan: p}
	}
	now := metav1.NewTime(time.Unix(1e9, 0))
	for what, f := range facts {
		s := kube.Status(f)
		s.MIGConfig = &v1alpha1.MIGConfigStatus{Config: "all-balanced", State: v1alpha1.MIGPending, Since: now}
		s.Steering.Last = []v1alpha1.Mismatch{{Time: now, Planned: []string{"GPU-a"}, Got: []string{"GPU-b"}}}
		if err := c.putGPUNode(name, "status", map[string]any{"status": nil}); err != nil {
			t.Fatal(err)
		}
		if err := c.putGPUNode(name, "status", map[string]any{"status": s}); err != nil {
			t.Errorf("%s: %.2000s", what, err)
			continue
		}
		got, err := c.gpuNode(name)
		if err != nil {
			t.Fatal(err)
		}
		// Times are compared as they are written.
		if want, stored := mustJSON(t, s), mustJSON(t, got.Status); want != stored {
			t.Errorf("%s: written\n%.3000s\nstored\n%.3000s", what, want, stored)
		}
	}

	// The schema refuses what would mislead whoever reads it.
	gpuOf := func(change map[string]any) map[string]any {
		g := map[string]any{"index": 0, "uuid": "GPU-a", "health": map[string]any{"state": "Healthy"}}
		for k, v := range change {
			g[k] = v
		}
		return map[string]any{"summary": map[string]any{"gpus": 1, "free": 1, "unhealthy": 0}, "gpus": []any{g}}
	}
	if err := c.putGPUNode(name, "status", map[string]any{"status": nil}); err != nil {
		t.Fatal(err)
	}
	if err := c.putGPUNode(name, "status", map[string]any{"status": gpuOf(nil)}); err != nil {
		t.Fatalf("the base of what is spoilt below: %v", err)
	}
	for want, change := range map[string]map[string]any{
		"status.gpus[0].index":            {"index": -1},
		"status.gpus[0].uuid":             {"uuid": ""},
		"status.gpus[0].health.state":     {"health": map[string]any{"state": "Sick"}},
		"a state other than Healthy has":  {"health": map[string]any{"state": "Lost"}},
		"status.gpus[0].memoryMiB":        {"memoryMiB": -1},
		"status.gpus[0].mig.devices[0]":   {"mig": map[string]any{"enabled": true, "devices": []any{map[string]any{"uuid": "MIG-a", "profileID": 1, "profile": "x", "start": 64, "size": 1}}}},
		"status.gpus[0].holders[0].pod":   {"holders": []any{map[string]any{"resource": "r", "device": "d", "namespace": "n", "pod": strings.Repeat("p", 254), "container": "c"}}},
		"unknown field \"status.gpus[0].": {"colour": "red"},
	} {
		if err := c.putGPUNode(name, "status", map[string]any{"status": gpuOf(change)}); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%v: the error is %v, want %s", change, err, want)
		}
	}
	lie := gpuOf(nil)
	lie["summary"] = map[string]any{"gpus": 2, "free": 1, "unhealthy": 0}
	if err := c.putGPUNode(name, "status", map[string]any{"status": lie}); err == nil || !strings.Contains(err.Error(), "summary.gpus is the number of gpus") {
		t.Errorf("a summary that lies: %v", err)
	}
	spec := map[string]any{"spec": map[string]any{"mig": []any{map[string]any{"uuid": "MIG-a", "since": now}}}}
	if err := c.putGPUNode(name, "", spec); !apierrors.IsInvalid(err) || !strings.Contains(err.Error(), "spec.mig[0].uuid") {
		t.Errorf("a MIG device that shall be cut: %v", err)
	}
}

func mustJSON(t *testing.T, v any) string {
	t.Helper()
	data, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
