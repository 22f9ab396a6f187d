package placement

import (
	"math"
	"slices"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// maxExact is the largest number of competing GPUs of which every set is tried:
// no more than the 12870 that 8 of 16 have.
const maxExact = 16

// maxChains bounds how often a set that is not exact is improved. Most sets need
// one chain of exchanges, and a second one to see that nothing is left to gain.
const maxChains = 4

// harm is the weight of a link between chosen and remaining GPUs against one
// inside the chosen set. The comment at Assign argues for it.
const harm = 1

// pairPoints is what a point of a link inside the set adds to the score. With
// deg(i) for the links of GPU i to all available GPUs, cross(S, R) is the sum of
// deg over S minus 2W(S), hence
//
//	W(S) - harm*cross(S, R) = (1 + 2*harm)*W(S) - harm*(sum of deg over S)
//
// so that a set can be scored while it grows, without looking at R.
const pairPoints = 1 + 2*harm

// floors are the lower ends of the classes of links, the best class first. PCIe
// alone never scores as high as one NVLink.
var floors = [...]int{
	gpu.Link{NVLinks: 1}.Score(),
	gpu.Link{PCIe: gpu.PCIeNode}.Score(),
	math.MinInt,
}

// search looks for the n best GPUs of a pool to join those chosen before. GPUs
// of the pool are known by their position in it.
type search struct {
	n int
	// links has the score of i and j at i*len(gain)+j.
	links []int
	// gain is what a GPU adds to the score with only those chosen before.
	gain []int
	// weakest is the poorest link of a GPU to those chosen before, or of these
	// to each other.
	weakest []int
}

// bestLinked returns the n GPUs of pool, which is ascending, that make the best
// linked set together with those that have take > 0. The available GPUs are
// those that have offered > 0; n is from 1 to len(pool).
func bestLinked(m *gpu.Machine, offered, take, pool []int, n int) []int {
	if n == len(pool) {
		return pool
	}
	common := math.MaxInt
	for i := range take {
		for j := range i {
			if take[i] > 0 && take[j] > 0 {
				common = min(common, m.LinkScore(i, j))
			}
		}
	}
	s := search{
		n:       n,
		links:   make([]int, len(pool)*len(pool)),
		gain:    make([]int, len(pool)),
		weakest: make([]int, len(pool)),
	}
	for i, g := range pool {
		s.weakest[i] = common
		for h := range m.GPUs {
			if h == g || offered[h] == 0 {
				continue
			}
			link := m.LinkScore(g, h)
			s.gain[i] -= harm * link
			if take[h] > 0 {
				s.gain[i] += pairPoints * link
				s.weakest[i] = min(s.weakest[i], link)
			}
		}
		for j, h := range pool {
			s.links[i*len(pool)+j] = m.LinkScore(g, h)
		}
	}
	find := s.exact
	if len(pool) > maxExact {
		find = s.climb
	}
	var set []int
	for _, floor := range floors {
		if set = find(floor); set != nil {
			break
		}
	}
	for i, p := range set {
		set[i] = pool[p]
	}
	return set
}

// exact returns the best set all of whose links reach the floor, in ascending
// order; of equal ones the lexicographically smallest; nil where there is none.
func (s *search) exact(floor int) []int {
	e := enumeration{search: s, floor: floor}
	first := &e.levels[0]
	for i, w := range s.weakest {
		if w >= floor {
			first.gpus[first.len], first.gain[first.len] = i, s.gain[i]
			first.len++
		}
	}
	e.walk(0, 0)
	if !e.found {
		return nil
	}
	return slices.Clone(e.best[:s.n])
}

// enumeration walks through all sets in lexicographic order, depth first.
type enumeration struct {
	*search
	floor int
	// levels[d] has what can follow the first d GPUs of path.
	levels    [maxExact]frontier
	path      [maxExact]int
	best      [maxExact]int
	bestScore int
	found     bool
}

// frontier lists GPUs in ascending order, each with what it adds to the score.
type frontier struct {
	gpus, gain [maxExact]int
	len        int
}

func (e *enumeration) walk(depth, score int) {
	from, need := &e.levels[depth], e.n-depth
	if need == 1 {
		for k, i := range from.gpus[:from.len] {
			if total := score + from.gain[k]; !e.found || total > e.bestScore {
				e.path[depth] = i
				e.best, e.bestScore, e.found = e.path, total, true
			}
		}
		return
	}
	to := &e.levels[depth+1]
	for k := 0; k+need <= from.len; k++ {
		i := from.gpus[k]
		links := e.links[i*len(e.gain):][:len(e.gain)]
		to.len = 0
		for l := k + 1; l < from.len; l++ {
			j := from.gpus[l]
			if links[j] >= e.floor {
				to.gpus[to.len], to.gain[to.len] = j, from.gain[l]+pairPoints*links[j]
				to.len++
			}
		}
		if to.len >= need-1 {
			e.path[depth] = i
			e.walk(depth+1, score+from.gain[k])
		}
	}
}

// climb returns a good set all of whose links reach the floor, in ascending
// order, or nil where it finds none. From each GPU it grows a set by the one
// that gains most and then improves it.
func (s *search) climb(floor int) []int {
	var best []int
	bestScore := 0
	for seed := range s.gain {
		if s.weakest[seed] < floor {
			continue
		}
		c := s.start(floor)
		c.put(seed, 1)
		for c.size < s.n && c.add() {
		}
		if c.size < s.n {
			continue
		}
		for chains := 0; chains < maxChains && c.improve(); chains++ {
		}
		set := c.set()
		if best == nil || c.score > bestScore || c.score == bestScore && slices.Compare(set, best) < 0 {
			best, bestScore = set, c.score
		}
	}
	return best
}

// climber is a set that changes by one GPU at a time.
type climber struct {
	*search
	floor int
	in    []bool
	size  int
	score int
	// gain is what each GPU adds, or as a member has added, to the score.
	gain []int
	// below counts for each GPU its links to the set that miss the floor; those
	// to the GPUs chosen before count as one.
	below []int
}

func (s *search) start(floor int) *climber {
	c := &climber{
		search: s, floor: floor,
		in: make([]bool, len(s.gain)), gain: slices.Clone(s.gain), below: make([]int, len(s.gain)),
	}
	for i, w := range s.weakest {
		if w < floor {
			c.below[i] = 1
		}
	}
	return c
}

func (c *climber) link(i, j int) int { return c.links[i*len(c.in)+j] }

// misses is 1 where the link of i and j is below the floor, else 0.
func (c *climber) misses(i, j int) int {
	if c.link(i, j) < c.floor {
		return 1
	}
	return 0
}

// put adds i to the set (sign 1) or takes it out (sign -1).
func (c *climber) put(i, sign int) {
	c.in[i] = sign > 0
	c.size += sign
	c.score += sign * c.gain[i]
	for j := range c.gain {
		if j != i {
			c.gain[j] += sign * pairPoints * c.link(i, j)
			c.below[j] += sign * c.misses(i, j)
		}
	}
}

// add puts the GPU that gains most into the set and says whether there was one.
func (c *climber) add() bool {
	best := -1
	for i := range c.gain {
		if !c.in[i] && c.below[i] == 0 && (best < 0 || c.gain[i] > c.gain[best]) {
			best = i
		}
	}
	if best >= 0 {
		c.put(best, 1)
	}
	return best >= 0
}

// improve exchanges members for others, each GPU at most once, and says whether
// that gained anything. It goes on through exchanges that lose, since to put a
// whole pair in the place of two single GPUs takes one that loses and one that
// gains, and at last returns to where the score was best (the method of
// Kernighan and Lin for graph partitioning).
func (c *climber) improve() bool {
	moved := make([]bool, len(c.in))
	var chain [][2]int
	best, keep := c.score, 0
	for len(chain) < c.n {
		out, in, ok := c.exchange(moved)
		if !ok {
			break
		}
		c.put(out, -1)
		c.put(in, 1)
		moved[out], moved[in] = true, true
		chain = append(chain, [2]int{out, in})
		if c.score > best {
			best, keep = c.score, len(chain)
		}
	}
	for _, pair := range slices.Backward(chain[keep:]) {
		c.put(pair[1], -1)
		c.put(pair[0], 1)
	}
	return keep > 0
}

// exchange finds the exchange of GPUs not yet moved that gains most or loses
// least; ok is false where none keeps to the floor.
func (c *climber) exchange(moved []bool) (out, in int, ok bool) {
	most := 0
	for i := range c.gain {
		if !c.in[i] || moved[i] {
			continue
		}
		for j := range c.gain {
			if c.in[j] || moved[j] || c.below[j] != c.misses(i, j) {
				continue
			}
			if gain := c.gain[j] - pairPoints*c.link(i, j) - c.gain[i]; !ok || gain > most {
				out, in, most, ok = i, j, gain, true
			}
		}
	}
	return out, in, ok
}

func (c *climber) set() []int {
	set := make([]int, 0, c.size)
	for i, in := range c.in {
		if in {
			set = append(set, i)
		}
	}
	return set
}
