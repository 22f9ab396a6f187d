package deviceplugin

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/proptest"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// node is a node in small: a machine, a config that is changed while containers
// run, the ledger and the allocators, and a kubelet that knows only the lists
// that were sent to it and the devices that it gave.
type node struct {
	t    *rapid.T
	rand *rand.Rand // for what the kubelet takes from maps
	now  time.Time

	machine    *gpu.Machine
	plan       *sharing.Plan
	ledger     *Ledger
	allocators map[string]*Allocator

	// What the config says, in words of sharing.Config.
	replicas, shared                   int
	renamed, exclusive, mixed, oneEach bool

	// sent is the kubelet's list of healthy devices by resource. It lags behind.
	sent map[string][]string
	// pods are the containers with devices, and unwritten those that the kubelet
	// has not written down yet, with the moment of Allocate.
	pods      []Holder
	unwritten map[Holder]time.Time
	// asked and answer are an answer of the kubelet that is on its way.
	asked  time.Time
	answer []Holder
	// fresh says that the lists are those of the plan, and that the ledger has the
	// holders and nothing else.
	fresh bool
}

// newMachine draws GPUs, some of them in MIG mode.
func (n *node) newMachine() {
	count := rapid.IntRange(1, 4).Draw(n.t, "GPUs")
	n.machine = machineOf(count)
	for i := range count {
		if rapid.IntRange(0, 3).Draw(n.t, "MIG") == 0 {
			cut(n.machine, i, rapid.IntRange(0, 3).Draw(n.t, "MIG devices"))
		}
	}
}

// newConfig draws a config.
func (n *node) newConfig() {
	n.replicas = rapid.IntRange(1, 4).Draw(n.t, "replicas")
	n.shared = rapid.IntRange(0, 4).Draw(n.t, "shared GPUs") // the first ones
	n.renamed = rapid.Bool().Draw(n.t, "renamed")
	n.exclusive = rapid.Bool().Draw(n.t, "exclusive view")
	n.mixed = rapid.Bool().Draw(n.t, "migStrategy mixed")
	n.oneEach = rapid.IntRange(0, 9).Draw(n.t, "failRequestsGreaterThanOne") == 0
}

// newPlan makes the plan of the config with package sharing: a resource per kind,
// slots of some or all of its devices, perhaps under another name, and perhaps
// an exclusive view of the GPUs in slots.
func (n *node) newPlan() {
	config := sharing.Default()
	if n.mixed {
		config.Flags.MIGStrategy = sharing.MIGMixed
	}
	if n.replicas > 1 && n.shared > 0 {
		config.TimeSlicing = &sharing.Sharing{FailRequestsGreaterThanOne: n.oneEach}
		share := func(name string, devices []string) {
			if len(devices) == 0 {
				return
			}
			entry := sharing.SharedResource{Name: name, Devices: sharing.Devices{List: devices}, Replicas: n.replicas}
			if n.renamed {
				entry.Rename = name + ".shared"
			}
			config.TimeSlicing.Resources = append(config.TimeSlicing.Resources, entry)
		}
		var gpus []string
		slices := make([][]string, 2)
		for i := range min(n.shared, len(n.machine.GPUs)) {
			gpus = append(gpus, strconv.Itoa(i))
			for j := range n.machine.GPUs[i].MIG.Devices {
				slices[j%2] = append(slices[j%2], fmt.Sprintf("%d:%d", i, j))
			}
		}
		share("nvidia.com/gpu", gpus)
		if n.mixed {
			for kind, devices := range slices {
				share("nvidia.com/mig-"+migProfile(kind), devices)
			}
		}
		if n.exclusive {
			config.TimeSlicing.Resources = append(config.TimeSlicing.Resources, sharing.SharedResource{Name: "nvidia.com/gpu-exclusive", Replicas: 1})
		}
	}
	plan, _, err := config.Plan(n.machine)
	if err != nil {
		n.t.Fatalf("config %+v: %v", config.TimeSlicing, err)
	}
	n.plan = plan
	n.apply()
}

