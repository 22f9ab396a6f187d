package mig

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// OnDemandPolicy bounds how often GPUs are changed on demand.
type OnDemandPolicy struct {
	// MinLife is the shortest time between a change of a GPU and the next that
	// takes something away: devices, or the GPU as a whole. More devices in free
	// places disturb nobody and may come at any time.
	MinLife time.Duration
	// IdleAfter is how long a cut GPU must be of no use to anybody before it is made
	// whole again.
	IdleAfter time.Duration
	// MadeWithin is how long the agent has to make a change. A GPU that is later
	// counts for nothing until it is as was wanted, and nothing else of its node is
	// changed where other nodes will do.
	MadeWithin time.Duration
}

// DefaultOnDemandPolicy returns the times that are used where nobody says others.
func DefaultOnDemandPolicy() OnDemandPolicy {
	return OnDemandPolicy{MinLife: 2 * time.Minute, IdleAfter: 5 * time.Minute, MadeWithin: 5 * time.Minute}
}

// WholeGPU is the resource, without its domain, of a GPU that is not cut. Those of
// MIG devices are what gpu.MIGProfile.Resource says.
const WholeGPU = "gpu"

// DemandGPU is a GPU of a node that is cut on demand.
type DemandGPU struct {
	// Node, and Index on it, say which GPU it is, and the order among equals.
	Node  string
	Index int
	UUID  string
	// Table is nil for a GPU that cannot be cut.
	Table *gpu.MIGTable
	// Usable says that new work may be put on it: it is healthy and not cordoned.
	Usable bool
	// Held says that somebody holds it as a whole, or a slot of it.
	Held bool
	// Enabled is the present MIG mode, Devices are the present devices.
	Enabled bool
	Devices []DemandDevice
	// Wanted is what the spec says, nil where it says nothing.
	Wanted *WantedGeometry
	// IdleSince is since when nothing of it is held, zero while something is.
	IdleSince time.Time
}

// DemandDevice is a present MIG device.
type DemandDevice struct {
	gpu.MIGInstance
	// Held says that somebody holds it, or that it cannot be given to anybody.
	Held bool
}

// WantedGeometry is how a GPU shall be cut, and since when. No instances mean the
// GPU as a whole.
type WantedGeometry struct {
	Instances []gpu.MIGInstance
	Since     time.Time
}

// Demand is a pod that wants GPUs or MIG devices, all of them on one node.
type Demand struct {
	// Pod is its name, for people and for the order among equals.
	Pod   string
	Wants []Want
	// Nodes are where it may run, nil for anywhere.
	Nodes []string
	// Since is when it began to wait. The oldest comes first.
	Since time.Time
	// Bound says that it is on its node, the only one of Nodes, and that nobody
	// knows yet which devices it was given. It takes what is there, nothing is cut
	// for it, and no device is destroyed that it may have.
	Bound bool
}

// Want is a number of devices of one resource: WholeGPU, or that of a MIG profile.
type Want struct {
	Resource string
	Count    int
}

// Decision is a GPU that shall be cut in another way than was wanted so far.
type Decision struct {
	Node  string
	Index int
	UUID  string
	// Instances are all devices that it shall have, in the order of their places;
	// none means the GPU as a whole.
	Instances []gpu.MIGInstance
	// Reason says for whom, or why.
	Reason string
}

// Unserved is a pod for which nothing is changed although it lacks devices.
type Unserved struct{ Pod, Reason string }

// OnDemandPlan is what OnDemand found.
type OnDemandPlan struct {
	// Decisions are in the order of nodes and indices.
	Decisions []Decision
	// Unserved are in the order of the demands.
	Unserved []Unserved
	// Next is when the same input has another answer, zero for never.
	Next time.Time
}

