package cli

import (
	"context"
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"text/tabwriter"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/simulator"
)

// setup is what is compared in time: a way of sharing with a policy.
type setup struct {
	sharing simulator.Sharing
	policy  placement.Policy
}

// timedReport is what `ashlar replay --mode time` shows. Times are in seconds.
type timedReport struct {
	Mode       string        `json:"mode"`
	Nodes      int           `json:"nodes"`
	GPUs       int           `json:"gpus"`
	Workload   string        `json:"workload"`
	Queue      string        `json:"queue"`
	RandomTies bool          `json:"randomTies,omitempty"`
	Squeeze    bool          `json:"squeeze,omitempty"`
	Setups     []setupReport `json:"setups"`
}

// setupReport is what came of a setup.
type setupReport struct {
	Sharing string        `json:"sharing"`
	Policy  string        `json:"policy"`
	Version int           `json:"version"`
	Seeds   []timedSeed   `json:"seeds"`
	Mean    timedOutcome  `json:"mean"`
	Std     *timedOutcome `json:"std,omitempty"`

	reports []*simulator.TimedReport
}

type timedSeed struct {
	Seed int64 `json:"seed"`
	timedOutcome
}

// timedOutcome is what came of one run, or the mean or deviation of several.
type timedOutcome struct {
	Jobs       float64 `json:"jobs"`
	Finished   float64 `json:"finished"`
	Refused    float64 `json:"refused"`
	Unfinished float64 `json:"unfinished"`
	WaitMean   float64 `json:"waitMean"`
	WaitP50    float64 `json:"waitP50"`
	WaitP95    float64 `json:"waitP95"`
	WaitP99    float64 `json:"waitP99"`
	// Waits are mean waits by what a job needs: "share", or whole GPUs.
	Waits    map[string]float64 `json:"waitMeanBySize"`
	Useful   float64            `json:"useful"`
	InUse    float64            `json:"inUse"`
	Busy     float64            `json:"busy"`
	Slowdown float64            `json:"slowdown"`
	Stretch  float64            `json:"stretch"`
	Fairness float64            `json:"fairness"`
	Makespan float64            `json:"makespan"`
	Reasons  map[string]float64 `json:"reasons"`
}

func sharingNames() []string {
	var names []string
	for _, s := range simulator.Sharings() {
		names = append(names, s.Name)
	}
	return names
}

// setups returns every way of sharing with every policy.
func (o *replayOptions) setups(policies []placement.Policy) ([]setup, error) {
	var setups []setup
	for i, name := range o.sharings {
		sharing, err := simulator.SharingByName(name)
		if err != nil {
			return nil, fmt.Errorf("--sharing: %w", err)
		}
		if slices.Contains(o.sharings[:i], name) {
			return nil, fmt.Errorf("--sharing: %q is there twice: name each once", name)
		}
		for _, p := range policies {
			setups = append(setups, setup{sharing, p})
		}
	}
	if len(setups) == 0 {
		return nil, errors.New("--sharing is empty: name a way of sharing, or leave it out")
	}
	return setups, nil
}

func runTimed(ctx context.Context, o *replayOptions, l *workload, policies []placement.Policy, seeds []int64, stdout, stderr io.Writer) error {
	setups, err := o.setups(policies)
	if err == nil {
		_, err = simulator.NewQueue(o.queue)
	}
	if err != nil {
		return usageError{fmt.Errorf("replay: %w", err)}
	}
	runs := make([]*simulator.TimedReport, len(setups)*len(seeds))
	meter := newMeter(stderr, len(runs))
	err = inParallel(ctx, len(runs), o.parallel, func(i int) error {
		seed := seeds[i%len(seeds)]
		s := &setups[i/len(seeds)]
		policy := s.policy
		policy.Seed = uint64(seed)
		queue, err := simulator.NewQueue(o.queue)
		if err != nil {
			return err
		}
		mix := l.mix
		if len(mix) == 0 {
			fill, err := l.fill(seed)
			if err != nil {
				return err
			}
			mix = fill.Mix
		}
		run := simulator.Timed{
			Nodes: l.nodes, Jobs: l.jobs(seed), Policy: policy, Queue: queue, Mix: mix,
			Sharing: s.sharing, Interference: simulator.DefaultInterference,
		}
		if runs[i], err = run.Run(func(done int) { meter.set(i, done, len(mix)) }); err != nil {
			return fmt.Errorf("sharing %s, policy %s, seed %d: %w", s.sharing.Name, policy.Name, seed, err)
		}
		meter.set(i, 1, 1)
		return nil
	})
	meter.close()
	if err != nil {
		return fmt.Errorf("replay: %w", err)
	}
	return o.show(newTimedReport(o, l, setups, seeds, runs), stdout)
}

