package simulator

import (
	"cmp"
	"container/heap"
	"errors"
	"fmt"
	"io"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

// Timed is a run in which jobs arrive, wait, work for their duration and leave.
type Timed struct {
	Nodes []placement.NodeSpec
	Jobs  trace.Source
	// Policy chooses places, Queue the order: see NewQueue.
	Policy placement.Policy
	Queue  Queue
	// Sharing says how the jobs' needs become requests.
	Sharing      Sharing
	Interference Interference
	// Mix is a sample of requests for a policy that must know it.
	Mix []placement.Request
	// Failures are nodes that go down for a while. Jobs on them start again.
	Failures []Failure
}

// Failure is a node that is down from At on, for Length.
type Failure struct {
	Node       int
	At, Length time.Duration
}

// TimedReport is what came of a Timed run.
type TimedReport struct {
	Jobs, Finished, Refused, Restarted int
	// Unfinished jobs were still waiting at the end: they never got a place.
	Unfinished int
	// Wait is the time between arrival and start of the jobs with GPUs, in all
	// and by size: "share", "1", "2", ... whole GPUs.
	Wait   Waits
	BySize map[string]Waits
	// Slowdown is the mean of (end - arrival) / duration, Stretch that of the
	// time at work over the duration, both for jobs that ended.
	Slowdown, Stretch float64
	// Useful is the work done, in per cent of what all GPUs could have done
	// until the last arrival. InUse is the part of the GPUs that was given out,
	// and Busy the work done in per cent of what the GPUs given out could have
	// done, both until the last job ended: what a monitor shows as utilization
	// of GPUs that are held.
	Useful, InUse, Busy float64
	// Makespan is when the last job ended.
	Makespan time.Duration
	// Fairness is Jain's index of the slowdowns, 1 where all are alike.
	Fairness float64
	// Reasons counts by reason code why jobs had to wait, at their arrival.
	Reasons map[string]int
}

// Waits sums up waiting times.
type Waits struct {
	Jobs                     int
	Mean, P50, P95, P99, Max time.Duration
	// Percentiles are the waiting times that 0, 1, ... 100 per cent of the jobs
	// do not exceed; nil without jobs.
	Percentiles []time.Duration
}

// running is a job at work.
type running struct {
	*Waiting
	plan  placement.Plan
	start time.Duration
	// left is the work to do at since, in nanoseconds at full speed; speed holds
	// from then on.
	left, speed float64
	since       time.Duration
	end         time.Duration
	at          int // position in the heap
}

// ends is a heap of running jobs by their end.
type ends []*running

func (h ends) Len() int { return len(h) }
func (h ends) Less(i, j int) bool {
	return h[i].end < h[j].end || h[i].end == h[j].end && h[i].Job.ID < h[j].Job.ID
}
func (h ends) Swap(i, j int) { h[i], h[j] = h[j], h[i]; h[i].at, h[j].at = i, j }
func (h *ends) Push(x any) {
	r, _ := x.(*running)
	r.at = len(*h)
	*h = append(*h, r)
}

func (h *ends) Pop() any {
	r := (*h)[len(*h)-1]
	*h = (*h)[:len(*h)-1]
	return r
}

// never is the end of a job that does not leave.
const never = time.Duration(math.MaxInt64)

// gpuLoad is what runs on one GPU.
type gpuLoad struct {
	jobs   []*running
	useful float64 // GPUs' worth of work that is being done
}

// timed is the state of a run.
type timed struct {
	*Timed
	nodes   []placement.NodeSpec
	cluster *placement.Cluster
	placer  *placement.Placer
	running ends
	loads   [][]gpuLoad
	now     time.Duration

	useful, inUse float64 // sums of GPUs' worth and of GPUs in use now
	done, held    float64 // their integrals, in GPU-nanoseconds
	doneByLast    float64 // done until the last arrival
	lastArrival   time.Duration

	report   TimedReport
	waits    map[string][]time.Duration
	slow     []float64
	stretch  float64
	failed   map[placement.ClassID]bool // in this pass
	failures []Failure
	down     []Failure // by when they end
}

// Run runs it to the end of the last job. After each arrival it calls progress,
// which may be nil, with the number of jobs so far.
func (t *Timed) Run(progress func(done int)) (*TimedReport, error) {
	s := &timed{Timed: t, nodes: t.Sharing.nodes(t.Nodes), waits: make(map[string][]time.Duration), failed: make(map[placement.ClassID]bool)}
	s.report.Reasons = make(map[string]int)
	var err error
	if s.cluster, err = placement.NewCluster(s.nodes); err != nil {
		return nil, err
	}
	if s.placer, err = placement.NewPlacer(s.cluster, t.Policy, t.Mix); err != nil {
		return nil, err
	}
	gpus := 0
	s.loads = make([][]gpuLoad, len(s.nodes))
	for i := range s.nodes {
		s.loads[i] = make([]gpuLoad, s.nodes[i].GPUs)
		gpus += s.nodes[i].GPUs
	}
	if gpus == 0 {
		return nil, errors.New("the nodes have no GPU: there is nothing to share")
	}
	if err := s.setFailures(); err != nil {
		return nil, err
	}
	next, err := t.Jobs.Next()
	for {
		if err != nil && !errors.Is(err, io.EOF) {
			return nil, err
		}
		more := err == nil
		at, what := s.nextEvent(more, next.Arrival)
		if what == nothing {
			break
		}
		s.advance(at)
		switch what {
		case arrival:
			if err := s.arrive(next); err != nil {
				return nil, err
			}
			if progress != nil {
				progress(s.report.Jobs)
			}
			next, err = t.Jobs.Next()
			// Jobs of one moment are tried together, in the order of the queue.
			if err == nil && next.Arrival == s.now {
				continue
			}
		case ending:
			s.finish(s.running[0])
			if len(s.running) > 0 && s.running[0].end == s.now {
				continue
			}
		case failure:
			s.fail(s.failures[0])
		case repair:
			s.cluster.SetDown(s.down[0].Node, false)
			s.down = s.down[1:]
		}
		if err := s.pass(); err != nil {
			return nil, err
		}
	}
	s.sum(float64(gpus))
	return &s.report, nil
}

type event int

const (
	nothing event = iota
	ending
	repair
	failure
	arrival
)

// nextEvent returns what happens next. Of what happens at one time, ends come
// first and arrivals last.
func (s *timed) nextEvent(more bool, arrives time.Duration) (time.Duration, event) {
	at, what := never, nothing
	see := func(when time.Duration, kind event) {
		if when < at {
			at, what = when, kind
		}
	}
	if len(s.running) > 0 {
		see(s.running[0].end, ending)
	}
	// Without jobs, what happens to nodes matters no more.
	if more || len(s.running) > 0 && s.running[0].end != never || s.Queue.Len() > 0 {
		if len(s.down) > 0 {
			see(s.down[0].At+s.down[0].Length, repair)
		}
		if len(s.failures) > 0 {
			see(s.failures[0].At, failure)
		}
	}
	if more {
		see(arrives, arrival)
	}
	return at, what
}

func (s *timed) setFailures() error {
	for i, f := range s.Failures {
		if f.Node < 0 || f.Node >= len(s.nodes) || f.At < 0 || f.Length <= 0 {
			return fmt.Errorf("failure %d: node %d from %v for %v: give a node from 0 to %d and times above 0", i, f.Node, f.At, f.Length, len(s.nodes)-1)
		}
	}
	s.failures = slices.SortedStableFunc(slices.Values(s.Failures), func(a, b Failure) int { return cmp.Compare(a.At, b.At) })
	return nil
}

// advance moves the clock and adds up what was done meanwhile.
func (s *timed) advance(to time.Duration) {
	passed := float64(to - s.now)
	s.done += s.useful * passed
	s.held += s.inUse * passed
	s.now = to
}

func (s *timed) arrive(job trace.Job) error {
	if job.Activity == 0 {
		job.Activity = placement.Whole
	}
	s.report.Jobs++
	s.lastArrival, s.doneByLast = s.now, s.done
	id, err := s.cluster.Class(s.Sharing.request(&job, s.nodes))
	if err != nil {
		return fmt.Errorf("job %d: %w", job.ID, err)
	}
	s.placer.Learn(id)
	w := &Waiting{Job: job, Class: id, Since: s.now}
	if _, ok := s.placer.Place(id); !ok {
		reason := s.placer.Explain(id)
		s.report.Reasons[reason.Code.String()]++
		if reason.Code == placement.NeverFits || reason.Code == placement.NodeConstraint {
			s.report.Refused++
			return nil
		}
	}
	s.Queue.Add(w)
	return nil
}

// pass starts what can start.
func (s *timed) pass() error {
	clear(s.failed)
	var failed error
	s.Queue.Each(s.now, func(w *Waiting) bool {
		if failed != nil || s.failed[w.Class] {
			return false
		}
		plan, ok := s.placer.Place(w.Class)
		if !ok {
			s.failed[w.Class] = true
			return false
		}
		if failed = s.cluster.Apply(&plan); failed != nil {
			return false
		}
		s.start(w, plan)
		return true
	}, s.reserve)
	return failed
}

// reserve says when a job could start if those running ended as they should and
// nothing else started.
func (s *timed) reserve(w *Waiting) (at time.Duration, ever bool) {
	order := slices.SortedFunc(slices.Values(s.running), func(a, b *running) int {
		return cmp.Or(cmp.Compare(a.end, b.end), a.Job.ID-b.Job.ID)
	})
	s.cluster.Fork(func() bool {
		for i, r := range order {
			if r.end == never {
				break
			}
			if s.cluster.Remove(&r.plan) != nil {
				break
			}
			if i+1 < len(order) && order[i+1].end == r.end {
				continue
			}
			if _, ok := s.placer.Place(w.Class); ok {
				at, ever = r.end, true
				break
			}
		}
		return false
	})
	return at, ever
}

func (s *timed) start(w *Waiting, plan placement.Plan) {
	r := &running{Waiting: w, plan: plan, start: s.now, since: s.now, left: float64(w.Job.Duration), speed: 1}
	heap.Push(&s.running, r)
	for _, g := range plan.GPU[:plan.Devices] {
		load := &s.loads[plan.Node][g]
		if len(load.jobs) == 0 {
			s.inUse++
		}
		if !slices.Contains(load.jobs, r) {
			load.jobs = append(load.jobs, r)
		}
	}
	s.pace(&plan)
	if plan.Devices > 0 {
		size := s.size(w)
		s.waits[size] = append(s.waits[size], s.now-w.Job.Arrival)
	}
	if plan.Devices == 0 {
		s.setEnd(r)
	}
}

// size is the name of a job's size: by what it needs, whatever it was given.
func (s *timed) size(w *Waiting) string {
	if r := &w.Job.Request; r.Whole() {
		return fmt.Sprint(r.Count)
	}
	return "share"
}

// pace sets the speed of all jobs on the GPUs of a plan, after one came or went.
func (s *timed) pace(plan *placement.Plan) {
	seen := make(map[*running]bool)
	for _, g := range plan.GPU[:plan.Devices] {
		for _, r := range s.loads[plan.Node][g].jobs {
			if seen[r] {
				continue
			}
			seen[r] = true
			r.left -= r.speed * float64(s.now-r.since)
			r.since = s.now
			r.speed = s.speed(r)
			s.setEnd(r)
		}
	}
	for _, g := range plan.GPU[:plan.Devices] {
		load := &s.loads[plan.Node][g]
		s.useful -= load.useful
		load.useful = 0
		for _, r := range load.jobs {
			load.useful += r.speed * float64(r.Job.Activity) / placement.Whole
		}
		s.useful += load.useful
	}
}

func (s *timed) setEnd(r *running) {
	r.end = never
	if r.Job.Duration > 0 {
		r.end = s.now + time.Duration(math.Ceil(max(r.left, 0)/r.speed))
	}
	heap.Fix(&s.running, r.at)
}

// speed is how fast a job works, as fast as on the worst of its GPUs.
func (s *timed) speed(r *running) float64 {
	request := s.cluster.Request(r.Class)
	node := &s.nodes[r.plan.Node]
	if request.Profile != "" {
		p := node.MIG.ByName(request.Profile)
		return s.Interference.mig(r.Job.Activity, p.Slices, node.MIG.Slices)
	}
	speed := 1.0
	for _, g := range r.plan.GPU[:r.plan.Devices] {
		others := 0
		for _, q := range s.loads[r.plan.Node][g].jobs {
			if q != r {
				others += q.Job.Activity
			}
		}
		speed = min(speed, s.Interference.timeSliced(r.Job.Activity, others))
	}
	return speed
}

// leave takes a job off its devices.
func (s *timed) leave(r *running) {
	heap.Remove(&s.running, r.at)
	if err := s.cluster.Remove(&r.plan); err != nil {
		panic(err) // the plan was applied, and is removed once
	}
	for _, g := range r.plan.GPU[:r.plan.Devices] {
		load := &s.loads[r.plan.Node][g]
		at := slices.Index(load.jobs, r)
		if at < 0 {
			continue // a second device on the same GPU
		}
		if load.jobs = slices.Delete(load.jobs, at, at+1); len(load.jobs) == 0 {
			s.inUse--
		}
	}
	s.pace(&r.plan)
}

func (s *timed) finish(r *running) {
	s.leave(r)
	s.report.Finished++
	s.report.Makespan = s.now
	if r.Job.Duration > 0 && r.plan.Devices > 0 {
		s.slow = append(s.slow, float64(s.now-r.Job.Arrival)/float64(r.Job.Duration))
		s.stretch += float64(s.now-r.start) / float64(r.Job.Duration)
	}
}

// fail takes a node down. Its jobs start again, in their place in the queue.
func (s *timed) fail(f Failure) {
	s.failures = s.failures[1:]
	s.cluster.SetDown(f.Node, true)
	s.down = append(s.down, f)
	slices.SortStableFunc(s.down, func(a, b Failure) int { return cmp.Compare(a.At+a.Length, b.At+b.Length) })
	lost := slices.DeleteFunc(slices.Clone(s.running), func(r *running) bool { return r.plan.Node != f.Node })
	slices.SortFunc(lost, func(a, b *running) int { return a.Job.ID - b.Job.ID })
	for _, r := range lost {
		s.leave(r)
		s.report.Restarted++
		s.Queue.Add(r.Waiting)
	}
}

// sum fills in the report.
func (s *timed) sum(gpus float64) {
	r := &s.report
	r.Unfinished = s.Queue.Len()
	var all []time.Duration
	r.BySize = make(map[string]Waits)
	for size, waits := range s.waits {
		r.BySize[size] = sumWaits(waits)
	}
	for _, size := range slices.Sorted(maps.Keys(s.waits)) {
		all = append(all, s.waits[size]...)
	}
	r.Wait = sumWaits(all)
	if s.lastArrival > 0 {
		r.Useful = 100 * s.doneByLast / (gpus * float64(s.lastArrival))
	}
	if r.Makespan > 0 {
		r.InUse = 100 * s.held / (gpus * float64(r.Makespan))
	}
	if s.held > 0 {
		r.Busy = 100 * s.done / s.held
	}
	sum, squares := 0.0, 0.0
	for _, x := range s.slow {
		sum += x
		squares += x * x
	}
	if n := float64(len(s.slow)); n > 0 {
		r.Slowdown, r.Stretch, r.Fairness = sum/n, s.stretch/n, sum*sum/(n*squares)
	}
}

func sumWaits(waits []time.Duration) Waits {
	if len(waits) == 0 {
		return Waits{}
	}
	slices.Sort(waits)
	sum := 0.0
	for _, w := range waits {
		sum += float64(w)
	}
	at := func(part float64) time.Duration { return waits[max(0, int(math.Ceil(part*float64(len(waits))))-1)] }
	w := Waits{Jobs: len(waits), Mean: time.Duration(sum / float64(len(waits))), P50: at(0.5), P95: at(0.95), P99: at(0.99), Max: waits[len(waits)-1]}
	for percent := range 101 {
		w.Percentiles = append(w.Percentiles, at(float64(percent)/100))
	}
	return w
}
