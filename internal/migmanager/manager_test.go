package migmanager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
	clienttesting "k8s.io/client-go/testing"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
)

// cluster is a node with a simulated machine, pods that hold devices, and an
// apiserver that knows node and pods.
type cluster struct {
	t       *testing.T
	machine *machine.Machine
	client  *fake.Clientset
	manager *Manager

	mu      sync.Mutex
	holders []Holder
	wanted  []v1alpha1.GPUGeometry
	blocked map[string]string
	evicted []string
	// stays are pods that do not end when they are evicted, budget those that must
	// not be evicted.
	stays, budget map[string]bool
	events        []string
}

const nodeName = "node"

func newCluster(t *testing.T, builtin string, labels map[string]string) *cluster {
	t.Helper()
	desc, err := machine.Builtin(builtin)
	if err != nil {
		t.Fatal(err)
	}
	c := &cluster{
		t: t, machine: machine.New(desc, "seed"), stays: make(map[string]bool), budget: make(map[string]bool),
		client: fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{Name: nodeName, Labels: labels}}),
	}
	c.client.PrependReactor("create", "pods", func(action clienttesting.Action) (bool, runtime.Object, error) {
		create, ok := action.(clienttesting.CreateAction)
		if !ok || action.GetSubresource() != "eviction" {
			return false, nil, nil
		}
		object, ok := create.GetObject().(metav1.Object)
		if !ok {
			return true, nil, errors.New("no object")
		}
		return true, nil, c.evict(object.GetName())
	})
	c.restart()
	return c
}

// restart makes a manager as a new process would.
func (c *cluster) restart() {
	dir := filepath.Join(c.t.TempDir(), "journal")
	if c.manager != nil {
		dir = c.manager.Journal
	}
	c.manager = New(Options{
		NodeName: nodeName, Node: c, Hardware: c.machine, Client: c.client, Journal: dir, DrainTimeout: 300 * time.Millisecond,
		Event: func(_, reason, format string, args ...any) {
			c.mu.Lock()
			defer c.mu.Unlock()
			c.events = append(c.events, reason+": "+fmt.Sprintf(format, args...))
		},
		Log: slog.New(slog.DiscardHandler),
	})
}

func (c *cluster) evict(pod string) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.budget[pod] {
		return apierrors.NewTooManyRequests("the disruption budget allows none", 1)
	}
	c.evicted = append(c.evicted, pod)
	if !c.stays[pod] {
		c.holders = slices.DeleteFunc(c.holders, func(h Holder) bool { return h.Name == pod })
	}
	return nil
}

func (c *cluster) read() *gpu.Machine {
	m, err := c.machine.Read()
	if err != nil {
		c.t.Fatal(err)
	}
	return &m
}

func (c *cluster) node() *corev1.Node {
	n, err := c.client.CoreV1().Nodes().Get(context.Background(), nodeName, metav1.GetOptions{})
	if err != nil {
		c.t.Fatal(err)
	}
	return n
}

