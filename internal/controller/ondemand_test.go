package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/client/fake"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/mig"
)

const (
	small = "nvidia.com/mig-1g.5gb"
	large = "nvidia.com/mig-3g.20gb"
	whole = "nvidia.com/gpu"
)

// cluster is the controller on a fake apiserver. Its nodes are simulated machines,
// and its agents do at once what they are told.
type cluster struct {
	t          *testing.T
	client     client.Client
	events     *events.FakeRecorder
	controller *onDemand
	now        time.Time
	machines   map[string]*machine.Machine
	holders    map[string][]kube.Holder
}

func newCluster(t *testing.T, nodes ...string) *cluster {
	t.Helper()
	scheme, err := Scheme()
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{
		t: t, now: time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC), machines: make(map[string]*machine.Machine), holders: make(map[string][]kube.Holder),
		client: fake.NewClientBuilder().WithScheme(scheme).WithStatusSubresource(&v1alpha1.GPUNode{}, &corev1.Pod{}).Build(),
		events: events.NewFakeRecorder(1000),
	}
	c.controller = newOnDemand(c.client, c.events, mig.DefaultOnDemandPolicy())
	c.controller.now = func() time.Time { return c.now }
	for _, name := range nodes {
		desc, err := machine.Builtin("p4d.24xlarge")
		if err != nil {
			t.Fatal(err)
		}
		c.machines[name] = machine.New(desc, name)
		c.must(c.client.Create(t.Context(), &corev1.Node{
			ObjectMeta: metav1.ObjectMeta{Name: name, UID: types.UID(name), Labels: map[string]string{
				v1alpha1.LabelMIGOnDemand: "true", labelMIGStrategy: strategyMixed, "kubernetes.io/hostname": name,
			}},
			Status: corev1.NodeStatus{
				Conditions: []corev1.NodeCondition{{Type: corev1.NodeReady, Status: corev1.ConditionTrue}},
				Allocatable: corev1.ResourceList{
					corev1.ResourceCPU: resource.MustParse("96"), corev1.ResourceMemory: resource.MustParse("1Ti"), corev1.ResourcePods: resource.MustParse("110"),
				},
			},
		}))
		c.must(c.client.Create(t.Context(), &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: name, Generation: 1}}))
		c.publish(name)
	}
	return c
}

func (c *cluster) must(err error) {
	c.t.Helper()
	if err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) gpuNode(name string) *v1alpha1.GPUNode {
	c.t.Helper()
	g := &v1alpha1.GPUNode{}
	c.must(c.client.Get(c.t.Context(), types.NamespacedName{Name: name}, g))
	return g
}

// publish writes the status of a node, as its agent does.
func (c *cluster) publish(name string) {
	c.t.Helper()
	m, err := c.machines[name].Read()
	c.must(err)
	g := c.gpuNode(name)
	g.Status = kube.Status(kube.NodeFacts{Machine: &m, Holders: c.holders[name]})
	c.must(c.client.Status().Update(c.t.Context(), g))
}

// obey cuts the GPUs of a node as its spec says.
func (c *cluster) obey(name string) {
	c.t.Helper()
	m, err := c.machines[name].Read()
	c.must(err)
	executor := mig.NewExecutor(c.machines[name], c.t.TempDir())
	for _, w := range c.gpuNode(name).Spec.MIG {
		g := m.ByUUID(w.UUID)
		target := mig.Target{Enabled: len(w.Instances) > 0, Instances: wanted(&w).Instances}
		change, err := mig.PlanGPU(g, gpu.ProductByName(g.Name).MIG, target, nil)
		c.must(err)
		if change != nil {
			c.must(executor.Apply(change))
		}
	}
	c.publish(name)
}

func (c *cluster) reconcile() reconcile.Result {
	c.t.Helper()
	result, err := c.controller.Reconcile(c.t.Context(), reconcile.Request{})
	c.must(err)
	return result
}

// waits creates a pod that the scheduler could not place.
func (c *cluster) waits(name, of string, count int64, options ...func(*corev1.Pod)) {
	c.t.Helper()
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name), CreationTimestamp: metav1.NewTime(c.now)},
		Spec: corev1.PodSpec{Containers: []corev1.Container{{Name: "main", Resources: corev1.ResourceRequirements{
			Limits:   corev1.ResourceList{corev1.ResourceName(of): *resource.NewQuantity(count, resource.DecimalSI)},
			Requests: corev1.ResourceList{corev1.ResourceName(of): *resource.NewQuantity(count, resource.DecimalSI)},
		}}}},
		Status: corev1.PodStatus{Phase: corev1.PodPending, Conditions: []corev1.PodCondition{
			{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable},
		}},
	}
	for _, o := range options {
		o(p)
	}
	c.must(c.client.Create(c.t.Context(), p))
}

