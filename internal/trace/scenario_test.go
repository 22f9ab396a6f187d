package trace_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math"
	"runtime"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

// TestScenarios pins what each scenario gives. Where the jobs of a released
// scenario change, its Version goes up.
func TestScenarios(t *testing.T) {
	var b bytes.Buffer
	for _, s := range trace.Scenarios() {
		nodes, gpus := s.NodeSpecs(), 0
		for _, n := range nodes {
			gpus += n.GPUs
		}
		fmt.Fprintf(&b, "%s version %d: %s\n", s.Name, s.Version, s.Summary)
		fmt.Fprintf(&b, "%d nodes, %d GPUs; load %.3f exclusive, %.3f requested\n", len(nodes), gpus, s.ExclusiveLoad(), s.RequestedLoad())
		s.Jobs = 1000
		text := write(t, nil, s.Generate(1))
		lines := strings.SplitAfterN(string(text), "\n", 5)
		fmt.Fprintf(&b, "%s... SHA-256 of the first 1000: %x\n\n", strings.Join(lines[1:4], ""), sha256.Sum256(text))
	}
	golden(t, "scenarios.txt", b.Bytes())
}

func TestScenarioByName(t *testing.T) {
	for _, s := range trace.Scenarios() {
		got, ok := trace.ScenarioByName(s.Name)
		if !ok || got.Summary != s.Summary {
			t.Errorf("%s: got %q, %v", s.Name, got.Summary, ok)
		}
		if s.Summary == "" || len(s.Doc) < 100 || s.Version < 1 {
			t.Errorf("%s is not described", s.Name)
		}
	}
	if _, ok := trace.ScenarioByName("shared"); ok {
		t.Error("there is a scenario called shared")
	}
}

// TestShared40Load keeps the purpose of the scenario: with GPUs of their own
// the jobs want more than the 40, and with shares less than half.
func TestShared40Load(t *testing.T) {
	s, _ := trace.ScenarioByName("shared-40")
	exclusive, requested := s.ExclusiveLoad(), s.RequestedLoad()
	t.Logf("exclusive load %.3f, requested %.3f", exclusive, requested)
	if exclusive < 1.1 || exclusive > 1.2 || requested > 0.5 {
		t.Errorf("the load is %.3f exclusive and %.3f requested, want 1.1 to 1.2 and at most 0.5", exclusive, requested)
	}
}

// fits says whether a job could run on a node with nothing else on it.
func fits(r *placement.Request, n *placement.NodeSpec) bool {
	if r.MilliCPU > n.MilliCPU || r.MemoryMiB > n.MemoryMiB || r.GPUMemoryMiB > n.GPUMemoryMiB || r.Count > n.GPUs {
		return false
	}
	if r.Profile != "" && (n.MIG == nil || !slices.ContainsFunc(n.MIG.Profiles, func(p gpu.MIGProfile) bool { return p.Name == r.Profile })) {
		return false
	}
	return len(r.Products) == 0 || slices.Contains(r.Products, n.Product)
}

func TestGenerate(t *testing.T) {
	scenarios := trace.Scenarios()
	rapid.Check(t, func(t *rapid.T) {
		s := scenarios[rapid.IntRange(0, len(scenarios)-1).Draw(t, "scenario")]
		seed := rapid.Uint64().Draw(t, "seed")
		s.Jobs = rapid.IntRange(1, 300).Draw(t, "jobs")
		jobs := checkJobs(t, s.Generate(seed))
		if diff := cmp.Diff(jobs, checkJobs(t, s.Generate(seed))); diff != "" {
			t.Fatalf("the same seed gives other jobs:\n%s", diff)
		}
		if len(jobs) > s.Jobs {
			t.Errorf("%d jobs, want at most %d", len(jobs), s.Jobs)
		}
		kinds := []placement.NodeSpec{}
		for _, g := range s.Nodes {
			g.Count = 1
			kinds = append(kinds, trace.Scenario{Nodes: []trace.NodeGroup{g}}.NodeSpecs()...)
		}
		within := func(n int, r trace.Range, unit int) bool { return n >= r.Low*unit && n <= r.High*unit }
		for _, job := range jobs {
			r := &job.Request
			c := s.Classes[slices.IndexFunc(s.Classes, func(c trace.Class) bool { return c.Name == job.Class })]
			if !within(job.Activity, c.Activity, 1) || !within(r.GPUMemoryMiB, c.GPUMemory, 1024) ||
				!within(r.MilliCPU, c.Cores, 1000) || !within(r.MemoryMiB, c.Memory, 1024) ||
				job.Duration < c.Duration.Min || job.Duration > c.Duration.Max || job.Duration%time.Second != 0 ||
				job.Arrival%time.Millisecond != 0 || job.Arrival > time.Duration(s.Days)*24*time.Hour ||
				job.Priority != c.Priority || job.Tenant > len(c.Tenants) || (job.Tenant == 0) != (len(c.Tenants) == 0) ||
				r.Count != c.GPUs || r.Profile != c.Profile || r.Links != c.Links {
				t.Fatalf("%+v is not of class %+v", job, c)
			}
			if c.Shared && (r.Milli < job.Activity || r.Milli%50 != 0 || r.Milli >= job.Activity+50) {
				t.Fatalf("%+v: the share is not the activity rounded up", job)
			}
			if !c.Shared && c.Profile == "" && r.Whole() != (c.GPUs > 0) {
				t.Fatalf("%+v has no whole GPUs", job)
			}
			if !slices.ContainsFunc(kinds, func(n placement.NodeSpec) bool { return fits(r, &n) }) {
				t.Fatalf("%+v fits on no node", job)
			}
		}
	})
}

