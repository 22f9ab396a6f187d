package trace

import (
	"io"
	"math"
	"math/rand/v2"
	"time"
)

// Generate returns the jobs of the scenario. The same scenario and seed give
// the same jobs. Memory does not grow with their number. Requests of a class
// share its Products: do not change them. Of a scenario that does not pass
// Validate, the first Next says so.
//
// Arrivals are whole milliseconds, durations whole seconds.
func (s Scenario) Generate(seed uint64) Source {
	g := &generator{scenario: s, err: s.Validate()}
	if g.err != nil {
		return g
	}
	// Arrivals have a stream of their own, so that they stay as they are when a
	// class changes.
	const arrivalStream, jobStream = 1, 2
	g.rand = rand.New(rand.NewPCG(seed, jobStream))                   //nolint:gosec // repeatable is what it must be
	g.clock = newClock(s, rand.New(rand.NewPCG(seed, arrivalStream))) //nolint:gosec // idem
	for i := range s.Classes {
		g.weights = append(g.weights, s.Classes[i].Weight)
	}
	return g
}

type generator struct {
	scenario Scenario
	rand     *rand.Rand
	clock    *clock
	weights  []int // of the classes
	made     int
	err      error
}

func (g *generator) Next() (Job, error) {
	if g.err != nil {
		return Job{}, g.err
	}
	hours := g.clock.next()
	if math.IsInf(hours, 1) || g.scenario.Jobs > 0 && g.made >= g.scenario.Jobs {
		g.err = io.EOF
		return Job{}, g.err
	}
	c := &g.scenario.Classes[pick(g.rand, g.weights)]
	job := Job{
		ID:       g.made,
		Arrival:  time.Duration(hours*float64(time.Hour/time.Millisecond)) * time.Millisecond,
		Priority: c.Priority,
		Class:    c.Name,
		Activity: c.Activity.draw(g.rand),
	}
	if len(c.Tenants) > 0 {
		job.Tenant = 1 + pick(g.rand, c.Tenants)
	}
	job.Request = c.request(job.Activity, c.GPUMemory.draw(g.rand), c.Cores.draw(g.rand), c.Memory.draw(g.rand))
	job.Duration = c.Duration.draw(g.rand)
	g.made++
	return job, nil
}

// pick draws an index by weight.
func pick(r *rand.Rand, weights []int) int {
	total := 0
	for _, w := range weights {
		total += w
	}
	n := r.IntN(total)
	for i, w := range weights {
		if n < w {
			return i
		}
		n -= w
	}
	return 0 // not reached: n is below the sum
}

func (r Range) draw(rand *rand.Rand) int { return r.Low + rand.IntN(r.High-r.Low+1) }

// draw inverts the distribution, so that a duration takes one random number
// however narrow the cut-offs are.
func (l *Lengths) draw(r *rand.Rand) time.Duration {
	if *l == (Lengths{}) {
		return 0
	}
	low, high := l.cuts()
	from, to := normal(low), normal(high)
	z := math.Sqrt2 * math.Erfinv(2*(from+float64(r.Float64()*(to-from)))-1)
	d := time.Duration(float64(l.Median) * math.Exp(l.Sigma*z)).Round(time.Second)
	return min(max(d, l.Min), l.Max)
}

// cuts returns the cut-offs in standard deviations of the logarithm.
func (l *Lengths) cuts() (low, high float64) {
	return math.Log(float64(l.Min)/float64(l.Median)) / l.Sigma, math.Log(float64(l.Max)/float64(l.Median)) / l.Sigma
}

// normal is the distribution function of the standard normal distribution.
func normal(z float64) float64 { return math.Erfc(-z/math.Sqrt2) / 2 }

// Mean returns the mean of the durations, the cut-offs in account.
func (l *Lengths) Mean() time.Duration {
	if *l == (Lengths{}) {
		return 0
	}
	if l.Min == l.Max {
		return l.Min
	}
	low, high := l.cuts()
	part := (normal(high-l.Sigma) - normal(low-l.Sigma)) / (normal(high) - normal(low))
	return time.Duration(float64(l.Median) * math.Exp(l.Sigma*l.Sigma/2) * part)
}

// clock gives the times of arrivals in hours since the start of the trace.
type clock struct {
	rand    *rand.Rand
	perHour [24]float64
	end     float64
	// poisson is the next arrival of the Poisson process, infinite after the
	// last.
	poisson float64
	bursts  []burst
}

// burst is what is left of a Burst.
type burst struct {
	next, end float64
	left      int // with the next
}

func newClock(s Scenario, r *rand.Rand) *clock {
	c := &clock{rand: r, end: float64(24 * s.Days)}
	sum := 0.0
	for _, w := range s.Arrivals.Hours {
		sum += w
	}
	for i, w := range s.Arrivals.Hours {
		c.perHour[i] = s.Arrivals.PerDay / 24
		if sum > 0 {
			c.perHour[i] = s.Arrivals.PerDay * w / sum
		}
	}
	c.advance()
	for _, from := range s.Arrivals.Bursts {
		b := burst{next: from.At.Hours(), end: (from.At + from.Length).Hours(), left: from.Jobs + 1}
		b.advance(r)
		c.bursts = append(c.bursts, b)
	}
	return c
}

// next returns the time of the next arrival, infinite after the last. Times
// never decrease.
func (c *clock) next() float64 {
	var first *burst
	for i := range c.bursts {
		if b := &c.bursts[i]; b.left > 0 && (first == nil || b.next < first.next) {
			first = b
		}
	}
	if first != nil && first.next < c.poisson {
		at := first.next
		first.advance(c.rand)
		return at
	}
	at := c.poisson
	c.advance()
	return at
}

// advance moves to the next arrival of the Poisson process. The number of
// arrivals that are expected until then is exponential with mean 1, and the
// rate is constant within an hour.
func (c *clock) advance() {
	wait := c.rand.ExpFloat64()
	for c.poisson < c.end {
		hour := math.Floor(c.poisson)
		rate := c.perHour[int(hour)%24]
		if expected := rate * (hour + 1 - c.poisson); wait >= expected {
			wait -= expected
			c.poisson = hour + 1
			continue
		}
		if c.poisson += wait / rate; c.poisson < c.end {
			return
		}
	}
	c.poisson = math.Inf(1)
}

// advance moves to the next arrival of the burst: the earliest of the uniform
// times that are left.
func (b *burst) advance(r *rand.Rand) {
	if b.left--; b.left > 0 {
		b.next += (b.end - b.next) * (1 - math.Pow(r.Float64(), 1/float64(b.left)))
	}
}
