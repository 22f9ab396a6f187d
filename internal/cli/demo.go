package cli

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/ashlar-gpu/ashlar/internal/localcluster"
)

// waitsLabel marks pods of the examples that are meant to wait; its value says
// for what.
const waitsLabel = "ashlar.dev/example"

// demoTimeout bounds the wait for the examples' pods.
const demoTimeout = 90 * time.Second

// demoTaint keeps pods without GPUs away from the demo's nodes, as on a cluster
// in production.
const demoTaint = "taint=nvidia.com/gpu=present:NoSchedule"

// demoNode is a node of the demo and what it must offer.
type demoNode struct {
	spec, name string
	resource   corev1.ResourceName
	want       int64
}

func demoNodes(examples string) []demoNode {
	return []demoNode{
		{"p4d.24xlarge,name=p4d," + demoTaint, "p4d", "nvidia.com/gpu", 8},
		{"g5.12xlarge,name=g5," + demoTaint + ",config=" + filepath.Join(examples, "time-slicing-config.yaml"), "g5", "nvidia.com/gpu", 32},
		{filepath.Join(examples, "machines", "a30x4-mig.yaml") + ",name=a30," + demoTaint + ",config=" + filepath.Join(examples, "mig-config.yaml"), "a30", "nvidia.com/mig-1g.6gb", 8},
	}
}

func newDemo() *cobra.Command {
	var stateDir, examples string
	var keep bool
	cmd := &cobra.Command{
		Use:   "demo",
		Short: "Run the examples on a local cluster of three machines",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			d := demo{stateDir: stateDir, examples: examples, keep: keep, out: cmd.OutOrStdout(), progress: cmd.ErrOrStderr()}
			return d.run(cmd.Context())
		},
	}
	stateDirFlag(cmd, &stateDir)
	cmd.Flags().StringVar(&examples, "examples", "examples", "folder of the example manifests")
	cmd.Flags().BoolVar(&keep, "keep", false, "leave the cluster running")
	return cmd
}

// demo is one run of the demo.
type demo struct {
	stateDir, examples string
	keep               bool
	out, progress      io.Writer

	state  *localcluster.State
	client kubernetes.Interface
	// held is what each pod was seen to hold: "namespace/pod" to devices.
	held map[string]map[string]bool
}

func (d *demo) run(ctx context.Context) (err error) {
	nodes := demoNodes(d.examples)
	args := []string{"up", "--detach", "--state-dir=" + d.stateDir}
	for _, n := range nodes {
		args = append(args, "--node="+n.spec)
	}
	if err := detach(ctx, args, d.stateDir, io.Discard, d.progress); err != nil {
		return err
	}
	defer func() {
		if d.keep && err == nil {
			return
		}
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), downTimeout)
		defer cancel()
		err = errors.Join(err, localcluster.Down(ctx, d.stateDir))
	}()
	if d.state, err = localcluster.ReadState(d.stateDir); err != nil {
		return err
	}
	config, err := clientcmd.BuildConfigFromFlags("", d.state.Kubeconfig)
	if err != nil {
		return err
	}
	if d.client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	pods, err := d.apply(ctx)
	if err != nil {
		return err
	}
	return d.show(ctx, nodes, pods)
}

// apply applies the examples and returns their pods once they are as they should
// be. Those that are meant to wait for the others come last.
func (d *demo) apply(ctx context.Context) ([]corev1.Pod, error) {
	files, err := filepath.Glob(filepath.Join(d.examples, "*.yaml"))
	if err != nil {
		return nil, err
	}
	// Classes come before the Jobs that name them.
	first := []string{"apply", "-f", filepath.Join(d.examples, "priority-classes.yaml")}
	last := []string{"apply"}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, err
		}
		if bytes.Contains(text, []byte("\n    "+waitsLabel+": waits\n")) {
			last = append(last, "-f", file)
		} else {
			first = append(first, "-f", file)
		}
	}
	d.held = make(map[string]map[string]bool)
	var pods []corev1.Pod
	fmt.Fprintf(d.progress, "applying the %d manifests in %s\n", len(files), d.examples)
	for _, args := range [][]string{first, last} {
		if len(args) == 1 {
			continue
		}
		if _, err := d.kubectl(ctx, args...); err != nil {
			return nil, err
		}
		if pods, err = d.await(ctx); err != nil {
			return nil, err
		}
	}
	return pods, nil
}

// kubectl runs kubectl against the cluster.
func (d *demo) kubectl(ctx context.Context, args ...string) (string, error) {
	cmd := exec.CommandContext(ctx, d.state.Kubectl, args...)
	cmd.Env = append(os.Environ(), "KUBECONFIG="+d.state.Kubeconfig)
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w\n%s", strings.Join(args, " "), err, out)
	}
	return string(out), nil
}