// OnDemand decides how GPUs shall be cut so that the waiting pods can run.
//
// What is there, or is wanted already, is reckoned against the waiting pods first.
// For the others, the oldest first, devices are added in free places of GPUs that
// are cut; then an idle cut GPU gives up devices that nobody waits for; then an idle
// whole GPU is cut, or for a whole one an idle cut GPU is merged. A pod gets all
// that it wants on one node, or nothing is changed for it. Whoever must wait for
// MinLife alone has the GPU kept free of what is younger.
//
// Of the nodes that will do, it takes the one on which the fewest GPUs change from
// whole to cut or back, and then the one with the least left, so that empty nodes
// stay empty. If larger pods first serves all of them with fewer GPUs than older
// pods first, it does that.
//
// A GPU of which anything is held is only ever given more devices. Where the spec
// wants something else of it, or something impossible, the spec is changed back to
// what is there.
func OnDemand(now time.Time, gpus []DemandGPU, waiting []Demand, p OnDemandPolicy) OnDemandPlan {
	o := newOnDemand(now, gpus, p)
	var lacking []*demand
	for i := range waiting {
		d := o.demand(i, &waiting[i])
		unknown := o.unknown(d)
		switch {
		case d.Bound:
			o.bound(d)
		case unknown != "":
			o.unserved[i] = unknown
		default:
			lacking = append(lacking, d)
		}
	}
	lacking = o.supply(lacking)

	slices.SortFunc(lacking, older)
	chosen := o.fork()
	chosen.serve(lacking)
	if len(chosen.unserved) == len(o.unserved) {
		slices.SortStableFunc(lacking, func(a, b *demand) int { return b.size - a.size })
		other := o.fork()
		if other.serve(lacking); len(other.unserved) == len(o.unserved) && other.opened < chosen.opened {
			chosen = other
		}
	}
	chosen.mergeIdle()
	return chosen.plan(waiting)
}

// demand is a Demand with what is asked of it again and again.
type demand struct {
	*Demand
	position int
	nodes    []int  // where it may run, by position
	size     int    // compute slices
	key      string // what it wants, as text
}

func (o *onDemand) demand(position int, d *Demand) *demand {
	w := &demand{Demand: d, position: position, key: fmt.Sprint(d.Wants)}
	for _, want := range d.Wants {
		w.size += want.Count * o.slices[want.Resource]
	}
	if d.Nodes == nil {
		for i := range o.nodes {
			w.nodes = append(w.nodes, i)
		}
		return w
	}
	for _, name := range d.Nodes {
		i, found := slices.BinarySearchFunc(o.nodes, name, func(n *demandNode, name string) int { return strings.Compare(n.name, name) })
		if found {
			w.nodes = append(w.nodes, i)
		}
	}
	slices.Sort(w.nodes)
	w.nodes = slices.Compact(w.nodes)
	return w
}

// older orders demands by age.
func older(a, b *demand) int {
	return cmp.Or(a.Since.Compare(b.Since), strings.Compare(a.Pod, b.Pod))
}

// onDemand is a plan in the making.
type onDemand struct {
	now      time.Time
	policy   OnDemandPolicy
	nodes    []*demandNode
	slices   map[string]int // compute slices by resource, the most of all products
	unserved map[int]string // by the position of the demand
	next     time.Time
	opened   int // whole GPUs that are cut
	version  int
	memory   map[attempt]outcome
}

// demandNode is a node as it will be.
type demandNode struct {
	name string
	gpus []wantedGPU
	// late says that a change of a GPU was not made in time.
	late bool
	// version changes whenever the node does.
	version int
}

// wantedGPU is a GPU as it will be. Its slices are never changed in place, so that
// copies may share them.
type wantedGPU struct {
	DemandGPU
	since time.Time // of the last change, zero for none
	// cut GPUs have devices that were wanted before and devices that are new.
	cut   bool
	kept  []keptDevice
	ids   []int
	added []gpu.MIGInstance
	// taken says that a GPU that is not cut is held, or kept for a pod.
	taken bool
	// shut GPUs are no use to anybody now, but nothing of them is destroyed either.
	shut bool
	// unsure says that a pod may hold what seems idle.
	unsure bool
	// claimed GPUs are for a pod that waits until they may be changed.
	claimed bool
	// touched is set by what the demand that is being served changes.
	touched bool
	changed bool
	reason  string // of a change that is for no pod
	pods    []string
}

type keptDevice struct {
	gpu.MIGInstance
	taken bool
}

func newOnDemand(now time.Time, gpus []DemandGPU, p OnDemandPolicy) *onDemand {
	o := &onDemand{
		now: now, policy: p, slices: map[string]int{WholeGPU: 1},
		unserved: make(map[int]string), memory: make(map[attempt]outcome),
	}
	gpus = slices.Clone(gpus)
	slices.SortFunc(gpus, func(a, b DemandGPU) int {
		return cmp.Or(strings.Compare(a.Node, b.Node), a.Index-b.Index, strings.Compare(a.UUID, b.UUID))
	})
	for _, d := range gpus {
		if len(o.nodes) == 0 || o.nodes[len(o.nodes)-1].name != d.Node {
			o.version++
			o.nodes = append(o.nodes, &demandNode{name: d.Node, version: o.version})
		}
		n := o.nodes[len(o.nodes)-1]
		g, late := o.begin(d)
		n.gpus, n.late = append(n.gpus, g), n.late || late
		if d.Table == nil {
			continue
		}
		o.slices[WholeGPU] = max(o.slices[WholeGPU], d.Table.Slices)
		for i := range d.Table.Profiles {
			r := d.Table.Profiles[i].Resource()
			o.slices[r] = max(o.slices[r], d.Table.Profiles[i].Slices)
		}
	}
	return o
}

