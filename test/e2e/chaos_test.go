package e2e

import (
	"fmt"
	"path/filepath"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
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
		var pods []*corev1.Pod
		var names []string
		add := func(node, resource string, count, n int) {
			for i := range n {
				name := fmt.Sprintf("r%d-%s-%s-%d", round, node, filepath.Base(resource), i)
				names = append(names, name)
				pods = append(pods, pod(name, node, resource, count))
			}
		}
		add("p4d", "nvidia.com/gpu", 1, 4)
		add("p4d", "nvidia.com/gpu", 4, 1)
		add("g5", "nvidia.com/gpu", 1, 6)
		half := len(pods) / 2
		c.create(pods[:half]...)
		for _, v := range victims {
			c.kill(v)
		}
		c.create(pods[half:]...)

		c.eventually(patience, fmt.Sprintf("all pods run after %v died", victims), func() string {
			c.assertGiven("p4d", 1)
			c.assertGiven("g5", 4)
			return c.phases(corev1.PodRunning, names...)
		})
		c.eventually(patience, "resource counts", func() string {
			return c.allocatable("p4d", "nvidia.com/gpu", 8) + c.allocatable("g5", "nvidia.com/gpu", 16)
		})
		if n := len(c.running("p4d")); n != 8 {
			t.Errorf("p4d: %d GPUs are in use, want 8", n)
		}
		c.remove(names...)
		c.eventually(patience, "all given back", func() string {
			if held, err := c.holders("p4d"); err != nil || len(held) > 0 {
				return fmt.Sprint("p4d: ", held, err)
			}
			return c.allocatable("g5", "nvidia.com/gpu", 16) + c.allocatable("g5", "nvidia.com/gpu-exclusive", 4)
		})
	}
}

// TestKubeletForgetsNoInitContainer restarts kubelet and agent at once while an
// init container's larger set of GPUs is held.
func TestKubeletForgetsNoInitContainer(t *testing.T) {
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
	c.eventually(20*time.Second, "pod", func() string { return c.phases(corev1.PodRunning, "init") })
	check := func() string { return c.allocatable("g5", "nvidia.com/gpu", 8) }
	c.eventually(15*time.Second, "slots of both GPUs withdrawn", check)

	c.kill("kubelet/g5")
	c.kill("agent/g5")
	c.eventually(30*time.Second, "slots of both GPUs still withdrawn", check)
	for range 20 {
		time.Sleep(200 * time.Millisecond)
		if problem := check(); problem != "" {
			t.Fatal(problem)
		}
	}
}
