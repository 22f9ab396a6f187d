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
	"github.com/ashlar-gpu/ashlar/internal/podresources"
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

func mirrorOf(uid string) func(*corev1.Pod) {
	return func(p *corev1.Pod) { p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: uid} }
}

// noted is an entry of the kubelet's checkpoint that says that the pod has the slot.
func noted(pod string) podresources.Entry {
	return podresources.Entry{PodUID: "uid-" + pod, Container: "main", Resource: "nvidia.com/gpu", Devices: []string{"GPU-z", usedSlot.String()}}
}

func entries(of ...podresources.Entry) func() ([]podresources.Entry, error) {
	return func() ([]podresources.Entry, error) { return of, nil }
}

func TestADeviceInUseIsGivenAgainOnlyWhereItsHolderHasEnded(t *testing.T) {
	otherResource, otherDevice := noted("p"), noted("p")
	otherResource.Resource = "nvidia.com/gpu.shared"
	otherDevice.Devices = []string{"GPU-a::1", "GPU-a"}
	type noteds = []podresources.Entry
	for _, test := range []struct {
		name    string
		entries noteds
		pods    []*corev1.Pod
		refused string // part of the error
	}{
		{"it runs", noteds{noted("p")}, []*corev1.Pod{asking("p", corev1.PodRunning)}, "held by container main of pod ns/p"},
		{"it waits for its image", noteds{noted("p")}, []*corev1.Pod{asking("p", corev1.PodPending)}, "pod ns/p"},
		{"it runs and had an init container", noteds{noted("p")}, []*corev1.Pod{asking("p", corev1.PodRunning, withInit("nvidia.com/gpu"))}, "pod ns/p"},
		{"it is gone", noteds{noted("p")}, []*corev1.Pod{asking("q", corev1.PodRunning)}, ""},
		{"it has ended", noteds{noted("p")}, []*corev1.Pod{asking("p", corev1.PodSucceeded)}, ""},
		{"it has failed", noteds{noted("p")}, []*corev1.Pod{asking("p", corev1.PodFailed)}, ""},
		{"one of two has ended", noteds{noted("p"), noted("q")}, []*corev1.Pod{asking("p", corev1.PodFailed), asking("q", corev1.PodRunning)}, "pod ns/q"},
		{"another pod has its name now", noteds{noted("before")}, []*corev1.Pod{asking("p", corev1.PodPending)}, ""},
		{"a static pod runs", noteds{noted("static")}, []*corev1.Pod{asking("p", corev1.PodRunning, mirrorOf("uid-static"))}, "pod ns/p"},
		{"its own init container", noteds{noted("p")}, []*corev1.Pod{asking("p", corev1.PodPending, withInit("nvidia.com/gpu"))}, ""},
		{"an init container long ago", noteds{noted("p")}, []*corev1.Pod{asking("p", corev1.PodPending, withInit("nvidia.com/gpu"), startedBefore(time.Minute))}, "pod ns/p"},
		{"an init container of another resource", noteds{noted("p")}, []*corev1.Pod{asking("p", corev1.PodPending, withInit("nvidia.com/other"))}, "pod ns/p"},
		{"a sidecar keeps what it has", noteds{noted("p")}, []*corev1.Pod{asking("p", corev1.PodPending, withSidecar)}, "pod ns/p"},
		{"the holder is of another resource", noteds{otherResource}, []*corev1.Pod{asking("p", corev1.PodRunning)}, ""},
		{"the holder has other devices", noteds{otherDevice}, []*corev1.Pod{asking("p", corev1.PodRunning)}, ""},
		{"the kubelet was lost before it noted anything", nil, []*corev1.Pod{asking("p", corev1.PodPending)}, ""},
	} {
		t.Run(test.name, func(t *testing.T) {
			err := mayReuse(reuseNow, test.pods, test.entries, "nvidia.com/gpu", usedSlot)
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
	r := reuse{checkpoint: entries(noted("p")), listPods: func(context.Context) ([]*corev1.Pod, error) {
		asked++
		if asked < 3 {
			return []*corev1.Pod{asking("p", corev1.PodRunning)}, nil
		}
		return []*corev1.Pod{asking("p", corev1.PodSucceeded)}, nil
	}}
	if err := r.check(t.Context(), "nvidia.com/gpu", []gpu.DeviceID{usedSlot}); err != nil || asked != 3 {
		t.Errorf("asked %d times, error is %v", asked, err)
	}
}

func TestWhereNobodySaysWhoHoldsADeviceItIsNotGivenAgain(t *testing.T) {
	away := errors.New("away")
	running := func(context.Context) ([]*corev1.Pod, error) { return nil, nil }
	for name, r := range map[string]reuse{
		"apiserver": {checkpoint: entries(), listPods: func(context.Context) ([]*corev1.Pod, error) { return nil, away }},
		"kubelet":   {checkpoint: func() ([]podresources.Entry, error) { return nil, away }, listPods: running},
	} {
		err := r.check(t.Context(), "nvidia.com/gpu", []gpu.DeviceID{usedSlot})
		if !errors.Is(err, away) || !strings.Contains(err.Error(), "GPU-a::2") || !strings.Contains(err.Error(), name) {
			t.Errorf("%s: error is %v", name, err)
		}
	}
}

func TestEveryDeviceInUseIsJudged(t *testing.T) {
	second := noted("q")
	second.Devices = []string{"GPU-b"}
	r := reuse{checkpoint: entries(noted("p"), second), listPods: func(context.Context) ([]*corev1.Pod, error) {
		return []*corev1.Pod{asking("p", corev1.PodSucceeded), asking("q", corev1.PodRunning)}, nil
	}}
	ctx, cancel := context.WithCancel(t.Context())
	cancel() // the wait is not what is tested
	ids := []gpu.DeviceID{usedSlot, {Base: "GPU-b", Slot: gpu.NoSlot}}
	for range 2 {
		if err := r.check(ctx, "nvidia.com/gpu", ids); err == nil || !strings.Contains(err.Error(), "GPU-b is held by container main of pod ns/q") {
			t.Errorf("error is %v", err)
		}
		slices.Reverse(ids)
	}
}
