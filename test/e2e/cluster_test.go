package e2e

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/localcluster"
	"github.com/ashlar-gpu/ashlar/internal/podresources"
)

// programs are what the tests run.
type programs struct {
	binaries                  localcluster.Binaries
	agent, controller, ashlar string
}

// find finds Ashlar's programs in the folder $ASHLAR_BIN, where `make e2e` has
// built them, and builds them elsewhere where it is not set.
var find = sync.OnceValues(func() (*programs, error) {
	dir := os.Getenv("ASHLAR_BIN")
	if dir == "" {
		var err error
		if dir, err = os.MkdirTemp("", "ashlar-e2e-bin"); err != nil {
			return nil, err
		}
		cleanup = func() { _ = os.RemoveAll(dir) }
		for _, name := range []string{"ashlar", "ashlar-agent", "ashlar-controller"} {
			out, err := exec.Command("go", "build", "-o", dir+"/", "../../cmd/"+name).CombinedOutput()
			if err != nil {
				return nil, fmt.Errorf("build %s: %w\n%s", name, err, out)
			}
		}
	}
	binaries, err := localcluster.EnsureBinaries(context.Background(), localcluster.BinaryOptions{Progress: os.Stderr})
	return &programs{
		binaries: binaries, ashlar: filepath.Join(dir, "ashlar"),
		agent: filepath.Join(dir, "ashlar-agent"), controller: filepath.Join(dir, "ashlar-controller"),
	}, err
})

// cleanup removes what find built.
var cleanup = func() {}

func TestMain(m *testing.M) {
	code := m.Run()
	cleanup()
	os.Exit(code)
}

// needs says what is missing to run these tests, "" for nothing.
func needs() string {
	switch {
	case runtime.GOOS != "linux":
		return "real kubelets need Linux"
	case os.Geteuid() != 0:
		return "real kubelets need root"
	}
	return ""
}

// tools returns the programs or skips the test.
func tools(t *testing.T) *programs {
	t.Helper()
	if missing := needs(); missing != "" {
		t.Skip(missing)
	}
	p, err := find()
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// stateDir makes a folder for a cluster, short enough for sockets.
func stateDir(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("/tmp", "a")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return filepath.Join(dir, "c")
}

// healthQuiet is how long a GPU must be quiet in tests.
const healthQuiet = 3 * time.Second

// cluster is a running cluster with what tests ask of it.
type cluster struct {
	*localcluster.Cluster
	t      *testing.T
	client kubernetes.Interface
}

// up brings up a cluster for the test.
func up(t *testing.T, nodes ...string) *cluster {
	t.Helper()
	p := tools(t)
	var specs []localcluster.NodeSpec
	for _, text := range nodes {
		spec, err := localcluster.ParseNodeSpec(text)
		if err != nil {
			t.Fatal(err)
		}
		specs = append(specs, spec)
	}
	c, err := localcluster.Up(t.Context(), localcluster.Options{
		StateDir: stateDir(t), Nodes: specs, Binaries: p.binaries, Agent: p.agent, Controller: p.controller,
		HealthQuiet: healthQuiet, ControllerArgs: []string{"--mig-min-life=5s", "--mig-idle-after=10s"}, Progress: t.Output(),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if t.Failed() {
			dumpLogs(t, c.State())
		}
		if err := c.Close(); err != nil {
			t.Error(err)
		}
	})
	config, err := clientcmd.BuildConfigFromFlags("", c.State().Kubeconfig)
	if err != nil {
		t.Fatal(err)
	}
	config.QPS, config.Burst = 200, 200
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		t.Fatal(err)
	}
	return &cluster{Cluster: c, t: t, client: client}
}

// dumpLogs shows the end of each agent's log.
func dumpLogs(t *testing.T, s localcluster.State) {
	for _, p := range s.Processes {
		if data, err := os.ReadFile(p.Log); err == nil && strings.HasPrefix(p.Name, "agent/") {
			t.Logf("%s: %s", p.Name, data[max(0, len(data)-4000):])
		}
	}
}