func (c *cluster) node(name string, change func(*corev1.Node)) {
	c.t.Helper()
	n := &corev1.Node{}
	c.must(c.client.Get(c.t.Context(), types.NamespacedName{Name: name}, n))
	change(n)
	changed := n.DeepCopy()
	c.must(c.client.Update(c.t.Context(), n))
	changed.ResourceVersion = n.ResourceVersion
	c.must(c.client.Status().Update(c.t.Context(), changed))
}

// cuts counts the devices that the spec of a node wants, by profile, for each GPU
// that is in it.
func (c *cluster) cuts(name string) []string {
	c.t.Helper()
	cuts := []string{}
	for _, w := range c.gpuNode(name).Spec.MIG {
		counts := make(map[string]int)
		for _, in := range w.Instances {
			counts[in.Profile]++
		}
		cuts = append(cuts, strings.Trim(fmt.Sprint(counts), "map[]"))
	}
	slices.Sort(cuts)
	return cuts
}

func (c *cluster) wants(name string, cuts ...string) {
	c.t.Helper()
	if diff := cmp.Diff(append([]string{}, cuts...), c.cuts(name)); diff != "" {
		c.t.Errorf("spec of %s (-want +got):\n%s", name, diff)
	}
}

// told returns the Events since it was last called.
func (c *cluster) told() []string {
	var all []string
	for {
		select {
		case e := <-c.events.Events:
			all = append(all, e)
		default:
			return all
		}
	}
}

func TestWaitingPodsGetTheGPUsThatTheyNeedAndNoMore(t *testing.T) {
	c := newCluster(t, "a")
	for i := range 9 {
		c.waits(fmt.Sprint("small-", i), small, 1)
	}
	c.reconcile()
	c.wants("a", "1g.5gb:2", "1g.5gb:7")
	events := c.told()
	if len(events) != 2 || !strings.Contains(events[0], "shall have 1g.5gb at 0, 1g.5gb at") || !strings.Contains(strings.Join(events, ""), "for ns/small-0") {
		t.Errorf("Events: %q", events)
	}
	// As long as the agent has not done it, and when it has, nothing more is wanted.
	c.reconcile()
	c.obey("a")
	c.now = c.now.Add(time.Second)
	c.reconcile()
	c.wants("a", "1g.5gb:2", "1g.5gb:7")
	c.waits("large-0", large, 1)
	c.waits("large-1", large, 1)
	c.reconcile()
	c.wants("a", "1g.5gb:2 3g.20gb:1", "1g.5gb:7", "3g.20gb:1")
	if again := c.told(); len(again) != 2 {
		t.Errorf("Events: %q", again)
	}
}

func TestIdleGPUsAreMadeWholeAgainInTime(t *testing.T) {
	c := newCluster(t, "a")
	c.waits("p", small, 1)
	c.reconcile()
	c.obey("a")
	c.must(c.client.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace("ns")))
	next := c.reconcile().RequeueAfter
	if next <= 0 || next > 5*time.Minute {
		t.Fatalf("looks again in %s", next)
	}
	c.now = c.now.Add(next - time.Second)
	c.reconcile()
	c.wants("a", "1g.5gb:1")
	c.now = c.now.Add(time.Second)
	c.reconcile()
	c.wants("a", "")
	c.obey("a")
	if g := c.gpuNode("a").Status.GPUs[0]; g.MIG.Enabled {
		t.Errorf("still cut: %+v", g.MIG)
	}
}

func TestAGPUThatIsHeldIsNotMadeWhole(t *testing.T) {
	c := newCluster(t, "a")
	c.waits("p", small, 1)
	c.reconcile()
	c.obey("a")
	m, err := c.machines["a"].Read()
	c.must(err)
	i := slices.IndexFunc(c.gpuNode("a").Status.GPUs, func(g v1alpha1.GPU) bool { return g.MIG.Enabled })
	g := &m.GPUs[i]
	id := kube.Holder{Namespace: "ns", Pod: "p", Container: "main", Resource: small, GPU: g.UUID}
	id.Device.Base, id.Device.Slot = g.MIG.Devices[0].UUID, -1
	c.holders["a"] = []kube.Holder{id}
	c.publish("a")
	c.must(c.client.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace("ns")))
	for range 5 {
		c.now = c.now.Add(time.Hour)
		c.reconcile()
		c.wants("a", "1g.5gb:1")
	}
	// What it was idle before counts for nothing.
	c.holders["a"] = nil
	c.publish("a")
	c.reconcile()
	c.wants("a", "1g.5gb:1")
	c.now = c.now.Add(5 * time.Minute)
	c.reconcile()
	c.wants("a", "")
}

