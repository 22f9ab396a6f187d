package placement

import (
	"fmt"
	"math"
	"math/rand/v2"
)

// Placer chooses places in a cluster by a policy. It remembers what it found out
// about each node until the node changes, so that a decision costs what changed
// since the last one for the same request. It is not safe for concurrent use.
type Placer struct {
	c      *Cluster
	policy Policy
	judge  judge
	value  *value // in the place of judge for the ashlar policy
	rng    *rand.Rand
	tables []*table
	filled int    // entries in all tables
	clock  uint64 // counts decisions
	epoch  uint64 // counts the times that scores went stale
	// scratch is a copy of a node that a judge may change.
	scratch node
	gpus    [MaxGPUs]gpuState
}

// judge scores a plan on a node that fits the class; larger is better.
type judge interface {
	score(n *node, cl *class, p *Plan) float64
}

// table has what is known of the nodes for one class.
type table struct {
	entries []entry
	epoch   uint64
	used    uint64
}

type entry struct {
	version    uint64
	score      float64
	gpu, start uint8
	// why is Fit of the node where explained is true.
	why       Code
	explained bool
}

// maxEntries bounds the memory of a Placer: 24 bytes each.
const maxEntries = 1 << 23

// NewPlacer returns a placer on a cluster. The fgd policy must be told the mix:
// a sample of requests, each as often as it is common. The others ignore it.
func NewPlacer(c *Cluster, policy Policy, mix []Request) (*Placer, error) {
	p := &Placer{c: c, policy: policy, epoch: 1, rng: rand.New(rand.NewPCG(policy.Seed, 1))} //nolint:gosec // a policy is repeatable
	switch policy.kind {
	case ashlar:
		p.value = newValue(c, policy.value)
	case fgd:
		if len(mix) == 0 {
			return nil, fmt.Errorf("%w: the policy fgd needs the mix of requests beforehand: give a sample", ErrInvalid)
		}
		typical, err := newTypical(c, mix)
		if err != nil {
			return nil, err
		}
		p.judge = &gradient{typical: typical, p: p}
	default:
		p.judge = published{policy.kind}
	}
	return p, nil
}

// Learn takes note that a request of the class arrived, once for each pod and
// before it is placed. Only policies that learn the mix change by it.
func (p *Placer) Learn(id ClassID) {
	if p.value != nil && p.value.learn(&p.c.classes[id]) {
		p.epoch++
	}
}

// Place chooses a node and devices for a request. It returns false where no node
// can run it; Explain says why. Nothing is given out: Apply the plan.
func (p *Placer) Place(id ClassID) (Plan, bool) {
	entries := p.refresh(id)
	var best int
	switch {
	case p.policy.kind == random:
		best = p.anyOf(entries, math.Inf(-1))
	case p.policy.Squeeze || p.policy.kind == bestFit:
		best = p.squeezed(entries)
	default:
		best = p.best(entries)
	}
	if best < 0 {
		return Plan{}, false
	}
	plan := Plan{Class: id, Node: best}
	cl, n := &p.c.classes[id], &p.c.nodes[best]
	if cl.Count == 1 && cl.Milli != Whole && cl.Links == AnyLink {
		plan.Devices = 1
		plan.GPU[0], plan.Start[0] = entries[best].gpu, entries[best].start
		if p.policy.kind == random {
			p.anyDevice(n, cl, &plan)
		}
	} else {
		n.choices(cl, &plan, func(*Plan) {})
	}
	return plan, true
}

// refresh brings the table of a class up to date.
func (p *Placer) refresh(id ClassID) []entry {
	for len(p.tables) <= int(id) {
		p.tables = append(p.tables, nil)
	}
	p.clock++
	t := p.tables[id]
	if t == nil {
		p.evict(len(p.c.nodes))
		t = &table{entries: make([]entry, len(p.c.nodes))}
		p.filled += len(p.c.nodes)
		p.tables[id] = t
	}
	stale := t.epoch != p.epoch
	t.epoch, t.used = p.epoch, p.clock
	for i, version := range p.c.version {
		if e := &t.entries[i]; stale || e.version != version {
			p.evaluate(i, id, e)
			e.version = version
		}
	}
	return t.entries
}

