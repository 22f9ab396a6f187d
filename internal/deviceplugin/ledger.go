package deviceplugin

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// Holder is a container's hold on a device.
type Holder struct {
	// Resource is the full name of the resource that it was given as.
	Resource string
	Device   gpu.DeviceID
	// GPU is the UUID of the physical GPU.
	GPU string
}

// lapseAfter is how long a reservation stands that the kubelet does not confirm.
// The kubelet writes an allocation down as soon as Allocate has returned, which
// takes it milliseconds.
const lapseAfter = 30 * time.Second

// Ledger knows which devices of a node are in use: those of the holders that the
// kubelet last named, and those of reservations, which were given and are not
// yet seen with a holder. It has no clock: moments are arguments and must come
// from one clock.
//
// Two views of a physical GPU may be in use at once only if they are
//   - distinct MIG devices, each as a whole or as slots, or
//   - slots of one GPU or MIG device under one resource.
//
// All else excludes each other: a whole GPU and any other view of it, slots of a
// GPU and its MIG devices, slots of one device under two resources, a device as
// a whole and a slot of it.
//
// A Ledger is safe for concurrent use.
type Ledger struct {
	// LapseAfter is how long a reservation stands without being confirmed. It
	// must not be changed once the ledger is in use.
	LapseAfter time.Duration

	mu   sync.Mutex
	uses map[string]gpuUse // by the UUID of the GPU
	// blocked are the reasons why GPUs and MIG devices get no new use.
	blocked map[string]string
	// asked is the moment of the last SetHolders.
	asked time.Time
}

// gpuUse is what is in use of one GPU: the slots, or gpu.NoSlot, of each view.
type gpuUse map[view]map[int]use

// view is a way in which a GPU can be in use.
type view struct {
	resource, base string
	// whole is false for slots.
	whole bool
}

// use is why a device counts as in use. At least one reason is set.
type use struct {
	// held says that the kubelet named it.
	held bool
	// reserved is when it was last reserved, zero where that is settled.
	reserved time.Time
}

// NewLedger returns a ledger in which nothing is in use and reservations lapse
// after 30 seconds.
func NewLedger() *Ledger {
	return &Ledger{LapseAfter: lapseAfter, uses: make(map[string]gpuUse)}
}

// SetHolders replaces the holders by what the kubelet said. The moment is one
// before the kubelet was asked: what it said cannot be about a reservation that
// was made since.
//
// A reservation ends when the kubelet was asked after it was made and named the
// device, which then has a holder, or when the kubelet was asked LapseAfter
// later and did not name it. As long as the kubelet does not answer,
// reservations stand.
func (l *Ledger) SetHolders(asked time.Time, holders []Holder) {
	l.mu.Lock()
	defer l.mu.Unlock()
	old := l.uses
	l.asked = asked
	l.uses = make(map[string]gpuUse)
	for _, h := range holders {
		l.set(h.GPU, viewOf(h.Resource, h.Device), h.Device.Slot, use{held: true})
	}
	for id, g := range old {
		for v, slots := range g {
			for slot, u := range slots {
				if u.reserved.IsZero() {
					continue
				}
				held := l.uses[id][v][slot].held
				// A holder that was named before the reservation is another one, about to
				// leave, whose place the reservation takes.
				since := !u.reserved.Before(asked)
				if since || !held && asked.Sub(u.reserved) < l.LapseAfter {
					l.set(id, v, slot, use{held: held, reserved: u.reserved})
				}
			}
		}
	}
}

// Reserve counts devices of the resource as in use from now on, all or none. It
// refuses where one of them and a use of the same GPU exclude each other, and
// where a GPU or MIG device would have more sharers than the resource has slots
// of it. The error names both sides.
//
// A device that is in use under the same resource already is not refused for
// that: the kubelet gives the devices of an init container to the containers
// after it, and of who holds which device of one resource it is the judge. It
// still must not be one sharer too many: its holder may have left a moment ago.
func (l *Ledger) Reserve(now time.Time, r *sharing.Resource, devices []sharing.Device) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	slots := slotsOf(r)
	before := make([]use, 0, len(devices))
	for i, d := range devices {
		v := viewOf(r.Name, d.ID)
		u := l.uses[d.GPU][v][d.ID.Slot]
		if err := l.check(d, v, u, slots[d.ID.Base]); err != nil {
			for j := i - 1; j >= 0; j-- {
				d := devices[j]
				l.set(d.GPU, viewOf(r.Name, d.ID), d.ID.Slot, before[j])
			}
			return fmt.Errorf("device %s of %s cannot be given: %w", d.ID, r.Name, err)
		}
		before = append(before, u)
		l.set(d.GPU, v, d.ID.Slot, use{held: u.held, reserved: now})
	}
	return nil
}

// confirmAfter is how long after a reservation the kubelet surely names its holder.
const confirmAfter = time.Second

// InUseAlready lists those of the devices that are in use under the resource
// already: they have a holder, or were reserved and the kubelet had no time to name
// the holder yet. See the field Reuse of Config.
func (l *Ledger) InUseAlready(r *sharing.Resource, devices []sharing.Device) []gpu.DeviceID {
	l.mu.Lock()
	defer l.mu.Unlock()
	var used []gpu.DeviceID
	for _, d := range devices {
		u := l.uses[d.GPU][viewOf(r.Name, d.ID)][d.ID.Slot]
		if u.held || !u.reserved.IsZero() && l.asked.Sub(u.reserved) < confirmAfter {
			used = append(used, d.ID)
		}
	}
	return used
}

// SetBlocked replaces the GPUs and MIG devices, by UUID, that get no new use,
// with the reasons. What is in use stays in use, and can be reserved again under
// the same resource, as by the containers after an init container. When
// SetBlocked has returned, InUse of a blocked GPU can only shrink.
func (l *Ledger) SetBlocked(reasons map[string]string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.blocked = maps.Clone(reasons)
}

