// Command sim-kubelet is the unmodified kubelet on a machine of another size.
//
//	sim-kubelet MACHINE.json [kubelet flags]
//
// Two things differ from the stock kubelet. What cAdvisor says of CPUs, memory
// and NUMA nodes is replaced by the numbers in MACHINE.json, so that a laptop
// can offer a node of 96 CPUs. And before anything else the folders in
// MACHINE.json are bind-mounted over the kubelet's fixed ones
// (/var/lib/kubelet holds the hard-coded device-plugin folder), which is why
// the process must be started in a mount namespace of its own: the mounts live
// and die with it, and several kubelets fit on one host. Each lies in an empty
// tmpfs over its parent, so that nothing need be made on the host, nor can the
// host take away what is mounted over.
package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"

	cadvisorapi "github.com/google/cadvisor/lib/model"
	"github.com/spf13/pflag"
	genericapiserver "k8s.io/apiserver/pkg/server"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/cli/flag"
	"k8s.io/component-base/logs"
	logsapi "k8s.io/component-base/logs/api/v1"
	_ "k8s.io/component-base/metrics/prometheus/clientgo"
	_ "k8s.io/component-base/metrics/prometheus/version"
	"k8s.io/component-base/version/verflag"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kubelet/app"
	"k8s.io/kubernetes/cmd/kubelet/app/options"
	"k8s.io/kubernetes/pkg/kubelet/apis/config/validation"
	"k8s.io/kubernetes/pkg/kubelet/cadvisor"
	"k8s.io/kubernetes/pkg/kubelet/kubeletconfig/configfiles"
	"k8s.io/kubernetes/pkg/util/filesystem"
)

// machine is the content of MACHINE.json.
type machine struct {
	// CPUs is the number of logical CPUs, spread evenly over the NUMA nodes.
	CPUs int `json:"cpus"`
	// MemoryBytes is spread evenly over the NUMA nodes.
	MemoryBytes uint64 `json:"memoryBytes"`
	NUMANodes   int    `json:"numaNodes"`
	// Binds maps a folder of the kubelet to the one that stands in for it.
	Binds map[string]string `json:"binds"`
}

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "sim-kubelet:", err)
		os.Exit(1)
	}
}

func run(args []string) error {
	flags := pflag.NewFlagSet("sim-kubelet", pflag.ContinueOnError)
	flags.SetNormalizeFunc(flag.WordSepNormalizeFunc)
	kubeletFlags := options.NewKubeletFlags()
	kubeletFlags.AddFlags(flags)
	options.AddGlobalFlags(flags)
	if err := flags.Parse(args); err != nil {
		return err
	}
	verflag.PrintAndExitIfRequested()
	if flags.NArg() != 1 {
		return errors.New("usage: sim-kubelet MACHINE.json [kubelet flags]")
	}
	sim, err := readMachine(flags.Arg(0))
	if err != nil {
		return err
	}
	if err := bind(sim.Binds); err != nil {
		return err
	}

	ctx := genericapiserver.SetupSignalContext()
	loader, err := configfiles.NewFsLoader(&filesystem.DefaultFs{}, kubeletFlags.KubeletConfigFile)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	config, err := loader.Load(ctx)
	if err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	gate := utilfeature.DefaultMutableFeatureGate
	if err := gate.SetFromMap(config.FeatureGates); err != nil {
		return err
	}
	logs.InitLogs()
	if err := logsapi.ValidateAndApply(&config.Logging, gate); err != nil {
		return err
	}
	if err := validation.ValidateKubeletConfiguration(config, gate); err != nil {
		return fmt.Errorf("--config: %w", err)
	}
	server := &options.KubeletServer{KubeletFlags: *kubeletFlags, KubeletConfiguration: *config}
	deps, err := app.UnsecuredDependencies(ctx, server, gate)
	if err != nil {
		return err
	}
	deps.CAdvisorInterface, err = newCAdvisor(ctx, server, sim)
	if err != nil {
		return err
	}
	return app.Run(ctx, server, deps, gate)
}

func readMachine(path string) (*machine, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	var m machine
	if err := json.Unmarshal(data, &m); err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	if m.CPUs < 1 || m.MemoryBytes < 1 || m.NUMANodes < 1 || m.NUMANodes > m.CPUs {
		return nil, fmt.Errorf("%s: want cpus, memoryBytes and numaNodes of at least 1 and no more NUMA nodes than CPUs", path)
	}
	return &m, nil
}

// bind mounts each folder over its target. It refuses to work in the mount
// namespace of init, where the mounts would outlive the process and hide the
// files of a kubelet that really runs on this host.
func bind(binds map[string]string) error {
	own, err := os.Readlink("/proc/self/ns/mnt")
	if err != nil {
		return err
	}
	if first, err := os.Readlink("/proc/1/ns/mnt"); err == nil && first == own && os.Getpid() != 1 {
		return errors.New("not in a mount namespace of its own: start it with unshare -m")
	}
	for target, source := range binds {
		if err := syscall.Mount("tmpfs", filepath.Dir(target), "tmpfs", 0, "size=16m,mode=755"); err != nil {
			return fmt.Errorf("tmpfs over %s: %w", filepath.Dir(target), err)
		}
		if err := os.Mkdir(target, 0o755); err != nil {
			return err
		}
		if err := syscall.Mount(source, target, "", syscall.MS_BIND|syscall.MS_REC, ""); err != nil {
			return fmt.Errorf("bind %s over %s: %w", source, target, err)
		}
	}
	return nil
}

// resized is cAdvisor with another machine under it.
type resized struct {
	cadvisor.Interface
	sim *machine
}

// newCAdvisor makes the cAdvisor that the kubelet would make for itself. It
// watches no cgroup but the root, whose discovery also finds the file systems:
// the containers have no processes, and those of the host are not the node's.
func newCAdvisor(ctx context.Context, s *options.KubeletServer, sim *machine) (cadvisor.Interface, error) {
	images := cadvisor.NewImageFsInfoProvider(s.ContainerRuntimeEndpoint)
	real, err := cadvisor.New(klog.FromContext(ctx), images, filepath.Clean(s.RootDirectory), []string{"/ashlar-none"},
		cadvisor.UsingLegacyCadvisorStats(s.ContainerRuntimeEndpoint), s.LocalStorageCapacityIsolation, false)
	if err != nil {
		return nil, err
	}
	return &resized{Interface: real, sim: sim}, nil
}

// MachineInfo returns the host's identity with the simulated machine's size.
func (r *resized) MachineInfo(logger klog.Logger) (*cadvisorapi.MachineInfo, error) {
	real, err := r.Interface.MachineInfo(logger)
	if err != nil {
		return nil, err
	}
	info := real.Clone()
	info.NumCores = r.sim.CPUs
	info.NumPhysicalCores = r.sim.CPUs
	info.NumSockets = r.sim.NUMANodes
	info.MemoryCapacity = r.sim.MemoryBytes
	info.SwapCapacity = 0
	info.Topology = nil
	for n := range r.sim.NUMANodes {
		node := cadvisorapi.Node{Id: n, Memory: r.sim.MemoryBytes / uint64(r.sim.NUMANodes)}
		for cpu := n * r.sim.CPUs / r.sim.NUMANodes; cpu < (n+1)*r.sim.CPUs/r.sim.NUMANodes; cpu++ {
			node.Cores = append(node.Cores, cadvisorapi.Core{Id: cpu, Threads: []int{cpu}, SocketID: n})
		}
		info.Topology = append(info.Topology, node)
	}
	return info, nil
}
