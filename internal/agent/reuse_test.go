package agent

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
)

var (
	reuseNow = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	usedSlot = gpu.DeviceID{Base: "GPU-a", Slot: 2}
)

// asking is a pod in a phase that asks for a GPU in its main container, and more so
// as the options say.
func asking(name string, phase corev1.PodPhase, options ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: "ns", Name: name, UID: types.UID("uid-" + name)},
		Spec:       corev1.PodSpec{Containers: []corev1.Container{wanting("main", "nvidia.com/gpu")}},
		Status:     corev1.PodStatus{Phase: phase},
	}
	for _, o := range options {
		o(p)
	}
	return p
}

func wanting(name, of string) corev1.Container {
	return corev1.Container{Name: name, Resources: corev1.ResourceRequirements{
		Limits: corev1.ResourceList{corev1.ResourceName(of): resource.MustParse("1")},
	}}
}

func withInit(of string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Spec.InitContainers = append(p.Spec.InitContainers, wanting("init", of)) }
}

func withSidecar(p *corev1.Pod) {
	c := wanting("side", "nvidia.com/gpu")
	always := corev1.ContainerRestartPolicyAlways
	c.RestartPolicy = &always
	p.Spec.InitContainers = append(p.Spec.InitContainers, c)
}

func startedBefore(d time.Duration) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		at := metav1.NewTime(reuseNow.Add(-d))
		p.Status.StartTime = &at
	}
}

func withContainer(p *corev1.Pod) {
	p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "main"}}
}

func heldBySlot(pod string) heldBy {
	return heldBy{Holder: kube.Holder{Namespace: "ns", Pod: pod, Container: "main", Resource: "nvidia.com/gpu", Device: usedSlot, GPU: "GPU-a"}}
}

func TestADeviceInUseIsGivenAgainOnlyWhereItsHolderHasEnded(t *testing.T) {
	uid := func(h heldBy, uid string) heldBy { h.uid = types.UID(uid); return h }
	other := heldBySlot("p")
	other.Resource = "nvidia.com/gpu.shared"
	for _, test := range []struct {
		name    string
		holders []heldBy
		pods    []*corev1.Pod
		refused string // part of the error
	}{
		{"it runs", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("p", corev1.PodRunning)}, "held by container main of pod ns/p"},
		{"it waits for its image", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("p", corev1.PodPending)}, "pod ns/p"},
		{"it runs and had an init container", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("p", corev1.PodRunning, withInit("nvidia.com/gpu"))}, "pod ns/p"},
		{"it is gone", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("q", corev1.PodRunning)}, ""},
		{"it has ended", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("p", corev1.PodSucceeded)}, ""},
		{"it has failed", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("p", corev1.PodFailed)}, ""},
		{"one of two has ended", []heldBy{heldBySlot("p"), heldBySlot("q")}, []*corev1.Pod{asking("p", corev1.PodFailed), asking("q", corev1.PodRunning)}, "pod ns/q"},
		{"another pod has its name now", []heldBy{uid(heldBySlot("p"), "uid-before")}, []*corev1.Pod{asking("p", corev1.PodPending)}, ""},
		{"its own init container", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("p", corev1.PodPending, withInit("nvidia.com/gpu"))}, ""},
		{"an init container long ago", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("p", corev1.PodPending, withInit("nvidia.com/gpu"), startedBefore(time.Minute))}, "pod ns/p"},
		{"an init container of another resource", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("p", corev1.PodPending, withInit("nvidia.com/other"))}, "pod ns/p"},
		{"a sidecar keeps what it has", []heldBy{heldBySlot("p")}, []*corev1.Pod{asking("p", corev1.PodPending, withSidecar)}, "pod ns/p"},
		{"the holder is of another resource", []heldBy{other}, []*corev1.Pod{asking("p", corev1.PodRunning)}, "a moment ago"},
		{"nobody is known yet", nil, []*corev1.Pod{asking("p", corev1.PodPending)}, "a moment ago"},
		{"nobody is known yet, and a pod passes it on", nil, []*corev1.Pod{asking("p", corev1.PodPending, withInit("nvidia.com/gpu"))}, ""},
		{"nobody is known yet, and a pod was refused", nil, []*corev1.Pod{asking("p", corev1.PodFailed, startedBefore(time.Second))}, ""},
		{"nobody is known yet, and a pod was refused long ago", nil, []*corev1.Pod{asking("p", corev1.PodFailed, startedBefore(time.Minute))}, "a moment ago"},
		{"nobody is known yet, and a pod has failed in the end", nil, []*corev1.Pod{asking("p", corev1.PodFailed, withContainer, startedBefore(time.Second))}, "a moment ago"},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := mayReuse(reuseNow, test.pods, test.holders, "nvidia.com/gpu", usedSlot)
			if (err == nil) != (test.refused == "") || err != nil && !strings.Contains(err.Error(), test.refused) {
				t.Errorf("error is %v, want %q", err, test.refused)
			}
			if err != nil && !strings.Contains(err.Error(), usedSlot.String()) {
				t.Errorf("error is %v, does not name the device", err)
			}
		})
	}
}

func TestTheApiserverHasTimeToHearThatThePodHasEnded(t *testing.T) {
	asked := 0
	r := reuse{listPods: func(context.Context) ([]*corev1.Pod, error) {
		asked++
		if asked < 3 {
			return []*corev1.Pod{asking("p", corev1.PodRunning)}, nil
		}
		return []*corev1.Pod{asking("p", corev1.PodSucceeded)}, nil
	}}
	r.holders.Store(&[]heldBy{heldBySlot("p")})
	if err := r.check(t.Context(), "nvidia.com/gpu", []gpu.DeviceID{usedSlot}); err != nil || asked != 3 {
		t.Errorf("asked %d times, error is %v", asked, err)
	}
}

func TestWithoutAnAnswerOfTheApiserverNothingIsGivenTwice(t *testing.T) {
	away := errors.New("away")
	r := reuse{listPods: func(context.Context) ([]*corev1.Pod, error) { return nil, away }}
	if err := r.check(t.Context(), "nvidia.com/gpu", []gpu.DeviceID{usedSlot}); !errors.Is(err, away) || !strings.Contains(err.Error(), "GPU-a::2") {
		t.Errorf("error is %v", err)
	}
}

func TestEveryDeviceInUseIsJudged(t *testing.T) {
	r := reuse{listPods: func(context.Context) ([]*corev1.Pod, error) {
		return []*corev1.Pod{asking("p", corev1.PodSucceeded), asking("q", corev1.PodRunning)}, nil
	}}
	second := heldBySlot("q")
	second.Device = gpu.DeviceID{Base: "GPU-b", Slot: gpu.NoSlot}
	r.holders.Store(&[]heldBy{heldBySlot("p"), second})
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the wait is not what is tested
	ids := []gpu.DeviceID{usedSlot, second.Device}
	for range 2 {
		if err := r.check(ctx, "nvidia.com/gpu", ids); err == nil || !strings.Contains(err.Error(), "GPU-b is held by container main of pod ns/q") {
			t.Errorf("error is %v", err)
		}
		slices.Reverse(ids)
	}
}
