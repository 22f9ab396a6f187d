package gpu

import "strconv"

// PCIeLevel is the nearest common ancestor of two GPUs on the PCIe tree. The
// order is from unknown over farthest to nearest, as NVML names them.
type PCIeLevel int

// The levels.
const (
	// PCIeUnknown: the query failed or was never made.
	PCIeUnknown PCIeLevel = iota
	// PCIeSystem: the path crosses the link between CPUs.
	PCIeSystem
	// PCIeNode: the same NUMA node, different host bridges.
	PCIeNode
	// PCIeHostBridge: the same host bridge.
	PCIeHostBridge
	// PCIeMultiple: several PCIe switches.
	PCIeMultiple
	// PCIeSingle: one PCIe switch.
	PCIeSingle
	// PCIeInternal: the same board.
	PCIeInternal
)

var pcieNames = [...]string{"unknown", "SYS", "NODE", "PHB", "PXB", "PIX", "INTERNAL"}

// String returns the short names of `nvidia-smi topo -m`.
func (l PCIeLevel) String() string {
	if l >= 0 && int(l) < len(pcieNames) {
		return pcieNames[l]
	}
	return "PCIeLevel(" + strconv.Itoa(int(l)) + ")"
}

// ParsePCIeLevel reads a name that String writes. The second result is false
// for any other text.
func ParsePCIeLevel(s string) (PCIeLevel, bool) {
	for i, n := range pcieNames {
		if n == s {
			return PCIeLevel(i), true
		}
	}
	return PCIeUnknown, false
}

// Link is the connection of two GPUs.
type Link struct {
	// NVLinks is the number of direct NVLinks between the two.
	NVLinks int
	// PCIe is their nearest common ancestor.
	PCIe PCIeLevel
}

// Score turns a link into points: 10 per PCIe level (cross CPU 10 ... same
// board 60) plus 100 per NVLink. The scale is the one of NVIDIA's
// go-gpuallocator, so that results can be compared; an unknown link is worth 0.
func (l Link) Score() int { return 10*int(l.PCIe) + 100*l.NVLinks }

// Links is a symmetric matrix of the links of n GPUs. The zero value is for no
// GPUs.
type Links struct {
	n     int
	cells []Link // n*n, row by row; cells[i*n+j] == cells[j*n+i]
}

// NewLinks returns a matrix of n GPUs with all links unknown.
func NewLinks(n int) Links { return Links{n: n, cells: make([]Link, n*n)} }

// Len is the number of GPUs.
func (l Links) Len() int { return l.n }

// At returns the link of i and j; the zero Link for i == j and for indices out
// of range.
func (l Links) At(i, j int) Link {
	if i < 0 || j < 0 || i >= l.n || j >= l.n || i == j {
		return Link{}
	}
	return l.cells[i*l.n+j]
}

// Merge adds what one side reports of its link to the other. Drivers report
// some links from one side only, so the better of both reports counts, for
// both directions. It must not be called on a matrix that others can see.
func (l Links) Merge(i, j int, report Link) {
	if i < 0 || j < 0 || i >= l.n || j >= l.n || i == j {
		return
	}
	old := l.cells[i*l.n+j]
	merged := Link{NVLinks: max(old.NVLinks, report.NVLinks), PCIe: max(old.PCIe, report.PCIe)}
	l.cells[i*l.n+j] = merged
	l.cells[j*l.n+i] = merged
}
