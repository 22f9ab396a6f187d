package main

import (
	"errors"
	"fmt"
	"log/slog"
	"os"

	"github.com/spf13/cobra"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/agent"
	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/cdi/driver"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
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
	var o runOptions
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
			if o.Client, err = o.connect(); err != nil {
				return err
			}
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
	f.StringVar(&o.StateDir, "state-dir", "/var/lib/ashlar-agent", "folder where the last good config is kept")
	f.StringVar(&o.CDIDir, "cdi-dir", "/var/run/cdi", "folder of CDI specs")
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig to reach the apiserver (default: that of the pod)")
	f.StringVar(&o.machineDir, "machine-dir", "", "folder of a simulated machine, in place of the node's driver")
	addOverrides(f)
	return cmd
}

// connect returns a client of the apiserver, or nil where there is none to be
// reached: the agent then serves devices without labels and Events.
func (o *runOptions) connect() (kubernetes.Interface, error) {
	var config *rest.Config
	var err error
	if o.kubeconfig == "" {
		config, err = rest.InClusterConfig()
		if errors.Is(err, rest.ErrNotInCluster) {
			o.Log.Warn("no apiserver: no labels and Events will be written, and GPUs held by init containers are not seen; give --kubeconfig")
			return nil, nil //nolint:nilnil // nil is documented as "none"
		}
	} else {
		config, err = clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	}
	if err != nil {
		return nil, fmt.Errorf("apiserver: %w", err)
	}
	if o.NodeName == "" {
		return nil, usageError{errors.New("--node-name or $NODE_NAME is needed to write to the node object")}
	}
	return kubernetes.NewForConfig(config)
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
