package health

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Policy says how long a unit is out.
type Policy struct {
	// Quiet is how long a unit must be without faults before it returns.
	Quiet time.Duration
	// MaxQuiet bounds the window that falls have doubled.
	MaxQuiet time.Duration
	// Memory is how long a fall counts for the next window.
	Memory time.Duration

	// What Override sets.
	ignored, enabled     map[int]bool
	ignoreAll, enableAll bool
}

// DefaultPolicy is two minutes, doubled up to an hour by the falls of a day.
func DefaultPolicy() Policy {
	return Policy{Quiet: 2 * time.Minute, MaxQuiet: time.Hour, Memory: 24 * time.Hour}
}

// maxFalls bounds the falls that are remembered: more of them double nothing.
const maxFalls = 16

// maxUnits bounds the units that are remembered. A node has far fewer; those that
// were heard of last are kept.
const maxUnits = 1024

// unit is the state of a GPU, or of a GPU instance.
type unit struct {
	// GPU is the UUID, GI the GPU instance, gpu.AnyInstance for the GPU itself.
	GPU string `json:"gpu"`
	GI  int    `json:"gi"`
	// MIG is the UUID of the MIG device, once a reading has told it. An instance
	// that is made anew under the same GI is another one.
	MIG string `json:"mig,omitempty"`
	// Since is when the unit fell, zero while it is healthy.
	Since time.Time `json:"since,omitzero"`
	// Last is when its last fault was.
	Last time.Time `json:"last,omitzero"`
	// Falls are when it fell, the latest last.
	Falls []time.Time `json:"falls,omitempty"`
	// State and Reason are the verdict, Action what must be done.
	State  gpu.HealthState `json:"state,omitempty"`
	Reason string          `json:"reason,omitempty"`
	Action Action          `json:"action,omitempty"`
	// Reported says that the reason is what the driver or an XID reported, which an
	// operator can override and a reboot cures.
	Reported bool `json:"reported,omitempty"`
	// Heard is when the unit was last seen or spoken of.
	Heard time.Time `json:"heard,omitzero"`
	// told is the verdict that the last Observe returned.
	told gpu.Health
}

type key struct {
	gpu string
	gi  int
}

// Tracker knows the health of a node's units. It is not safe for concurrent use.
type Tracker struct {
	policy Policy
	boot   string
	units  map[key]*unit
	// mig finds the unit of a MIG device, as of the last Observe.
	mig map[string]key
}

// New returns a Tracker to which all is healthy.
func New(p Policy, bootID string) *Tracker {
	return &Tracker{policy: p, boot: bootID, units: make(map[key]*unit), mig: make(map[string]key)}
}

// stateVersion is the format of Encode.
const stateVersion = 1

type encoded struct {
	Version int     `json:"version"`
	Table   string  `json:"table"`
	BootID  string  `json:"bootID"`
	Units   []*unit `json:"units"`
}

// Encode returns the state. Equal states give equal bytes.
func (t *Tracker) Encode() ([]byte, error) {
	e := encoded{Version: stateVersion, Table: TableVersion, BootID: t.boot, Units: []*unit{}}
	for _, k := range t.sorted() {
		// A unit to which nothing has happened need not be kept.
		if u := t.units[k]; !u.Since.IsZero() || len(u.Falls) > 0 {
			kept := *u
			kept.Heard = u.latest()
			e.Units = append(e.Units, &kept)
		}
	}
	return json.Marshal(e)
}

// latest is when something last happened to the unit. It stands in for when it was
// heard of, which changes with each reading.
func (u *unit) latest() time.Time {
	if n := len(u.Falls); n > 0 && u.Falls[n-1].After(u.Last) {
		return u.Falls[n-1]
	}
	return u.Last
}

func (t *Tracker) sorted() []key {
	return slices.SortedFunc(maps.Keys(t.units), func(a, b key) int {
		if c := strings.Compare(a.gpu, b.gpu); c != 0 {
			return c
		}
		return a.gi - b.gi
	})
}