// begin is a GPU as is wanted of it now. Late says that it should be so already.
func (o *onDemand) begin(d DemandGPU) (g wantedGPU, late bool) {
	g = wantedGPU{DemandGPU: d, shut: !d.Usable, cut: d.Enabled, taken: d.Held}
	for _, v := range d.Devices {
		g.kept = append(g.kept, keptDevice{v.MIGInstance, v.Held})
	}
	if d.Enabled && d.Held {
		g.shut = true // it cannot be: wait for another status
		return g, false
	}
	if d.Wanted == nil {
		return g, false
	}
	g.since = d.Wanted.Since
	if d.asWanted() {
		return g, false
	}
	if why := d.impossible(); why != "" {
		g.since, g.changed, g.reason = o.now, true, why+", and stays as it is"
		g.cut = len(g.kept) > 0
		return g, false
	}
	g.cut, g.kept = len(d.Wanted.Instances) > 0, nil
	for _, in := range d.Wanted.Instances {
		g.kept = append(g.kept, keptDevice{in, slices.Contains(d.Devices, DemandDevice{in, true})})
	}
	due := g.since.Add(o.policy.MadeWithin)
	late = !o.now.Before(due)
	if !late {
		o.wake(due)
	}
	g.shut = g.shut || late
	return g, late
}

// asWanted says whether a GPU is what the spec wants.
func (d *DemandGPU) asWanted() bool {
	if d.Enabled != (len(d.Wanted.Instances) > 0) || len(d.Devices) != len(d.Wanted.Instances) {
		return false
	}
	return !slices.ContainsFunc(d.Devices, func(v DemandDevice) bool { return !slices.Contains(d.Wanted.Instances, v.MIGInstance) })
}

// impossible says why what the spec wants of a GPU must not or cannot be made.
func (d *DemandGPU) impossible() string {
	if d.Held {
		return "it is held as a whole"
	}
	for _, v := range d.Devices {
		if v.Held && !slices.Contains(d.Wanted.Instances, v.MIGInstance) {
			return fmt.Sprintf("the MIG device at %s is held", v.Placement)
		}
	}
	if d.Table == nil {
		return "it cannot be cut"
	}
	for i, in := range d.Wanted.Instances {
		if err := d.Table.Check(d.Wanted.Instances[:i], in); err != nil {
			return "what was wanted cannot be made: " + err.Error()
		}
	}
	return ""
}

// busy says whether anything of the GPU is held.
func (d *DemandGPU) busy() bool {
	return d.Held || slices.ContainsFunc(d.Devices, func(v DemandDevice) bool { return v.Held })
}

// wake notes when the plan may be another one.
func (o *onDemand) wake(at time.Time) {
	if at.After(o.now) && (o.next.IsZero() || at.Before(o.next)) {
		o.next = at
	}
}

// fork is a plan that goes its own way from here.
func (o *onDemand) fork() *onDemand {
	f := *o
	f.nodes, f.unserved, f.memory = slices.Clone(o.nodes), maps.Clone(o.unserved), make(map[attempt]outcome)
	return &f
}

func (n *demandNode) clone() *demandNode {
	c := *n
	c.gpus = slices.Clone(n.gpus)
	return &c
}

// profile is the profile of a resource, nil where the GPU has none.
func (d *DemandGPU) profile(resource string) *gpu.MIGProfile {
	if d.Table == nil {
		return nil
	}
	for i := range d.Table.Profiles {
		if d.Table.Profiles[i].Resource() == resource {
			return &d.Table.Profiles[i]
		}
	}
	return nil
}

// unknown says what of a demand none of its nodes could ever have.
func (o *onDemand) unknown(d *demand) string {
	for _, w := range d.Wants {
		known := w.Resource == WholeGPU
		for _, i := range d.nodes {
			known = known || slices.ContainsFunc(o.nodes[i].gpus, func(g wantedGPU) bool { return g.profile(w.Resource) != nil })
		}
		if !known {
			return fmt.Sprintf("no GPU of the nodes where it may run can have a device %s", w.Resource)
		}
	}
	return ""
}

