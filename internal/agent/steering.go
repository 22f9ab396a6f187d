package agent

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/podresources"
)

const (
	// listTimeout bounds the list of pods for one question: the kubelet admits no
	// other pod meanwhile.
	listTimeout = 2 * time.Second
	// askedBefore is how long the answer to a question stands back behind others. It
	// takes the kubelet less to allocate what it was answered.
	askedBefore = 30 * time.Second
	// admittedFor is how long after a pod was taken in by the kubelet it may still
	// have a plan to give. Its own questions are over by then, and what it got in
	// place of the plan has been read back.
	admittedFor = 30 * time.Second
	// forgetAfter is how long a pod that is gone is remembered: its plan may have been
	// the answer to a question of another pod.
	forgetAfter = time.Minute
	// lastMismatches is how many mismatches the status lists.
	lastMismatches = 10
	// maxDevices is how many devices a mismatch lists at most.
	maxDevices = 256
)

// steering makes the kubelet give pods the devices of their plans, and compares
// what they were given. It is safe for concurrent use: questions come from the
// kubelet, what was given from the agent's loop.
//
// A question does not say for which pod it is asked, so pods with equal questions
// may get each other's devices. Their plans change places then: what the one did
// not take is what the other shall get.
type steering struct {
	node     string
	listPods func(context.Context) ([]*corev1.Pod, error)
	log      *slog.Logger
	// listed is told what became of each list of pods, nil for well.
	listed func(error)
	// invalid is told once of each pod with a plan that cannot be read.
	invalid func(*corev1.Pod, error)
	now     func() time.Time
	// began is the second in which this began: pods are created in whole seconds.
	began time.Time

	mu sync.Mutex
	// pods are those with the annotation.
	pods map[types.UID]*steered
	// settled says that settle was called.
	settled bool
	counts  v1alpha1.SteeringStatus
}

// steered is a pod with a plan.
type steered struct {
	namespace, name string
	created         time.Time
	// seen is when the pod was last listed.
	seen time.Time
	// fresh says that it has not been seen before the present settle.
	fresh bool
	// before says that it got its devices before the agent began, and counts for
	// nothing: the agent before has counted it and told of it.
	before bool
	// text is the annotation that claims were read from.
	text string
	// told says that the annotation was reported as bad.
	told   bool
	claims []*claim
}

// claim is what the plan says of one resource of one container.
type claim struct {
	pod                 *steered
	container, resource string
	planned             []string
	// wanted is planned, until the plan changes places with that of a container that
	// has got these devices.
	wanted []string
	// answer is what was last answered to a question by what is wanted, sorted, and
	// answered when.
	answer   []string
	answered time.Time
	// done says that the container has devices.
	done bool
}

// newSteering returns the steering of a node. The function lists the pods that are
// bound to the node now: a cache may not know yet what the kubelet knows. Fields
// that are told something may be set before use.
func newSteering(node string, listPods func(context.Context) ([]*corev1.Pod, error), log *slog.Logger) *steering {
	return &steering{
		node: node, listPods: listPods, log: log, listed: func(error) {}, invalid: func(*corev1.Pod, error) {},
		now: time.Now, began: time.Now().Truncate(time.Second), pods: make(map[types.UID]*steered),
	}
}

// wish returns the devices that the plan of a waiting container names for the
// question, or nil. All are available and different, and all of required are among
// them. Of several plans it is that of the oldest pod, in the order in which the
// kubelet admits containers, but one that was an answer a moment ago only if there
// is no other, and then the one for which that is the longest ago.
func (s *steering) wish(ctx context.Context, resource string, available, required []string, size int) []string {
	ctx, cancel := context.WithTimeout(ctx, listTimeout)
	defer cancel()
	pods, err := s.listPods(ctx)
	s.listed(err)
	if err != nil {
		return nil // the plans are not known, and the question cannot wait
	}
	now := s.now()
	s.mu.Lock()
	bad := s.learn(now, pods, false)
	ids := s.choose(now, pods, resource, available, required, size)
	s.mu.Unlock()
	s.report(bad)
	return ids
}

// choose is wish with the pods.
func (s *steering) choose(now time.Time, pods []*corev1.Pod, resource string, available, required []string, size int) []string {
	type candidate struct {
		*claim
		ids []string
	}
	var candidates []candidate
	for _, pod := range pods {
		p := s.pods[pod.UID]
		if p == nil || !waits(now, pod) {
			continue
		}
		for _, container := range slices.Concat(pod.Spec.InitContainers, pod.Spec.Containers) {
			limit := container.Resources.Limits[corev1.ResourceName(resource)]
			c := p.claim(container.Name, resource)
			if c == nil || c.done || len(c.wanted) != size || limit.Value() != int64(size) {
				continue
			}
			if ids := resolve(c.wanted, available, required); ids != nil {
				candidates = append(candidates, candidate{c, ids})
			}
		}
	}
	if len(candidates) == 0 {
		return nil
	}
	lately := func(c *claim) time.Time {
		if now.Sub(c.answered) < askedBefore {
			return c.answered
		}
		return time.Time{}
	}
	// Those of one pod are in the order of admission, and the first of equals is taken.
	chosen := slices.MinFunc(candidates, func(x, y candidate) int {
		return cmp.Or(lately(x.claim).Compare(lately(y.claim)), x.pod.compare(y.pod))
	})
	chosen.answer, chosen.answered = slices.Sorted(slices.Values(chosen.ids)), now
	return chosen.ids
}

