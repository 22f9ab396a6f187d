package placement_test

import (
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// fataler is what *testing.T, *testing.B and *rapid.T have in common.
type fataler interface {
	Helper()
	Fatal(args ...any)
	Fatalf(format string, args ...any)
}

func newCluster(t fataler, specs ...placement.NodeSpec) *placement.Cluster {
	t.Helper()
	c, err := placement.NewCluster(specs)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func classes(t fataler, c *placement.Cluster, requests ...placement.Request) []placement.ClassID {
	t.Helper()
	var list []placement.ClassID
	for _, r := range requests {
		id, err := c.Class(r)
		if err != nil {
			t.Fatal(err)
		}
		list = append(list, id)
	}
	return list
}

func newPlacer(t fataler, c *placement.Cluster, p placement.Policy, mix []placement.Request) *placement.Placer {
	t.Helper()
	placer, err := placement.NewPlacer(c, p, mix)
	if err != nil {
		t.Fatal(err)
	}
	return placer
}

func policy(t fataler, name string) placement.Policy {
	t.Helper()
	p, err := placement.PolicyByName(name)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

func apply(t fataler, c *placement.Cluster, plans ...placement.Plan) {
	t.Helper()
	for i := range plans {
		if err := c.Apply(&plans[i]); err != nil {
			t.Fatal(err)
		}
	}
}

// on is the plan for devices on these GPUs of a node.
func on(id placement.ClassID, node int, gpus ...uint8) placement.Plan {
	p := placement.Plan{Class: id, Node: node, Devices: len(gpus)}
	copy(p.GPU[:], gpus)
	return p
}

// at is the plan for one MIG device.
func at(id placement.ClassID, node int, g, start uint8) placement.Plan {
	p := on(id, node, g)
	p.Start[0] = start
	return p
}

// variants are the built-in policies and each with the ways of kube-scheduler.
func variants() []placement.Policy {
	var list []placement.Policy
	for _, p := range placement.Policies() {
		p.Seed = 42
		list = append(list, p)
		squeezed, random := p, p
		squeezed.Name, squeezed.Squeeze = p.Name+"/squeeze", true
		random.Name, random.RandomTies = p.Name+"/random-ties", true
		both := squeezed
		both.Name, both.RandomTies = p.Name+"/squeeze/random-ties", true
		list = append(list, squeezed, random, both)
	}
	return list
}

// draws says whether the choices of a policy depend on what it drew before.
func draws(p placement.Policy) bool {
	return p.RandomTies || strings.HasPrefix(p.Name, "random")
}

// decision is what a placer answers to one request.
type decision struct {
	Plan placement.Plan
	OK   bool
	Why  placement.Reason
}

func decide(p *placement.Placer, list []placement.ClassID) []decision {
	var ds []decision
	for _, id := range list {
		d := decision{}
		if d.Plan, d.OK = p.Place(id); !d.OK {
			d.Why = p.Explain(id)
		}
		ds = append(ds, d)
	}
	return ds
}

// observation is all that can be told of a cluster from outside, with what new
// placers decide.
type observation struct {
	Fit        [][]placement.Code
	Free       int
	Fragmented float64
	Decisions  map[string][]decision
}

func observe(t fataler, c *placement.Cluster, list []placement.ClassID, mix []placement.Request, policies ...placement.Policy) observation {
	t.Helper()
	o := observation{Decisions: make(map[string][]decision)}
	for i := range c.Len() {
		var row []placement.Code
		for _, id := range list {
			row = append(row, c.Fit(i, id))
		}
		o.Fit = append(o.Fit, row)
	}
	m, err := placement.NewMeter(c, mix)
	if err != nil {
		t.Fatal(err)
	}
	o.Free, o.Fragmented = m.Free(), m.Fragmented()
	for _, p := range policies {
		placer := newPlacer(t, c, p, mix)
		for _, id := range list {
			placer.Learn(id)
		}
		o.Decisions[p.Name] = decide(placer, list)
	}
	return o
}

// world is a cluster with the reference that it must agree with.
type world struct {
	c       *placement.Cluster
	placer  *placement.Placer
	mix     []placement.Request
	classes []placement.ClassID
	ref     reference
}

func drawWorld(t *rapid.T) *world {
	w := &world{mix: drawMix(t), ref: reference{down: make(map[int]bool)}}
	w.ref.specs = drawSpecs(t, 4)
	w.c = newCluster(t, w.ref.specs...)
	w.classes = classes(t, w.c, w.mix...)
	w.placer = newPlacer(t, w.c, rapid.SampledFrom(variants()).Draw(t, "policy"), w.mix)
	return w
}

// arrive places one request and checks the answer, whatever it is.
func (w *world) arrive(t *rapid.T) {
	i := rapid.IntRange(0, len(w.mix)-1).Draw(t, "request")
	id, q := w.classes[i], &w.mix[i]
	if rapid.Bool().Draw(t, "learn") {
		w.placer.Learn(id)
	}
	plan, ok := w.placer.Place(id)
	if want := w.ref.fitsAny(q); ok != want {
		t.Fatalf("Place(%+v) says %v, but that it fits is %v; jobs: %+v", *q, ok, want, w.ref.jobs)
	}
	if !ok {
		w.explain(t, id)
		return
	}
	if plan.Class != id {
		t.Fatalf("plan for class %d, want %d", plan.Class, id)
	}
	j := job{*q, plan}
	if err := w.ref.possible(&j); err != nil {
		t.Fatalf("Place(%+v) = %+v: %v; jobs: %+v", *q, plan, err, w.ref.jobs)
	}
	if err := w.c.Apply(&plan); err != nil {
		t.Fatalf("%+v as %+v: %v", *q, plan, err)
	}
	w.ref.jobs = append(w.ref.jobs, j)
}

func (w *world) explain(t *rapid.T, id placement.ClassID) {
	why := w.placer.Explain(id)
	sum := 0
	for _, n := range why.Nodes {
		sum += n
	}
	if why.Code == placement.Fits || why.Nodes[placement.Fits] != 0 || sum != w.c.Len() || why.Need < 0 || why.Free < 0 {
		t.Fatalf("%d nodes, reason %+v", w.c.Len(), why)
	}
}

func (w *world) remove(t *rapid.T) {
	if len(w.ref.jobs) == 0 {
		return
	}
	i := rapid.IntRange(0, len(w.ref.jobs)-1).Draw(t, "job")
	if err := w.c.Remove(&w.ref.jobs[i].plan); err != nil {
		t.Fatal(err)
	}
	w.ref.jobs = slices.Delete(slices.Clone(w.ref.jobs), i, i+1)
}

// down takes a node out or back in.
func (w *world) down(t *rapid.T) {
	i := rapid.IntRange(0, w.c.Len()-1).Draw(t, "node")
	w.ref.down[i] = rapid.IntRange(0, 2).Draw(t, "down") == 0
	w.c.SetDown(i, w.ref.down[i])
}

// fork changes the cluster in a fork that may hold others.
func (w *world) fork(t *rapid.T, depth int) {
	before := slices.Clone(w.ref.jobs)
	commit := rapid.Bool().Draw(t, "commit")
	w.c.Fork(func() bool {
		w.steps(t, depth)
		return commit
	})
	if !commit {
		w.ref.jobs = before
	}
}

func (w *world) steps(t *rapid.T, depth int) {
	for range rapid.IntRange(0, 4).Draw(t, "steps") {
		switch rapid.IntRange(0, 4).Draw(t, "step") {
		case 0:
			w.remove(t)
		case 1:
			if depth < 3 {
				w.fork(t, depth+1)
			}
		default:
			w.arrive(t)
		}
	}
}

// agree compares the cluster with the reference as far as can be seen.
func (w *world) agree(t *rapid.T) {
	if err := w.ref.verify(); err != nil {
		t.Fatal(err)
	}
	for i := range w.ref.specs {
		for k, id := range w.classes {
			if got, want := w.c.Fit(i, id), w.ref.fits(i, &w.mix[k]); (got == placement.Fits) != want {
				t.Fatalf("Fit(%d, %+v) is %v, but that it fits is %v; jobs: %+v", i, w.mix[k], got, want, w.ref.jobs)
			}
		}
	}
}

// Whatever arrives, leaves or is tried, nothing is given out that is not there,
// and nothing is refused that fits.
func TestClusterEqualsReference(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		t.Repeat(map[string]func(*rapid.T){
			"":       w.agree,
			"arrive": w.arrive,
			"again":  w.arrive, // more arrive than leave
			"remove": w.remove,
			"fork":   func(t *rapid.T) { w.fork(t, 0) },
			"down":   w.down,
		})
	})
}

// A fork that is not committed leaves nothing behind that a decision depends on.
func TestForkIsUndone(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		w := drawWorld(t)
		meter, err := placement.NewMeter(w.c, w.mix)
		if err != nil {
			t.Fatal(err)
		}
		free := func() int {
			for i := range w.c.Len() {
				meter.Update(i)
			}
			return meter.Free()
		}
		for range rapid.IntRange(0, 12).Draw(t, "arrivals") {
			w.arrive(t)
		}
		before, freeBefore, jobs := observe(t, w.c, w.classes, w.mix, variants()...), free(), slices.Clone(w.ref.jobs)
		panics := rapid.Bool().Draw(t, "panics")
		func() {
			defer func() {
				if r := recover(); r != nil && r != "as planned" {
					panic(r)
				}
			}()
			w.c.Fork(func() bool {
				w.steps(t, 0)
				w.arrive(t)
				free()
				if panics {
					w.c.Fork(func() bool {
						w.steps(t, 3)
						panic("as planned")
					})
				}
				return false
			})
		}()
		w.ref.jobs = jobs
		w.agree(t)
		if diff := cmp.Diff(before, observe(t, w.c, w.classes, w.mix, variants()...)); diff != "" {
			t.Fatalf("-before +after:\n%s", diff)
		}
		if after := free(); after != freeBefore {
			t.Fatalf("%d thousandths are free, before %d", after, freeBefore)
		}
		// Later forks are not confused by it either.
		w.steps(t, 0)
		w.agree(t)
	})
}

