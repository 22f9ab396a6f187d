package migmanager

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	policyv1 "k8s.io/api/policy/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ashlar-gpu/ashlar/internal/mig"
)

const (
	// drainPoll is how often it is looked whether pods have gone.
	drainPoll = 250 * time.Millisecond
	// evictAgain is when a pod that is still there is evicted again: a budget may
	// allow now what it refused.
	evictAgain = 2 * time.Second
)

// drain evicts the pods that hold what the changes destroy, and returns when
// nothing of it is in use. Its error names the pods that did not go.
func (m *Manager) drain(ctx context.Context, changes []*mig.Change) error {
	deadline := time.Now().Add(m.DrainTimeout)
	asked := make(map[types.NamespacedName]time.Time)
	refused := make(map[types.NamespacedName]string)
	for {
		busy := make(map[string]bool)
		for _, c := range changes {
			for _, base := range goes(c, m.Node.InUse(c.GPU)) {
				busy[base] = true
			}
		}
		if len(busy) == 0 {
			return nil
		}
		pods := make(map[types.NamespacedName]bool)
		for _, h := range m.Node.Look().Holders {
			if busy[h.Base] {
				pods[h.NamespacedName] = true
			}
		}
		now := time.Now()
		if now.After(deadline) {
			return fmt.Errorf("%s still in use after %s: %s", strings.Join(slices.Sorted(maps.Keys(busy)), ", "), m.DrainTimeout, stayed(pods, refused))
		}
		for pod := range pods {
			if now.Sub(asked[pod]) < evictAgain {
				continue
			}
			asked[pod] = now
			delete(refused, pod)
			if err := m.evict(ctx, pod); err != nil {
				refused[pod] = err.Error()
				continue
			}
			m.Log.Info("evicted for a MIG change", "pod", pod)
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(drainPoll):
		}
	}
}

// evict asks for the end of a pod. One that is gone is no error.
func (m *Manager) evict(ctx context.Context, pod types.NamespacedName) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := m.Client.PolicyV1().Evictions(pod.Namespace).Evict(ctx, &policyv1.Eviction{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name},
	})
	if apierrors.IsNotFound(err) {
		return nil
	}
	return err
}

// stayed says which pods are in the way.
func stayed(pods map[types.NamespacedName]bool, refused map[types.NamespacedName]string) string {
	if len(pods) == 0 {
		return "the kubelet names no pod that holds it"
	}
	var texts []string
	for pod := range pods {
		text := "pod " + pod.String() + " does not end"
		if why, ok := refused[pod]; ok {
			text = "pod " + pod.String() + " cannot be evicted: " + why
		}
		texts = append(texts, text)
	}
	slices.Sort(texts)
	return strings.Join(texts, "; ")
}

// pause stops NVIDIA's own clients and returns when no process is left on the
// GPUs that must be idle.
func (m *Manager) pause(ctx context.Context, changes []*mig.Change) error {
	if err := m.pauseClients(ctx, m.Node.Look().Labels); err != nil {
		return fmt.Errorf("pause NVIDIA's programs on the node: %w", err)
	}
	deadline := time.Now().Add(m.DrainTimeout)
	for {
		var busy []string
		for _, c := range changes {
			if !c.NeedsIdle {
				continue
			}
			processes, err := m.Hardware.Processes(c.GPU)
			if err != nil {
				return err
			}
			for _, p := range processes {
				busy = append(busy, fmt.Sprintf("process %d on GPU %d", p.PID, c.Index))
			}
		}
		if len(busy) == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("GPUs are still in use after %s: %s", m.DrainTimeout, strings.Join(busy, ", "))
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(drainPoll):
		}
	}
}
