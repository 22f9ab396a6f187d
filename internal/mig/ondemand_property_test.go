package mig

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// demandWorld is nodes, their agents, pods and a scheduler, without a controller.
type demandWorld struct {
	t       *rapid.T
	now     time.Time
	policy  OnDemandPolicy
	gpus    []*worldGPU
	waiting []Demand
	running map[string]*worldPod
	pods    int
	// changedAt is when the spec of a GPU was last changed in a way that takes
	// something away.
	changedAt map[string]time.Time
}

type worldGPU struct {
	node    string
	index   int
	uuid    string
	table   *gpu.MIGTable
	enabled bool
	usable  bool
	holder  string
	devices map[gpu.MIGInstance]string // with the pod that holds it
	wanted  *WantedGeometry
	idle    time.Time
}

type worldPod struct {
	demand Demand
	node   string
	seen   bool // the status tells of it
}

var worldProducts = []string{"A100-40", "A30", "H100-80", "L40S"}

func newDemandWorld(t *rapid.T) *demandWorld {
	w := &demandWorld{
		t: t, now: time.Unix(1_700_000_000, 0), running: make(map[string]*worldPod), changedAt: make(map[string]time.Time),
		policy: OnDemandPolicy{MinLife: 2 * time.Minute, IdleAfter: 5 * time.Minute, MadeWithin: 5 * time.Minute},
	}
	for n := range rapid.IntRange(1, 3).Draw(t, "nodes") {
		product := gpu.ProductByKey(rapid.SampledFrom(worldProducts).Draw(t, "product"))
		for i := range rapid.IntRange(1, 3).Draw(t, "gpus") {
			w.gpus = append(w.gpus, &worldGPU{
				node: fmt.Sprintf("n%d", n), index: i, uuid: fmt.Sprintf("GPU-%d-%d", n, i), table: product.MIG, usable: true,
				devices: make(map[gpu.MIGInstance]string), idle: w.now,
			})
		}
	}
	return w
}

// hidden says whether a holder is not in the status yet.
func (w *demandWorld) hidden(pod string) bool { return pod != "" && !w.running[pod].seen }

func (w *demandWorld) visible() []DemandGPU {
	var list []DemandGPU
	for _, g := range w.gpus {
		d := DemandGPU{
			Node: g.node, Index: g.index, UUID: g.uuid, Table: g.table, Usable: g.usable, Enabled: g.enabled, Wanted: g.wanted,
			Held: g.holder != "" && !w.hidden(g.holder), IdleSince: g.idle,
		}
		for in, pod := range g.devices {
			d.Devices = append(d.Devices, DemandDevice{in, pod != "" && !w.hidden(pod)})
		}
		if d.busy() {
			d.IdleSince = time.Time{}
		}
		list = append(list, d)
	}
	return rapid.Permutation(list).Draw(w.t, "order")
}

func (w *demandWorld) demands() []Demand {
	list := slices.Clone(w.waiting)
	for _, name := range slices.Sorted(maps.Keys(w.running)) {
		if p := w.running[name]; !p.seen {
			d := p.demand
			d.Nodes, d.Bound = []string{p.node}, true
			list = append(list, d)
		}
	}
	return list
}

func (w *demandWorld) arrive() {
	w.pods++
	d := Demand{Pod: fmt.Sprintf("p%03d", w.pods), Since: w.now}
	kinds := []string{WholeGPU, "mig-1g.5gb", "mig-1g.5gb", "mig-3g.20gb", "mig-4g.20gb", "mig-1g.10gb", "mig-7g.40gb", "mig-2g.12gb", "mig-1g.6gb.me", "mig-3g.40gb", "mig-9g.9gb"}
	for range rapid.SampledFrom([]int{1, 1, 1, 2}).Draw(w.t, "wants") {
		d.Wants = append(d.Wants, Want{rapid.SampledFrom(kinds).Draw(w.t, "resource"), rapid.SampledFrom([]int{1, 1, 1, 2, 3}).Draw(w.t, "count")})
	}
	if rapid.IntRange(0, 3).Draw(w.t, "bound to a node") == 0 {
		d.Nodes = []string{rapid.SampledFrom(w.gpus).Draw(w.t, "node").node}
	}
	w.waiting = append(w.waiting, d)
}