func TestForkNesting(t *testing.T) {
	share := placement.Request{MilliCPU: 1000, Count: 1, Milli: 100}
	for _, tt := range []struct {
		name                        string
		outer, first, inner, second bool // of the outer fork, and three inside it: one, one in that, one more
		want                        int  // shares that are left
	}{
		{"all are committed", true, true, true, true, 4},
		{"the outer is undone", false, true, true, true, 0},
		{"the first is undone with what is in it", true, false, true, true, 2},
		{"the innermost alone is undone", true, true, false, true, 3},
		{"the last is undone", true, true, true, false, 3},
		{"none is committed", false, false, false, false, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster(t, placement.NodeSpec{Name: "a", MilliCPU: 4000, GPUs: 1})
			id := classes(t, c, share)[0]
			plan := on(id, 0, 0)
			c.Fork(func() bool {
				apply(t, c, plan)
				c.Fork(func() bool {
					apply(t, c, plan)
					c.Fork(func() bool {
						apply(t, c, plan)
						return tt.inner
					})
					return tt.first
				})
				c.Fork(func() bool {
					apply(t, c, plan)
					return tt.second
				})
				return tt.outer
			})
			m, err := placement.NewMeter(c, nil)
			if err != nil {
				t.Fatal(err)
			}
			if got := placement.Whole - m.Free(); got != 100*tt.want {
				t.Errorf("%d thousandths are taken, want %d", got, 100*tt.want)
			}
		})
	}
}

