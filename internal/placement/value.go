package placement

import (
	"cmp"
	"math"
	"math/rand/v2"
	"slices"
)

// value is the ashlar policy. It takes the place with the least loss
//
//	Φ(node before) - Φ(node after) - milli
//
// where Φ(node) = V(node) + Σ price(t) · places(node, t), by the mix of requests
// that it has learned:
//
//   - V is how many thousandths of GPU the node still takes in when requests are
//     drawn from the mix and each that fits is put where it leaves least over. It
//     is the mean over fixed sequences of draws. What V loses beyond what the
//     request takes is waste to come: a hole that no common request fills, or GPU
//     left without CPU.
//   - t runs over the rigid requests: those for several GPUs, for MIG devices
//     and for certain models. places is how many of t the node could still take if
//     nothing else came. S(t) is the sum of the places of all nodes, and D(t) how
//     many of t are expected until the cluster is full. With the load ratio
//     x = D / (S + floor), price(t) = m(t) · x^steep, where m is the thousandths
//     of GPU of t: next to nothing while there is room to spare, and more than
//     the request itself when places run out. It keeps empty nodes for the
//     requests that need one and scarce models for those that have no choice, but
//     only once they are scarce.
//
// D(t) is share · (horizon + ahead · free/mean), with the free thousandths of the
// cluster over the mean of a request. The share of a request for several GPUs is
// taken two standard deviations above what was seen, (n + 2·sqrt n)/total: such
// requests are rare, and when the sample missed them their places are gone for
// good.
//
// Losses are rounded to a grain, and the first of equal nodes is taken, so that
// nodes are filled one after the other where it makes no difference.
//
// Nothing is known beforehand: the mix is what Learn was told. V is the idea of an
// expected-fill value, the prices are that of shadow prices without the linear
// program.
type value struct {
	valueParams
	c *Cluster

	// arrivals by class.mix, and their sum.
	seen  []float64
	first []*class // the class that stands for a mix
	total float64
	next  float64 // total at which the mix is learned again
	since int     // arrivals since the prices were set

	mix    []mixed
	groups []group
	draws  [][]uint8
	price  []float64

	shapes []shape
	ids    map[shapeKey]int32
	at     []located // by node
	mixes  uint32    // counts the times that the mix was learned
	prices uint32    // counts the times that the prices were set
}

// mixed is a request of the learned mix with its share.
type mixed struct {
	*class
	p    float64
	size float64 // thousandths of GPU in all; of slots and MIG devices on the first nodes that have them
}

// rigid says whether a request cannot make do with whatever GPU is left.
func (cl *class) rigid() bool {
	return cl.Count > 1 || cl.Profile != "" || cl.Count > 0 && !cl.any
}

// offer is a request of the mix as a group of nodes sees it.
type offer struct {
	cpu    int // more than any node has where barred
	milli  int
	memory int
	count  int
	barred bool // it cannot run on the group's GPUs
}

// group is what the mix is to a group of nodes.
type group struct {
	offers []offer // in the order of the mix
	// least is the least CPU of those that take GPU: with less, nothing is left
	// to fill.
	least int
	// smallest is the least share of a GPU that any of them takes.
	smallest int
	// odd says that some of them are for slots or MIG devices.
	odd bool
}

// shapeKey is what V and places depend on. GPUs are in descending order, so that
// nodes that differ in the order of their GPUs alone have one shape.
type shapeKey struct {
	group, cpu int32
	gpus       [MaxGPUs]packed
}

// packed is a gpuState as far as it matters to a shape: for MIG GPUs the cut, for
// others thousandths free, use, slots taken and memory in grains. 0 is a GPU that
// gives nothing.
type packed uint64

const (
	packedMIG     = 1 << 63
	packedFree    = 40 // position of the fields
	packedUse     = 32
	packedTaken   = 24
	packedTakenTo = 0xff
)

