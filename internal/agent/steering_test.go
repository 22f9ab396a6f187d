package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/deviceplugin"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/podresources"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

const gpuResource = "nvidia.com/gpu"

// guided is a steering with the pods that the apiserver has.
type guided struct {
	*steering
	clock time.Time
	pods  []*corev1.Pod
	err   error
	// troubles and bad are what was told.
	troubles []error
	bad      []string
}

func guide() *guided {
	g := &guided{clock: time.Date(2030, 1, 1, 12, 0, 0, 0, time.UTC)}
	g.steering = newSteering("node", func(ctx context.Context) ([]*corev1.Pod, error) {
		if _, bounded := ctx.Deadline(); !bounded {
			return nil, errors.New("the list of pods may take for ever")
		}
		return g.pods, g.err
	}, slog.New(slog.DiscardHandler))
	g.now, g.began = func() time.Time { return g.clock }, g.clock
	g.listed = func(err error) { g.troubles = append(g.troubles, err) }
	g.invalid = func(pod *corev1.Pod, _ error) { g.bad = append(g.bad, pod.Name) }
	return g
}

// part is a container with its plan.
type part struct {
	name    string
	init    bool
	devices []string
}

// pod makes a waiting pod of the node, a second younger than the one before.
func (g *guided) pod(name string, parts ...part) *corev1.Pod {
	plan := kube.DevicePlan{Node: "node"}
	pod := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{
		Namespace: "d", Name: name, UID: types.UID(name + "-" + g.clock.String()), CreationTimestamp: metav1.NewTime(g.clock),
	}}
	g.clock = g.clock.Add(time.Second)
	for _, p := range parts {
		plan.Containers = append(plan.Containers, kube.ContainerDevices{Name: p.name, Resource: gpuResource, Devices: p.devices})
		c := corev1.Container{Name: p.name}
		c.Resources.Limits = corev1.ResourceList{gpuResource: *resource.NewQuantity(int64(len(p.devices)), resource.DecimalSI)}
		if p.init {
			pod.Spec.InitContainers = append(pod.Spec.InitContainers, c)
		} else {
			pod.Spec.Containers = append(pod.Spec.Containers, c)
		}
	}
	pod.Annotations = map[string]string{v1alpha1.AnnotationDevices: plan.String()}
	g.pods = append(g.pods, pod)
	return pod
}

// ask asks a question of the kubelet.
func (g *guided) ask(t *testing.T, size int, available, required []string, want ...string) {
	t.Helper()
	got := g.wish(t.Context(), gpuResource, available, required, size)
	slices.Sort(got)
	if !slices.Equal(got, want) {
		t.Errorf("the wish for %d of %v is %v, want %v", size, available, got, want)
	}
}

func holds(pod, container string, ids ...string) podresources.Allocation {
	return podresources.Allocation{Namespace: "d", Pod: pod, Container: container, Resource: gpuResource, Devices: ids}
}

// read tells what containers hold, and checks the counters since the start.
func (g *guided) read(t *testing.T, matched, swapped, mismatched int64, holdings ...podresources.Allocation) []v1alpha1.Mismatch {
	t.Helper()
	g.clock = g.clock.Add(2 * time.Second)
	mismatches := g.settle(g.clock, g.pods, holdings)
	got := g.status()
	got.Last = nil
	if want := (v1alpha1.SteeringStatus{Matched: matched, Swapped: swapped, Mismatched: mismatched}); !cmp.Equal(got, want) {
		t.Errorf("counters are %+v, want %+v", got, want)
	}
	return mismatches
}

func gpus(letters string) []string {
	var ids []string
	for _, l := range letters {
		ids = append(ids, "GPU-"+string(l))
	}
	return ids
}

