package placement

import "slices"

// host says what of the host's resources the node lacks for a class, Fits for
// none.
func (n *node) host(cl *class) Code {
	switch {
	case n.down:
		return NodeUnavailable
	case n.cpu < cl.MilliCPU:
		return InsufficientCPU
	case n.memory < cl.MemoryMiB:
		return InsufficientMemory
	case n.spec.Pods > 0 && n.pods >= n.spec.Pods:
		return InsufficientPods
	}
	return Fits
}

// has says whether the GPU has a device for the class.
func (s *NodeSpec) has(g *gpuState, cl *class) bool {
	switch {
	case cl.Slot:
		return (g.use == idle || g.use == slots) && s.Slots > 1 && int(g.taken) < s.Slots
	case cl.Profile != "":
		return s.room(*g, cl) > 0
	case cl.Milli == Whole:
		return g.use == idle && (s.GPUMemoryMiB == 0 || cl.GPUMemoryMiB <= s.GPUMemoryMiB)
	}
	return (g.use == idle || g.use == shares) && int(g.free) >= cl.Milli && int(g.memory) >= s.shareMemory(cl)
}

// room is how many devices of a MIG class can be cut from the GPU, the last
// placements first.
func (s *NodeSpec) room(g gpuState, cl *class) int {
	i := s.profile(cl.Profile)
	if i < 0 || g.use != idle && g.use != mig {
		return 0
	}
	n := 0
	for k := len(s.MIG.Profiles[i].Placements) - 1; k >= 0; k-- {
		if start := s.MIG.Profiles[i].Placements[k].Start; s.cuttable(g.cut, i, start) {
			g.cut |= uint64(i+1) << (4 * start)
			n++
		}
	}
	return n
}

// fits says whether the node can run the class now.
func (n *node) fits(cl *class) bool {
	if n.host(cl) != Fits {
		return false
	}
	if cl.Count == 0 {
		return true
	}
	return cl.allowed(n) && n.devices(cl) >= cl.Count && n.linked(cl)
}

// devices is how many devices of the class the node has free, counted to
// cl.Count at most.
func (n *node) devices(cl *class) int {
	have := 0
	for g := range n.gpus {
		if cl.Profile != "" {
			have += n.spec.room(n.gpus[g], cl)
		} else if n.spec.has(&n.gpus[g], cl) {
			have++
		}
		if have >= cl.Count {
			break
		}
	}
	return have
}

// linked says whether the free devices can meet the condition on the links.
func (n *node) linked(cl *class) bool {
	if cl.Links == AnyLink || cl.Count < 2 {
		return true
	}
	if n.spec.Machine == nil {
		return cl.Links <= n.spec.Links
	}
	var p Plan
	return n.bestSet(cl, &p)
}

// choices calls yield for each plan on the node that could matter to a policy.
// The node must fit the class. GPUs in the same state stand for one another,
// the first of them is taken; of a class with several devices there is one
// plan.
func (n *node) choices(cl *class, p *Plan, yield func(p *Plan)) {
	p.Devices = cl.Count
	switch {
	case cl.Count == 0:
		yield(p)
	case cl.Profile != "":
		n.migChoices(cl, p, yield)
	case cl.Milli == Whole, cl.Links != AnyLink:
		if n.bestSet(cl, p) {
			yield(p)
		}
	case cl.Count == 1:
	next:
		for g := range n.gpus {
			if !n.spec.has(&n.gpus[g], cl) {
				continue
			}
			for h := range g {
				if n.gpus[h] == n.gpus[g] {
					continue next
				}
			}
			p.GPU[0] = uint8(g)
			yield(p)
		}
	default:
		n.tightest(cl, p)
		yield(p)
	}
}

// tightest puts the GPUs with the least free that has a device for the class
// into the plan, the lowest index first among equals.
func (n *node) tightest(cl *class, p *Plan) {
	var chosen [MaxGPUs]bool
	for i := range cl.Count {
		best := -1
		for g := range n.gpus {
			if !chosen[g] && n.spec.has(&n.gpus[g], cl) && (best < 0 || n.gpus[g].free < n.gpus[best].free) {
				best = g
			}
		}
		chosen[best] = true //nolint:gosec // the node has the devices, so that one is found
		p.GPU[i] = uint8(best)
	}
}

