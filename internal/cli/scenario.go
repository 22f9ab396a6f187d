package cli

import (
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

// defaultSeed is the seed of what is drawn at random where none is given.
const defaultSeed = 42

func newScenario() *cobra.Command {
	cmd := &cobra.Command{
		Use:   "scenario",
		Short: "List, describe or write the built-in workloads",
		Long: `List, describe or write the built-in workloads.

A scenario is a set of nodes and a mix of jobs from which a trace is drawn. The
same seed gives the same trace. "ashlar replay --scenario NAME" runs one.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	cmd.AddCommand(newScenarioList(), newScenarioShow(), newScenarioWrite())
	for _, c := range cmd.Commands() {
		c.Args = asUsage(c.Args)
	}
	return cmd
}

// scenarioRow is a line of `ashlar scenario list`.
type scenarioRow struct {
	Name    string `json:"name"`
	Version int    `json:"version"`
	Nodes   int    `json:"nodes"`
	GPUs    int    `json:"gpus"`
	Summary string `json:"summary"`
}

func newScenarioList() *cobra.Command {
	var format string
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List the scenarios",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var rows []scenarioRow
			for _, s := range trace.Scenarios() {
				nodes, gpus := scenarioSize(&s)
				rows = append(rows, scenarioRow{s.Name, s.Version, nodes, gpus, s.Summary})
			}
			if format != "table" {
				return writeAs(cmd.OutOrStdout(), format, rows)
			}
			w := tabwriter.NewWriter(cmd.OutOrStdout(), 0, 0, 2, ' ', 0)
			fmt.Fprintln(w, "NAME\tNODES\tGPUS\tSUMMARY")
			for _, r := range rows {
				fmt.Fprintf(w, "%s\t%d\t%d\t%s\n", r.Name, r.Nodes, r.GPUs, r.Summary)
			}
			return w.Flush()
		},
	}
	outputFlag(cmd, &format, "table", "json")
	return cmd
}

func scenarioSize(s *trace.Scenario) (nodes, gpus int) {
	for _, g := range s.Nodes {
		nodes += g.Count
		gpus += g.Count * g.GPUs
	}
	return nodes, gpus
}

// scenarioNamed returns a scenario. The error of an unknown name begins with
// what named it and lists the names.
func scenarioNamed(where, name string) (trace.Scenario, error) {
	if s, ok := trace.ScenarioByName(name); ok {
		return s, nil
	}
	var names []string
	for _, s := range trace.Scenarios() {
		names = append(names, s.Name)
	}
	return trace.Scenario{}, usageError{fmt.Errorf("%s %q: want one of %s", where, name, strings.Join(names, ", "))}
}

func newScenarioShow() *cobra.Command {
	return &cobra.Command{
		Use:   "show NAME",
		Short: "Describe a scenario: its nodes, its jobs and its load",
		Args:  cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := scenarioNamed("scenario show", args[0])
			if err != nil {
				return err
			}
			return showScenario(cmd.OutOrStdout(), &s)
		},
	}
}

func showScenario(out io.Writer, s *trace.Scenario) error {
	nodes, gpus := scenarioSize(s)
	fmt.Fprintf(out, "%s, version %d: %s\n\n%s\n", s.Name, s.Version, s.Summary, wrap(s.Doc, 80))
	fmt.Fprintf(out, "Nodes: %d with %d GPUs\n\n", nodes, gpus)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "COUNT\tGPUS\tMIG\tCORES\tMEMORY GIB")
	for _, g := range s.Nodes {
		devices, mig := "none", "no"
		if g.GPUs > 0 {
			devices = fmt.Sprintf("%d x %s", g.GPUs, g.Product)
		}
		if g.MIG {
			mig = "yes"
		}
		fmt.Fprintf(w, "%d\t%s\t%s\t%d\t%d\n", g.Count, devices, mig, g.Cores, g.MemoryGiB)
	}
	if err := w.Flush(); err != nil {
		return err
	}
	fmt.Fprintf(out, "\nJobs: %s\n\n", arrivals(s))
	weights := 0
	for i := range s.Classes {
		weights += s.Classes[i].Weight
	}
	w = tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "CLASS\tOF JOBS\tGPUS\tGPU GIB\tCORES\tMEMORY GIB\tMEDIAN TIME\tPRIORITY\tONLY ON")
	for i := range s.Classes {
		c := &s.Classes[i]
		fmt.Fprintf(w, "%s\t%.1f %%\t%s\t%s\t%s\t%s\t%s\t%d\t%s\n", c.Name, 100*float64(c.Weight)/float64(weights),
			devicesOf(c), rangeText(c.GPUMemory), rangeText(c.Cores), rangeText(c.Memory), lengthText(c.Duration), c.Priority, onlyOn(c))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "\nMean load: %s of the GPUs if every device were a whole GPU, %s as requested\n",
		loadText(s.ExclusiveLoad()), loadText(s.RequestedLoad()))
	return err
}

// wrap breaks a text into lines of at most so many bytes, each ended.
func wrap(text string, width int) string {
	var b strings.Builder
	column := 0
	for word := range strings.FieldsSeq(text) {
		switch {
		case column == 0:
		case column+1+len(word) > width:
			b.WriteByte('\n')
			column = 0
		default:
			b.WriteByte(' ')
			column++
		}
		b.WriteString(word)
		column += len(word)
	}
	b.WriteByte('\n')
	return b.String()
}

// arrivals says when the jobs of a scenario come.
func arrivals(s *trace.Scenario) string {
	text := fmt.Sprintf("%g a day for %d days", s.Arrivals.PerDay, s.Days)
	for _, b := range s.Arrivals.Bursts {
		text += fmt.Sprintf(", %d from %v on within %v", b.Jobs, duration(b.At), duration(b.Length))
	}
	if s.Jobs > 0 {
		text += fmt.Sprintf(", the first %d", s.Jobs)
	}
	return text
}

// devicesOf says what a job of the class asks of GPUs.
func devicesOf(c *trace.Class) string {
	switch {
	case c.GPUs == 0:
		return "none"
	case c.Profile != "":
		return fmt.Sprintf("%d x %s", c.GPUs, c.Profile)
	case c.Shared:
		return fmt.Sprintf("%g to %g %%", float64(c.Activity.Low)/10, float64(c.Activity.High)/10)
	}
	return fmt.Sprintf("%d", c.GPUs)
}

// onlyOn says which models and links the class needs.
func onlyOn(c *trace.Class) string {
	needs := append([]string(nil), c.Products...)
	if c.Links != placement.AnyLink {
		needs = append(needs, "linked by "+c.Links.String())
	}
	if len(needs) == 0 {
		return "any"
	}
	return strings.Join(needs, ", ")
}

func rangeText(r trace.Range) string {
	switch {
	case r == trace.Range{}:
		return "-"
	case r.Low == r.High:
		return fmt.Sprint(r.Low)
	}
	return fmt.Sprintf("%d to %d", r.Low, r.High)
}

func lengthText(l trace.Lengths) string {
	if l == (trace.Lengths{}) {
		return "for ever"
	}
	return duration(l.Median)
}

// duration is a duration without the units that are zero at its end.
func duration(d time.Duration) string {
	text := d.String()
	if strings.HasSuffix(text, "m0s") {
		text = strings.TrimSuffix(text, "0s")
	}
	if strings.HasSuffix(text, "h0m") {
		text = strings.TrimSuffix(text, "0m")
	}
	return text
}

func loadText(load float64) string {
	if math.IsInf(load, 1) {
		return "without limit"
	}
	return fmt.Sprintf("%.1f %%", 100*load)
}

func newScenarioWrite() *cobra.Command {
	var file string
	var seed uint64
	cmd := &cobra.Command{
		Use:   "write NAME",
		Short: "Write a trace of a scenario in the JSONL format",
		Long: `Write a trace of a scenario in the JSONL format: a header, the nodes, and the jobs
in the order of their arrival. The same seed gives the same bytes.`,
		Example: "  ashlar scenario write shared-40 --seed 7 -f shared-40.jsonl",
		Args:    cobra.ExactArgs(1),
		RunE: func(cmd *cobra.Command, args []string) error {
			s, err := scenarioNamed("scenario write", args[0])
			if err != nil {
				return err
			}
			write := func(w io.Writer) error { return writeScenario(cmd.Context(), w, &s, seed) }
			switch file {
			case "":
				return usageError{errors.New("-f is empty: give a file, or - for standard output")}
			case "-":
				return write(cmd.OutOrStdout())
			}
			return writeFile(file, write)
		},
	}
	cmd.Flags().Uint64Var(&seed, "seed", defaultSeed, "seed of the jobs")
	cmd.Flags().StringVarP(&file, "file", "f", "-", "file to write, - for standard output")
	return cmd
}

func writeScenario(ctx context.Context, out io.Writer, s *trace.Scenario, seed uint64) error {
	w, err := trace.NewWriter(out, s.NodeSpecs())
	if err != nil {
		return err
	}
	for jobs := s.Generate(seed); ; {
		job, err := jobs.Next()
		if errors.Is(err, io.EOF) {
			return w.Flush()
		}
		if err == nil {
			err = w.Write(job)
		}
		if err == nil && job.ID%1024 == 0 {
			err = ctx.Err()
		}
		if err != nil {
			return err
		}
	}
}

// writeFile writes a file that appears under its name only when it is whole.
// An error leaves what was there before.
func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.CreateTemp(filepath.Dir(path), "."+filepath.Base(path)+".*")
	if err != nil {
		return err
	}
	err = write(f)
	if err == nil {
		err = f.Chmod(0o644)
	}
	err = errors.Join(err, f.Close())
	if err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		_ = os.Remove(f.Name())
	}
	return err
}
