package e2e

import (
	"context"
	"encoding/json"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/machine"
)

// mixed is a config that offers MIG devices by profile.
const mixed = "version: v1\nflags: {migStrategy: mixed}\n"

// gpuNode is what the agent of a node says.
func (c *cluster) gpuNode(name string) (*v1alpha1.GPUNode, error) {
	data, err := c.client.Discovery().RESTClient().Get().
		AbsPath("/apis/ashlar.dev/v1alpha1/gpunodes/" + name).DoRaw(c.t.Context())
	if err != nil {
		return nil, err
	}
	object := &v1alpha1.GPUNode{}
	return object, json.Unmarshal(data, object)
}

// status waits until the status of a node's GPUs is as wanted: check returns "".
func (c *cluster) status(node string, limit time.Duration, what string, check func(*v1alpha1.GPUNodeStatus) string) {
	c.t.Helper()
	c.eventually(limit, what, func() string {
		object, err := c.gpuNode(node)
		if err != nil {
			return err.Error()
		}
		return check(&object.Status)
	})
}

// hardware opens the simulated machine of a node.
func (c *cluster) hardware(node string) *machine.Machine {
	c.t.Helper()
	m, err := machine.Open(c.node(node).MachineDir)
	if err != nil {
		c.t.Fatal(err)
	}
	c.t.Cleanup(func() { _ = m.Close() })
	return m
}

func (c *cluster) gpus(node string) []gpu.GPU {
	c.t.Helper()
	m, err := c.hardware(node).Read()
	if err != nil {
		c.t.Fatal(err)
	}
	return m.GPUs
}

// patchNode sets labels and annotations of a node; an empty value takes one away.
func (c *cluster) patchNode(node string, labels, annotations map[string]string) {
	c.t.Helper()
	values := func(from map[string]string) map[string]any {
		to := make(map[string]any)
		for k, v := range from {
			to[k] = v
			if v == "" {
				to[k] = nil
			}
		}
		return to
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": values(labels), "annotations": values(annotations)}})
	if err != nil {
		c.t.Fatal(err)
	}
	c.eventually(20*time.Second, "patch of node "+node, func() string {
		if _, err := c.client.CoreV1().Nodes().Patch(c.t.Context(), node, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
			return err.Error()
		}
		return ""
	})
}

func (c *cluster) labels(node string) map[string]string {
	n, err := c.client.CoreV1().Nodes().Get(c.t.Context(), node, metav1.GetOptions{})
	if err != nil {
		return nil
	}
	return n.Labels
}

// TestGPUNodesTellTheTruthAlsoAfterACrash looks at what kubectl shows, kills every
// agent, and looks again.
func TestGPUNodesTellTheTruthAlsoAfterACrash(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, mixed)
	c := up(t, "p4d.24xlarge,name=p4d,config="+config, "mixed-2,name=mixed,config="+config, "a30x4,name=a30,config="+config)
	c.create(pod("two", "p4d", "nvidia.com/gpu", 2))
	c.eventually(20*time.Second, "pod", func() string { return c.phases(corev1.PodRunning, "two") })

	look := func(when string) {
		t.Helper()
		c.eventually(20*time.Second, "gpunodes "+when, func() string {
			out := c.kubectl("", "get", "gpunodes", "--no-headers")
			for node, want := range map[string]string{"p4d": "8 6 0 none off", "mixed": "4 4 0 none off", "a30": "4 4 0 none off"} {
				found := slices.ContainsFunc(strings.Split(out, "\n"), func(line string) bool {
					f := strings.Fields(line)
					return len(f) == 7 && f[0] == node && strings.Join(f[1:6], " ") == want
				})
				if !found {
					return fmt.Sprintf("%s is not %s in\n%s", node, want, out)
				}
			}
			return ""
		})
		out := c.kubectl("", "get", "nodes", "-L", "nvidia.com/gpu.product,nvidia.com/gpu.count,nvidia.com/mig.strategy", "--no-headers")
		for node, want := range map[string]string{"p4d": "NVIDIA-A100-SXM4-40GB 8 mixed", "mixed": "NVIDIA-A100-PCIE-40GB 2 mixed", "a30": "NVIDIA-A30 4 mixed"} {
			found := slices.ContainsFunc(strings.Split(out, "\n"), func(line string) bool {
				f := strings.Fields(line)
				return len(f) > 3 && f[0] == node && strings.Join(f[len(f)-3:], " ") == want
			})
			if !found {
				t.Errorf("%s: %s is not %s in\n%s", when, node, want, out)
			}
		}
		c.status("p4d", 10*time.Second, "holders "+when, func(s *v1alpha1.GPUNodeStatus) string {
			held := 0
			for _, g := range s.GPUs {
				for _, h := range g.Holders {
					if h.Pod != "two" || h.Container != "main" || h.Device != g.UUID {
						return fmt.Sprintf("%+v", h)
					}
					held++
				}
			}
			m, err := kube.Machine(s)
			if held != 2 || err != nil || m.LinkScore(0, 1) == 0 {
				return fmt.Sprintf("%d are held (%v)", held, err)
			}
			if !meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionReady) {
				return fmt.Sprint(s.Conditions)
			}
			return ""
		})
	}
	look("at first")
	for _, agent := range []string{"agent/p4d", "agent/mixed", "agent/a30"} {
		c.kill(agent)
	}
	c.eventually(20*time.Second, "all agents are back", func() string {
		return c.allocatable("p4d", "nvidia.com/gpu", 8) + c.allocatable("mixed", "nvidia.com/gpu", 4) + c.allocatable("a30", "nvidia.com/gpu", 4)
	})
	look("after the agents were killed")
}

