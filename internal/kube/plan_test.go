package kube

import (
	"fmt"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
)

const goodPlan = `{"node":"gpu-1","containers":[
  {"name":"train","resource":"nvidia.com/gpu","devices":["GPU-1f2e","GPU-9ab0"]},
  {"name":"side","resource":"nvidia.com/gpu.shared","devices":["GPU-77c1::3","GPU-77c1","GPU-77c1"]},
  {"name":"side","resource":"nvidia.com/mig-1g.5gb","devices":["MIG-GPU-77c1/1/0"]}]}`

func TestParseDevicePlan(t *testing.T) {
	got, err := ParseDevicePlan(goodPlan)
	if err != nil {
		t.Fatal(err)
	}
	want := DevicePlan{Node: "gpu-1", Containers: []ContainerDevices{
		{Name: "train", Resource: "nvidia.com/gpu", Devices: []string{"GPU-1f2e", "GPU-9ab0"}},
		{Name: "side", Resource: "nvidia.com/gpu.shared", Devices: []string{"GPU-77c1::3", "GPU-77c1", "GPU-77c1"}},
		{Name: "side", Resource: "nvidia.com/mig-1g.5gb", Devices: []string{"MIG-GPU-77c1/1/0"}},
	}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}

func TestParseDevicePlanRefuses(t *testing.T) {
	many := strings.TrimSuffix(strings.Repeat(`"GPU-a",`, maxPlanDevices+1), ",")
	one := func(name, resource, devices string) string {
		return fmt.Sprintf(`{"node":"n","containers":[{"name":%q,"resource":%q,"devices":[%s]}]}`, name, resource, devices)
	}
	for _, c := range []struct{ name, text, want string }{
		{"nothing", "", "unexpected end"},
		{"no object", `[]`, "cannot unmarshal array"},
		{"more after it", goodPlan + "{}", "after top-level value"},
		{"too long", `{"node":"` + strings.Repeat("a", maxPlan) + `"}`, "at most 65536"},
		{"unknown field", `{"node":"n","pods":[]}`, `unknown field "pods"`},
		{"another case", `{"Node":"n"}`, `unknown field "Node"`},
		{"a field twice", `{"node":"n","node":"m"}`, `duplicate field "node"`},
		{"no node", `{"containers":[]}`, `node: ""`},
		{"bad node", `{"node":"A_b"}`, `node: "A_b"`},
		{"no containers", `{"node":"n"}`, "containers: nothing is planned"},
		{"bad container", one("A", "nvidia.com/gpu", `"GPU-a"`), `containers[0].name: "A"`},
		{"native resource", one("c", "cpu", `"GPU-a"`), `containers[0].resource: "cpu"`},
		{"bad resource", one("c", "nvidia.com/gpu x", `"GPU-a"`), `containers[0].resource`},
		{"no devices", one("c", "nvidia.com/gpu", ""), "containers[0].devices: 0 are planned"},
		{"too many devices", one("c", "nvidia.com/gpu", many), "containers[0].devices: 257 are planned"},
		{"no device id", one("c", "nvidia.com/gpu", `"a"`), `containers[0].devices[0]: device id "a"`},
		{"bare prefix", one("c", "nvidia.com/gpu", `"GPU-"`), `containers[0].devices[0]`},
		{"bad slot", one("c", "nvidia.com/gpu", `"GPU-a","GPU-a::-1"`), `containers[0].devices[1]`},
		{"no characters of a UUID", one("c", "nvidia.com/gpu", `"GPU-a b"`), "is no UUID of a driver"},
		{"long UUID", one("c", "nvidia.com/gpu", `"GPU-`+strings.Repeat("a", maxUUID)+`"`), "is no UUID of a driver"},
		{"long device id", one("c", "nvidia.com/gpu", `"GPU-`+strings.Repeat("a", maxDeviceID)+`"`), "a device id of 116 bytes"},
		{"a slot twice", one("c", "nvidia.com/gpu", `"GPU-a::1","GPU-a::1"`), "containers[0].devices[1]: GPU-a::1 is there twice"},
		{
			"a container and resource twice",
			`{"node":"n","containers":[{"name":"c","resource":"nvidia.com/gpu","devices":["GPU-a"]},{"name":"c","resource":"nvidia.com/gpu","devices":["GPU-b"]}]}`,
			"containers[1]: nvidia.com/gpu of container c is there twice",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			got, err := ParseDevicePlan(c.text)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("the error is %v, want one with %q", err, c.want)
			}
			if diff := cmp.Diff(DevicePlan{}, got); diff != "" {
				t.Errorf("with the error comes a plan: %s", diff)
			}
		})
	}
}