// bound takes what there is for a pod that has it already.
func (o *onDemand) bound(d *demand) {
	for _, i := range d.nodes {
		n := o.nodes[i].clone()
		o.version++
		n.version = o.version
		for _, w := range d.Wants {
			for range w.Count {
				o.give(n, w.Resource, supplyOnly)
			}
			for j := range n.gpus {
				n.gpus[j].unsure = n.gpus[j].unsure || n.gpus[j].mayBe(w.Resource)
			}
		}
		o.nodes[i] = n
	}
}

// mayBe says whether the GPU has an idle device of the resource.
func (d *DemandGPU) mayBe(resource string) bool {
	if resource == WholeGPU {
		return !d.Enabled && !d.Held
	}
	p := d.profile(resource)
	return p != nil && slices.ContainsFunc(d.Devices, func(v DemandDevice) bool { return v.ProfileID == p.ID && !v.Held })
}

// supply serves whom it can with what there is, and returns the others. Those with
// little choice come first, and then the large ones.
func (o *onDemand) supply(demands []*demand) (lacking []*demand) {
	slices.SortFunc(demands, func(a, b *demand) int {
		return cmp.Or(len(a.nodes)-len(b.nodes), b.size-a.size, older(a, b))
	})
	for _, d := range demands {
		if !o.try(d, supplyOnly) {
			lacking = append(lacking, d)
		}
	}
	return lacking
}

// serve changes GPUs for demands, in their order.
func (o *onDemand) serve(demands []*demand) {
	for _, d := range demands {
		switch {
		case o.try(d, changes):
		case o.try(d, changesLater):
			o.unserved[d.position] = fmt.Sprintf("it waits for a GPU that was changed less than %s ago", o.policy.MinLife)
		default:
			o.unserved[d.position] = "no idle GPU or free place of a GPU is left for it"
		}
	}
}

// effort is what may be done for a demand.
type effort int

const (
	supplyOnly effort = iota
	changes
	// changesLater plans as if MinLife were over.
	changesLater
)

// attempt and outcome remember what was tried: pods that want the same are many,
// and a node that did not change has the same answer.
type attempt struct {
	wants   string
	node    int
	how     effort
	version int
}

type outcome struct {
	after *demandNode
	cost  cost
	ok    bool
}

// cost orders ways to serve a demand.
type cost struct{ late, opened, merged, recut, added, left int }

func (c cost) compare(d cost) int {
	return cmp.Or(c.late-d.late, c.opened+c.merged-d.opened-d.merged, c.recut-d.recut, c.added-d.added, c.left-d.left)
}

// try serves a demand on the best node, and returns false where none will do.
func (o *onDemand) try(d *demand, how effort) bool {
	best, at := outcome{}, -1
	for _, i := range d.nodes {
		n := o.nodes[i]
		key := attempt{d.key, i, how, n.version}
		out, known := o.memory[key]
		if !known {
			out = o.attempt(n, d, how)
			o.memory[key] = out
		}
		if out.ok && (at < 0 || out.cost.compare(best.cost) < 0) {
			best, at = out, i
		}
	}
	if at < 0 {
		return false
	}
	o.commit(d, how, at, best)
	return true
}

// attempt serves a demand on a copy of a node.
func (o *onDemand) attempt(n *demandNode, d *demand, how effort) outcome {
	out := outcome{after: n.clone(), cost: cost{left: o.left(n)}, ok: true}
	if n.late {
		out.cost.late = 1
	}
	wants := slices.Clone(d.Wants)
	slices.SortStableFunc(wants, func(a, b Want) int { return o.slices[b.Resource] - o.slices[a.Resource] })
	for _, w := range wants {
		for range w.Count {
			way := o.give(out.after, w.Resource, how)
			if way == nil {
				return outcome{}
			}
			if way.count != nil {
				*way.count(&out.cost)++
			}
		}
	}
	return out
}

// left is what of a node could be used without any change, in compute slices.
func (o *onDemand) left(n *demandNode) int {
	sum := 0
	for i := range n.gpus {
		g := &n.gpus[i]
		switch {
		case g.shut:
		case !g.cut && !g.taken:
			sum += o.slices[WholeGPU]
		case g.cut:
			taken, all := g.use()
			sum += all - taken
		}
	}
	return sum
}

