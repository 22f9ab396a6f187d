package placement

import "math"

// look sets fill and places of a shape for the present mix.
func (v *value) look(s *shape) {
	group := &v.groups[s.key.group]
	n := v.nodeOf(&s.key)
	b := bins{n: len(n.gpus)}
	left, plain := 0, true
	for g := range n.gpus {
		s := &n.gpus[len(n.gpus)-1-g] // they are in descending order
		plain = plain && (s.use == idle || s.use == shares)
		b.free[g], b.memory[g] = s.free, s.memory
		left += int(s.free)
	}
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
		case plain && !cl.Slot:
			can[t] = b.have(o) >= o.count
			some = some || can[t]
		default:
			can[t] = n.devices(cl) >= o.count
			some = some || can[t]
		}
	}
	s.fill = 0
	if !some {
		return
	}
	total := 0
	for _, draws := range v.draws {
		if plain && !group.odd {
			total += group.fillPlain(draws, &can, n.cpu, b)
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

// bins are GPUs that are idle or shared, by what they have left. From first to n
// they are in ascending order of free, so that the first that fits is the
// tightest; those before have too little for anything.
type bins struct {
	free     [MaxGPUs]int16
	memory   [MaxGPUs]int32
	first, n int
}

// fits says whether a GPU has a device of an offer. A whole GPU is a share of all
// of it.
func (b *bins) fits(g int, o *offer) bool {
	return int(b.free[g]) >= o.milli && int(b.memory[g]) >= o.memory
}

// take takes a device of GPU g, and puts the GPU where it belongs then.
func (b *bins) take(g int, o *offer) {
	free, memory := b.free[g]-int16(o.milli), b.memory[g]-int32(o.memory)
	for ; g > b.first && b.free[g-1] > free; g-- {
		b.free[g], b.memory[g] = b.free[g-1], b.memory[g-1]
	}
	b.free[g], b.memory[g] = free, memory
}

// have is how many GPUs have a device.
func (b *bins) have(o *offer) int {
	n := 0
	for g := b.first; g < b.n; g++ {
		if b.fits(g, o) {
			n++
		}
	}
	return n
}

// takeAll takes the devices of an offer, each of the tightest GPU. Where there
// are too few it takes none and returns false.
func (b *bins) takeAll(o *offer, least int) bool {
	if o.count > 1 && b.have(o) < o.count {
		return false
	}
	// A GPU that gave one moves to the front: those after it have not.
	g := b.first
	for range o.count {
		for ; g < b.n && !b.fits(g, o); g++ {
		}
		if g == b.n {
			return false
		}
		b.take(g, o)
		g++
	}
	for b.first < b.n && int(b.free[b.first]) < least {
		b.first++
	}
	return true
}

// fillPlain fills bins, which are its own.
func (t *group) fillPlain(draws []uint8, can *[maxMix]bool, cpu int, b bins) int {
	taken := 0
	for _, d := range draws {
		if !can[d] {
			continue
		}
		o := &t.offers[d]
		if o.cpu > cpu || o.count > 0 && !b.takeAll(o, t.smallest) {
			continue
		}
		cpu -= o.cpu
		if taken += o.count * o.milli; b.first == b.n || cpu < t.least {
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
