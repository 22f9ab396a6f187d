package simulator_test

import (
	"encoding/csv"
	"fmt"
	"math"
	"os"
	"strconv"
	"strings"
	"testing"

	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/simulator"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

// openb has the trace and the published curves. They are not part of the
// repository.
const openb = "../../../shared/openb/"

var workloads = []string{
	"default", "cpu050", "cpu100", "cpu200", "cpu250", "gpushare40", "gpushare60", "gpushare80", "gpushare100",
	"gpuspec10", "gpuspec20", "gpuspec25", "gpuspec33", "multigpu20", "multigpu30", "multigpu40", "multigpu50",
}

// published are the names of the policies in the published curves.
var published = map[string]string{
	"random": "01-Random", "dot-product": "02-DotProd", "gpu-clustering": "03-GpuClustering",
	"gpu-packing": "04-GpuPacking", "best-fit": "05-BestFit", "fgd": "06-FGD",
}

func open(tb testing.TB, name string) *os.File {
	tb.Helper()
	f, err := os.Open(openb + name)
	if err != nil {
		tb.Skipf("the openb trace is not beside the repository: %v", err)
	}
	tb.Cleanup(func() { f.Close() })
	return f
}

// experiment is a run of the FGD paper's evaluation.
func experiment(tb testing.TB, workload, policy string, seed int64) *simulator.Fill {
	tb.Helper()
	nodes, err := trace.ReadOpenbNodes(open(tb, "openb_node_list_gpu_node.csv"), "nodes")
	if err != nil {
		tb.Fatal(err)
	}
	pods, err := trace.ReadOpenbPods(open(tb, "openb_pod_list_"+workload+".csv"), workload)
	if err != nil {
		tb.Fatal(err)
	}
	mix := make([]placement.Request, len(pods))
	for i := range pods {
		mix[i] = pods[i].Request()
	}
	ordered, jobs, err := trace.OpenbExperiment(nodes, pods, 1.3, seed)
	if err != nil {
		tb.Fatal(err)
	}
	p, err := placement.PolicyByName(policy)
	if err != nil {
		tb.Fatal(err)
	}
	p.Seed = uint64(seed)
	return &simulator.Fill{Nodes: ordered, Jobs: jobs, Policy: p, Mix: mix}
}

func run(tb testing.TB, workload, policy string, seed int64) *simulator.FillReport {
	tb.Helper()
	report, err := experiment(tb, workload, policy, seed).Run(nil)
	if err != nil {
		tb.Fatal(err)
	}
	return report
}

// curves reads published curves: per cents by workload, policy and seed, then by
// per cent of arrived load.
func curves(tb testing.TB, name string, skip int) map[string][]float64 {
	tb.Helper()
	rows, err := csv.NewReader(open(tb, "expected/"+name)).ReadAll()
	if err != nil {
		tb.Fatal(err)
	}
	all := make(map[string][]float64)
	for _, row := range rows[1:] {
		var curve []float64
		for _, field := range row[skip:] {
			x, err := strconv.ParseFloat(field, 64)
			if err != nil {
				tb.Fatal(err)
			}
			curve = append(curve, x)
		}
		all[strings.TrimPrefix(row[0], "openb_pod_list_")+" "+row[1]+" "+row[3]] = curve
	}
	return all
}

// size says how much of the evaluation to run: all of it takes a quarter of an
// hour and is what `make bench` does.
func size() (which []string, seeds int64) {
	if os.Getenv("ASHLAR_OPENB") == "full" {
		return workloads, 10
	}
	return []string{"default", "gpuspec33"}, 1
}

// The deterministic policies give the published allocation and fragmentation at
// every per cent of arrived load, seed by seed.
func TestPublishedCurves(t *testing.T) {
	allocation, fragmentation := curves(t, "analysis_allo_discrete.csv", 5), curves(t, "analysis_frag_ratio_discrete.csv", 4)
	which, seeds := size()
	for _, workload := range which {
		for _, policy := range []string{"dot-product", "gpu-clustering", "gpu-packing", "best-fit", "fgd"} {
			t.Run(workload+"/"+policy, func(t *testing.T) {
				t.Parallel()
				for seed := int64(42); seed < 42+seeds; seed++ {
					report := run(t, workload, policy, seed)
					key := fmt.Sprintf("%s %s %d", workload, published[policy], seed)
					for percent, want := range allocation[key] {
						if got := report.At(percent).Allocated; math.Abs(got-want) > 0.02 {
							t.Errorf("seed %d, %d %% arrived: %.2f %% allocated, published %.2f", seed, percent, got, want)
						}
					}
					for percent, want := range fragmentation[key] {
						if got := report.At(percent).Fragmented; math.Abs(got-want) > 0.02 {
							t.Errorf("seed %d, %d %% arrived: %.3f %% of idle fragmented, published %.3f", seed, percent, got, want)
						}
					}
				}
			})
		}
	}
}

// The random policy draws from the same distribution as the published one.
func TestPublishedRandom(t *testing.T) {
	allocation := curves(t, "analysis_allo_discrete.csv", 5)
	which, _ := size()
	for _, workload := range which {
		t.Run(workload, func(t *testing.T) {
			t.Parallel()
			var reports []*simulator.FillReport
			for seed := int64(42); seed < 52; seed++ {
				reports = append(reports, run(t, workload, "random", seed))
			}
			for _, percent := range []int{100, 130} {
				got, want := 0.0, 0.0
				for i, report := range reports {
					seed := int64(42 + i)
					got += report.At(percent).Allocated / 10
					want += allocation[fmt.Sprintf("%s %s %d", workload, published["random"], seed)][percent] / 10
				}
				if math.Abs(got-want) > 0.3 {
					t.Errorf("%d %% arrived: %.2f %% allocated in the mean, published %.2f", percent, got, want)
				}
			}
		})
	}
}

// The ashlar policy, which starts without knowing the mix, allocates more than
// fgd, which is told it, and refuses fewer jobs.
func TestAshlarBeatsFGD(t *testing.T) {
	which, seeds := size()
	for _, workload := range which {
		t.Run(workload, func(t *testing.T) {
			t.Parallel()
			var ours, theirs [3]float64
			add := func(to *[3]float64, r *simulator.FillReport) {
				to[0] += r.At(100).Allocated / float64(seeds)
				to[1] += r.At(130).Allocated / float64(seeds)
				to[2] += float64(r.Failed) / float64(seeds)
			}
			for seed := int64(42); seed < 42+seeds; seed++ {
				add(&ours, run(t, workload, "ashlar", seed))
				add(&theirs, run(t, workload, "fgd", seed))
			}
			t.Logf("allocated at 100 %% %+.2f, at 130 %% %+.2f, failed %+.1f", ours[0]-theirs[0], ours[1]-theirs[1], ours[2]-theirs[2])
			if ours[0] <= theirs[0] || ours[1] <= theirs[1] || ours[2] >= theirs[2] {
				t.Errorf("allocated at 100 %%, at 130 %%, failed: ashlar %.2f, fgd %.2f", ours, theirs)
			}
		})
	}
}