// commit makes a node what an attempt made of it. For a demand that must wait, the
// GPUs that would change are kept as they are, and for it.
func (o *onDemand) commit(d *demand, how effort, at int, out outcome) {
	before, after := o.nodes[at], out.after.clone()
	for i := range after.gpus {
		g := &after.gpus[i]
		switch {
		case !g.touched:
		case how == changesLater:
			o.wake(before.gpus[i].since.Add(o.policy.MinLife))
			*g = before.gpus[i]
			g.claimed = true
		default:
			g.touched, g.changed = false, true
			g.pods = append(slices.Clip(g.pods), d.Pod)
		}
	}
	if how == changes {
		o.opened += out.cost.opened
	}
	o.version++
	after.version = o.version
	o.nodes[at] = after
}

// way is one way to get a device of a GPU.
type way struct {
	// try returns the GPU as it is then. It does not change the one that it is given.
	try func(o *onDemand, g wantedGPU, resource string, how effort) (wantedGPU, bool)
	// count is what it costs, nil for nothing.
	count func(*cost) *int
	// emptiest says that the GPUs with the least on them come first.
	emptiest bool
}

// The ways, each of which is tried on all GPUs before the next.
var (
	wholeWays = []way{
		{try: (*onDemand).keepWhole},
		{try: (*onDemand).merge, count: func(c *cost) *int { return &c.merged }, emptiest: true},
	}
	deviceWays = []way{
		{try: (*onDemand).keepDevice},
		{try: (*onDemand).add, count: func(c *cost) *int { return &c.added }},
		{try: (*onDemand).recut, count: func(c *cost) *int { return &c.recut }, emptiest: true},
		{try: (*onDemand).open, count: func(c *cost) *int { return &c.opened }},
	}
)

// give takes one device of a node, and says how; nil where it has none.
func (o *onDemand) give(n *demandNode, resource string, how effort) *way {
	ways := deviceWays
	if resource == WholeGPU {
		ways = wholeWays
	}
	if how == supplyOnly {
		ways = ways[:1]
	}
	for w := range ways {
		for _, i := range n.order(ways[w].emptiest) {
			if n.gpus[i].shut || n.gpus[i].claimed {
				continue
			}
			if after, ok := ways[w].try(o, n.gpus[i], resource, how); ok {
				n.gpus[i] = after
				return &ways[w]
			}
		}
	}
	return nil
}

// order lists the GPUs by what is taken and then by what is cut of them, and then
// by index.
func (n *demandNode) order(emptiest bool) []int {
	order := make([]int, len(n.gpus))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(i, j int) int {
		takenI, allI := n.gpus[i].use()
		takenJ, allJ := n.gpus[j].use()
		c := cmp.Or(takenJ-takenI, allJ-allI)
		if emptiest {
			return -c
		}
		return c
	})
	return order
}

// use is how many compute slices of a cut GPU are taken, and how many are cut.
func (g *wantedGPU) use() (taken, all int) {
	if !g.cut || g.Table == nil {
		return 0, 0
	}
	for _, k := range g.kept {
		if p := g.Table.ByID(k.ProfileID); p != nil {
			all += p.Slices
			if k.taken {
				taken += p.Slices
			}
		}
	}
	for _, id := range g.ids {
		taken += g.Table.ByID(id).Slices
		all += g.Table.ByID(id).Slices
	}
	return taken, all
}

// free says whether something of a GPU may be taken away.
func (o *onDemand) free(g *wantedGPU, how effort) bool {
	return !g.busy() && !g.unsure && (how == changesLater || !o.now.Before(g.since.Add(o.policy.MinLife)))
}

func (o *onDemand) keepWhole(g wantedGPU, _ string, _ effort) (wantedGPU, bool) {
	if g.cut || g.taken {
		return g, false
	}
	g.taken = true
	return g, true
}

func (o *onDemand) keepDevice(g wantedGPU, resource string, _ effort) (wantedGPU, bool) {
	p := g.profile(resource)
	if !g.cut || p == nil {
		return g, false
	}
	i := slices.IndexFunc(g.kept, func(k keptDevice) bool { return !k.taken && k.ProfileID == p.ID })
	if i < 0 {
		return g, false
	}
	g.kept = slices.Clone(g.kept)
	g.kept[i].taken = true
	return g, true
}