// Restore goes on from the state that Encode returned. After another boot, faults
// that were reported are over, as a reboot resets every GPU, and probes are made
// anew; the falls still count.
func Restore(p Policy, bootID string, data []byte) (*Tracker, error) {
	var e encoded
	if err := json.Unmarshal(data, &e); err != nil {
		return nil, fmt.Errorf("health state: %w", err)
	}
	if e.Version != stateVersion {
		return nil, fmt.Errorf("health state: version %d, this program knows %d", e.Version, stateVersion)
	}
	if len(e.Units) > maxUnits {
		return nil, fmt.Errorf("health state: %d units, at most %d are kept", len(e.Units), maxUnits)
	}
	t := New(p, bootID)
	for _, u := range e.Units {
		switch {
		case u == nil || u.GPU == "" || u.GI < gpu.AnyInstance:
			return nil, errors.New("health state: a unit without a name")
		case u.State < gpu.Healthy || u.State > gpu.Lost || (u.State == gpu.Healthy) != u.Since.IsZero():
			return nil, fmt.Errorf("health state: GPU %s: state and since contradict each other", u.GPU)
		case len(u.Falls) > maxFalls:
			return nil, fmt.Errorf("health state: GPU %s: %d falls, at most %d are kept", u.GPU, len(u.Falls), maxFalls)
		}
		if e.BootID != bootID {
			if u.GI != gpu.AnyInstance {
				continue // instances do not outlive a boot
			}
			u.recover()
		}
		u.told = u.verdict()
		t.units[key{u.GPU, u.GI}] = u
	}
	return t, nil
}

func (u *unit) recover() {
	u.Since, u.Last, u.State, u.Reason, u.Action, u.Reported = time.Time{}, time.Time{}, gpu.Healthy, "", Ignore, false
}

func (u *unit) verdict() gpu.Health { return gpu.Health{State: u.State, Reason: u.Reason} }

// unit returns the state of a GPU or GPU instance.
func (t *Tracker) unit(now time.Time, id string, gi int) *unit {
	k := key{id, gi}
	u := t.units[k]
	if u == nil {
		if len(t.units) >= maxUnits {
			t.forget(now)
		}
		u = &unit{GPU: id, GI: gi}
		t.units[k] = u
	}
	u.Heard = now
	return u
}

// forget drops the unit that was heard of the longest ago.
func (t *Tracker) forget(now time.Time) {
	oldest, at := key{}, now
	for _, k := range t.sorted() {
		if heard := t.units[k].Heard; oldest == (key{}) || heard.Before(at) {
			oldest, at = k, heard
		}
	}
	delete(t.units, oldest)
}

// fault takes a fault in.
func (u *unit) fault(now time.Time, state gpu.HealthState, reason string, action Action, reported bool) {
	if u.Since.IsZero() {
		u.Since = now
		u.Falls = append(u.Falls, now)
		if n := len(u.Falls); n > maxFalls {
			u.Falls = slices.Delete(u.Falls, 0, n-maxFalls)
		}
	}
	u.Last, u.State, u.Reason, u.Action, u.Reported = now, state, reason, action, reported
}

// window is how long the unit must be quiet now.
func (u *unit) window(now time.Time, p *Policy) time.Duration {
	window := p.Quiet
	// The fall that it is in counts for nothing; those before it do.
	for i, fall := range u.Falls {
		if i < len(u.Falls)-1 && now.Sub(fall) < p.Memory && window < p.MaxQuiet {
			window = min(2*window, p.MaxQuiet)
		}
	}
	return window
}

// Event takes an XID in. One that names a GPU instance is about that alone, unless
// its rule is about the whole GPU.
func (t *Tracker) Event(now time.Time, e gpu.Event) {
	r := RuleOf(e.XID)
	if e.GPU == "" || !t.policy.removes(r) {
		return
	}
	gi := e.GI
	if r.Whole || gi < 0 {
		gi = gpu.AnyInstance
	}
	u := t.unit(now, e.GPU, gi)
	reason, action := fmt.Sprintf("XID %d: %s", e.XID, r.Why), r.Action
	if u.State == gpu.Lost {
		// That it does not answer is the worse news.
		reason = u.Reason
	}
	u.fault(now, max(u.State, gpu.Unhealthy), reason, action, true)
}

// Change is a change of the health of a GPU, or of one of its MIG devices.
type Change struct {
	// GPU is the UUID of the GPU, MIG that of the MIG device, "" for the GPU itself.
	GPU, MIG string
	Was, Is  gpu.Health
}

