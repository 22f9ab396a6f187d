package trace

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// Scenario is a workload as data: the nodes, the kinds of jobs, and when they
// come. Generate makes jobs of it.
type Scenario struct {
	Name string
	// Summary is one line, Doc a paragraph on the mix and what it is for.
	Summary, Doc string
	// Version goes up when the jobs of a seed change.
	Version int
	Nodes   []NodeGroup
	Classes []Class
	// Arrivals says when jobs come. None comes after Days of 24 hours, and none
	// after the first Jobs, where that is not 0.
	Arrivals   Arrivals
	Days, Jobs int
}

// NodeGroup is a number of nodes that are alike.
type NodeGroup struct {
	Count int
	// Cores and MemoryGiB are what pods can have of each node.
	Cores, MemoryGiB int
	// GPUs is the number of GPUs of each node, and Product the key of their
	// model in the catalogue of package gpu; both are empty for nodes without.
	GPUs    int
	Product string
	// MIG says that the GPUs may be cut.
	MIG bool
}

// Class is one kind of job.
type Class struct {
	Name string
	// Weight is how many of the jobs are of the class, relative to the others.
	Weight int
	// GPUs is the number of devices of a job: whole GPUs, or MIG devices where
	// Profile names one, or one part of a GPU where Shared is set.
	GPUs    int
	Shared  bool
	Profile string
	// Activity is what a job keeps busy of each GPU, in thousandths. A shared
	// job asks for this part of a GPU, rounded up to a multiple of 50.
	Activity Range
	// GPUMemory is what a shared job needs of its GPU's memory, in GiB.
	GPUMemory Range
	// Cores and Memory are for the job as a whole; Memory is in GiB.
	Cores, Memory Range
	// Products are the keys of the only models that will do, sorted; none means
	// any.
	Products []string
	Links    placement.LinkClass
	Duration Lengths
	Priority int
	// Tenants are the weights of tenants 1, 2 and so on; none means that jobs
	// belong to tenant 0.
	Tenants []int
}

// Range is a range of whole numbers with both ends in it, all equally likely.
type Range struct{ Low, High int }

// Lengths is a lognormal distribution of durations without its parts below Min
// and above Max. Median and Sigma, the standard deviation of the logarithm, are
// those of the whole distribution; Min and Max are whole seconds. The zero value stands for jobs that never
// leave.
type Lengths struct {
	Median, Min, Max time.Duration
	Sigma            float64
}

// Arrivals is a Poisson process and bursts on top of it.
type Arrivals struct {
	// PerDay is the mean number of jobs in a day, without bursts.
	PerDay float64
	// Hours are the weights of the hours of a day. The trace begins with the
	// first. All 0 means that all are alike.
	Hours  [24]float64
	Bursts []Burst
}

// Burst is a number of jobs spread evenly at random over a length of time.
type Burst struct {
	At, Length time.Duration
	Jobs       int
}

// ErrScenario is wrapped by errors about scenarios that cannot be generated.
var ErrScenario = errors.New("invalid scenario")

const (
	// shareStep is the granularity of shares in thousandths: people do not ask
	// for 237 thousandths.
	shareStep = 50
	// podLimit is the default of the kubelet.
	podLimit = 110
	// maxDays keeps arrivals within what floats resolve to a millisecond.
	maxDays = 3650
)

// NodeSpecs returns the nodes of the scenario. Those with the same product
// share its MIG table: do not change it.
func (s Scenario) NodeSpecs() []placement.NodeSpec {
	var nodes []placement.NodeSpec
	for _, g := range s.Nodes {
		for range g.Count {
			node := placement.NodeSpec{
				Name: nodeName(len(nodes)), MilliCPU: 1000 * g.Cores, MemoryMiB: 1024 * g.MemoryGiB, Pods: podLimit,
				GPUs: g.GPUs, Product: g.Product,
			}
			if p := gpu.ProductByKey(g.Product); p != nil {
				node.GPUMemoryMiB, node.Links = p.MemoryMiB, linksOf(p)
				if g.MIG {
					node.MIG = p.MIG
				}
			}
			nodes = append(nodes, node)
		}
	}
	return nodes
}

// linksOf is how well the GPUs of the commonest machines of a product are linked.
func linksOf(p *gpu.Product) placement.LinkClass {
	if p.NVLinks > 0 {
		return placement.NVLinked
	}
	return placement.AnyLink
}

func nodeName(i int) string { return fmt.Sprintf("node-%04d", i) }

// ExclusiveLoad is the mean demand of the jobs if each device were a whole GPU,
// as a part of the GPUs: GPU-hours that come in a day by GPU-hours that a day
// has. It is infinite where jobs with GPUs never leave. Jobs is left out of
// account, and so is that jobs work beyond the end of the trace.
func (s Scenario) ExclusiveLoad() float64 {
	return s.load(func(*Class) float64 { return 1 })
}