// pack packs a GPU's state, with memory in grains.
func pack(s *gpuState, grain int32) packed {
	switch s.use {
	case whole, closed:
		return 0
	case mig:
		return packedMIG | packed(s.cut)
	case slots:
		return packed(s.free)<<packedFree | packed(s.use)<<packedUse | packed(s.taken)<<packedTaken | packed(s.memory/grain)
	}
	// How many share the GPU matters to nothing.
	return packed(s.free)<<packedFree | packed(s.use)<<packedUse | packed(s.memory/grain)
}

// unpack is the opposite of pack; what was left out is 0.
func (p packed) unpack(spec *NodeSpec, grain int32) gpuState {
	switch {
	case p == 0:
		return gpuState{use: closed}
	case p&packedMIG != 0:
		s := gpuState{use: mig, cut: uint64(p &^ packedMIG)}
		spec.cutFree(&s)
		return s
	}
	return gpuState{
		free: int16(p >> packedFree), use: use(p >> packedUse & packedTakenTo),
		taken:  uint16(p >> packedTaken & packedTakenTo),
		memory: int32(p&(1<<packedTaken-1)) * grain,
	}
}

type shape struct {
	key    shapeKey
	fill   float64
	places []room
	mixes  uint32 // the mix that fill and places are for
	worth  float64
	prices uint32 // the prices that worth is for
}

// room is how many requests of the mix fit.
type room struct {
	mix uint16
	n   uint16
}

type located struct {
	version uint64
	shape   int32
}

const (
	// memoryGrains is into how many steps the memory of a GPU is divided.
	memoryGrains = 8
	// maxShapes bounds the memory for shapes; beyond, all are forgotten.
	maxShapes = 1 << 17
	// maxMix is how many requests of the mix are drawn from, the commonest.
	maxMix = 256
	// maxSeen is the number of arrivals after which all counts are halved, so
	// that the mix follows a workload that changes.
	maxSeen = 1 << 16
	// pricesEvery is the least number of arrivals between two settings of the
	// prices.
	pricesEvery = 200
)

func newValue(c *Cluster, params valueParams) *value {
	return &value{valueParams: params, c: c, ids: make(map[shapeKey]int32), at: make([]located, len(c.nodes)), next: 1}
}

func (v *value) learn(cl *class) bool {
	for len(v.seen) <= int(cl.mix) {
		v.seen = append(v.seen, 0)
		v.first = append(v.first, nil)
	}
	if v.first[cl.mix] == nil {
		own := *cl
		v.first[cl.mix] = &own
	}
	v.seen[cl.mix]++
	v.total++
	v.since++
	full := len(v.shapes) > maxShapes
	if full {
		v.forget()
	}
	switch {
	case v.total >= v.next:
		v.next = math.Ceil(v.total * v.growth)
		if v.total >= maxSeen {
			v.halve()
		}
		v.setMix()
	case v.since < max(pricesEvery, len(v.c.nodes)/8):
		return full
	}
	v.since = 0
	v.setPrices()
	return true
}

func (v *value) halve() {
	v.total = 0
	for i := range v.seen {
		v.seen[i] /= 2
		v.total += v.seen[i]
	}
	v.next = math.Ceil(v.total * v.growth)
}

// setMix takes what was seen as the mix, and draws the sequences anew.
func (v *value) setMix() {
	v.mix = v.mix[:0]
	for i, n := range v.seen {
		if n > 0 {
			v.mix = append(v.mix, mixed{v.first[i], n / v.total, float64(v.c.milli(v.first[i]))})
		}
	}
	slices.SortStableFunc(v.mix, func(a, b mixed) int { return cmp.Compare(b.p, a.p) })
	v.mix = v.mix[:min(len(v.mix), maxMix)]

	v.groups = make([]group, len(v.c.groups))
	for g := range v.c.groups {
		spec := &v.c.groups[g]
		to := &v.groups[g]
		to.least, to.smallest = math.MaxInt, math.MaxInt
		n := node{spec: spec, product: slices.Index(v.c.products, spec.Product)}
		for _, t := range v.mix {
			o := offer{cpu: t.MilliCPU, count: t.Count, milli: t.milli(spec), memory: spec.shareMemory(t.class)}
			switch o.barred = t.Count > 0 && (!t.allowed(&n) || o.milli == 0); {
			case o.barred:
				o.cpu = math.MaxInt
			case o.count > 0:
				to.least, to.smallest = min(to.least, o.cpu), min(to.smallest, o.milli)
				to.odd = to.odd || t.Slot || t.Profile != ""
			}
			to.offers = append(to.offers, o)
		}
	}

	reach := make([]float64, len(v.mix))
	sum := 0.0
	for i, t := range v.mix {
		sum += t.p
		reach[i] = sum
	}
	v.draw(reach)
	v.mixes++
}