func TestForkPanicPasses(t *testing.T) {
	c := newCluster(t, placement.NodeSpec{Name: "a", GPUs: 1})
	id := classes(t, c, placement.Request{Count: 1, Milli: placement.Whole})[0]
	defer func() {
		if got := recover(); got != "boom" {
			t.Errorf("recovered %v", got)
		}
		if got := c.Fit(0, id); got != placement.Fits {
			t.Errorf("after the panic: %v", got)
		}
	}()
	c.Fork(func() bool {
		apply(t, c, on(id, 0, 0))
		panic("boom")
	})
}

// devicesNode has GPUs that can be given out in every way.
func devicesNode(name string, gpus int) placement.NodeSpec {
	p := gpu.ProductByKey("A100-40")
	return placement.NodeSpec{
		Name: name, MilliCPU: 8000, MemoryMiB: 8192, Pods: 4, GPUs: gpus,
		Product: p.Key, GPUMemoryMiB: p.MemoryMiB, Slots: 2, MIG: p.MIG,
	}
}

func TestApplyRefuses(t *testing.T) {
	mix := []placement.Request{
		{MilliCPU: 5000},                            // 0
		{MemoryMiB: 5000},                           // 1
		{},                                          // 2
		{Count: 1, Milli: placement.Whole},          // 3
		{Count: 2, Milli: 400},                      // 4
		{Count: 1, Milli: 400},                      // 5
		{Count: 1, Slot: true},                      // 6
		{Count: 2, Slot: true},                      // 7
		{Count: 1, Profile: "3g.20gb"},              // 8
		{Count: 1, Profile: "4g.20gb"},              // 9
		{Count: 2, Profile: "1g.5gb"},               // 10
		{Count: 1, Profile: "1g.6gb"},               // 11: of another product
		{Count: 2, Milli: placement.Whole},          // 12
		{Count: 1, Milli: 100, GPUMemoryMiB: 30000}, // 13
		{Count: 1, Milli: placement.Whole, GPUMemoryMiB: 50000}, // 14
		{Count: 1, Profile: "1g.5gb+me"},                        // 15
	}
	long := on(3, 0, 0)
	long.Devices = placement.MaxGPUs + 1
	negative := on(3, 0)
	negative.Devices = -1
	two := func(id placement.ClassID, g, s, h, u uint8) placement.Plan {
		p := on(id, 0, g, h)
		p.Start[0], p.Start[1] = s, u
		return p
	}
	for _, tt := range []struct {
		name  string
		given []placement.Plan
		plan  placement.Plan
		want  error
		text  string
	}{
		{name: "class unknown", plan: on(99, 0), want: placement.ErrInvalid, text: "Class is 99: use an id that Class returned"},
		{name: "class negative", plan: on(-1, 0), want: placement.ErrInvalid, text: "Class is -1"},
		{name: "node unknown", plan: on(3, 2, 0), want: placement.ErrInvalid, text: "Node is 2: the cluster has 2 nodes"},
		{name: "node negative", plan: on(3, -1, 0), want: placement.ErrInvalid, text: "Node is -1"},
		{name: "too few devices", plan: on(4, 0, 0), want: placement.ErrInvalid, text: "Devices is 1: the request is for 2"},
		{name: "too many devices", plan: on(3, 0, 0, 1), want: placement.ErrInvalid, text: "Devices is 2: the request is for 1"},
		{name: "devices for none", plan: on(2, 0, 0), want: placement.ErrInvalid, text: "Devices is 1: the request is for 0"},
		{name: "more devices than a plan has", plan: long, want: placement.ErrInvalid, text: "Devices is 17"},
		{name: "fewer devices than none", plan: negative, want: placement.ErrInvalid, text: "Devices is -1"},
		{name: "GPU unknown", plan: on(4, 0, 0, 3), want: placement.ErrInvalid, text: `GPU[1] is 3: node "a" has 3 GPUs`},
		{name: "node without GPU", plan: on(3, 1, 0), want: placement.ErrInvalid, text: `GPU[0] is 0: node "b" has 0 GPUs`},

		{name: "CPU", given: []placement.Plan{on(0, 0)}, plan: on(0, 0), want: placement.ErrUnavailable},
		{name: "memory", given: []placement.Plan{on(1, 0)}, plan: on(1, 0), want: placement.ErrUnavailable},
		{name: "pods", given: []placement.Plan{on(2, 0), on(2, 0), on(2, 0), on(2, 0)}, plan: on(2, 0), want: placement.ErrUnavailable},
		{name: "whole GPU twice", given: []placement.Plan{on(3, 0, 1)}, plan: on(3, 0, 1), want: placement.ErrUnavailable},
		{name: "whole GPU twice in a plan", plan: on(12, 0, 1, 1), want: placement.ErrInvalid},
		{name: "second of two is taken", given: []placement.Plan{on(3, 0, 1)}, plan: on(12, 0, 0, 1), want: placement.ErrUnavailable},
		{name: "unhealthy", plan: on(3, 0, 2), want: placement.ErrUnavailable},
		{name: "unhealthy share", plan: on(5, 0, 2), want: placement.ErrUnavailable},
		{name: "unhealthy slot", plan: on(6, 0, 2), want: placement.ErrUnavailable},
		{name: "unhealthy MIG", plan: at(8, 0, 2, 0), want: placement.ErrUnavailable},
		{name: "share of a whole", given: []placement.Plan{on(3, 0, 0)}, plan: on(5, 0, 0), want: placement.ErrUnavailable},
		{name: "whole of a share", given: []placement.Plan{on(5, 0, 0)}, plan: on(3, 0, 0), want: placement.ErrUnavailable},
		{name: "slot of a share", given: []placement.Plan{on(5, 0, 0)}, plan: on(6, 0, 0), want: placement.ErrUnavailable},
		{name: "share of a slot", given: []placement.Plan{on(6, 0, 0)}, plan: on(5, 0, 0), want: placement.ErrUnavailable},
		{name: "MIG of a slot", given: []placement.Plan{on(6, 0, 0)}, plan: at(8, 0, 0, 0), want: placement.ErrUnavailable},
		{name: "slot of MIG", given: []placement.Plan{at(8, 0, 0, 0)}, plan: on(6, 0, 0), want: placement.ErrUnavailable},
		{name: "third share", given: []placement.Plan{on(5, 0, 0), on(5, 0, 0)}, plan: on(5, 0, 0), want: placement.ErrUnavailable},
		{name: "share without memory", given: []placement.Plan{on(13, 0, 0)}, plan: on(13, 0, 0), want: placement.ErrUnavailable},
		{name: "whole without memory", plan: on(14, 0, 0), want: placement.ErrUnavailable},
		{name: "third slot", given: []placement.Plan{on(6, 0, 0), on(6, 0, 0)}, plan: on(6, 0, 0), want: placement.ErrUnavailable},
		{name: "MIG start out of range", plan: at(8, 0, 0, 8), want: placement.ErrUnavailable},
		{name: "MIG start far out of range", plan: at(8, 0, 0, 255), want: placement.ErrUnavailable},
		{name: "MIG start not legal", plan: at(8, 0, 0, 1), want: placement.ErrUnavailable},
		{name: "MIG overlap", given: []placement.Plan{at(8, 0, 0, 0)}, plan: at(9, 0, 0, 0), want: placement.ErrUnavailable},
		{name: "MIG overlap of small and large", given: []placement.Plan{at(9, 0, 0, 0), at(8, 0, 0, 4)}, plan: at(15, 0, 0, 6), want: placement.ErrUnavailable},
		{name: "MIG most of a profile", given: []placement.Plan{at(15, 0, 0, 0)}, plan: at(15, 0, 0, 1), want: placement.ErrUnavailable},
		{name: "MIG same start twice in a plan", plan: two(10, 0, 3, 0, 3), want: placement.ErrUnavailable},
		{name: "MIG profile of another product", plan: at(11, 0, 0, 0), want: placement.ErrUnavailable},

		// Shares and slots are each on a GPU of their own, although one would
		// have room for both.
		{name: "two shares of one GPU", plan: on(4, 0, 0, 0), want: placement.ErrInvalid},
		{name: "two slots of one GPU", plan: on(7, 0, 1, 1), want: placement.ErrInvalid},
	} {
		t.Run(tt.name, func(t *testing.T) {
			a := devicesNode("a", 3)
			a.Machine = unhealthy(nvswitch(3), gpu.Lost, 2)
			c := newCluster(t, a, placement.NodeSpec{Name: "b"})
			list := classes(t, c, mix...)
			apply(t, c, tt.given...)
			before, plan := observe(t, c, list, mix, placement.Policies()...), tt.plan
			err := c.Apply(&plan)
			if !errors.Is(err, tt.want) || !strings.Contains(fmt.Sprint(err), tt.text) {
				t.Fatalf("error %v, want %v with %q", err, tt.want, tt.text)
			}
			if diff := cmp.Diff(before, observe(t, c, list, mix, placement.Policies()...)); diff != "" {
				t.Errorf("-before +after:\n%s", diff)
			}
			if diff := cmp.Diff(tt.plan, plan); diff != "" {
				t.Errorf("plan -before +after:\n%s", diff)
			}
		})
	}
}

