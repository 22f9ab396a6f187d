package main

import (
	"cmp"
	"encoding/json"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/ashlar-gpu/ashlar/internal/agent"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/visible"
)

// validation is what `validate` is asked for.
type validation struct {
	output, machineDir, devRoot string
	// environ and name are the environment, and NVIDIA_VISIBLE_DEVICES in it.
	environ []string
	name    string
}

func newValidate() *cobra.Command {
	var v validation
	cmd := &cobra.Command{
		Use:   "validate [-o table|json]",
		Short: "Check that this container sees the GPUs that it was given and no others",
		Long: `Check that this container sees the GPUs that it was given and no others.

It is for use inside a pod, as an init container or by kubectl exec. What the pod was
given is in the variables ASHLAR_DEVICES_*, which the agent adds to every allocation;
what it sees is what the driver and /dev show. The exit code is 1 where the two
differ, or where that cannot be found out.

With --machine-dir the driver of a simulated machine stands in: it shows what
NVIDIA_VISIBLE_DEVICES names, or else the GPUs whose device nodes are there.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if v.output != "table" && v.output != "json" {
				return usageError{fmt.Errorf("-o %s: want table or json", v.output)}
			}
			v.environ, v.name = os.Environ(), os.Getenv("NVIDIA_VISIBLE_DEVICES")
			return v.run(cmd.OutOrStdout())
		},
	}
	f := cmd.Flags()
	f.StringVarP(&v.output, "output", "o", "table", "table or json")
	f.StringVar(&v.machineDir, "machine-dir", "", "folder of a simulated machine, in place of the driver")
	f.StringVar(&v.devRoot, "dev-root", "/", "root below which dev/nvidia* are")
	return cmd
}

func (v *validation) run(out io.Writer) error {
	allocated, err := visible.Allocated(v.environ)
	if err != nil {
		return err
	}
	seen, err := v.look()
	if err != nil {
		return err
	}
	report := visible.Compare(allocated, seen)
	if v.output == "json" {
		encoder := json.NewEncoder(out)
		encoder.SetIndent("", "  ")
		err = encoder.Encode(&report)
	} else {
		err = report.WriteTable(out)
	}
	if err != nil {
		return err
	}
	if !report.OK {
		return fmt.Errorf("the container does not see what it was given: %d problems", len(report.Problems))
	}
	return nil
}

// look finds out what is visible.
func (v *validation) look() (visible.Seen, error) {
	nodes, err := visible.Nodes(cmp.Or(v.devRoot, "/"))
	if err != nil {
		return visible.Seen{}, err
	}
	seen := visible.Seen{Nodes: nodes}
	open := openDriver
	if v.machineDir != "" {
		simulated, err := machine.Open(v.machineDir)
		if err != nil {
			return seen, err
		}
		open = func() (agent.Hardware, error) { return simulated, nil }
	}
	m, failed := readWith(open)
	switch {
	case failed != nil: // a driver that cannot be read is a finding
		seen.Driver = failed.Error()
	case v.machineDir == "":
		seen.GPUs = m.GPUs
	default:
		seen.GPUs, err = visible.Simulated(m, v.name, nodes)
	}
	return seen, err
}

// readWith opens a machine and reads it.
func readWith(open func() (agent.Hardware, error)) (*gpu.Machine, error) {
	hardware, err := open()
	if err != nil {
		return nil, err
	}
	return readOnce(hardware)
}