func TestSteeringOfEqualPodsThatSwap(t *testing.T) {
	g := guide()
	g.pod("first", part{name: "c", devices: gpus("b")})
	g.pod("second", part{name: "c", devices: gpus("d")})
	g.pod("third", part{name: "c", devices: gpus("c")})
	// The kubelet asks for the second one first, which nobody can know.
	g.ask(t, 1, gpus("abcd"), nil, "GPU-b")
	if got := g.read(t, 0, 1, 0, holds("second", "c", "GPU-b")); got != nil {
		t.Errorf("mismatches %v", got)
	}
	// What the second one has left is the first one's now.
	g.ask(t, 1, gpus("acd"), nil, "GPU-d")
	g.ask(t, 1, gpus("ac"), nil, "GPU-c")
	all := []podresources.Allocation{holds("first", "c", "GPU-c"), holds("second", "c", "GPU-b"), holds("third", "c", "GPU-d")}
	g.read(t, 0, 3, 0, all...)
	g.read(t, 0, 3, 0, all...) // each is counted once
	if len(g.troubles) != 3 || g.troubles[0] != nil {
		t.Errorf("listing well was told as %v", g.troubles)
	}
}

func TestSteeringOfPodsOfDifferentSizes(t *testing.T) {
	g := guide()
	g.pod("one", part{name: "c", devices: gpus("f")})
	g.pod("two", part{name: "c", devices: gpus("bd")})
	g.pod("three", part{name: "c", devices: gpus("aeg")})
	all := gpus("abcdefgh")
	g.ask(t, 3, all, nil, "GPU-a", "GPU-e", "GPU-g")
	g.ask(t, 1, gpus("bcdfh"), nil, "GPU-f")
	g.ask(t, 2, gpus("bcdh"), nil, "GPU-b", "GPU-d")
	g.ask(t, 4, all, nil)
	g.read(t, 3, 0, 0, holds("one", "c", "GPU-f"), holds("two", "c", "GPU-d", "GPU-b"), holds("three", "c", "GPU-a", "GPU-e", "GPU-g"))
}

func TestSteeringOfInitAndMainContainers(t *testing.T) {
	g := guide()
	pod := g.pod("p", part{name: "main", devices: gpus("bc")}, part{name: "load", init: true, devices: gpus("c")},
		part{name: "a-side", devices: gpus("a")})
	g.ask(t, 1, gpus("abcd"), nil, "GPU-c") // load is before a-side, whatever the plan's order is
	g.ask(t, 2, gpus("abcd"), gpus("c"), "GPU-b", "GPU-c")
	g.ask(t, 1, gpus("ad"), nil, "GPU-a")
	pod.Status.StartTime = new(metav1.NewTime(g.clock))
	g.read(t, 2, 0, 0, holds("p", "main", "GPU-b", "GPU-c"), holds("p", "a-side", "GPU-a"))
	// Nothing tells that load has ended, but the pod has begun.
	g.clock = g.clock.Add(admittedFor)
	g.ask(t, 1, gpus("cd"), nil)
}

func TestSteeringOfSlots(t *testing.T) {
	g := guide()
	g.pod("any", part{name: "c", devices: gpus("aab")})
	g.pod("exact", part{name: "c", devices: []string{"GPU-c::2"}})
	g.pod("same", part{name: "c", devices: gpus("c")})
	free := []string{"GPU-a::3", "GPU-b::0", "GPU-a::1", "GPU-a::0", "GPU-c::2", "GPU-c::1"}
	g.ask(t, 3, free, nil, "GPU-a::0", "GPU-a::1", "GPU-b::0")
	g.ask(t, 3, free, []string{"GPU-a::3"}, "GPU-a::0", "GPU-a::3", "GPU-b::0")
	g.ask(t, 3, []string{"GPU-a::1", "GPU-b::1", "GPU-b::2"}, nil)
	g.ask(t, 1, []string{"GPU-c::1", "GPU-c::2"}, nil, "GPU-c::2")
	g.ask(t, 1, []string{"GPU-c::1", "GPU-c::3"}, nil, "GPU-c::1")
	g.read(t, 2, 1, 0, holds("any", "c", "GPU-a::0", "GPU-a::3", "GPU-b::0"), holds("exact", "c", "GPU-c::1"), holds("same", "c", "GPU-c::2"))
}

