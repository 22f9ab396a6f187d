package controller

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/tools/events"
	"k8s.io/client-go/util/workqueue"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"sigs.k8s.io/controller-runtime/pkg/controller"
	"sigs.k8s.io/controller-runtime/pkg/event"
	"sigs.k8s.io/controller-runtime/pkg/handler"
	"sigs.k8s.io/controller-runtime/pkg/reconcile"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/mig"
)

// Reasons of Events.
const (
	// reasonCut is on a node one of whose GPUs shall be cut in another way.
	reasonCut = "MIGOnDemand"
	// reasonIdle is on a node that is labelled for MIG on demand and cannot have it.
	reasonIdle = "MIGOnDemandImpossible"
	// reasonWaits is on a pod for which nothing is cut now.
	reasonWaits = "MIGOnDemandWaits"
)

const (
	// settle is the pause after something changed: pods of one job come together, and
	// shall be planned together.
	settle = 300 * time.Millisecond
	// behind is how soon to look again where the cache lags behind what was written.
	behind = 200 * time.Millisecond
)

// onDemand cuts GPUs on demand. Reconcile is never called twice at once.
type onDemand struct {
	client client.Client
	events events.EventRecorder
	policy mig.OnDemandPolicy
	now    func() time.Time

	// written are the generations of GPUNodes that were written last.
	written map[string]int64
	// idle is since when nothing of a GPU has been held, by UUID.
	idle map[string]time.Time
	// told is what Events said last, by the UID of the object.
	told map[types.UID]string
}

func newOnDemand(c client.Client, r events.EventRecorder, p mig.OnDemandPolicy) *onDemand {
	return &onDemand{
		client: c, events: r, policy: p, now: time.Now,
		written: make(map[string]int64), idle: make(map[string]time.Time), told: make(map[types.UID]string),
	}
}

// add lets a manager call Reconcile whenever a pod, a node or a GPUNode changes.
func (r *onDemand) add(m ctrl.Manager) error {
	all := reconcile.Request{NamespacedName: types.NamespacedName{Name: "all"}}
	type queue = workqueue.TypedRateLimitingInterface[reconcile.Request]
	soon := handler.Funcs{
		CreateFunc: func(_ context.Context, _ event.CreateEvent, q queue) { q.AddAfter(all, settle) },
		UpdateFunc: func(_ context.Context, _ event.UpdateEvent, q queue) { q.AddAfter(all, settle) },
		DeleteFunc: func(_ context.Context, _ event.DeleteEvent, q queue) { q.AddAfter(all, settle) },
	}
	return ctrl.NewControllerManagedBy(m).Named("mig-on-demand").
		Watches(&corev1.Pod{}, soon).Watches(&corev1.Node{}, soon).Watches(&v1alpha1.GPUNode{}, soon).
		WithOptions(controller.Options{MaxConcurrentReconciles: 1}).
		Complete(r)
}

// Reconcile brings the specs of all GPUNodes up to date.
func (r *onDemand) Reconcile(ctx context.Context, _ reconcile.Request) (reconcile.Result, error) {
	var gpuNodes v1alpha1.GPUNodeList
	var nodes corev1.NodeList
	if err := r.client.List(ctx, &nodes); err != nil {
		return reconcile.Result{}, err
	}
	if err := r.client.List(ctx, &gpuNodes); err != nil {
		return reconcile.Result{}, err
	}
	byName := make(map[string]*corev1.Node, len(nodes.Items))
	for i := range nodes.Items {
		byName[nodes.Items[i].Name] = &nodes.Items[i]
	}
	s := newSurvey(r.now(), r.idle)
	for i := range gpuNodes.Items {
		g := &gpuNodes.Items[i]
		node := byName[g.Name]
		if r.written[g.Name] > g.Generation {
			return reconcile.Result{RequeueAfter: behind}, nil
		}
		delete(r.written, g.Name)
		if node == nil {
			continue
		}
		if node.Labels[v1alpha1.LabelMIGOnDemand] != "true" {
			if err := r.forget(ctx, g); err != nil {
				return reconcile.Result{}, err
			}
			continue
		}
		switch why := impossible(node); {
		case why != "":
			r.tell(node, corev1.EventTypeWarning, reasonIdle, "no GPU is cut on demand: %s", why)
		case usable(node):
			r.tell(node, "", "", "")
			if err := s.node(node, g); err != nil {
				r.tell(g, corev1.EventTypeWarning, reasonIdle, "the status cannot be read: %v", err)
			}
		}
	}
	r.idle = s.idle
	if len(s.gpus) == 0 {
		return reconcile.Result{}, nil
	}
	var pods corev1.PodList
	if err := r.client.List(ctx, &pods); err != nil {
		return reconcile.Result{}, err
	}
	demands, waiting := s.demands(pods.Items)
	plan := mig.OnDemand(s.now, s.gpus, demands, r.policy)
	r.unserved(plan, waiting)
	if err := r.write(ctx, s, plan.Decisions); err != nil {
		return reconcile.Result{}, err
	}
	if plan.Next.IsZero() {
		return reconcile.Result{}, nil
	}
	return reconcile.Result{RequeueAfter: max(plan.Next.Sub(r.now()), behind)}, nil
}

// impossible says why a node that is labelled for it can have no MIG on demand, ""
// where it can.
func impossible(node *corev1.Node) string {
	if config := node.Labels[labelMIGConfig]; config != "" {
		return fmt.Sprintf("the label %s says how the GPUs are cut; take one of the two labels away", labelMIGConfig)
	}
	if s := node.Labels[labelMIGStrategy]; s != strategyMixed {
		return fmt.Sprintf("the label %s is %q: set migStrategy to %s in the node's config", labelMIGStrategy, s, strategyMixed)
	}
	return ""
}

