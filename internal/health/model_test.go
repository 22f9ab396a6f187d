package health_test

import (
	"fmt"
	"maps"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/health"
	"github.com/ashlar-gpu/ashlar/internal/proptest"
)

// The model keeps everything that has happened since the first start and works the
// verdict of each unit out from that alone, each time from the beginning. It keeps
// no state and knows of no restarts.
type model struct {
	policy  health.Policy
	history []happening
}

// happening is one entry of the history: an XID, a reboot, or else a reading.
type happening struct {
	now      time.Time
	xid      *gpu.Event
	reboot   bool
	reading  *gpu.Machine
	override map[string]bool
}

// judgement is what the model thinks of a unit after a reading.
type judgement struct {
	health gpu.Health
	fault  health.Fault
}

// trouble is a fault of a unit: from is the entry with which it was known, until the
// one with which it was over, -1 while it goes on. For an XID they are the same.
type trouble struct {
	from, until int
	xid         int
	recovery    gpu.Recovery
	probe       gpu.Health
}

// time returns the time of an entry for a unit: it is after none of the later
// readings in which its GPU was, should the clock have been set back.
func (m *model) time(entry int, seenIn []int) time.Time {
	at := m.history[entry].now
	for _, i := range seenIn {
		if i >= entry && m.history[i].now.Before(at) {
			at = m.history[i].now
		}
	}
	return at
}

// judge plays the history of the GPU, or of its MIG device, from the beginning.
func (m *model) judge(id, mig string) judgement {
	var (
		troubles []trouble // of the present outage
		falls    []int     // the entries with which it fell
		seenIn   []int     // the readings in which its GPU was
		pending  []int     // XIDs that no reading has taken in
		down     bool
		result   judgement
		unheard  []int // readings without the GPU since it was last heard of
	)
	forget := func() { troubles, falls, seenIn, pending, down, result = nil, nil, nil, nil, false, judgement{} }
	for n, h := range m.history {
		switch {
		case h.xid != nil:
			if h.xid.GPU == id && health.RuleOf(h.xid.XID).Removes {
				pending, unheard = append(pending, n), nil
			}
			continue
		case h.reboot:
			troubles, pending, down = nil, nil, false
			continue
		}
		g := h.reading.ByUUID(id)
		if g == nil {
			unheard = append(unheard, n)
			if h.now.Sub(m.time(unheard[0], unheard)) > m.policy.Memory {
				forget()
			}
			continue
		}
		unheard = nil
		seenIn = append(seenIn, n)
		answers, reading, recovery, instance := g.Health.State != gpu.Lost, g.Health, g.Recovery, gpu.AnyInstance
		if mig != "" {
			i := slices.IndexFunc(g.MIG.Devices, func(d gpu.MIGDevice) bool { return d.UUID == mig })
			if i < 0 {
				if answers {
					forget()
				}
				continue
			}
			reading, recovery, instance = g.MIG.Devices[i].Health, gpu.RecoveryNone, g.MIG.Devices[i].GI
		}

		// Which faults are there?
		if answers || mig == "" {
			for _, p := range pending {
				of := m.history[p].xid.GI
				if health.RuleOf(m.history[p].xid.XID).Whole {
					of = gpu.AnyInstance
				}
				if of == instance {
					troubles = append(troubles, trouble{from: p, until: p, xid: m.history[p].xid.XID})
				}
			}
			if answers {
				pending = nil
			} else {
				pending = slices.DeleteFunc(pending, func(p int) bool {
					return m.history[p].xid.GI == gpu.AnyInstance || health.RuleOf(m.history[p].xid.XID).Whole
				})
			}
		}
		for i := range troubles {
			t := &troubles[i]
			if t.until < 0 && (answers || t.recovery != gpu.RecoveryNone && recovery != gpu.RecoveryNone || !t.probe.OK() && !reading.OK()) {
				t.until = n // or the next one begins here
			}
		}
		if recovery != gpu.RecoveryNone {
			troubles = append(troubles, trouble{from: n, until: -1, recovery: recovery})
		}
		if !reading.OK() {
			troubles = append(troubles, trouble{from: n, until: -1, probe: reading})
		}
		if h.override[id] {
			troubles = slices.DeleteFunc(troubles, func(t trouble) bool { return t.probe.OK() })
		}

		// What follows from them?
		remembered := func(falls []int) []int {
			return slices.DeleteFunc(slices.Clone(falls), func(fall int) bool { return h.now.Sub(m.time(fall, seenIn)) > m.policy.Memory })
		}
		goesOn := !answers || slices.ContainsFunc(troubles, func(t trouble) bool { return t.until < 0 })
		var returns time.Time
		for _, t := range troubles {
			if end := t.until; end >= 0 && m.time(end, seenIn).After(returns) {
				returns = m.time(end, seenIn)
			}
		}
		if len(troubles) > 0 && !down {
			falls = append(remembered(falls), n)
		}
		window := m.policy.Quiet
		for range len(falls) - 1 {
			window = min(2*window, max(m.policy.MaxQuiet, m.policy.Quiet))
		}
		returns = returns.Add(window)
		if down && (len(troubles) == 0 || !goesOn && !h.now.Before(returns)) {
			troubles = nil
		}
		down = len(troubles) > 0
		if !down {
			falls, result = remembered(falls), judgement{}
			continue
		}
		result.health, result.fault = told(troubles)
		result.fault.Since = m.time(falls[len(falls)-1], seenIn)
		if !goesOn {
			result.fault.Returns = returns
		}
	}
	return result
}

