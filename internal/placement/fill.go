package placement

import "math"

// fill is V of a shape: the mean thousandths of GPU that it takes in over the
// sequences of draws.
//
// Rooms is what fits the shape at all: what does not fit now never will, so that
// most draws are passed over at once.
func (v *value) fill(key *shapeKey, rooms []room) float64 {
	group := &v.groups[key.group]
	var free [MaxGPUs]int16
	var memory [MaxGPUs]int32
	node := v.nodeOf(key)
	left, n, plain := 0, len(node.gpus), true
	for g := range node.gpus {
		s := &node.gpus[g]
		plain = plain && (s.use == idle || s.use == shares)
		free[g], memory[g] = s.free, s.memory
		left += int(s.free)
	}
	if len(rooms) == 0 {
		return 0
	}
	var can [maxMix]bool
	for _, r := range rooms {
		can[r.mix] = true
	}
	for i := range group.offers {
		o := &group.offers[i]
		can[i] = can[i] || o.count == 0 && o.cpu <= node.cpu
	}
	total := 0
	for _, draws := range v.draws {
		if plain {
			total += group.fillPlain(draws, &can, node.cpu, free, memory, n, left)
		} else {
			total += v.fillAny(group, draws, &can, &node, left)
		}
	}
	return float64(total) / float64(len(v.draws))
}

// fillPlain fills GPUs that are idle or shared. Full is the most that can be
// taken in.
func (t *group) fillPlain(draws []uint8, can *[maxMix]bool, cpu int, free [MaxGPUs]int16, memory [MaxGPUs]int32, n, full int) int {
	taken := 0
	for _, d := range draws {
		if !can[d] {
			continue
		}
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
				if int(free[g]) >= o.milli && int(memory[g]) >= o.memory && (best < 0 || free[g] < free[best]) {
					best = g
				}
			}
			if best < 0 {
				continue
			}
			free[best] -= int16(o.milli)    //nolint:gosec // at most Whole
			memory[best] -= int32(o.memory) //nolint:gosec // no more than there is
		default:
			have := 0
			for g := range n {
				if int(free[g]) >= o.milli && int(memory[g]) >= o.memory {
					have++
				}
			}
			if have < o.count {
				continue
			}
			for g, want := 0, o.count; want > 0; g++ {
				if int(free[g]) >= o.milli && int(memory[g]) >= o.memory {
					free[g] -= int16(o.milli)    //nolint:gosec // at most Whole
					memory[g] -= int32(o.memory) //nolint:gosec // no more than there is
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
	return max(1, int32(v.c.groups[group].GPUMemoryMiB/memoryGrains)) //nolint:gosec // checked by Validate
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

// places counts for each request of the mix how many of it the shape can take.
// Requests without GPU and those that cannot be taken are left out.
func (v *value) places(key *shapeKey, list []room) []room {
	offers := v.groups[key.group].offers
	spec := &v.c.groups[key.group]
	cpu := int(key.cpu) * v.cpuGrain
	node := v.nodeOf(key)
	for t := range offers {
		o := &offers[t]
		if o.count == 0 || o.cpu > cpu {
			continue
		}
		n := 0
		for g := range node.gpus {
			s := &node.gpus[g]
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
