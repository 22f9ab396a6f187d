package placement

import (
	"fmt"
	"strings"
)

// Policy says how to choose among the nodes and GPUs that fit. It is data: two
// policies with the same fields choose alike.
type Policy struct {
	// Name is how users know it.
	Name string
	// Version counts the changes of what the name means.
	Version int
	// Summary is one line for people.
	Summary string
	// Seed is for policies that draw random numbers.
	Seed uint64
	// RandomTies chooses at random, by Seed, among the nodes with the highest
	// score, as kube-scheduler does. Otherwise the first in the order of the
	// cluster is taken.
	RandomTies bool
	// Squeeze rounds scores to integers of 0 to 100 over the nodes that fit, as
	// kube-scheduler does.
	Squeeze bool

	kind kind
	// value is set for ashlar alone.
	value valueParams
}

// valueParams are the constants of the ashlar policy. They were chosen on seeds
// 42 to 44 of the openb workloads and are the same for every workload.
type valueParams struct {
	// draws is how many requests a node is offered to judge how full it gets,
	// and sequences how often that is tried.
	draws, sequences int
	// horizon, and ahead for each request that still fits the cluster, is for
	// how many arrivals places are kept in mind.
	horizon, ahead float64
	// caution is how many standard deviations the share of a request for several
	// GPUs is taken above what was seen.
	caution float64
	// steep is the power of the load ratio in a price.
	steep float64
	// floor is added to the number of places, so that the price of the last one
	// is not out of all proportion.
	floor float64
	// grain is the difference in thousandths of a GPU below which two places
	// count as equal, so that nodes are filled in order.
	grain float64
	// cpuGrain is the step in thousandths of a core by which the CPU left on a
	// node is told apart.
	cpuGrain int
	// growth of the sample after which the mix is learned again.
	growth float64
}

type kind int

const (
	firstFit kind = iota
	bestFit
	dotProduct
	leastAllocated
	gpuPacking
	gpuClustering
	random
	fgd
	ashlar
)

var policies = []Policy{
	{Name: "ashlar", Version: 1, kind: ashlar, Summary: "least loss of expected fill and of places for scarce requests, over the learned mix",
		value: valueParams{draws: 40, sequences: 32, horizon: 200, ahead: 0.8, caution: 2, steep: 2.5, floor: 5, grain: 40, cpuGrain: 1000, growth: 2}},
	{Name: "fgd", Version: 1, kind: fgd, Summary: "fragmentation gradient descent as published (USENIX ATC '23); must be told the mix"},
	{Name: "best-fit", Version: 1, kind: bestFit, Summary: "least CPU and GPU left on the node"},
	{Name: "gpu-packing", Version: 1, kind: gpuPacking, Summary: "GPUs in use first, then nodes in use"},
	{Name: "gpu-clustering", Version: 1, kind: gpuClustering, Summary: "nodes with requests of the same size first"},
	{Name: "dot-product", Version: 1, kind: dotProduct, Summary: "least alignment of request and free resources"},
	{Name: "least-allocated", Version: 1, kind: leastAllocated, Summary: "most CPU and memory left on the node, as kube-scheduler scores by default"},
	{Name: "first-fit", Version: 1, kind: firstFit, Summary: "the first node in order"},
	{Name: "random", Version: 1, kind: random, Summary: "any node, by the seed"},
}

// Policies lists the built-in policies, the default first.
func Policies() []Policy { return append([]Policy(nil), policies...) }

// PolicyByName returns a built-in policy.
func PolicyByName(name string) (Policy, error) {
	names := make([]string, len(policies))
	for i, p := range policies {
		if p.Name == name {
			return p, nil
		}
		names[i] = p.Name
	}
	return Policy{}, fmt.Errorf("%w: no policy %q: use one of %s", ErrInvalid, name, strings.Join(names, ", "))
}
