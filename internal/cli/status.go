package cli

import (
	"fmt"
	"io"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/spf13/cobra"

	"github.com/ashlar-gpu/ashlar/internal/localcluster"
)

func newStatus() *cobra.Command {
	var dir, format string
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the local cluster: its parts, nodes, GPUs and who holds what",
		Long: `Show the local cluster: its parts, nodes, GPUs and who holds what.

Who holds what is asked of each node's kubelet (pod-resources API), not derived.
The exit code is 1 where there are warnings and 3 where no cluster is running.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			state, err := localcluster.ReadState(dir)
			if err != nil {
				return err
			}
			report := localcluster.Inspect(cmd.Context(), state)
			if format == "table" {
				err = writeReport(cmd.OutOrStdout(), report)
			} else {
				err = writeAs(cmd.OutOrStdout(), format, report)
			}
			if err == nil && len(report.Warnings) > 0 {
				return errProblems
			}
			return err
		},
	}
	stateDirFlag(cmd, &dir)
	outputFlag(cmd, &format, "table", "json", "yaml")
	return cmd
}

// writeReport writes the report for people.
func writeReport(out io.Writer, r *localcluster.Report) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	row := func(cells ...string) { fmt.Fprintln(w, strings.Join(cells, "\t")) }
	fmt.Fprintf(w, "Kubernetes %s at %s\nKUBECONFIG=%s\n\n", r.Kubernetes, r.Server, r.Kubeconfig)

	row("COMPONENT", "PID", "RESTARTS")
	for _, p := range r.Processes {
		row(p.Name, strconv.Itoa(p.PID), strconv.Itoa(p.Restarts))
	}
	row()
	row("NODE", "MACHINE", "READY", "RESOURCE", "CAPACITY", "ALLOCATABLE", "HELD")
	for _, n := range r.Nodes {
		head := []string{n.Name, n.Machine, strconv.FormatBool(n.Ready)}
		if len(n.Resources) == 0 {
			row(append(head, "-", "-", "-", "-")...)
		}
		for _, res := range n.Resources {
			row(append(head, res.Name, itoa(res.Capacity), itoa(res.Allocatable), itoa(res.Held))...)
			head = []string{"", "", ""}
		}
	}
	row()
	row("NODE", "GPU", "UUID", "PRODUCT", "MEMORY", "HEALTH", "MIG", "HOLDERS")
	for _, n := range r.Nodes {
		for _, g := range n.GPUs {
			row(n.Name, strconv.Itoa(g.Index), g.UUID, g.Name, fmt.Sprintf("%d MiB", g.MemoryMiB), g.Health, dash(profiles(g.MIG)), dash(few(g.Holders)))
		}
	}
	if len(r.Warnings) > 0 {
		row()
		row("WARNINGS")
		for _, text := range r.Warnings {
			row(text)
		}
	}
	return w.Flush()
}

func itoa(n int64) string { return strconv.FormatInt(n, 10) }

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}

// few lists the first of many names; `-o json` has them all.
func few(names []string) string {
	const most = 3
	if len(names) <= most {
		return strings.Join(names, ", ")
	}
	return fmt.Sprintf("%s and %d more", strings.Join(names[:most-1], ", "), len(names)-most+1)
}

// profiles shortens a list of MIG profiles: "1g.5gb x4, 3g.20gb".
func profiles(list []string) string {
	var parts []string
	for i := 0; i < len(list); {
		n := 1
		for i+n < len(list) && list[i+n] == list[i] {
			n++
		}
		if n == 1 {
			parts = append(parts, list[i])
		} else {
			parts = append(parts, fmt.Sprintf("%s x%d", list[i], n))
		}
		i += n
	}
	return strings.Join(parts, ", ")
}