// told chooses what is said of the troubles of a unit: state, reason and action.
func told(troubles []trouble) (gpu.Health, health.Fault) {
	var h gpu.Health
	var f health.Fault
	for _, t := range troubles { // the least first: what comes later replaces it
		if !t.probe.OK() {
			h = gpu.Health{State: gpu.Unhealthy, Reason: t.probe.Reason}
		}
	}
	xids := slices.DeleteFunc(slices.Clone(troubles), func(t trouble) bool { return t.xid == 0 })
	slices.SortStableFunc(xids, func(a, b trouble) int {
		return int(health.RuleOf(b.xid).Action) - int(health.RuleOf(a.xid).Action)
	})
	if len(xids) > 0 {
		r := health.RuleOf(xids[0].xid)
		h = gpu.Health{State: gpu.Unhealthy, Reason: fmt.Sprintf("XID %d: %s", r.XID, r.Why)}
		f.Action = r.Action
	}
	for _, t := range troubles {
		if t.recovery != gpu.RecoveryNone {
			h = gpu.Health{State: gpu.Unhealthy, Reason: "the driver says: " + t.recovery.String()}
			f.Action = map[gpu.Recovery]health.Action{
				gpu.RecoveryReset: health.ResetGPU, gpu.RecoveryReboot: health.Reboot,
				gpu.RecoveryDrainP2P: health.DrainP2P, gpu.RecoveryDrainReset: health.DrainReset,
			}[t.recovery]
		}
	}
	for _, t := range troubles {
		if t.probe.State == gpu.Lost && t.until < 0 {
			h = t.probe
		}
	}
	return h, f
}

// bench runs the tracker and the model side by side.
type bench struct {
	model
	tracker  *health.Tracker
	boots    int
	now      time.Time
	machine  *gpu.Machine
	away     map[string]bool
	override map[string]bool
	// told are the last verdicts that the tracker gave, by UUID.
	told map[string]gpu.Health
	made int
}

var (
	drawnGPUs   = []string{"GPU-0", "GPU-1", "GPU-2"}
	drawnXIDs   = []int{13, 31, 45, 48, 48, 54, 63, 79, 94, 95, 119, 142, 142, 154, 173}
	drawnSteps  = []time.Duration{0, 1, time.Second, 10 * time.Second, 59 * time.Second, time.Minute, 2 * time.Minute, 4 * time.Minute, 16 * time.Minute, time.Hour, 3 * time.Hour}
	drawnHealth = []gpu.Health{
		{}, {}, {}, lostHealth, {State: gpu.Lost, Reason: "cannot be read"}, {State: gpu.Unhealthy, Reason: "too hot"},
	}
)