// eventually fails the test unless check returns "" within the limit.
func (c *cluster) eventually(limit time.Duration, what string, check func() string) {
	c.t.Helper()
	deadline := time.Now().Add(limit)
	for {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			c.t.Fatalf("%s: not within %s: %s", what, limit, problem)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// kubectl runs kubectl with a manifest as input.
func (c *cluster) kubectl(input string, args ...string) string {
	c.t.Helper()
	cmd := exec.Command(c.State().Kubectl, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+c.State().Kubeconfig)
	cmd.Stdin = strings.NewReader(input)
	out, err := cmd.CombinedOutput()
	if err != nil {
		c.t.Fatalf("kubectl %s: %v\n%s", strings.Join(args, " "), err, out)
	}
	return string(out)
}

// allocatable says how far a node is from offering so many of a resource.
func (c *cluster) allocatable(node, resource string, want int64) string {
	n, err := c.client.CoreV1().Nodes().Get(c.t.Context(), node, metav1.GetOptions{})
	if err != nil {
		return err.Error()
	}
	if got := n.Status.Allocatable[corev1.ResourceName(resource)]; got.Value() != want {
		return fmt.Sprintf("%s of node %s: %d are allocatable, want %d", resource, node, got.Value(), want)
	}
	return ""
}

// pod returns a pod for a node that asks for so many of a resource.
func pod(name, node, resource string, count int) *corev1.Pod {
	quantity := corev1.ResourceList{corev1.ResourceName(resource): *resourceQuantity(count)}
	return &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default"},
		Spec: corev1.PodSpec{
			NodeSelector:  map[string]string{"kubernetes.io/hostname": node},
			RestartPolicy: corev1.RestartPolicyNever,
			Containers:    []corev1.Container{{Name: "main", Image: "none", Resources: corev1.ResourceRequirements{Limits: quantity}}},
		},
	}
}

func (c *cluster) create(p *corev1.Pod) {
	c.t.Helper()
	if _, err := c.client.CoreV1().Pods(p.Namespace).Create(c.t.Context(), p, metav1.CreateOptions{}); err != nil {
		c.t.Fatal(err)
	}
}

func (c *cluster) remove(names ...string) {
	c.t.Helper()
	now := int64(0)
	for _, name := range names {
		if err := c.client.CoreV1().Pods("default").Delete(c.t.Context(), name, metav1.DeleteOptions{GracePeriodSeconds: &now}); err != nil {
			c.t.Fatal(err)
		}
	}
}

// phases says which of the pods are not in the phase.
func (c *cluster) phases(want corev1.PodPhase, names ...string) string {
	var wrong []string
	for _, name := range names {
		p, err := c.client.CoreV1().Pods("default").Get(c.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if p.Status.Phase != want {
			wrong = append(wrong, fmt.Sprintf("%s is %s (%s %s)", name, p.Status.Phase, p.Status.Reason, p.Status.Message))
		}
	}
	return strings.Join(wrong, ", ")
}

// deploy creates a Deployment of such pods: a pod that a kubelet refuses while its
// agent is away stays Failed, and a controller makes another.
func (c *cluster) deploy(p *corev1.Pod, replicas int32) {
	c.t.Helper()
	labels := map[string]string{"app": p.Name}
	spec := p.Spec
	spec.RestartPolicy = corev1.RestartPolicyAlways
	d := &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: p.Name, Namespace: p.Namespace},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas, Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: spec},
		},
	}
	// The apiserver may be on its way back.
	c.eventually(30*time.Second, "create deployment "+d.Name, func() string {
		_, err := c.client.AppsV1().Deployments(d.Namespace).Create(c.t.Context(), d, metav1.CreateOptions{})
		if err != nil && !apierrors.IsAlreadyExists(err) {
			return err.Error()
		}
		return ""
	})
}

// available says which of the deployments lack replicas.
func (c *cluster) available(names ...string) string {
	var wrong []string
	for _, name := range names {
		d, err := c.client.AppsV1().Deployments("default").Get(c.t.Context(), name, metav1.GetOptions{})
		if err != nil {
			return err.Error()
		}
		if d.Status.AvailableReplicas != *d.Spec.Replicas || d.Status.ObservedGeneration != d.Generation {
			wrong = append(wrong, fmt.Sprintf("%s has %d of %d replicas", name, d.Status.AvailableReplicas, *d.Spec.Replicas))
		}
	}
	return strings.Join(wrong, ", ")
}

