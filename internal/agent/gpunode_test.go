package agent

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"sigs.k8s.io/controller-runtime/pkg/client"
	fakeclient "sigs.k8s.io/controller-runtime/pkg/client/fake"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
)

// clustered is an agent with an apiserver.
type clustered struct {
	*running
	client   *fake.Clientset
	gpuNodes client.WithWatch
}

func startInCluster(t *testing.T, description, config string, objects ...runtime.Object) *clustered {
	t.Helper()
	c := &clustered{client: fake.NewClientset(append(objects, &corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: "node", UID: "n1"}})...)}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		t.Fatal(err)
	}
	c.gpuNodes = fakeclient.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&v1alpha1.GPUNode{}).
		WithIndex(&v1alpha1.GPUNode{}, "metadata.name", func(o client.Object) []string { return []string{o.GetName()} }).Build()
	c.running = start(t, description, config)
	c.restart()
	return c
}

// restart runs the agent with the apiserver.
func (c *clustered) restart() {
	c.stop()
	c.options.Client, c.options.GPUNodes = c.client, c.gpuNodes
	c.run()
}

func (c *clustered) gpuNode() *v1alpha1.GPUNode {
	object := &v1alpha1.GPUNode{}
	if err := c.gpuNodes.Get(context.Background(), types.NamespacedName{Name: "node"}, object); err != nil {
		return object
	}
	return object
}

// awaitStatus waits until the status of the two GPUs is as wanted: check returns "".
func (c *clustered) awaitStatus(what string, check func(*v1alpha1.GPUNodeStatus) string) {
	c.t.Helper()
	eventually(c.t, what, func() string {
		s := &c.gpuNode().Status
		if len(s.GPUs) != 2 {
			return fmt.Sprintf("%d GPUs", len(s.GPUs))
		}
		return check(s)
	})
}

// annotate sets an annotation of the node, "" takes it away.
func (c *clustered) annotate(key, value string) {
	c.t.Helper()
	nodes := c.client.CoreV1().Nodes()
	n, err := nodes.Get(context.Background(), "node", metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	if value == "" {
		delete(n.Annotations, key)
	} else {
		metav1.SetMetaDataAnnotation(&n.ObjectMeta, key, value)
	}
	if _, err := nodes.Update(context.Background(), n, metav1.UpdateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// give makes the kubelet say that a container holds devices.
func (c *clustered) give(pod, container, resource string, ids ...string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.held = append(slices.Clone(c.held), &podresourcesapi.PodResources{Name: pod, Namespace: "d", Containers: []*podresourcesapi.ContainerResources{
		{Name: container, Devices: []*podresourcesapi.ContainerDevices{{ResourceName: resource, DeviceIds: ids}}},
	}})
}

func (c *clustered) read() gpu.Machine {
	m, err := c.machine.Read()
	if err != nil {
		c.t.Fatal(err)
	}
	return m
}

func (c *clustered) events(object string) []string {
	list, err := c.client.CoreV1().Events("").List(context.Background(), metav1.ListOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	var texts []string
	for _, e := range list.Items {
		if e.InvolvedObject.Name == object {
			texts = append(texts, e.Reason+": "+e.Message)
		}
	}
	return texts
}

func runningPod(name, uid string) *corev1.Pod {
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: name, UID: types.UID(uid)},
		Spec:       corev1.PodSpec{NodeName: "node"},
		Status:     corev1.PodStatus{Phase: corev1.PodRunning},
	}
}

func TestGPUNodeTellsWhoHoldsWhat(t *testing.T) {
	c := startInCluster(t, twoA100, slices4("4"))
	m := c.read()
	c.give("train", "main", "nvidia.com/gpu", m.GPUs[1].UUID+"::2")
	c.awaitStatus("holder", func(s *v1alpha1.GPUNodeStatus) string {
		if len(s.GPUs[1].Holders) != 1 {
			return fmt.Sprintf("%+v", s.GPUs)
		}
		want := v1alpha1.Holder{Resource: "nvidia.com/gpu", Device: m.GPUs[1].UUID + "::2", Namespace: "d", Pod: "train", Container: "main"}
		return cmp.Diff(want, s.GPUs[1].Holders[0]) + cmp.Diff(v1alpha1.GPUNodeSummary{
			GPUs: 2, Free: 1, Sharing: "time-slicing x4", MIG: "off", Product: "2x NVIDIA A100-SXM4-40GB",
		}, s.Summary)
	})
	object := c.gpuNode()
	if !meta.IsStatusConditionTrue(object.Status.Conditions, v1alpha1.ConditionReady) || !meta.IsStatusConditionTrue(object.Status.Conditions, v1alpha1.ConditionHealthy) {
		t.Errorf("conditions are %v", object.Status.Conditions)
	}
	if diff := cmp.Diff([]metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: "node", UID: "n1"}}, object.OwnerReferences); diff != "" {
		t.Errorf("it does not go with its node: %s", diff)
	}
	back, err := kube.Machine(&object.Status)
	if err != nil {
		t.Fatal(err)
	}
	if back.GPUs[0].UUID != m.GPUs[0].UUID || back.LinkScore(0, 1) != m.LinkScore(0, 1) {
		t.Error("the machine that is read back is another one")
	}
	// Nothing is written while nothing changes.
	time.Sleep(3 * publishPause)
	if again := c.gpuNode(); again.ResourceVersion != object.ResourceVersion {
		t.Errorf("written again without a change: %s", cmp.Diff(object, again))
	}
}