// TestSteeringPassesOverAnsweredPlans: of plans for slots of one GPU, the next
// question gets the next one, and the same again only if there is no other.
func TestSteeringPassesOverAnsweredPlans(t *testing.T) {
	g := guide()
	g.pod("first", part{name: "c", devices: gpus("a")})
	g.pod("second", part{name: "c", devices: gpus("b")})
	free := []string{"GPU-a::0", "GPU-a::1", "GPU-b::0"}
	g.ask(t, 1, free, nil, "GPU-a::0")
	g.ask(t, 1, free, nil, "GPU-b::0")
	g.ask(t, 1, free, nil, "GPU-a::0")
	g.clock = g.clock.Add(askedBefore)
	g.ask(t, 1, free, nil, "GPU-a::0")
}

func TestSteeringLeavesOutPods(t *testing.T) {
	for name, edit := range map[string]func(*guided, *corev1.Pod){
		"no plan":            func(_ *guided, p *corev1.Pod) { p.Annotations = nil },
		"of another node":    func(g *guided, _ *corev1.Pod) { g.node = "other" },
		"deleted":            func(g *guided, p *corev1.Pod) { p.DeletionTimestamp = new(metav1.NewTime(g.clock)) },
		"failed":             func(_ *guided, p *corev1.Pod) { p.Status.Phase = corev1.PodFailed },
		"succeeded":          func(_ *guided, p *corev1.Pod) { p.Status.Phase = corev1.PodSucceeded },
		"begun long ago":     func(g *guided, p *corev1.Pod) { p.Status.StartTime = new(metav1.NewTime(g.clock.Add(-admittedFor))) },
		"static":             func(_ *guided, p *corev1.Pod) { p.Annotations[corev1.MirrorPodAnnotationKey] = "x" },
		"no such container":  func(_ *guided, p *corev1.Pod) { p.Spec.Containers[0].Name = "d" },
		"asks for something": func(_ *guided, p *corev1.Pod) { p.Spec.Containers[0].Resources.Limits = nil },
		"a plan that is bad": func(_ *guided, p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationDevices] = "{" },
		"an empty plan":      func(_ *guided, p *corev1.Pod) { p.Annotations[v1alpha1.AnnotationDevices] = "" },
		"list fails":         func(g *guided, _ *corev1.Pod) { g.err = errors.New("no apiserver") },
	} {
		t.Run(name, func(t *testing.T) {
			g := guide()
			edit(g, g.pod("p", part{name: "c", devices: gpus("b")}))
			g.ask(t, 1, gpus("ab"), nil)
		})
	}
	g := guide()
	g.pod("p", part{name: "c", devices: gpus("b")})
	if got := g.wish(t.Context(), "nvidia.com/other", gpus("ab"), nil, 1); got != nil {
		t.Errorf("the wish for another resource is %v", got)
	}
	g.ask(t, 1, gpus("ac"), nil)
	g.ask(t, 1, gpus("ab"), gpus("a"))
	g.ask(t, 1, gpus("ab"), nil, "GPU-b")
}