// apply gives the allocators the plan.
func (n *node) apply() {
	n.fresh = false
	for name, a := range n.allocators {
		if !slices.ContainsFunc(n.plan.Resources, func(r sharing.Resource) bool { return r.Name == name }) {
			a.Set(configOf(n.machine, &sharing.Resource{Name: name}))
		}
	}
	for i := range n.plan.Resources {
		r := &n.plan.Resources[i]
		for j := range r.Devices {
			r.Devices[j].Health = n.machine.ByUUID(r.Devices[j].GPU).Health
		}
		if a := n.allocators[r.Name]; a != nil {
			a.Set(configOf(n.machine, r))
		} else {
			n.allocators[r.Name] = NewAllocator(n.ledger, configOf(n.machine, r))
			n.allocators[r.Name].now = func() time.Time { return n.now }
		}
	}
}

// edit changes machine or config, whatever is in use: the health of a GPU, its
// cut, the replicas, anything of the config.
func (n *node) edit() {
	machine := *n.machine
	machine.GPUs = slices.Clone(machine.GPUs)
	n.machine = &machine
	i := rapid.IntRange(0, len(machine.GPUs)-1).Draw(n.t, "GPU")
	g := &machine.GPUs[i]
	switch rapid.IntRange(0, 4).Draw(n.t, "kind of edit") {
	case 0:
		g.Health = gpu.Health{State: gpu.HealthState(rapid.IntRange(0, 2).Draw(n.t, "health"))}
	case 1:
		g.MIG = gpu.MIGState{}
		if rapid.Bool().Draw(n.t, "MIG mode") {
			cut(n.machine, i, rapid.IntRange(0, 3).Draw(n.t, "MIG devices"))
		}
	case 2, 3:
		n.replicas = rapid.IntRange(1, 4).Draw(n.t, "replicas")
	default:
		n.newConfig()
	}
	n.newPlan()
}

// ask has the kubelet answer who holds what. It may not have written down yet
// what it gave a moment ago.
func (n *node) ask() {
	n.asked, n.answer = n.now, nil
	slow := rapid.IntRange(0, 3).Draw(n.t, "slow kubelet") == 0
	for _, h := range n.pods {
		if at, ok := n.unwritten[h]; !ok || !slow || n.now.Sub(at) > 10*time.Second {
			delete(n.unwritten, h)
			n.answer = append(n.answer, h)
		}
	}
	n.now = n.now.Add(time.Millisecond)
}

// look takes the kubelet's answer and sends it new lists, some of which it may
// get later.
func (n *node) look() {
	if n.asked.IsZero() {
		n.ask()
	}
	n.ledger.SetHolders(n.asked, n.answer)
	n.asked = time.Time{}
	all := rapid.IntRange(0, 3).Draw(n.t, "late lists") > 0
	withheld := n.ledger.Withheld(n.plan)
	for name := range n.sent {
		if !slices.ContainsFunc(n.plan.Resources, func(r sharing.Resource) bool { return r.Name == name }) {
			delete(n.sent, name)
		}
	}
	for i, r := range n.plan.Resources {
		if !all && i%2 == 0 {
			continue
		}
		n.sent[r.Name] = nil
		for _, d := range r.Devices {
			_, hidden := withheld[r.Name][d.ID.String()]
			if hidden && slices.Contains(n.pods, Holder{Resource: r.Name, Device: d.ID, GPU: d.GPU}) {
				n.t.Fatalf("%s of %s is withheld from the container that holds it", d.ID, r.Name)
			}
			if d.Health.OK() && !hidden {
				n.sent[r.Name] = append(n.sent[r.Name], d.ID.String())
			}
		}
	}
	n.fresh = all && len(n.answer) == len(n.pods)
	for _, g := range n.ledger.uses {
		for v, slots := range g {
			for slot, u := range slots {
				h := Holder{Resource: v.resource, Device: gpu.DeviceID{Base: v.base, Slot: slot}, GPU: n.parent(v.base)}
				n.fresh = n.fresh && u.reserved.IsZero() && slices.Contains(n.pods, h)
			}
		}
	}
	if len(n.ledger.uses) == 0 && len(withheld) != 0 {
		n.t.Fatalf("nothing is in use and %v is withheld", withheld)
	}
}

