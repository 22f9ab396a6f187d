package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/podresources"
)

const (
	// reuseWait is how long the apiserver may take to hear that a pod has ended of
	// which the kubelet knows it. The kubelet admits no other pod meanwhile.
	reuseWait = 3 * time.Second
	// reusePoll is the pause between two looks.
	reusePoll = 200 * time.Millisecond
	// admission is how long after the kubelet has taken in a pod its allocations may be
	// those that are judged.
	admission = 10 * time.Second
)

// reuse judges whether devices that are in use may be given again. See the ADR on
// devices given twice for the cases in which a kubelet does so rightly. It is safe
// for concurrent use.
type reuse struct {
	// checkpoint reads what the kubelet has noted down of its allocations. It does so
	// for one container before it allocates for the next.
	checkpoint func() ([]podresources.Entry, error)
	// listPods lists the pods that are bound to the node now.
	listPods func(context.Context) ([]*corev1.Pod, error)
}

// check says why devices of a resource that are in use must not be given, nil where
// they may. It waits a while for the apiserver to hear of the end of a pod.
func (r *reuse) check(ctx context.Context, resource string, ids []gpu.DeviceID) error {
	ctx, cancel := context.WithTimeout(ctx, reuseWait)
	defer cancel()
	entries, err := r.checkpoint()
	if err != nil {
		return fmt.Errorf("%s in use, and the kubelet's checkpoint does not say by whom: %w", are(ids), err)
	}
	for {
		pods, err := r.listPods(ctx)
		if err != nil {
			return fmt.Errorf("%s in use, and the apiserver does not say whether that has ended: %w", are(ids), err)
		}
		var errs []error
		for _, id := range ids {
			errs = append(errs, mayReuse(time.Now(), pods, entries, resource, id))
		}
		if err = errors.Join(errs...); err == nil {
			return nil
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(reusePoll):
		}
	}
}

func are(ids []gpu.DeviceID) string {
	texts := make([]string, len(ids))
	for i, id := range ids {
		texts[i] = id.String()
	}
	if len(texts) == 1 {
		return texts[0] + " is"
	}
	return strings.Join(texts, ", ") + " are"
}

// mayReuse says why a device in use must not be given, nil where it may: all that the
// kubelet has given it to have ended, or hold it for an init container alone.
func mayReuse(now time.Time, pods []*corev1.Pod, entries []podresources.Entry, resource string, id gpu.DeviceID) error {
	for _, e := range entries {
		if e.Resource != resource || !slices.Contains(e.Devices, id.String()) {
			continue
		}
		for _, pod := range pods {
			if !known(pod, e.PodUID) || ended(pod) || passesOn(now, pod, resource) {
				continue
			}
			return fmt.Errorf("%s is held by container %s of pod %s/%s, which has not ended; the pod will find another one when it is created again",
				id, e.Container, pod.Namespace, pod.Name)
		}
	}
	return nil
}

// passesOn says whether the pod is being admitted and may have devices that containers
// after an init container shall have as well.
func passesOn(now time.Time, pod *corev1.Pod, resource string) bool {
	started := pod.Status.StartTime
	return pod.Status.Phase == corev1.PodPending && (started == nil || now.Sub(started.Time) < admission) && slices.ContainsFunc(
		kube.GPURequests(pod, map[string]bool{resource: true}),
		func(r kube.ContainerRequest) bool { return r.Resource == resource && r.Kind == kube.InitContainer },
	)
}