// RequestedLoad is as ExclusiveLoad, but counts of each device what the job
// asks of its GPU: shares as such, and MIG devices by their compute slices.
func (s Scenario) RequestedLoad() float64 {
	return s.load(func(c *Class) float64 {
		switch {
		case c.Shared:
			sum := 0
			for activity := c.Activity.Low; activity <= c.Activity.High; activity++ {
				sum += share(activity)
			}
			return float64(sum) / float64(c.Activity.High-c.Activity.Low+1) / placement.Whole
		case c.Profile != "":
			for _, g := range s.Nodes {
				if p := g.profile(c.Profile); p != nil {
					return float64(p.Slices) / float64(gpu.ProductByKey(g.Product).MIG.Slices)
				}
			}
		}
		return 1
	})
}

// load sums the GPU-hours of a day, each device counted as part says.
func (s Scenario) load(part func(*Class) float64) float64 {
	gpus, weights, hours := 0, 0, 0.0
	for _, g := range s.Nodes {
		gpus += g.Count * g.GPUs
	}
	for i := range s.Classes {
		c := &s.Classes[i]
		weights += c.Weight
		if c.GPUs == 0 || c.Weight == 0 {
			continue
		}
		if c.Duration == (Lengths{}) {
			return math.Inf(1)
		}
		hours += float64(c.Weight*c.GPUs) * c.Duration.Mean().Hours() * part(c)
	}
	return hours / float64(weights) * s.jobsPerDay() / float64(24*gpus)
}

// jobsPerDay is the mean number of jobs in a day.
func (s Scenario) jobsPerDay() float64 {
	jobs := 0
	for _, b := range s.Arrivals.Bursts {
		jobs += b.Jobs
	}
	return s.Arrivals.PerDay + float64(jobs)/float64(s.Days)
}

// profile returns a MIG profile that the nodes of the group give, or nil.
func (g *NodeGroup) profile(name string) *gpu.MIGProfile {
	p := gpu.ProductByKey(g.Product)
	if p == nil || p.MIG == nil || !g.MIG {
		return nil
	}
	i := slices.IndexFunc(p.MIG.Profiles, func(p gpu.MIGProfile) bool { return p.Name == name })
	if i < 0 {
		return nil
	}
	return &p.MIG.Profiles[i]
}

// share is what a job asks that keeps so much of a GPU busy.
func share(activity int) int {
	return min((activity+shareStep-1)/shareStep*shareStep, placement.Whole)
}

// Validate names the first thing of the scenario that cannot be meant. It wraps
// ErrScenario.
func (s Scenario) Validate() error {
	invalid := func(format string, args ...any) error {
		return fmt.Errorf("%w %s: %s", ErrScenario, s.Name, fmt.Sprintf(format, args...))
	}
	switch {
	case s.Days < 1 || s.Days > maxDays:
		return invalid("Days is %d: give 1 to %d", s.Days, maxDays)
	case s.Jobs < 0:
		return invalid("Jobs is %d: give 0 for no limit, or more", s.Jobs)
	}
	for i, g := range s.Nodes {
		if err := g.validate(); err != nil {
			return invalid("Nodes[%d]: %v", i, err)
		}
	}
	total := 0
	for i := range s.Classes {
		c := &s.Classes[i]
		if err := c.validate(); err != nil {
			return invalid("class %q: %v", c.Name, err)
		}
		if slices.ContainsFunc(s.Classes[:i], func(o Class) bool { return o.Name == c.Name }) {
			return invalid("class %q is there twice: give each a name of its own", c.Name)
		}
		total += c.Weight
	}
	if total < 1 || total > maxNumber {
		return invalid("the weights of the classes add up to %d: give 1 to %d", total, maxNumber)
	}
	if err := s.Arrivals.validate(s.Days); err != nil {
		return invalid("Arrivals: %v", err)
	}
	return nil
}

// bad says what is wrong with a field of a scenario.
func bad(name, format string, args ...any) error {
	return fmt.Errorf("%s %s", name, fmt.Sprintf(format, args...))
}

func (g *NodeGroup) validate() error {
	product := gpu.ProductByKey(g.Product)
	switch {
	case g.Count < 0 || g.Cores < 0 || g.MemoryGiB < 0:
		return errors.New("a number is negative: give 0 or more")
	case g.Cores > maxNumber/1000 || g.MemoryGiB > maxNumber/1024:
		return fmt.Errorf("the nodes have Cores %d and MemoryGiB %d: give less than 2 million", g.Cores, g.MemoryGiB)
	case g.GPUs < 0 || g.GPUs > placement.MaxGPUs:
		return bad("GPUs", "is %d: give 0 to %d", g.GPUs, placement.MaxGPUs)
	case g.GPUs == 0 && (g.Product != "" || g.MIG):
		return bad("GPUs", "is 0: leave Product and MIG out, or give GPUs")
	case g.GPUs > 0 && product == nil:
		return bad("Product", "is %q: give a key of the product catalogue", g.Product)
	case g.MIG && product.MIG == nil:
		return bad("MIG", "is set, but %s cannot be cut: leave it out", g.Product)
	}
	return nil
}