func TestRemoveRefuses(t *testing.T) {
	mix := []placement.Request{
		{Count: 1, Milli: placement.Whole}, {Count: 2, Milli: 400}, {Count: 1, Slot: true}, {Count: 2, Profile: "3g.20gb"},
		{MilliCPU: 1000, MemoryMiB: 1024},
	}
	pair := on(3, 0, 0, 0)
	pair.Start[1] = 4
	half := pair
	half.Start[1] = 0
	for _, tt := range []struct {
		name  string
		given []placement.Plan // the first is removed beforehand
		plan  placement.Plan
	}{
		{"whole twice", []placement.Plan{on(0, 0, 1)}, on(0, 0, 1)},
		{"shares twice", []placement.Plan{on(1, 0, 0, 1)}, on(1, 0, 0, 1)},
		{"slot twice", []placement.Plan{on(2, 0, 0)}, on(2, 0, 0)},
		{"MIG twice", []placement.Plan{pair}, pair},
		{"without GPU twice", []placement.Plan{on(4, 0)}, on(4, 0)},
		{"never applied", []placement.Plan{on(0, 0, 1)}, on(2, 0, 0)},
		{"another GPU", []placement.Plan{on(4, 0), on(0, 0, 1)}, on(0, 0, 0)},
		{"another way", []placement.Plan{on(4, 0), on(0, 0, 1)}, on(2, 0, 1)},
		{"the second device was not given", []placement.Plan{on(4, 0), pair}, half},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster(t, devicesNode("a", 2))
			list := classes(t, c, mix...)
			apply(t, c, tt.given...)
			if err := c.Remove(&tt.given[0]); err != nil {
				t.Fatal(err)
			}
			before := observe(t, c, list, mix, placement.Policies()...)
			if err := c.Remove(&tt.plan); !errors.Is(err, placement.ErrInvalid) {
				t.Fatalf("error %v, want %v", err, placement.ErrInvalid)
			}
			if diff := cmp.Diff(before, observe(t, c, list, mix, placement.Policies()...)); diff != "" {
				t.Errorf("-before +after:\n%s", diff)
			}
		})
	}

	c := newCluster(t, devicesNode("a", 2))
	classes(t, c, mix...)
	for _, p := range []placement.Plan{on(99, 0), on(0, 7, 0), on(0, 0), on(0, 0, 2)} {
		if err := c.Remove(&p); !errors.Is(err, placement.ErrInvalid) {
			t.Errorf("%+v: error %v, want %v", p, err, placement.ErrInvalid)
		}
	}
}

