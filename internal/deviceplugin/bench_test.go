package deviceplugin

import (
	"fmt"
	"math/rand/v2"
	"testing"
)

// BenchmarkPreferredAllocation asks for every size of whole GPUs and of slots,
// with what is available in the order of a map.
func BenchmarkPreferredAllocation(b *testing.B) {
	for _, n := range []int{8, 16} {
		m := machineOf(n)
		for _, replicas := range []int{1, 10} {
			r := resourceOf(m, "gpu", replicas)
			a := NewAllocator(NewLedger(), configOf(m, r))
			available := idsOf(r)
			random := rand.New(rand.NewPCG(1, 1))
			random.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
			for size := 1; size <= n; size++ {
				b.Run(fmt.Sprintf("GPUs=%d/replicas=%d/size=%d", n, replicas, size), func(b *testing.B) {
					for b.Loop() {
						if got := a.Prefer(available, nil, size); len(got) != size {
							b.Fatalf("got %v", got)
						}
					}
				})
			}
		}
	}
}
