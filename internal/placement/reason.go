package placement

import (
	"fmt"
	"strings"
)

// Code says why a request has no place. Its text is stable.
type Code uint8

// The codes, the most final first.
const (
	// Fits: there is a place.
	Fits Code = iota
	// NeverFits: no node of the cluster could run it if nothing else ran.
	NeverFits
	// NodeConstraint: nodes have the wrong product.
	NodeConstraint
	// NodeUnavailable: nodes are down.
	NodeUnavailable
	// SharingMismatch: GPUs are given out in another way than the request needs.
	SharingMismatch
	// DeviceUnhealthy: GPUs that would do are not healthy.
	DeviceUnhealthy
	// TopologyUnsatisfied: enough GPUs are free, but not linked as required.
	TopologyUnsatisfied
	// Fragmented: enough is free in all, not on one node or one GPU.
	Fragmented
	// InsufficientGPU, InsufficientCPU, InsufficientMemory and InsufficientPods:
	// too little is free.
	InsufficientGPU
	InsufficientCPU
	InsufficientMemory
	InsufficientPods
	codes
)

var codeNames = [codes]string{
	"Fits", "NeverFits", "NodeConstraint", "NodeUnavailable", "SharingMismatch", "DeviceUnhealthy", "TopologyUnsatisfied", "Fragmented",
	"InsufficientGPU", "InsufficientCPU", "InsufficientMemory", "InsufficientPods",
}

func (c Code) String() string {
	if c < codes {
		return codeNames[c]
	}
	return fmt.Sprintf("Code(%d)", uint8(c))
}

// Reason says why a request has no place, with the numbers.
type Reason struct {
	Code Code
	// Need and Free are in thousandths of a GPU for codes about GPUs, in
	// thousandths of a core, MiB or pods for the others. Free is the sum over the
	// nodes that could ever run it for Fragmented and InsufficientGPU, and else
	// that of the best of the nodes with this code.
	Need, Free int
	// Nodes counts the nodes by what each lacks, at the position of the code.
	Nodes [codes]int
}

func (r Reason) String() string {
	var parts []string
	for code, n := range r.Nodes {
		if n > 0 {
			parts = append(parts, fmt.Sprintf("%s on %d", Code(code), n))
		}
	}
	return fmt.Sprintf("%s: needs %d, %d free; nodes: %s", r.Code, r.Need, r.Free, strings.Join(parts, ", "))
}

// Fit says whether a node can run a request now: Fits if so, else why not.
func (c *Cluster) Fit(node int, id ClassID) Code {
	n, cl := &c.nodes[node], &c.classes[id]
	if n.fits(cl) {
		return Fits
	}
	if cl.Count > 0 && !cl.allowed(n) {
		return NodeConstraint
	}
	if !c.everFits(n, cl) {
		return NeverFits
	}
	if n.down {
		return NodeUnavailable
	}
	if cl.Count > 0 {
		if n.devices(cl) < cl.Count {
			return n.lacksDevices(cl)
		}
		if why := n.host(cl); why != Fits {
			return why
		}
		return TopologyUnsatisfied
	}
	return n.host(cl)
}

// everFits says whether a node could run a class with nothing on it. Nodes
// without a machine are known by their kind.
func (c *Cluster) everFits(n *node, cl *class) bool {
	if n.spec.Machine != nil {
		empty := n.emptied()
		return empty.fits(cl)
	}
	if cl.ever == nil {
		cl.ever = make([]int8, c.kinds)
	}
	if cl.ever[n.kind] == 0 {
		cl.ever[n.kind] = -1
		if empty := n.emptied(); empty.fits(cl) {
			cl.ever[n.kind] = 1
		}
	}
	return cl.ever[n.kind] > 0
}

// emptied is the node with nothing on it. GPUs that are not healthy count as
// healthy: they may come back.
func (n *node) emptied() node {
	e := node{spec: n.spec, product: n.product, cpu: n.spec.MilliCPU, memory: n.spec.MemoryMiB, gpus: make([]gpuState, len(n.gpus))}
	for g := range e.gpus {
		e.gpus[g] = gpuState{free: Whole, memory: int32(n.spec.GPUMemoryMiB)}
	}
	return e
}