// killWhenUp kills a process of the cluster so long after it is up, and returns
// when it is gone.
func (c *cluster) killWhenUp(name string, after time.Duration) {
	c.t.Helper()
	pid := func() int {
		for _, p := range c.State().Processes {
			if p.Name == name {
				return p.PID
			}
		}
		return 0
	}
	c.eventually(30*time.Second, name+" is up", func() string {
		if pid() == 0 {
			return "away"
		}
		return ""
	})
	time.Sleep(after)
	killed := pid()
	c.kill(name)
	c.eventually(10*time.Second, name+" is gone", func() string {
		if pid() == killed {
			return "still there"
		}
		return ""
	})
}

// TestMIGConfigEvictsOnlyThePodsOnItsGPUs cuts a node while pods run, kills the
// agent while it does, and looks at what is left.
func TestMIGConfigEvictsOnlyThePodsOnItsGPUs(t *testing.T) {
	dir := t.TempDir()
	config := filepath.Join(dir, "config.yaml")
	writeFile(t, config, mixed)
	c := up(t, "p4d.24xlarge,name=p4d,config="+config, "a30x4,name=a30,config="+config)
	c.patchNode("p4d", map[string]string{"nvidia.com/gpu.deploy.dcgm-exporter": "true"}, nil)
	c.create(pod("one", "p4d", "nvidia.com/gpu", 1))
	c.create(pod("other", "p4d", "nvidia.com/gpu", 1))
	c.create(pod("elsewhere", "a30", "nvidia.com/gpu", 1))
	c.eventually(20*time.Second, "pods", func() string { return c.phases(corev1.PodRunning, "one", "other", "elsewhere") })

	began := time.Now()
	c.patchNode("p4d", map[string]string{"nvidia.com/mig.config": "all-balanced"}, nil)
	// A pod that is evicted has 30 seconds, and ends at once here.
	c.eventually(40*time.Second, "the node is cut", func() string {
		if state := c.labels("p4d")["nvidia.com/mig.config.state"]; state != "success" {
			return "state " + state
		}
		return c.allocatable("p4d", "nvidia.com/mig-1g.5gb", 16) + c.allocatable("p4d", "nvidia.com/mig-2g.10gb", 8) +
			c.allocatable("p4d", "nvidia.com/mig-3g.20gb", 8) + c.allocatable("p4d", "nvidia.com/gpu", 0)
	})
	t.Logf("cut in %s", time.Since(began).Round(time.Second))
	pods, err := c.client.CoreV1().Pods("default").List(t.Context(), metav1.ListOptions{})
	if err != nil {
		t.Fatal(err)
	}
	if len(pods.Items) != 1 || pods.Items[0].Name != "elsewhere" {
		t.Errorf("%d pods are left", len(pods.Items))
	}
	if got := c.labels("p4d")["nvidia.com/gpu.deploy.dcgm-exporter"]; got != "true" {
		t.Errorf("dcgm-exporter is %s", got)
	}

	// Only 3g devices go for this one: the pods on others stay, and it is the pod on
	// a 3g that a budget protects.
	c.create(pod("small", "p4d", "nvidia.com/mig-1g.5gb", 1))
	large := pod("large", "p4d", "nvidia.com/mig-3g.20gb", 1)
	large.Labels = map[string]string{"guard": "yes"}
	c.create(large)
	c.eventually(20*time.Second, "pods on MIG devices", func() string { return c.phases(corev1.PodRunning, "small", "large") })
	none := intstr.FromInt32(0)
	budget := &policyv1.PodDisruptionBudget{
		ObjectMeta: metav1.ObjectMeta{Name: "guard"},
		Spec:       policyv1.PodDisruptionBudgetSpec{MaxUnavailable: &none, Selector: &metav1.LabelSelector{MatchLabels: large.Labels}},
	}
	if _, err := c.client.PolicyV1().PodDisruptionBudgets("default").Create(t.Context(), budget, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.patchNode("p4d", map[string]string{"nvidia.com/mig.config": "all-1g.5gb"}, nil)
	c.eventually(20*time.Second, "it says what it waits for", func() string {
		if state := c.labels("p4d")["nvidia.com/mig.config.state"]; state != "pending" {
			return "state " + state
		}
		return ""
	})
	// Crashes at whatever moment end in the wanted geometry.
	for range 2 {
		c.killWhenUp("agent/p4d", 700*time.Millisecond)
	}
	if problem := c.phases(corev1.PodRunning, "small", "large"); problem != "" {
		t.Error(problem)
	}
	if err := c.client.PolicyV1().PodDisruptionBudgets("default").Delete(t.Context(), "guard", metav1.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		c.killWhenUp("agent/p4d", 1500*time.Millisecond)
	}
	c.eventually(60*time.Second, "the node is cut into small devices", func() string {
		if state := c.labels("p4d")["nvidia.com/mig.config.state"]; state != "success" {
			return "state " + state
		}
		return c.allocatable("p4d", "nvidia.com/mig-1g.5gb", 56) + c.allocatable("p4d", "nvidia.com/mig-3g.20gb", 0)
	})
	if problem := c.phases(corev1.PodRunning, "small"); problem != "" {
		t.Errorf("a pod on a device that stayed was evicted: %s", problem)
	}
	if got := c.labels("p4d")["nvidia.com/gpu.deploy.dcgm-exporter"]; got != "true" {
		t.Errorf("dcgm-exporter is %s", got)
	}
}

// TestMIGOnDemand starts with an empty node and asks for small devices, then for
// large ones, then for a whole GPU.
func TestMIGOnDemand(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, mixed)
	c := up(t, "p4d.24xlarge,name=p4d,config="+config+",label=ashlar.dev/mig.on-demand=true")
	var names []string
	ask := func(prefix, resource string, count int) {
		t.Helper()
		var mine []string
		for i := range count {
			name := fmt.Sprintf("%s-%d", prefix, i)
			c.create(pod(name, "p4d", resource, 1))
			mine = append(mine, name)
		}
		c.eventually(60*time.Second, fmt.Sprintf("%d pods with %s", count, resource), func() string { return c.phases(corev1.PodRunning, mine...) })
		names = append(names, mine...)
	}
	cut := func() (n int) {
		for _, g := range c.gpus("p4d") {
			if g.MIG.Enabled {
				n++
			}
		}
		return n
	}
	ask("small", "nvidia.com/mig-1g.5gb", 9)
	if n := cut(); n != 2 {
		t.Errorf("%d GPUs are cut for nine 1g, want 2", n)
	}
	ask("large", "nvidia.com/mig-3g.20gb", 2)
	if n := cut(); n != 3 {
		t.Errorf("%d GPUs are cut for nine 1g and two 3g, want 3", n)
	}
	ask("whole", "nvidia.com/gpu", 1)
	if problem := c.phases(corev1.PodRunning, names...); problem != "" {
		t.Error(problem)
	}
	c.assertGiven("p4d", 1)
	// When nobody holds or wants anything the GPUs become whole again.
	c.remove(names...)
	c.eventually(90*time.Second, "all GPUs are whole", func() string {
		if n := cut(); n > 0 {
			return fmt.Sprintf("%d are cut", n)
		}
		return c.allocatable("p4d", "nvidia.com/gpu", 8)
	})
}

