package localcluster

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"sigs.k8s.io/yaml"

	"github.com/ashlar-gpu/ashlar/internal/localcluster/fakecri"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// The kubelet's fixed folders, of which each has its own. Of their parents it
// sees nothing else.
const (
	kubeletDir = "/var/lib/kubelet"
	podLogDir  = "/var/log/pods"
)

// uninitialized is the taint of nodes whose addresses an external provider has
// yet to write. Here the cluster itself is that provider, since the kubelet
// refuses to take the loopback address for its own.
const uninitialized = "node.cloudprovider.kubernetes.io/uninitialized"

// node is one simulated node.
type node struct {
	NodeState
	spec    NodeSpec
	desc    *machine.Description
	want    map[corev1.ResourceName]int64
	runtime *fakecri.Runtime
}

// NodeState is what others need to know of a node.
type NodeState struct {
	Name string `json:"name"`
	// Machine is the kind of machine, as given to --node.
	Machine string `json:"machine"`
	// MachineDir holds the simulated hardware; see package machine.
	MachineDir string `json:"machineDir"`
	// KubeletDir stands in for /var/lib/kubelet.
	KubeletDir string `json:"kubeletDir"`
	// Config is the device-plugin config that the agent watches, "" for none.
	Config string `json:"config,omitempty"`
}

// PodResourcesSocket is where the node's kubelet says who holds which device.
func (n *NodeState) PodResourcesSocket() string {
	return filepath.Join(n.KubeletDir, "pod-resources", "kubelet.sock")
}

// prepareNodes checks everything that can be checked before a process runs:
// machines, configs, and what resources they make together.
func (c *Cluster) prepareNodes() error {
	names, err := nodeNames(c.options.Nodes)
	if err != nil {
		return err
	}
	for i, spec := range c.options.Nodes {
		desc, err := machine.Find(spec.Machine)
		if err != nil {
			return fmt.Errorf("node %s: %w", spec.Machine, err)
		}
		config := sharing.Default()
		if spec.Config != "" {
			if spec.Config, err = filepath.Abs(spec.Config); err != nil {
				return err
			}
			data, err := os.ReadFile(spec.Config)
			if err != nil {
				return fmt.Errorf("node %s: %w", spec.Machine, err)
			}
			parsed, warnings, err := sharing.Parse(spec.Config, data)
			if err != nil {
				return err
			}
			for _, w := range warnings {
				fmt.Fprintln(c.options.Progress, "warning:", w)
			}
			config = parsed
		}
		for _, name := range names[i] {
			n := &node{spec: spec, desc: desc, NodeState: NodeState{
				Name: name, Machine: spec.Machine, Config: spec.Config,
				MachineDir: c.path("nodes", name, "machine"), KubeletDir: c.path("nodes", name, "kubelet"),
			}}
			if n.want, err = wantedResources(config, desc, name); err != nil {
				return fmt.Errorf("node %s: %w", name, err)
			}
			longest := filepath.Join(n.KubeletDir, "device-plugins") + string(filepath.Separator)
			if room := maxSocketPath - len(longest); room < socketNameRoom {
				return fmt.Errorf("state folder %s: the path of node %s leaves %d bytes for socket names, %d are needed; use a shorter folder or name",
					c.options.StateDir, name, room, socketNameRoom)
			}
			c.nodes = append(c.nodes, n)
			c.state.Nodes = append(c.state.Nodes, n.NodeState)
		}
	}
	return nil
}

// A unix socket's path has at most 107 bytes; the device plugins' names take up
// to socketNameRoom of them.
const (
	maxSocketPath  = 107
	socketNameRoom = 40
)

// wantedResources is what the node will offer when all is well.
func wantedResources(config *sharing.Config, desc *machine.Description, seed string) (map[corev1.ResourceName]int64, error) {
	m, err := machine.New(desc, seed).Read()
	if err != nil {
		return nil, err
	}
	plan, _, err := config.Plan(&m)
	if err != nil {
		return nil, err
	}
	want := make(map[corev1.ResourceName]int64)
	for _, r := range plan.Resources {
		want[corev1.ResourceName(r.Name)] = int64(len(r.Devices))
	}
	return want, nil
}

