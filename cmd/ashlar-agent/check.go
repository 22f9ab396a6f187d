package main

import (
	"errors"
	"fmt"
	"io"
	"os"

	"github.com/spf13/cobra"

	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

func newCheck() *cobra.Command {
	var machines []string
	cmd := &cobra.Command{
		Use:   "check FILE",
		Short: "Check a device-plugin config and show what it makes of machines",
		Long: `Check a device-plugin config and show what it makes of machines.

FILE is the config itself or a ConfigMap manifest with it. The exit code is 1
where the file is bad, with every problem and its line, or where a machine named
by --machine cannot be served with it.`,
		Example: "  ashlar-agent config check timeslice.yaml --machine g5.12xlarge --machine p4d.24xlarge",
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.ExactArgs(1)(cmd, args); err != nil {
				return usageError{err}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			return check(cmd.OutOrStdout(), args[0], machines)
		},
	}
	cmd.Flags().StringArrayVar(&machines, "machine", nil, "machine to show: a built-in name or a file; may be given several times (default: all built-in ones)")
	return cmd
}

func check(out io.Writer, file string, machines []string) error {
	data, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	config, warnings, err := sharing.Parse(file, data)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		fmt.Fprintln(out, "warning:", w)
	}
	named := len(machines) > 0
	if !named {
		machines = machine.BuiltinNames()
	}
	var failed []error
	for _, name := range machines {
		fmt.Fprintf(out, "\n%s\n", name)
		err := checkMachine(out, config, name)
		if err == nil {
			continue
		}
		fmt.Fprintf(out, "  cannot be served: %v\n", err)
		if named {
			failed = append(failed, fmt.Errorf("%s: %w", name, err))
		}
	}
	return errors.Join(failed...)
}

// checkMachine shows what the config makes of one machine.
func checkMachine(out io.Writer, config *sharing.Config, name string) error {
	desc, err := machine.Find(name)
	if err != nil {
		return err
	}
	m, err := machine.New(desc, name).Read()
	if err != nil {
		return err
	}
	plan, warnings, err := config.Plan(&m)
	if err != nil {
		return err
	}
	for _, w := range warnings {
		fmt.Fprintln(out, "  warning:", w)
	}
	return plan.WriteTable(out)
}