func newTimedReport(o *replayOptions, l *workload, setups []setup, seeds []int64, runs []*simulator.TimedReport) *timedReport {
	r := &timedReport{
		Mode: "time", Nodes: len(l.nodes), Workload: l.name, Queue: o.queue, RandomTies: o.randomTies, Squeeze: o.squeeze,
	}
	for i := range l.nodes {
		r.GPUs += l.nodes[i].GPUs
	}
	for group := range slices.Chunk(runs, len(seeds)) {
		s := setups[len(r.Setups)]
		report := setupReport{Sharing: s.sharing.Name, Policy: s.policy.Name, Version: s.policy.Version, reports: group}
		for i, run := range group {
			report.Seeds = append(report.Seeds, timedSeed{seeds[i], timedOutcomeOf([]*simulator.TimedReport{run}, mean)})
		}
		report.Mean = timedOutcomeOf(group, mean)
		if len(group) > 1 {
			std := timedOutcomeOf(group, deviation)
			report.Std = &std
		}
		r.Setups = append(r.Setups, report)
	}
	return r
}

// timedOutcomeOf sums up reports by a statistic.
func timedOutcomeOf(reports []*simulator.TimedReport, statistic func([]float64) float64) timedOutcome {
	of := func(field func(*simulator.TimedReport) float64) float64 {
		values := make([]float64, len(reports))
		for i, r := range reports {
			values[i] = field(r)
		}
		return math.Round(statistic(values)*1e4) / 1e4
	}
	o := timedOutcome{
		Jobs:       of(func(r *simulator.TimedReport) float64 { return float64(r.Jobs) }),
		Finished:   of(func(r *simulator.TimedReport) float64 { return float64(r.Finished) }),
		Refused:    of(func(r *simulator.TimedReport) float64 { return float64(r.Refused) }),
		Unfinished: of(func(r *simulator.TimedReport) float64 { return float64(r.Unfinished) }),
		WaitMean:   of(func(r *simulator.TimedReport) float64 { return r.Wait.Mean.Seconds() }),
		WaitP50:    of(func(r *simulator.TimedReport) float64 { return r.Wait.P50.Seconds() }),
		WaitP95:    of(func(r *simulator.TimedReport) float64 { return r.Wait.P95.Seconds() }),
		WaitP99:    of(func(r *simulator.TimedReport) float64 { return r.Wait.P99.Seconds() }),
		Useful:     of(func(r *simulator.TimedReport) float64 { return r.Useful }),
		InUse:      of(func(r *simulator.TimedReport) float64 { return r.InUse }),
		Busy:       of(func(r *simulator.TimedReport) float64 { return r.Busy }),
		Slowdown:   of(func(r *simulator.TimedReport) float64 { return r.Slowdown }),
		Stretch:    of(func(r *simulator.TimedReport) float64 { return r.Stretch }),
		Fairness:   of(func(r *simulator.TimedReport) float64 { return r.Fairness }),
		Makespan:   of(func(r *simulator.TimedReport) float64 { return r.Makespan.Seconds() }),
		Waits:      map[string]float64{}, Reasons: map[string]float64{},
	}
	for _, r := range reports {
		for size := range r.BySize {
			o.Waits[size] = of(func(r *simulator.TimedReport) float64 { return r.BySize[size].Mean.Seconds() })
		}
		for reason := range r.Reasons {
			o.Reasons[reason] = of(func(r *simulator.TimedReport) float64 { return float64(r.Reasons[reason]) })
		}
	}
	return o
}

func (r *timedReport) describe() string {
	return fmt.Sprintf("%s on %d nodes with %d GPUs, queue %s", r.Workload, r.Nodes, r.GPUs, r.Queue)
}