func TestACordonedGPUGetsNoNewWorkAndKeepsItsOwn(t *testing.T) {
	c := startInCluster(t, twoA100, slices4("4"))
	m := c.read()
	c.give("train", "main", "nvidia.com/gpu", m.GPUs[1].UUID+"::2")
	c.await("nvidia.com/gpu", 8)
	c.annotate(v1alpha1.AnnotationCordon, "1")
	c.await("nvidia.com/gpu", 5) // the slot that is held stays healthy
	c.awaitStatus("cordon", func(s *v1alpha1.GPUNodeStatus) string {
		if s.GPUs[1].Cordoned && !s.GPUs[0].Cordoned && s.Summary.Free == 1 && s.Summary.Unhealthy == 0 {
			return ""
		}
		return fmt.Sprintf("%+v", s.Summary)
	})
	c.annotate(v1alpha1.AnnotationCordon, m.GPUs[0].UUID+", 7")
	c.await("nvidia.com/gpu", 4)
	awaitLog(t, c.log, "gpu-cordon", "7")
	c.annotate(v1alpha1.AnnotationCordon, "")
	c.await("nvidia.com/gpu", 8)
}

func TestAnXIDTakesAllSlotsInOneUpdateAndTheyReturn(t *testing.T) {
	c := startInCluster(t, twoA100, slices4("8"), runningPod("train", "p1"))
	m := c.read()
	c.give("train", "main", "nvidia.com/gpu", m.GPUs[1].UUID+"::2")
	c.awaitStatus("holder", func(s *v1alpha1.GPUNodeStatus) string {
		if len(s.GPUs[1].Holders) == 1 {
			return ""
		}
		return "none"
	})
	c.await("nvidia.com/gpu", 16)
	for _, xid := range []int{13, 31, 43, 63, 94} {
		if err := c.machine.InjectXID(m.GPUs[0].UUID, xid, gpu.AnyInstance, gpu.AnyInstance); err != nil {
			t.Fatal(err)
		}
		awaitLog(t, c.log, "XID", fmt.Sprintf("xid=%d", xid))
	}
	if err := c.machine.InjectXID(m.GPUs[1].UUID, 79, gpu.AnyInstance, gpu.AnyInstance); err != nil {
		t.Fatal(err)
	}
	c.await("nvidia.com/gpu", 8)
	eventually(t, "the pod is told", func() string {
		events := c.events("train")
		if slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, reasonGPUUnhealthy) && strings.Contains(e, "XID 79") }) {
			return ""
		}
		return fmt.Sprint(events)
	})
	c.await("nvidia.com/gpu", 16)
	if got := c.counts("nvidia.com/gpu"); !slices.Equal(got, []int{16, 8, 16}) {
		t.Errorf("healthy devices over time were %v, want 16, 8, 16", got)
	}
}

func TestHealthOutlivesTheAgentAndAnOperatorCanEndIt(t *testing.T) {
	c := startInCluster(t, twoA100, slices4("4"))
	c.options.Health.Quiet, c.options.Health.MaxQuiet = time.Hour, time.Hour
	c.restart()
	c.await("nvidia.com/gpu", 8)
	if err := c.machine.InjectXID(c.read().GPUs[0].UUID, 95, gpu.AnyInstance, gpu.AnyInstance); err != nil {
		t.Fatal(err)
	}
	c.awaitStatus("unhealthy", func(s *v1alpha1.GPUNodeStatus) string {
		h := s.GPUs[0].Health
		if h.State == v1alpha1.Unhealthy && strings.Contains(h.Reason, "95") && h.Action == "reset the GPU" && h.Since != nil && s.Summary.Unhealthy == 1 {
			return ""
		}
		return fmt.Sprintf("%+v", h)
	})
	c.stop()
	c.shutdown()
	c.boot()
	c.run()
	c.await("nvidia.com/gpu", 4)
	if got := c.counts("nvidia.com/gpu"); slices.Max(got) > 4 {
		t.Errorf("healthy devices after the restart were %v", got)
	}
	c.annotate(v1alpha1.AnnotationHealthOverride, "0")
	c.await("nvidia.com/gpu", 8)
	c.awaitStatus("healthy", func(s *v1alpha1.GPUNodeStatus) string {
		if meta.IsStatusConditionTrue(s.Conditions, v1alpha1.ConditionHealthy) {
			return ""
		}
		return "not yet"
	})
}

