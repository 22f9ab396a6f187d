package e2e

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// TestKillWhilePodsStart kills the agent, the kubelet and the apiserver, each
// while pods start, and asserts at every moment that no device is given twice.
func TestKillWhilePodsStart(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, exclusive)
	c := up(t, "p4d.24xlarge,name=p4d", "g5.12xlarge,name=g5,config="+config)
	const patience = 30 * time.Second

	for round, victims := range [][]string{
		{"agent/p4d", "agent/g5"},
		{"kubelet/p4d", "kubelet/g5"},
		{"kube-apiserver"},
		{"agent/g5", "kubelet/p4d", "kubelet/g5", "kube-apiserver"},
	} {
		t.Logf("kill %v", victims)
		ones, fours, slots := fmt.Sprintf("ones-%d", round), fmt.Sprintf("fours-%d", round), fmt.Sprintf("slots-%d", round)
		c.deploy(pod(ones, "p4d", "nvidia.com/gpu", 1), 4)
		for _, v := range victims {
			c.kill(v)
		}
		c.deploy(pod(fours, "p4d", "nvidia.com/gpu", 4), 1)
		c.deploy(pod(slots, "g5", "nvidia.com/gpu", 1), 12)

		c.eventually(patience, fmt.Sprintf("all pods run after %v died", victims), func() string {
			c.assertGiven("p4d", 1)
			c.assertGiven("g5", 4)
			return c.available(ones, fours, slots)
		})
		c.eventually(patience, "resource counts", func() string {
			return c.allocatable("p4d", "nvidia.com/gpu", 8) + c.allocatable("g5", "nvidia.com/gpu", 16)
		})
		if n := len(c.running("p4d")); n != 8 {
			t.Errorf("p4d: %d GPUs are in use, want 8", n)
		}
		c.removeDeployments(ones, fours, slots)
		c.eventually(patience, "all given back", func() string {
			if held, err := c.holders("p4d"); err != nil || len(held) > 0 {
				return fmt.Sprint("p4d: ", held, err)
			}
			return c.allocatable("g5", "nvidia.com/gpu", 16) + c.allocatable("g5", "nvidia.com/gpu-exclusive", 4)
		})
	}
}

// TestHoldersSurviveCrashes asks an agent that knows nothing for what it offers
// while devices are held that the kubelet's pod-resources API does not name:
// those of an init container, and right after the kubelet's start all.
func TestHoldersSurviveCrashes(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, exclusive)
	c := up(t, "g5.12xlarge,name=g5,config="+config)
	p := pod("init", "g5", "nvidia.com/gpu-exclusive", 1)
	first := *p.Spec.Containers[0].DeepCopy()
	first.Name = "first"
	first.Resources.Limits["nvidia.com/gpu-exclusive"] = *resourceQuantity(2)
	p.Spec.InitContainers = append(p.Spec.InitContainers, first)
	p.Annotations = map[string]string{"ashlar.dev/sim-duration": "first=1s"}
	c.create(p)
	c.eventually(20*time.Second, "pod with init container", func() string { return c.phases(corev1.PodRunning, "init") })
	c.eventually(15*time.Second, "slots of both GPUs withdrawn", func() string { return c.allocatable("g5", "nvidia.com/gpu", 8) })
	c.killAndWatch(8, "agent/g5")

	// On its restart a kubelet rejects pods whose init container had a device, so
	// this one goes first.
	c.remove("init")
	c.create(pod("plain", "g5", "nvidia.com/gpu-exclusive", 1))
	c.eventually(20*time.Second, "pod", func() string { return c.phases(corev1.PodRunning, "plain") })
	c.eventually(15*time.Second, "slots of its GPU withdrawn", func() string { return c.allocatable("g5", "nvidia.com/gpu", 12) })
	c.killAndWatch(12, "kubelet/g5", "agent/g5")
	if problem := c.phases(corev1.PodRunning, "plain"); problem != "" {
		t.Error(problem)
	}
}

// killAndWatch kills processes of g5 and fails if ever more than the given number
// of slots are offered, or not so many in the end.
func (c *cluster) killAndWatch(most int64, victims ...string) {
	c.t.Helper()
	restarts := func() int {
		n := 0
		for _, p := range c.State().Processes {
			n += p.Restarts
		}
		return n
	}
	before := restarts()
	for _, v := range victims {
		c.kill(v)
	}
	slots := int64(0)
	for end := time.Now().Add(15 * time.Second); time.Now().Before(end); time.Sleep(200 * time.Millisecond) {
		n, err := c.client.CoreV1().Nodes().Get(c.t.Context(), "g5", metav1.GetOptions{})
		if err != nil {
			c.t.Fatal(err)
		}
		have := n.Status.Allocatable["nvidia.com/gpu"]
		slots = have.Value()
		if slots > most {
			c.t.Fatalf("after %v died %d slots are offered, %d are free", victims, slots, most)
		}
	}
	if n := restarts() - before; n != len(victims) {
		c.t.Errorf("%d processes were started again, want %v", n, victims)
	}
	if slots != most {
		c.t.Errorf("after %v died %d slots are offered in the end, want %d", victims, slots, most)
	}
}
