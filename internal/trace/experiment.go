package trace

import (
	"cmp"
	"fmt"
	"math/rand"
	"slices"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// informers is how many random numbers the simulator that was published with the
// trace uses between the pods and the nodes. Its order of nodes follows from it.
const informers = 10

// OpenbExperiment returns the nodes and jobs of an experiment as the FGD paper
// ran it: all pods in an order drawn by the seed, then copies of pods drawn one
// by one until the GPUs asked for are inflate times those of the nodes; or, where
// the pods ask for more than that, without pods drawn one by one. The nodes are
// in an order drawn by the seed too: it breaks ties between equal nodes.
//
// The numbers are those of math/rand with the seed, in the order in which the
// published simulator uses them, so that runs can be compared one by one. Whether
// the next copy would be too much is judged by the share of one of its GPUs, as
// there.
func OpenbExperiment(nodes []placement.NodeSpec, pods []OpenbPod, inflate float64, seed int64) ([]placement.NodeSpec, []Job, error) {
	capacity, asked := 0, 0
	for i := range nodes {
		capacity += nodes[i].GPUs * placement.Whole
	}
	target := int(inflate * float64(capacity))
	byName := func(a, b OpenbPod) int { return strings.Compare(a.Name, b.Name) }
	sorted := slices.SortedFunc(slices.Values(pods), byName)
	for _, p := range sorted {
		asked += p.GPUs * p.Milli
	}
	switch {
	case inflate <= 0:
		return nil, nil, fmt.Errorf("inflate is %v: give more than 0", inflate)
	case asked == 0:
		return nil, nil, fmt.Errorf("no pod asks for a GPU: there is nothing to inflate")
	case target == 0:
		return nil, nil, fmt.Errorf("the nodes have no GPU")
	}

	rng := rand.New(rand.NewSource(seed)) //nolint:gosec // an experiment is repeatable
	rng.Int()
	sequence := slices.Clone(sorted)
	rng.Shuffle(len(sequence), func(i, j int) { sequence[i], sequence[j] = sequence[j], sequence[i] })
	if asked > target {
		for asked > target {
			i := rng.Intn(len(sequence))
			asked -= sequence[i].GPUs * sequence[i].Milli
			sequence = slices.Delete(sequence, i, i+1)
		}
	} else {
		for {
			p := sorted[rng.Intn(len(sorted))]
			if asked+p.Milli > target {
				break
			}
			asked += p.GPUs * p.Milli
			sequence = append(sequence, p)
		}
	}
	for range informers {
		rng.Float64()
	}
	named := slices.SortedFunc(slices.Values(nodes), func(a, b placement.NodeSpec) int { return cmp.Compare(a.Name, b.Name) })
	ordered := make([]placement.NodeSpec, len(named))
	for i, at := range rng.Perm(len(named)) {
		ordered[at] = named[i]
	}
	jobs := make([]Job, len(sequence))
	for i, p := range sequence {
		jobs[i] = p.job(i)
	}
	return ordered, jobs, nil
}
