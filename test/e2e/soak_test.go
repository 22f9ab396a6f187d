package e2e

import (
	"bytes"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
)

// soakFor is how long the soak takes, from $ASHLAR_SOAK; a short one is part of
// every run.
func soakFor(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("ASHLAR_SOAK")
	if text == "" {
		return 40 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("ASHLAR_SOAK: %v", err)
	}
	return d
}

// memory is the resident memory of a process of the cluster in KiB, 0 while it is
// away.
func (c *cluster) memory(process string) int {
	for _, p := range c.State().Processes {
		if p.Name != process || p.PID == 0 {
			continue
		}
		data, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", p.PID))
		if err != nil {
			return 0
		}
		for line := range bytes.Lines(data) {
			if rest, ok := bytes.CutPrefix(line, []byte("VmRSS:")); ok {
				n, err := strconv.Atoi(string(bytes.Fields(rest)[0]))
				if err != nil {
					return 0
				}
				return n
			}
		}
	}
	return 0
}

// TestSoak starts pods without end, whole GPUs on one node and slots on another,
// kills agents and kubelets at random moments, and asserts all the while that no
// device is given twice, and in the end that none is left behind. With a long
// ASHLAR_SOAK it prints the agents' memory over time.
func TestSoak(t *testing.T) {
	config := filepath.Join(t.TempDir(), "config.yaml")
	writeFile(t, config, timeSliced(10))
	c := up(t, "p4d.24xlarge,name=p4d", "g5.12xlarge,name=g5,config="+config)
	length := soakFor(t)
	// The seed does not matter: what is random is when the parts meet.
	r := rand.New(rand.NewPCG(1, uint64(length)))

	end := time.Now().Add(length)
	var wait sync.WaitGroup
	var mu sync.Mutex
	started, refused := 0, 0
	// Each lane runs one pod after the other. There are as many as fill the node, and
	// some more that wait.
	lane := func(node string, count, number int) {
		defer wait.Done()
		for i := 0; time.Now().Before(end); i++ {
			p := pod(fmt.Sprintf("s-%s-%d-%d", node, number, i), node, "nvidia.com/gpu", count)
			p.Annotations = map[string]string{"ashlar.dev/sim-duration": "300ms"}
			if _, err := c.client.CoreV1().Pods("default").Create(t.Context(), p, metav1.CreateOptions{}); err != nil {
				time.Sleep(200 * time.Millisecond)
				continue
			}
			for {
				got, err := c.client.CoreV1().Pods("default").Get(t.Context(), p.Name, metav1.GetOptions{})
				if err == nil && (got.Status.Phase == corev1.PodSucceeded || got.Status.Phase == corev1.PodFailed) {
					mu.Lock()
					if got.Status.Phase == corev1.PodSucceeded {
						started++
					} else {
						refused++
					}
					mu.Unlock()
					break
				}
				if t.Context().Err() != nil {
					return
				}
				time.Sleep(150 * time.Millisecond)
			}
			now := int64(0)
			_ = c.client.CoreV1().Pods("default").Delete(t.Context(), p.Name, metav1.DeleteOptions{GracePeriodSeconds: &now})
		}
	}
	for i := range 24 {
		wait.Add(1)
		go lane("g5", 1, i)
	}
	for i := range 8 {
		wait.Add(1)
		go lane("p4d", 1+i%3, i)
	}
	victims := []string{"agent/p4d", "agent/g5", "kubelet/p4d", "kubelet/g5"}
	nextKill, nextReport := time.Now().Add(5*time.Second), time.Now()
	kills := 0
	for time.Now().Before(end) {
		c.assertGiven("p4d", 1)
		c.assertGiven("g5", 10)
		if time.Now().After(nextKill) {
			victim := victims[r.IntN(len(victims))]
			for _, p := range c.State().Processes {
				if p.Name == victim && p.PID != 0 {
					c.kill(victim)
					kills++
				}
			}
			nextKill = time.Now().Add(time.Duration(10+r.IntN(20)) * time.Second)
		}
		if time.Now().After(nextReport) {
			mu.Lock()
			t.Logf("%s left: %d pods ran, %d were refused while a part was away, %d kills; agents: p4d %d KiB, g5 %d KiB",
				time.Until(end).Round(time.Second), started, refused, kills, c.memory("agent/p4d"), c.memory("agent/g5"))
			mu.Unlock()
			nextReport = time.Now().Add(min(length/4, time.Minute))
		}
		if t.Failed() {
			break
		}
		time.Sleep(250 * time.Millisecond)
	}
	wait.Wait()
	c.eventually(30*time.Second, "all is given back", func() string {
		for _, node := range []string{"p4d", "g5"} {
			if held, err := c.holders(node); err != nil || len(held) > 0 {
				return fmt.Sprint(node, ": ", held, err)
			}
		}
		return c.allocatable("p4d", "nvidia.com/gpu", 8) + c.allocatable("g5", "nvidia.com/gpu", 40)
	})
	for node, free := range map[string]int32{"p4d": 8, "g5": 4} {
		c.status(node, 20*time.Second, "GPUNode "+node, func(s *v1alpha1.GPUNodeStatus) string {
			if s.Summary.Free != free {
				return fmt.Sprintf("%d are free, want %d", s.Summary.Free, free)
			}
			return ""
		})
	}
	if started < int(length.Seconds()) {
		t.Errorf("%d pods ran in %s: too few to prove anything", started, length)
	}
	t.Logf("%d pods ran, %d were refused while a part was away, %d kills; agents: p4d %d KiB, g5 %d KiB",
		started, refused, kills, c.memory("agent/p4d"), c.memory("agent/g5"))
}