// startNode brings up the runtime, the kubelet and the agent of a node.
func (c *Cluster) startNode(ctx context.Context, n *node) error {
	dir := func(parts ...string) string { return c.path(append([]string{"nodes", n.Name}, parts...)...) }
	for _, d := range []string{dir("log"), dir("cdi"), filepath.Join(n.KubeletDir, "device-plugins"), dir("plugins")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			return err
		}
	}
	if err := machine.Init(n.MachineDir, n.desc, n.Name); err != nil {
		return err
	}
	var err error
	if n.runtime, err = fakecri.Start(dir("cri.sock"), dir("log")); err != nil {
		return err
	}
	ports, err := freePorts(1)
	if err != nil {
		return err
	}
	if err := c.writeKubeletFiles(n, dir, ports[0]); err != nil {
		return err
	}
	labels := maps.Clone(n.spec.Labels)
	labels["node.kubernetes.io/instance-type"] = n.desc.InstanceType
	if err := c.procs.start(ctx, command{
		name: "kubelet/" + n.Name, path: c.options.Binaries["sim-kubelet"], ownMounts: true,
		args: []string{
			dir("sim.json"), "--config=" + dir("kubelet.yaml"), "--kubeconfig=" + dir("kubelet.kubeconfig"),
			"--hostname-override=" + n.Name, "--cloud-provider=external", "--node-labels=" + joinLabels(labels),
		},
	}); err != nil {
		return err
	}
	agentConfig := dir("agent.kubeconfig")
	if err := c.ca.kubeconfig(agentConfig, c.state.Server, "agent-"+n.Name, "ashlar-agent:"+n.Name, agentGroup); err != nil {
		return err
	}
	args := []string{
		"run", "--node-name=" + n.Name, "--kubeconfig=" + agentConfig, "--kubelet-dir=" + n.KubeletDir,
		"--cdi-dir=" + dir("cdi"), "--state-dir=" + dir("agent"), "--machine-dir=" + n.MachineDir,
	}
	if n.Config != "" {
		args = append(args, "--config-file="+n.Config)
	}
	if quiet := c.options.HealthQuiet; quiet > 0 {
		args = append(args, "--health-quiet="+quiet.String())
	}
	return c.procs.start(ctx, command{name: "agent/" + n.Name, path: c.options.Agent, args: args})
}

func joinLabels(labels map[string]string) string {
	var text string
	for _, k := range slices.Sorted(maps.Keys(labels)) {
		if text != "" {
			text += ","
		}
		text += k + "=" + labels[k]
	}
	return text
}