// merge makes a cut GPU whole of which nothing is taken.
func (o *onDemand) merge(g wantedGPU, _ string, how effort) (wantedGPU, bool) {
	taken, _ := g.use()
	if !g.cut || taken > 0 || !o.free(&g, how) {
		return g, false
	}
	g.cut, g.kept, g.taken, g.touched = false, nil, true, true
	return g, true
}

// add puts a device where a cut GPU has room.
func (o *onDemand) add(g wantedGPU, resource string, _ effort) (wantedGPU, bool) {
	p := g.profile(resource)
	if !g.cut || p == nil {
		return g, false
	}
	return g.with(p)
}

// recut lets a cut GPU give up what is not taken, and adds a device.
func (o *onDemand) recut(g wantedGPU, resource string, how effort) (wantedGPU, bool) {
	p := g.profile(resource)
	if !g.cut || p == nil || !o.free(&g, how) {
		return g, false
	}
	g.kept = slices.DeleteFunc(slices.Clone(g.kept), func(k keptDevice) bool { return !k.taken })
	return g.with(p)
}

// open cuts a whole GPU.
func (o *onDemand) open(g wantedGPU, resource string, how effort) (wantedGPU, bool) {
	p := g.profile(resource)
	if g.cut || g.taken || p == nil || !o.free(&g, how) {
		return g, false
	}
	g.cut, g.kept = true, nil
	return g.with(p)
}

// with adds a device. Those that are new may all move.
func (g wantedGPU) with(p *gpu.MIGProfile) (wantedGPU, bool) {
	if _, all := g.use(); all+p.Slices > g.Table.Slices {
		return g, false
	}
	ids := append(slices.Clip(g.ids), p.ID)
	added, err := placement.ArrangeMIG(g.Table, g.instances(), ids)
	if err != nil {
		return g, false // it does not fit
	}
	g.ids, g.added, g.touched = ids, added, true
	return g, true
}

// instances are the devices that were wanted before.
func (g *wantedGPU) instances() []gpu.MIGInstance {
	list := make([]gpu.MIGInstance, len(g.kept))
	for i, k := range g.kept {
		list[i] = k.MIGInstance
	}
	return list
}

// mergeIdle makes cut GPUs whole that have been of no use for long.
func (o *onDemand) mergeIdle() {
	for at, n := range o.nodes {
		n = n.clone()
		for i := range n.gpus {
			g := &n.gpus[i]
			taken, _ := g.use()
			if !g.cut || g.shut || g.claimed || g.unsure || g.busy() || taken > 0 || g.IdleSince.IsZero() {
				continue
			}
			due := g.since.Add(o.policy.MinLife)
			for _, since := range []time.Time{g.since, g.IdleSince} {
				if t := since.Add(o.policy.IdleAfter); t.After(due) {
					due = t
				}
			}
			if o.now.Before(due) {
				o.wake(due)
				continue
			}
			g.cut, g.kept, g.changed = false, nil, true
			g.reason = fmt.Sprintf("nobody has used it for %s", o.policy.IdleAfter)
		}
		o.nodes[at] = n
	}
}

// plan is the answer.
func (o *onDemand) plan(demands []Demand) OnDemandPlan {
	p := OnDemandPlan{Next: o.next}
	for i := range demands {
		if reason := o.unserved[i]; reason != "" {
			p.Unserved = append(p.Unserved, Unserved{demands[i].Pod, reason})
		}
	}
	for _, n := range o.nodes {
		for i := range n.gpus {
			g := &n.gpus[i]
			if !g.changed {
				continue
			}
			d := Decision{Node: n.name, Index: g.Index, UUID: g.UUID, Reason: g.why()}
			if g.cut {
				d.Instances = append(g.instances(), g.added...)
				slices.SortFunc(d.Instances, func(a, b gpu.MIGInstance) int { return a.Placement.Start - b.Placement.Start })
			}
			p.Decisions = append(p.Decisions, d)
		}
	}
	return p
}

// why is the reason of a change.
func (g *wantedGPU) why() string {
	var parts []string
	if g.reason != "" {
		parts = append(parts, g.reason)
	}
	const most = 3
	pods := slices.Compact(slices.Sorted(slices.Values(g.pods)))
	if more := len(pods) - most; more > 0 {
		pods = append(pods[:most], fmt.Sprintf("%d more", more))
	}
	if len(pods) > 0 {
		parts = append(parts, "for "+strings.Join(pods, ", "))
	}
	return strings.Join(parts, "; ")
}