func TestSteeringTellsOfTroubles(t *testing.T) {
	g := guide()
	bad := g.pod("bad", part{name: "c", devices: gpus("b")})
	bad.Annotations[v1alpha1.AnnotationDevices] = "{"
	g.ask(t, 1, gpus("ab"), nil)
	g.read(t, 0, 0, 0, holds("bad", "c", "GPU-a"))
	bad.Annotations[v1alpha1.AnnotationDevices] = "["
	g.ask(t, 1, gpus("ab"), nil)
	g.err = errors.New("no apiserver")
	g.ask(t, 1, gpus("ab"), nil)
	if !slices.Equal(g.bad, []string{"bad"}) {
		t.Errorf("bad plans were told of as %v", g.bad)
	}
	if len(g.troubles) != 3 || g.troubles[1] != nil || !errors.Is(g.troubles[2], g.err) {
		t.Errorf("lists were told of as %v", g.troubles)
	}
	// A plan that is mended counts.
	g.err = nil
	bad.Annotations[v1alpha1.AnnotationDevices] = kube.DevicePlan{Node: "node", Containers: []kube.ContainerDevices{
		{Name: "c", Resource: gpuResource, Devices: gpus("b")},
	}}.String()
	g.ask(t, 1, gpus("ab"), nil, "GPU-b")
	g.read(t, 1, 0, 0, holds("bad", "c", "GPU-b"))
	delete(bad.Annotations, v1alpha1.AnnotationDevices)
	g.read(t, 1, 0, 0, holds("bad", "c", "GPU-a"))
}

// TestSteeringThatCannotBeFollowed: the engine chooses where the planned device is
// unhealthy or not there, and what comes of it is a mismatch.
func TestSteeringThatCannotBeFollowed(t *testing.T) {
	m := &gpu.Machine{Links: gpu.NewLinks(3)}
	r := &sharing.Resource{Name: gpuResource, Replicas: 1}
	for i, id := range gpus("abc") {
		m.GPUs = append(m.GPUs, gpu.GPU{Index: i, UUID: id})
		r.Devices = append(r.Devices, sharing.Device{ID: gpu.DeviceID{Base: id, Slot: gpu.NoSlot}, GPU: id})
	}
	m.GPUs[1].Health.State, r.Devices[1].Health.State = gpu.Lost, gpu.Lost
	allocator := deviceplugin.NewAllocator(deviceplugin.NewLedger(), deviceplugin.Config{Machine: m, Resource: r, Flags: sharing.Default().Flags})
	g := guide()
	g.pod("sick", part{name: "c", devices: gpus("b")})
	g.pod("gone", part{name: "c", devices: gpus("x")})
	wish := g.wish(t.Context(), gpuResource, gpus("abc"), nil, 1)
	if got := allocator.PreferWith(wish, gpus("abc"), nil, 1); !slices.Equal(wish, gpus("b")) || !slices.Equal(got, gpus("a")) {
		t.Errorf("the wish is %v, the answer %v", wish, got)
	}
	if got := g.wish(t.Context(), gpuResource, gpus("c"), nil, 1); got != nil {
		t.Errorf("the wish for what is left is %v", got)
	}
	got := g.read(t, 0, 0, 2, holds("sick", "c", "GPU-a"), holds("gone", "c", "GPU-c"))
	at := metav1.NewTime(g.clock)
	want := []v1alpha1.Mismatch{
		{Time: at, Namespace: "d", Pod: "sick", Container: "c", Planned: gpus("b"), Got: gpus("a")},
		{Time: at, Namespace: "d", Pod: "gone", Container: "c", Planned: gpus("x"), Got: gpus("c")},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("mismatches (-want +got):\n%s", diff)
	}
	slices.Reverse(want)
	if diff := cmp.Diff(want, g.status().Last); diff != "" {
		t.Errorf("Last (-want +got):\n%s", diff)
	}
	g.status().Last[0].Got[0] = "changed"
	if g.status().Last[0].Got[0] == "changed" {
		t.Error("the status can be changed from outside")
	}
}