// lacksDevices says why too few GPUs have a device for the class.
func (n *node) lacksDevices(cl *class) Code {
	free, mismatch, sick := 0, 0, 0
	for g := range n.gpus {
		s := &n.gpus[g]
		switch {
		case s.use == closed:
			sick++
		case s.use == whole || n.spec.has(s, cl):
		case s.use != cl.use() && s.free > 0 && cl.Milli != Whole:
			mismatch++
		default:
			free += int(s.free)
		}
	}
	switch have := n.devices(cl); {
	case have+sick >= cl.Count:
		return DeviceUnhealthy
	case have+mismatch >= cl.Count:
		return SharingMismatch
	case have*cl.milli(n.spec)+free >= cl.Count*cl.milli(n.spec):
		return Fragmented
	}
	return InsufficientGPU
}

// use is how the class has its GPUs given out.
func (cl *class) use() use {
	switch {
	case cl.Slot:
		return slots
	case cl.Profile != "":
		return mig
	case cl.Milli == Whole:
		return whole
	}
	return shares
}

// milli is the thousandths of a GPU that a device of the class takes on a node;
// 0 where the node has no such device.
func (cl *class) milli(s *NodeSpec) int {
	switch {
	case cl.Slot:
		if s.Slots < 2 {
			return 0
		}
		return Whole / s.Slots
	case cl.Profile != "":
		i := s.profile(cl.Profile)
		if i < 0 {
			return 0
		}
		return s.MIG.Profiles[i].Slices * Whole / s.MIG.Slices
	}
	return cl.Milli
}

// Explain says why a request has no place in the cluster. Call it where Place
// found none.
func (p *Placer) Explain(id ClassID) Reason {
	entries := p.refresh(id)
	return p.c.explain(id, func(i int) Code {
		e := &entries[i]
		if !e.explained {
			e.explained, e.why = true, p.c.Fit(i, id)
		}
		return e.why
	})
}

func (c *Cluster) explain(id ClassID, fit func(node int) Code) Reason {
	cl := &c.classes[id]
	var r Reason
	var best [codes]struct{ gpu, cpu, memory int } // of the nodes with each code
	free, need := 0, 0
	for i := range c.nodes {
		n := &c.nodes[i]
		code := fit(i)
		r.Nodes[code]++
		here := n.freeMilli()
		b := &best[code]
		b.gpu, b.cpu, b.memory = max(b.gpu, here), max(b.cpu, n.cpu), max(b.memory, n.memory)
		if code != NeverFits && code != NodeConstraint && code != NodeUnavailable {
			free += here
			need = max(need, cl.Count*cl.milli(n.spec))
		}
	}
	switch possible := len(c.nodes) - r.Nodes[NeverFits] - r.Nodes[NodeConstraint]; {
	case possible == 0 && r.Nodes[NodeConstraint] > 0 && r.Nodes[NeverFits] == 0:
		r.Code = NodeConstraint
	case possible == 0:
		r.Code = NeverFits
	default:
		r.Code = r.chief()
	}
	// What single nodes call too little may be enough in all.
	if r.Code == InsufficientGPU && free >= need {
		r.Code = Fragmented
	}
	switch r.Code {
	case InsufficientCPU:
		r.Need, r.Free = cl.MilliCPU, best[r.Code].cpu
	case InsufficientMemory:
		r.Need, r.Free = cl.MemoryMiB, best[r.Code].memory
	case InsufficientPods:
		r.Need, r.Free = 1, 0
	case Fragmented, InsufficientGPU:
		r.Need, r.Free = need, free
	default:
		r.Need, r.Free = c.milli(cl), best[r.Code].gpu
	}
	return r
}

// chief is the code of most of the nodes that could ever run the request, the
// first in the order of codes among equals.
func (r *Reason) chief() Code {
	best := NodeUnavailable
	for code := NodeUnavailable; code < codes; code++ {
		if r.Nodes[code] > r.Nodes[best] {
			best = code
		}
	}
	return best
}