const (
	labelMIGConfig   = "nvidia.com/mig.config"
	labelMIGStrategy = "nvidia.com/mig.strategy"
	strategyMixed    = "mixed"
)

// forget empties the spec of a node that is not cut on demand any more: it would be
// carried out when the label comes back, however old it is.
func (r *onDemand) forget(ctx context.Context, g *v1alpha1.GPUNode) error {
	if len(g.Spec.MIG) == 0 {
		return nil
	}
	return r.patch(ctx, g, nil)
}

// write writes the decisions.
func (r *onDemand) write(ctx context.Context, s *survey, decisions []mig.Decision) error {
	for len(decisions) > 0 {
		name := decisions[0].Node
		end := slices.IndexFunc(decisions, func(d mig.Decision) bool { return d.Node != name })
		if end < 0 {
			end = len(decisions)
		}
		n := s.nodes[name]
		// Entries of GPUs that the node has no more go.
		spec := slices.DeleteFunc(slices.Clone(n.object.Spec.MIG), func(w v1alpha1.GPUGeometry) bool {
			return n.machine.ByUUID(w.UUID) == nil
		})
		for _, d := range decisions[:end] {
			entry := v1alpha1.GPUGeometry{UUID: d.UUID, Since: metav1.NewTime(s.now), Instances: instances(n.machine.ByUUID(d.UUID), d.Instances)}
			at := slices.IndexFunc(spec, func(w v1alpha1.GPUGeometry) bool { return w.UUID == d.UUID })
			if at < 0 {
				spec = append(spec, entry)
			} else {
				spec[at] = entry
			}
		}
		if err := r.patch(ctx, n.object, spec); err != nil {
			return err
		}
		for _, d := range decisions[:end] {
			r.events.Eventf(n.kubernetes, nil, corev1.EventTypeNormal, reasonCut, "Cut", "GPU %d shall have %s: %s",
				d.Index, describe(n.machine.ByUUID(d.UUID), d.Instances), d.Reason)
		}
		decisions = decisions[end:]
	}
	return nil
}

func (r *onDemand) patch(ctx context.Context, g *v1alpha1.GPUNode, spec []v1alpha1.GPUGeometry) error {
	changed := g.DeepCopy()
	changed.Spec.MIG = spec
	// Without a look at the resource version: the agent writes the status all the
	// time, and nobody else writes the spec.
	if err := r.client.Patch(ctx, changed, client.MergeFrom(g)); err != nil {
		return fmt.Errorf("spec of GPUNode %s: %w", g.Name, err)
	}
	r.written[g.Name] = changed.Generation
	return nil
}

// instances is a geometry as the spec tells it.
func instances(g *gpu.GPU, list []gpu.MIGInstance) []v1alpha1.MIGInstance {
	var all []v1alpha1.MIGInstance
	for _, in := range list {
		all = append(all, v1alpha1.MIGInstance{
			ProfileID: int32(in.ProfileID), Profile: profileName(g, in.ProfileID),
			Start: int32(in.Placement.Start), Size: int32(in.Placement.Size),
		})
	}
	return all
}

func profileName(g *gpu.GPU, id int) string {
	if product := gpu.ProductByName(g.Name); product != nil && product.MIG != nil {
		if p := product.MIG.ByID(id); p != nil {
			return p.Name
		}
	}
	return fmt.Sprintf("profile %d", id)
}

// describe tells people of a geometry.
func describe(g *gpu.GPU, list []gpu.MIGInstance) string {
	if len(list) == 0 {
		return "no MIG devices"
	}
	texts := make([]string, len(list))
	for i, in := range list {
		texts[i] = fmt.Sprintf("%s at %d", profileName(g, in.ProfileID), in.Placement.Start)
	}
	return strings.Join(texts, ", ")
}

// unserved tells the pods that wait for MIG devices why nothing is cut for them.
func (r *onDemand) unserved(plan mig.OnDemandPlan, waiting map[string]*corev1.Pod) {
	why := make(map[string]string)
	for _, u := range plan.Unserved {
		why[u.Pod] = u.Reason
	}
	alive := make(map[types.UID]bool)
	for name, pod := range waiting {
		alive[pod.UID] = true
		if wantsMIG(pod) && why[name] != "" {
			r.tell(pod, corev1.EventTypeNormal, reasonWaits, "%s", why[name])
		} else {
			r.tell(pod, "", "", "")
		}
	}
	for uid, text := range r.told {
		if strings.HasPrefix(text, reasonWaits) && !alive[uid] {
			delete(r.told, uid)
		}
	}
}

// tell writes an Event, unless it was the last one about the object. Without a reason
// it only forgets that one.
func (r *onDemand) tell(o client.Object, kind, reason, format string, args ...any) {
	if reason == "" {
		delete(r.told, o.GetUID())
		return
	}
	note := fmt.Sprintf(format, args...)
	if text := reason + ": " + note; r.told[o.GetUID()] != text {
		r.told[o.GetUID()] = text
		r.events.Eventf(o, nil, kind, reason, "Plan", "%s", note)
	}
}

func wantsMIG(pod *corev1.Pod) bool {
	return slices.ContainsFunc(kube.GPURequests(pod, nil), func(q kube.ContainerRequest) bool {
		return strings.HasPrefix(q.Resource, domain+"mig-")
	})
}
