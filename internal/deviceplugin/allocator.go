package deviceplugin

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// Config is what an Allocator works by. It must not change once it is given to
// one.
type Config struct {
	Machine  *gpu.Machine
	Resource *sharing.Resource
	// Flags say how a container is told its devices.
	Flags sharing.Flags
	// ProcRoot is where the driver's files under /proc are found, usually
	// "/proc". "" is for a machine without a driver, whose MIG devices have no
	// capability nodes.
	ProcRoot string
	// Reuse says why devices that are in use under the same resource must not be given
	// now; nil where they may. The kubelet gives the devices of an init container to
	// the containers after it, and gives those of a pod that has just ended; but it can
	// also lose count of a device and give it twice (see the ADR on devices given
	// twice). Where Reuse is nil they may.
	Reuse func(ctx context.Context, resource string, ids []gpu.DeviceID) error
}

// Allocator chooses and gives the devices of one resource. It is safe for
// concurrent use.
type Allocator struct {
	ledger *Ledger
	now    func() time.Time
	exists func(path string) bool

	// mu is held for reading as long as a question is answered, so that nothing is
	// given by an old configuration once Set has returned.
	mu sync.RWMutex
	c  indexed
}

// indexed is a configuration with what is looked up in it.
type indexed struct {
	Config
	// place is the position in Resource.Devices by device id.
	place map[string]int
	// gpus is the index in Machine.GPUs for each device, -1 where the machine has
	// no such GPU.
	gpus []int
	// total is the number of devices on each GPU, by index in Machine.GPUs.
	total []int
	// whole says that all devices are whole GPUs, mig that some are MIG devices,
	// and slots that some are slots.
	whole, mig, slots bool
}

// NewAllocator returns an Allocator that reserves in the ledger what it gives.
func NewAllocator(l *Ledger, c Config) *Allocator {
	a := &Allocator{ledger: l, now: time.Now, exists: func(path string) bool {
		_, err := os.Stat(path)
		return err == nil
	}}
	a.Set(c)
	return a
}