// TestAFaultTakesAllSlotsAndThePodsTell breaks one GPU of a shared node.
func TestAFaultTakesAllSlotsAndThePodsTell(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, timeSliced(8))
	c := up(t, "g5.12xlarge,name=g5,config="+config)
	c.create(pod("holder", "g5", "nvidia.com/gpu", 1))
	c.eventually(20*time.Second, "pod", func() string { return c.phases(corev1.PodRunning, "holder") })
	held := ""
	c.status("g5", 10*time.Second, "holder", func(s *v1alpha1.GPUNodeStatus) string {
		for _, g := range s.GPUs {
			if len(g.Holders) > 0 {
				held = g.UUID
				return ""
			}
		}
		return "none"
	})
	hardware := c.hardware("g5")
	inject := func(xid int) {
		t.Helper()
		if err := hardware.InjectXID(held, xid, gpu.AnyInstance, gpu.AnyInstance); err != nil {
			t.Fatal(err)
		}
	}
	for _, xid := range []int{13, 31} {
		inject(xid)
		c.eventually(15*time.Second, "Event", func() string {
			if !slices.ContainsFunc(c.events("g5", "XID"), func(m string) bool { return strings.Contains(m, fmt.Sprintf("XID %d", xid)) }) {
				return fmt.Sprint(c.events("g5", "XID"))
			}
			return ""
		})
		if problem := c.allocatable("g5", "nvidia.com/gpu", 32); problem != "" {
			t.Errorf("XID %d: %s", xid, problem)
		}
	}
	// Watch every update of the node: there must be none with some of the slots.
	watched := make(chan map[int64]bool, 1)
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	w, err := c.client.CoreV1().Nodes().Watch(ctx, metav1.ListOptions{FieldSelector: "metadata.name=g5"})
	if err != nil {
		t.Fatal(err)
	}
	go func() {
		seen := make(map[int64]bool)
		for e := range w.ResultChan() {
			if n, ok := e.Object.(*corev1.Node); ok {
				q := n.Status.Allocatable["nvidia.com/gpu"]
				seen[q.Value()] = true
			}
		}
		watched <- seen
	}()
	inject(79)
	c.eventually(15*time.Second, "all slots leave", func() string { return c.allocatable("g5", "nvidia.com/gpu", 24) })
	c.eventually(15*time.Second, "the pod tells", func() string {
		p, err := c.client.CoreV1().Pods("default").Get(t.Context(), "holder", metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		list, err := c.client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			return err.Error()
		}
		if !slices.ContainsFunc(list.Items, func(e corev1.Event) bool {
			return e.InvolvedObject.UID == p.UID && e.Reason == "GPUUnhealthy" && strings.Contains(e.Message, "XID 79")
		}) {
			return "no Event"
		}
		for _, s := range p.Status.ContainerStatuses {
			for _, r := range s.AllocatedResourcesStatus {
				for _, d := range r.Resources {
					if d.Health == corev1.ResourceHealthStatusUnhealthy {
						return ""
					}
				}
			}
		}
		return fmt.Sprintf("%+v", p.Status.ContainerStatuses)
	})
	c.eventually(30*time.Second, "the GPU returns", func() string { return c.allocatable("g5", "nvidia.com/gpu", 32) })
	stop()
	for count := range <-watched {
		if count != 32 && count != 24 {
			t.Errorf("the node offered %d slots for a moment", count)
		}
	}
}