// Observe takes a reading in and puts the verdicts onto it: the Health of each GPU
// and of each MIG device. What the driver and XIDs report of the GPUs in override,
// by UUID, counts for nothing; a probe that fails does. It returns what has changed
// since the last Observe, in the order of the machine.
func (t *Tracker) Observe(now time.Time, m *gpu.Machine, override map[string]bool) []Change {
	var changes []Change
	clear(t.mig)
	for i := range m.GPUs {
		g := &m.GPUs[i]
		u := t.unit(now, g.UUID, gpu.AnyInstance)
		t.probe(now, u, g, override[g.UUID])
		probe := g.Health
		g.Health = u.verdict()
		changes = append(changes, u.change("")...)
		if probe.State != gpu.Lost {
			t.dropInstances(g)
		}
		for j := range g.MIG.Devices {
			d := &g.MIG.Devices[j]
			d.Health = gpu.Health{}
			k := key{g.UUID, d.GI}
			v, known := t.units[k]
			if !known {
				continue // nothing has ever happened to it
			}
			t.mig[d.UUID] = k
			v.Heard, v.MIG = now, d.UUID
			if override[g.UUID] || probe.State != gpu.Lost && t.quiet(now, v) {
				v.recover()
			}
			d.Health = v.verdict()
			changes = append(changes, v.change(d.UUID)...)
		}
	}
	for k, u := range t.units {
		if now.Sub(u.Heard) > t.policy.Memory {
			delete(t.units, k) // it has been out of the machine for long
		}
	}
	return changes
}

// probe judges a GPU by a reading.
func (t *Tracker) probe(now time.Time, u *unit, g *gpu.GPU, override bool) {
	switch {
	case g.Health.State != gpu.Healthy:
		action := Diagnose
		if g.Recovery != gpu.RecoveryNone {
			action = recoveryAction(g.Recovery)
		} else if u.Reported {
			action = u.Action // an XID has said already what must be done
		}
		u.fault(now, g.Health.State, g.Health.Reason, action, false)
	case g.Recovery != gpu.RecoveryNone && !override:
		u.fault(now, gpu.Unhealthy, "the driver asks: "+g.Recovery.String(), recoveryAction(g.Recovery), true)
	case u.Since.IsZero():
	case override && u.Reported, t.quiet(now, u):
		u.recover()
	case u.State == gpu.Lost:
		u.State, u.Reason = gpu.Unhealthy, "it was lost and is watched"
	}
}

// quiet says whether the unit has been without faults for its window. A clock that
// was set back must not keep it out.
func (t *Tracker) quiet(now time.Time, u *unit) bool {
	since := now.Sub(u.Last)
	if since < 0 {
		u.Last = now
		return false
	}
	return since >= u.window(now, &t.policy)
}

// dropInstances forgets the instances of an answering GPU that are gone or have
// been made anew.
func (t *Tracker) dropInstances(g *gpu.GPU) {
	for k, u := range t.units {
		if k.gpu != g.UUID || k.gi == gpu.AnyInstance {
			continue
		}
		i := slices.IndexFunc(g.MIG.Devices, func(d gpu.MIGDevice) bool { return d.GI == k.gi })
		if i < 0 || u.MIG != "" && u.MIG != g.MIG.Devices[i].UUID {
			delete(t.units, k)
		}
	}
}

// change tells the verdict if it is another than the last one told.
func (u *unit) change(mig string) []Change {
	was, is := u.told, u.verdict()
	u.told = is
	if was == is {
		return nil
	}
	return []Change{{GPU: u.GPU, MIG: mig, Was: was, Is: is}}
}

func recoveryAction(r gpu.Recovery) Action {
	switch r {
	case gpu.RecoveryReset:
		return ResetGPU
	case gpu.RecoveryReboot:
		return Reboot
	case gpu.RecoveryDrainP2P:
		return DrainP2P
	case gpu.RecoveryDrainReset:
		return DrainReset
	}
	return Diagnose
}

// Fault says why a unit is unhealthy.
type Fault struct {
	// Since is when it fell, zero for a healthy unit.
	Since time.Time
	// Returns is when it returns at the earliest, if nothing more happens.
	Returns time.Time
	Action  Action
}

// Fault returns the fault of a GPU or MIG device, by UUID, as of the last Observe.
func (t *Tracker) Fault(uuid string) Fault {
	k, ok := t.mig[uuid]
	if !ok {
		k = key{uuid, gpu.AnyInstance}
	}
	u := t.units[k]
	if u == nil || u.Since.IsZero() {
		return Fault{}
	}
	return Fault{Since: u.Since, Returns: u.Last.Add(u.window(u.Last, &t.policy)), Action: u.Action}
}