func (c *cluster) label(key, value string) {
	n := c.node()
	if value == "" {
		delete(n.Labels, key)
	} else {
		metav1.SetMetaDataLabel(&n.ObjectMeta, key, value)
	}
	if _, err := c.client.CoreV1().Nodes().Update(context.Background(), n, metav1.UpdateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

// hold makes a pod hold a GPU or MIG device.
func (c *cluster) hold(pod, base string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if why := c.blocked[base]; why != "" {
		c.t.Errorf("%s holds %s, which is blocked: %s", pod, base, why)
	}
	c.holders = append(c.holders, Holder{types.NamespacedName{Namespace: "ns", Name: pod}, base})
}

func (c *cluster) Look() Facts {
	n, m := c.node(), c.read()
	c.mu.Lock()
	defer c.mu.Unlock()
	labels := n.Labels
	if labels == nil {
		labels = map[string]string{}
	}
	return Facts{
		Machine: m, Holders: slices.Clone(c.holders), Labels: labels,
		Reason: n.Annotations[v1alpha1.AnnotationMIGReason], Wanted: c.wanted,
	}
}

func (c *cluster) Block(reasons map[string]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.blocked = reasons
}

func (c *cluster) InUse(uuid string) []string {
	g := c.read().ByUUID(uuid)
	c.mu.Lock()
	defer c.mu.Unlock()
	var bases []string
	for _, h := range c.holders {
		if h.Base == uuid || slices.ContainsFunc(g.MIG.Devices, func(d gpu.MIGDevice) bool { return d.UUID == h.Base }) {
			bases = append(bases, h.Base)
		}
	}
	slices.Sort(bases)
	return slices.Compact(bases)
}

func (c *cluster) Refresh(context.Context) error { return nil }

// profiles lists the MIG devices of a GPU by name, sorted; "off" without MIG.
func (c *cluster) profiles(index int) string {
	g := c.read().GPUs[index]
	if !g.MIG.Enabled {
		return "off"
	}
	var names []string
	for _, d := range g.MIG.Devices {
		names = append(names, d.Profile)
	}
	slices.Sort(names)
	return strings.Join(names, " ")
}

// is checks the state that the node tells.
func (c *cluster) is(state string, reason ...string) {
	c.t.Helper()
	n := c.node()
	if got := n.Labels[labelState]; got != state {
		c.t.Errorf("state is %q (%s), want %q", got, n.Annotations[v1alpha1.AnnotationMIGReason], state)
	}
	for _, part := range reason {
		if got := n.Annotations[v1alpha1.AnnotationMIGReason]; !strings.Contains(got, part) {
			c.t.Errorf("reason is %q, want %q in it", got, part)
		}
	}
	if _, has := n.Annotations[v1alpha1.AnnotationMIGReason]; has && len(reason) == 0 {
		c.t.Errorf("a reason is left: %q", n.Annotations[v1alpha1.AnnotationMIGReason])
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if len(c.blocked) > 0 {
		c.t.Errorf("still blocked: %v", c.blocked)
	}
}

// now makes the manager try again at once.
func (c *cluster) now() {
	c.manager.retryAt = time.Time{}
	c.manager.reconcile(context.Background())
}

const (
	all3g = "all-3g.20gb"
	all1g = "all-1g.5gb"
)

func TestOnlyPodsOnGPUsThatChangeAreEvicted(t *testing.T) {
	c := newCluster(t, "p4d.24xlarge", map[string]string{labelConfig: "some", "nvidia.com/gpu.deploy.dcgm": "true", "nvidia.com/gpu.deploy.nvsm": "false"})
	c.manager.ConfigFile = filepath.Join(t.TempDir(), "c.yaml")
	config := "version: v1\nmig-configs:\n  some:\n  - {devices: [0, 1, 2], mig-enabled: true, mig-devices: {1g.5gb: 2, 3g.20gb: 1}}\n  other:\n  - {devices: [1], mig-enabled: true, mig-devices: {1g.5gb: 1, 3g.20gb: 1, 2g.10gb: 1}}\n"
	if err := os.WriteFile(c.manager.ConfigFile, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	m := c.read()
	c.hold("on1", m.GPUs[1].UUID)
	c.hold("on2", m.GPUs[2].UUID)
	c.hold("on5", m.GPUs[5].UUID)
	c.now()
	c.is("success")
	slices.Sort(c.evicted)
	if diff := cmp.Diff([]string{"on1", "on2"}, c.evicted); diff != "" {
		t.Errorf("evicted: %s", diff)
	}
	for i, want := range []string{"1g.5gb 1g.5gb 3g.20gb", "1g.5gb 1g.5gb 3g.20gb", "1g.5gb 1g.5gb 3g.20gb", "off", "off"} {
		if got := c.profiles(i); got != want {
			t.Errorf("GPU %d has %s, want %s", i, got, want)
		}
	}
	// The next config keeps the devices that both have, with their pods.
	devices := c.read().GPUs[1].MIG.Devices
	kept, gone := "", ""
	for _, d := range devices {
		if d.Profile == "1g.5gb" && kept == "" {
			kept = d.UUID
		} else if d.Profile == "1g.5gb" {
			gone = d.UUID
		}
	}
	c.evicted = nil
	c.hold("keeps", kept)
	c.label(labelConfig, "other")
	c.now()
	c.is("success")
	if len(c.evicted) > 0 {
		t.Errorf("%v evicted, though nobody holds %s", c.evicted, gone)
	}
	if c.read().Parent(kept) == nil || c.read().Parent(gone) != nil {
		t.Error("the device that was held is not the one that stayed")
	}
	if l := c.node().Labels; l["nvidia.com/gpu.deploy.dcgm"] != "true" || l["nvidia.com/gpu.deploy.nvsm"] != "false" {
		t.Errorf("clients' labels are %v", l)
	}
}

func TestAPodThatNeverEndsFailsTheChangeAndNothingStaysPaused(t *testing.T) {
	c := newCluster(t, "a30x4", map[string]string{labelConfig: "all-2g.12gb", "nvidia.com/gpu.deploy.dcgm-exporter": "true"})
	c.stays["stuck"] = true
	c.hold("stuck", c.read().GPUs[3].UUID)
	c.now()
	c.is("failed", "ns/stuck does not end", "tried again in 15s")
	for i := range 4 {
		if got := c.profiles(i); got != "off" {
			t.Errorf("GPU %d has %s", i, got)
		}
	}
	if got := c.node().Labels["nvidia.com/gpu.deploy.dcgm-exporter"]; got != "true" {
		t.Errorf("dcgm-exporter is %s", got)
	}
	if c.manager.reconcile(context.Background()); len(c.evicted) != 1 {
		t.Errorf("tried again at once: %v", c.evicted)
	}
	c.now()
	c.is("failed", "tried again in 30s")
	c.stays["stuck"] = false
	c.now()
	c.is("success")
	if got := c.profiles(3); got != "2g.12gb 2g.12gb" {
		t.Errorf("GPU 3 has %s", got)
	}
}

func TestADisruptionBudgetIsRespected(t *testing.T) {
	c := newCluster(t, "p4d.24xlarge", map[string]string{labelConfig: all3g})
	c.budget["guarded"] = true
	c.hold("guarded", c.read().GPUs[0].UUID)
	c.now()
	c.is("failed", "ns/guarded cannot be evicted", "disruption budget")
	if len(c.evicted) > 0 {
		t.Errorf("%v evicted", c.evicted)
	}
}

func TestWhatCannotBeDoneSaysWhy(t *testing.T) {
	for _, test := range []struct {
		name, machine, config, file string
		reason                      string
	}{
		{"unknown config", "p4d.24xlarge", "all-balance", "", "all-balanced"},
		{"no such file", "p4d.24xlarge", "x", "/does/not/exist", "/does/not/exist"},
		{"GPU without MIG", "g5.12xlarge", "all-enabled", "", "no GPU of this machine has MIG profiles"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c := newCluster(t, test.machine, map[string]string{labelConfig: test.config})
			c.manager.ConfigFile = test.file
			c.now()
			c.is("failed", test.reason)
		})
	}
}

func TestALostGPUDoesNotKeepTheOthersFromChanging(t *testing.T) {
	c := newCluster(t, "p4d.24xlarge", map[string]string{labelConfig: all1g})
	if err := c.machine.SetLost(c.read().GPUs[2].UUID, true); err != nil {
		t.Fatal(err)
	}
	c.now()
	c.is("failed", "GPU 2", "lost")
	if got := len(c.read().GPUs[7].MIG.Devices); got != 7 {
		t.Errorf("GPU 7 has %d devices", got)
	}
	if err := c.machine.SetLost(c.read().GPUs[2].UUID, false); err != nil {
		t.Fatal(err)
	}
	c.now()
	c.is("success")
}

func TestALabelThatChangesIsFollowedAtOnce(t *testing.T) {
	c := newCluster(t, "p4d.24xlarge", map[string]string{labelConfig: "nonsense"})
	c.now()
	c.is("failed", "nonsense")
	c.label(labelConfig, all3g)
	c.manager.reconcile(context.Background())
	c.is("success")
	c.label(labelConfig, "")
	c.manager.reconcile(context.Background())
	if s := c.manager.Status(); s != nil {
		t.Errorf("status %v without a label", s)
	}
}

func TestClientsThatAnotherProcessPausedAreRestored(t *testing.T) {
	c := newCluster(t, "p4d.24xlarge", map[string]string{"nvidia.com/gpu.deploy.nvsm": deployPaused})
	c.manager.reconcile(context.Background())
	if got := c.node().Labels["nvidia.com/gpu.deploy.nvsm"]; got != deployed {
		t.Errorf("nvsm is %s", got)
	}
}

func TestBusyProcessesKeepAGPUFromBeingReset(t *testing.T) {
	c := newCluster(t, "p4d.24xlarge", map[string]string{labelConfig: all3g, "nvidia.com/gpu.deploy.dcgm": "true"})
	uuid := c.read().GPUs[4].UUID
	if err := c.machine.SetProcesses(uuid, []gpu.Process{{PID: 77, GI: gpu.AnyInstance, CI: gpu.AnyInstance}}); err != nil {
		t.Fatal(err)
	}
	c.now()
	c.is("failed", "process 77 on GPU 4")
	if got := c.node().Labels["nvidia.com/gpu.deploy.dcgm"]; got != deployed {
		t.Errorf("dcgm is %s", got)
	}
	if err := c.machine.SetProcesses(uuid, nil); err != nil {
		t.Fatal(err)
	}
	c.now()
	c.is("success")
}

func instance(profile, start int32, size int32) v1alpha1.MIGInstance {
	return v1alpha1.MIGInstance{ProfileID: profile, Start: start, Size: size}
}

func TestOnDemandTouchesNothingThatIsHeld(t *testing.T) {
	c := newCluster(t, "p4d.24xlarge", map[string]string{v1alpha1.LabelMIGOnDemand: "true"})
	m := c.read()
	c.hold("whole", m.GPUs[0].UUID)
	c.wanted = []v1alpha1.GPUGeometry{
		{UUID: m.GPUs[0].UUID, Instances: []v1alpha1.MIGInstance{instance(9, 4, 4)}},
		{UUID: m.GPUs[1].UUID, Instances: []v1alpha1.MIGInstance{instance(19, 6, 1)}},
		{UUID: "GPU-gone", Instances: []v1alpha1.MIGInstance{instance(19, 6, 1)}},
	}
	c.now()
	if got := c.profiles(0) + "," + c.profiles(1); got != "off,1g.5gb" {
		t.Fatalf("GPUs are %s", got)
	}
	held := c.read().GPUs[1].MIG.Devices[0].UUID
	c.hold("slice", held)
	// Free places are filled beside what is held.
	c.wanted[1].Instances = append(c.wanted[1].Instances, instance(9, 0, 4))
	c.now()
	if got := c.profiles(1); got != "1g.5gb 3g.20gb" {
		t.Errorf("GPU 1 is %s", got)
	}
	// What is held stays, whatever is wanted.
	c.wanted[1].Instances = nil
	c.now()
	if got := c.profiles(1); got != "1g.5gb 3g.20gb" || c.read().Parent(held) == nil {
		t.Errorf("GPU 1 is %s", got)
	}
	if s := c.manager.Status(); s == nil || s.State != v1alpha1.MIGSuccess || s.Config != onDemand {
		t.Errorf("status is %v", s)
	}
	c.holders = nil
	c.now()
	if got := c.profiles(0) + "," + c.profiles(1); got != "3g.20gb,off" {
		t.Errorf("GPUs are %s", got)
	}
	if len(c.evicted) > 0 {
		t.Errorf("%v evicted", c.evicted)
	}
}

func TestOneWayOfCuttingAtATime(t *testing.T) {
	c := newCluster(t, "p4d.24xlarge", map[string]string{v1alpha1.LabelMIGOnDemand: "true", labelConfig: all3g})
	c.now()
	c.is("failed", "take away one of the labels")
	if got := c.profiles(0); got != "off" {
		t.Errorf("GPU 0 is %s", got)
	}
}
