package placement

// Meter keeps the idle and the fragmented GPU of a cluster up to date, node by
// node.
type Meter struct {
	c       *Cluster
	typical []typical
	free    []int
	frag    []float64
	total   int
	lost    float64
}

// NewMeter returns a meter. Fragmentation is measured by the commonest requests
// of the sample, as in the FGD paper; with an empty sample it is 0.
func NewMeter(c *Cluster, sample []Request) (*Meter, error) {
	m := &Meter{c: c, free: make([]int, len(c.nodes)), frag: make([]float64, len(c.nodes))}
	var err error
	if m.typical, err = newTypical(c, sample); err != nil {
		return nil, err
	}
	for i := range c.nodes {
		m.Update(i)
	}
	return m, nil
}

// Update takes note that a node has changed.
func (m *Meter) Update(node int) {
	n := &m.c.nodes[node]
	free, frag := n.freeMilli(), fragmentation(m.typical, n)
	m.total += free - m.free[node]
	m.lost += frag - m.frag[node]
	m.free[node], m.frag[node] = free, frag
}

// Free is what is idle, in thousandths of a GPU.
func (m *Meter) Free() int { return m.total }

// Fragmented is the share of what is idle that a request of the sample cannot
// use on average, in per cent; 0 where nothing is idle.
func (m *Meter) Fragmented() float64 {
	if m.total == 0 {
		return 0
	}
	return 100 * min(1, m.lost/float64(m.total)) // sums of floats may end a hair above
}

// Milli is the thousandths of GPU that a request takes in all. For slots and MIG
// devices it is that on the first nodes that have them.
func (c *Cluster) Milli(id ClassID) int { return c.milli(&c.classes[id]) }

func (c *Cluster) milli(cl *class) int {
	for g := range c.groups {
		if milli := cl.milli(&c.groups[g]); milli > 0 {
			return cl.Count * milli
		}
	}
	return 0
}