// parent is the GPU of a device, also of one that is no more.
func (*node) parent(base string) string {
	if mig, ok := strings.CutPrefix(base, "MIG-"); ok {
		return "GPU-" + mig[:1]
	}
	return base
}

// full says that a device has more sharers than it has slots now.
func (n *node) full() bool {
	for _, h := range n.pods {
		slots, sharers := 0, 0
		for i := range n.plan.Resources {
			if n.plan.Resources[i].Name == h.Resource {
				slots = slotsOf(&n.plan.Resources[i])[h.Device.Base]
			}
		}
		for _, other := range n.pods {
			if other.Resource == h.Resource && other.Device.Base == h.Device.Base {
				sharers++
			}
		}
		if sharers > slots {
			return true
		}
	}
	return false
}

// admit gives a container devices as a kubelet does, and checks what comes.
func (n *node) admit() {
	if len(n.sent) == 0 {
		return
	}
	names := make([]string, 0, len(n.sent))
	for name := range n.sent {
		names = append(names, name)
	}
	slices.Sort(names)
	name := rapid.SampledFrom(names).Draw(n.t, "resource")
	size := rapid.IntRange(1, 4).Draw(n.t, "size")
	a := n.allocators[name]

	var available []string
	for _, id := range n.sent[name] {
		if !slices.ContainsFunc(n.pods, func(h Holder) bool { return h.Resource == name && h.Device.String() == id }) {
			available = append(available, id)
		}
	}
	if len(available) < size {
		return
	}
	n.rand.Shuffle(len(available), func(i, j int) { available[i], available[j] = available[j], available[i] })
	chosen := available
	if size < len(available) {
		preferred := a.Prefer(available, nil, size)
		if len(preferred) != size {
			n.t.Fatalf("%d of %v preferred of %s: got %v", size, available, name, preferred)
		}
		chosen = fill(preferred, available, size)
		if !slices.Equal(slices.Sorted(slices.Values(chosen)), slices.Sorted(slices.Values(preferred))) {
			n.t.Fatalf("of %v of %s, %v was preferred: a device is foreign or repeated", available, name, preferred)
		}
	}
	n.allocate(name, chosen, n.fresh)
}

// allocate asks for the devices. Where the kubelet knows all there is to know,
// it must get them.
func (n *node) allocate(name string, ids []string, must bool) {
	a := n.allocators[name]
	_, err := a.Allocate(n.t.Context(), ids)
	n.now = n.now.Add(time.Millisecond)
	var r *sharing.Resource
	for i := range n.plan.Resources {
		if n.plan.Resources[i].Name == name {
			r = &n.plan.Resources[i]
		}
	}
	if err != nil {
		if must && !strings.Contains(err.Error(), "failRequestsGreaterThanOne") {
			n.t.Fatalf("%v of %s were offered and not given: %v", ids, name, err)
		}
		return
	}
	n.fresh = false
	if r == nil {
		n.t.Fatalf("%v were given of %s, which the node has no more", ids, name)
	}
	if len(ids) > 1 && r.FailRequestsGreaterThanOne && strings.Contains(ids[0], "::") {
		n.t.Fatalf("%v were given of %s, one at most is allowed", ids, name)
	}
	var given []Holder
	for _, id := range ids {
		i := slices.IndexFunc(r.Devices, func(d sharing.Device) bool { return d.ID.String() == id })
		if i < 0 {
			n.t.Fatalf("%s was given, which %s has not", id, name)
		}
		d := r.Devices[i]
		if !d.Health.OK() {
			n.t.Fatalf("%s of %s was given, which is %s", id, name, d.Health.State)
		}
		h := Holder{Resource: name, Device: d.ID, GPU: d.GPU}
		given = append(given, h)
		n.conflicts(h)
	}
	if rapid.IntRange(0, 5).Draw(n.t, "pod comes to nothing") == 0 {
		return
	}
	for _, h := range given {
		if !slices.Contains(n.pods, h) {
			n.pods = append(n.pods, h)
			n.unwritten[h] = n.now
		}
		n.sharers(h, r)
	}
}