func TestTheNodeIsCutAsItsLabelSays(t *testing.T) {
	c := startInCluster(t, twoA100, "flags: {migStrategy: mixed}\n")
	c.await("nvidia.com/gpu", 2)
	nodes := c.client.CoreV1().Nodes()
	n, err := nodes.Get(t.Context(), "node", metav1.GetOptions{})
	if err != nil {
		t.Fatal(err)
	}
	metav1.SetMetaDataLabel(&n.ObjectMeta, "nvidia.com/mig.config", "all-balanced")
	if _, err := nodes.Update(t.Context(), n, metav1.UpdateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.await("nvidia.com/mig-1g.5gb", 4)
	c.await("nvidia.com/mig-3g.20gb", 2)
	c.await("nvidia.com/gpu", 0) // retired
	eventually(t, "state", func() string {
		n, err := nodes.Get(t.Context(), "node", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if state := n.Labels["nvidia.com/mig.config.state"]; state != "success" || n.Labels["nvidia.com/mig-1g.5gb.count"] != "4" {
			return state
		}
		return ""
	})
	c.awaitStatus("geometry", func(s *v1alpha1.GPUNodeStatus) string {
		if s.Summary.MIG == "2x3g.20gb,2x2g.10gb,4x1g.5gb" && s.MIGConfig != nil && s.MIGConfig.State == v1alpha1.MIGSuccess {
			return ""
		}
		return s.Summary.MIG
	})
}

func TestTheKubeletIsSteeredByThePlan(t *testing.T) {
	pod := runningPod("planned", "p1")
	pod.Status.Phase = corev1.PodPending
	pod.CreationTimestamp = metav1.Now()
	pod.Spec.Containers = []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{"nvidia.com/gpu": resource.MustParse("1")},
	}}}
	c := startInCluster(t, twoA100, slices4("2"))
	m := c.read()
	c.await("nvidia.com/gpu", 4)
	plan := kube.DevicePlan{Node: "node", Containers: []kube.ContainerDevices{
		{Name: "main", Resource: "nvidia.com/gpu", Devices: []string{m.GPUs[1].UUID}},
	}}
	pod.Annotations = map[string]string{v1alpha1.AnnotationDevices: plan.String()}
	if _, err := c.client.CoreV1().Pods("d").Create(t.Context(), pod, metav1.CreateOptions{}); err != nil {
		t.Fatal(err)
	}
	c.mu.Lock()
	sockets := c.endpoints["nvidia.com/gpu"]
	plugin, done, err := c.dial(sockets[len(sockets)-1])
	c.mu.Unlock()
	if err != nil {
		t.Fatal(err)
	}
	defer done()
	var available []string
	for _, g := range m.GPUs {
		available = append(available, g.UUID+"::0", g.UUID+"::1")
	}
	got, err := plugin.GetPreferredAllocation(t.Context(), &pluginapi.PreferredAllocationRequest{
		ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: available, AllocationSize: 1}},
	})
	if err != nil {
		t.Fatal(err)
	}
	ids := got.GetContainerResponses()[0].GetDeviceIDs()
	if len(ids) != 1 || !strings.HasPrefix(ids[0], m.GPUs[1].UUID) {
		t.Fatalf("preferred is %v, planned is a slot of %s", ids, m.GPUs[1].UUID)
	}
	// Another device than planned is told.
	c.give("planned", "main", "nvidia.com/gpu", m.GPUs[0].UUID+"::0")
	c.awaitStatus("mismatch", func(s *v1alpha1.GPUNodeStatus) string {
		if s.Steering.Mismatched == 1 && len(s.Steering.Last) == 1 && s.Steering.Last[0].Pod == "planned" {
			return ""
		}
		return fmt.Sprintf("%+v", s.Steering)
	})
	eventually(t, "Event on the pod", func() string {
		if events := c.events("planned"); !slices.ContainsFunc(events, func(e string) bool { return strings.HasPrefix(e, reasonPlanMismatch) }) {
			return fmt.Sprint(events)
		}
		return ""
	})
}