func TestGenerateMeetsTheExpectedLoad(t *testing.T) {
	for _, s := range trace.Scenarios() {
		nodes := s.NodeSpecs()
		s.Days = max(1, 150_000*s.Days/int(s.Arrivals.PerDay*float64(s.Days)))
		s.Arrivals.Bursts = nil // they would be one in many days
		s.Jobs = 0
		gpus := 0
		for _, n := range nodes {
			gpus += n.GPUs
		}
		var exclusive, requested float64 // GPU-hours
		jobs := 0
		for source := s.Generate(7); ; jobs++ {
			job, err := source.Next()
			if errors.Is(err, io.EOF) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			hours, part := float64(job.Request.Count)*job.Duration.Hours(), float64(job.Request.Milli)/1000
			if p := job.Request.Profile; p != "" { // "3g.20gb" is three of seven slices
				part = float64(p[0]-'0') / 7
			}
			exclusive += hours
			requested += hours * part
		}
		available := float64(gpus * s.Days * 24)
		for _, c := range []struct {
			what      string
			got, want float64
		}{
			{"jobs a day", float64(jobs) / float64(s.Days), s.Arrivals.PerDay},
			{"exclusive load", exclusive / available, s.ExclusiveLoad()},
			{"requested load", requested / available, s.RequestedLoad()},
		} {
			if math.Abs(c.got/c.want-1) > 0.03 {
				t.Errorf("%s: %s is %.4f in %d jobs, want about %.4f", s.Name, c.what, c.got, jobs, c.want)
			}
		}
	}
}

// simple is a scenario to change.
func simple() trace.Scenario {
	return trace.Scenario{
		Name: "s", Days: 10, Arrivals: trace.Arrivals{PerDay: 1000},
		Nodes:   []trace.NodeGroup{{Count: 1, Cores: 8, MemoryGiB: 64, GPUs: 2, Product: "A30"}},
		Classes: []trace.Class{{Name: "c", Weight: 1, GPUs: 1, Duration: trace.Lengths{Median: time.Hour, Min: time.Minute, Max: 10 * time.Hour, Sigma: 1}}},
	}
}

func TestArrivalsFollowTheHours(t *testing.T) {
	s := simple()
	s.Arrivals.Hours = [24]float64{3: 1, 14: 3}
	var got [24]int
	for _, job := range checkJobs(t, s.Generate(1)) {
		got[int(job.Arrival.Hours())%24]++
	}
	if total := got[3] + got[14]; total < 9700 || total > 10300 || got[14] < 7300 || got[14] > 7700 {
		t.Errorf("jobs by hour are %v, want a quarter of 10000 in hour 3 and the rest in hour 14", got)
	}
	slices.Sort(got[:])
	if got[21] != 0 {
		t.Errorf("jobs come in hours without weight: %v", got)
	}
}

func TestBursts(t *testing.T) {
	s := simple()
	s.Arrivals = trace.Arrivals{Bursts: []trace.Burst{
		{At: 2 * time.Hour, Length: time.Hour, Jobs: 400},
		{At: 2 * time.Hour, Length: 2 * time.Hour, Jobs: 400}, // overlaps
		{At: 240 * time.Hour, Jobs: 3},                        // at the very end, at once
		{At: time.Hour, Length: time.Hour},                    // empty
	}}
	jobs := checkJobs(t, s.Generate(1))
	if len(jobs) != 803 {
		t.Fatalf("%d jobs, want 803", len(jobs))
	}
	early := 0
	for _, job := range jobs[:800] {
		if job.Arrival < 2*time.Hour || job.Arrival > 4*time.Hour {
			t.Errorf("a job comes at %v", job.Arrival)
		}
		if job.Arrival < 3*time.Hour {
			early++
		}
	}
	if early < 550 || early > 650 {
		t.Errorf("%d jobs come in the first hour, want about 600", early)
	}
	if got := jobs[800].Arrival; got != 240*time.Hour {
		t.Errorf("the last burst comes at %v", got)
	}
}

