package placement

import (
	"math"
	"slices"
)

// fill is V of a shape: the mean thousandths of GPU that it takes in over the
// sequences of draws.
func (v *value) fill(key *shapeKey) float64 {
	group := &v.groups[key.group]
	var free [MaxGPUs]int16
	left, n, plain := 0, 0, true
	for g := range key.gpus {
		s := &key.gpus[g]
		if s.use == closed {
			break // they come last
		}
		plain = plain && (s.use == idle || s.use == shares) && s.memory == 0
		free[g] = s.free
		left += int(s.free)
		n++
	}
	if left == 0 {
		return 0
	}
	total := 0
	for _, draws := range v.draws {
		if plain {
			total += group.fillPlain(draws, int(key.cpu)*v.cpuGrain, free, n, left)
		} else {
			total += v.fillAny(group, draws, key, left)
		}
	}
	return float64(total) / float64(len(v.draws))
}

// fillPlain fills GPUs that are idle or shared and whose memory is not known.
// free is in descending order; full is the most that can be taken in.
func (t *group) fillPlain(draws []uint16, cpu int, free [MaxGPUs]int16, n, full int) int {
	taken := 0
	for _, d := range draws {
		o := &t.offers[d]
		if o.cpu > cpu {
			continue
		}
		switch {
		case o.count == 0:
		case o.milli == Whole:
			have := 0
			for g := range n {
				if free[g] == Whole {
					have++
				}
			}
			if have < o.count {
				continue
			}
			for g, want := 0, o.count; want > 0; g++ {
				if free[g] == Whole {
					free[g] = 0
					want--
				}
			}
		case o.count == 1:
			best := -1
			for g := range n {
				if int(free[g]) >= o.milli && (best < 0 || free[g] < free[best]) {
					best = g
				}
			}
			if best < 0 {
				continue
			}
			free[best] -= int16(o.milli) //nolint:gosec // at most Whole
		default:
			have := 0
			for g := range n {
				if int(free[g]) >= o.milli {
					have++
				}
			}
			if have < o.count {
				continue
			}
			for g, want := 0, o.count; want > 0; g++ {
				if int(free[g]) >= o.milli {
					free[g] -= int16(o.milli) //nolint:gosec // at most Whole
					want--
				}
			}
		}
		cpu -= o.cpu
		if taken += o.count * o.milli; taken == full || cpu < t.least {
			break
		}
	}
	return taken
}

// fillAny fills GPUs of any kind, through the same doors as real plans.
func (v *value) fillAny(t *group, draws []uint16, key *shapeKey, full int) int {
	n := v.nodeOf(key)
	taken := 0
	for _, d := range draws {
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

// nodeOf is a node of a shape.
func (v *value) nodeOf(key *shapeKey) node {
	gpus := key.gpus
	return node{spec: &v.c.groups[key.group], group: int(key.group), product: slices.Index(v.c.products, v.c.groups[key.group].Product), cpu: int(key.cpu) * v.cpuGrain, memory: math.MaxInt, gpus: gpus[:]}
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

// places counts for each request of the mix how many of it the shape can take.
// Requests without GPU and those that cannot be taken are left out.
func (v *value) places(key *shapeKey, list []room) []room {
	offers := v.groups[key.group].offers
	spec := &v.c.groups[key.group]
	cpu := int(key.cpu) * v.cpuGrain
	for t := range offers {
		o := &offers[t]
		if o.count == 0 || o.cpu > cpu {
			continue
		}
		n := 0
		for g := range key.gpus {
			s := &key.gpus[g]
			if s.use == closed {
				break
			}
			switch cl := v.mix[t].class; {
			case cl.Profile != "":
				n += spec.room(*s, cl)
			case !spec.has(s, cl):
			case cl.Slot:
				n += spec.Slots - int(s.taken)
			case o.milli == Whole:
				n++
			default:
				k := int(s.free) / o.milli
				if o.memory > 0 {
					k = min(k, int(s.memory)/o.memory)
				}
				n += k
			}
		}
		n /= o.count
		if o.cpu > 0 {
			n = min(n, cpu/o.cpu)
		}
		if n > 0 {
			list = append(list, room{uint16(t), uint16(min(n, math.MaxUint16))}) //nolint:gosec // t is less than maxMix
		}
	}
	return list
}

// evaluate finds the plan with the least loss for a class on node i, which fits
// it. The higher the score the smaller the loss, in grains.
func (v *value) evaluate(i int, id ClassID, e *entry) {
	n, cl := &v.c.nodes[i], &v.c.classes[id]
	from := v.locate(i)
	before := v.worth(from)
	milli := float64(cl.Count * cl.milli(n.spec))
	moves := v.movesOf(from, id)
	e.score = math.Inf(-1)
	var best *move
	for k := moves.from; k < moves.to; k++ {
		m := &v.arena[k]
		if s := math.Round((milli + v.worth(m.to) - before) / v.grain); s > e.score {
			e.score, best = s, m
		}
	}
	if best != nil && best.gpu >= 0 {
		want := v.shapes[from].key.gpus[best.gpu]
		for g := range n.gpus {
			if n.gpus[g] == want {
				e.gpu, e.start = uint8(g), best.start //nolint:gosec // less than MaxGPUs
				break
			}
		}
	}
}

// movesOf returns the plans for a class on a shape, in v.arena.
func (v *value) movesOf(from int32, id ClassID) span {
	key := uint64(from)<<32 | uint64(id) //nolint:gosec // neither is negative
	if s, ok := v.moves[key]; ok {
		return s
	}
	s := span{from: int32(len(v.arena))} //nolint:gosec // bounded with the shapes
	cl := &v.c.classes[id]
	shape := v.shapes[from].key
	n := v.nodeOf(&shape)
	var p Plan
	n.choices(cl, &p, func(q *Plan) {
		after := shape
		to := n
		to.gpus = after.gpus[:]
		if !to.take(cl, q) {
			return
		}
		to.cpu = max(to.cpu, 0)
		m := move{gpu: -1, to: v.shapeOf(&to)}
		if q.Devices == 1 {
			m.gpu, m.start = int8(q.GPU[0]), q.Start[0] //nolint:gosec // less than MaxGPUs
		}
		v.arena = append(v.arena, m)
	})
	s.to = int32(len(v.arena)) //nolint:gosec // bounded with the shapes
	v.moves[key] = s
	return s
}