func (w *demandWorld) depart() {
	if len(w.waiting) > 0 && rapid.Bool().Draw(w.t, "a waiting one") {
		i := rapid.IntRange(0, len(w.waiting)-1).Draw(w.t, "pod")
		w.waiting = slices.Delete(w.waiting, i, i+1)
		return
	}
	if len(w.running) == 0 {
		return
	}
	name := rapid.SampledFrom(slices.Sorted(maps.Keys(w.running))).Draw(w.t, "pod")
	delete(w.running, name)
	for _, g := range w.gpus {
		if g.holder == name {
			g.holder, g.idle = "", w.now
		}
		for in, pod := range g.devices {
			if pod == name {
				g.devices[in], g.idle = "", w.now
			}
		}
	}
}

// schedule puts a waiting pod on a node that has all it wants.
func (w *demandWorld) schedule() {
	if len(w.waiting) == 0 {
		return
	}
	i := rapid.IntRange(0, len(w.waiting)-1).Draw(w.t, "pod")
	d := w.waiting[i]
	for _, node := range []string{"n0", "n1", "n2"} {
		if d.Nodes != nil && !slices.Contains(d.Nodes, node) {
			continue
		}
		var take []func()
		used := make(map[string]bool)
		good := true
		for _, want := range d.Wants {
			for range want.Count {
				found := w.pick(node, want.Resource, d.Pod, used)
				if good = good && found != nil; found != nil {
					take = append(take, found)
				}
			}
		}
		if !good {
			continue
		}
		for _, f := range take {
			f()
		}
		w.running[d.Pod] = &worldPod{demand: d, node: node, seen: rapid.Bool().Draw(w.t, "seen")}
		w.waiting = slices.Delete(w.waiting, i, i+1)
		return
	}
}

// pick finds a free device, and returns what takes it.
func (w *demandWorld) pick(node, resource, pod string, used map[string]bool) func() {
	for _, g := range w.gpus {
		if g.node != node {
			continue
		}
		if resource == WholeGPU && !g.enabled && g.holder == "" && !used[g.uuid] {
			used[g.uuid] = true
			return func() { g.holder, g.idle = pod, time.Time{} }
		}
		for _, in := range sortedInstances(g.devices) {
			key := fmt.Sprint(g.uuid, in)
			if g.devices[in] == "" && g.table.ByID(in.ProfileID).Resource() == resource && !used[key] {
				used[key] = true
				return func() { g.devices[in], g.idle = pod, time.Time{} }
			}
		}
	}
	return nil
}

func sortedInstances(devices map[gpu.MIGInstance]string) []gpu.MIGInstance {
	return slices.SortedFunc(maps.Keys(devices), func(a, b gpu.MIGInstance) int { return a.Placement.Start - b.Placement.Start })
}

func (w *demandWorld) reveal() {
	for _, p := range w.running {
		p.seen = true
	}
}

// make lets the agent of a GPU do what is wanted, if nobody is in the way.
func (w *demandWorld) make(g *worldGPU) {
	if g.wanted == nil {
		return
	}
	on := len(g.wanted.Instances) > 0
	if on != g.enabled && (g.holder != "" || slices.ContainsFunc(slices.Collect(maps.Values(g.devices)), func(p string) bool { return p != "" })) {
		return
	}
	for in, pod := range g.devices {
		if pod != "" && !slices.Contains(g.wanted.Instances, in) {
			return
		}
	}
	g.enabled = on
	for in := range g.devices {
		if !slices.Contains(g.wanted.Instances, in) {
			delete(g.devices, in)
		}
	}
	for _, in := range g.wanted.Instances {
		if _, have := g.devices[in]; !have {
			g.devices[in] = ""
		}
	}
}

// control decides, checks the decisions, and writes them into the spec. It returns
// how many there were.
func (w *demandWorld) control() int {
	gpus := w.visible()
	plan := OnDemand(w.now, gpus, w.demands(), w.policy)
	for _, d := range plan.Decisions {
		g := w.gpus[slices.IndexFunc(w.gpus, func(g *worldGPU) bool { return g.uuid == d.UUID })]
		w.check(g, gpus[slices.IndexFunc(gpus, func(v DemandGPU) bool { return v.UUID == d.UUID })], d)
		g.wanted = &WantedGeometry{Instances: d.Instances, Since: w.now}
	}
	return len(plan.Decisions)
}

