package placement_test

import (
	"fmt"
	"slices"

	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// reference is a cluster as a list of what was applied. Whatever is asked of it
// is added up from the list anew, so that it has no state to get wrong.
type reference struct {
	specs []placement.NodeSpec
	jobs  []job
	down  map[int]bool
}

type job struct {
	request placement.Request
	plan    placement.Plan
}

// booked is what the list says of a GPU.
type booked struct {
	way                    string // how it is given out, "" for idle
	milli, memory, devices int
	cut                    []gpu.MIGInstance
}

func way(r *placement.Request) string {
	switch {
	case r.Slot:
		return "slots"
	case r.Profile != "":
		return "mig"
	case r.Milli == 1000:
		return "whole"
	}
	return "share"
}

// offers says whether GPU g, booked as b, has a device for the request. Of MIG
// devices it is the one at start.
func offers(spec *placement.NodeSpec, g int, b booked, r *placement.Request, start int) bool {
	if spec.Machine != nil && spec.Machine.GPUs[g].Health.State != gpu.Healthy {
		return false
	}
	if b.way != "" && b.way != way(r) {
		return false
	}
	known := spec.GPUMemoryMiB > 0
	switch way(r) {
	case "slots":
		return spec.Slots >= 2 && b.devices < spec.Slots
	case "mig":
		add, ok := instance(spec, r.Profile, start)
		return ok && spec.MIG.Check(b.cut, add) == nil
	case "whole":
		return b.devices == 0 && (!known || r.GPUMemoryMiB <= spec.GPUMemoryMiB)
	}
	return b.milli+r.Milli <= 1000 && (!known || b.memory+r.GPUMemoryMiB <= spec.GPUMemoryMiB)
}

// instance is the MIG device of a profile at a start, if there is such a one.
func instance(spec *placement.NodeSpec, profile string, start int) (gpu.MIGInstance, bool) {
	if spec.MIG == nil {
		return gpu.MIGInstance{}, false
	}
	p := spec.MIG.ByName(profile)
	if p == nil {
		return gpu.MIGInstance{}, false
	}
	for _, at := range p.Placements {
		if at.Start == start {
			return gpu.MIGInstance{ProfileID: p.ID, Placement: at}, true
		}
	}
	return gpu.MIGInstance{}, false
}

// book adds a device to a GPU.
func (b *booked) book(spec *placement.NodeSpec, r *placement.Request, start int) {
	b.way = way(r)
	b.devices++
	b.milli += r.Milli
	b.memory += r.GPUMemoryMiB
	if b.way == "mig" {
		add, _ := instance(spec, r.Profile, start)
		b.cut = append(slices.Clip(b.cut), add)
	}
}

// connected says whether two GPUs are linked as the class wants.
func connected(spec *placement.NodeSpec, class placement.LinkClass, g, h int) bool {
	if class == placement.AnyLink {
		return true
	}
	m := spec.Machine
	if m == nil {
		return class <= spec.Links
	}
	link := m.Links.At(g, h)
	nvlink := link.NVLinks > 0 || m.GPUs[g].NVSwitch != "" && m.GPUs[g].NVSwitch == m.GPUs[h].NVSwitch
	return nvlink || class == placement.SameNUMA && link.PCIe >= gpu.PCIeNode
}

// node adds up what the list says of a node.
func (r *reference) node(i int) (cpu, memory, pods int, gpus []booked) {
	spec := &r.specs[i]
	gpus = make([]booked, spec.GPUs)
	for k := range r.jobs {
		j := &r.jobs[k]
		if j.plan.Node != i {
			continue
		}
		cpu += j.request.MilliCPU
		memory += j.request.MemoryMiB
		pods++
		for d := range j.plan.Devices {
			gpus[j.plan.GPU[d]].book(spec, &j.request, int(j.plan.Start[d]))
		}
	}
	return cpu, memory, pods, gpus
}

// fits says whether a node can run the request, by trying what there is.
func (r *reference) fits(i int, q *placement.Request) bool {
	spec := &r.specs[i]
	cpu, memory, pods, gpus := r.node(i)
	if r.down[i] || cpu+q.MilliCPU > spec.MilliCPU || memory+q.MemoryMiB > spec.MemoryMiB || spec.Pods > 0 && pods >= spec.Pods {
		return false
	}
	if q.Count == 0 {
		return true
	}
	if len(q.Products) > 0 && !slices.Contains(q.Products, spec.Product) {
		return false
	}
	if q.Profile != "" {
		return spec.MIG != nil && spec.MIG.ByName(q.Profile) != nil && cuts(spec, gpus, q, q.Count, 0)
	}
	return chooses(spec, gpus, q, nil, 0)
}

// cuts tries every way to cut n more MIG devices, from a placement on.
func cuts(spec *placement.NodeSpec, gpus []booked, q *placement.Request, n, from int) bool {
	if n == 0 {
		return true
	}
	places := spec.MIG.ByName(q.Profile).Placements
	for at := from; at < len(gpus)*len(places); at++ {
		g, start := at/len(places), places[at%len(places)].Start
		if !offers(spec, g, gpus[g], q, start) {
			continue
		}
		before := gpus[g]
		gpus[g].book(spec, q, start)
		if cuts(spec, gpus, q, n-1, at+1) {
			return true
		}
		gpus[g] = before
	}
	return false
}

// chooses tries every set of GPUs that contains chosen, from a GPU on.
func chooses(spec *placement.NodeSpec, gpus []booked, q *placement.Request, chosen []int, from int) bool {
	if len(chosen) == q.Count {
		return true
	}
	for g := from; g < len(gpus); g++ {
		linked := func(h int) bool { return connected(spec, q.Links, g, h) }
		if offers(spec, g, gpus[g], q, 0) && !slices.ContainsFunc(chosen, func(h int) bool { return !linked(h) }) &&
			chooses(spec, gpus, q, append(slices.Clip(chosen), g), g+1) {
			return true
		}
	}
	return false
}

// fitsAny says whether any node can run the request.
func (r *reference) fitsAny(q *placement.Request) bool {
	for i := range r.specs {
		if r.fits(i, q) {
			return true
		}
	}
	return false
}

// verify applies the list to an empty cluster, one device after the other, and
// names the first that cannot be.
func (r *reference) verify() error {
	done := reference{specs: r.specs}
	for k := range r.jobs {
		j := &r.jobs[k]
		if err := done.possible(j); err != nil {
			return fmt.Errorf("job %d, %+v as %+v: %w", k, j.request, j.plan, err)
		}
		done.jobs = r.jobs[:k+1]
	}
	return nil
}

// possible says what is wrong with a job on top of the list.
func (r *reference) possible(j *job) error {
	q, p := &j.request, &j.plan
	if p.Node < 0 || p.Node >= len(r.specs) {
		return fmt.Errorf("there is no node %d", p.Node)
	}
	spec := &r.specs[p.Node]
	cpu, memory, pods, gpus := r.node(p.Node)
	switch {
	case r.down[p.Node]:
		return fmt.Errorf("node %d is down", p.Node)
	case cpu+q.MilliCPU > spec.MilliCPU:
		return fmt.Errorf("%d of %d thousandths of a core", cpu+q.MilliCPU, spec.MilliCPU)
	case memory+q.MemoryMiB > spec.MemoryMiB:
		return fmt.Errorf("%d of %d MiB", memory+q.MemoryMiB, spec.MemoryMiB)
	case spec.Pods > 0 && pods+1 > spec.Pods:
		return fmt.Errorf("%d of %d pods", pods+1, spec.Pods)
	case p.Devices != q.Count:
		return fmt.Errorf("%d devices, not %d", p.Devices, q.Count)
	case q.Count > 0 && len(q.Products) > 0 && !slices.Contains(q.Products, spec.Product):
		return fmt.Errorf("product %s is not one of %q", spec.Product, q.Products)
	}
	for d, g := range p.GPU[:p.Devices] {
		if int(g) >= spec.GPUs {
			return fmt.Errorf("there is no GPU %d", g)
		}
		if q.Profile == "" && slices.Contains(p.GPU[:d], g) {
			return fmt.Errorf("GPU %d twice", g)
		}
		for _, h := range p.GPU[:d] {
			if g != h && !connected(spec, q.Links, int(g), int(h)) {
				return fmt.Errorf("GPUs %d and %d are not linked as wanted", g, h)
			}
		}
		b := &gpus[g]
		if !offers(spec, int(g), *b, q, int(p.Start[d])) {
			return fmt.Errorf("GPU %d, given out as %+v, has no such device", g, *b)
		}
		b.book(spec, q, int(p.Start[d]))
	}
	return nil
}

// drawSpecs draws the nodes of a cluster.
func drawSpecs(t *rapid.T, most int) []placement.NodeSpec {
	specs := make([]placement.NodeSpec, rapid.IntRange(1, most).Draw(t, "nodes"))
	for i := range specs {
		specs[i] = drawSpec(t, fmt.Sprintf("node-%d", i))
	}
	return specs
}

func drawSpec(t *rapid.T, name string) placement.NodeSpec {
	s := placement.NodeSpec{
		Name:      name,
		MilliCPU:  rapid.SampledFrom([]int{4000, 16000, 64000}).Draw(t, "cpu"),
		MemoryMiB: rapid.SampledFrom([]int{8192, 65536}).Draw(t, "memory"),
		Pods:      rapid.SampledFrom([]int{0, 0, 0, 5}).Draw(t, "pods"),
		GPUs:      rapid.SampledFrom([]int{0, 1, 2, 3, 4, 4, 8, 16}).Draw(t, "gpus"),
	}
	if s.GPUs == 0 {
		return s
	}
	product := gpu.ProductByKey(rapid.SampledFrom([]string{"A100-40", "A100-40", "A30", "T4", "H100-80"}).Draw(t, "product"))
	s.Product = product.Key
	if rapid.Bool().Draw(t, "memory known") {
		s.GPUMemoryMiB = product.MemoryMiB
	}
	s.Links = rapid.SampledFrom([]placement.LinkClass{placement.AnyLink, placement.SameNUMA, placement.NVLinked}).Draw(t, "class")
	s.Slots = rapid.SampledFrom([]int{0, 0, 2, 4, 10}).Draw(t, "slots")
	if s.Product == "A100-40" || s.Product == "A30" {
		s.MIG = product.MIG
	}
	switch rapid.SampledFrom([]string{"", "", "bridges", "switch", "blocks", "sockets"}).Draw(t, "links") {
	case "bridges":
		s.Machine = build(s.GPUs, s.GPUs/2, gpu.PCIeHostBridge)
		for g := 0; g+1 < s.GPUs; g += 2 {
			s.Machine.Links.Merge(g, g+1, gpu.Link{NVLinks: rapid.SampledFrom([]int{0, 4, 12}).Draw(t, "nvlinks")})
		}
	case "switch":
		s.Machine = nvswitch(s.GPUs)
	case "blocks":
		s.Machine = blocks(s.GPUs, rapid.IntRange(2, 4).Draw(t, "size"))
	case "sockets":
		s.Machine = build(s.GPUs, rapid.IntRange(0, s.GPUs).Draw(t, "first socket"), gpu.PCIeNode)
	}
	if s.Machine != nil {
		state := rapid.SampledFrom([]gpu.HealthState{gpu.Healthy, gpu.Healthy, gpu.Healthy, gpu.Healthy, gpu.Unhealthy, gpu.Lost})
		for g := range s.Machine.GPUs {
			s.Machine.GPUs[g].Health.State = state.Draw(t, "health")
		}
	}
	return s
}

// drawPod draws a request. Only whole GPUs get a condition on their links.
func drawPod(t *rapid.T) placement.Request {
	r := placement.Request{
		MilliCPU:  rapid.SampledFrom([]int{0, 500, 700, 2000}).Draw(t, "cpu"),
		MemoryMiB: rapid.SampledFrom([]int{0, 512, 4096}).Draw(t, "memory"),
	}
	switch rapid.SampledFrom([]string{"none", "whole", "whole", "share", "share", "slot", "mig", "mig"}).Draw(t, "kind") {
	case "none":
		return r
	case "whole":
		r.Milli = placement.Whole
		r.Count = rapid.SampledFrom([]int{1, 1, 2, 2, 3, 4, 8}).Draw(t, "count")
		r.Links = rapid.SampledFrom([]placement.LinkClass{placement.AnyLink, placement.AnyLink, placement.SameNUMA, placement.NVLinked}).Draw(t, "class")
		r.GPUMemoryMiB = rapid.SampledFrom([]int{0, 0, 0, 20000, 40960}).Draw(t, "gpu memory")
	case "share":
		r.Milli = rapid.SampledFrom([]int{1, 100, 250, 300, 500, 700, 999}).Draw(t, "milli")
		r.Count = rapid.SampledFrom([]int{1, 1, 1, 2, 3}).Draw(t, "count")
		r.GPUMemoryMiB = rapid.SampledFrom([]int{0, 0, 4096, 15360}).Draw(t, "gpu memory")
	case "slot":
		r.Slot = true
		r.Count = rapid.SampledFrom([]int{1, 1, 2, 4}).Draw(t, "count")
	case "mig":
		table := gpu.ProductByKey(rapid.SampledFrom([]string{"A100-40", "A100-40", "A30"}).Draw(t, "table")).MIG
		r.Profile = rapid.SampledFrom(table.Names()).Draw(t, "profile")
		r.Count = rapid.IntRange(1, 3).Draw(t, "count")
	}
	r.Products = rapid.SampledFrom([][]string{nil, nil, nil, nil, {"A100-40"}, {"A30", "T4"}, {"Z"}}).Draw(t, "products")
	return r
}

// drawMix draws the requests of a run. They are few, so that each comes often.
func drawMix(t *rapid.T) []placement.Request {
	return rapid.SliceOfN(rapid.Custom(drawPod), 3, 10).Draw(t, "mix")
}