// In the tables of the catalogue the units run out before the slices do.
func TestMIGSlices(t *testing.T) {
	table := &gpu.MIGTable{Units: 4, Slices: 3}
	for i, slices := range []int{1, 2} {
		table.Profiles = append(table.Profiles, gpu.MIGProfile{ID: i, Name: fmt.Sprintf("%dg", slices), Slices: slices, Max: 4})
		for start := range 4 {
			table.Profiles[i].Placements = append(table.Profiles[i].Placements, gpu.Placement{Start: start, Size: 1})
		}
	}
	c := newCluster(t, placement.NodeSpec{Name: "a", GPUs: 1, MIG: table})
	list := classes(t, c, mig("1g"), mig("2g"))
	apply(t, c, at(list[1], 0, 0, 0))
	large, small := at(list[1], 0, 0, 1), at(list[0], 0, 0, 1)
	if err := c.Apply(&large); !errors.Is(err, placement.ErrUnavailable) {
		t.Errorf("4 slices of 3: error %v", err)
	}
	if got := c.Fit(0, list[1]); got == placement.Fits {
		t.Error("4 slices of 3 fit")
	}
	apply(t, c, small)
	if got := c.Fit(0, list[0]); got == placement.Fits {
		t.Error("4 slices of 3 fit after 2 and 1")
	}
}