// draw sets the sequences of draws. At each position they cover the mix evenly
// (a Latin hypercube), which makes few sequences as good as many. reach has the
// sums of the shares so far.
func (v *value) draw(reach []float64) {
	rng := rand.New(rand.NewPCG(1, 1)) //nolint:gosec // the same sequences each time
	v.draws = make([][]uint8, v.sequences)
	for k := range v.draws {
		v.draws[k] = make([]uint8, v.valueParams.draws)
	}
	for d := range v.valueParams.draws {
		for k, stratum := range rng.Perm(v.sequences) {
			u := (float64(stratum) + rng.Float64()) / float64(v.sequences)
			i, _ := slices.BinarySearch(reach, u*reach[len(reach)-1])
			v.draws[k][d] = uint8(min(i, len(reach)-1))
		}
	}
}

// forget drops all shapes.
func (v *value) forget() {
	v.shapes = v.shapes[:0]
	clear(v.ids)
	clear(v.at)
}

func (v *value) setPrices() {
	places := make([]float64, len(v.mix))
	for i := range v.c.nodes {
		for _, r := range v.known(v.locate(i)).places {
			places[r.mix] += float64(r.n)
		}
	}
	free, mean := 0, 0.0
	for i := range v.c.nodes {
		free += v.c.nodes[i].freeMilli()
	}
	for i := range v.mix {
		mean += v.mix[i].p * v.mix[i].size
	}
	ahead := v.horizon
	if mean > 0 {
		ahead += v.ahead * float64(free) / mean
	}
	v.price = make([]float64, len(v.mix))
	for i, t := range v.mix {
		if !t.rigid() {
			continue
		}
		n := v.seen[t.mix]
		if t.Count > 1 {
			n += v.caution * math.Sqrt(n)
		}
		v.price[i] = t.size * math.Pow(ahead*n/v.total/(places[i]+v.floor), v.steep)
	}
	v.prices++
}

// locate returns the shape of a node.
func (v *value) locate(i int) int32 {
	at := &v.at[i]
	if version := v.c.version[i]; at.version != version {
		at.version, at.shape = version, v.shapeOf(&v.c.nodes[i])
	}
	return at.shape
}

func (v *value) shapeOf(n *node) int32 {
	key := shapeKey{group: int32(n.group), cpu: int32(n.cpu / v.cpuGrain)}
	grain := v.memoryGrain(key.group)
	for g := range n.gpus {
		p := pack(&n.gpus[g], grain)
		at := g
		for ; at > 0 && key.gpus[at-1] < p; at-- {
			key.gpus[at] = key.gpus[at-1]
		}
		key.gpus[at] = p
	}
	if id, ok := v.ids[key]; ok {
		return id
	}
	id := int32(len(v.shapes))
	v.ids[key] = id
	v.shapes = append(v.shapes, shape{key: key})
	return id
}

// known returns a shape with fill and places for the present mix.
func (v *value) known(id int32) *shape {
	s := &v.shapes[id]
	if s.mixes != v.mixes {
		s.mixes = v.mixes
		v.look(s)
		s.prices = 0
	}
	return s
}

// worth is Φ of a shape.
func (v *value) worth(id int32) float64 {
	s := v.known(id)
	if s.prices != v.prices {
		s.prices = v.prices
		s.worth = s.fill
		for _, r := range s.places {
			s.worth += v.price[r.mix] * float64(r.n)
		}
	}
	return s.worth
}
