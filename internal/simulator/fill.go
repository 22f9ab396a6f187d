package simulator

import (
	"fmt"
	"math"

	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

// Fill is a run in which jobs arrive one by one and never leave. A job that
// fits nowhere is refused and does not come back; what it asked for still
// counts as arrived. Times of jobs are ignored.
type Fill struct {
	// Nodes in the order that breaks ties.
	Nodes []placement.NodeSpec
	Jobs  []trace.Job
	// Policy chooses. A policy that must know the mix beforehand is told Mix.
	Policy placement.Policy
	// Mix is a sample of requests, each as often as it is common.
	Mix []placement.Request
}

// FillReport is what came of a Fill.
type FillReport struct {
	// GPUs is the number of GPUs of all nodes.
	GPUs int
	// Points has one entry per whole per cent of arrived load, from 0: the mean
	// over the arrivals that round to it. Per cents without arrivals have N 0.
	Points []FillPoint
	// Allocated is the share of GPU capacity in use at the end, in per cent,
	// and Fragmented the share of what is idle then that a request of the mix
	// cannot use, by the measure of the FGD paper, in per cent.
	Allocated, Fragmented float64
	Placed, Failed        int
	// FailedByMilli counts refused jobs by the thousandths of GPU they asked
	// for in all: 8000 for eight whole GPUs, 0 for CPU only.
	FailedByMilli map[int]int
	// Reasons counts refused jobs by reason code.
	Reasons map[string]int
}

// FillPoint is the state at one per cent of arrived load.
type FillPoint struct {
	// N is the number of arrivals that were averaged.
	N int
	// Allocated and Fragmented are per cents as in FillReport.
	Allocated, Fragmented float64
}

// At returns the point of a per cent of arrived load; N is 0 where there is
// none.
func (r *FillReport) At(percent int) FillPoint {
	if percent < 0 || percent >= len(r.Points) {
		return FillPoint{}
	}
	return r.Points[percent]
}

// Run runs it. After each job it calls progress, which may be nil, with the
// number of jobs done.
func (f *Fill) Run(progress func(done int)) (*FillReport, error) {
	cluster, err := placement.NewCluster(f.Nodes)
	if err != nil {
		return nil, err
	}
	placer, err := placement.NewPlacer(cluster, f.Policy, f.Mix)
	if err != nil {
		return nil, err
	}
	meter, err := placement.NewMeter(cluster, f.Mix)
	if err != nil {
		return nil, err
	}
	report := &FillReport{FailedByMilli: make(map[int]int), Reasons: make(map[string]int)}
	for i := range f.Nodes {
		report.GPUs += f.Nodes[i].GPUs
	}
	if report.GPUs == 0 {
		return nil, fmt.Errorf("the nodes have no GPU: there is nothing to fill")
	}
	capacity := float64(report.GPUs * placement.Whole)
	arrived := 0
	for i := range f.Jobs {
		id, err := cluster.Class(f.Jobs[i].Request)
		if err != nil {
			return nil, fmt.Errorf("job %d: %w", f.Jobs[i].ID, err)
		}
		milli := cluster.Milli(id)
		arrived += milli
		placer.Learn(id)
		if plan, ok := placer.Place(id); ok {
			if err := cluster.Apply(&plan); err != nil {
				return nil, fmt.Errorf("job %d: %w", f.Jobs[i].ID, err)
			}
			meter.Update(plan.Node)
			report.Placed++
		} else {
			report.Failed++
			report.FailedByMilli[milli]++
			report.Reasons[placer.Explain(id).Code.String()]++
		}
		report.Allocated = 100 * (1 - float64(meter.Free())/capacity)
		report.Fragmented = meter.Fragmented()
		report.add(100 * float64(arrived) / capacity)
		if progress != nil {
			progress(i + 1)
		}
	}
	for i := range report.Points {
		if p := &report.Points[i]; p.N > 0 {
			p.Allocated = hundredths(p.Allocated / float64(p.N))
			p.Fragmented /= float64(p.N)
		}
	}
	return report, nil
}

// maxPercent bounds the curve: what arrives beyond is not recorded.
const maxPercent = 10000

// add adds the present state to the point of a per cent of arrived load. As in
// the published curves, values are rounded to hundredths before they are
// averaged.
func (r *FillReport) add(arrived float64) {
	at := int(math.RoundToEven(min(arrived, maxPercent)))
	for len(r.Points) <= at {
		r.Points = append(r.Points, FillPoint{})
	}
	p := &r.Points[at]
	p.N++
	p.Allocated += hundredths(r.Allocated)
	p.Fragmented += hundredths(r.Fragmented)
}

func hundredths(x float64) float64 { return math.Round(100*x) / 100 }
