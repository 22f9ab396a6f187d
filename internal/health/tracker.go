package health

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

const (
	// maxFalls is how many falls of a unit are remembered. As many doublings exceed
	// every duration.
	maxFalls = 64
	// maxInstances is above the id of any GPU instance.
	maxInstances = 64
	// maxAbsent is how many GPUs that the last reading did not have are remembered.
	maxAbsent = 256
)

// Policy says which XIDs count and how long a unit stays out.
type Policy struct {
	// Quiet is how long a unit must be without a fault before it returns. 0 lets it
	// return with the first reading that passes after the one it fell with.
	Quiet time.Duration
	// MaxQuiet bounds the doubled window; it does not make it shorter than Quiet.
	MaxQuiet time.Duration
	// Memory is how long a fall is remembered, and what is known of a GPU that is no
	// longer in the readings.
	Memory time.Duration

	// Set by Override: XIDs that do not remove, and XIDs that do.
	ignored, enabled xidSet
}

// DefaultPolicy is a window of 2 minutes, doubled up to 1 hour by the falls of 24
// hours, with the XIDs of the table.
func DefaultPolicy() Policy {
	return Policy{Quiet: 2 * time.Minute, MaxQuiet: time.Hour, Memory: 24 * time.Hour}
}

// window is how long a unit must be quiet that has fallen so often, this time
// included.
func (p *Policy) window(falls int) time.Duration {
	window := max(p.Quiet, 0)
	for range falls - 1 {
		if window > p.MaxQuiet/2 {
			return max(p.Quiet, p.MaxQuiet)
		}
		window *= 2
	}
	return window
}

// remembers says whether something of that time counts now.
func (p *Policy) remembers(now, then time.Time) bool { return now.Sub(then) <= p.Memory }

// Tracker follows the health of a node's GPUs. It is not safe for concurrent use.
type Tracker struct {
	policy Policy
	bootID string
	// gpus has the GPUs to which something has happened, by UUID.
	gpus map[string]*tracked
}

// tracked is what is known of a GPU.
type tracked struct {
	unit
	// Events are the XIDs since the last reading, and those of instances since the
	// last one in which the GPU answered, by the id of the GPU instance.
	Events map[int]xidFault `json:"events,omitempty"`
	// MIG are its MIG devices to which something has happened, by UUID.
	MIG map[string]*unit `json:"mig,omitempty"`
	// Missing is since when no reading has it and no event speaks of it, zero where
	// it is not missing.
	Missing time.Time `json:"missing,omitzero"`

	// present says that the last reading had it.
	present bool
}

// unit is the state of a GPU or of a MIG device. It is unhealthy while it has a
// fault, and has at most one of each source. A zero Ended means that it goes on.
type unit struct {
	// Falls are when it turned unhealthy, in order. While it is unhealthy the last of
	// them is the present one.
	Falls []time.Time `json:"falls,omitempty"`
	// XID is what the driver reported.
	XID xidFault `json:"xid,omitzero"`
	// Recovery is the driver's recovery action.
	Recovery      gpu.Recovery `json:"recovery,omitempty"`
	RecoveryEnded time.Time    `json:"recoveryEnded,omitzero"`
	// Probe is the reason for which a reading found it not healthy.
	Probe      string    `json:"probe,omitempty"`
	Lost       bool      `json:"lost,omitempty"`
	ProbeEnded time.Time `json:"probeEnded,omitzero"`
	// Rebooted says that the machine was started anew since, so that the next reading
	// decides alone.
	Rebooted bool `json:"rebooted,omitempty"`
}

// xidFault is one or more XIDs: the first of those that ask for the most, and the
// time of the last.
type xidFault struct {
	XID int       `json:"xid"`
	At  time.Time `json:"at"`
}

func (f *xidFault) add(o xidFault) {
	if f.XID == 0 || RuleOf(o.XID).Action > RuleOf(f.XID).Action {
		f.XID = o.XID
	}
	if o.At.After(f.At) {
		f.At = o.At
	}
}