// writeKubeletFiles writes the kubelet's config, its kubeconfig and the size of
// its machine.
func (c *Cluster) writeKubeletFiles(n *node, dir func(...string) string, port int) error {
	if err := c.ca.kubeconfig(dir("kubelet.kubeconfig"), c.state.Server, "kubelet-"+n.Name, "system:node:"+n.Name, "system:nodes"); err != nil {
		return err
	}
	memory, err := resource.ParseQuantity(n.desc.Memory)
	if err != nil {
		return fmt.Errorf("machine %s: memory %q: %w", n.spec.Machine, n.desc.Memory, err)
	}
	sim, err := json.Marshal(map[string]any{
		"cpus": n.desc.CPUs, "memoryBytes": memory.Value(), "numaNodes": n.desc.NUMANodes,
		"binds": map[string]string{kubeletDir: n.KubeletDir, podLogDir: dir("log")},
	})
	if err != nil {
		return err
	}
	if err := os.WriteFile(dir("sim.json"), sim, 0o600); err != nil {
		return err
	}
	// A map, since the kubelet's own types would bring half of its dependencies;
	// the kubelet reads it strictly.
	const never = "0%"
	config := map[string]any{
		"apiVersion": "kubelet.config.k8s.io/v1beta1", "kind": "KubeletConfiguration",
		"address": "127.0.0.1", "port": port, "healthzPort": 0,
		"containerRuntimeEndpoint": "unix://" + dir("cri.sock"),
		"tlsCertFile":              c.ca.path("kubelet-" + n.Name + ".crt"),
		"tlsPrivateKeyFile":        c.ca.path("kubelet-" + n.Name + ".key"),
		"authentication": map[string]any{
			"x509":      map[string]any{"clientCAFile": c.ca.path("ca.crt")},
			"anonymous": map[string]any{"enabled": false},
			"webhook":   map[string]any{"enabled": false},
		},
		// Whoever has a certificate of the cluster's authority may ask. There is
		// nothing to protect from them: the containers run nothing.
		"authorization": map[string]any{"mode": "AlwaysAllow"},
		"clusterDomain": "cluster.local", "clusterDNS": []string{"10.96.0.10"}, "resolvConf": "",
		// The containers have no processes, so there is nothing for cgroups to hold.
		"cgroupsPerQOS": false, "enforceNodeAllocatable": []string{}, "failCgroupV1": false, "failSwapOn": false,
		"makeIPTablesUtilChains": false, "volumePluginDir": dir("plugins"),
		"serializeImagePulls": false, "registryPullQPS": 0, "maxPods": 250, "registerWithTaints": n.spec.Taints,
		// Changed device counts reach the node object within this time.
		"nodeStatusUpdateFrequency": "2s",
		// The disk and the memory are the host's: never evict for them.
		"evictionHard": map[string]string{
			"memory.available": never, "nodefs.available": never, "nodefs.inodesFree": never,
			"imagefs.available": never, "imagefs.inodesFree": never, "pid.available": never,
		},
	}
	data, err := yaml.Marshal(config)
	if err != nil {
		return err
	}
	return os.WriteFile(dir("kubelet.yaml"), data, 0o600)
}

// awaitNode returns when the node is Ready and offers what its config
// promises. It also writes the node's address (see uninitialized).
func (c *Cluster) awaitNode(ctx context.Context, n *node) error {
	err := c.await(ctx, "kubelet/"+n.Name, time.Minute, func(ctx context.Context) error {
		have, err := c.client.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		if err := c.initialize(ctx, have); err != nil {
			return err
		}
		for _, condition := range have.Status.Conditions {
			if condition.Type == corev1.NodeReady && condition.Status != corev1.ConditionTrue {
				return fmt.Errorf("%s: %s", condition.Reason, condition.Message)
			}
		}
		if len(have.Spec.Taints) > len(n.spec.Taints) {
			return fmt.Errorf("taints %v", have.Spec.Taints)
		}
		return nil
	})
	if err != nil {
		return err
	}
	return c.await(ctx, "agent/"+n.Name, time.Minute, func(ctx context.Context) error {
		have, err := c.client.CoreV1().Nodes().Get(ctx, n.Name, metav1.GetOptions{})
		if err != nil {
			return err
		}
		for name, count := range n.want {
			if got := have.Status.Allocatable[name]; got.Value() != count {
				return fmt.Errorf("%s: %d of %d are allocatable", name, got.Value(), count)
			}
		}
		return nil
	})
}

// initialize does for a node what a cloud's controller would: it writes the
// address and takes the taint away.
func (c *Cluster) initialize(ctx context.Context, have *corev1.Node) error {
	i := slices.IndexFunc(have.Spec.Taints, func(t corev1.Taint) bool { return t.Key == uninitialized })
	if i < 0 {
		return nil
	}
	status := fmt.Sprintf(`{"status":{"addresses":[{"type":"InternalIP","address":"127.0.0.1"},{"type":"Hostname","address":%q}]}}`, have.Name)
	nodes := c.client.CoreV1().Nodes()
	if _, err := nodes.Patch(ctx, have.Name, types.MergePatchType, []byte(status), metav1.PatchOptions{}, "status"); err != nil {
		return err
	}
	have = have.DeepCopy()
	have.Spec.Taints = slices.Delete(have.Spec.Taints, i, i+1)
	_, err := nodes.Update(ctx, have, metav1.UpdateOptions{})
	return err
}