// await returns the examples' pods once each runs, has completed, or is meant
// to wait. What they hold is noted on the way, since a pod that has ended holds
// nothing.
func (d *demo) await(ctx context.Context) ([]corev1.Pod, error) {
	ctx, cancel := context.WithTimeout(ctx, demoTimeout)
	defer cancel()
	calm := 0
	for {
		list, err := d.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{})
		if err != nil {
			return nil, err
		}
		d.note(ctx)
		missing, err := d.unsettled(ctx, list.Items)
		if err != nil {
			return nil, err
		}
		// Two calm looks in a row: a controller may be about to make more pods.
		if len(missing) == 0 {
			if calm++; calm == 2 {
				return list.Items, nil
			}
		} else {
			calm = 0
		}
		select {
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return nil, ctx.Err()
			}
			return nil, fmt.Errorf("after %s these are not as they should be:\n  %s", demoTimeout, strings.Join(missing, "\n  "))
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// note adds what each pod holds now.
func (d *demo) note(ctx context.Context) {
	for _, n := range localcluster.Inspect(ctx, d.state).Nodes {
		for _, h := range n.Holders {
			key := h.Namespace + "/" + h.Pod
			if d.held[key] == nil {
				d.held[key] = make(map[string]bool)
			}
			for _, device := range h.Devices {
				d.held[key][device] = true
			}
		}
	}
}

// unsettled names what has yet to come: pods that neither run nor are meant to
// wait, and workloads that lack pods.
func (d *demo) unsettled(ctx context.Context, pods []corev1.Pod) ([]string, error) {
	var missing []string
	for i := range pods {
		p := &pods[i]
		switch {
		case p.Labels[waitsLabel] == "" && !running(p):
			missing = append(missing, fmt.Sprintf("pod %s/%s is %s", p.Namespace, p.Name, p.Status.Phase))
		case p.Labels[waitsLabel] != "" && !unschedulable(p):
			missing = append(missing, fmt.Sprintf("pod %s/%s is %s and should wait", p.Namespace, p.Name, p.Status.Phase))
		}
	}
	deployments, err := d.client.AppsV1().Deployments("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, w := range deployments.Items {
		if w.Labels[waitsLabel] == "" && w.Status.AvailableReplicas < *w.Spec.Replicas {
			missing = append(missing, fmt.Sprintf("deployment %s/%s has %d of %d replicas", w.Namespace, w.Name, w.Status.AvailableReplicas, *w.Spec.Replicas))
		}
	}
	jobs, err := d.client.BatchV1().Jobs("").List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	for _, w := range jobs.Items {
		if w.Labels[waitsLabel] == "" && w.Status.Active+w.Status.Succeeded == 0 {
			missing = append(missing, fmt.Sprintf("job %s/%s has no pods", w.Namespace, w.Name))
		}
	}
	return missing, nil
}

// unschedulable says that the scheduler has found no place for the pod.
func unschedulable(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable
	})
}

func running(p *corev1.Pod) bool {
	return p.Status.Phase == corev1.PodRunning || p.Status.Phase == corev1.PodSucceeded
}

// show prints the last screen and fails where it is not what it should be.
func (d *demo) show(ctx context.Context, nodes []demoNode, pods []corev1.Pod) error {
	columns := `-o=custom-columns=NAME:.metadata.name,GPU:.status.allocatable.nvidia\.com/gpu,MIG-1G:.status.allocatable.nvidia\.com/mig-1g\.6gb,PRODUCT:.metadata.labels.nvidia\.com/gpu\.product`
	table, err := d.kubectl(ctx, "get", "nodes", columns)
	if err != nil {
		return err
	}
	fmt.Fprintf(d.out, "\n$ kubectl get nodes \"%s\"\n%s\n", columns, table)

	slices.SortFunc(pods, func(a, b corev1.Pod) int {
		return cmp.Or(strings.Compare(a.Spec.NodeName, b.Spec.NodeName), strings.Compare(a.Namespace, b.Namespace), strings.Compare(a.Name, b.Name))
	})
	w := tabwriter.NewWriter(d.out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "POD\tSTATUS\tNODE\tDEVICES")
	waiting := 0
	for i := range pods {
		p := &pods[i]
		status := string(p.Status.Phase)
		if p.Status.Phase == corev1.PodSucceeded {
			status = "Completed"
		}
		if !running(p) {
			waiting++
			status = "Waits, as meant"
		}
		devices := d.devices(p)
		fmt.Fprintf(w, "%s/%s\t%s\t%s\t%s\n", p.Namespace, p.Name, status, dash(p.Spec.NodeName), dash(devices[0]))
		for _, more := range devices[1:] {
			fmt.Fprintf(w, "\t\t\t%s\n", more)
		}
	}
	if err := w.Flush(); err != nil {
		return err
	}
	var problems []string
	for _, n := range nodes {
		have, err := d.client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if got := have.Status.Allocatable[n.resource]; got.Value() != n.want {
			problems = append(problems, fmt.Sprintf("node %s offers %d %s, want %d", n.name, got.Value(), n.resource, n.want))
		}
	}
	if len(problems) > 0 {
		return errors.New(strings.Join(problems, "\n"))
	}
	fmt.Fprintf(d.out, "\n%d pods: %d run or have completed, %d wait as meant.\nOne GPU of g5 is 8 slots, so its 4 GPUs are 32 nvidia.com/gpu; p4d offers its 8 GPUs whole.\n", len(pods), len(pods)-waiting, waiting)
	if d.keep {
		fmt.Fprintf(d.out, "\nThe cluster stays:\n  export KUBECONFIG=%s\n  %s get pods -o wide\n  %s status\n  %s down\n", d.state.Kubeconfig, d.state.Kubectl, os.Args[0], os.Args[0])
	} else {
		fmt.Fprintf(d.out, "\nThe cluster ends now. To go on with it: make demo KEEP=1. To make your own:\n  %s up --node p4d.24xlarge --node g5.12xlarge=2\n", os.Args[0])
	}
	return nil
}

// devices lists what a pod was seen to hold, several to a line; at least one
// line.
func (d *demo) devices(p *corev1.Pod) []string {
	held := d.held[p.Namespace+"/"+p.Name]
	ids := make([]string, 0, len(held))
	for id := range held {
		ids = append(ids, id)
	}
	slices.Sort(ids)
	if len(ids) == 0 {
		return []string{""}
	}
	return ids
}