// However small the shares, a plan can be applied and nothing is refused while
// something is free.
func TestManySmallShares(t *testing.T) {
	for _, p := range placement.Policies() {
		t.Run(p.Name, func(t *testing.T) {
			c := newCluster(t, placement.NodeSpec{Name: "a", GPUs: 1})
			small := placement.Request{Count: 1, Milli: 1}
			id := classes(t, c, small)[0]
			placer := newPlacer(t, c, p, []placement.Request{small})
			placer.Learn(id)
			for i := range placement.Whole {
				plan, ok := placer.Place(id)
				if !ok {
					t.Fatalf("%d shares of 1 are applied, the next is refused: %s", i, placer.Explain(id))
				}
				if err := c.Apply(&plan); err != nil {
					t.Fatalf("%d shares of 1 are applied, the next is planned: %v", i, err)
				}
			}
			if _, ok := placer.Place(id); ok {
				t.Error("the GPU is full and has a place")
			}
		})
	}
}

func TestRequestValidate(t *testing.T) {
	whole := func(change func(r *placement.Request)) placement.Request {
		r := placement.Request{MilliCPU: 1000, MemoryMiB: 1024, Count: 2, Milli: placement.Whole}
		change(&r)
		return r
	}
	for _, tt := range []struct {
		name    string
		request placement.Request
		want    string // "" for a request that is valid
	}{
		{"zero", placement.Request{}, ""},
		{"whole", whole(func(*placement.Request) {}), ""},
		{"whole with memory and links", whole(func(r *placement.Request) { r.GPUMemoryMiB, r.Links = 40000, placement.NVLinked }), ""},
		{"smallest share", placement.Request{Count: placement.MaxGPUs, Milli: 1}, ""},
		{"slot", placement.Request{Count: 1, Slot: true}, ""},
		{"MIG", placement.Request{Count: 1, Profile: "1g.5gb"}, ""},
		{"sorted products", placement.Request{Count: 1, Slot: true, Products: []string{"A30", "T4"}}, ""},

		{"MilliCPU", whole(func(r *placement.Request) { r.MilliCPU = -1 }), "MilliCPU is -1: give 0 or more"},
		{"MemoryMiB", whole(func(r *placement.Request) { r.MemoryMiB = -2 }), "MemoryMiB is -2: give 0 or more"},
		{"Count negative", whole(func(r *placement.Request) { r.Count = -1 }), "Count is -1: give 0 to 16"},
		{"Count large", whole(func(r *placement.Request) { r.Count = 17 }), "Count is 17: give 0 to 16"},
		{"GPUMemoryMiB", whole(func(r *placement.Request) { r.GPUMemoryMiB = -1 }), "GPUMemoryMiB is -1: give 0 or more"},
		{"Links negative", whole(func(r *placement.Request) { r.Links = -1 }), "Links is LinkClass(-1): use AnyLink, SameNUMA or NVLinked"},
		{"Links large", whole(func(r *placement.Request) { r.Links = 3 }), "Links is LinkClass(3): use AnyLink, SameNUMA or NVLinked"},
		{"Count missing for Milli", placement.Request{Milli: 500}, "Count is 0: give the number of devices, or none of Milli, Slot, Profile and GPUMemoryMiB"},
		{"Count missing for Slot", placement.Request{Slot: true}, "Count is 0: give the number of devices, or none of Milli, Slot, Profile and GPUMemoryMiB"},
		{"Count missing for Profile", placement.Request{Profile: "x"}, "Count is 0: give the number of devices, or none of Milli, Slot, Profile and GPUMemoryMiB"},
		{"Count missing for GPUMemoryMiB", placement.Request{GPUMemoryMiB: 1}, "Count is 0: give the number of devices, or none of Milli, Slot, Profile and GPUMemoryMiB"},
		{"no kind", placement.Request{Count: 1}, "Milli is 0: give exactly one of Milli, Slot and Profile"},
		{"two kinds", placement.Request{Count: 1, Milli: 500, Slot: true}, "Milli is 500: give exactly one of Milli, Slot and Profile"},
		{"two other kinds", placement.Request{Count: 1, Slot: true, Profile: "x"}, "Milli is 0: give exactly one of Milli, Slot and Profile"},
		{"Milli negative", whole(func(r *placement.Request) { r.Milli = -500 }), "Milli is -500: give 1 to 1000"},
		{"Milli large", whole(func(r *placement.Request) { r.Milli = 1001 }), "Milli is 1001: give 1 to 1000"},
		{"GPUMemoryMiB of a profile", placement.Request{Count: 1, Profile: "x", GPUMemoryMiB: 1}, "GPUMemoryMiB is 1: a slot or MIG profile brings its own memory: give 0"},
		{"Products", whole(func(r *placement.Request) { r.Products = []string{"T4", "A30"} }), "Products is [T4 A30]: sort them"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := newCluster(t, placement.NodeSpec{Name: "a"})
			err := tt.request.Validate()
			_, of := c.Class(tt.request)
			checkInvalid(t, err, tt.want)
			checkInvalid(t, of, tt.want)
		})
	}
}

