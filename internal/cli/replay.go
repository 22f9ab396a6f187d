package cli

import (
	"cmp"
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"text/tabwriter"
	"time"

	"github.com/spf13/cobra"

	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/simulator"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

const (
	// maxSeeds bounds --seeds.
	maxSeeds = 1000
	// maxInflate bounds --inflate.
	maxInflate = 10
	// maxPlotted is the highest arrived load that is drawn, in per cent.
	maxPlotted = 200
)

// reportedPercents are the arrived loads that a report tells of.
var reportedPercents = []int{90, 95, 100, 110, 120, 130}

// replayOptions are the flags of `replay`.
type replayOptions struct {
	nodes, pods, scenario string
	policies              []string
	seeds                 string
	inflate               float64
	randomTies, squeeze   bool
	format, plot          string
	parallel              int
	mode, queue           string
	sharings              []string
}

func newReplay() *cobra.Command {
	var o replayOptions
	cmd := &cobra.Command{
		Use:   "replay (--nodes FILE --pods FILE | --scenario NAME)",
		Short: "Run the jobs of a trace and compare placement policies and ways of sharing",
		Long: `Run the jobs of a trace and compare placement policies and ways of sharing.

--mode fill, the default with files: jobs come one by one and never leave; one
that fits nowhere is refused and does not come back. What is told is how much of
the GPUs is allocated, and how much of what is idle the jobs of the mix cannot
use, over the load that has arrived in per cent of the GPUs.

--mode time, the default with scenarios: jobs come at their times, wait in the
--queue, work for their duration and leave. --sharing says what a job gets that
needs a part of a GPU: "exclusive" a whole one, "time-slicing" one of ten slots
where its memory fits one, "mig" the smallest MIG device that will do, both in
this order, or "shares" the part that it needs. Jobs on one GPU slow each other
down: by 20 to 50 % and what they want beyond the GPU, MIG devices by 5 to 10 %.
What is told is how long jobs waited, the work done in per cent of all GPUs until
the last arrival (USEFUL), how much of the GPUs was given out (IN USE) and the
work done in per cent of that (BUSY), until the last job ended.

--nodes and --pods are lists of the openb trace (cluster-trace-gpu-v2023). Each
seed gives another order; pods are drawn until they ask for --inflate times the
GPUs. A scenario is one of "ashlar scenario list"; each seed gives other jobs.

The same input gives the same output, whatever --parallel is.`,
		Example: `  ashlar replay --nodes openb_node_list_gpu_node.csv --pods openb_pod_list_default.csv \
    --policy ashlar,fgd,best-fit --seeds 42-51 --plot fill.svg`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			if o.mode == "" {
				o.mode = "fill"
				if o.scenario != "" {
					o.mode = "time"
				}
			}
			given := cmd.Flags().Changed
			switch {
			case o.mode != "fill" && o.mode != "time":
				return usageError{fmt.Errorf("replay: --mode %q: use fill or time", o.mode)}
			case given("inflate") && (o.scenario != "" || o.mode == "time"):
				return usageError{errors.New("replay: --inflate is for --pods with --mode fill: leave it out")}
			case o.mode == "fill" && (given("sharing") || given("queue")):
				return usageError{errors.New("replay: --sharing and --queue are for --mode time: leave them out, or give the mode")}
			}
			return runReplay(cmd.Context(), &o, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.nodes, "nodes", "", "node list of the openb trace (CSV)")
	f.StringVar(&o.pods, "pods", "", "pod list of the openb trace (CSV)")
	f.StringVar(&o.scenario, "scenario", "", "built-in workload to run instead of files")
	f.StringSliceVar(&o.policies, "policy", []string{placement.Policies()[0].Name}, "policies to compare")
	f.StringVar(&o.seeds, "seeds", strconv.Itoa(defaultSeed), "seeds, such as 42-51 or 42,44,50-51")
	f.Float64Var(&o.inflate, "inflate", 1.3, "what pods ask for in all, as a multiple of the GPUs")
	f.StringVar(&o.mode, "mode", "", "fill or time (default: fill with files, time with scenarios)")
	f.StringSliceVar(&o.sharings, "sharing", []string{"shares"}, "ways of sharing to compare: "+strings.Join(sharingNames(), ", "))
	f.StringVar(&o.queue, "queue", "fifo", "order of the queue: "+strings.Join(simulator.QueueNames(), ", "))
	f.BoolVar(&o.randomTies, "random-ties", false, "choose at random among the best nodes, as kube-scheduler does")
	f.BoolVar(&o.squeeze, "squeeze", false, "round scores to 0 to 100, as kube-scheduler does")
	f.StringVar(&o.plot, "plot", "", "SVG file to draw the curves into")
	f.IntVar(&o.parallel, "parallel", runtime.GOMAXPROCS(0), "runs at a time")
	outputFlag(cmd, &o.format, "table", "json", "csv")
	return cmd
}

func runReplay(ctx context.Context, o *replayOptions, stdout, stderr io.Writer) error {
	policies, err := o.parsePolicies()
	if err != nil {
		return usageError{fmt.Errorf("replay: %w", err)}
	}
	seeds, err := parseSeeds(o.seeds)
	if err != nil {
		return usageError{fmt.Errorf("replay: --seeds %q: %w", o.seeds, err)}
	}
	if o.parallel < 1 {
		return usageError{fmt.Errorf("replay: --parallel %d: give 1 or more", o.parallel)}
	}
	load, err := o.workload()
	if err != nil {
		return err
	}
	if o.mode == "time" {
		return runTimed(ctx, o, load, policies, seeds, stdout, stderr)
	}
	runs, err := load.runAll(ctx, policies, seeds, o.parallel, stderr)
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	return o.show(newReplayReport(o, load, policies, runs), stdout)
}

// report is what a mode of `replay` has to show.
type report interface {
	figure() *figure
	writeCSV(out io.Writer) error
	writeTable(out io.Writer, seeds string) error
}

// show writes a report in the form that the flags ask for.
func (o *replayOptions) show(r report, stdout io.Writer) error {
	if o.plot != "" {
		if err := writeFile(o.plot, r.figure().writeTo); err != nil {
			return fmt.Errorf("replay: --plot: %w", err)
		}
	}
	switch o.format {
	case "json":
		return writeAs(stdout, o.format, r)
	case "csv":
		return r.writeCSV(stdout)
	}
	return r.writeTable(stdout, o.seeds)
}

// parsePolicies returns the policies that the flags describe, but for the seed.
func (o *replayOptions) parsePolicies() ([]placement.Policy, error) {
	var policies []placement.Policy
	for _, name := range o.policies {
		p, err := placement.PolicyByName(name)
		if err != nil {
			return nil, fmt.Errorf("--policy: %w", err)
		}
		if slices.ContainsFunc(policies, func(q placement.Policy) bool { return q.Name == p.Name }) {
			return nil, fmt.Errorf("--policy: %q is there twice: name each policy once", name)
		}
		p.RandomTies, p.Squeeze = o.randomTies, o.squeeze
		policies = append(policies, p)
	}
	if len(policies) == 0 {
		return nil, errors.New("--policy is empty: name a policy, or leave it out")
	}
	return policies, nil
}

// parseSeeds reads "42-51" or "42,44,50-51".
func parseSeeds(text string) ([]int64, error) {
	var seeds []int64
	for part := range strings.SplitSeq(text, ",") {
		low, high, isRange := strings.Cut(part, "-")
		if !isRange {
			high = low
		}
		first, err := strconv.ParseUint(low, 10, 63)
		last, err2 := strconv.ParseUint(high, 10, 63)
		switch {
		case err != nil || err2 != nil:
			return nil, fmt.Errorf("%q is no seed: give numbers from 0 and ranges, such as 42,44,50-51", part)
		case last < first:
			return nil, fmt.Errorf("the range %s ends before it begins: give %s-%s", part, high, low)
		case last-first >= uint64(maxSeeds-len(seeds)):
			return nil, fmt.Errorf("more than %d seeds: give fewer", maxSeeds)
		}
		for n := range last - first + 1 {
			seed := int64(first + n)
			if slices.Contains(seeds, seed) {
				return nil, fmt.Errorf("seed %d is there twice: give each once", seed)
			}
			seeds = append(seeds, seed)
		}
	}
	return seeds, nil
}

// workload is what is replayed.
type workload struct {
	// name is the base name of a file or the name of a scenario.
	name string
	// inflate is 0 where it has no meaning.
	inflate float64
	nodes   []placement.NodeSpec
	// fill returns the run of a seed, without a policy.
	fill func(seed int64) (*simulator.Fill, error)
	// jobs are those of a seed with their times.
	jobs func(seed int64) trace.Source
	mix  []placement.Request
}

// workload reads what the flags name.
func (o *replayOptions) workload() (*workload, error) {
	usage := func(text string) error { return usageError{errors.New("replay: " + text)} }
	switch files := o.nodes != "" || o.pods != ""; {
	case files && o.scenario != "":
		return nil, usage("--scenario has nodes and jobs of its own: leave out --nodes and --pods, or --scenario")
	case o.scenario != "":
		s, err := scenarioNamed("replay: --scenario", o.scenario)
		if err != nil {
			return nil, err
		}
		return scenarioWorkload(s), nil
	case !files:
		return nil, usage("name a workload: --nodes FILE and --pods FILE, or --scenario NAME; `ashlar scenario list` lists them")
	case o.nodes == "":
		return nil, usage("--nodes is missing: give the node list that belongs to --pods")
	case o.pods == "":
		return nil, usage("--pods is missing: give the pod list that belongs to --nodes")
	case !(o.inflate > 0 && o.inflate <= maxInflate): // not a number either
		return nil, usage(fmt.Sprintf("--inflate %v: give more than 0 and at most %d", o.inflate, maxInflate))
	}
	return openbWorkload(o.nodes, o.pods, o.inflate)
}

func openbWorkload(nodeFile, podFile string, inflate float64) (*workload, error) {
	nodes, err := readFile(nodeFile, trace.ReadOpenbNodes)
	if err != nil {
		return nil, fmt.Errorf("replay: --nodes: %w", err)
	}
	pods, err := readFile(podFile, trace.ReadOpenbPods)
	if err != nil {
		return nil, fmt.Errorf("replay: --pods: %w", err)
	}
	mix := make([]placement.Request, len(pods))
	for i, p := range pods {
		mix[i] = p.Request()
	}
	fill := func(seed int64) (*simulator.Fill, error) {
		nodes, jobs, err := trace.OpenbExperiment(nodes, pods, inflate, seed)
		return &simulator.Fill{Nodes: nodes, Jobs: jobs, Mix: mix}, err
	}
	timed := trace.OpenbJobs(pods)
	return &workload{filepath.Base(podFile), inflate, nodes, fill, func(int64) trace.Source { return trace.FromSlice(timed) }, mix}, nil
}

// readFile reads a file with a function that is told its name.
func readFile[T any](path string, read func(io.Reader, string) (T, error)) (T, error) {
	f, err := os.Open(path)
	if err != nil {
		var none T
		return none, err
	}
	defer f.Close()
	return read(f, path)
}

func scenarioWorkload(s trace.Scenario) *workload {
	nodes := s.NodeSpecs()
	fill := func(seed int64) (*simulator.Fill, error) {
		jobs, err := trace.Collect(s.Generate(uint64(seed)))
		mix := make([]placement.Request, len(jobs))
		for i := range jobs {
			mix[i] = jobs[i].Request
		}
		return &simulator.Fill{Nodes: nodes, Jobs: jobs, Mix: mix}, err
	}
	return &workload{s.Name, 0, nodes, fill, func(seed int64) trace.Source { return s.Generate(uint64(seed)) }, nil}
}

// run is what came of one policy with one seed.
type run struct {
	seed int64
	*simulator.FillReport
}

// runAll runs every policy with every seed, so many at a time. The runs of a
// policy follow each other.
func (l *workload) runAll(ctx context.Context, policies []placement.Policy, seeds []int64, parallel int, stderr io.Writer) ([]run, error) {
	runs := make([]run, len(policies)*len(seeds))
	meter := newMeter(stderr, len(runs))
	defer meter.close()
	err := inParallel(ctx, len(runs), parallel, func(i int) error {
		seed := seeds[i%len(seeds)]
		fill, err := l.fill(seed)
		if err != nil {
			return err
		}
		fill.Policy = policies[i/len(seeds)]
		fill.Policy.Seed = uint64(seed)
		report, err := fill.Run(func(done int) { meter.set(i, done, len(fill.Jobs)) })
		if err != nil {
			return fmt.Errorf("policy %s, seed %d: %w", fill.Policy.Name, seed, err)
		}
		meter.set(i, 1, 1)
		runs[i] = run{seed, report}
		return nil
	})
	return runs, err
}

// inParallel calls work with 0 to n-1, so many at a time, and returns the error
// of the lowest number that has one; after an error no more are begun. When
// the context ends it returns at once, and calls that are under way are left to
// themselves.
func inParallel(ctx context.Context, n, parallel int, work func(i int) error) error {
	errs := make([]error, n)
	var next atomic.Int64
	var failed atomic.Bool
	var workers sync.WaitGroup
	for range min(parallel, n) {
		workers.Go(func() {
			for !failed.Load() && ctx.Err() == nil {
				i := int(next.Add(1)) - 1
				if i >= n {
					return
				}
				if errs[i] = work(i); errs[i] != nil {
					failed.Store(true)
				}
			}
		})
	}
	done := make(chan struct{})
	go func() {
		workers.Wait()
		close(done)
	}()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-done:
		return cmp.Or(cmp.Or(errs...), ctx.Err())
	}
}

// meter shows how far the runs are, on a terminal only.
type meter struct {
	// done is in thousandths of each run.
	done   []atomic.Int64
	stop   chan struct{}
	ended  chan struct{}
	active bool
}

const (
	// meterDelay is how long runs take at least before anything is shown.
	meterDelay  = time.Second
	meterPeriod = 200 * time.Millisecond
	meterWidth  = 30
)

func newMeter(w io.Writer, runs int) *meter {
	m := &meter{done: make([]atomic.Int64, runs), stop: make(chan struct{}), ended: make(chan struct{}), active: isTerminal(w)}
	if m.active {
		go m.show(w)
	}
	return m
}

func isTerminal(w io.Writer) bool {
	f, ok := w.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	return err == nil && info.Mode()&os.ModeCharDevice != 0
}

// set says how many of the jobs of a run are done.
func (m *meter) set(run, done, jobs int) { m.done[run].Store(int64(1000 * done / max(jobs, 1))) }

// close takes the bar away.
func (m *meter) close() {
	if m.active {
		close(m.stop)
		<-m.ended
	}
}

func (m *meter) show(w io.Writer) {
	defer close(m.ended)
	for wait := meterDelay; ; wait = meterPeriod {
		select {
		case <-m.stop:
			if wait == meterPeriod {
				fmt.Fprint(w, "\r\033[K")
			}
			return
		case <-time.After(wait):
		}
		sum, whole := 0, 0
		for i := range m.done {
			n := int(m.done[i].Load())
			sum += n
			if n == 1000 {
				whole++
			}
		}
		filled := meterWidth * sum / (1000 * len(m.done))
		fmt.Fprintf(w, "\r[%s%s] %d of %d runs\033[K", strings.Repeat("=", filled), strings.Repeat(" ", meterWidth-filled), whole, len(m.done))
	}
}

// replayReport is what `ashlar replay` shows.
type replayReport struct {
	Mode       string         `json:"mode"`
	Nodes      int            `json:"nodes"`
	GPUs       int            `json:"gpus"`
	Workload   string         `json:"workload"`
	Inflate    float64        `json:"inflate,omitempty"`
	RandomTies bool           `json:"randomTies,omitempty"`
	Squeeze    bool           `json:"squeeze,omitempty"`
	Policies   []policyReport `json:"policies"`
}

// policyReport is what came of a policy.
type policyReport struct {
	Policy  string       `json:"policy"`
	Version int          `json:"version"`
	Seeds   []seedReport `json:"seeds"`
	Mean    outcome      `json:"mean"`
	// Std is the standard deviation of a sample; nil for one seed.
	Std *outcome `json:"std,omitempty"`

	runs []run
}

type seedReport struct {
	Seed int64 `json:"seed"`
	outcome
}

// outcome is what came of one run, or the mean or deviation of several.
type outcome struct {
	// Allocated and Fragmented are per cents of GPUs and of what is idle of
	// them, by the per cent of load that has arrived.
	Allocated  map[string]float64 `json:"allocated"`
	Fragmented map[string]float64 `json:"fragmented"`
	// Final is Allocated at the end.
	Final  float64 `json:"final"`
	Placed float64 `json:"placed"`
	Failed float64 `json:"failed"`
	// FailedByGPUs counts by the number of GPUs asked for, with "cpu" for none
	// and "share" for less than one.
	FailedByGPUs map[string]float64 `json:"failedByGPUs"`
	Reasons      map[string]float64 `json:"reasons"`
}

func newReplayReport(o *replayOptions, l *workload, policies []placement.Policy, runs []run) *replayReport {
	r := &replayReport{
		Mode: "fill", Nodes: len(l.nodes), Workload: l.name, Inflate: l.inflate,
		RandomTies: o.randomTies, Squeeze: o.squeeze,
	}
	for i := range l.nodes {
		r.GPUs += l.nodes[i].GPUs
	}
	for group := range slices.Chunk(runs, len(runs)/len(policies)) {
		p := policies[len(r.Policies)]
		report := policyReport{Policy: p.Name, Version: p.Version, runs: group}
		outcomes := make([]outcome, len(group))
		for i, run := range group {
			outcomes[i] = newOutcome(run.FillReport)
			report.Seeds = append(report.Seeds, seedReport{run.seed, summarise(outcomes[i:i+1], 1, 2, mean)})
		}
		report.Mean = summarise(outcomes, 1, 4, mean)
		if len(outcomes) > 1 {
			std := summarise(outcomes, 2, 4, deviation)
			report.Std = &std
		}
		r.Policies = append(r.Policies, report)
	}
	return r
}

func newOutcome(r *simulator.FillReport) outcome {
	o := outcome{
		Allocated: map[string]float64{}, Fragmented: map[string]float64{},
		Final: r.Allocated, Placed: float64(r.Placed), Failed: float64(r.Failed),
		FailedByGPUs: map[string]float64{}, Reasons: map[string]float64{},
	}
	for _, percent := range reportedPercents {
		if p := r.At(percent); p.N > 0 {
			o.Allocated[strconv.Itoa(percent)] = p.Allocated
			o.Fragmented[strconv.Itoa(percent)] = p.Fragmented
		}
	}
	for milli, n := range r.FailedByMilli {
		o.FailedByGPUs[gpusKey(milli)] += float64(n)
	}
	for reason, n := range r.Reasons {
		o.Reasons[reason] += float64(n)
	}
	return o
}

// gpusKey names what a request for so many thousandths of GPU asks for.
func gpusKey(milli int) string {
	switch {
	case milli == 0:
		return "cpu"
	case milli < placement.Whole:
		return "share"
	}
	return number(float64(milli) / placement.Whole)
}

// summarise makes one outcome of several by a statistic, rounded to so many
// decimals. A per cent of load that fewer than least of them reached is left
// out.
func summarise(outcomes []outcome, least, decimals int, statistic func([]float64) float64) outcome {
	unit := math.Pow10(decimals)
	of := func(values []float64) float64 { return math.Round(statistic(values)*unit) / unit }
	value := func(field func(*outcome) float64) float64 {
		values := make([]float64, len(outcomes))
		for i := range outcomes {
			values[i] = field(&outcomes[i])
		}
		return of(values)
	}
	// table summarises by key. Where every is set, a missing key counts as 0.
	table := func(every bool, field func(*outcome) map[string]float64) map[string]float64 {
		keys := map[string]float64{}
		for i := range outcomes {
			maps.Copy(keys, field(&outcomes[i]))
		}
		for key := range keys {
			var values []float64
			for i := range outcomes {
				if v, ok := field(&outcomes[i])[key]; ok || every {
					values = append(values, v)
				}
			}
			if keys[key] = 0; len(values) >= least {
				keys[key] = of(values)
			} else {
				delete(keys, key)
			}
		}
		return keys
	}
	return outcome{
		Allocated:    table(false, func(o *outcome) map[string]float64 { return o.Allocated }),
		Fragmented:   table(false, func(o *outcome) map[string]float64 { return o.Fragmented }),
		Final:        value(func(o *outcome) float64 { return o.Final }),
		Placed:       value(func(o *outcome) float64 { return o.Placed }),
		Failed:       value(func(o *outcome) float64 { return o.Failed }),
		FailedByGPUs: table(true, func(o *outcome) map[string]float64 { return o.FailedByGPUs }),
		Reasons:      table(true, func(o *outcome) map[string]float64 { return o.Reasons }),
	}
}

func mean(values []float64) float64 {
	sum := 0.0
	for _, v := range values {
		sum += v
	}
	return sum / float64(len(values))
}

// deviation is the standard deviation of a sample of two or more.
func deviation(values []float64) float64 {
	m, sum := mean(values), 0.0
	for _, v := range values {
		sum += (v - m) * (v - m)
	}
	return math.Sqrt(sum / float64(len(values)-1))
}

// describe is the workload in a line.
func (r *replayReport) describe() string {
	text := fmt.Sprintf("%s on %d nodes with %d GPUs", r.Workload, r.Nodes, r.GPUs)
	if r.Inflate > 0 {
		text += fmt.Sprintf(", pods for %s %% of the GPUs", number(100*r.Inflate))
	}
	if r.RandomTies {
		text += ", random ties"
	}
	if r.Squeeze {
		text += ", squeezed scores"
	}
	return text
}

// writeTable writes a line for each policy. Where there are several seeds, ±
// stands before the standard deviation.
func (r *replayReport) writeTable(out io.Writer, seeds string) error {
	word, decimals := "seed", 0
	if len(r.Policies[0].Seeds) > 1 {
		word, decimals = "seeds", 1
	}
	fmt.Fprintf(out, "%s, %s %s\n\n", r.describe(), word, seeds)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "POLICY\tALLOC 95\tALLOC 100\tALLOC 130\tFRAG 100\tFAILED\tFAILED 8-GPU")
	for i := range r.Policies {
		p := &r.Policies[i]
		frag := "-"
		if v, ok := p.Mean.Fragmented["100"]; ok {
			frag = fmt.Sprintf("%.2f", v)
		}
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%.*f\t%.*f\n", p.Policy, p.allocated("95"), p.allocated("100"), p.allocated("130"),
			frag, decimals, p.Mean.Failed, decimals, p.Mean.FailedByGPUs["8"])
	}
	return w.Flush()
}