func TestABoundPodThatNobodyListsYetKeepsItsDevice(t *testing.T) {
	c := newCluster(t, "a")
	c.waits("p", small, 1)
	c.reconcile()
	c.obey("a")
	pod := &corev1.Pod{}
	c.must(c.client.Get(t.Context(), types.NamespacedName{Namespace: "ns", Name: "p"}, pod))
	c.must(c.client.Delete(t.Context(), pod))
	pod.ResourceVersion, pod.Spec.NodeName, pod.Status.Conditions = "", "a", nil
	c.must(c.client.Create(t.Context(), pod))
	c.now = c.now.Add(time.Hour)
	c.reconcile()
	c.now = c.now.Add(time.Hour)
	c.reconcile()
	c.wants("a", "1g.5gb:1")
}

func TestGPUsAreCutOnlyWhereThePodCanRun(t *testing.T) {
	gated := func(p *corev1.Pod) { p.Status.Conditions[0].Reason = corev1.PodReasonSchedulingGated }
	selects := func(node string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.NodeSelector = map[string]string{"kubernetes.io/hostname": node} }
	}
	cpus := func(n string) func(*corev1.Pod) {
		return func(p *corev1.Pod) {
			p.Spec.Containers[0].Resources.Requests[corev1.ResourceCPU] = resource.MustParse(n)
		}
	}
	on := func(node string) func(*corev1.Pod) {
		return func(p *corev1.Pod) { p.Spec.NodeName, p.Status.Phase = node, corev1.PodRunning }
	}
	taint := func(n *corev1.Node) {
		n.Spec.Taints = []corev1.Taint{{Key: "team", Value: "x", Effect: corev1.TaintEffectNoSchedule}}
	}
	tolerates := func(p *corev1.Pod) {
		p.Spec.Tolerations = []corev1.Toleration{{Key: "team", Operator: corev1.TolerationOpExists}}
	}
	for _, test := range []struct {
		name string
		node func(*corev1.Node) // of a
		pod  func(*corev1.Pod)
		more func(c *cluster)
		a, b bool // cut
	}{
		{name: "anywhere", a: true},
		{name: "the scheduler has not tried yet", pod: func(p *corev1.Pod) { p.Status.Conditions = nil }},
		{name: "the pod is gated", pod: gated},
		{name: "the pod selects another node", pod: selects("b"), b: true},
		{name: "the pod selects no node", pod: selects("c")},
		{name: "a taint", node: taint, b: true},
		{name: "a taint that is tolerated", node: taint, pod: tolerates, a: true},
		{name: "not ready", node: func(n *corev1.Node) { n.Status.Conditions[0].Status = corev1.ConditionUnknown }, b: true},
		{name: "cordoned", node: func(n *corev1.Node) { n.Spec.Unschedulable = true }, b: true},
		{name: "without the label", node: func(n *corev1.Node) { delete(n.Labels, v1alpha1.LabelMIGOnDemand) }, b: true},
		{name: "offers no MIG devices", node: func(n *corev1.Node) { n.Labels[labelMIGStrategy] = "none" }, b: true},
		{name: "has a config", node: func(n *corev1.Node) { n.Labels[labelMIGConfig] = "all-1g.5gb" }, b: true},
		{name: "more CPUs than any node has", pod: cpus("200")},
		{name: "CPUs that others have", pod: cpus("50"), b: true, more: func(c *cluster) { c.waits("other", "example.com/x", 1, cpus("50"), on("a")) }},
		{name: "CPUs that others had", pod: cpus("50"), a: true, more: func(c *cluster) {
			c.waits("other", "example.com/x", 1, cpus("50"), on("a"), func(p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded })
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newCluster(t, "a", "b")
			if test.node != nil {
				c.node("a", test.node)
			}
			if test.more != nil {
				test.more(c)
			}
			if test.pod == nil {
				test.pod = func(*corev1.Pod) {}
			}
			c.waits("p", small, 1, test.pod)
			c.reconcile()
			for node, cut := range map[string]bool{"a": test.a, "b": test.b} {
				if cut {
					c.wants(node, "1g.5gb:1")
				} else {
					c.wants(node)
				}
			}
		})
	}
}

func TestNothingIsCutForAPodThatIsGoing(t *testing.T) {
	c := newCluster(t, "a")
	c.waits("p", small, 1, func(p *corev1.Pod) { p.Finalizers = []string{"ashlar.dev/test"} })
	c.must(c.client.Delete(t.Context(), &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: "p"}}))
	c.reconcile()
	c.wants("a")
}