// checkInvalid compares an error with the text after "invalid request: ".
func checkInvalid(t *testing.T, err error, want string) {
	t.Helper()
	switch {
	case want == "" && err != nil:
		t.Error(err)
	case want != "" && (!errors.Is(err, placement.ErrInvalid) || err.Error() != "invalid request: "+want):
		t.Errorf("error %q, want %q", err, "invalid request: "+want)
	}
}

func TestNodeSpecValidate(t *testing.T) {
	node := func(change func(s *placement.NodeSpec)) placement.NodeSpec {
		s := placement.NodeSpec{Name: "a", MilliCPU: 1000, MemoryMiB: 1024, GPUs: 4, Product: "T4", GPUMemoryMiB: 15360, Slots: 4}
		change(&s)
		return s
	}
	for _, tt := range []struct {
		name string
		spec placement.NodeSpec
		want string
	}{
		{"full", node(func(*placement.NodeSpec) {}), ""},
		{"name alone", placement.NodeSpec{Name: "a"}, ""},
		{"limits", node(func(s *placement.NodeSpec) { s.GPUs, s.GPUMemoryMiB, s.Slots = 16, math.MaxInt32, 255 }), ""},
		{"machine", node(func(s *placement.NodeSpec) { s.Machine = pairs() }), ""},

		{"Name", node(func(s *placement.NodeSpec) { s.Name = "" }), `Name of node "" is "": give each node a name`},
		{"MilliCPU", node(func(s *placement.NodeSpec) { s.MilliCPU = -1 }), `MilliCPU of node "a" is -1: give 0 or more`},
		{"MemoryMiB", node(func(s *placement.NodeSpec) { s.MemoryMiB = -1 }), `MemoryMiB of node "a" is -1: give 0 or more`},
		{"Pods", node(func(s *placement.NodeSpec) { s.Pods = -1 }), `Pods of node "a" is -1: give 0 for no limit, or more`},
		{"GPUs negative", node(func(s *placement.NodeSpec) { s.GPUs = -1 }), `GPUs of node "a" is -1: give 0 to 16`},
		{"GPUs large", node(func(s *placement.NodeSpec) { s.GPUs = 17 }), `GPUs of node "a" is 17: give 0 to 16`},
		{"GPUMemoryMiB negative", node(func(s *placement.NodeSpec) { s.GPUMemoryMiB = -1 }), `GPUMemoryMiB of node "a" is -1: give 0 where it is not known, or MiB`},
		{"GPUMemoryMiB large", node(func(s *placement.NodeSpec) { s.GPUMemoryMiB = math.MaxInt32 + 1 }), `GPUMemoryMiB of node "a" is 2147483648: give 0 where it is not known, or MiB`},
		{"Slots negative", node(func(s *placement.NodeSpec) { s.Slots = -1 }), `Slots of node "a" is -1: give 0 to 255`},
		{"Slots large", node(func(s *placement.NodeSpec) { s.Slots = 256 }), `Slots of node "a" is 256: give 0 to 255`},
		{"MIG units", node(func(s *placement.NodeSpec) { s.MIG = &gpu.MIGTable{Units: 16} }), `MIG of node "a" is 16 units, 0 profiles: give at most 15 units and 15 profiles`},
		{"MIG profiles", node(func(s *placement.NodeSpec) { s.MIG = &gpu.MIGTable{Units: 8, Profiles: make([]gpu.MIGProfile, 16)} }), `MIG of node "a" is 8 units, 16 profiles: give at most 15 units and 15 profiles`},
		{"Links", node(func(s *placement.NodeSpec) { s.Links = 3 }), `Links of node "a" is LinkClass(3): use AnyLink, SameNUMA or NVLinked`},
		{"Machine", node(func(s *placement.NodeSpec) { s.Machine = nvswitch(3) }), `GPUs of node "a" is 4: the machine has 3`},
	} {
		t.Run(tt.name, func(t *testing.T) {
			checkInvalid(t, tt.spec.Validate(), tt.want)
			defer func() {
				if r := recover(); r != nil {
					t.Errorf("NewCluster panics: %v", r)
				}
			}()
			_, err := placement.NewCluster([]placement.NodeSpec{tt.spec})
			checkInvalid(t, err, tt.want)
		})
	}
}