// allocated is a cell of the table.
func (p *policyReport) allocated(percent string) string {
	v, ok := p.Mean.Allocated[percent]
	if !ok {
		return "-"
	}
	text := fmt.Sprintf("%.2f", v)
	if p.Std != nil {
		if std, ok := p.Std.Allocated[percent]; ok {
			text += fmt.Sprintf("±%.2f", std)
		}
	}
	return text
}

// writeCSV writes a line for each policy, seed and per cent of load that has
// arrived.
func (r *replayReport) writeCSV(out io.Writer) error {
	w := csv.NewWriter(out)
	_ = w.Write([]string{"policy", "seed", "arrived", "allocated", "fragmented"}) // Flush keeps the error
	for i := range r.Policies {
		p := &r.Policies[i]
		for _, run := range p.runs {
			for percent, at := range run.Points {
				if at.N > 0 {
					_ = w.Write([]string{
						p.Policy, strconv.FormatInt(run.seed, 10), strconv.Itoa(percent),
						strconv.FormatFloat(at.Allocated, 'f', 2, 64), strconv.FormatFloat(at.Fragmented, 'f', 2, 64),
					})
				}
			}
		}
	}
	w.Flush()
	return w.Error()
}

// figure draws what is allocated and fragmented over the load that has arrived.
func (r *replayReport) figure() *figure {
	last := 0
	for i := range r.Policies {
		for _, run := range r.Policies[i].runs {
			last = max(last, len(run.Points)-1)
		}
	}
	high := min(float64((last+9)/10*10), maxPlotted)
	arrived := axis{"arrived load, % of GPUs", 0, max(high, 10)}
	percent := func(label string) axis { return axis{label, 0, 100} }
	allocated := panel{
		title: "Allocation", x: arrived, y: percent("allocated, % of GPUs"),
		guide: line{"all that arrived", []point{{0, 0}, {min(arrived.high, 100), min(arrived.high, 100)}}},
	}
	fragmented := panel{title: "Fragmentation", x: arrived, y: percent("unusable, % of idle GPUs")}
	desc := fmt.Sprintf("Two line charts over the load that has arrived, the mean over %d seeds for each policy. ", len(r.Policies[0].Seeds)) +
		"At the end, this much of the GPUs is allocated:"
	for i := range r.Policies {
		p := &r.Policies[i]
		a, f := p.curves()
		allocated.lines = append(allocated.lines, line{p.Policy, a})
		fragmented.lines = append(fragmented.lines, line{p.Policy, f})
		sign := ","
		if i == len(r.Policies)-1 {
			sign = "."
		}
		desc += fmt.Sprintf(" %s %.2f %%%s", p.Policy, p.Mean.Final, sign)
	}
	return &figure{title: r.describe(), desc: desc, panels: []panel{allocated, fragmented}}
}

// curves returns the means over the seeds by the load that has arrived. A per
// cent that no seed has is left out.
func (p *policyReport) curves() (allocated, fragmented []point) {
	for percent := range maxPlotted + 1 {
		var a, f []float64
		for _, run := range p.runs {
			if at := run.At(percent); at.N > 0 {
				a, f = append(a, at.Allocated), append(f, at.Fragmented)
			}
		}
		if len(a) > 0 {
			allocated = append(allocated, point{float64(percent), mean(a)})
			fragmented = append(fragmented, point{float64(percent), mean(f)})
		}
	}
	return allocated, fragmented
}