func (c *Class) validate() error {
	for _, r := range []struct {
		field string
		r     Range
		most  int
	}{
		{"Activity", c.Activity, placement.Whole},
		{"GPUMemory", c.GPUMemory, maxNumber / 1024},
		{"Cores", c.Cores, maxNumber / 1000},
		{"Memory", c.Memory, maxNumber / 1024},
	} {
		if r.r.Low < 0 || r.r.Low > r.r.High || r.r.High > r.most {
			return fmt.Errorf("%s is %d to %d: give a range within 0 to %d", r.field, r.r.Low, r.r.High, r.most)
		}
	}
	tenants := 0
	for _, w := range c.Tenants {
		if w < 0 || w > maxNumber {
			return bad("Tenants", "is %v: give weights of 0 to %d", c.Tenants, maxNumber)
		}
		tenants += w
	}
	switch {
	case !isClass(c.Name):
		return fmt.Errorf("the name is no class: give %s", classHint)
	case c.Weight < 0 || c.Weight > maxNumber:
		return bad("Weight", "is %d: give 0 to %d", c.Weight, maxNumber)
	case c.Priority < -maxNumber || c.Priority > maxNumber:
		return bad("Priority", "is %d: give %d to %d", c.Priority, -maxNumber, maxNumber)
	case c.Shared && c.Activity.Low == 0:
		return bad("Activity", "of a shared class begins at 0: begin at 1, a share of 0 is no request")
	case c.Shared && (c.GPUs != 1 || c.Profile != ""):
		return errors.New("a shared class has a part of one GPU: set GPUs to 1 and leave Profile out")
	case !c.Shared && c.GPUMemory != (Range{}):
		return bad("GPUMemory", "is for shared classes: leave it out")
	case c.GPUs == 0 && c.Activity != (Range{}):
		return bad("Activity", "is set without GPUs: leave it out")
	case len(c.Tenants) > 0 && (tenants < 1 || tenants > maxNumber):
		return fmt.Errorf("the weights of Tenants add up to %d: give 1 to %d", tenants, maxNumber)
	}
	if err := c.Duration.validate(); err != nil {
		return err
	}
	r := c.request(c.Activity.Low, c.GPUMemory.Low, c.Cores.Low, c.Memory.Low)
	return r.Validate()
}

// request returns what a job of the class asks of a node. Memory is in GiB.
func (c *Class) request(activity, gpuMemory, cores, memory int) placement.Request {
	r := placement.Request{
		MilliCPU: 1000 * cores, MemoryMiB: 1024 * memory, Count: c.GPUs, GPUMemoryMiB: 1024 * gpuMemory,
		Profile: c.Profile, Products: c.Products, Links: c.Links,
	}
	switch {
	case c.Shared:
		r.Milli = share(activity)
	case c.GPUs > 0 && c.Profile == "":
		r.Milli = placement.Whole
	}
	return r
}

func (l *Lengths) validate() error {
	switch {
	case *l == Lengths{}:
		return nil
	case l.Min < time.Second || l.Max < l.Min || l.Max > maxDays*24*time.Hour || l.Min%time.Second != 0 || l.Max%time.Second != 0:
		return bad("Duration", "is cut off at %v and %v: give whole seconds within 1s to %d days", l.Min, l.Max, maxDays)
	case l.Median < l.Min || l.Median > l.Max:
		return bad("Duration", "has the median %v: give one within the cut-offs, %v to %v", l.Median, l.Min, l.Max)
	case !(l.Sigma > 0.001 && l.Sigma <= 5): // not a number either
		return bad("Duration", "has the sigma %v: give 0.001 to 5", l.Sigma)
	}
	return nil
}

func (a *Arrivals) validate(days int) error {
	if !(a.PerDay >= 0 && a.PerDay <= 1e9) {
		return bad("PerDay", "is %v: give 0 to 1e9", a.PerDay)
	}
	for _, w := range a.Hours {
		if !(w >= 0 && w <= 1e6) {
			return bad("Hours", "has %v: give weights of 0 to 1e6", w)
		}
	}
	for i, b := range a.Bursts {
		end := time.Duration(days) * 24 * time.Hour
		if b.At < 0 || b.Length < 0 || b.At > end || b.Length > end-b.At || b.Jobs < 0 || b.Jobs > maxNumber {
			return bad(fmt.Sprintf("Bursts[%d]", i), "is %d jobs from %v for %v: keep it within the %d days", b.Jobs, b.At, b.Length, days)
		}
	}
	return nil
}

// Scenarios returns the scenarios of this package. Their tables are shared: do
// not change them.
func Scenarios() []Scenario { return slices.Clone(scenarios) }

// ScenarioByName returns a scenario of this package.
func ScenarioByName(name string) (Scenario, bool) {
	i := slices.IndexFunc(scenarios, func(s Scenario) bool { return s.Name == name })
	if i < 0 {
		return Scenario{}, false
	}
	return scenarios[i], true
}

const (
	maxClass  = 32
	classHint = "up to 32 lower-case letters, digits and hyphens"
)

// isClass says whether a text can be the name of a class.
func isClass(s string) bool {
	return s != "" && len(s) <= maxClass && strings.Trim(s, "abcdefghijklmnopqrstuvwxyz0123456789-") == ""
}