// blocks is why the device gets no new use, or "".
func (l *Ledger) blocks(d sharing.Device) string {
	return cmp.Or(l.blocked[d.GPU], l.blocked[d.ID.Base])
}

// InUse lists what is in use of the GPU with that UUID: itself, or some of its
// MIG devices, by UUID and sorted.
func (l *Ledger) InUse(id string) []string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var bases []string
	for v := range l.uses[id] {
		bases = append(bases, v.base)
	}
	slices.Sort(bases)
	return slices.Compact(bases)
}

// check says what keeps a device from being reserved, given its present use.
func (l *Ledger) check(d sharing.Device, v view, u use, slots int) error {
	if reason := l.blocks(d); reason != "" && u == (use{}) {
		return errors.New(reason)
	}
	if other, ok := l.excluder(d.GPU, v); ok {
		return errors.New(inUse(d.GPU, other))
	}
	others := len(l.uses[d.GPU][v])
	if u != (use{}) {
		others--
	}
	if !v.whole && others >= slots {
		return errors.New(full(d.ID.Base, slots, others))
	}
	return nil
}

// Withheld returns what must not be offered of a plan now: for each resource, by
// device id, the reason. Resources of which all can be offered are not in it.
//
// A device that is itself in use is never withheld. The kubelet gives it to
// nobody else, and would take it for broken when it admits the pod that holds it
// again after a restart.
//
// Where a resource has lost slots of a GPU or MIG device that are still held, as
// many of the slots that it has left are withheld, the last free ones.
func (l *Ledger) Withheld(p *sharing.Plan) map[string]map[string]string {
	all := make(map[string]map[string]string)
	for i := range p.Resources {
		r := &p.Resources[i]
		if withheld := l.withheldOf(r); len(withheld) > 0 {
			all[r.Name] = make(map[string]string, len(withheld))
			for id, reason := range withheld {
				all[r.Name][id.String()] = reason
			}
		}
	}
	return all
}

// withheldOf is Withheld for one resource.
func (l *Ledger) withheldOf(r *sharing.Resource) map[gpu.DeviceID]string {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.uses) == 0 && len(l.blocked) == 0 {
		return nil
	}
	type state struct {
		excluded string         // why none may be offered, or ""
		free     []gpu.DeviceID // slots
		sharers  int
	}
	states := make(map[view]*state)
	slots := slotsOf(r)
	withheld := make(map[gpu.DeviceID]string)
	for _, d := range r.Devices {
		v := viewOf(r.Name, d.ID)
		s := states[v]
		if s == nil {
			s = &state{sharers: len(l.uses[d.GPU][v])}
			if other, ok := l.excluder(d.GPU, v); ok {
				s.excluded = inUse(d.GPU, other)
			}
			states[v] = s
		}
		switch _, used := l.uses[d.GPU][v][d.ID.Slot]; {
		case used:
		case s.excluded != "":
			withheld[d.ID] = s.excluded
		case l.blocks(d) != "":
			withheld[d.ID] = l.blocks(d)
		case !v.whole:
			s.free = append(s.free, d.ID)
		}
	}
	for v, s := range states {
		room := max(slots[v.base]-s.sharers, 0)
		for _, id := range s.free[min(room, len(s.free)):] {
			withheld[id] = full(v.base, slots[v.base], s.sharers)
		}
	}
	return withheld
}

// set changes one use; the zero use removes it.
func (l *Ledger) set(id string, v view, slot int, u use) {
	if u == (use{}) {
		delete(l.uses[id][v], slot)
		if len(l.uses[id][v]) == 0 {
			delete(l.uses[id], v)
		}
		if len(l.uses[id]) == 0 {
			delete(l.uses, id)
		}
		return
	}
	if l.uses[id] == nil {
		l.uses[id] = make(gpuUse)
	}
	if l.uses[id][v] == nil {
		l.uses[id][v] = make(map[int]use)
	}
	l.uses[id][v][slot] = u
}

// excluder returns a view in use that excludes the given one, of several the
// first by name.
func (l *Ledger) excluder(id string, v view) (view, bool) {
	var found []view
	for other := range l.uses[id] {
		if excludes(id, other, v) {
			found = append(found, other)
		}
	}
	if len(found) == 0 {
		return view{}, false
	}
	return slices.MinFunc(found, func(a, b view) int {
		return cmp.Or(cmp.Compare(a.resource, b.resource), cmp.Compare(a.base, b.base))
	}), true
}

// excludes says whether two views of the GPU with that UUID must not be in use
// at once. A view does not exclude itself. See Ledger.
func excludes(id string, a, b view) bool {
	if a.base != b.base {
		return a.base == id || b.base == id
	}
	return a.resource != b.resource || a.whole != b.whole
}

func viewOf(resource string, d gpu.DeviceID) view {
	return view{resource: resource, base: d.Base, whole: d.Slot == gpu.NoSlot}
}

// slotsOf counts the slots of each GPU or MIG device.
func slotsOf(r *sharing.Resource) map[string]int {
	n := make(map[string]int)
	for _, d := range r.Devices {
		if d.ID.Slot != gpu.NoSlot {
			n[d.ID.Base]++
		}
	}
	return n
}

func inUse(id string, v view) string {
	if v.base != id {
		return fmt.Sprintf("MIG device %s of GPU %s is in use as %s", v.base, id, v.resource)
	}
	return fmt.Sprintf("GPU %s is in use as %s", id, v.resource)
}

func full(base string, slots, sharers int) string {
	return fmt.Sprintf("%s is shared by %d containers already, for %d slots that it has now", base, sharers, slots)
}