// removeDeployments deletes deployments and their pods, also Failed ones, at
// once.
func (c *cluster) removeDeployments(names ...string) {
	c.t.Helper()
	now, foreground := int64(0), metav1.DeletePropagationForeground
	for _, name := range names {
		if err := c.client.AppsV1().Deployments("default").Delete(c.t.Context(), name, metav1.DeleteOptions{PropagationPolicy: &foreground}); err != nil {
			c.t.Fatal(err)
		}
		err := c.client.CoreV1().Pods("default").DeleteCollection(c.t.Context(), metav1.DeleteOptions{GracePeriodSeconds: &now}, metav1.ListOptions{LabelSelector: "app=" + name})
		if err != nil {
			c.t.Fatal(err)
		}
	}
}

// kill ends a process of the cluster as a crash does.
func (c *cluster) kill(name string) {
	c.t.Helper()
	for _, p := range c.State().Processes {
		if p.Name == name && p.PID != 0 {
			if err := syscall.Kill(p.PID, syscall.SIGKILL); err != nil {
				c.t.Fatal(err)
			}
			return
		}
	}
	c.t.Fatalf("no process %s runs", name)
}

// node returns a node of the cluster.
func (c *cluster) node(name string) *localcluster.NodeState {
	c.t.Helper()
	nodes := c.State().Nodes
	i := slices.IndexFunc(nodes, func(n localcluster.NodeState) bool { return n.Name == name })
	if i < 0 {
		c.t.Fatalf("no node %s", name)
	}
	return &nodes[i]
}

// holders is what the kubelet of a node says of its devices.
func (c *cluster) holders(node string) ([]podresources.Allocation, error) {
	ctx, cancel := context.WithTimeout(c.t.Context(), 5*time.Second)
	defer cancel()
	return podresources.List(ctx, c.node(node).PodResourcesSocket())
}

// running is what the containers that run on a node were really given: for each
// CDI name the pods that have it.
func (c *cluster) running(node string) map[string][]string {
	c.t.Helper()
	containers, err := c.Containers(node)
	if err != nil {
		c.t.Fatal(err)
	}
	given := make(map[string][]string)
	for _, k := range containers {
		if !k.Running {
			continue
		}
		for _, name := range k.CDIDevices {
			given[name] = append(given[name], k.Pod)
		}
	}
	return given
}

// assertGiven fails where a GPU was given to more containers than it has slots,
// or a device id is held twice.
func (c *cluster) assertGiven(node string, slots int) {
	c.t.Helper()
	for name, pods := range c.running(node) {
		if len(pods) > slots {
			c.t.Errorf("node %s: %s was given to %d pods, %d at most: %v", node, name, len(pods), slots, pods)
		}
	}
	// The kubelet does not list all pods at one moment, and lists a pod that has ended
	// until it has cleaned up after it. Its devices are given on before that, rightly.
	before := c.heldTwice(node)
	if len(before) == 0 {
		return
	}
	for id, pods := range c.heldTwice(node) {
		if before[id] == pods && c.alive(pods[0]) && c.alive(pods[1]) {
			c.t.Errorf("node %s: %s is held by %s and %s", node, id, pods[0], pods[1])
		}
	}
}

// alive tells whether the apiserver knows a pod that has not ended.
func (c *cluster) alive(name string) bool {
	c.t.Helper()
	got, err := c.client.CoreV1().Pods("default").Get(c.t.Context(), name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return false
	}
	if err != nil {
		c.t.Fatal(err)
	}
	return got.Status.Phase != corev1.PodSucceeded && got.Status.Phase != corev1.PodFailed
}

// heldTwice lists devices that the kubelet says two pods hold, with the pods.
func (c *cluster) heldTwice(node string) map[string][2]string {
	held, err := c.holders(node)
	if err != nil {
		return nil // the kubelet is on its way back; what containers were given tells
	}
	twice := make(map[string][2]string)
	seen := make(map[string]string)
	for _, h := range held {
		for _, id := range h.Devices {
			if other, again := seen[id]; again {
				twice[id] = [2]string{other, h.Pod}
			}
			seen[id] = h.Pod
			if _, err := gpu.ParseDeviceID(id); err != nil {
				c.t.Errorf("node %s: %v", node, err)
			}
		}
	}
	return twice
}

// events returns the messages of the node's Events with the reason.
func (c *cluster) events(node, reason string) []string {
	list, err := c.client.CoreV1().Events("default").List(c.t.Context(), metav1.ListOptions{})
	if err != nil {
		return []string{err.Error()}
	}
	var messages []string
	for _, e := range list.Items {
		if e.InvolvedObject.Name == node && e.Reason == reason {
			messages = append(messages, e.Message)
		}
	}
	return messages
}

// writeFile writes a file for the test.
func writeFile(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}
