package controller

import (
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/component-helpers/resource"
	schedulinghelpers "k8s.io/component-helpers/scheduling/corev1"
	"k8s.io/component-helpers/scheduling/corev1/nodeaffinity"
	"k8s.io/klog/v2"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/mig"
)

// domain is that of the resources which are cut on demand.
const domain = "nvidia.com/"

// survey is what is known of the nodes that are cut on demand, and of their pods.
type survey struct {
	now   time.Time
	gpus  []mig.DemandGPU
	nodes map[string]*surveyed
	// names are those of nodes, sorted.
	names []string
	// before and idle are since when nothing of a GPU is held, by UUID.
	before, idle map[string]time.Time
}

type surveyed struct {
	kubernetes *corev1.Node
	object     *v1alpha1.GPUNode
	machine    *gpu.Machine
	// free is what is left of resources of other kinds.
	free corev1.ResourceList
	// holders are the pods that hold something, by namespace and name.
	holders map[string]bool
}

func newSurvey(now time.Time, before map[string]time.Time) *survey {
	return &survey{now: now, before: before, idle: make(map[string]time.Time), nodes: make(map[string]*surveyed)}
}

// usable says whether the scheduler may bind pods to the node.
func usable(node *corev1.Node) bool {
	return !node.Spec.Unschedulable && node.DeletionTimestamp == nil && slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
		return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
	})
}

// node takes in a node.
func (s *survey) node(node *corev1.Node, g *v1alpha1.GPUNode) error {
	m, err := kube.Machine(&g.Status)
	if err != nil {
		return err
	}
	n := &surveyed{kubernetes: node, object: g, machine: m, free: node.Status.Allocatable.DeepCopy(), holders: make(map[string]bool)}
	s.nodes[node.Name] = n
	s.names = append(s.names, node.Name)
	slices.Sort(s.names)
	for i := range m.GPUs {
		told := &g.Status.GPUs[i]
		held := make(map[string]bool)
		for _, h := range told.Holders {
			n.holders[h.Namespace+"/"+h.Pod] = true
			if id, err := gpu.ParseDeviceID(h.Device); err == nil {
				held[id.Base] = true
			}
		}
		s.gpus = append(s.gpus, s.gpu(node.Name, &m.GPUs[i], told, held, g.Spec.MIG))
	}
	return nil
}

// gpu is a GPU as the decision sees it.
func (s *survey) gpu(node string, g *gpu.GPU, told *v1alpha1.GPU, held map[string]bool, spec []v1alpha1.GPUGeometry) mig.DemandGPU {
	d := mig.DemandGPU{
		Node: node, Index: g.Index, UUID: g.UUID, Usable: g.Health.OK() && !told.Cordoned,
		Held: held[g.UUID], Enabled: g.MIG.Enabled,
	}
	if product := gpu.ProductByName(g.Name); product != nil && g.MIG.Capable {
		d.Table = product.MIG
	}
	for _, v := range g.MIG.Devices {
		d.Devices = append(d.Devices, mig.DemandDevice{
			MIGInstance: gpu.MIGInstance{ProfileID: v.ProfileID, Placement: v.Placement},
			Held:        held[v.UUID] || !v.Health.OK(),
		})
	}
	for i := range spec {
		if spec[i].UUID == g.UUID {
			d.Wanted = wanted(&spec[i])
		}
	}
	if len(held) == 0 {
		since, known := s.before[g.UUID]
		if !known {
			since = s.now
		}
		s.idle[g.UUID], d.IdleSince = since, since
	}
	return d
}

func wanted(w *v1alpha1.GPUGeometry) *mig.WantedGeometry {
	g := &mig.WantedGeometry{Since: w.Since.Time}
	for _, in := range w.Instances {
		g.Instances = append(g.Instances, gpu.MIGInstance{
			ProfileID: int(in.ProfileID), Placement: gpu.Placement{Start: int(in.Start), Size: int(in.Size)},
		})
	}
	return g
}

// demands are what pods want of the nodes: those that wait, also by name, and those
// that are bound and of which no node tells yet what they hold.
func (s *survey) demands(pods []corev1.Pod) (all []mig.Demand, waiting map[string]*corev1.Pod) {
	waiting = make(map[string]*corev1.Pod)
	for i := range pods {
		pod := &pods[i]
		if n := s.nodes[pod.Spec.NodeName]; n != nil && !ended(pod) {
			subtract(n.free, requests(pod))
		}
	}
	for i := range pods {
		pod := &pods[i]
		name := pod.Namespace + "/" + pod.Name
		wants := wantsOf(pod)
		if len(wants) == 0 || ended(pod) {
			continue
		}
		d := mig.Demand{Pod: name, Wants: wants, Since: pod.CreationTimestamp.Time}
		switch n := s.nodes[pod.Spec.NodeName]; {
		case n != nil && !n.holders[name]:
			d.Bound, d.Nodes = true, []string{pod.Spec.NodeName}
		case unschedulable(pod):
			d.Nodes = s.suitable(pod)
			waiting[name] = pod
		default:
			continue
		}
		all = append(all, d)
	}
	return all, waiting
}

func ended(pod *corev1.Pod) bool {
	return pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed
}

// unschedulable says whether the scheduler has tried to place the pod in vain.
func unschedulable(pod *corev1.Pod) bool {
	return pod.Spec.NodeName == "" && pod.DeletionTimestamp == nil && slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	})
}

// requests is what the scheduler counts for a pod.
func requests(pod *corev1.Pod) corev1.ResourceList {
	all := resource.PodRequests(pod, resource.PodResourcesOptions{})
	one := all[corev1.ResourcePods]
	one.Set(1)
	all[corev1.ResourcePods] = one
	return all
}

func subtract(from, list corev1.ResourceList) {
	for name, quantity := range list {
		if left, ok := from[name]; ok {
			left.Sub(quantity)
			from[name] = left
		}
	}
}

// wantsOf is what a pod wants of GPUs and MIG devices, by resource.
func wantsOf(pod *corev1.Pod) []mig.Want {
	var wants []mig.Want
	for name, quantity := range requests(pod) {
		if of, ours := strings.CutPrefix(string(name), domain); ours && quantity.Value() > 0 {
			wants = append(wants, mig.Want{Resource: of, Count: int(quantity.Value())})
		}
	}
	slices.SortFunc(wants, func(a, b mig.Want) int { return strings.Compare(a.Resource, b.Resource) })
	return wants
}

// suitable are the nodes on which nothing but GPUs is missing for a pod, never nil.
func (s *survey) suitable(pod *corev1.Pod) []string {
	suitable := []string{}
	affinity := nodeaffinity.GetRequiredNodeAffinity(pod)
	wants := requests(pod)
	for _, name := range s.names {
		n := s.nodes[name]
		_, tainted := schedulinghelpers.FindMatchingUntoleratedTaint(klog.Logger{}, n.kubernetes.Spec.Taints, pod.Spec.Tolerations, func(t *corev1.Taint) bool {
			return t.Effect == corev1.TaintEffectNoSchedule || t.Effect == corev1.TaintEffectNoExecute
		}, true)
		if match, err := affinity.Match(n.kubernetes); tainted || err != nil || !match || !fits(wants, n.free) {
			continue
		}
		suitable = append(suitable, name)
	}
	return suitable
}

// fits says whether there is enough of all that is not cut.
func fits(wants, free corev1.ResourceList) bool {
	for name, quantity := range wants {
		if strings.HasPrefix(string(name), domain) {
			continue
		}
		if left := free[name]; !quantity.IsZero() && left.Cmp(quantity) < 0 {
			return false
		}
	}
	return true
}
