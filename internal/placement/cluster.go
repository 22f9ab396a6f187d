package placement

import (
	"fmt"
	"math"
	"slices"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// use says what a GPU is given out as. It is one thing at a time: a GPU that is
// shared one way serves no request of another way until it is idle again.
type use uint8

const (
	idle use = iota
	whole
	shares
	slots
	mig
	closed // not healthy
)

// gpuState is what of a GPU is taken. It is comparable: GPUs in the same state
// are interchangeable but for their links.
type gpuState struct {
	free   int16 // thousandths that are not given out
	use    use
	taken  uint16 // shares, slots or MIG devices given out
	memory int32  // MiB that are not given out; 0 throughout where not known
	cut    uint64 // MIG devices: the profile's position in the table plus 1, four bits for each start unit
}

// maxUnits is the number of memory units that gpuState.cut has room for.
const maxUnits = 15

// node is a NodeSpec with what runs on it.
type node struct {
	spec    *NodeSpec
	product int // position in Cluster.products
	group   int // nodes of one group have the same kind of GPUs
	kind    int // nodes of one kind differ in name and machine alone
	cpu     int
	memory  int
	pods    int
	gpus    []gpuState
	down    bool
	// sizes counts the pods by their number of whole GPUs, those with shares at
	// 0; pods without GPU are not counted.
	sizes [MaxGPUs + 1]int32
}

// ClassID is a request that a cluster knows. Requests with equal fields have
// the same one.
type ClassID int32

type class struct {
	Request
	products uint64 // bits of Cluster.products
	any      bool   // any product will do
	ever     []int8 // by node.kind: whether an empty node fits, 1 or -1; 0 where not known
	mix      int32  // classes that differ in host memory alone have the same
}

// Cluster is nodes and what runs on them. It is not safe for concurrent use.
type Cluster struct {
	nodes    []node
	names    map[string]int
	products []string
	groups   []NodeSpec // what the nodes of a group have in common
	// version of each node: it changes whenever the node does, and none is ever
	// used twice.
	version  []uint64
	classes  []class
	ids      map[classKey]ClassID
	mixes    map[classKey]int32
	versions uint64
	kinds    int
	forks    int
	journal  []change
}

type classKey struct {
	cpu, memory, count, milli, gpuMemory int
	slot                                 bool
	profile, products                    string
	links                                LinkClass
}

// change is an entry of the journal that undoes a fork.
type change struct {
	plan   Plan
	remove bool
}

// maxProducts is the number of GPU models of one cluster.
const maxProducts = 64

// NewCluster returns a cluster on which nothing runs. The order of the nodes
// breaks ties. It keeps the specs, which must not change afterwards.
func NewCluster(specs []NodeSpec) (*Cluster, error) {
	c := &Cluster{
		nodes: make([]node, len(specs)), version: make([]uint64, len(specs)), names: make(map[string]int, len(specs)),
		ids: make(map[classKey]ClassID), mixes: make(map[classKey]int32),
	}
	total := 0
	for i := range specs {
		if err := specs[i].Validate(); err != nil {
			return nil, err
		}
		total += specs[i].GPUs
	}
	flat := make([]gpuState, total)
	groups, kinds := make(map[string]int), make(map[string]int)
	for i := range specs {
		spec := &specs[i]
		if _, again := c.names[spec.Name]; again {
			return nil, fmt.Errorf("%w: Name %q is given to two nodes: names are unique", ErrInvalid, spec.Name)
		}
		c.names[spec.Name] = i
		product := slices.Index(c.products, spec.Product)
		if product < 0 {
			if product = len(c.products); product == maxProducts {
				return nil, fmt.Errorf("%w: Product %q of node %q: a cluster has no more than %d models", ErrInvalid, spec.Product, spec.Name, maxProducts)
			}
			c.products = append(c.products, spec.Product)
		}
		key := fmt.Sprint(product, spec.GPUMemoryMiB, spec.Slots, spec.MIG)
		group, ok := groups[key]
		if !ok {
			group = len(c.groups)
			groups[key] = group
			c.groups = append(c.groups, NodeSpec{GPUs: MaxGPUs, Product: spec.Product, GPUMemoryMiB: spec.GPUMemoryMiB, Slots: spec.Slots, MIG: spec.MIG})
		}
		key = fmt.Sprint(group, spec.GPUs, spec.MilliCPU, spec.MemoryMiB, spec.Pods, spec.Links)
		kind, ok := kinds[key]
		if !ok {
			kind = c.kinds
			kinds[key] = kind
			c.kinds++
		}
		n := &c.nodes[i]
		*n = node{kind: kind, spec: spec, product: product, group: group, cpu: spec.MilliCPU, memory: spec.MemoryMiB, gpus: flat[:spec.GPUs:spec.GPUs]}
		flat = flat[spec.GPUs:]
		for g := range n.gpus {
			n.gpus[g] = gpuState{free: Whole, memory: int32(spec.GPUMemoryMiB)}
			if spec.Machine != nil && !spec.Machine.GPUs[g].Health.OK() {
				n.gpus[g] = gpuState{use: closed}
			}
		}
		c.touch(i)
	}
	return c, nil
}

// Validate names the first field that cannot be.
func (s *NodeSpec) Validate() error {
	bad := func(field string, value any, remedy string) error {
		return fmt.Errorf("%w: %s of node %q is %v: %s", ErrInvalid, field, s.Name, value, remedy)
	}
	switch {
	case s.Name == "":
		return bad("Name", `""`, "give each node a name")
	case s.MilliCPU < 0:
		return bad("MilliCPU", s.MilliCPU, "give 0 or more")
	case s.MemoryMiB < 0:
		return bad("MemoryMiB", s.MemoryMiB, "give 0 or more")
	case s.Pods < 0:
		return bad("Pods", s.Pods, "give 0 for no limit, or more")
	case s.GPUs < 0 || s.GPUs > MaxGPUs:
		return bad("GPUs", s.GPUs, fmt.Sprintf("give 0 to %d", MaxGPUs))
	case s.GPUMemoryMiB < 0 || s.GPUMemoryMiB > math.MaxInt32:
		return bad("GPUMemoryMiB", s.GPUMemoryMiB, "give 0 where it is not known, or MiB")
	case s.Slots < 0 || s.Slots > math.MaxUint8:
		return bad("Slots", s.Slots, "give 0 to 255")
	case s.Links < AnyLink || s.Links > NVLinked:
		return bad("Links", s.Links, "use AnyLink, SameNUMA or NVLinked")
	case s.MIG != nil && (s.MIG.Units > maxUnits || len(s.MIG.Profiles) > 15):
		return bad("MIG", fmt.Sprintf("%d units, %d profiles", s.MIG.Units, len(s.MIG.Profiles)), fmt.Sprintf("give at most %d units and 15 profiles", maxUnits))
	case s.Machine != nil && len(s.Machine.GPUs) != s.GPUs:
		return bad("GPUs", s.GPUs, fmt.Sprintf("the machine has %d", len(s.Machine.GPUs)))
	}
	return nil
}

// Len is the number of nodes.
func (c *Cluster) Len() int { return len(c.nodes) }

// Spec returns the spec of a node.
func (c *Cluster) Spec(node int) *NodeSpec { return c.nodes[node].spec }

// Node returns the position of the node with a name, and whether there is one.
func (c *Cluster) Node(name string) (int, bool) {
	i, ok := c.names[name]
	return i, ok
}

// SetDown says whether a node is down: nothing is placed there until it is up
// again. What runs there stays until it is removed. Forks do not undo it.
func (c *Cluster) SetDown(node int, down bool) {
	c.nodes[node].down = down
	c.touch(node)
}

// Class returns the id of a request. It fails where the request does not
// validate.
func (c *Cluster) Class(r Request) (ClassID, error) {
	if err := r.Validate(); err != nil {
		return 0, err
	}
	key := classKey{
		r.MilliCPU, r.MemoryMiB, r.Count, r.Milli, r.GPUMemoryMiB, r.Slot, r.Profile,
		strings.Join(r.Products, "\x00"), r.Links,
	}
	if id, ok := c.ids[key]; ok {
		return id, nil
	}
	cl := class{Request: r, any: len(r.Products) == 0}
	for _, p := range r.Products {
		if i := slices.Index(c.products, p); i >= 0 {
			cl.products |= 1 << i
		}
	}
	id := ClassID(len(c.classes))
	c.ids[key] = id
	key.memory = 0
	mix, ok := c.mixes[key]
	if !ok {
		mix = int32(len(c.mixes))
		c.mixes[key] = mix
	}
	cl.mix = mix
	c.classes = append(c.classes, cl)
	return id, nil
}

// Request returns the request of a class.
func (c *Cluster) Request(id ClassID) Request { return c.classes[id].Request }

// allowed says whether the class may run on the GPUs of the node.
func (cl *class) allowed(n *node) bool { return cl.any || cl.products&(1<<n.product) != 0 }

// Plan says which devices of which node a request gets.
type Plan struct {
	Class ClassID
	// Node is the position of the node.
	Node int
	// Devices is the number of devices, the entries of GPU and Start that count.
	Devices int
	// GPU has the index of the GPU of each device.
	GPU [MaxGPUs]uint8
	// Start has the first memory unit of each MIG device.
	Start [MaxGPUs]uint8
}

// touch gives a node that changed a new version.
func (c *Cluster) touch(node int) {
	c.versions++
	c.version[node] = c.versions
}

// Apply gives the devices of a plan to its request. It fails with
// ErrUnavailable and changes nothing where they are not free.
func (c *Cluster) Apply(p *Plan) error {
	n, cl, err := c.check(p)
	if err != nil {
		return err
	}
	undo, cpu, memory, pods, sizes := [MaxGPUs]gpuState{}, n.cpu, n.memory, n.pods, n.sizes
	copy(undo[:], n.gpus)
	if why := n.host(cl); why != Fits || !n.take(cl, p) {
		copy(n.gpus, undo[:])
		n.cpu, n.memory, n.pods, n.sizes = cpu, memory, pods, sizes
		return fmt.Errorf("%w: node %q cannot give what the plan says: plan again", ErrUnavailable, n.spec.Name)
	}
	c.touch(p.Node)
	if c.forks > 0 {
		c.journal = append(c.journal, change{*p, false})
	}
	return nil
}

// Remove takes back what Apply gave. The plan must be one that was applied and
// not yet removed; where its devices are not given out as it says, Remove fails
// with ErrInvalid and changes nothing.
func (c *Cluster) Remove(p *Plan) error {
	n, cl, err := c.check(p)
	if err != nil {
		return err
	}
	undo := [MaxGPUs]gpuState{}
	copy(undo[:], n.gpus)
	if n.pods == 0 || n.cpu+cl.MilliCPU > n.spec.MilliCPU || n.memory+cl.MemoryMiB > n.spec.MemoryMiB || !n.release(cl, p) {
		copy(n.gpus, undo[:])
		return fmt.Errorf("%w: node %q did not give what the plan says: remove a plan once", ErrInvalid, n.spec.Name)
	}
	c.touch(p.Node)
	if c.forks > 0 {
		c.journal = append(c.journal, change{*p, true})
	}
	return nil
}

func (c *Cluster) check(p *Plan) (*node, *class, error) {
	switch {
	case p.Class < 0 || int(p.Class) >= len(c.classes):
		return nil, nil, fmt.Errorf("%w: Class is %d: use an id that Class returned", ErrInvalid, p.Class)
	case p.Node < 0 || p.Node >= len(c.nodes):
		return nil, nil, fmt.Errorf("%w: Node is %d: the cluster has %d nodes", ErrInvalid, p.Node, len(c.nodes))
	}
	n, cl := &c.nodes[p.Node], &c.classes[p.Class]
	if p.Devices != cl.Count {
		return nil, nil, fmt.Errorf("%w: Devices is %d: the request is for %d", ErrInvalid, p.Devices, cl.Count)
	}
	for i, g := range p.GPU[:p.Devices] {
		if int(g) >= len(n.gpus) {
			return nil, nil, fmt.Errorf("%w: GPU[%d] is %d: node %q has %d GPUs", ErrInvalid, i, g, n.spec.Name, len(n.gpus))
		}
		if cl.Profile == "" && slices.Contains(p.GPU[:i], g) {
			return nil, nil, fmt.Errorf("%w: GPU[%d] is %d, as one before: each device is on a GPU of its own", ErrInvalid, i, g)
		}
	}
	return n, cl, nil
}

// Fork runs f on the cluster. Where f returns true its changes stay; otherwise
// they are undone. Forks nest.
func (c *Cluster) Fork(f func() (commit bool)) {
	mark := len(c.journal)
	c.forks++
	commit := false
	defer func() {
		c.forks--
		if !commit {
			for i := len(c.journal) - 1; i >= mark; i-- {
				entry := &c.journal[i]
				n, cl := &c.nodes[entry.plan.Node], &c.classes[entry.plan.Class]
				if entry.remove {
					n.take(cl, &entry.plan)
				} else {
					n.release(cl, &entry.plan)
				}
				c.touch(entry.plan.Node)
			}
			c.journal = c.journal[:mark]
		}
		if c.forks == 0 {
			c.journal = c.journal[:0]
		}
	}()
	commit = f()
}

// take gives the devices of a plan out. Where it returns false the node may
// have changed.
func (n *node) take(cl *class, p *Plan) bool {
	for i := range p.Devices {
		if !n.spec.give(&n.gpus[p.GPU[i]], cl, int(p.Start[i])) {
			return false
		}
	}
	n.cpu -= cl.MilliCPU
	n.memory -= cl.MemoryMiB
	n.pods++
	n.count(cl, 1)
	return true
}

func (n *node) count(cl *class, by int32) {
	switch {
	case cl.Whole():
		n.sizes[cl.Count] += by
	case cl.Count > 0:
		n.sizes[0] += by
	}
}

func (n *node) release(cl *class, p *Plan) bool {
	for i := range p.Devices {
		if !n.spec.giveBack(&n.gpus[p.GPU[i]], cl, int(p.Start[i])) {
			return false
		}
	}
	n.cpu += cl.MilliCPU
	n.memory += cl.MemoryMiB
	n.pods--
	n.count(cl, -1)
	return true
}

// slotsGiven returns the thousandths and MiB of k slots.
func (s *NodeSpec) slotsGiven(k int) (milli, memory int) {
	return k * Whole / s.Slots, k * s.GPUMemoryMiB / s.Slots
}

// give takes one device of a class from a GPU, for MIG the one that begins at
// start. It returns false where the GPU does not have it.
func (s *NodeSpec) give(g *gpuState, cl *class, start int) bool {
	switch {
	case cl.Slot:
		if g.use != idle && g.use != slots || int(g.taken) >= s.Slots || s.Slots < 2 {
			return false
		}
		g.use = slots
		g.taken++
		milli, memory := s.slotsGiven(int(g.taken))
		g.free, g.memory = int16(Whole-milli), int32(s.GPUMemoryMiB-memory)
	case cl.Profile != "":
		i := s.profile(cl.Profile)
		if i < 0 || g.use != idle && g.use != mig || !s.cuttable(g.cut, i, start) {
			return false
		}
		g.use = mig
		g.taken++
		g.cut |= uint64(i+1) << (4 * start)
		s.cutFree(g)
	case cl.Milli == Whole:
		if g.use != idle || s.GPUMemoryMiB > 0 && cl.GPUMemoryMiB > s.GPUMemoryMiB {
			return false
		}
		*g = gpuState{use: whole, taken: 1}
	default:
		memory := s.shareMemory(cl)
		if g.use != idle && g.use != shares || int(g.free) < cl.Milli || int(g.memory) < memory {
			return false
		}
		g.use = shares
		g.taken++
		g.free -= int16(cl.Milli)
		g.memory -= int32(memory)
	}
	return true
}

// shareMemory is what a share takes of a GPU's memory where that is known.
func (s *NodeSpec) shareMemory(cl *class) int {
	if s.GPUMemoryMiB == 0 {
		return 0
	}
	return cl.GPUMemoryMiB
}

func (s *NodeSpec) giveBack(g *gpuState, cl *class, start int) bool {
	switch {
	case cl.Slot:
		if g.use != slots || g.taken == 0 {
			return false
		}
		g.taken--
		milli, memory := s.slotsGiven(int(g.taken))
		g.free, g.memory = int16(Whole-milli), int32(s.GPUMemoryMiB-memory)
	case cl.Profile != "":
		i := s.profile(cl.Profile)
		if g.use != mig || i < 0 || g.cut>>(4*start)&15 != uint64(i+1) {
			return false
		}
		g.taken--
		g.cut &^= 15 << (4 * start)
		s.cutFree(g)
	case cl.Milli == Whole:
		if g.use != whole {
			return false
		}
		*g = gpuState{free: Whole, memory: int32(s.GPUMemoryMiB)}
	default:
		memory := s.shareMemory(cl)
		if g.use != shares || g.taken == 0 || int(g.free)+cl.Milli > Whole || int(g.memory)+memory > s.GPUMemoryMiB {
			return false
		}
		g.taken--
		g.free += int16(cl.Milli)
		g.memory += int32(memory)
	}
	if g.taken == 0 {
		g.use = idle
	}
	return true
}

// profile returns the position of a MIG profile by name, or -1.
func (s *NodeSpec) profile(name string) int {
	if s.MIG == nil {
		return -1
	}
	for i := range s.MIG.Profiles {
		if s.MIG.Profiles[i].Name == name {
			return i
		}
	}
	return -1
}

// instances calls yield for each MIG device of a cut.
func (s *NodeSpec) instances(cut uint64, yield func(p *gpu.MIGProfile, start int)) {
	for start := 0; cut != 0; start, cut = start+1, cut>>4 {
		if i := cut & 15; i != 0 {
			yield(&s.MIG.Profiles[i-1], start)
		}
	}
}

// cuttable says whether profile i can be added at start: the rules of
// gpu.MIGTable.Check without its texts.
func (s *NodeSpec) cuttable(cut uint64, i, start int) bool {
	p := &s.MIG.Profiles[i]
	legal := slices.IndexFunc(p.Placements, func(at gpu.Placement) bool { return at.Start == start })
	if legal < 0 {
		return false
	}
	add := p.Placements[legal]
	used, same, clash := p.Slices, 0, false
	s.instances(cut, func(q *gpu.MIGProfile, at int) {
		used += q.Slices
		if q == p {
			same++
		}
		clash = clash || add.Overlaps(gpu.Placement{Start: at, Size: q.Placements[0].Size})
	})
	return !clash && same < p.Max && used <= s.MIG.Slices
}

// cutFree sets what a MIG GPU has free from its cut: compute slices as
// thousandths, memory units as MiB.
func (s *NodeSpec) cutFree(g *gpuState) {
	sliced, units := 0, 0
	s.instances(g.cut, func(p *gpu.MIGProfile, _ int) {
		sliced += p.Slices
		units += p.Placements[0].Size
	})
	g.free = int16(Whole - sliced*Whole/s.MIG.Slices)
	g.memory = int32(s.GPUMemoryMiB - units*s.GPUMemoryMiB/s.MIG.Units)
}
