package localcluster

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/podresources"
)

// Report is the state of a cluster as a person wants to see it.
type Report struct {
	Kubernetes string          `json:"kubernetes"`
	Server     string          `json:"server"`
	Kubeconfig string          `json:"kubeconfig"`
	Processes  []ProcessStatus `json:"processes"`
	Nodes      []NodeReport    `json:"nodes"`
	// Warnings are sorted; an empty list means that all is well.
	Warnings []string `json:"warnings"`
}

// NodeReport is the state of one node.
type NodeReport struct {
	Name      string           `json:"name"`
	Machine   string           `json:"machine"`
	Ready     bool             `json:"ready"`
	GPUs      []GPUReport      `json:"gpus"`
	Resources []ResourceReport `json:"resources"`
	// Holders is who holds what, from the kubelet's pod-resources API.
	Holders []podresources.Allocation `json:"holders"`
}

// GPUReport is the state of one GPU.
type GPUReport struct {
	Index     int    `json:"index"`
	UUID      string `json:"uuid"`
	Name      string `json:"name"`
	MemoryMiB int    `json:"memoryMiB"`
	Health    string `json:"health"`
	// MIG lists the profiles of its MIG devices.
	MIG []string `json:"mig,omitempty"`
	// Holders are the "namespace/pod" of those that use it or a view of it.
	Holders []string `json:"holders,omitempty"`
}

// ResourceReport is an extended resource of a node, in devices.
type ResourceReport struct {
	Name        string `json:"name"`
	Capacity    int64  `json:"capacity"`
	Allocatable int64  `json:"allocatable"`
	Held        int64  `json:"held"`
}

// callTimeout bounds each question that Inspect asks.
const callTimeout = 5 * time.Second

// Inspect asks the parts of a running cluster how they are. A part that does
// not answer is a warning, not an error.
func Inspect(ctx context.Context, s *State) *Report {
	r := &Report{Kubernetes: s.Kubernetes, Server: s.Server, Kubeconfig: s.Kubeconfig, Processes: s.Processes, Warnings: []string{}}
	warn := func(format string, args ...any) { r.Warnings = append(r.Warnings, fmt.Sprintf(format, args...)) }
	if !s.Ready {
		warn("the cluster is still starting")
	}
	for _, p := range s.Processes {
		if p.PID == 0 {
			warn("%s is not running; log: %s", p.Name, p.Log)
		} else if p.Restarts > 0 {
			warn("%s was started again %d times; log: %s", p.Name, p.Restarts, p.Log)
		}
	}
	nodes, err := listNodes(ctx, s.Kubeconfig)
	if err != nil {
		warn("kube-apiserver: %v", err)
	}
	for i := range s.Nodes {
		n := &s.Nodes[i]
		report := NodeReport{Name: n.Name, Machine: n.Machine, Holders: []podresources.Allocation{}}
		if have := nodes[n.Name]; have != nil {
			report.fromNode(have)
			if !report.Ready {
				warn("node %s is not ready", n.Name)
			}
		} else if nodes != nil {
			warn("node %s is not registered", n.Name)
		}
		hardware, err := report.fromMachine(n.MachineDir)
		if err != nil {
			warn("node %s: %v", n.Name, err)
		}
		if err := report.addHolders(ctx, n.PodResourcesSocket(), hardware); err != nil {
			warn("node %s: %v", n.Name, err)
		}
		for _, g := range report.GPUs {
			if g.Health != gpu.Healthy.String() {
				warn("node %s: GPU %d (%s) is %s", n.Name, g.Index, g.UUID, g.Health)
			}
		}
		r.Nodes = append(r.Nodes, report)
	}
	slices.Sort(r.Warnings)
	return r
}

func listNodes(ctx context.Context, kubeconfig string) (map[string]*corev1.Node, error) {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	if err != nil {
		return nil, err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return nil, err
	}
	list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil, err
	}
	nodes := make(map[string]*corev1.Node, len(list.Items))
	for i := range list.Items {
		nodes[list.Items[i].Name] = &list.Items[i]
	}
	return nodes, nil
}

// IsGPUResource says whether a resource name is one of GPUs: one of NVIDIA's
// domain, or any other extended resource that an agent may have been told to
// use instead.
func isGPUResource(name corev1.ResourceName) bool {
	return strings.Contains(string(name), "/")
}

func (r *NodeReport) fromNode(n *corev1.Node) {
	for _, c := range n.Status.Conditions {
		if c.Type == corev1.NodeReady {
			r.Ready = c.Status == corev1.ConditionTrue
		}
	}
	for name, quantity := range n.Status.Capacity {
		if !isGPUResource(name) {
			continue
		}
		allocatable := n.Status.Allocatable[name]
		r.Resources = append(r.Resources, ResourceReport{Name: string(name), Capacity: quantity.Value(), Allocatable: allocatable.Value()})
	}
	slices.SortFunc(r.Resources, func(a, b ResourceReport) int { return strings.Compare(a.Name, b.Name) })
}

func (r *NodeReport) fromMachine(dir string) (*gpu.Machine, error) {
	hardware, err := machine.Open(dir)
	if err != nil {
		return nil, err
	}
	defer hardware.Close()
	m, err := hardware.Read()
	if err != nil {
		return nil, err
	}
	for _, g := range m.GPUs {
		report := GPUReport{Index: g.Index, UUID: g.UUID, Name: g.Name, MemoryMiB: g.MemoryMiB, Health: g.Health.State.String()}
		for _, d := range g.MIG.Devices {
			report.MIG = append(report.MIG, d.Profile)
		}
		r.GPUs = append(r.GPUs, report)
	}
	return &m, nil
}

// addHolders asks the kubelet who holds what and notes it with the resources
// and GPUs.
func (r *NodeReport) addHolders(ctx context.Context, socket string, m *gpu.Machine) error {
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	held, err := podresources.List(ctx, socket)
	if err != nil {
		return err
	}
	r.Holders = append(r.Holders, held...)
	for _, h := range held {
		for i := range r.Resources {
			if r.Resources[i].Name == h.Resource {
				r.Resources[i].Held += int64(len(h.Devices))
			}
		}
		for _, text := range h.Devices {
			id, err := gpu.ParseDeviceID(text)
			if err != nil || m == nil {
				continue // not one of ours
			}
			g := m.Parent(id.Base)
			if g == nil {
				return fmt.Errorf("%s/%s holds %s, which the machine does not have", h.Namespace, h.Pod, text)
			}
			pod := h.Namespace + "/" + h.Pod
			if holders := &r.GPUs[g.Index].Holders; !slices.Contains(*holders, pod) {
				*holders = append(*holders, pod)
			}
		}
	}
	return nil
}