func (b *bench) gpu(t *rapid.T) *gpu.GPU {
	return &b.machine.GPUs[rapid.IntRange(0, len(b.machine.GPUs)-1).Draw(t, "gpu")]
}

// observe reads and compares everything.
func (b *bench) observe(t *rapid.T) {
	reading := copied(b.machine)
	reading.GPUs = slices.DeleteFunc(reading.GPUs, func(g gpu.GPU) bool { return b.away[g.UUID] })
	for i := range reading.GPUs {
		reading.GPUs[i].Index = i
	}
	b.history = append(b.history, happening{now: b.now, reading: copied(reading), override: maps.Clone(b.override)})
	got := b.tracker.Observe(b.now, reading, b.override)
	var want []health.Change
	compare := func(id, mig string, is gpu.Health) {
		uuid := id
		if mig != "" {
			uuid = mig
		}
		j := b.judge(id, mig)
		if is != j.health {
			t.Fatalf("%s at %s: the tracker says %v, the model %v", uuid, b.now, is, j.health)
		}
		if f := b.tracker.Fault(uuid); !f.Since.Equal(j.fault.Since) || !f.Returns.Equal(j.fault.Returns) || f.Action != j.fault.Action {
			t.Fatalf("fault of %s at %s: the tracker says %v, the model %v", uuid, b.now, f, j.fault)
		}
		if b.told[uuid] != is {
			want = append(want, health.Change{GPU: id, MIG: mig, Was: b.told[uuid], Is: is})
		}
		b.told[uuid] = is
	}
	// What is no longer known has no verdict to change.
	for _, id := range drawnGPUs {
		if b.judge(id, "") == (judgement{}) && reading.ByUUID(id) == nil {
			delete(b.told, id)
		}
	}
	for uuid := range b.told {
		if id, ok := parentOf(uuid); ok && b.judge(id, uuid) == (judgement{}) && reading.Parent(uuid) == nil {
			delete(b.told, uuid)
		}
	}
	for _, g := range reading.GPUs {
		compare(g.UUID, "", g.Health)
		for _, d := range g.MIG.Devices {
			compare(g.UUID, d.UUID, d.Health)
		}
	}
	if !slices.Equal(want, got) {
		t.Fatalf("changes at %s (-want +got):\n%s", b.now, cmp.Diff(want, got))
	}
}

// parentOf reads the UUID of the GPU out of that of a drawn MIG device.
func parentOf(uuid string) (string, bool) {
	var g, n int
	_, err := fmt.Sscanf(uuid, "MIG-%d-%d", &g, &n)
	return fmt.Sprintf("GPU-%d", g), err == nil
}

// restart goes on with what is written, in the given boot.
func (b *bench) restart(t *rapid.T) {
	data, err := b.tracker.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if len(data) > 32<<10 {
		t.Fatalf("the state has %d bytes", len(data))
	}
	b.tracker, err = health.Restore(b.policy, fmt.Sprint("boot ", b.boots), data)
	if err != nil {
		t.Fatalf("%v: %s", err, data)
	}
}

