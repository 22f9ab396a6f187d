package cli

import (
	"errors"
	"fmt"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/localcluster"
	"github.com/ashlar-gpu/ashlar/internal/machine"
)

func newMachines() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "machines [NAME]",
		Short: "List the built-in simulated machines, or print the description of one",
		Long: `List the built-in simulated machines, or print the description of one.

A printed description is a file that can be changed and given to "ashlar up
--node FILE".`,
		Args: cobra.MaximumNArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			if len(args) == 1 {
				text, err := machine.BuiltinYAML(args[0])
				if err != nil {
					return err
				}
				_, err = cmd.OutOrStdout().Write(text)
				return err
			}
			var rows []machineRow
			for _, name := range machine.BuiltinNames() {
				row, err := describeMachine(name)
				if err != nil {
					return err
				}
				rows = append(rows, row)
			}
			if format != "table" {
				return writeAs(cmd.OutOrStdout(), format, rows)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "NAME\tGPUS\tCPUS\tMEMORY\tNUMA NODES")
			for _, r := range rows {
				fmt.Fprintf(w, "%s\t%s\t%d\t%s\t%d\n", r.Name, r.GPUs, r.CPUs, r.Memory, r.NUMANodes)
			}
			return w.Flush()
		},
	}
	outputFlag(cmd, &format, "table", "json", "yaml")
	return cmd
}

// machineRow is a line of `ashlar machines`.
type machineRow struct {
	Name      string `json:"name"`
	GPUs      string `json:"gpus"`
	CPUs      int    `json:"cpus"`
	Memory    string `json:"memory"`
	NUMANodes int    `json:"numaNodes"`
}

func describeMachine(name string) (machineRow, error) {
	desc, err := machine.Builtin(name)
	if err != nil {
		return machineRow{}, err
	}
	m, err := machine.New(desc, name).Read()
	if err != nil {
		return machineRow{}, err
	}
	var models []string
	for i := 0; i < len(m.GPUs); {
		n := 1
		for i+n < len(m.GPUs) && m.GPUs[i+n].Name == m.GPUs[i].Name {
			n++
		}
		models = append(models, fmt.Sprintf("%d x %s", n, m.GPUs[i].Name))
		i += n
	}
	return machineRow{name, strings.Join(models, ", "), desc.CPUs, desc.Memory, desc.NUMANodes}, nil
}

func newFault() *cobra.Command {
	var dir, node string
	cmd := &cobra.Command{
		Use:   "fault (lose|find|xid) --node NODE GPU [XID]",
		Short: "Break or mend a simulated GPU of the running cluster",
		Long: `Break or mend a simulated GPU of the running cluster.

  lose GPU       the GPU stops answering, as one that fell off the bus
  find GPU       it answers again
  xid GPU XID    the driver reports an XID error of it

GPU is its index on the node.`,
		Example: "  sudo ashlar fault lose --node g5-12xlarge-1 2",
		Args:    cobra.RangeArgs(2, 3),
		RunE: func(_ *cobra.Command, args []string) error {
			return injectFault(dir, node, args)
		},
	}
	stateDirFlag(cmd, &dir)
	cmd.Flags().StringVar(&node, "node", "", "node of the GPU")
	return cmd
}

func injectFault(dir, node string, args []string) error {
	state, err := localcluster.ReadState(dir)
	if err != nil {
		return err
	}
	var names []string
	machineDir := ""
	for _, n := range state.Nodes {
		names = append(names, n.Name)
		if n.Name == node {
			machineDir = n.MachineDir
		}
	}
	if machineDir == "" {
		return usageError{fmt.Errorf("fault: --node %q: want one of %s", node, strings.Join(names, ", "))}
	}
	hardware, err := machine.Open(machineDir)
	if err != nil {
		return err
	}
	defer hardware.Close()
	m, err := hardware.Read()
	if err != nil {
		return err
	}
	index, err := strconv.Atoi(args[1])
	if err != nil || index < 0 || index >= len(m.GPUs) {
		return usageError{fmt.Errorf("fault: GPU %q: want an index from 0 to %d", args[1], len(m.GPUs)-1)}
	}
	uuid := m.GPUs[index].UUID
	switch {
	case args[0] == "lose" && len(args) == 2:
		return hardware.SetLost(uuid, true)
	case args[0] == "find" && len(args) == 2:
		return hardware.SetLost(uuid, false)
	case args[0] == "xid" && len(args) == 3:
		xid, err := strconv.Atoi(args[2])
		if err != nil || xid < 1 {
			return usageError{fmt.Errorf("fault: XID %q is not a number from 1", args[2])}
		}
		return hardware.InjectXID(uuid, xid, gpu.AnyInstance, gpu.AnyInstance)
	}
	return usageError{errors.New("fault: want `lose GPU`, `find GPU` or `xid GPU XID`")}
}