// conflicts fails where a container holds what excludes the device.
func (n *node) conflicts(h Holder) {
	for _, other := range n.pods {
		if other == h || other.GPU != h.GPU {
			continue
		}
		slots := other.Device.Slot != gpu.NoSlot && h.Device.Slot != gpu.NoSlot
		mig := other.Device.Base != other.GPU && h.Device.Base != h.GPU
		switch {
		case mig && other.Device.Base != h.Device.Base:
		case slots && other.Resource == h.Resource && other.Device.Base == h.Device.Base:
		default:
			n.t.Fatalf("%s of %s was given while a container holds %s of %s", h.Device, h.Resource, other.Device, other.Resource)
		}
	}
}

// sharers fails where a device has more sharers than slots after one was added.
func (n *node) sharers(h Holder, r *sharing.Resource) {
	if h.Device.Slot == gpu.NoSlot {
		return
	}
	slots, sharers := 0, 0
	for _, d := range r.Devices {
		if d.ID.Base == h.Device.Base {
			slots++
		}
	}
	for _, p := range n.pods {
		if p.Device.Base == h.Device.Base {
			sharers++
		}
	}
	if sharers > slots {
		n.t.Fatalf("%s has %d slots and %d sharers after %s was given", h.Device.Base, slots, sharers, h.Device)
	}
}

// TestNode runs random lives of nodes.
func TestNode(t *testing.T) {
	const cases = 10_000
	proptest.AtLeast(t, cases)
	lives := 0
	rapid.Check(t, func(rt *rapid.T) {
		lives++
		n := &node{
			t: rt, rand: rand.New(rand.NewPCG(rapid.Uint64().Draw(rt, "seed"), 0)), now: noon,
			ledger: NewLedger(), allocators: make(map[string]*Allocator), sent: make(map[string][]string),
			unwritten: make(map[Holder]time.Time),
		}
		n.newMachine()
		n.newConfig()
		n.newPlan()
		n.look()
		for range rapid.IntRange(5, 40).Draw(rt, "steps") {
			switch rapid.IntRange(0, 9).Draw(rt, "step") {
			case 0, 1, 2, 3:
				n.admit()
			case 4: // an init container's device for a later container of its pod
				if len(n.pods) > 0 {
					h := rapid.SampledFrom(n.pods).Draw(rt, "device to reuse")
					n.allocate(h.Resource, []string{h.Device.String()}, false)
				}
			case 5:
				if len(n.pods) > 0 {
					n.fresh = n.fresh && !n.full()
					i := rapid.IntRange(0, len(n.pods)-1).Draw(rt, "pod that ends")
					n.pods = slices.Delete(n.pods, i, i+1)
				}
			case 6:
				n.ask()
			case 7:
				n.look()
			case 8:
				n.edit()
			case 9:
				n.now = n.now.Add(time.Duration(rapid.IntRange(0, 40).Draw(rt, "seconds")) * time.Second)
			}
		}
		// When all has ended and lapsed, everything healthy is offered again.
		n.pods = nil
		n.now = n.now.Add(time.Minute)
		n.ledger.SetHolders(n.now, nil)
		if withheld := n.ledger.Withheld(n.plan); len(withheld) != 0 {
			rt.Fatalf("nothing is in use and %v is withheld", withheld)
		}
	})
	if !t.Failed() && lives < cases {
		t.Errorf("%d lives; want %d", lives, cases)
	}
}
