package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/ashlar-gpu/ashlar/internal/machine"
)

func resourceQuantity(n int) *resource.Quantity {
	return resource.NewQuantity(int64(n), resource.DecimalSI)
}

// timeSliced is a config with so many slots per GPU.
func timeSliced(replicas int) string {
	return fmt.Sprintf("version: v1\nsharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: %d\n", replicas)
}

const exclusive = `version: v1
sharing:
  timeSlicing:
    resources:
    - name: nvidia.com/gpu
      replicas: 4
    - name: nvidia.com/gpu-exclusive
      replicas: 1
`

// TestConfigEdit edits the config of a running agent, well and badly.
func TestConfigEdit(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, timeSliced(4))
	c := up(t, "g5.12xlarge,name=g5,config="+config)
	if problem := c.allocatable("g5", "nvidia.com/gpu", 16); problem != "" {
		t.Fatal(problem)
	}
	before := c.State().Processes

	writeFile(t, config, timeSliced(8))
	c.eventually(15*time.Second, "8 replicas", func() string { return c.allocatable("g5", "nvidia.com/gpu", 32) })

	writeFile(t, config, strings.Replace(timeSliced(2), "replicas", "replicaz", 1))
	c.eventually(15*time.Second, "an Event about the bad config", func() string {
		for _, m := range c.events("g5", "DevicePluginConfigRejected") {
			if strings.Contains(m, config+":6") && strings.Contains(m, "replicaz") && strings.Contains(m, "replicas") {
				return ""
			}
		}
		return fmt.Sprintf("%q", c.events("g5", "DevicePluginConfigRejected"))
	})
	if problem := c.allocatable("g5", "nvidia.com/gpu", 32); problem != "" {
		t.Errorf("after the bad edit: %s", problem)
	}
	for i, p := range c.State().Processes {
		if p.PID != before[i].PID {
			t.Errorf("%s was restarted", p.Name)
		}
	}
	// The last good config survives the agent.
	c.kill("agent/g5")
	c.deploy(pod("after", "g5", "nvidia.com/gpu", 1), 20)
	c.eventually(30*time.Second, "pods after the bad edit and a crash", func() string {
		return c.available("after") + c.allocatable("g5", "nvidia.com/gpu", 32)
	})
}

// TestExclusiveView gives one view of each GPU and asks for the other.
func TestExclusiveView(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, exclusive)
	c := up(t, "g5.12xlarge,name=g5,config="+config)
	views := func(shared, whole int64) func() string {
		return func() string {
			return c.allocatable("g5", "nvidia.com/gpu", shared) + c.allocatable("g5", "nvidia.com/gpu-exclusive", whole)
		}
	}
	c.eventually(5*time.Second, "both views", views(16, 4))

	c.create(pod("whole", "g5", "nvidia.com/gpu-exclusive", 1))
	c.eventually(20*time.Second, "exclusive pod", func() string { return c.phases(corev1.PodRunning, "whole") })
	c.eventually(15*time.Second, "slots of its GPU withdrawn", views(12, 4))

	c.create(pod("shared", "g5", "nvidia.com/gpu", 2))
	c.eventually(20*time.Second, "sharing pod", func() string { return c.phases(corev1.PodRunning, "shared") })
	// Two slots are on two GPUs, which no one can have whole now.
	c.eventually(15*time.Second, "their exclusive views withdrawn", views(12, 2))
	for name, pods := range c.running("g5") {
		if len(pods) > 1 {
			t.Errorf("%s was given to %v", name, pods)
		}
	}
	if n := len(c.running("g5")); n != 3 {
		t.Errorf("%d GPUs are in use, want 3", n)
	}

	// A kubelet that starts again knows its pods, and the agent asks it first.
	c.kill("kubelet/g5")
	c.eventually(30*time.Second, "views after the kubelet's restart", views(12, 2))

	c.remove("whole", "shared")
	c.eventually(20*time.Second, "both views given back", views(16, 4))
}

// TestHeldAcrossConfigChange changes the view of a GPU that a pod holds.
func TestHeldAcrossConfigChange(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, "version: v1\n")
	c := up(t, "g5.12xlarge,name=g5,config="+config)
	c.create(pod("whole", "g5", "nvidia.com/gpu", 1))
	c.eventually(20*time.Second, "pod", func() string { return c.phases(corev1.PodRunning, "whole") })

	writeFile(t, config, timeSliced(4))
	c.eventually(15*time.Second, "slots of the three other GPUs", func() string { return c.allocatable("g5", "nvidia.com/gpu", 12) })
	c.create(pod("a", "g5", "nvidia.com/gpu", 3))
	c.eventually(20*time.Second, "three slots", func() string { return c.phases(corev1.PodRunning, "a") })
	for name, pods := range c.running("g5") {
		if len(pods) > 1 {
			t.Errorf("%s was given to %v", name, pods)
		}
	}
	c.remove("whole")
	c.eventually(20*time.Second, "slots of all GPUs", func() string { return c.allocatable("g5", "nvidia.com/gpu", 16) })
}

// TestLostGPU loses a GPU and finds it again.
func TestLostGPU(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, timeSliced(4))
	c := up(t, "g5.12xlarge,name=g5,config="+config)
	hardware, err := machine.Open(c.node("g5").MachineDir)
	if err != nil {
		t.Fatal(err)
	}
	defer hardware.Close()
	m, err := hardware.Read()
	if err != nil {
		t.Fatal(err)
	}
	if err := hardware.SetLost(m.GPUs[2].UUID, true); err != nil {
		t.Fatal(err)
	}
	c.eventually(15*time.Second, "all slots of the lost GPU gone", func() string { return c.allocatable("g5", "nvidia.com/gpu", 12) })
	c.create(pod("all", "g5", "nvidia.com/gpu", 3))
	c.eventually(20*time.Second, "pod on the others", func() string { return c.phases(corev1.PodRunning, "all") })
	for name := range c.running("g5") {
		if strings.HasSuffix(name, m.GPUs[2].UUID) {
			t.Errorf("the lost GPU was given")
		}
	}
	if err := hardware.SetLost(m.GPUs[2].UUID, false); err != nil {
		t.Fatal(err)
	}
	c.eventually(15*time.Second, "its slots back", func() string { return c.allocatable("g5", "nvidia.com/gpu", 16) })
}