// TestThePlanOfAPodIsFollowed binds pods with plans to a node of equal GPUs.
func TestThePlanOfAPodIsFollowed(t *testing.T) {
	c := up(t, "p4d.24xlarge,name=p4d")
	gpus := c.gpus("p4d")
	planned := map[string][]string{"pair": {gpus[2].UUID, gpus[7].UUID}, "single": {gpus[5].UUID}, "triple": {gpus[0].UUID, gpus[3].UUID, gpus[6].UUID}}
	for name, devices := range planned {
		p := pod(name, "p4d", "nvidia.com/gpu", len(devices))
		plan := kube.DevicePlan{Node: "p4d", Containers: []kube.ContainerDevices{{Name: "main", Resource: "nvidia.com/gpu", Devices: devices}}}
		p.Annotations = map[string]string{v1alpha1.AnnotationDevices: plan.String()}
		c.create(p)
	}
	c.eventually(20*time.Second, "pods", func() string { return c.phases(corev1.PodRunning, "pair", "single", "triple") })
	held, err := c.holders("p4d")
	if err != nil {
		t.Fatal(err)
	}
	for _, h := range held {
		want := slices.Sorted(slices.Values(planned[h.Pod]))
		if !slices.Equal(want, h.Devices) {
			t.Errorf("%s got %v, planned were %v", h.Pod, h.Devices, want)
		}
	}
	c.status("p4d", 10*time.Second, "steering", func(s *v1alpha1.GPUNodeStatus) string {
		if s.Steering.Matched != 3 || s.Steering.Mismatched != 0 {
			return fmt.Sprintf("%+v", s.Steering)
		}
		return ""
	})
}