func TestNewClusterRefuses(t *testing.T) {
	_, err := placement.NewCluster([]placement.NodeSpec{{Name: "a"}, {Name: "b"}, {Name: "a"}})
	checkInvalid(t, err, `Name "a" is given to two nodes: names are unique`)

	models := make([]placement.NodeSpec, 65)
	for i := range models {
		models[i] = placement.NodeSpec{Name: fmt.Sprintf("node-%d", i), GPUs: 1, Product: fmt.Sprintf("model-%d", i)}
	}
	_, err = placement.NewCluster(models)
	checkInvalid(t, err, `Product "model-64" of node "node-64": a cluster has no more than 64 models`)
	if _, err := placement.NewCluster(models[:64]); err != nil {
		t.Error(err)
	}

	// The products of the last of them are told apart like the others.
	c := newCluster(t, models[:64]...)
	id := classes(t, c, placement.Request{Count: 1, Milli: 1, Products: []string{"model-63"}})[0]
	plan, ok := newPlacer(t, c, policy(t, "first-fit"), nil).Place(id)
	if !ok || plan.Node != 63 {
		t.Errorf("node %d, %v", plan.Node, ok)
	}
}

func TestClusterNames(t *testing.T) {
	c := newCluster(t, placement.NodeSpec{Name: "a"}, placement.NodeSpec{Name: "b", GPUs: 2})
	if i, ok := c.Node("b"); !ok || i != 1 || c.Spec(i).GPUs != 2 || c.Len() != 2 {
		t.Errorf("node b is %d, %v", i, ok)
	}
	if _, ok := c.Node("c"); ok {
		t.Error("there is a node c")
	}

	// Equal requests have one class, and each field tells requests apart.
	base := placement.Request{MilliCPU: 1, MemoryMiB: 1, Count: 1, Milli: 1, GPUMemoryMiB: 1, Products: []string{"A", "B"}}
	requests := []placement.Request{base}
	for _, change := range []func(r *placement.Request){
		func(r *placement.Request) { r.MilliCPU = 2 },
		func(r *placement.Request) { r.MemoryMiB = 2 },
		func(r *placement.Request) { r.Count = 2 },
		func(r *placement.Request) { r.Milli = 2 },
		func(r *placement.Request) { r.GPUMemoryMiB = 2 },
		func(r *placement.Request) { r.Milli, r.GPUMemoryMiB, r.Slot = 0, 0, true },
		func(r *placement.Request) { r.Milli, r.GPUMemoryMiB, r.Profile = 0, 0, "x" },
		func(r *placement.Request) { r.Products = []string{"A"} },
		func(r *placement.Request) { r.Products = []string{"A B"} },
		func(r *placement.Request) { r.Links = placement.SameNUMA },
	} {
		r := base
		change(&r)
		requests = append(requests, r)
	}
	list := classes(t, c, requests...)
	if diff := cmp.Diff(list, classes(t, c, requests...)); diff != "" {
		t.Errorf("ids -first +second:\n%s", diff)
	}
	for i, id := range list {
		if slices.Index(list, id) != i {
			t.Errorf("%+v has the id of another", requests[i])
		}
		if diff := cmp.Diff(requests[i], c.Request(id)); diff != "" {
			t.Errorf("request (-want +got):\n%s", diff)
		}
	}
}

func TestMilli(t *testing.T) {
	a30 := gpu.ProductByKey("A30")
	c := newCluster(t,
		placement.NodeSpec{Name: "a"},
		placement.NodeSpec{Name: "b", GPUs: 1, Product: "A30", Slots: 4, MIG: a30.MIG},
		placement.NodeSpec{Name: "c", GPUs: 1, Product: "T4", Slots: 2},
	)
	for _, tt := range []struct {
		request placement.Request
		want    int
	}{
		{placement.Request{MilliCPU: 1}, 0},
		{placement.Request{Count: 3, Milli: placement.Whole}, 3000},
		{placement.Request{Count: 2, Milli: 300}, 600},
		{placement.Request{Count: 2, Slot: true}, 500},
		{placement.Request{Count: 3, Profile: "2g.12gb"}, 1500},
		{placement.Request{Count: 1, Profile: "3g.20gb"}, 0}, // nobody has it
	} {
		if got := c.Milli(classes(t, c, tt.request)[0]); got != tt.want {
			t.Errorf("%+v: %d, want %d", tt.request, got, tt.want)
		}
	}
}