// waits says whether the pod may get devices yet, or has got them so shortly ago
// that its plan may be left to give.
func waits(now time.Time, pod *corev1.Pod) bool {
	_, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey] // of one that was admitted
	started := pod.Status.StartTime
	return pod.DeletionTimestamp == nil && !ended(pod) && !mirror && (started == nil || now.Sub(started.Time) < admittedFor)
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// compare orders pods by age.
func (p *steered) compare(q *steered) int {
	return cmp.Or(p.created.Compare(q.created), strings.Compare(p.namespace, q.namespace), strings.Compare(p.name, q.name))
}

// claim returns the pod's claim of a resource for a container, or nil.
func (p *steered) claim(container, resource string) *claim {
	for _, c := range p.claims {
		if c.container == container && c.resource == resource {
			return c
		}
	}
	return nil
}

// badPlan is a pod whose plan cannot be read.
type badPlan struct {
	pod *corev1.Pod
	err error
}

// learn takes in the plans of pods, and returns the pods whose plan is found to be
// bad for the first time.
func (s *steering) learn(now time.Time, pods []*corev1.Pod, fresh bool) []badPlan {
	var bad []badPlan
	for _, pod := range pods {
		text, planned := pod.Annotations[v1alpha1.AnnotationDevices]
		p := s.pods[pod.UID]
		if ended(pod) || p == nil && !planned {
			continue
		}
		if p == nil {
			p = &steered{namespace: pod.Namespace, name: pod.Name, created: pod.CreationTimestamp.Time, fresh: fresh}
			p.before = !s.settled && p.created.Before(s.began) && pod.Status.Phase == corev1.PodRunning
			s.pods[pod.UID] = p
		} else if text == p.text {
			p.seen = now
			continue
		}
		p.seen, p.text = now, text
		if err := p.plan(s.node, pod); err != nil && !p.told && !p.before {
			p.told = true
			bad = append(bad, badPlan{pod, err})
		}
	}
	return bad
}

// plan makes the claims those of the pod's annotation. What is settled stays so.
func (p *steered) plan(node string, pod *corev1.Pod) error {
	p.claims = slices.DeleteFunc(p.claims, func(c *claim) bool { return !c.done })
	plan, err := kube.PlanOf(pod)
	if err != nil || plan == nil || plan.Node != node {
		return err
	}
	for _, c := range plan.Containers {
		if p.claim(c.Name, c.Resource) == nil {
			p.claims = append(p.claims, &claim{pod: p, container: c.Name, resource: c.Resource, planned: c.Devices, wanted: c.Devices})
		}
	}
	return nil
}

func (s *steering) report(bad []badPlan) {
	for _, b := range bad {
		s.log.Error("plan of a pod cannot be read", "namespace", b.pod.Namespace, "pod", b.pod.Name, "error", b.err)
		s.invalid(b.pod, b.err)
	}
}

// settle compares what containers hold, as the kubelet says, with the plans of the
// pods, once for each resource of a container, and returns the mismatches that are
// new. The pods are those of the node that are known, listed after what is held.
func (s *steering) settle(now time.Time, pods []*corev1.Pod, holdings []podresources.Allocation) []v1alpha1.Mismatch {
	s.mu.Lock()
	bad := s.learn(now, pods, true)
	mismatches := s.compare(now, pods, holdings)
	s.mu.Unlock()
	s.report(bad)
	return mismatches
}

// got is a claim with the devices that its container has.
type got struct {
	*claim
	ids []string
}

// compare is settle once the pods are known.
func (s *steering) compare(now time.Time, pods []*corev1.Pod, holdings []podresources.Allocation) []v1alpha1.Mismatch {
	byName := make(map[types.NamespacedName]*steered)
	for _, pod := range pods {
		if p := s.pods[pod.UID]; p != nil {
			byName[types.NamespacedName{Namespace: pod.Namespace, Name: pod.Name}] = p
		}
	}
	var open []got
	found := make(map[*claim]bool)
	for _, h := range holdings {
		p := byName[types.NamespacedName{Namespace: h.Namespace, Name: h.Pod}]
		if p == nil {
			continue
		}
		p.before = p.before || !s.settled && p.created.Before(s.began)
		// The holding may be that of a pod with the same name that is just gone, unless
		// this pod was known before.
		if c := p.claim(h.Container, h.Resource); c != nil && len(h.Devices) > 0 && !c.done && !p.fresh && !found[c] {
			found[c] = true
			open = append(open, got{c, h.Devices})
		}
	}
	s.settled = true
	mismatches := s.judge(now, open)
	for uid, p := range s.pods {
		p.fresh = false
		if now.Sub(p.seen) > forgetAfter {
			delete(s.pods, uid)
		}
	}
	return mismatches
}