// New returns a Tracker to which nothing has happened. bootID names the boot of the
// machine.
func New(p Policy, bootID string) *Tracker {
	// As it is written, so that it is found again.
	bootID = strings.ToValidUTF8(bootID, "\uFFFD")
	return &Tracker{policy: p, bootID: bootID, gpus: make(map[string]*tracked)}
}

// Event takes in what the driver reports. It shows with the next Observe. An XID of
// a GPU instance is about the MIG devices which that instance has in the next
// reading in which the GPU answers, unless its rule is about the whole GPU.
func (t *Tracker) Event(now time.Time, e gpu.Event) {
	if e.GPU == "" || e.XID < 1 || !t.policy.removes(e.XID) {
		return
	}
	gi := e.GI
	if gi < 0 || gi >= maxInstances || RuleOf(e.XID).Whole {
		gi = gpu.AnyInstance
	}
	s := t.gpus[e.GPU]
	if s == nil {
		s = new(tracked)
		t.gpus[e.GPU] = s
	}
	if s.Events == nil {
		s.Events = make(map[int]xidFault)
	}
	f := s.Events[gi]
	f.add(xidFault{e.XID, now.UTC()})
	s.Events[gi] = f
	s.Missing = time.Time{}
	t.limit()
}

// Change is a change of the health of a GPU or MIG device.
type Change struct {
	// GPU is the UUID of the GPU.
	GPU string
	// MIG is the UUID of the MIG device, "" for the GPU itself.
	MIG     string
	Was, Is gpu.Health
}

// Observe takes a reading in, which is the probe of all units, and puts the verdicts
// onto it: m.GPUs[i].Health, and the Health of each MIG device, which is its own
// alone. XIDs and recovery actions of the GPUs in override, by UUID, and of their MIG
// devices count for nothing and are forgotten; a probe that fails counts. m must be
// valid. It returns what changed since the last Observe, in the order of GPUs, each
// before its MIG devices.
func (t *Tracker) Observe(now time.Time, m *gpu.Machine, override map[string]bool) []Change {
	now = now.UTC() // one time has one text
	for _, s := range t.gpus {
		s.present = false
	}
	var changes []Change
	for i := range m.GPUs {
		changes = append(changes, t.observe(now, &m.GPUs[i], override[m.GPUs[i].UUID])...)
	}
	for uuid, s := range t.gpus {
		if s.present {
			continue
		}
		if s.Missing.IsZero() || s.Missing.After(now) {
			s.Missing = now
		}
		if !t.policy.remembers(now, s.Missing) {
			delete(t.gpus, uuid)
		}
	}
	t.limit()
	return changes
}

// observe takes in the reading of a GPU.
func (t *Tracker) observe(now time.Time, g *gpu.GPU, override bool) []Change {
	s := t.gpus[g.UUID]
	if s == nil {
		s = new(tracked)
	}
	s.present, s.Missing = true, time.Time{}
	s.notAfter(now)
	answers := g.Health.State != gpu.Lost
	var changes []Change
	tell := func(mig string, was, is gpu.Health) {
		if was != is {
			changes = append(changes, Change{GPU: g.UUID, MIG: mig, Was: was, Is: is})
		}
	}
	was := s.observe(now, &t.policy, reading{s.Events[gpu.AnyInstance], g.Health, g.Recovery, answers, override})
	g.Health = s.verdict()
	tell("", was, g.Health)

	units := make(map[string]*unit)
	for i := range g.MIG.Devices {
		d := &g.MIG.Devices[i]
		u := s.MIG[d.UUID]
		if u == nil {
			u = new(unit)
		}
		r := reading{health: d.Health, answers: answers, override: override}
		if answers {
			r.xid = s.Events[d.GI]
		}
		was := u.observe(now, &t.policy, r)
		d.Health = u.verdict()
		tell(d.UUID, was, d.Health)
		if !u.blank() {
			units[d.UUID] = u
		}
	}
	if answers {
		// What is not in the reading is gone.
		s.MIG, s.Events = units, nil
	} else {
		delete(s.Events, gpu.AnyInstance)
		if s.MIG == nil {
			s.MIG = units
		}
		maps.Copy(s.MIG, units)
	}
	// Events are left of a lost GPU alone, which is not blank.
	if s.blank() && len(s.MIG) == 0 {
		delete(t.gpus, g.UUID)
	} else {
		t.gpus[g.UUID] = s
	}
	return changes
}