func TestLengthsMean(t *testing.T) {
	for _, c := range []struct {
		l    trace.Lengths
		want time.Duration
	}{
		{trace.Lengths{}, 0},
		{trace.Lengths{Median: time.Hour, Min: time.Hour, Max: time.Hour, Sigma: 1}, time.Hour},
		{trace.Lengths{Median: time.Hour, Min: time.Second, Max: 10000 * time.Hour, Sigma: 0.5}, time.Duration(math.Exp(0.125) * float64(time.Hour))},
	} {
		if got := c.l.Mean(); (got - c.want).Abs() > time.Second {
			t.Errorf("%+v: the mean is %v, want %v", c.l, got, c.want)
		}
	}
}

func TestJobsThatNeverLeave(t *testing.T) {
	s := simple()
	s.Classes[0].Duration = trace.Lengths{}
	s.Jobs = 10
	for _, job := range checkJobs(t, s.Generate(1)) {
		if job.Duration != 0 {
			t.Errorf("a job leaves after %v", job.Duration)
		}
	}
	if load := s.ExclusiveLoad(); !math.IsInf(load, 1) {
		t.Errorf("the load is %v, want it infinite", load)
	}
}

func TestScenarioErrors(t *testing.T) {
	for _, c := range []struct {
		change func(s *trace.Scenario, c *trace.Class)
		want   string
	}{
		{func(s *trace.Scenario, _ *trace.Class) { s.Days = 0 }, "Days is 0: give 1 to 3650"},
		{func(s *trace.Scenario, _ *trace.Class) { s.Jobs = -1 }, "Jobs is -1: give 0 for no limit, or more"},
		{func(s *trace.Scenario, _ *trace.Class) { s.Classes = nil }, "the weights of the classes add up to 0: give 1 to 2147483647"},
		{func(s *trace.Scenario, _ *trace.Class) { s.Classes = append(s.Classes, s.Classes[0]) }, `class "c" is there twice: give each a name of its own`},
		{func(s *trace.Scenario, _ *trace.Class) { s.Nodes[0].GPUs = 17 }, "Nodes[0]: GPUs is 17: give 0 to 16"},
		{func(s *trace.Scenario, _ *trace.Class) { s.Nodes[0].GPUs = 0 }, "Nodes[0]: GPUs is 0: leave Product and MIG out, or give GPUs"},
		{func(s *trace.Scenario, _ *trace.Class) { s.Nodes[0].Product = "P100" }, `Nodes[0]: Product is "P100": give a key of the product catalogue`},
		{func(s *trace.Scenario, _ *trace.Class) { s.Nodes[0].Product, s.Nodes[0].MIG = "T4", true }, "Nodes[0]: MIG is set, but T4 cannot be cut: leave it out"},
		{func(s *trace.Scenario, _ *trace.Class) { s.Nodes[0].Count = -1 }, "Nodes[0]: a number is negative: give 0 or more"},
		{func(s *trace.Scenario, _ *trace.Class) { s.Nodes[0].Cores = 1 << 40 }, "Nodes[0]: the nodes have Cores 1099511627776 and MemoryGiB 64: give less than 2 million"},
		{func(_ *trace.Scenario, c *trace.Class) { c.Name = "C" }, `class "C": the name is no class: give up to 32 lower-case letters, digits and hyphens`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Weight = -1 }, `class "c": Weight is -1: give 0 to 2147483647`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Priority = 1 << 40 }, `class "c": Priority is 1099511627776: give -2147483647 to 2147483647`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Activity = trace.Range{Low: 1, High: 1001} }, `class "c": Activity is 1 to 1001: give a range within 0 to 1000`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Cores = trace.Range{Low: 2, High: 1} }, `class "c": Cores is 2 to 1: give a range within 0 to 2147483`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Shared = true }, `class "c": Activity of a shared class begins at 0: begin at 1, a share of 0 is no request`},
		{func(_ *trace.Scenario, c *trace.Class) {
			c.Shared, c.GPUs, c.Activity = true, 2, trace.Range{Low: 1, High: 2}
		}, `class "c": a shared class has a part of one GPU: set GPUs to 1 and leave Profile out`},
		{func(_ *trace.Scenario, c *trace.Class) { c.GPUMemory = trace.Range{Low: 1, High: 2} }, `class "c": GPUMemory is for shared classes: leave it out`},
		{func(_ *trace.Scenario, c *trace.Class) { c.GPUs, c.Activity = 0, trace.Range{Low: 1, High: 2} }, `class "c": Activity is set without GPUs: leave it out`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Tenants = []int{0} }, `class "c": the weights of Tenants add up to 0: give 1 to 2147483647`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Tenants = []int{-1, 2} }, `class "c": Tenants is [-1 2]: give weights of 0 to 2147483647`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Products = []string{"b", "a"} }, `class "c": invalid request: Products is [b a]: sort them`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Duration.Min = 0 }, `class "c": Duration is cut off at 0s and 10h0m0s: give whole seconds within 1s to 3650 days`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Duration.Median = time.Second }, `class "c": Duration has the median 1s: give one within the cut-offs, 1m0s to 10h0m0s`},
		{func(_ *trace.Scenario, c *trace.Class) { c.Duration.Sigma = math.NaN() }, `class "c": Duration has the sigma NaN: give 0.001 to 5`},
		{func(s *trace.Scenario, _ *trace.Class) { s.Arrivals.PerDay = math.Inf(1) }, "Arrivals: PerDay is +Inf: give 0 to 1e9"},
		{func(s *trace.Scenario, _ *trace.Class) { s.Arrivals.Hours[3] = -1 }, "Arrivals: Hours has -1: give weights of 0 to 1e6"},
		{func(s *trace.Scenario, _ *trace.Class) {
			s.Arrivals.Bursts = []trace.Burst{{At: 239 * time.Hour, Length: 2 * time.Hour, Jobs: 5}}
		}, "Arrivals: Bursts[0] is 5 jobs from 239h0m0s for 2h0m0s: keep it within the 10 days"},
	} {
		s := simple()
		c.change(&s, &s.Classes[0])
		want := "invalid scenario s: " + c.want
		source := s.Generate(1)
		for range 2 {
			if _, err := source.Next(); !errors.Is(err, trace.ErrScenario) || err.Error() != want {
				t.Errorf("got %v\nwant %s", err, want)
			}
		}
	}
}