// judge settles the claims of containers that have devices.
func (s *steering) judge(now time.Time, open []got) []v1alpha1.Mismatch {
	slices.SortFunc(open, func(x, y got) int { return x.compare(y.claim) })
	// What was answered says best whose plan a container has got. A container may get
	// its own after its plan has changed places.
	for _, giver := range []func(got) *claim{s.answering, s.wanting, own} {
		open = slices.DeleteFunc(open, func(g got) bool {
			c := giver(g)
			if c != nil {
				s.take(g, c)
			}
			return c != nil
		})
	}
	var mismatches []v1alpha1.Mismatch
	for _, g := range open {
		g.settle(&s.counts.Mismatched)
		if g.pod.before {
			continue
		}
		m := v1alpha1.Mismatch{
			Time: metav1.NewTime(now), Namespace: g.pod.namespace, Pod: g.pod.name, Container: g.container,
			Planned: bounded(g.planned), Got: bounded(g.ids),
		}
		mismatches = append(mismatches, m)
		s.counts.Last = slices.Insert(s.counts.Last, 0, m)
		s.counts.Last = s.counts.Last[:min(len(s.counts.Last), lastMismatches)]
	}
	return mismatches
}

// take settles a container that has the devices that another claim wants, or its
// own.
func (s *steering) take(g got, c *claim) {
	c.wanted, g.wanted = g.wanted, c.wanted
	c.answer, g.answer = g.answer, c.answer
	c.answered, g.answered = g.answered, c.answered
	if fits(g.planned, g.ids) {
		g.settle(&s.counts.Matched)
	} else {
		g.settle(&s.counts.Swapped)
	}
}

// settle ends the claim and counts it, unless the agent before has done so.
func (c *claim) settle(count *int64) {
	c.done = true
	if !c.pod.before {
		*count++
	}
}

// answering returns the claim by which the container's question was answered, its
// own if that can be, or nil.
func (s *steering) answering(g got) *claim {
	ids := slices.Sorted(slices.Values(g.ids))
	return s.first(g, func(c *claim) bool { return slices.Equal(c.answer, ids) })
}

// own returns the container's own claim if it has got what was planned, or nil.
func own(g got) *claim {
	if fits(g.planned, g.ids) {
		return g.claim
	}
	return nil
}

// wanting returns a claim that wants what the container has got, its own if that
// can be, or nil.
func (s *steering) wanting(g got) *claim {
	return s.first(g, func(c *claim) bool { return fits(c.wanted, g.ids) })
}

// first returns the container's own claim if it matches, or else the first that
// does of those of the same resource whose containers have nothing yet.
func (s *steering) first(g got, match func(*claim) bool) *claim {
	if match(g.claim) {
		return g.claim
	}
	var first *claim
	for _, p := range s.pods {
		for _, c := range p.claims {
			if !c.done && c.resource == g.resource && match(c) && (first == nil || c.compare(first) < 0) {
				first = c
			}
		}
	}
	return first
}

// compare orders claims by the age of the pod.
func (c *claim) compare(d *claim) int {
	return cmp.Or(c.pod.compare(d.pod), strings.Compare(c.container, d.container), strings.Compare(c.resource, d.resource))
}

// status returns what became of plans so far.
func (s *steering) status() v1alpha1.SteeringStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	return *s.counts.DeepCopy()
}

// bounded is a copy of devices, cut to what the status holds.
func bounded(ids []string) []string { return slices.Clone(ids[:min(len(ids), maxDevices)]) }

// baseOf is the UUID in a device id.
func baseOf(id string) string {
	d, err := gpu.ParseDeviceID(id)
	if err != nil {
		return id
	}
	return d.Base
}

// fits says whether devices are those of a plan. A bare UUID in it stands for any
// slot.
func fits(plan, ids []string) bool {
	if len(plan) != len(ids) {
		return false
	}
	left := slices.Clone(ids)
	take := func(match func(string) bool) bool {
		i := slices.IndexFunc(left, match)
		if i < 0 {
			return false
		}
		left = slices.Delete(left, i, i+1)
		return true
	}
	var bare []string
	for _, id := range plan {
		if !take(func(x string) bool { return x == id }) {
			bare = append(bare, id)
		}
	}
	for _, id := range bare {
		if !take(func(x string) bool { return baseOf(x) == id }) {
			return false
		}
	}
	return true
}

// resolve returns available devices that fit a plan and have all of required among
// them, none twice, or nil.
func resolve(plan, available, required []string) []string {
	free := make(map[string]bool, len(available))
	for _, id := range available {
		free[id] = true
	}
	var ids, bare []string
	for _, id := range plan {
		if free[id] {
			delete(free, id)
			ids = append(ids, id)
		} else {
			bare = append(bare, id)
		}
	}
	slots := slices.Concat(required, slices.Sorted(slices.Values(available)))
	for _, id := range bare {
		i := slices.IndexFunc(slots, func(x string) bool { return free[x] && baseOf(x) == id })
		if i < 0 {
			return nil
		}
		delete(free, slots[i])
		ids = append(ids, slots[i])
	}
	if slices.ContainsFunc(required, func(id string) bool { return !slices.Contains(ids, id) }) {
		return nil
	}
	return ids
}