func TestPlanOf(t *testing.T) {
	pod := &corev1.Pod{}
	if p, err := PlanOf(pod); p != nil || err != nil {
		t.Errorf("a pod without a plan: %v, %v", p, err)
	}
	pod.Annotations = map[string]string{v1alpha1.AnnotationDevices: goodPlan}
	if p, err := PlanOf(pod); err != nil || p.Node != "gpu-1" {
		t.Errorf("%v, %v", p, err)
	}
	pod.Annotations[v1alpha1.AnnotationDevices] = "{}"
	if _, err := PlanOf(pod); err == nil || !strings.HasPrefix(err.Error(), "annotation ashlar.dev/devices: node") {
		t.Errorf("the error %v does not name annotation and field", err)
	}
}

// TestPlansAreReadAsWritten: what String writes is read as the same plan.
func TestPlansAreReadAsWritten(t *testing.T) {
	label := rapid.StringMatching(`[a-z0-9]([-a-z0-9]{0,20}[a-z0-9])?`)
	uuid := rapid.StringMatching(`(GPU|MIG)-[0-9A-Za-z][-0-9A-Za-z/]{0,40}`)
	rapid.Check(t, func(t *rapid.T) {
		p := DevicePlan{Node: label.Draw(t, "node")}
		for i := range rapid.IntRange(1, 5).Draw(t, "containers") {
			c := ContainerDevices{Name: label.Draw(t, "name"), Resource: "example.com/" + fmt.Sprint("r", i)}
			for j := range rapid.IntRange(1, 8).Draw(t, "devices") {
				id := uuid.Draw(t, "uuid")
				if rapid.Bool().Draw(t, "slot") {
					id += fmt.Sprint("::", j)
				}
				c.Devices = append(c.Devices, id)
			}
			p.Containers = append(p.Containers, c)
		}
		got, err := ParseDevicePlan(p.String())
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(p, got); diff != "" {
			t.Errorf("(-written +read)\n%s", diff)
		}
	})
}

// FuzzParseDevicePlan: no text makes it panic, and what it takes it writes so that
// it reads the same.
func FuzzParseDevicePlan(f *testing.F) {
	f.Add(goodPlan)
	f.Add(`{"node":"n","containers":[{"name":"c","resource":"a/b","devices":["GPU-a::0"]}]}`)
	f.Add(`{"node":"n","node":"n"}`)
	f.Fuzz(func(t *testing.T, text string) {
		p, err := ParseDevicePlan(text)
		if err != nil {
			return
		}
		again, err := ParseDevicePlan(p.String())
		if err != nil {
			t.Fatalf("%s: %v", p, err)
		}
		if diff := cmp.Diff(p, again); diff != "" {
			t.Errorf("(-first +second)\n%s", diff)
		}
	})
}

func TestGPURequests(t *testing.T) {
	always := corev1.ContainerRestartPolicyAlways
	container := func(name string, limits ...string) corev1.Container {
		c := corev1.Container{Name: name, Resources: corev1.ResourceRequirements{Limits: corev1.ResourceList{}}}
		for _, text := range limits {
			resource, count, _ := strings.Cut(text, "=")
			c.Resources.Limits[corev1.ResourceName(resource)] = quantity(t, count)
		}
		return c
	}
	sidecar := container("log", "nvidia.com/gpu.shared=1")
	sidecar.RestartPolicy = &always
	requestsOnly := corev1.Container{Name: "odd", Resources: corev1.ResourceRequirements{
		Requests: corev1.ResourceList{"nvidia.com/gpu": quantity(t, "1")},
	}}
	pod := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: "p"},
		Spec: corev1.PodSpec{
			InitContainers: []corev1.Container{container("fetch", "nvidia.com/gpu=2", "cpu=4"), sidecar},
			Containers: []corev1.Container{
				container("train", "nvidia.com/mig-1g.5gb=3", "nvidia.com/gpu=1", "example.com/slices=2", "example.com/other=5"),
				container("idle", "nvidia.com/gpu=0"), requestsOnly,
			},
		},
	}
	got := GPURequests(pod, map[string]bool{"example.com/slices": true})
	want := []ContainerRequest{
		{"fetch", InitContainer, "nvidia.com/gpu", 2},
		{"log", Sidecar, "nvidia.com/gpu.shared", 1},
		{"train", MainContainer, "example.com/slices", 2},
		{"train", MainContainer, "nvidia.com/gpu", 1},
		{"train", MainContainer, "nvidia.com/mig-1g.5gb", 3},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got)\n%s", diff)
	}
}