// limit forgets the GPUs that are missing the longest, if those that the last reading
// did not have are too many.
func (t *Tracker) limit() {
	var absent []string
	for uuid, s := range t.gpus {
		if !s.present {
			absent = append(absent, uuid)
		}
	}
	if len(absent) <= maxAbsent {
		return
	}
	slices.SortFunc(absent, func(a, b string) int {
		x, y := t.gpus[a].Missing, t.gpus[b].Missing
		if x.IsZero() != y.IsZero() {
			return y.Compare(x) // what was heard of since the last reading comes last
		}
		return cmp.Or(x.Compare(y), cmp.Compare(a, b))
	})
	for _, uuid := range absent[:len(absent)-maxAbsent] {
		delete(t.gpus, uuid)
	}
}

// reading is what one reading says of a unit.
type reading struct {
	// xid are the XIDs since the last reading.
	xid      xidFault
	health   gpu.Health
	recovery gpu.Recovery
	// answers is false where the GPU is lost: then what is said of its MIG devices is
	// what was known before, and passes no probe.
	answers  bool
	override bool
}

// observe takes a reading in and returns the verdict that was.
func (u *unit) observe(now time.Time, p *Policy, r reading) gpu.Health {
	was := u.verdict()
	if u.Rebooted {
		*u = unit{Falls: u.Falls}
	}
	down := u.faulty()
	u.take(now, r)
	if r.override || !p.removes(u.XID.XID) {
		u.XID = xidFault{}
	}
	if r.override {
		u.Recovery, u.RecoveryEnded = gpu.RecoveryNone, time.Time{}
	}
	forgotten := func(fall time.Time) bool { return !p.remembers(now, fall) }
	switch {
	case u.faulty() && !down:
		u.Falls = append(slices.DeleteFunc(u.Falls, forgotten), now)
		u.Falls = u.Falls[max(0, len(u.Falls)-maxFalls):]
	case u.faulty() && r.answers && !u.goesOn() && !now.Before(u.returns(p)):
		*u = unit{Falls: u.Falls}
	}
	if !u.faulty() {
		u.Falls = slices.DeleteFunc(u.Falls, forgotten)
	}
	return was
}

// take notes the faults of a reading, and which ones it ends.
func (u *unit) take(now time.Time, r reading) {
	if r.xid.XID != 0 {
		u.XID.add(r.xid)
	}
	switch {
	case !r.health.OK():
		u.Probe, u.Lost, u.ProbeEnded = r.health.Reason, r.health.State == gpu.Lost, time.Time{}
		if u.Probe == "" {
			u.Probe = "no reason is known"
		}
	case r.answers && u.Probe != "" && u.ProbeEnded.IsZero():
		u.ProbeEnded = now
	}
	switch {
	case r.recovery != gpu.RecoveryNone:
		u.Recovery, u.RecoveryEnded = r.recovery, time.Time{}
	case u.Recovery != gpu.RecoveryNone && u.RecoveryEnded.IsZero():
		u.RecoveryEnded = now
	}
}

// notAfter takes what happened later than now as happening now. A clock that was set
// back must not keep a unit out until it is that late again.
func (s *tracked) notAfter(now time.Time) {
	for gi, f := range s.Events {
		notAfter(&f.At, now)
		s.Events[gi] = f
	}
	s.unit.notAfter(now)
	for _, u := range s.MIG {
		u.notAfter(now)
	}
}

