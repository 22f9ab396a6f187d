package trace

import (
	"time"

	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// The numbers of the scenarios are chosen, not measured: each mix is what its
// Doc says, and the load is set by the number of jobs a day.

const (
	minute = time.Minute
	hour   = time.Hour
	day    = 24 * time.Hour
)

// officeHours has twice as many jobs in an hour of the day as in one of the
// night. The first hour is midnight.
var officeHours = [24]float64{6, 6, 6, 6, 6, 6, 7, 8, 10, 12, 12, 12, 11, 12, 12, 12, 12, 11, 10, 9, 8, 7, 7, 6}

// dailyWave is the wave of people who are awake: four times as much in the
// evening as before dawn.
var dailyWave = [24]float64{6, 5, 4, 3, 3, 3, 4, 5, 6, 7, 8, 9, 10, 10, 9, 9, 9, 10, 11, 12, 12, 11, 9, 7}

var scenarios = []Scenario{
	{
		Name:    "shared-40",
		Summary: "a research group's 40 A100 in five nodes, most jobs small",
		Doc: `Five nodes with eight A100 of 40 GiB each, and 200 jobs on a usual day, more of them in office hours than at ` +
			`night. Five jobs of six are small: notebooks that are mostly idle, tests, evaluations and little inference ` +
			`services, which keep 3 to 25 % of a GPU busy and need a few GiB of it. Some are of middle size, some train on a ` +
			`whole GPU, and a few on two, four or eight. The mix was chosen for what happens without sharing: with GPUs of ` +
			`their own, the jobs of a day want a sixth more than the 40 GPUs have, and wait for about four hours in the mean ` +
			`by the end of five days, while what they keep busy is less than a third of the GPUs that they hold.`,
		Version:  1,
		Nodes:    []NodeGroup{{Count: 5, Cores: 96, MemoryGiB: 1152, GPUs: 8, Product: "A100-40", MIG: true}},
		Days:     5,
		Arrivals: Arrivals{PerDay: 200, Hours: officeHours},
		// Weights are thousandths of the jobs.
		Classes: []Class{
			// Small: 5 to 25 % of a GPU, a few GiB.
			{Name: "test", Weight: 370, GPUs: 1, Shared: true, Activity: Range{50, 200}, GPUMemory: Range{1, 6}, Cores: Range{1, 4}, Memory: Range{4, 16}, Duration: Lengths{45 * minute, 2 * minute, 8 * hour, 0.8}},
			{Name: "notebook", Weight: 300, GPUs: 1, Shared: true, Activity: Range{30, 120}, GPUMemory: Range{2, 8}, Cores: Range{2, 4}, Memory: Range{8, 32}, Duration: Lengths{405 * minute, 20 * minute, 24 * hour, 0.7}},
			{Name: "evaluation", Weight: 100, GPUs: 1, Shared: true, Activity: Range{100, 250}, GPUMemory: Range{2, 8}, Cores: Range{2, 4}, Memory: Range{8, 24}, Duration: Lengths{100 * minute, 5 * minute, 12 * hour, 0.8}},
			{Name: "inference", Weight: 70, GPUs: 1, Shared: true, Activity: Range{50, 200}, GPUMemory: Range{3, 9}, Cores: Range{2, 4}, Memory: Range{8, 24}, Duration: Lengths{11 * hour, 1 * hour, 48 * hour, 0.8}},
			// Middle: 30 to 60 %, 10 to 20 GiB.
			{Name: "fine-tuning", Weight: 83, GPUs: 1, Shared: true, Activity: Range{300, 600}, GPUMemory: Range{10, 20}, Cores: Range{4, 8}, Memory: Range{24, 64}, Duration: Lengths{270 * minute, 15 * minute, 36 * hour, 0.8}},
			// Whole GPUs.
			{Name: "training", Weight: 55, GPUs: 1, Activity: Range{700, 980}, Cores: Range{8, 11}, Memory: Range{48, 128}, Duration: Lengths{4 * hour, 15 * minute, 48 * hour, 0.9}},
			{Name: "training-2", Weight: 10, GPUs: 2, Activity: Range{750, 980}, Cores: Range{16, 22}, Memory: Range{96, 256}, Duration: Lengths{6 * hour, 30 * minute, 48 * hour, 0.8}},
			{Name: "training-4", Weight: 7, GPUs: 4, Activity: Range{800, 980}, Cores: Range{32, 44}, Memory: Range{192, 512}, Duration: Lengths{8 * hour, 1 * hour, 48 * hour, 0.7}},
			{Name: "training-8", Weight: 5, GPUs: 8, Activity: Range{850, 980}, Cores: Range{64, 88}, Memory: Range{512, 1024}, Duration: Lengths{10 * hour, 2 * hour, 48 * hour, 0.6}},
		},
	},
	{
		Name:    "inference-fleet",
		Summary: "many small long-lived services on A10G, L40S and T4",
		Doc: `Replicas of inference services on three kinds of nodes: 40 with four T4, 40 with four A10G and 20 with eight ` +
			`L40S. Most replicas need a part of a GPU and live for many hours, so that a placement is paid for long; they ` +
			`start along with the traffic, four times as often in the evening as before dawn. Small models run anywhere, ` +
			`larger ones only where the memory is, and a few on a GPU of their own. Short batch jobs of low priority fill in.`,
		Version: 1,
		Nodes: []NodeGroup{
			{Count: 40, Cores: 48, MemoryGiB: 192, GPUs: 4, Product: "T4"},
			{Count: 40, Cores: 48, MemoryGiB: 192, GPUs: 4, Product: "A10G"},
			{Count: 20, Cores: 128, MemoryGiB: 1024, GPUs: 8, Product: "L40S"},
		},
		Days:     7,
		Arrivals: Arrivals{PerDay: 1200, Hours: dailyWave},
		Classes: []Class{
			{Name: "small-model", Weight: 50, GPUs: 1, Shared: true, Activity: Range{50, 200}, GPUMemory: Range{1, 4}, Cores: Range{1, 3}, Memory: Range{4, 12}, Duration: Lengths{12 * hour, 1 * hour, 5 * day, 0.9}, Tenants: []int{5, 3, 2, 1, 1}},
			{Name: "middle-model", Weight: 25, GPUs: 1, Shared: true, Activity: Range{150, 450}, GPUMemory: Range{6, 14}, Cores: Range{2, 6}, Memory: Range{12, 32}, Duration: Lengths{16 * hour, 2 * hour, 5 * day, 0.8}, Tenants: []int{4, 3, 3, 1, 1}},
			{Name: "large-model", Weight: 8, GPUs: 1, Shared: true, Activity: Range{300, 700}, GPUMemory: Range{24, 40}, Cores: Range{4, 10}, Memory: Range{32, 96}, Products: []string{"L40S"}, Duration: Lengths{24 * hour, 4 * hour, 5 * day, 0.7}, Priority: 10, Tenants: []int{1, 1}},
			{Name: "own-gpu", Weight: 5, GPUs: 1, Activity: Range{500, 950}, Cores: Range{4, 10}, Memory: Range{24, 40}, Products: []string{"A10G", "L40S"}, Duration: Lengths{24 * hour, 4 * hour, 5 * day, 0.7}, Priority: 10, Tenants: []int{1, 1}},
			{Name: "batch", Weight: 12, GPUs: 1, Shared: true, Activity: Range{200, 800}, GPUMemory: Range{2, 12}, Cores: Range{2, 8}, Memory: Range{8, 32}, Duration: Lengths{30 * minute, 2 * minute, 6 * hour, 0.8}, Priority: -10, Tenants: []int{1, 1, 1, 1, 1}},
		},
	},
	{
		Name:    "training-lab",
		Summary: "trainings of up to eight NVLinked H100, with priorities and tenants",
		Doc: `Sixteen nodes with eight H100 each, for three tenants of unequal size. Most GPU-hours are of trainings on two, ` +
			`four or eight GPUs, which must be linked by NVLink; single GPUs go to experiments, and short debugging runs come ` +
			`before all else. What matters is to keep whole nodes free for the large jobs, and whom to make wait.`,
		Version:  1,
		Nodes:    []NodeGroup{{Count: 16, Cores: 192, MemoryGiB: 2048, GPUs: 8, Product: "H100-80"}},
		Days:     7,
		Arrivals: Arrivals{PerDay: 105, Hours: officeHours},
		Classes: []Class{
			{Name: "debug", Weight: 35, GPUs: 1, Activity: Range{200, 700}, Cores: Range{8, 20}, Memory: Range{64, 200}, Duration: Lengths{20 * minute, 1 * minute, 3 * hour, 0.9}, Priority: 100, Tenants: []int{5, 3, 2}},
			{Name: "experiment", Weight: 30, GPUs: 1, Activity: Range{600, 950}, Cores: Range{8, 20}, Memory: Range{64, 200}, Duration: Lengths{5 * hour, 15 * minute, 3 * day, 0.9}, Tenants: []int{5, 3, 2}},
			{Name: "training-2", Weight: 12, GPUs: 2, Links: placement.NVLinked, Activity: Range{700, 980}, Cores: Range{16, 44}, Memory: Range{128, 480}, Duration: Lengths{8 * hour, 30 * minute, 3 * day, 0.8}, Tenants: []int{4, 4, 2}},
			{Name: "training-4", Weight: 10, GPUs: 4, Links: placement.NVLinked, Activity: Range{750, 980}, Cores: Range{32, 88}, Memory: Range{256, 960}, Duration: Lengths{10 * hour, 1 * hour, 4 * day, 0.8}, Tenants: []int{4, 4, 2}},
			{Name: "training-8", Weight: 10, GPUs: 8, Links: placement.NVLinked, Activity: Range{800, 980}, Cores: Range{64, 180}, Memory: Range{512, 1920}, Duration: Lengths{12 * hour, 2 * hour, 5 * day, 0.8}, Tenants: []int{6, 3, 1}},
			{Name: "urgent-8", Weight: 3, GPUs: 8, Links: placement.NVLinked, Activity: Range{850, 980}, Cores: Range{64, 180}, Memory: Range{512, 1920}, Duration: Lengths{8 * hour, 2 * hour, 2 * day, 0.6}, Priority: 50, Tenants: []int{1}},
		},
	},
	{
		Name:    "mig-mix",
		Summary: "MIG devices of three sizes and whole GPUs on 32 A100",
		Doc: `Four nodes with eight A100 of 40 GiB each, which may be cut. Jobs ask for MIG devices by profile: many 1g.5gb, ` +
			`fewer 2g.10gb and 3g.20gb, and some for a whole GPU. The sizes come and go in every order, so that GPUs which were ` +
			`cut for small devices stand in the way of large ones, and placement inside a GPU matters as much as which GPU.`,
		Version:  1,
		Nodes:    []NodeGroup{{Count: 4, Cores: 96, MemoryGiB: 1152, GPUs: 8, Product: "A100-40", MIG: true}},
		Days:     5,
		Arrivals: Arrivals{PerDay: 380, Hours: officeHours},
		Classes: []Class{
			{Name: "slice-1g", Weight: 50, GPUs: 1, Profile: "1g.5gb", Activity: Range{30, 140}, Cores: Range{1, 2}, Memory: Range{4, 16}, Duration: Lengths{2 * hour, 5 * minute, 24 * hour, 0.9}},
			{Name: "slice-2g", Weight: 20, GPUs: 1, Profile: "2g.10gb", Activity: Range{100, 280}, Cores: Range{1, 3}, Memory: Range{8, 32}, Duration: Lengths{3 * hour, 10 * minute, 24 * hour, 0.9}},
			{Name: "slice-3g", Weight: 15, GPUs: 1, Profile: "3g.20gb", Activity: Range{200, 420}, Cores: Range{2, 5}, Memory: Range{16, 64}, Duration: Lengths{4 * hour, 10 * minute, 36 * hour, 0.9}},
			{Name: "slices-2x1g", Weight: 5, GPUs: 2, Profile: "1g.5gb", Activity: Range{30, 140}, Cores: Range{1, 4}, Memory: Range{8, 32}, Duration: Lengths{2 * hour, 5 * minute, 24 * hour, 0.9}},
			{Name: "whole", Weight: 10, GPUs: 1, Activity: Range{600, 980}, Cores: Range{6, 11}, Memory: Range{32, 128}, Duration: Lengths{4 * hour, 15 * minute, 36 * hour, 0.9}},
		},
	},
	{
		Name:    "burst",
		Summary: "a quiet day, and 500 jobs within ten minutes at noon",
		Doc: `Eight nodes with eight A100 of 80 GiB each have little to do until noon, when a sweep of 500 short jobs arrives ` +
			`within ten minutes, more than there is room for. It shows how fast placement works through a queue, and how the ` +
			`usual jobs fare meanwhile.`,
		Version:  1,
		Nodes:    []NodeGroup{{Count: 8, Cores: 128, MemoryGiB: 1024, GPUs: 8, Product: "A100-80", MIG: true}},
		Days:     1,
		Arrivals: Arrivals{PerDay: 100, Bursts: []Burst{{At: 12 * hour, Length: 10 * minute, Jobs: 500}}},
		Classes: []Class{
			{Name: "sweep", Weight: 60, GPUs: 1, Shared: true, Activity: Range{100, 400}, GPUMemory: Range{4, 20}, Cores: Range{1, 4}, Memory: Range{8, 24}, Duration: Lengths{45 * minute, 5 * minute, 4 * hour, 0.6}},
			{Name: "evaluation", Weight: 25, GPUs: 1, Shared: true, Activity: Range{400, 800}, GPUMemory: Range{16, 40}, Cores: Range{2, 8}, Memory: Range{16, 64}, Duration: Lengths{1 * hour, 5 * minute, 6 * hour, 0.7}},
			{Name: "training", Weight: 12, GPUs: 1, Activity: Range{700, 980}, Cores: Range{8, 14}, Memory: Range{48, 112}, Duration: Lengths{2 * hour, 10 * minute, 12 * hour, 0.8}},
			{Name: "training-4", Weight: 3, GPUs: 4, Activity: Range{800, 980}, Cores: Range{32, 56}, Memory: Range{192, 448}, Duration: Lengths{3 * hour, 30 * minute, 12 * hour, 0.7}},
		},
	},
	{
		Name:    "large-10k",
		Summary: "80,000 H100 in 10,000 nodes and 1.4 million jobs in a week, for benchmarks",
		Doc: `Ten thousand nodes with eight H100 each, and about 1.4 million jobs in a week, to measure the engine at scale. ` +
			`As in large production clusters, about two jobs of five ask for a part of a GPU, nearly half for one whole GPU, ` +
			`one of ten for none, and some for two, four or eight, which hold much of the capacity. After the first two days ` +
			`the jobs ask for four fifths of the GPUs all the time. Read it as a stream.`,
		Version:  1,
		Nodes:    []NodeGroup{{Count: 10_000, Cores: 192, MemoryGiB: 2048, GPUs: 8, Product: "H100-80", MIG: true}},
		Days:     7,
		Arrivals: Arrivals{PerDay: 195_000},
		// Weights are thousandths of the jobs.
		Classes: []Class{
			{Name: "cpu", Weight: 100, Cores: Range{2, 16}, Memory: Range{4, 64}, Duration: Lengths{2 * hour, 5 * minute, 24 * hour, 0.9}, Tenants: []int{4, 3, 2, 1}},
			{Name: "share-small", Weight: 220, GPUs: 1, Shared: true, Activity: Range{50, 250}, GPUMemory: Range{2, 16}, Cores: Range{1, 4}, Memory: Range{8, 32}, Duration: Lengths{4 * hour, 5 * minute, 36 * hour, 0.9}, Tenants: []int{4, 3, 2, 1}},
			{Name: "share-middle", Weight: 160, GPUs: 1, Shared: true, Activity: Range{250, 600}, GPUMemory: Range{12, 40}, Cores: Range{2, 10}, Memory: Range{16, 96}, Duration: Lengths{4 * hour, 5 * minute, 36 * hour, 0.9}, Tenants: []int{4, 3, 2, 1}},
			{Name: "whole", Weight: 440, GPUs: 1, Activity: Range{500, 980}, Cores: Range{6, 20}, Memory: Range{32, 200}, Duration: Lengths{6 * hour, 5 * minute, 48 * hour, 0.9}, Tenants: []int{4, 3, 2, 1}},
			{Name: "training-2", Weight: 30, GPUs: 2, Activity: Range{700, 980}, Cores: Range{12, 40}, Memory: Range{64, 400}, Duration: Lengths{6 * hour, 15 * minute, 48 * hour, 0.8}, Tenants: []int{4, 3, 2, 1}},
			{Name: "training-4", Weight: 25, GPUs: 4, Links: placement.NVLinked, Activity: Range{750, 980}, Cores: Range{24, 80}, Memory: Range{128, 800}, Duration: Lengths{405 * minute, 30 * minute, 48 * hour, 0.8}, Tenants: []int{4, 3, 2, 1}},
			{Name: "training-8", Weight: 25, GPUs: 8, Links: placement.NVLinked, Activity: Range{800, 980}, Cores: Range{48, 160}, Memory: Range{256, 1600}, Duration: Lengths{8 * hour, 30 * minute, 48 * hour, 0.8}, Priority: 10, Tenants: []int{4, 3, 2, 1}},
		},
	},
}