// Set replaces the configuration. Questions that are being answered are waited
// for. A resource that is about to be retired is set to one without devices
// first, so that nothing of it is given any more.
func (a *Allocator) Set(c Config) {
	index := make(map[string]int, len(c.Machine.GPUs))
	for i := range c.Machine.GPUs {
		index[c.Machine.GPUs[i].UUID] = i
	}
	n := len(c.Resource.Devices)
	x := indexed{
		Config: c, place: make(map[string]int, n), gpus: make([]int, n),
		total: make([]int, len(c.Machine.GPUs)), whole: true,
	}
	for i, d := range c.Resource.Devices {
		x.place[d.ID.String()] = i
		x.gpus[i] = -1
		if g, ok := index[d.GPU]; ok {
			x.gpus[i] = g
			x.total[g]++
		}
		mig, slot := d.ID.Base != d.GPU, d.ID.Slot != gpu.NoSlot
		x.mig, x.slots = x.mig || mig, x.slots || slot
		x.whole = x.whole && !mig && !slot
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	a.c = x
}

// Prefer returns the devices that the kubelet should give: all of required and
// as many others of available as make up size, none twice. It returns fewer only
// where fewer are offered, and it never fails. Devices that are unknown,
// unhealthy or withheld come last: Allocate will refuse them, but with a reason. So
// do devices that are in use already.
//
// Slots are chosen by flags.plugin.sharedDevicesAllocationPolicy. Of MIG devices
// those come first whose GPU is the most used already, whatever the policy: so
// GPUs stay free as a whole, for larger MIG devices after another cut. A
// container that gets several devices gets them on as many GPUs as possible.
func (a *Allocator) Prefer(available, required []string, size int) []string {
	return a.PreferWith(nil, available, required, size)
}

// PreferWith is Prefer with a wish, which is the answer where it is one: so many
// devices as are asked for, none twice, all of required among them, each of them
// available, known, healthy and not withheld. Any other wish counts for nothing.
func (a *Allocator) PreferWith(wish, available, required []string, size int) []string {
	a.mu.RLock()
	defer a.mu.RUnlock()
	c := &a.c
	if size <= 0 {
		return nil
	}
	withheld := a.ledger.withheldOf(c.Resource)
	if withheld == nil {
		withheld = make(map[gpu.DeviceID]string)
	}
	for _, id := range a.ledger.InUseAlready(c.Resource, c.Resource.Devices) {
		if !slices.Contains(required, id.String()) {
			withheld[id] = "it is in use"
		}
	}
	if c.grantable(withheld, wish, available, required, size) {
		return slices.Clone(wish)
	}

	must := make(map[string]bool, len(required))
	answer := make([]string, 0, size)
	for _, id := range required {
		if !must[id] {
			must[id] = true
			answer = append(answer, id)
		}
	}
	seen := make(map[string]bool, len(available))
	var good []int // positions of the known that can be given
	var doubtful []string
	for _, id := range slices.Concat(answer, available) {
		if seen[id] {
			continue
		}
		seen[id] = true
		if at, ok := c.givable(withheld, id); ok {
			good = append(good, at)
		} else if !must[id] {
			doubtful = append(doubtful, id)
		}
	}
	slices.Sort(good)
	if chosen := c.assign(good, answer, size); chosen != nil {
		return chosen
	}
	for _, at := range good {
		if id := c.Resource.Devices[at].ID.String(); !must[id] {
			answer = append(answer, id)
		}
	}
	slices.Sort(doubtful)
	answer = append(answer, doubtful...)
	return answer[:min(size, len(answer))]
}

// givable returns the position of a device and says whether it could be given.
func (c *indexed) givable(withheld map[gpu.DeviceID]string, id string) (int, bool) {
	at, known := c.place[id]
	return at, known && c.gpus[at] >= 0 && c.Resource.Devices[at].Health.OK() && withheld[c.Resource.Devices[at].ID] == ""
}

// grantable says whether a wish can be the answer.
func (c *indexed) grantable(withheld map[gpu.DeviceID]string, wish, available, required []string, size int) bool {
	if len(wish) != size {
		return false
	}
	for i, id := range wish {
		if _, ok := c.givable(withheld, id); !ok || slices.Contains(wish[:i], id) || !slices.Contains(available, id) {
			return false
		}
	}
	return !slices.ContainsFunc(required, func(id string) bool { return !slices.Contains(wish, id) })
}

// assign asks the placement engine. It returns nil where that has no answer.
func (c *indexed) assign(good []int, required []string, size int) []string {
	r := placement.AssignRequest{Size: size, Required: required}
	if c.mig || c.Flags.Plugin.AllocationPolicy == sharing.Packed {
		r.Spread = placement.PackTight
	}
	if !c.whole {
		r.Taken = slices.Clone(c.total)
		for _, at := range good {
			r.Taken[c.gpus[at]]--
		}
	}
	if c.mig && c.slots {
		good = c.byMIGDevice(good, required)
	}
	for _, at := range good {
		r.Available = append(r.Available, placement.Device{ID: c.Resource.Devices[at].ID.String(), GPU: c.gpus[at]})
	}
	ids, err := placement.Assign(c.Machine, r)
	if err != nil {
		return nil
	}
	return ids
}

// byMIGDevice orders slots for the engine, which takes the first ones of a GPU
// and does not see that they belong to several MIG devices: one slot of each
// before a second of any, by the policy among those that tie.
func (c *indexed) byMIGDevice(good []int, required []string) []int {
	devices := c.Resource.Devices
	taken := slotsOf(c.Resource)
	for _, at := range good {
		taken[devices[at].ID.Base]--
	}
	round := make(map[string]int)
	for _, id := range required {
		if at, ok := c.place[id]; ok {
			round[devices[at].ID.Base]++
		}
	}
	type candidate struct{ at, round, taken int }
	candidates := make([]candidate, len(good))
	for i, at := range good {
		base := devices[at].ID.Base
		candidates[i] = candidate{at: at, round: round[base], taken: taken[base]}
		if c.Flags.Plugin.AllocationPolicy == sharing.Packed {
			candidates[i].taken = -taken[base]
		}
		if slices.Contains(required, devices[at].ID.String()) {
			candidates[i].round = -1 // counted already
		} else {
			round[base]++
		}
	}
	slices.SortStableFunc(candidates, func(x, y candidate) int {
		return cmp.Or(cmp.Compare(x.round, y.round), cmp.Compare(x.taken, y.taken))
	})
	ordered := make([]int, len(good))
	for i, x := range candidates {
		ordered[i] = x.at
	}
	return ordered
}

// Allocate reserves the devices and returns how the container gets them. The
// error says, for the events of a pod, which device cannot be given and why, or
// which setting of the configuration stands against it.
func (a *Allocator) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	a.mu.RLock()
	defer a.mu.RUnlock()
	c := &a.c
	places := make([]int, 0, len(ids))
	slots := 0
	for _, id := range ids {
		at, ok := c.place[id]
		switch {
		case !ok:
			return nil, fmt.Errorf("%s has no device %s now", c.Resource.Name, id)
		case slices.Contains(places, at):
			return nil, fmt.Errorf("device %s of %s is asked for twice", id, c.Resource.Name)
		}
		if h := c.Resource.Devices[at].Health; !h.OK() {
			return nil, fmt.Errorf("device %s of %s cannot be given: GPU %s is %s: %s",
				id, c.Resource.Name, c.Resource.Devices[at].GPU, h.State, cmp.Or(h.Reason, "no reason known"))
		}
		if c.Resource.Devices[at].ID.Slot != gpu.NoSlot {
			slots++
		}
		places = append(places, at)
	}
	if slots > 0 && len(ids) > 1 && c.Resource.FailRequestsGreaterThanOne {
		return nil, fmt.Errorf("the container asks for %d of %s, and failRequestsGreaterThanOne allows 1: more slots are not more of a GPU", len(ids), c.Resource.Name)
	}
	slices.Sort(places)
	devices := make([]sharing.Device, len(places))
	for i, at := range places {
		devices[i] = c.Resource.Devices[at]
	}
	response, err := c.response(devices, a.exists)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", c.Resource.Name, err)
	}
	if used := a.ledger.InUseAlready(c.Resource, devices); len(used) > 0 && c.Reuse != nil {
		if err := c.Reuse(ctx, c.Resource.Name, used); err != nil {
			return nil, fmt.Errorf("%s: %w", c.Resource.Name, err)
		}
	}
	// Last, so that what fails above leaves no reservation.
	if err := a.ledger.Reserve(a.now(), c.Resource, devices); err != nil {
		return nil, err
	}
	return response, nil
}