func TestCordonedAndUnhealthyGPUsAreNotCut(t *testing.T) {
	c := newCluster(t, "a")
	g := c.gpuNode("a")
	for i := range 7 {
		g.Status.GPUs[i].Cordoned = i%2 == 0
		if i%2 > 0 {
			g.Status.GPUs[i].Health = v1alpha1.Health{State: v1alpha1.Unhealthy, Reason: "XID 79"}
		}
	}
	c.must(c.client.Status().Update(t.Context(), g))
	c.waits("p", small, 8)
	c.waits("q", small, 7)
	c.reconcile()
	c.wants("a", "1g.5gb:7")
	if at := c.gpuNode("a").Spec.MIG[0].UUID; at != g.Status.GPUs[7].UUID {
		t.Errorf("%s is cut, want %s", at, g.Status.GPUs[7].UUID)
	}
}

func TestTheSpecIsForgottenWithTheLabel(t *testing.T) {
	c := newCluster(t, "a")
	c.waits("p", small, 1)
	c.reconcile()
	c.wants("a", "1g.5gb:1")
	c.node("a", func(n *corev1.Node) { delete(n.Labels, v1alpha1.LabelMIGOnDemand) })
	c.reconcile()
	c.wants("a")
}

func TestEntriesOfGPUsThatAreGoneGo(t *testing.T) {
	c := newCluster(t, "a")
	g := c.gpuNode("a")
	g.Spec.MIG = []v1alpha1.GPUGeometry{{UUID: "GPU-gone", Since: metav1.NewTime(c.now)}}
	c.must(c.client.Update(t.Context(), g))
	c.waits("p", small, 1)
	c.reconcile()
	c.wants("a", "1g.5gb:1")
}

// stale answers with what GPUNodes were before the last write.
type stale struct {
	client.Client
	before *v1alpha1.GPUNodeList
}

func (s stale) List(ctx context.Context, list client.ObjectList, o ...client.ListOption) error {
	if l, ok := list.(*v1alpha1.GPUNodeList); ok && s.before != nil {
		s.before.DeepCopyInto(l)
		return nil
	}
	return s.Client.List(ctx, list, o...)
}

func TestACacheThatLagsIsWaitedFor(t *testing.T) {
	c := newCluster(t, "a")
	before := &v1alpha1.GPUNodeList{}
	c.must(c.client.List(t.Context(), before))
	c.waits("p", small, 1)
	c.reconcile()
	// The fake apiserver counts no generations.
	c.controller.written["a"] = 2
	c.controller.client = stale{c.client, before}
	c.waits("q", large, 1)
	if again := c.reconcile().RequeueAfter; again != behind {
		t.Errorf("looks again in %s, want %s", again, behind)
	}
	c.wants("a", "1g.5gb:1")
	g := c.gpuNode("a")
	g.Generation = 2
	c.must(c.client.Update(t.Context(), g))
	c.controller.client = c.client
	c.reconcile()
	c.wants("a", "1g.5gb:1 3g.20gb:1")
}

func TestPodsAndNodesAreToldOnceWhyNothingIsCut(t *testing.T) {
	c := newCluster(t, "a", "b")
	c.node("b", func(n *corev1.Node) { n.Labels[labelMIGStrategy] = "single" })
	c.waits("p", "nvidia.com/mig-9g.99gb", 1)
	c.waits("q", whole, 9)
	for range 3 {
		c.reconcile()
	}
	events := c.told()
	if len(events) != 2 || !strings.Contains(events[0], reasonIdle) || !strings.Contains(events[0], `"single"`) ||
		!strings.Contains(events[1], reasonWaits) || !strings.Contains(events[1], "mig-9g.99gb") {
		t.Errorf("Events: %q", events)
	}
	// When it changes they are told anew.
	c.node("b", func(n *corev1.Node) { n.Labels[labelMIGConfig] = "x" })
	c.must(c.client.DeleteAllOf(t.Context(), &corev1.Pod{}, client.InNamespace("ns")))
	c.reconcile()
	if again := c.told(); len(again) != 1 || !strings.Contains(again[0], labelMIGConfig) {
		t.Errorf("Events: %q", again)
	}
	if len(c.controller.told) != 1 {
		t.Errorf("remembers %v", c.controller.told)
	}
}

func TestAWholeGPUIsLeftForWhoWantsOne(t *testing.T) {
	c := newCluster(t, "a")
	c.waits("eight", whole, 8)
	c.now = c.now.Add(time.Second)
	c.waits("p", small, 1)
	c.reconcile()
	c.wants("a")
}
