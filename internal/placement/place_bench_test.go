package placement_test

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// BenchmarkPlace measures a cluster in steady state at 80 % load: one operation
// is the arrival of a job and the departure of a random older one.
func BenchmarkPlace(b *testing.B) {
	for _, nodes := range []int{100, 1000, 10000} {
		for _, name := range []string{"ashlar", "best-fit"} {
			b.Run(fmt.Sprintf("nodes%d/%s", nodes, name), func(b *testing.B) {
				benchmarkPlace(b, nodes, policy(b, name))
			})
		}
	}
}

// inference and training jobs, each weight times in a hundred or so.
var benchMix = []struct {
	weight, cpu, memory, count, milli int
}{
	{10, 1000, 4096, 1, 200},
	{8, 2000, 8192, 1, 200},
	{4, 2000, 16384, 1, 200},
	{8, 2000, 8192, 1, 300},
	{6, 4000, 16384, 1, 300},
	{4, 4000, 32768, 1, 300},
	{8, 2000, 8192, 1, 500},
	{6, 4000, 16384, 1, 500},
	{4, 6000, 32768, 1, 500},
	{8, 8000, 65536, 1, 1000},
	{6, 10000, 65536, 1, 1000},
	{4, 12000, 131072, 1, 1000},
	{4, 16000, 131072, 2, 1000},
	{3, 20000, 131072, 2, 1000},
	{2, 24000, 262144, 2, 1000},
	{3, 32000, 262144, 4, 1000},
	{2, 40000, 262144, 4, 1000},
	{1, 48000, 524288, 4, 1000},
	{2, 64000, 524288, 8, 1000},
	{1, 96000, 1 << 20, 8, 1000},
}

// stream is a cluster with jobs that come and go.
type stream struct {
	c       *placement.Cluster
	placer  *placement.Placer
	list    []placement.ClassID // each as often as its weight
	rng     *rand.Rand
	applied []placement.Plan
	milli   int // given out
	refused int
}

func newStream(b *testing.B, nodes int, p placement.Policy) *stream {
	b.Helper()
	h100 := gpu.ProductByKey("H100-80")
	specs := make([]placement.NodeSpec, nodes)
	for i := range specs {
		specs[i] = placement.NodeSpec{
			Name: fmt.Sprintf("node-%d", i), MilliCPU: 96000, MemoryMiB: 1 << 20,
			GPUs: 8, Product: h100.Key, GPUMemoryMiB: h100.MemoryMiB, MIG: h100.MIG,
		}
	}
	s := &stream{c: newCluster(b, specs...), rng: rand.New(rand.NewPCG(1, 2))}
	for _, m := range benchMix {
		r := placement.Request{MilliCPU: m.cpu, MemoryMiB: m.memory, Count: m.count, Milli: m.milli}
		if m.milli < placement.Whole {
			r.GPUMemoryMiB = h100.MemoryMiB * m.milli / placement.Whole
		}
		for range m.weight {
			s.list = append(s.list, classes(b, s.c, r)...)
		}
	}
	s.placer = newPlacer(b, s.c, p, nil)
	return s
}

func (s *stream) arrive(b *testing.B) {
	id := s.list[s.rng.IntN(len(s.list))]
	s.placer.Learn(id)
	plan, ok := s.placer.Place(id)
	if !ok {
		s.refused++
		return
	}
	if err := s.c.Apply(&plan); err != nil {
		b.Fatal(err)
	}
	s.applied = append(s.applied, plan)
	s.milli += s.c.Milli(id)
}

func (s *stream) leave(b *testing.B) {
	i, last := s.rng.IntN(len(s.applied)), len(s.applied)-1
	plan := s.applied[i]
	s.applied[i] = s.applied[last]
	s.applied = s.applied[:last]
	if err := s.c.Remove(&plan); err != nil {
		b.Fatal(err)
	}
	s.milli -= s.c.Milli(plan.Class)
}

func benchmarkPlace(b *testing.B, nodes int, p placement.Policy) {
	s := newStream(b, nodes, p)
	target := nodes * 8 * placement.Whole * 8 / 10
	for s.milli < target && s.refused < 1000 {
		s.arrive(b)
	}
	step := func() {
		s.arrive(b)
		for s.milli > target {
			s.leave(b)
		}
	}
	for range min(2000, 20*nodes) {
		step()
	}
	s.refused = 0
	load := float64(s.milli) / float64(nodes*8*placement.Whole)
	ns := make([]time.Duration, 0, 1<<16)
	b.ReportAllocs()
	for b.Loop() {
		start := time.Now() //nolint:forbidigo // a benchmark measures time
		step()
		ns = append(ns, time.Since(start)) //nolint:forbidigo // idem
	}
	slices.Sort(ns)
	b.ReportMetric(float64(ns[len(ns)/2]), "p50-ns")
	b.ReportMetric(float64(ns[len(ns)*99/100]), "p99-ns")
	b.ReportMetric(float64(ns[len(ns)*999/1000]), "p99.9-ns")
	b.ReportMetric(float64(ns[len(ns)-1]), "max-ns")
	b.ReportMetric(100*load, "%load")
	b.ReportMetric(100*float64(s.refused)/float64(len(ns)), "%refused")
}
