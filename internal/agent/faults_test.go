package agent

import (
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/health"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/machine/machinetest"
	"github.com/ashlar-gpu/ashlar/internal/proptest"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// faultBench plays faults on a simulated machine, lets the agent look at it step by
// step, and knows by itself what must be offered then. Its clock is its own.
type faultBench struct {
	agent   *agent
	machine *machine.Machine
	now     time.Time
	boots   int

	// What the model knows: when a GPU or MIG device that must not be offered was last
	// seen to be bad, which GPUs are wrong now, and which were in the last reading.
	bad      map[string]time.Time
	wrong    map[string]bool
	lost     map[string]bool
	sick     map[string]bool
	recovery map[string]bool
	down     bool
	cordoned map[string]bool
	// waiting are XIDs of MIG devices of GPUs that are lost: which device they are of
	// is seen when the GPU answers.
	waiting []instanceFault
	// last is what the driver last said.
	last *gpu.Machine
}

type instanceFault struct {
	gpu string
	gi  int
	at  time.Time
}

const (
	faultQuiet    = time.Minute
	faultReplicas = 3
	faultMachine  = "- {product: NVIDIA A100-SXM4-40GB, count: 2}\n" +
		"- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 3g.20gb, start: 4}, {profile: 1g.5gb, start: 0}, {profile: 1g.5gb, start: 1}]}\n"
	faultConfig = "flags: {migStrategy: mixed, plugin: {deviceListStrategy: envvar}}\n" +
		"sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 3}, {name: nvidia.com/mig-1g.5gb, replicas: 3}]}}\n"
)

// faultRules are XIDs with what they must do, by NVIDIA's catalogue.
var faultRules = []struct {
	xid            int
	removes, whole bool
}{
	{13, false, false}, {31, false, false}, {43, false, false}, {45, false, false}, {63, false, false}, {94, false, false},
	{48, true, false}, {95, true, true}, {119, true, true}, {79, true, true},
}

func newFaultBench(t *rapid.T, dir string) *faultBench {
	if err := os.Remove(filepath.Join(dir, healthFile)); err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	b := &faultBench{
		machine: machinetest.New(t, faultMachine), now: time.Unix(1e9, 0), bad: make(map[string]time.Time), wrong: make(map[string]bool), lost: make(map[string]bool),
		sick: make(map[string]bool), recovery: make(map[string]bool), cordoned: make(map[string]bool),
	}
	b.start(t, dir)
	return b
}

// start makes a new agent, as after a crash of the last one.
func (b *faultBench) start(t *rapid.T, dir string) {
	config, _, err := sharing.Parse("config.yaml", []byte("version: v1\n"+faultConfig))
	if err != nil {
		t.Fatal(err)
	}
	a := newAgent(Options{
		StateDir: dir, BootID: fmt.Sprint("boot ", b.boots), Log: slog.New(slog.DiscardHandler),
		// The window does not grow: the tracker's own tests have that.
		Health: health.Policy{Quiet: faultQuiet, MaxQuiet: faultQuiet, Memory: 24 * time.Hour},
	})
	a.config.current = config
	a.restoreHealth()
	b.agent = a
}

// look does what a step of the agent does, up to what the kubelet is sent.
func (b *faultBench) look(t *rapid.T) {
	a := b.agent
	for {
		e, ok, err := b.machine.WaitEvent(0)
		if err != nil || !ok {
			break // a driver that is down sends nothing
		}
		a.events.put(e)
	}
	m, err := b.machine.Read()
	a.takeEvents(b.now)
	a.takeReading(b.now, &m, err)
	if a.machine == nil {
		return // it has read nothing since its start, and offers nothing
	}
	b.observe(m, err)
	reasons := make(map[string]string)
	for uuid := range b.cordoned {
		reasons[uuid] = "cordoned"
	}
	a.blocks.set(byOperator, reasons)
	a.makePlan()
	withheld := a.ledger.Withheld(a.plan)
	got := make(map[string][]string)
	for i := range a.plan.Resources {
		r := &a.plan.Resources[i]
		for _, d := range a.offered(r, withheld[r.Name]) {
			if d.Healthy {
				got[r.Name] = append(got[r.Name], d.ID)
			}
		}
		slices.Sort(got[r.Name])
	}
	if diff := cmp.Diff(b.wanted(), got); diff != "" {
		t.Fatalf("at %s (-want +offered)\n%s", b.now, diff)
	}
}

// observe is the model's reading.
func (b *faultBench) observe(m gpu.Machine, err error) {
	if err == nil {
		b.last = &m
	}
	for i := range b.last.GPUs {
		g := &b.last.GPUs[i]
		wrong := b.down || b.lost[g.UUID] || b.sick[g.UUID] || b.recovery[g.UUID]
		if wrong || b.wrong[g.UUID] {
			b.bad[g.UUID] = b.now // quiet begins with the first good reading
		}
		b.wrong[g.UUID] = wrong
		if b.down || b.lost[g.UUID] {
			continue
		}
		for _, w := range b.waiting {
			for _, d := range g.MIG.Devices {
				if w.gpu == g.UUID && w.gi == d.GI {
					b.bad[d.UUID] = w.at
				}
			}
		}
		b.waiting = slices.DeleteFunc(b.waiting, func(w instanceFault) bool { return w.gpu == g.UUID })
	}
	// What is quiet for long enough is forgotten where it answers.
	for i := range b.last.GPUs {
		g := &b.last.GPUs[i]
		if b.down || b.lost[g.UUID] {
			continue
		}
		over := func(uuid string) {
			if at, ok := b.bad[uuid]; ok && !b.now.Before(at.Add(faultQuiet)) {
				delete(b.bad, uuid)
			}
		}
		if !b.sick[g.UUID] && !b.recovery[g.UUID] {
			over(g.UUID)
		}
		for _, d := range g.MIG.Devices {
			over(d.UUID)
		}
	}
}

// wanted is what must be offered.
func (b *faultBench) wanted() map[string][]string {
	all := make(map[string][]string)
	for i := range b.last.GPUs {
		g := &b.last.GPUs[i]
		if _, bad := b.bad[g.UUID]; bad || b.cordoned[g.UUID] {
			continue
		}
		if !g.MIG.Enabled {
			for slot := range faultReplicas {
				all["nvidia.com/gpu"] = append(all["nvidia.com/gpu"], fmt.Sprint(g.UUID, "::", slot))
			}
		}
		for _, d := range g.MIG.Devices {
			switch _, bad := b.bad[d.UUID]; {
			case bad:
			case d.Profile == "1g.5gb":
				for slot := range faultReplicas {
					all["nvidia.com/mig-1g.5gb"] = append(all["nvidia.com/mig-1g.5gb"], fmt.Sprint(d.UUID, "::", slot))
				}
			default:
				all["nvidia.com/mig-3g.20gb"] = append(all["nvidia.com/mig-3g.20gb"], d.UUID)
			}
		}
	}
	for _, ids := range all {
		slices.Sort(ids)
	}
	return all
}

// TestWhatIsOfferedUnderRandomFaults: XIDs of GPUs and MIG devices, GPUs that fall
// off the bus, fail or want a reset, a driver that hangs, cordons, MIG devices made
// anew, crashes of the agent and reboots: after each step exactly that is offered
// which a model offers that knows the faults and not the agent.
func TestWhatIsOfferedUnderRandomFaults(t *testing.T) {
	proptest.AtLeast(t, 1000)
	dir := t.TempDir()
	rapid.Check(t, func(t *rapid.T) {
		b := newFaultBench(t, dir)
		b.look(t)
		uuids := make([]string, len(b.last.GPUs))
		for i := range uuids {
			uuids[i] = b.last.GPUs[i].UUID
		}
		drawn := func(t *rapid.T) string { return rapid.SampledFrom(uuids).Draw(t, "gpu") }
		flip := func(set map[string]bool, uuid string) bool {
			if set[uuid] {
				delete(set, uuid)
			} else {
				set[uuid] = true
			}
			return set[uuid]
		}
		must := func(t *rapid.T, err error) {
			if err != nil {
				t.Fatal(err)
			}
		}
		t.Repeat(map[string]func(*rapid.T){
			"": b.look,
			"time": func(t *rapid.T) {
				b.now = b.now.Add(rapid.SampledFrom([]time.Duration{1, time.Second, faultQuiet / 2, faultQuiet - 1, faultQuiet, time.Hour}).Draw(t, "later"))
			},
			"xid of a GPU": func(t *rapid.T) {
				uuid, rule := drawn(t), rapid.SampledFrom(faultRules).Draw(t, "xid")
				if b.down {
					t.Skip("a driver that is down sends nothing")
				}
				must(t, b.machine.InjectXID(uuid, rule.xid, gpu.AnyInstance, gpu.AnyInstance))
				if rule.removes {
					b.bad[uuid] = b.now
				}
			},
			"xid of a MIG device": func(t *rapid.T) {
				rule := rapid.SampledFrom(faultRules).Draw(t, "xid")
				g := b.last.ByUUID(uuids[2])
				if b.down || len(g.MIG.Devices) == 0 {
					t.Skip("there is none")
				}
				d := rapid.SampledFrom(g.MIG.Devices).Draw(t, "device")
				must(t, b.machine.InjectXID(g.UUID, rule.xid, d.GI, d.CI))
				switch {
				case rule.whole:
					b.bad[g.UUID] = b.now
				case rule.removes:
					b.waiting = append(b.waiting, instanceFault{g.UUID, d.GI, b.now})
				}
			},
			"lost": func(t *rapid.T) {
				uuid := drawn(t)
				must(t, b.machine.SetLost(uuid, flip(b.lost, uuid)))
			},
			"sick": func(t *rapid.T) {
				uuid := drawn(t)
				if flip(b.sick, uuid) {
					must(t, b.machine.SetUnhealthy(uuid, "too hot"))
				} else {
					must(t, b.machine.ClearUnhealthy(uuid))
				}
			},
			"recovery": func(t *rapid.T) {
				uuid, action := drawn(t), gpu.RecoveryNone
				if flip(b.recovery, uuid) {
					action = rapid.SampledFrom([]gpu.Recovery{gpu.RecoveryReset, gpu.RecoveryDrainP2P}).Draw(t, "action")
				}
				must(t, b.machine.SetRecovery(uuid, action))
			},
			"driver": func(t *rapid.T) {
				b.down = !b.down
				must(t, b.machine.DriverDown(b.down))
			},
			"cordon": func(t *rapid.T) { flip(b.cordoned, drawn(t)) },
			"MIG device": func(t *rapid.T) {
				g := b.last.ByUUID(uuids[2])
				if b.down || b.lost[g.UUID] {
					t.Skip("it does not answer")
				}
				if len(g.MIG.Devices) == 3 {
					must(t, b.machine.DestroyMIG(rapid.SampledFrom(g.MIG.Devices).Draw(t, "device").UUID))
					return
				}
				for _, in := range []gpu.MIGInstance{
					{ProfileID: 9, Placement: gpu.Placement{Start: 4, Size: 4}}, {ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}},
					{ProfileID: 19, Placement: gpu.Placement{Start: 1, Size: 1}},
				} {
					if !slices.Contains(g.MIG.Geometry(), in) {
						_, err := b.machine.CreateMIG(g.UUID, in)
						must(t, err)
					}
				}
			},
			"crash": func(t *rapid.T) { b.start(t, dir) },
			"reboot": func(t *rapid.T) {
				b.boots++
				clear(b.bad)
				clear(b.wrong)
				b.waiting = nil
				b.start(t, dir)
			},
		})
	})
}