func TestSteeringSwapsOnlyWhatIsEqual(t *testing.T) {
	t.Run("other size", func(t *testing.T) {
		g := guide()
		g.pod("one", part{name: "c", devices: gpus("a")})
		g.pod("two", part{name: "c", devices: gpus("bc")})
		g.read(t, 0, 0, 0)
		g.read(t, 0, 0, 2, holds("one", "c", "GPU-b"), holds("two", "c", "GPU-a", "GPU-c"))
	})
	t.Run("other resource", func(t *testing.T) {
		g := guide()
		g.pod("one", part{name: "c", devices: gpus("a")})
		other := g.pod("other")
		other.Annotations[v1alpha1.AnnotationDevices] = kube.DevicePlan{Node: "node", Containers: []kube.ContainerDevices{
			{Name: "c", Resource: "nvidia.com/other", Devices: gpus("b")},
		}}.String()
		g.read(t, 0, 0, 0)
		g.read(t, 0, 0, 1, holds("one", "c", "GPU-b"))
	})
	t.Run("with one that has its own", func(t *testing.T) {
		g := guide()
		g.pod("one", part{name: "c", devices: gpus("a")})
		g.pod("two", part{name: "c", devices: gpus("b")})
		g.read(t, 0, 0, 0)
		g.read(t, 1, 0, 0, holds("two", "c", "GPU-b"))
		g.read(t, 1, 0, 1, holds("one", "c", "GPU-b")) // two has ended meanwhile
	})
	t.Run("with one that was deleted while it waited", func(t *testing.T) {
		g := guide()
		g.pod("one", part{name: "c", devices: gpus("a")})
		g.pod("two", part{name: "c", devices: gpus("b")})
		g.ask(t, 1, gpus("ab"), nil, "GPU-a")
		g.pods = g.pods[1:]
		g.read(t, 0, 1, 0, holds("two", "c", "GPU-a"))
	})
	t.Run("and has its own in the end", func(t *testing.T) {
		g := guide()
		g.pod("one", part{name: "c", devices: gpus("a")})
		g.pod("two", part{name: "c", devices: gpus("b")})
		g.ask(t, 1, gpus("ab"), nil, "GPU-a")
		g.read(t, 0, 1, 0, holds("two", "c", "GPU-a"))
		// Two has ended, and b is broken.
		g.ask(t, 1, gpus("a"), nil)
		g.read(t, 1, 1, 0, holds("one", "c", "GPU-a"))
	})
	t.Run("within a pod", func(t *testing.T) {
		g := guide()
		g.pod("p", part{name: "x", devices: gpus("a")}, part{name: "y", devices: gpus("b")})
		g.read(t, 0, 0, 0)
		g.read(t, 0, 2, 0, holds("p", "x", "GPU-b"), holds("p", "y", "GPU-a"))
	})
}

// TestSteeringOfANameThatIsUsedAgain: what a pod holds that is just gone is not
// taken for that of the next pod with its name.
func TestSteeringOfANameThatIsUsedAgain(t *testing.T) {
	g := guide()
	g.pod("db-0", part{name: "c", devices: gpus("a")})
	g.read(t, 0, 0, 0)
	g.read(t, 1, 0, 0, holds("db-0", "c", "GPU-a"))
	g.pods = nil
	g.pod("db-0", part{name: "c", devices: gpus("b")})
	g.read(t, 1, 0, 0, holds("db-0", "c", "GPU-a"))
	g.ask(t, 1, gpus("abc"), nil, "GPU-b")
	g.read(t, 2, 0, 0, holds("db-0", "c", "GPU-b"))
}