// check checks one decision.
func (w *demandWorld) check(g *worldGPU, v DemandGPU, d Decision) {
	if d.Node != g.node || d.Index != g.index || d.Reason == "" {
		w.t.Fatalf("decision %+v is not about GPU %d of %s, or has no reason", d, g.index, g.node)
	}
	// What is wanted can be made.
	units, sliced := make(map[int]bool), 0
	for _, in := range d.Instances {
		p := g.table.ByID(in.ProfileID)
		if p == nil || !slices.Contains(p.Placements, in.Placement) {
			w.t.Fatalf("%s: %v is no device of the product", g.uuid, in)
		}
		sliced += p.Slices
		for u := range in.Placement.Size {
			if units[in.Placement.Start+u] {
				w.t.Fatalf("%s: %v overlaps", g.uuid, d.Instances)
			}
			units[in.Placement.Start+u] = true
		}
	}
	if len(d.Instances) > 0 && sliced > g.table.Slices {
		w.t.Fatalf("%s: %v has %d of %d slices", g.uuid, d.Instances, sliced, g.table.Slices)
	}
	// What is held stays, and beside it all that is there.
	if v.Held && len(d.Instances) > 0 {
		w.t.Fatalf("%s: %v, but it is held as a whole", g.uuid, d)
	}
	if v.busy() {
		for _, dev := range v.Devices {
			if !slices.Contains(d.Instances, dev.MIGInstance) {
				w.t.Fatalf("%s: %v takes %v from a GPU that is held", g.uuid, d, dev)
			}
		}
	}
	// What is held by a pod of which the status does not tell stays, unless the
	// spec said so before the pod came.
	had := func(in gpu.MIGInstance) bool { return g.wanted == nil || slices.Contains(g.wanted.Instances, in) }
	for in, pod := range g.devices {
		if w.hidden(pod) && had(in) && !slices.Contains(d.Instances, in) {
			w.t.Fatalf("%s: %v takes %v away, which %s was given", g.uuid, d, in, pod)
		}
	}
	if w.hidden(g.holder) && (g.wanted == nil || len(g.wanted.Instances) == 0) && len(d.Instances) > 0 {
		w.t.Fatalf("%s: %v cuts what %s was given", g.uuid, d, g.holder)
	}
	// Nothing is taken away twice within MinLife. To go back to what is there takes
	// nothing away.
	before := wantedBefore(v)
	if takesAway(before, d.Instances) && !goesBack(v, d) {
		if last, ok := w.changedAt[g.uuid]; ok && w.now.Sub(last) < w.policy.MinLife {
			w.t.Fatalf("%s: %v after %s", g.uuid, d, w.now.Sub(last))
		}
		w.changedAt[g.uuid] = w.now
	}
}

// wantedBefore is what was wanted of a GPU.
func wantedBefore(v DemandGPU) []gpu.MIGInstance {
	if v.Wanted != nil {
		return v.Wanted.Instances
	}
	var list []gpu.MIGInstance
	for _, d := range v.Devices {
		list = append(list, d.MIGInstance)
	}
	return list
}

func takesAway(before, after []gpu.MIGInstance) bool {
	if len(before) == 0 {
		return len(after) > 0 // the whole GPU
	}
	return slices.ContainsFunc(before, func(in gpu.MIGInstance) bool { return !slices.Contains(after, in) })
}

// goesBack says whether a decision keeps all that is there.
func goesBack(v DemandGPU, d Decision) bool {
	if !v.busy() {
		return false
	}
	return !slices.ContainsFunc(v.Devices, func(dev DemandDevice) bool { return !slices.Contains(d.Instances, dev.MIGInstance) })
}

func TestOnDemandUnderRandomArrivals(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newDemandWorld(t)
		t.Repeat(map[string]func(*rapid.T){
			"arrive":   func(*rapid.T) { w.arrive() },
			"arrive2":  func(*rapid.T) { w.arrive() },
			"depart":   func(*rapid.T) { w.depart() },
			"schedule": func(*rapid.T) { w.schedule() },
			"reveal":   func(*rapid.T) { w.reveal() },
			"make": func(t *rapid.T) {
				w.make(rapid.SampledFrom(w.gpus).Draw(t, "gpu"))
			},
			"break": func(t *rapid.T) {
				g := rapid.SampledFrom(w.gpus).Draw(t, "gpu")
				g.usable = !g.usable
			},
			"wait": func(t *rapid.T) {
				w.now = w.now.Add(time.Duration(rapid.IntRange(1, 150).Draw(t, "seconds")) * time.Second)
			},
			"control": func(*rapid.T) { w.control() },
		})
		// With the same pods and holders for ever, the spec comes to rest.
		w.reveal()
		for range 2*len(w.gpus) + 3 {
			for _, g := range w.gpus {
				w.make(g)
			}
			w.now = w.now.Add(w.policy.IdleAfter + w.policy.MinLife)
			if w.control() == 0 {
				return
			}
		}
		t.Fatal("the spec does not come to rest")
	})
}

