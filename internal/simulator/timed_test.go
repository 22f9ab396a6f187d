package simulator_test

import (
	"fmt"
	"math"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/simulator"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

// a100s are nodes of a given number of A100.
func a100s(nodes, gpus int) []placement.NodeSpec {
	product := gpu.ProductByKey("A100-40")
	specs := make([]placement.NodeSpec, nodes)
	for i := range specs {
		specs[i] = placement.NodeSpec{
			Name: fmt.Sprint("node-", i), MilliCPU: 96000, MemoryMiB: 1 << 20, GPUs: gpus,
			Product: "A100-40", GPUMemoryMiB: product.MemoryMiB, MIG: product.MIG,
		}
	}
	return specs
}

// job is one that needs whole GPUs from a time on, or part of one where milli
// says so, and keeps them busy.
func job(at, length time.Duration, gpus, milli int) trace.Job {
	j := trace.Job{Arrival: at, Duration: length, Activity: milli, Request: placement.Request{MilliCPU: 1000, MemoryMiB: 1024, Count: gpus, Milli: milli}}
	if milli < placement.Whole {
		j.Request.GPUMemoryMiB = 3000
	}
	return j
}

type timedRun struct {
	nodes    []placement.NodeSpec
	jobs     []trace.Job
	policy   string
	sharing  string
	queue    string
	failures []simulator.Failure
}

func (r timedRun) run(tb testing.TB) *simulator.TimedReport {
	tb.Helper()
	for i := range r.jobs {
		r.jobs[i].ID = i
	}
	policy, err := placement.PolicyByName(r.policy)
	if err != nil {
		tb.Fatal(err)
	}
	sharing, err := simulator.SharingByName(r.sharing)
	if err != nil {
		tb.Fatal(err)
	}
	queue, err := simulator.NewQueue(r.queue)
	if err != nil {
		tb.Fatal(err)
	}
	report, err := (&simulator.Timed{
		Nodes: r.nodes, Jobs: trace.FromSlice(r.jobs), Policy: policy, Queue: queue, Sharing: sharing,
		Interference: simulator.DefaultInterference, Failures: r.failures,
	}).Run(nil)
	if err != nil {
		tb.Fatal(err)
	}
	return report
}

const hour = time.Hour

// One GPU, jobs one after the other: all figures can be worked out by hand.
func TestTimedByHand(t *testing.T) {
	r := timedRun{a100s(1, 1), []trace.Job{job(0, 2*hour, 1, 1000), job(hour, hour, 1, 1000), job(hour, hour, 1, 1000)}, "first-fit", "exclusive", "fifo", nil}.run(t)
	type figures struct {
		Jobs, Finished           int
		Mean, P50, Max, Makespan time.Duration
		Useful, InUse, Busy      float64
		Slowdown, Stretch        float64
	}
	got := figures{r.Jobs, r.Finished, r.Wait.Mean, r.Wait.P50, r.Wait.Max, r.Makespan, r.Useful, r.InUse, r.Busy, r.Slowdown, r.Stretch}
	// The second waits an hour and the third two; their slowdowns are 1, 2 and 3.
	want := figures{3, 3, hour, hour, 2 * hour, 4 * hour, 100, 100, 100, 2, 1}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Error(diff)
	}
}

// Two jobs of 300 thousandths share a GPU: each loses 20 % + 0.3 of the 30 % that
// lie between the least and the most, 29 % in all, while the other is there.
func TestTimeSlicingSlowsSharers(t *testing.T) {
	r := timedRun{a100s(1, 1), []trace.Job{job(0, hour, 1, 300), job(0, hour, 1, 300)}, "first-fit", "time-slicing", "fifo", nil}.run(t)
	if want := 1.29; math.Abs(r.Stretch-want) > 1e-6 || r.Wait.Max != 0 {
		t.Errorf("stretch %.4f, waited %v; want %.2f and none", r.Stretch, r.Wait.Max, want)
	}
	if want := time.Duration(1.29 * float64(hour)); (r.Makespan - want).Abs() > time.Second {
		t.Errorf("makespan %v, want %v", r.Makespan, want)
	}
	// The second half of the longer job is alone, at full speed: it works an hour
	// beside the other, who is done in 1.29 h, and has 2 - 1 h left.
	r = timedRun{a100s(1, 1), []trace.Job{job(0, hour, 1, 300), job(0, 2*hour, 1, 300)}, "first-fit", "time-slicing", "fifo", nil}.run(t)
	if want := time.Duration(2.29 * float64(hour)); (r.Makespan - want).Abs() > time.Second {
		t.Errorf("makespan %v, want %v", r.Makespan, want)
	}
	// Ten jobs that want 200 each have half of what they want, after 50 %
	// overhead of which the others cause all: 2 * 1.5.
	var ten []trace.Job
	for range 10 {
		ten = append(ten, job(0, hour, 1, 200))
	}
	r = timedRun{a100s(1, 1), ten, "first-fit", "time-slicing", "fifo", nil}.run(t)
	if math.Abs(r.Stretch-3) > 1e-6 {
		t.Errorf("stretch %.4f of ten, want 3", r.Stretch)
	}
}

