package agent

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
)

const (
	// reuseWait is how long the apiserver may take to hear that a pod has ended of
	// which the kubelet knows it. The kubelet admits no other pod meanwhile.
	reuseWait = 3 * time.Second
	// reusePoll is the pause between two looks.
	reusePoll = 200 * time.Millisecond
	// admission is how long after the kubelet has taken in or refused a pod its
	// allocations may be those that are judged.
	admission = 10 * time.Second
)

// reuse judges whether devices that are in use may be given again. See the ADR on
// devices given twice for the cases in which a kubelet does so rightly. It is safe
// for concurrent use.
type reuse struct {
	// listPods lists the pods that are bound to the node now.
	listPods func(context.Context) ([]*corev1.Pod, error)
	holders  atomic.Pointer[[]heldBy]
}

// heldBy is a holder with the UID of its pod, "" where that was not known.
type heldBy struct {
	kube.Holder
	uid types.UID
}

// check says why devices of a resource that are in use must not be given, nil where
// they may. It waits a while for the apiserver to hear of the end of a pod.
func (r *reuse) check(ctx context.Context, resource string, ids []gpu.DeviceID) error {
	ctx, cancel := context.WithTimeout(ctx, reuseWait)
	defer cancel()
	for {
		pods, err := r.listPods(ctx)
		if err != nil {
			return fmt.Errorf("%s in use, and the apiserver does not say whether that has ended: %w", are(ids), err)
		}
		var holders []heldBy
		if known := r.holders.Load(); known != nil {
			holders = *known
		}
		var errs []error
		for _, id := range ids {
			errs = append(errs, mayReuse(time.Now(), pods, holders, resource, id))
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

// mayReuse says why a device in use must not be given, nil where it may: its holders
// have ended or hold it for an init container alone, or nobody is known to hold it
// and a pod is there that explains it.
func mayReuse(now time.Time, pods []*corev1.Pod, holders []heldBy, resource string, id gpu.DeviceID) error {
	known := false
	for _, h := range holders {
		if h.Resource != resource || h.Device != id {
			continue
		}
		known = true
		for _, pod := range pods {
			if pod.Namespace != h.Namespace || pod.Name != h.Pod || h.uid != "" && h.uid != pod.UID || ended(pod) || passesOn(now, pod, resource) {
				continue
			}
			return fmt.Errorf("%s is held by container %s of pod %s/%s, which has not ended; the pod will find another one when it is created again",
				id, h.Container, h.Namespace, h.Pod)
		}
	}
	explains := func(pod *corev1.Pod) bool { return passesOn(now, pod, resource) || rejected(now, pod, resource) }
	if !known && !slices.ContainsFunc(pods, explains) {
		return fmt.Errorf("%s was given a moment ago; the pod will find another one when it is created again", id)
	}
	return nil
}

// passesOn says whether the pod is being admitted and may have devices that containers
// after an init container shall have as well.
func passesOn(now time.Time, pod *corev1.Pod, resource string) bool {
	return pod.Status.Phase == corev1.PodPending && lately(now, pod) && asks(pod, resource, kube.InitContainer)
}

// rejected says whether the kubelet has just refused the pod, after it may have been
// given devices.
func rejected(now time.Time, pod *corev1.Pod, resource string) bool {
	return pod.Status.Phase == corev1.PodFailed && len(pod.Status.ContainerStatuses) == 0 && lately(now, pod) &&
		asks(pod, resource, kube.MainContainer, kube.InitContainer, kube.Sidecar)
}

func lately(now time.Time, pod *corev1.Pod) bool {
	started := pod.Status.StartTime
	return started == nil || now.Sub(started.Time) < admission
}

func asks(pod *corev1.Pod, resource string, kinds ...kube.ContainerKind) bool {
	return slices.ContainsFunc(kube.GPURequests(pod, map[string]bool{resource: true}), func(r kube.ContainerRequest) bool {
		return r.Resource == resource && slices.Contains(kinds, r.Kind)
	})
}