// TestOnDemandDoesNotCutTwice: the same question again, with the answer to the
// first in the spec, asks for nothing more.
func TestOnDemandDoesNotCutTwice(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newDemandWorld(t)
		for range rapid.IntRange(1, 12).Draw(t, "pods") {
			w.arrive()
			w.now = w.now.Add(time.Second)
			w.control()
			for _, g := range w.gpus {
				if rapid.Bool().Draw(t, "make") {
					w.make(g)
				}
			}
			w.schedule()
			w.reveal()
		}
		w.control()
		if n := w.control(); n > 0 {
			t.Fatalf("%d more changes", n)
		}
	})
}

// TestOnDemandLeavesEnoughAlone: where every pod finds an idle device, nothing
// changes.
func TestOnDemandLeavesEnoughAlone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := newDemandWorld(t)
		for range rapid.IntRange(1, 12).Draw(t, "pods") {
			w.arrive()
		}
		w.control()
		for _, g := range w.gpus {
			w.make(g)
			g.usable = true
		}
		w.waiting = nil
		for _, g := range w.gpus {
			for _, in := range sortedInstances(g.devices) {
				if rapid.Bool().Draw(t, "device") {
					w.waiting = append(w.waiting, Demand{Pod: fmt.Sprint(g.uuid, in), Wants: []Want{{g.table.ByID(in.ProfileID).Resource(), 1}}, Since: w.now})
				}
			}
			if !g.enabled && rapid.Bool().Draw(t, "whole") {
				w.waiting = append(w.waiting, Demand{Pod: g.uuid, Wants: []Want{{WholeGPU, 1}}, Since: w.now})
			}
		}
		w.now = w.now.Add(w.policy.MinLife)
		if n := w.control(); n > 0 {
			t.Fatalf("%d changes", n)
		}
	})
}

// TestOnDemandCutsFewGPUs compares the number of GPUs that are cut for pods that
// come in groups of one profile, each after those before hold their devices, with
// the least that a search of all ways finds.
func TestOnDemandCutsFewGPUs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		table := gpu.ProductByKey(rapid.SampledFrom([]string{"A100-40", "A30"}).Draw(t, "product")).MIG
		var gpus []DemandGPU
		for i := range 6 {
			gpus = append(gpus, DemandGPU{Node: fmt.Sprintf("n%d", i%rapid.IntRange(1, 2).Draw(t, "nodes")), Index: i, UUID: fmt.Sprint("GPU-", i), Table: table, Usable: true})
		}
		now := time.Unix(1_700_000_000, 0)
		for range rapid.IntRange(1, 4).Draw(t, "groups") {
			p := &table.Profiles[rapid.IntRange(0, len(table.Profiles)-1).Draw(t, "profile")]
			count := rapid.IntRange(1, 8).Draw(t, "count")
			room, whole := 0, 0
			for _, g := range gpus {
				if !g.Enabled {
					whole++
					continue
				}
				room += mostOf(table, wantedBefore(g), p)
			}
			least := max(0, (count-room+mostOf(table, nil, p)-1)/mostOf(table, nil, p))
			if least > whole {
				continue
			}
			var pods []Demand
			for i := range count {
				pods = append(pods, Demand{Pod: fmt.Sprint(i), Wants: []Want{{p.Resource(), 1}}, Since: now})
			}
			plan := OnDemand(now, gpus, pods, DefaultOnDemandPolicy())
			if len(plan.Unserved) > 0 {
				t.Fatalf("unserved: %v", plan.Unserved)
			}
			cut := 0
			for _, d := range plan.Decisions {
				i := slices.IndexFunc(gpus, func(g DemandGPU) bool { return g.UUID == d.UUID })
				if !gpus[i].Enabled {
					cut++
				}
				gpus[i].Enabled, gpus[i].Devices = true, nil
				for _, in := range d.Instances {
					gpus[i].Devices = append(gpus[i].Devices, DemandDevice{in, true})
				}
			}
			if cut != least {
				t.Fatalf("%d GPUs are cut for %d of %s, and %d would do", cut, count, p.Name, least)
			}
		}
	})
}

// mostOf is how many devices of a profile can be added, by trying all ways.
func mostOf(t *gpu.MIGTable, geometry []gpu.MIGInstance, p *gpu.MIGProfile) int {
	most := 0
	for _, at := range t.Free(geometry, p.ID) {
		more := append(slices.Clone(geometry), gpu.MIGInstance{ProfileID: p.ID, Placement: at})
		most = max(most, 1+mostOf(t, more, p))
	}
	return most
}