// evaluate finds the best plan for a class on a node.
func (p *Placer) evaluate(i int, id ClassID, e *entry) {
	n, cl := &p.c.nodes[i], &p.c.classes[id]
	e.score, e.explained = math.Inf(-1), false
	if !n.fits(cl) {
		return
	}
	if p.value != nil {
		p.value.evaluate(i, id, e)
		return
	}
	_, tight := p.judge.(published)
	plan := Plan{Node: i}
	n.choices(cl, &plan, func(q *Plan) {
		s := p.judge.score(n, cl, q)
		// The published policies do not tell devices apart: the one with the
		// least left is taken.
		if s > e.score || tight && s == e.score && q.Devices == 1 && n.gpus[q.GPU[0]].free < n.gpus[e.gpu].free {
			e.score, e.gpu, e.start = s, q.GPU[0], q.Start[0]
		}
	})
}

// evict forgets the tables used longest ago until there is room for n entries.
func (p *Placer) evict(n int) {
	for p.filled > 0 && p.filled+n > maxEntries {
		oldest := -1
		for i, t := range p.tables {
			if t != nil && (oldest < 0 || t.used < p.tables[oldest].used) {
				oldest = i
			}
		}
		p.filled -= len(p.tables[oldest].entries)
		p.tables[oldest] = nil
	}
}

// best returns the node with the highest score, -1 where none fits.
func (p *Placer) best(entries []entry) int {
	best, score := -1, math.Inf(-1)
	for i := range entries {
		if entries[i].score > score {
			best, score = i, entries[i].score
		}
	}
	if best >= 0 && p.policy.RandomTies {
		return p.anyOf(entries, score)
	}
	return best
}

// anyOf draws one of the nodes that fit and reach a score.
func (p *Placer) anyOf(entries []entry, score float64) int {
	chosen, n := -1, 0
	for i := range entries {
		if s := entries[i].score; s >= score && !math.IsInf(s, -1) {
			if n++; p.rng.IntN(n) == 0 {
				chosen = i
			}
		}
	}
	return chosen
}

// anyDevice draws one of the GPUs of a node that have a device for the class.
func (p *Placer) anyDevice(n *node, cl *class, plan *Plan) {
	seen := 0
	for g := range n.gpus {
		if !n.spec.has(&n.gpus[g], cl) {
			continue
		}
		if seen++; p.rng.IntN(seen) == 0 && cl.Profile == "" {
			plan.GPU[0] = uint8(g)
		}
	}
}

// squeezed returns the node with the highest score after the scores have been
// spread over the integers 0 to 100, as kube-scheduler does.
func (p *Placer) squeezed(entries []entry) int {
	low, high := math.Inf(1), math.Inf(-1)
	for i := range entries {
		if s := entries[i].score; !math.IsInf(s, -1) {
			low, high = min(low, s), max(high, s)
		}
	}
	level := func(s float64) float64 {
		if high == low {
			return 0
		}
		return math.Floor((s - low) * 100 / (high - low))
	}
	best, n := -1, 0
	for i := range entries {
		s := entries[i].score
		switch {
		case math.IsInf(s, -1):
		case best < 0 || level(s) > level(entries[best].score):
			best, n = i, 1
		case p.policy.RandomTies && level(s) == level(entries[best].score):
			if n++; p.rng.IntN(n) == 0 {
				best = i
			}
		}
	}
	return best
}

// after returns the node as it would be with the plan. It is valid until the
// next call.
func (p *Placer) after(n *node, cl *class, plan *Plan) *node {
	p.scratch = *n
	p.scratch.gpus = p.gpus[:copy(p.gpus[:], n.gpus)]
	p.scratch.take(cl, plan)
	return &p.scratch
}
