package placement

import (
	"cmp"
	"math"
	"slices"
	"strings"
)

// The policies of the FGD paper (Weng et al., "Beware of Fragmentation:
// Scheduling GPU-Sharing Workloads with Fragmentation Gradient Descent", USENIX
// ATC '23), with the constants and roundings of the experiments that were
// published with it.

// scaleCPU and scaleGPU are the largest node of these experiments: 128 cores and
// 8 GPUs, in thousandths.
const (
	scaleCPU = 128000
	scaleGPU = 8 * Whole
)

// published scores by a formula of the node and the request.
type published struct{ kind kind }

func (n *node) freeMilli() int {
	sum := 0
	for g := range n.gpus {
		sum += int(n.gpus[g].free)
	}
	return sum
}

func (j published) score(n *node, cl *class, p *Plan) float64 {
	milli := 0
	for range p.Devices {
		milli += cl.milli(n.spec)
	}
	free := n.freeMilli()
	var s float64
	switch j.kind {
	case bestFit:
		s = 100 * (1 - (float64(n.cpu-cl.MilliCPU)/scaleCPU+float64(free-milli)/scaleGPU)/2)
	case dotProduct:
		cpu := float64(n.cpu) / scaleCPU * (float64(cl.MilliCPU) / scaleCPU)
		s = 100 * (1 - (cpu+float64(free)/scaleGPU*(float64(milli)/scaleGPU))/2)
	case leastAllocated:
		s = 50*left(n.cpu-cl.MilliCPU, n.spec.MilliCPU) + 50*left(n.memory-cl.MemoryMiB, n.spec.MemoryMiB)
	case gpuPacking:
		s = packing(n, cl, p)
	case gpuClustering:
		s = clustering(n, cl, free)
	default:
		return 0 // first-fit and random: any node is as good as another
	}
	return math.Trunc(s)
}

// left is the part of a resource that is left, 0 where the node has none.
func left(free, total int) float64 {
	if total == 0 {
		return 0
	}
	return float64(free) / float64(total)
}

// packing prefers GPUs in use, then nodes in use, then the smaller node.
func packing(n *node, cl *class, p *Plan) float64 {
	if cl.Count == 0 {
		return 0
	}
	unused, taken, left := 0, 0, 0
	for g := range n.gpus {
		if n.gpus[g].use == idle {
			unused++
		}
	}
	for _, g := range p.GPU[:p.Devices] {
		if n.gpus[g].use == idle {
			taken++
		}
		left += int(n.gpus[g].free) * 100 / Whole
	}
	switch {
	case unused == len(n.gpus):
		return float64(max(33-unused, unused))
	case taken > 0:
		return float64(max(50-taken, 33))
	}
	return float64(max(100-left/10, 50))
}

// clustering prefers nodes that run requests of the same size only.
func clustering(n *node, cl *class, free int) float64 {
	if cl.Count == 0 {
		return 0
	}
	own := 0
	if cl.Whole() {
		own = cl.Count
	}
	others := false
	for size, count := range n.sizes {
		others = others || size != own && count > 0
	}
	s := 25 * float64(scaleGPU-free) / scaleGPU
	switch {
	case n.sizes[own] > 0 && !others:
		return s + 75
	case n.sizes[own] > 0:
		return s + 50
	case !others:
		return s + 25
	}
	return s
}

// typicalShare is the share of the sample that the typical requests cover.
const typicalShare = 0.95

// typical is one of the requests that make up most of a mix.
type typical struct {
	*class
	p float64
}

// newTypical returns the commonest requests of a sample, until they make up
// typicalShare of it, each with its share among them.
func newTypical(c *Cluster, sample []Request) ([]typical, error) {
	var list []typical
	seen := make(map[int32]int)
	for _, r := range sample {
		id, err := c.Class(r)
		if err != nil {
			return nil, err
		}
		mix := c.classes[id].mix
		at, ok := seen[mix]
		if !ok {
			at = len(list)
			seen[mix] = at
			list = append(list, typical{class: &class{}})
			*list[at].class = c.classes[id]
		}
		list[at].p++
	}
	slices.SortFunc(list, func(a, b typical) int {
		return cmp.Or(cmp.Compare(b.p, a.p), b.MilliCPU-a.MilliCPU, b.Milli-a.Milli, b.Count-a.Count,
			strings.Compare(strings.Join(b.Products, "|"), strings.Join(a.Products, "|")))
	})
	sum, n := 0.0, 0
	for n < len(list) && sum < typicalShare*float64(len(sample)) {
		sum += list[n].p
		n++
	}
	list = list[:n]
	// Shares of the sample first, as in the published simulator: the last bits of a
	// share decide whether a descent of nothing counts as one.
	total := float64(len(sample))
	for i := range list {
		list[i].p = list[i].p / total / (sum / total)
	}
	return list, nil
}

// fragmentation is the expected thousandths of a node's free GPU that a request
// of the mix cannot use: all of it where the request has no GPU or does not fit,
// else the GPUs with less left than it needs (F in the paper).
func fragmentation(mix []typical, n *node) float64 {
	free := 0
	var left, usable [MaxGPUs]int // by all, and by shares and whole GPUs
	for g := range n.gpus {
		s := &n.gpus[g]
		left[g] = int(s.free)
		free += left[g]
		if s.use == idle || s.use == shares {
			usable[g] = left[g]
		}
	}
	if free == 0 {
		return 0
	}
	// The published simulator sums by cause, and then the causes: another order of
	// additions can move a score over the edge of an integer.
	var sums [causes]float64
	for i := range mix {
		t := &mix[i]
		short := n.cpu < t.MilliCPU
		switch {
		case t.Count == 0 && short:
			sums[noGPUAskedNoCPU] += t.p * float64(free)
			continue
		case t.Count == 0:
			sums[noGPUAsked] += t.p * float64(free)
			continue
		case !t.allowed(n):
			sums[notAllowed] += t.p * float64(free)
			continue
		}
		have, small := 0, 0
		plain := t.Milli > 0 && (t.GPUMemoryMiB == 0 || n.spec.GPUMemoryMiB == 0)
		for g := range n.gpus {
			if plain && usable[g] >= t.Milli || !plain && n.spec.has(&n.gpus[g], t.class) {
				have++
			} else {
				small += left[g]
			}
		}
		switch {
		case have < t.Count && short:
			sums[noGPUNoCPU] += t.p * float64(free)
		case have < t.Count:
			sums[noGPU] += t.p * float64(free)
		case short:
			sums[noCPU] += t.p * float64(free)
		default:
			sums[noGPU] += t.p * float64(small)
		}
	}
	sum := 0.0
	for _, s := range sums {
		sum += s
	}
	return sum
}

// Why a request of the mix cannot use free thousandths of a GPU, in the order of
// the published simulator.
const (
	noGPUNoCPU = iota
	noGPU
	noCPU
	noGPUAsked
	noGPUAskedNoCPU
	notAllowed
	causes
)

// gradient is the fgd policy: the descent of fragmentation, squeezed into the
// integers 0 to 100 by a sigmoid.
type gradient struct {
	typical []typical
	p       *Placer
	// before is the fragmentation of the node in this state.
	node    *node
	version uint64
	before  float64
}

func (j *gradient) score(n *node, cl *class, p *Plan) float64 {
	if version := j.p.c.version[p.Node]; j.node != n || j.version != version {
		j.node, j.version, j.before = n, version, fragmentation(j.typical, n)
	}
	descent := j.before - fragmentation(j.typical, j.p.after(n, cl, p))
	return math.Trunc(100 / (1 + math.Exp(-descent/Whole)))
}