// TestSteeringAfterARestart: pods that run already are not counted nor told of
// again, but what they have left of swapped plans is given.
func TestSteeringAfterARestart(t *testing.T) {
	g := guide()
	wrong := g.pod("wrong", part{name: "c", devices: gpus("a")})
	swapped := g.pod("swapped", part{name: "c", devices: gpus("b")})
	late := g.pod("late", part{name: "c", devices: gpus("e")})
	bad := g.pod("bad", part{name: "c", devices: gpus("f")})
	bad.Annotations[v1alpha1.AnnotationDevices] = "{"
	g.pod("waiting", part{name: "c", devices: gpus("c")})
	g.pod("new", part{name: "c", devices: gpus("g")})
	for _, p := range []*corev1.Pod{wrong, swapped, late, bad} {
		p.Status.Phase = corev1.PodRunning
	}
	g.began = g.clock.Add(-2 * time.Second) // when waiting was created
	wrong.Status.Phase = corev1.PodPending  // its container has yet to start
	held := []podresources.Allocation{holds("wrong", "c", "GPU-x"), holds("swapped", "c", "GPU-c"), holds("new", "c", "GPU-y")}
	g.read(t, 0, 0, 0, held...)
	if got := g.read(t, 0, 0, 1, held...); len(got) != 1 || got[0].Pod != "new" {
		t.Errorf("mismatches %v", got)
	}
	// A kubelet that begins, too, lists its pods one by one.
	if got := g.read(t, 0, 0, 1, append(held, holds("late", "c", "GPU-z"))...); got != nil {
		t.Errorf("mismatches %v", got)
	}
	if last := g.status().Last; len(last) != 1 {
		t.Errorf("Last is %v", last)
	}
	g.ask(t, 1, gpus("abdef"), nil, "GPU-b")
	g.read(t, 0, 1, 1, append(held, holds("waiting", "c", "GPU-b"))...)
	if len(g.bad) > 0 {
		t.Errorf("bad plans of %v were told again", g.bad)
	}
}

// TestSteeringIsBounded: what is remembered is what there is, and the status
// lists some mismatches.
func TestSteeringIsBounded(t *testing.T) {
	g := guide()
	for i := range 10_000 {
		name := fmt.Sprint(i)
		g.pods = nil
		p := g.pod(name, part{name: "c", devices: gpus("a")})
		if i%3 == 0 {
			p.Annotations[v1alpha1.AnnotationDevices] = "{"
		}
		g.wish(t.Context(), gpuResource, gpus("ab"), nil, 1)
		g.settle(g.clock, g.pods, []podresources.Allocation{holds(name, "c", "GPU-b")})
		if n := len(g.steering.pods); n > 70 { // one each second, each for a minute
			t.Fatalf("after %d pods %d are remembered", i, n)
		}
	}
	status := g.status()
	if status.Mismatched != 6666 || len(status.Last) != lastMismatches || status.Last[0].Pod != "9998" || status.Last[9].Pod != "9985" {
		t.Errorf("status is %+v", status)
	}
	g.clock = g.clock.Add(2 * forgetAfter)
	g.settle(g.clock, nil, nil)
	if n := len(g.steering.pods); n > 0 {
		t.Errorf("%d pods are remembered of none", n)
	}
}

// fleet is a node with a kubelet in small, and pods with plans that fit together.
type fleet struct {
	*guided
	t *rapid.T
	// free are the devices that nobody has.
	free map[string]bool
	held []podresources.Allocation
	// waiting are the pods that the kubelet has yet to admit.
	waiting []*corev1.Pod
	// known is how many pods the agent's cache has.
	known    int
	lastRead time.Time
}

// newFleet draws pods that together plan no more devices than there are.
func newFleet(t *rapid.T) *fleet {
	f := &fleet{guided: guide(), t: t, free: make(map[string]bool)}
	f.lastRead = f.clock
	slots := rapid.IntRange(1, 3).Draw(t, "slots")
	var plannable []string
	for i := range rapid.IntRange(1, 10).Draw(t, "GPUs") {
		base := "GPU-" + string(rune('a'+i))
		for slot := range slots {
			if slots == 1 {
				f.free[base] = true
			} else {
				f.free[fmt.Sprintf("%s::%d", base, slot)] = true
			}
			plannable = append(plannable, base)
		}
	}
	seed := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	seed.Shuffle(len(plannable), func(i, j int) { plannable[i], plannable[j] = plannable[j], plannable[i] })
	for len(plannable) > 0 && rapid.IntRange(0, 9).Draw(t, "one more pod") > 0 {
		var parts []part
		for c := range rapid.IntRange(1, 2).Draw(t, "containers") {
			if n := min(rapid.IntRange(1, 3).Draw(t, "devices"), len(plannable)); n > 0 {
				parts = append(parts, part{name: fmt.Sprintf("c%d", c), devices: plannable[:n:n]})
				plannable = plannable[n:]
			}
		}
		pod := f.pod(fmt.Sprint("p", len(f.pods)), parts...)
		if rapid.Bool().Draw(t, "of the same second") {
			f.clock = pod.CreationTimestamp.Time
		}
	}
	f.waiting = slices.Clone(f.pods)
	f.read()
	return f
}