// writeTable writes a line for each setup, the means over the seeds.
func (r *timedReport) writeTable(out io.Writer, seeds string) error {
	word := "seed"
	if len(r.Setups[0].Seeds) > 1 {
		word = "mean of seeds"
	}
	first := &r.Setups[0].Mean
	fmt.Fprintf(out, "%s, %.0f jobs, %s %s\n\n", r.describe(), first.Jobs, word, seeds)
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SHARING\tPOLICY\tWAIT MEAN\tP50\tP95\tP99\tUSEFUL %\tIN USE %\tBUSY %\tSLOWDOWN\tNEVER RAN")
	for i := range r.Setups {
		s := &r.Setups[i]
		m := &s.Mean
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\t%s\t%.1f\t%.1f\t%.1f\t%.2f\t%.0f\n", s.Sharing, s.Policy,
			waited(m.WaitMean), waited(m.WaitP50), waited(m.WaitP95), waited(m.WaitP99), m.Useful, m.InUse, m.Busy, m.Slowdown, m.Refused+m.Unfinished)
	}
	if err := w.Flush(); err != nil || len(r.Setups) < 2 {
		return err
	}
	fmt.Fprintf(out, "\nAgainst %s, %s:\n", r.Setups[0].Sharing, r.Setups[0].Policy)
	w = tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "SHARING\tPOLICY\tWAIT\tBUSY\tGPUS IN USE")
	for i := 1; i < len(r.Setups); i++ {
		s := &r.Setups[i]
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\t%s\n", s.Sharing, s.Policy,
			ratio(s.Mean.WaitMean, first.WaitMean), ratio(s.Mean.Busy, first.Busy), ratio(s.Mean.InUse, first.InUse))
	}
	return w.Flush()
}

// ratio writes what became of a figure as a multiple, "-" where there was none.
func ratio(now, before float64) string {
	if before == 0 {
		return "-"
	}
	return fmt.Sprintf("x %.2f", now/before)
}

// waited writes a waiting time in seconds for people.
func waited(seconds float64) string {
	d := time.Duration(seconds * float64(time.Second))
	switch {
	case d < time.Minute:
		return strconv.Itoa(int(d.Round(time.Second)/time.Second)) + "s"
	case d < time.Hour:
		return strconv.Itoa(int(d.Round(time.Minute)/time.Minute)) + "m"
	}
	d = d.Round(time.Minute)
	return fmt.Sprintf("%dh%02dm", d/time.Hour, d%time.Hour/time.Minute)
}

// writeCSV writes a line for each setup and seed, times in seconds.
func (r *timedReport) writeCSV(out io.Writer) error {
	w := csv.NewWriter(out)
	_ = w.Write([]string{
		"sharing", "policy", "seed", "jobs", "refused", "unfinished", "wait_mean", "wait_p50", "wait_p95", "wait_p99",
		"useful", "in_use", "busy", "slowdown", "stretch", "fairness", "makespan",
	}) // Flush keeps the error
	for i := range r.Setups {
		s := &r.Setups[i]
		for k := range s.Seeds {
			o := &s.Seeds[k]
			row := []string{s.Sharing, s.Policy, strconv.FormatInt(o.Seed, 10)}
			for _, v := range []float64{
				o.Jobs, o.Refused, o.Unfinished, o.WaitMean, o.WaitP50, o.WaitP95, o.WaitP99,
				o.Useful, o.InUse, o.Busy, o.Slowdown, o.Stretch, o.Fairness, o.Makespan,
			} {
				row = append(row, number(v))
			}
			_ = w.Write(row)
		}
	}
	w.Flush()
	return w.Error()
}

// figure draws how long jobs waited, and what became of the GPUs.
func (r *timedReport) figure() *figure {
	wait := panel{title: "Waiting time", x: axis{"part of the jobs, %", 0, 100}, y: axis{"waited at most, hours", 0, 0}}
	desc := "A line chart of how long which part of the jobs waited at most. In the mean they waited, in hours:"
	for i := range r.Setups {
		s := &r.Setups[i]
		var points []point
		for percent := range 101 {
			var values []float64
			for _, report := range s.reports {
				if at := report.Wait.Percentiles; at != nil {
					values = append(values, at[percent].Hours())
				}
			}
			if len(values) > 0 && percent < 100 {
				y := mean(values)
				points = append(points, point{float64(percent), y})
				wait.y.high = max(wait.y.high, math.Ceil(y))
			}
		}
		wait.lines = append(wait.lines, line{s.Sharing + ", " + s.Policy, points})
		sign := ","
		if i == len(r.Setups)-1 {
			sign = "."
		}
		desc += fmt.Sprintf(" %s with %s %.2f%s", s.Sharing, s.Policy, s.Mean.WaitMean/3600, sign)
	}
	wait.y.high = max(wait.y.high, 1)
	return &figure{title: r.describe(), desc: desc, panels: []panel{wait}}
}