// Seven small jobs fit one GPU by MIG and hardly slow each other down.
func TestMIGShares(t *testing.T) {
	var seven []trace.Job
	for range 7 {
		seven = append(seven, job(0, hour, 1, 100))
	}
	r := timedRun{a100s(1, 1), seven, "ashlar", "mig", "fifo", nil}.run(t)
	want := 1.1 - 0.05/7
	if r.Wait.Max != 0 || math.Abs(r.Stretch-want) > 1e-6 {
		t.Errorf("waited up to %v, stretch %.4f; want none and %.4f", r.Wait.Max, r.Stretch, want)
	}
}

// Every queue order on the same jobs: a long job on one of two GPUs, then one for
// both, then a short one and a long one for one GPU.
func TestQueueOrders(t *testing.T) {
	jobs := func() []trace.Job {
		return []trace.Job{job(0, 4*hour, 1, 1000), job(hour, hour, 2, 1000), job(hour, 2*hour, 1, 1000), job(hour, 6*hour, 1, 1000)}
	}
	for _, c := range []struct {
		queue string
		two   time.Duration // what the job for two GPUs waits
		mean  time.Duration
	}{
		// Both single jobs go before: the short one at 1, the long one at 3, and the
		// pair must wait until 9.
		{"fifo", 8 * hour, (8 + 0 + 2) * hour / 4},
		// Nothing passes the pair: it starts at 4, the others at 5.
		{"strict-fifo", 3 * hour, (3 + 4 + 4) * hour / 4},
		// The short one ends before the pair could start, the long one does not.
		{"backfill", 3 * hour, (3 + 0 + 4) * hour / 4},
	} {
		t.Run(c.queue, func(t *testing.T) {
			r := timedRun{a100s(1, 2), jobs(), "first-fit", "exclusive", c.queue, nil}.run(t)
			if r.BySize["2"].Mean != c.two || r.Wait.Mean != c.mean {
				t.Errorf("the pair waited %v and all %v in the mean, want %v and %v", r.BySize["2"].Mean, r.Wait.Mean, c.two, c.mean)
			}
		})
	}
}

// With backfill, priority comes before arrival.
func TestBackfillByPriority(t *testing.T) {
	jobs := []trace.Job{job(0, 2*hour, 1, 1000), job(hour, hour, 1, 1000), job(hour, hour, 1, 1000)}
	jobs[2].Priority = 5
	r := timedRun{a100s(1, 1), jobs, "first-fit", "exclusive", "backfill", nil}.run(t)
	if r.Finished != 3 || r.Wait.Max != 2*hour {
		t.Errorf("finished %d, waited up to %v", r.Finished, r.Wait.Max)
	}
}

// A node that fails loses its jobs; they start again, and nothing runs on the
// node until it is back.
func TestFailureRestarts(t *testing.T) {
	r := timedRun{
		a100s(1, 1), []trace.Job{job(0, 2*hour, 1, 1000)}, "first-fit", "exclusive", "fifo",
		[]simulator.Failure{{Node: 0, At: hour, Length: 3 * hour}},
	}.run(t)
	if r.Restarted != 1 || r.Finished != 1 || r.Makespan != 6*hour {
		t.Errorf("restarted %d, finished %d, makespan %v; want 1, 1 and 6h", r.Restarted, r.Finished, r.Makespan)
	}
}

// What can never run is refused with a reason, and the run ends.
func TestNeverFits(t *testing.T) {
	r := timedRun{a100s(1, 4), []trace.Job{job(0, hour, 8, 1000), job(0, hour, 4, 1000)}, "ashlar", "exclusive", "strict-fifo", nil}.run(t)
	if r.Refused != 1 || r.Finished != 1 || r.Reasons["NeverFits"] != 1 {
		t.Errorf("refused %d, finished %d, reasons %v", r.Refused, r.Finished, r.Reasons)
	}
}

// The work that is done is the work that came, whatever the sharing, policy and
// queue, and the same run gives the same report.
func TestTimedScenarios(t *testing.T) {
	scenario, ok := trace.ScenarioByName("shared-40")
	if !ok {
		t.Fatal("no scenario shared-40")
	}
	scenario.Jobs = 60
	for _, sharing := range simulator.Sharings() {
		for _, queue := range simulator.QueueNames() {
			t.Run(sharing.Name+"/"+queue, func(t *testing.T) {
				t.Parallel()
				jobs, err := trace.Collect(scenario.Generate(1))
				if err != nil {
					t.Fatal(err)
				}
				once := timedRun{scenario.NodeSpecs(), jobs, "ashlar", sharing.Name, queue, nil}
				r := once.run(t)
				if r.Finished != len(jobs) || r.Unfinished != 0 || r.Refused != 0 {
					t.Errorf("of %d jobs %d finished", len(jobs), r.Finished)
				}
				work := 0.0
				for _, j := range jobs {
					work += j.Duration.Hours() * float64(j.Request.Count*j.Activity) / placement.Whole
				}
				done := r.Busy / 100 * r.InUse / 100 * 40 * r.Makespan.Hours()
				if math.Abs(done-work) > work/1000 {
					t.Errorf("%.2f GPU-hours of work done, %.2f came", done, work)
				}
				if diff := cmp.Diff(r, once.run(t)); diff != "" {
					t.Errorf("a second run differs:\n%s", diff)
				}
			})
		}
	}
}