// TestStreaming generates a million jobs with the heap no larger on the way
// than at the beginning.
func TestStreaming(t *testing.T) {
	s, _ := trace.ScenarioByName("large-10k")
	s.Jobs = 1_000_000
	heap := func() uint64 {
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.HeapAlloc
	}
	before, most, jobs := heap(), uint64(0), 0
	source := s.Generate(1)
	for {
		_, err := source.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatal(err)
		}
		if jobs++; jobs%250_000 == 0 {
			most = max(most, heap())
		}
	}
	runtime.KeepAlive(source)
	if jobs != s.Jobs || most > before+1<<20 {
		t.Errorf("%d jobs with %d bytes of heap, %d before; want %d in one more MiB at most", jobs, most, before, s.Jobs)
	}
}

// TestStreamingAllocations keeps jobs free of garbage: they are made and
// written in between the measurements of a benchmark.
func TestStreamingAllocations(t *testing.T) {
	s, _ := trace.ScenarioByName("shared-40")
	s.Days = 100
	source := s.Generate(1)
	w, err := trace.NewWriter(io.Discard, nil)
	if err != nil {
		t.Fatal(err)
	}
	if allocations := testing.AllocsPerRun(1000, func() {
		job, err := source.Next()
		if err == nil {
			err = w.Write(job)
		}
		if err != nil {
			t.Fatal(err)
		}
	}); allocations > 0 {
		t.Errorf("%v allocations for a job, want none", allocations)
	}
}

func BenchmarkGenerate(b *testing.B) {
	s, _ := trace.ScenarioByName("large-10k")
	s.Days = 3650
	source := s.Generate(1)
	b.ReportAllocs()
	for b.Loop() {
		if _, err := source.Next(); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkReader(b *testing.B) {
	s, _ := trace.ScenarioByName("shared-40")
	text := write(b, s.NodeSpecs(), s.Generate(1))
	b.ReportAllocs()
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		r, err := trace.NewReader(bytes.NewReader(text), "t.jsonl")
		if err == nil {
			_, err = trace.Collect(r)
		}
		if err != nil {
			b.Fatal(err)
		}
	}
}