// migChoices offers each placement for one MIG device. Several are cut one by
// one, each where the most other placements stay possible.
func (n *node) migChoices(cl *class, p *Plan, yield func(p *Plan)) {
	i := n.spec.profile(cl.Profile)
	places := n.spec.MIG.Profiles[i].Placements
	if cl.Count == 1 {
		n.migEach(p, i, yield)
		return
	}
	var scratch [MaxGPUs]gpuState
	copy(scratch[:], n.gpus)
	for d := range cl.Count {
		bestG, bestAt, bestLeft := -1, 0, -1
		for g := range n.gpus {
			if use := scratch[g].use; use != idle && use != mig {
				continue
			}
			for _, at := range places {
				if !n.spec.cuttable(scratch[g].cut, i, at.Start) {
					continue
				}
				if left := n.spec.leaves(&scratch[g], i, at.Start); left > bestLeft {
					bestG, bestAt, bestLeft = g, at.Start, left
				}
			}
		}
		if bestG < 0 {
			return
		}
		n.spec.give(&scratch[bestG], cl, bestAt) //nolint:gosec // checked above
		p.GPU[d], p.Start[d] = uint8(bestG), uint8(bestAt)
	}
	yield(p)
}

// migEach offers every placement of profile i, the one that leaves most first, so
// that a policy which sees no difference takes that.
func (n *node) migEach(p *Plan, i int, yield func(p *Plan)) {
	type place struct{ gpu, start, leaves int }
	var places [MaxGPUs * maxUnits]place
	count := 0
next:
	for g := range n.gpus {
		for h := range g {
			if n.gpus[h] == n.gpus[g] {
				continue next
			}
		}
		if use := n.gpus[g].use; use != idle && use != mig {
			continue
		}
		for _, at := range n.spec.MIG.Profiles[i].Placements {
			if n.spec.cuttable(n.gpus[g].cut, i, at.Start) {
				places[count] = place{g, at.Start, n.spec.leaves(&n.gpus[g], i, at.Start)}
				count++
			}
		}
	}
	slices.SortStableFunc(places[:count], func(a, b place) int { return b.leaves - a.leaves })
	for _, at := range places[:count] {
		p.GPU[0], p.Start[0] = uint8(at.gpu), uint8(at.start)
		yield(p)
	}
}

// leaves weighs what can still be cut from a GPU after profile i at start. A GPU
// that is cut already comes before one that is not.
func (s *NodeSpec) leaves(g *gpuState, i, start int) int {
	left := s.options(g.cut | uint64(i+1)<<(4*start))
	if g.use == mig {
		left += 1 << 16
	}
	return left
}

// options weighs what can still be cut: each legal placement counts its compute
// slices squared, so that a large profile outweighs the small ones in its place.
func (s *NodeSpec) options(cut uint64) int {
	sum := 0
	for i := range s.MIG.Profiles {
		p := &s.MIG.Profiles[i]
		for _, at := range p.Placements {
			if s.cuttable(cut, i, at.Start) {
				sum += p.Slices * p.Slices
			}
		}
	}
	return sum
}

// bestSet puts the best set of GPUs with a device into the plan: by their links
// where these are known, else those with the lowest indices. It returns false where
// no set meets the class's condition on the links.
func (n *node) bestSet(cl *class, p *Plan) bool {
	p.Devices = cl.Count
	m := n.spec.Machine
	if m == nil {
		k := 0
		for g := range n.gpus {
			if k < cl.Count && n.spec.has(&n.gpus[g], cl) {
				p.GPU[k] = uint8(g)
				k++
			}
		}
		return k == cl.Count
	}
	offered, take := make([]int, len(n.gpus)), make([]int, len(n.gpus))
	var pool []int
	for g := range n.gpus {
		if n.spec.has(&n.gpus[g], cl) {
			offered[g] = 1
			pool = append(pool, g)
		}
	}
	if len(pool) < cl.Count {
		return false
	}
	set := bestLinked(m, offered, take, pool, cl.Count)
	for i, g := range set {
		p.GPU[i] = uint8(g)
		for _, h := range set[:i] {
			if cl.Links != AnyLink && m.LinkScore(g, h) < floors[NVLinked-cl.Links] {
				return false
			}
		}
	}
	return true
}
