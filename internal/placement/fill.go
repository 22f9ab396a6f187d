package placement

import "math"

// look sets fill and places of a shape for the present mix.
func (v *value) look(s *shape) {
	group := &v.groups[s.key.group]
	n := v.nodeOf(&s.key)
	// What does not fit now never will: most draws are passed over at once.
	var can [maxMix]bool
	some := false
	s.places = s.places[:0]
	for t := range group.offers {
		o := &group.offers[t]
		switch cl := v.mix[t].class; {
		case o.cpu > n.cpu:
		case o.count == 0:
			can[t] = true
		case cl.rigid():
			if places := n.places(cl, o); places > 0 {
				can[t], some = true, true
				s.places = append(s.places, room{uint16(t), uint16(min(places, math.MaxUint16))})
			}
		default:
			can[t] = n.devices(cl) >= o.count
			some = some || can[t]
		}
	}
	s.fill = 0
	if !some {
		return
	}
	b := bins{n: len(n.gpus)}
	left, plain := 0, true
	for g := range n.gpus {
		s := &n.gpus[g]
		plain = plain && (s.use == idle || s.use == shares)
		b.free[g], b.memory[g] = s.free, s.memory
		left += int(s.free)
	}
	total := 0
	for _, draws := range v.draws {
		if plain {
			total += group.fillPlain(draws, &can, n.cpu, b, left)
		} else {
			total += v.fillAny(group, draws, &can, &n, left)
		}
	}
	s.fill = float64(total) / float64(len(v.draws))
}

// places is how many pods of a class the node can take if nothing else comes.
func (n *node) places(cl *class, o *offer) int {
	k := 0
	for g := range n.gpus {
		s := &n.gpus[g]
		switch {
		case cl.Profile != "":
			k += n.spec.room(*s, cl)
		case !n.spec.has(s, cl):
		case cl.Slot:
			k += n.spec.Slots - int(s.taken)
		case o.milli == Whole:
			k++
		default:
			one := int(s.free) / o.milli
			if o.memory > 0 {
				one = min(one, int(s.memory)/o.memory)
			}
			k += one
		}
	}
	if k /= o.count; o.cpu > 0 {
		k = min(k, n.cpu/o.cpu)
	}
	return k
}

// bins are GPUs that are idle or shared, by what they have left.
type bins struct {
	free   [MaxGPUs]int16
	memory [MaxGPUs]int32
	n      int
}

// fits says whether a GPU has a device of an offer. A whole GPU is a share of all
// of it.
func (b *bins) fits(g int, o *offer) bool {
	return int(b.free[g]) >= o.milli && int(b.memory[g]) >= o.memory
}

func (b *bins) take(g int, o *offer) {
	b.free[g] -= int16(o.milli)
	b.memory[g] -= int32(o.memory)
}

// takeOne takes a device of the GPU with the least free that has one.
func (b *bins) takeOne(o *offer) bool {
	best, least := -1, int16(math.MaxInt16)
	for g := range b.n {
		if b.free[g] < least && b.fits(g, o) {
			best, least = g, b.free[g]
		}
	}
	if best < 0 {
		return false
	}
	b.take(best, o)
	return true
}

// takeSeveral takes a device of each of the first GPUs that have one.
func (b *bins) takeSeveral(o *offer) bool {
	have := 0
	for g := range b.n {
		if b.fits(g, o) {
			have++
		}
	}
	if have < o.count {
		return false
	}
	for g, want := 0, o.count; want > 0; g++ {
		if b.fits(g, o) {
			b.take(g, o)
			want--
		}
	}
	return true
}

// fillPlain fills bins, which are its own. Full is the most that they can take in.
func (t *group) fillPlain(draws []uint8, can *[maxMix]bool, cpu int, b bins, full int) int {
	taken := 0
	for _, d := range draws {
		if !can[d] {
			continue
		}
		o := &t.offers[d]
		switch {
		case o.cpu > cpu:
			continue
		case o.count == 0:
		case o.count == 1:
			if !b.takeOne(o) {
				continue
			}
		case !b.takeSeveral(o):
			continue
		}
		cpu -= o.cpu
		if taken += o.count * o.milli; taken == full || cpu < t.least {
			break
		}
	}
	return taken
}

// fillAny fills GPUs of any kind, through the same doors as real plans.
func (v *value) fillAny(t *group, draws []uint8, can *[maxMix]bool, start *node, full int) int {
	n := *start
	var gpus [MaxGPUs]gpuState
	n.gpus = gpus[:copy(gpus[:], start.gpus)]
	taken := 0
	for _, d := range draws {
		if !can[d] {
			continue
		}
		o, cl := &t.offers[d], v.mix[d].class
		if o.cpu > n.cpu || o.count > 0 && n.devices(cl) < o.count {
			continue
		}
		n.cpu -= o.cpu
		if o.count == 0 {
			continue
		}
		for range o.count {
			n.giveTightest(cl)
		}
		if taken += o.count * o.milli; taken >= full {
			break
		}
	}
	return taken
}

// memoryGrain is the step in MiB by which the GPU memory left is told apart in
// shapes.
func (v *value) memoryGrain(group int32) int32 {
	return max(1, int32(v.c.groups[group].GPUMemoryMiB/memoryGrains))
}

// nodeOf is a node of a shape, without the GPUs that give nothing.
func (v *value) nodeOf(key *shapeKey) node {
	spec := &v.c.groups[key.group]
	n := node{spec: spec, cpu: int(key.cpu) * v.cpuGrain, memory: math.MaxInt}
	grain := v.memoryGrain(key.group)
	for _, p := range key.gpus {
		if p == 0 {
			break
		}
		n.gpus = append(n.gpus, p.unpack(spec, grain))
	}
	return n
}

// giveTightest gives one device of the GPU with the least free; of a MIG GPU the
// last placement.
func (n *node) giveTightest(cl *class) {
	best := -1
	for g := range n.gpus {
		if n.spec.has(&n.gpus[g], cl) && (best < 0 || n.gpus[g].free < n.gpus[best].free) {
			best = g
		}
	}
	if best < 0 {
		return
	}
	start := 0
	if i := n.spec.profile(cl.Profile); cl.Profile != "" {
		places := n.spec.MIG.Profiles[i].Placements
		for k := len(places) - 1; k >= 0; k-- {
			if n.spec.cuttable(n.gpus[best].cut, i, places[k].Start) {
				start = places[k].Start
				break
			}
		}
	}
	n.spec.give(&n.gpus[best], cl, start)
}

// evaluate finds the plan with the least loss for a class on node i, which fits
// it. The higher the score the smaller the loss, in grains.
func (v *value) evaluate(i int, id ClassID, e *entry) {
	n, cl := &v.c.nodes[i], &v.c.classes[id]
	before := v.worth(v.locate(i))
	milli := float64(cl.Count * cl.milli(n.spec))
	var gpus [MaxGPUs]gpuState
	var plan Plan
	e.score = math.Inf(-1)
	n.choices(cl, &plan, func(p *Plan) {
		after := *n
		after.gpus = gpus[:copy(gpus[:], n.gpus)]
		after.take(cl, p)
		if s := math.Round((milli + v.worth(v.shapeOf(&after)) - before) / v.grain); s > e.score {
			e.score, e.gpu, e.start = s, p.GPU[0], p.Start[0]
		}
	})
}