func (u *unit) notAfter(now time.Time) {
	for i := range u.Falls {
		notAfter(&u.Falls[i], now)
	}
	notAfter(&u.XID.At, now)
	notAfter(&u.ProbeEnded, now)
	notAfter(&u.RecoveryEnded, now)
}

func notAfter(at *time.Time, now time.Time) {
	if at.After(now) {
		*at = now
	}
}

// faulty says whether there is a fault, which is to say that the unit is unhealthy.
func (u *unit) faulty() bool {
	return u.XID.XID != 0 || u.Probe != "" || u.Recovery != gpu.RecoveryNone
}

// goesOn says whether a fault still lasted at the last reading that answered.
func (u *unit) goesOn() bool {
	return u.Probe != "" && u.ProbeEnded.IsZero() || u.Recovery != gpu.RecoveryNone && u.RecoveryEnded.IsZero()
}

// blank says whether there is nothing to remember.
func (u *unit) blank() bool { return !u.faulty() && len(u.Falls) == 0 }

// lost says whether the last reading got no answer.
func (u *unit) lost() bool { return u.Lost && u.ProbeEnded.IsZero() }

// returns is when an unhealthy unit whose faults are over returns.
func (u *unit) returns(p *Policy) time.Time {
	last := u.XID.At
	for _, end := range []time.Time{u.ProbeEnded, u.RecoveryEnded} {
		if end.After(last) {
			last = end
		}
	}
	return last.Add(p.window(len(u.Falls)))
}

// verdict is the health as of the last reading.
func (u *unit) verdict() gpu.Health {
	switch {
	case u.lost():
		return gpu.Health{State: gpu.Lost, Reason: u.Probe}
	case u.Recovery != gpu.RecoveryNone:
		return gpu.Health{State: gpu.Unhealthy, Reason: "the driver says: " + u.Recovery.String()}
	case u.XID.XID != 0:
		return gpu.Health{State: gpu.Unhealthy, Reason: fmt.Sprintf("XID %d: %s", u.XID.XID, RuleOf(u.XID.XID).Why)}
	case u.Probe != "":
		return gpu.Health{State: gpu.Unhealthy, Reason: u.Probe}
	}
	return gpu.Health{}
}

// action is what must be done about the fault.
func (u *unit) action() Action {
	if u.Recovery == gpu.RecoveryNone {
		return RuleOf(u.XID.XID).Action
	}
	switch u.Recovery {
	case gpu.RecoveryReset:
		return ResetGPU
	case gpu.RecoveryReboot:
		return Reboot
	case gpu.RecoveryDrainP2P:
		return DrainP2P
	case gpu.RecoveryDrainReset:
		return DrainReset
	}
	return Unknown
}

// Fault is why a unit is unhealthy.
type Fault struct {
	// Since is when it turned unhealthy, zero where it is healthy.
	Since time.Time
	// Returns is when it returns if nothing more happens and the reading then passes,
	// zero where it first waits for a reading without faults.
	Returns time.Time
	// Action is what must be done.
	Action Action
}

// Fault returns the fault of a GPU or MIG device, by UUID, as of the last Observe.
// That of a MIG device is its own alone.
func (t *Tracker) Fault(uuid string) Fault {
	if s := t.gpus[uuid]; s != nil {
		return s.fault(&t.policy)
	}
	for _, id := range slices.Sorted(maps.Keys(t.gpus)) {
		s := t.gpus[id]
		if u := s.MIG[uuid]; u != nil {
			f := u.fault(&t.policy)
			if s.lost() {
				f.Returns = time.Time{}
			}
			return f
		}
	}
	return Fault{}
}

func (u *unit) fault(p *Policy) Fault {
	if !u.faulty() {
		return Fault{}
	}
	f := Fault{Since: u.Falls[len(u.Falls)-1], Action: u.action()}
	if !u.goesOn() {
		f.Returns = u.returns(p)
	}
	return f
}
