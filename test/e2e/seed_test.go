package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const seedDir = "../../../shared/seed/manifests"

// assumption is something that the article takes for given and a manifest does
// not say.
type assumption string

const (
	// toleration: the article taints all GPU nodes, and some of its pods do not
	// tolerate that.
	toleration assumption = "toleration of nvidia.com/gpu"
	// accelerator: nodes carry a label that nothing sets on its own.
	accelerator assumption = "label accelerator=nvidia on GPU nodes"
	// class: a priority class from another manifest.
	class assumption = "priority class gpu-low-priority"
	// namespace: a namespace from another manifest.
	namespace assumption = "namespace team-ml"
)

// seedManifest is one of the article's manifests, in the article's order.
type seedManifest struct {
	file string
	// selector finds its pods, "" for none.
	selector string
	// namespace of the pods.
	namespace string
	pods      int
	// assumptions are needed, each of them, for the pods to run.
	assumptions []assumption
}

var seedManifests = []seedManifest{
	{"nvidia-device-plugin-config.yaml", "name=nvidia-device-plugin-ds", "kube-system", 5, []assumption{accelerator}},
	{"gpu-pod.yaml", "gpu-training-job", "default", 1, []assumption{toleration}},
	{"multi-gpu-training.yaml", "distributed-training", "default", 1, []assumption{toleration}},
	{"gpu-type-selection.yaml", "inference-a10", "default", 1, []assumption{toleration}},
	{"gpu-pod-with-toleration.yaml", "gpu-workload", "default", 1, []assumption{accelerator}},
	{"gpu-node-affinity.yaml", "app=inference", "default", 3, nil},
	{"time-slicing-config.yaml", "", "", 0, nil},
	{"time-sliced-inference.yaml", "app=inference-ts", "default", 16, nil},
	{"mig-device-plugin-config.yaml", "", "", 0, nil},
	{"mig-training-job.yaml", "job-name=mig-training", "default", 1, nil},
	{"namespace-quota.yaml", "", "", 0, nil},
	{"priority-classes.yaml", "", "", 0, nil},
	{"preemptible-training.yaml", "job-name=preemptible-training", "team-ml", 1, []assumption{namespace, class}},
	{"topology-aware-pod.yaml", "distributed-training-nvlink", "default", 1, []assumption{toleration}},
}

// TestSeedManifests applies the article's manifests unchanged to one cluster
// whose nodes are tainted as the article taints them, and whose agents run the
// article's own device-plugin configs. Each manifest's pods must run once its
// assumptions are supplied, and none may be listed that is not needed.
func TestSeedManifests(t *testing.T) {
	if _, err := os.Stat(seedDir); err != nil {
		t.Skipf("the article's manifests are not here: %v", err)
	}
	files, err := filepath.Glob(filepath.Join(seedDir, "*.yaml"))
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range files {
		if !slices.ContainsFunc(seedManifests, func(m seedManifest) bool { return m.file == filepath.Base(f) }) {
			t.Errorf("%s is not in the test", f)
		}
	}
	const taint = ",taint=nvidia.com/gpu=true:NoSchedule"
	seed := func(file string) string { return ",config=" + filepath.Join(seedDir, file) }
	c := up(t,
		"p4d.24xlarge,name=whole"+taint,
		"g5.12xlarge,name=a10g"+taint,
		"g5.12xlarge,name=sliced"+taint+seed("time-slicing-config.yaml"),
		"g4dn.xlarge,name=mixed"+taint+seed("nvidia-device-plugin-config.yaml"),
		"testdata/p4d-mig.yaml,name=mig"+taint+seed("mig-device-plugin-config.yaml"),
	)
	for node, want := range map[string]map[string]int64{
		"whole": {"nvidia.com/gpu": 8}, "a10g": {"nvidia.com/gpu": 4},
		"sliced": {"nvidia.com/gpu": 32, "nvidia.com/gpu-exclusive": 4},
		"mixed":  {"nvidia.com/gpu": 4},
		"mig":    {"nvidia.com/gpu": 7, "nvidia.com/mig-1g.5gb": 7},
	} {
		for resource, count := range want {
			if problem := c.allocatable(node, resource, count); problem != "" {
				t.Error(problem)
			}
		}
	}
	supplied := make(map[assumption]bool)
	for _, m := range seedManifests {
		c.applySeed(m, supplied)
		t.Logf("%-36s %2d pods run; supplied: %v", m.file, m.pods, m.assumptions)
	}
	// All at once, at the end.
	for _, m := range seedManifests {
		if problem := c.seedPods(m); problem != "" {
			t.Errorf("%s: %s", m.file, problem)
		}
	}
}