func TestTrackerAgreesWithModel(t *testing.T) {
	proptest.AtLeast(t, 3000)
	rapid.Check(t, func(t *rapid.T) {
		policy := health.Policy{
			Quiet:    rapid.SampledFrom([]time.Duration{2 * time.Minute, 2 * time.Minute, 10 * time.Second, 0}).Draw(t, "quiet"),
			MaxQuiet: rapid.SampledFrom([]time.Duration{time.Hour, 7 * time.Minute, time.Second}).Draw(t, "max"),
			Memory:   rapid.SampledFrom([]time.Duration{24 * time.Hour, time.Hour, time.Minute}).Draw(t, "memory"),
		}
		b := &bench{
			model: model{policy: policy}, tracker: health.New(policy, "boot 0"), now: start,
			machine: machine(len(drawnGPUs), 2), away: make(map[string]bool), override: make(map[string]bool), told: make(map[string]gpu.Health),
		}
		act := map[string]func(*rapid.T){
			"": b.observe,
			"xid": func(t *rapid.T) {
				e := gpu.Event{
					GPU: b.gpu(t).UUID, XID: rapid.SampledFrom(drawnXIDs).Draw(t, "xid"),
					GI: rapid.IntRange(-1, 3).Draw(t, "gi"), CI: gpu.AnyInstance,
				}
				b.history = append(b.history, happening{now: b.now, xid: &e})
				b.tracker.Event(b.now, e)
			},
			"probe": func(t *rapid.T) {
				b.gpu(t).Health = rapid.SampledFrom(drawnHealth).Draw(t, "health")
			},
			"heal": func(*rapid.T) {
				for i := range b.machine.GPUs {
					g := &b.machine.GPUs[i]
					g.Health, g.Recovery = gpu.Health{}, gpu.RecoveryNone
					for j := range g.MIG.Devices {
						g.MIG.Devices[j].Health = gpu.Health{}
					}
				}
			},
			"probe of a MIG device": func(t *rapid.T) {
				if g := b.gpu(t); len(g.MIG.Devices) > 0 {
					h := rapid.SampledFrom([]gpu.Health{{}, {}, {State: gpu.Unhealthy, Reason: "broken"}}).Draw(t, "health")
					g.MIG.Devices[rapid.IntRange(0, len(g.MIG.Devices)-1).Draw(t, "device")].Health = h
				}
			},
			"recovery": func(t *rapid.T) {
				b.gpu(t).Recovery = gpu.Recovery(rapid.IntRange(0, 5).Draw(t, "recovery"))
			},
			"cut": func(t *rapid.T) {
				g := b.gpu(t)
				var index int
				if _, err := fmt.Sscanf(g.UUID, "GPU-%d", &index); err != nil {
					t.Fatal(err)
				}
				g.MIG.Devices = nil
				for gi := range rapid.IntRange(0, 3).Draw(t, "instances") {
					// Either one that was there before, perhaps, or one made anew.
					if uuid := fmt.Sprintf("MIG-%d-%d", index, gi+1); rapid.Bool().Draw(t, "same") {
						g.MIG.Devices = append(g.MIG.Devices, gpu.MIGDevice{Index: gi, GI: gi + 1, UUID: uuid})
					} else {
						b.made++
						g.MIG.Devices = append(g.MIG.Devices, gpu.MIGDevice{Index: gi, GI: gi + 1, UUID: fmt.Sprintf("MIG-%d-%d", index, 100+b.made)})
					}
				}
			},
			"away": func(t *rapid.T) {
				id := b.gpu(t).UUID
				b.away[id] = !b.away[id]
			},
			"override": func(t *rapid.T) {
				id := b.gpu(t).UUID
				b.override[id] = !b.override[id]
			},
			"time": func(t *rapid.T) {
				b.now = b.now.Add(rapid.SampledFrom(drawnSteps).Draw(t, "step"))
			},
			"clock back": func(t *rapid.T) {
				b.now = b.now.Add(-rapid.SampledFrom(drawnSteps).Draw(t, "step"))
			},
			"restart": b.restart,
			"reboot": func(t *rapid.T) {
				b.boots++
				b.history = append(b.history, happening{now: b.now, reboot: true})
				b.restart(t)
			},
		}
		// Readings and the passing of time are as frequent as they are.
		weights := []string{"", "", "", "", "time", "time", "time", "xid", "xid", "xid", "probe", "heal", "heal", "recovery", "probe of a MIG device", "cut", "away", "override", "clock back", "restart", "reboot"}
		for range rapid.IntRange(1, 60).Draw(t, "length") {
			act[rapid.SampledFrom(weights).Draw(t, "do")](t)
		}
		b.observe(t)

		// Whatever has happened, all that is well returns.
		act["heal"](t)
		b.away = make(map[string]bool)
		for range 2 {
			b.observe(t)
			b.now = b.now.Add(max(policy.Quiet, policy.MaxQuiet))
		}
		b.observe(t)
		for uuid, h := range b.told {
			if !h.OK() {
				t.Fatalf("%s does not return: %v", uuid, h)
			}
		}
	})
}
