package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"time"

	"github.com/spf13/cobra"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/agent"
	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/cdi/driver"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/health"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/nvml"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// runOptions are the flags of `run` that are not settings of the config.
type runOptions struct {
	agent.Options
	kubeconfig string
	machineDir string
}

func newRun() *cobra.Command {
	o := runOptions{Options: agent.Options{Health: health.DefaultPolicy()}}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Serve the GPUs of this node to its kubelet",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var err error
			if o.Override, err = chosenOverrides(cmd.Flags()); err != nil {
				return err
			}
			o.Log = slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil))
			if err := o.connect(); err != nil {
				return err
			}
			if err := o.Health.Override(os.Getenv("DP_DISABLE_HEALTHCHECKS"), os.Getenv("DP_ENABLE_HEALTHCHECKS")); err != nil {
				return usageError{err}
			}
			o.BootID = bootID(o.Log)
			o.Open, o.Describe, o.ProcRoot = openDriver, describeDriver(o.Log), "/proc"
			if o.machineDir != "" {
				o.Open = func() (agent.Hardware, error) { return machine.Open(o.machineDir) }
				o.Describe, o.ProcRoot = describeSimulated, ""
			}
			return agent.Run(cmd.Context(), o.Options)
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.NodeName, "node-name", os.Getenv("NODE_NAME"), "name of the node object (also $NODE_NAME)")
	f.StringVar(&o.ConfigFile, "config-file", os.Getenv("CONFIG_FILE"), "device-plugin config, watched for changes (also $CONFIG_FILE)")
	f.StringVar(&o.KubeletDir, "kubelet-dir", "/var/lib/kubelet", "folder of the kubelet")
	f.StringVar(&o.StateDir, "state-dir", "/var/lib/ashlar-agent", "folder where the last good config and the health of GPUs are kept")
	f.StringVar(&o.CDIDir, "cdi-dir", "/var/run/cdi", "folder of CDI specs")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig to reach the apiserver (default: that of the pod)")
	f.StringVar(&o.machineDir, "machine-dir", "", "folder of a simulated machine, in place of the node's driver")
	f.DurationVar(&o.Health.Quiet, "health-quiet", o.Health.Quiet, "how long a GPU must be without faults before it is offered again; doubles with each fault")
	f.StringVar(&o.MIGConfigFile, "mig-config-file", os.Getenv("MIG_CONFIG_FILE"), "configs for the node label nvidia.com/mig.config (also $MIG_CONFIG_FILE; default: generated for the machine, see `ashlar-agent mig generate`)")
	f.DurationVar(&o.DrainTimeout, "mig-drain-timeout", 5*time.Minute, "how long pods have to leave a GPU that is cut anew")
	addOverrides(f)
	return cmd
}

// connect makes the clients of the apiserver, or leaves them nil where there is
// none to be reached: the agent then serves devices, and tells nobody.
func (o *runOptions) connect() error {
	var config *rest.Config
	var err error
	if o.kubeconfig == "" {
		config, err = rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			o.Log.Warn("no apiserver: no labels, Events and GPUNode will be written, no MIG config is applied, and GPUs held by init containers are not seen; give --kubeconfig")
			return nil
		}
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	}
	if err != nil {
		return fmt.Errorf("apiserver: %w", err)
	}
	if o.NodeName == "" {
		return usageError{errors.New("--node-name or $NODE_NAME is needed to write to the node object")}
	}
	scheme := runtime.NewScheme()
	if err := v1alpha1.AddToScheme(scheme); err != nil {
		return err
	}
	if o.Client, err = kubernetes.NewForConfig(config); err != nil {
		return err
	}
	// The kinds are looked up when they are first used: they may be installed later.
	o.GPUNodes, err = client.NewWithWatch(config, client.Options{Scheme: scheme})
	return err
}

// bootID tells one boot of the host from the next.
func bootID(log *slog.Logger) string {
	id, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		log.Warn("a reboot will not be noticed", "error", err)
	}
	return strings.TrimSpace(string(id))
}

// openDriver opens the node's driver.
func openDriver() (agent.Hardware, error) { return nvml.Open() }

// describeSimulated makes CDI specs of a machine that has no driver.
func describeSimulated(m *gpu.Machine, class cdi.Class, flags *sharing.Flags) (*specs.Spec, error) {
	return cdi.Simulated(m, class, flags.Plugin.DeviceIDStrategy == sharing.IDByIndex)
}

// describeDriver makes CDI specs from the driver's files.
func describeDriver(log *slog.Logger) func(*gpu.Machine, cdi.Class, *sharing.Flags) (*specs.Spec, error) {
	return func(m *gpu.Machine, class cdi.Class, flags *sharing.Flags) (*specs.Spec, error) {
		return driver.Spec(m, driver.Options{
			Class: class, Indices: flags.Plugin.DeviceIDStrategy == sharing.IDByIndex,
			DriverRoot: flags.DriverRoot, DevRoot: flags.DevRoot, HookPath: flags.Plugin.NVIDIACTKPath, Log: log,
		})
	}
}