// applySeed applies a manifest and supplies its assumptions one by one. Those
// about the cluster stay supplied; a manifest that needs one again is taken to
// need it.
func (c *cluster) applySeed(m seedManifest, supplied map[assumption]bool) {
	c.t.Helper()
	for _, a := range m.assumptions {
		// These come from manifests that stand before this one.
		if a == class || a == namespace {
			supplied[a] = c.exists(a)
			if !supplied[a] {
				c.t.Errorf("%s: no %s", m.file, a)
			}
		}
	}
	c.kubectl("", "apply", "-f", filepath.Join(seedDir, m.file))
	if m.selector == "" {
		return
	}
	for _, a := range m.assumptions {
		if supplied[a] && a != toleration {
			continue
		}
		// Without it the pods must not run, or it is no assumption.
		time.Sleep(2 * time.Second)
		if c.seedPods(m) == "" {
			c.t.Errorf("%s: runs without %q, which is listed as needed", m.file, a)
		}
		c.supply(a, m)
		supplied[a] = true
	}
	c.eventually(30*time.Second, fmt.Sprintf("%s with %v supplied: one more assumption has become necessary", m.file, m.assumptions), func() string {
		return c.seedPods(m)
	})
}

// pods lists the pods of a manifest.
func (c *cluster) pods(m seedManifest) ([]corev1.Pod, error) {
	options := metav1.ListOptions{LabelSelector: m.selector}
	if !strings.Contains(m.selector, "=") {
		options = metav1.ListOptions{FieldSelector: "metadata.name=" + m.selector}
	}
	list, err := c.client.CoreV1().Pods(m.namespace).List(c.t.Context(), options)
	if err != nil {
		return nil, err
	}
	return list.Items, nil
}

// seedPods says what keeps the pods of a manifest from running.
func (c *cluster) seedPods(m seedManifest) string {
	if m.selector == "" {
		return ""
	}
	pods, err := c.pods(m)
	if err != nil {
		return err.Error()
	}
	running := 0
	detail := ""
	for _, p := range pods {
		if p.Status.Phase == corev1.PodRunning || p.Status.Phase == corev1.PodSucceeded {
			running++
			continue
		}
		for _, condition := range p.Status.Conditions {
			if condition.Type == corev1.PodScheduled && condition.Status == corev1.ConditionFalse {
				detail = condition.Message
			}
		}
	}
	if running != m.pods {
		return fmt.Sprintf("%d of %d pods run %s", running, m.pods, detail)
	}
	return ""
}

func (c *cluster) exists(a assumption) bool {
	var err error
	if a == class {
		_, err = c.client.SchedulingV1().PriorityClasses().Get(c.t.Context(), "gpu-low-priority", metav1.GetOptions{})
	} else {
		_, err = c.client.CoreV1().Namespaces().Get(c.t.Context(), "team-ml", metav1.GetOptions{})
	}
	return err == nil
}

// supply makes an assumption true.
func (c *cluster) supply(a assumption, m seedManifest) {
	c.t.Helper()
	switch a {
	case accelerator:
		for _, n := range c.State().Nodes {
			patch := []byte(`{"metadata":{"labels":{"accelerator":"nvidia"}}}`)
			if _, err := c.client.CoreV1().Nodes().Patch(c.t.Context(), n.Name, types.MergePatchType, patch, metav1.PatchOptions{}); err != nil {
				c.t.Fatal(err)
			}
		}
	case toleration:
		pods, err := c.pods(m)
		if err != nil {
			c.t.Fatal(err)
		}
		for i := range pods {
			p := &pods[i]
			p.Spec.Tolerations = append(p.Spec.Tolerations, corev1.Toleration{
				Key: "nvidia.com/gpu", Operator: corev1.TolerationOpExists, Effect: corev1.TaintEffectNoSchedule,
			})
			if _, err := c.client.CoreV1().Pods(p.Namespace).Update(c.t.Context(), p, metav1.UpdateOptions{}); err != nil {
				c.t.Fatal(err)
			}
		}
	default:
		c.t.Fatalf("%s: %q must come from an earlier manifest", m.file, a)
	}
}