// admit has the kubelet admit a waiting pod, with reads of the agent in between.
func (f *fleet) admit() {
	i := rapid.IntRange(0, len(f.waiting)-1).Draw(f.t, "pod")
	pod := f.waiting[i]
	f.waiting = slices.Delete(f.waiting, i, i+1)
	for _, c := range pod.Spec.Containers {
		limit := c.Resources.Limits[gpuResource]
		size := int(limit.Value())
		available := make([]string, 0, len(f.free))
		for id := range f.free {
			available = append(available, id)
		}
		slices.Sort(available)
		ids := available
		if size < len(available) {
			ids = f.wish(f.t.Context(), gpuResource, available, nil, size)
		}
		if len(ids) != size {
			f.t.Fatalf("%s/%s asks for %d of %v and is given %v", pod.Name, c.Name, size, available, ids)
		}
		for _, id := range ids {
			if !f.free[id] {
				f.t.Fatalf("%s/%s is given %v; %s is not free", pod.Name, c.Name, ids, id)
			}
			delete(f.free, id)
		}
		f.held = append(f.held, holds(pod.Name, c.Name, ids...))
		f.pass()
	}
	pod.Status.StartTime = new(metav1.NewTime(f.clock))
	f.pass()
}

// pass lets time pass, and the agent read what is held every few seconds.
func (f *fleet) pass() {
	f.clock = f.clock.Add(time.Duration(rapid.IntRange(0, 5000).Draw(f.t, "ms")) * time.Millisecond)
	if f.clock.Sub(f.lastRead) > 10*time.Second || rapid.Bool().Draw(f.t, "read") {
		f.read()
	}
}

// read has the agent read what is held. Its cache may lag behind.
func (f *fleet) read() {
	if f.clock.Sub(f.lastRead) > 10*time.Second {
		f.known = len(f.pods)
	} else {
		f.known = rapid.IntRange(f.known, len(f.pods)).Draw(f.t, "pods in the cache")
	}
	f.lastRead = f.clock
	if got := f.settle(f.clock, f.pods[:f.known], f.held); got != nil {
		f.t.Fatalf("mismatches %v", got)
	}
}

// TestSteeringFollowsPlansThatFitTogether: in whatever order pods are admitted,
// each container gets the devices of a plan for as many as it asks for.
func TestSteeringFollowsPlansThatFitTogether(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		f := newFleet(t)
		for len(f.waiting) > 0 {
			f.admit()
		}
		for range 2 {
			f.clock = f.clock.Add(11 * time.Second)
			f.read()
		}
		// Each plan was given, as a whole, to one container.
		left := slices.Clone(f.held)
		matched := int64(0)
		for _, pod := range f.pods {
			plan, err := kube.PlanOf(pod)
			if err != nil {
				t.Fatal(err)
			}
			for _, c := range plan.Containers {
				i := slices.IndexFunc(left, func(h podresources.Allocation) bool { return fits(c.Devices, h.Devices) })
				if i < 0 {
					t.Fatalf("nobody got %v of %s; held are %v", c.Devices, pod.Name, f.held)
				}
				left = slices.Delete(left, i, i+1)
				if slices.ContainsFunc(f.held, func(h podresources.Allocation) bool {
					return h.Pod == pod.Name && h.Container == c.Name && fits(c.Devices, h.Devices)
				}) {
					matched++
				}
			}
		}
		got := f.status()
		if want := (v1alpha1.SteeringStatus{Matched: matched, Swapped: int64(len(f.held)) - matched}); !cmp.Equal(got, want) {
			t.Fatalf("status is %+v, want %+v", got, want)
		}
	})
}
