package health_test

import (
	"bytes"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/health"
)

var start = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// machine has n GPUs, each with so many MIG devices in instances from 1.
func machine(n, instances int) *gpu.Machine {
	m := &gpu.Machine{GPUs: make([]gpu.GPU, n), Links: gpu.NewLinks(n)}
	for i := range m.GPUs {
		m.GPUs[i] = gpu.GPU{Index: i, UUID: fmt.Sprintf("GPU-%d", i)}
		for j := range instances {
			m.GPUs[i].MIG.Devices = append(m.GPUs[i].MIG.Devices, gpu.MIGDevice{Index: j, GI: j + 1, UUID: fmt.Sprintf("MIG-%d-%d", i, j+1)})
		}
	}
	return m
}

// node is a machine that is read again and again, and its tracker.
type node struct {
	t       *testing.T
	policy  health.Policy
	tracker *health.Tracker
	now     time.Time
	// machine is what a reading reports, seen is the last one with the verdicts.
	machine, seen *gpu.Machine
	override      map[string]bool
}

func newNode(t *testing.T, gpus, instances int) *node {
	t.Helper()
	n := &node{t: t, policy: health.DefaultPolicy(), now: start, machine: machine(gpus, instances)}
	n.tracker = health.New(n.policy, "boot 1")
	return n
}

// copied is a reading that the tracker may write to.
func copied(m *gpu.Machine) *gpu.Machine {
	c := *m
	c.GPUs = slices.Clone(m.GPUs)
	for i := range c.GPUs {
		c.GPUs[i].MIG.Devices = slices.Clone(m.GPUs[i].MIG.Devices)
	}
	return &c
}

func (n *node) observe() []health.Change {
	n.seen = copied(n.machine)
	return n.tracker.Observe(n.now, n.seen, n.override)
}

// after lets time pass and reads.
func (n *node) after(d time.Duration) []health.Change {
	n.now = n.now.Add(d)
	return n.observe()
}

// xid reports an XID of a GPU and reads.
func (n *node) xid(i, xid int) []health.Change { return n.xidOf(i, xid, gpu.AnyInstance) }

func (n *node) xidOf(i, xid, gi int) []health.Change {
	n.tracker.Event(n.now, gpu.Event{GPU: n.machine.GPUs[i].UUID, XID: xid, GI: gi, CI: gpu.AnyInstance})
	return n.observe()
}

func (n *node) encode() []byte {
	n.t.Helper()
	data, err := n.tracker.Encode()
	if err != nil {
		n.t.Fatal(err)
	}
	return data
}

// restart goes on in a new process, in the given boot.
func (n *node) restart(boot string) {
	n.t.Helper()
	tracker, err := health.Restore(n.policy, boot, n.encode())
	if err != nil {
		n.t.Fatal(err)
	}
	n.tracker = tracker
}

// want compares the verdicts: "" for healthy, else state and reason. GPUs come
// before their MIG devices.
func (n *node) want(what string, verdicts ...string) {
	n.t.Helper()
	var got []string
	text := func(h gpu.Health) string {
		if h == (gpu.Health{}) {
			return ""
		}
		return h.State.String() + ": " + h.Reason
	}
	for _, g := range n.seen.GPUs {
		got = append(got, text(g.Health))
		for _, d := range g.MIG.Devices {
			got = append(got, text(d.Health))
		}
	}
	if diff := cmp.Diff(verdicts, got); diff != "" {
		n.t.Errorf("%s (-want +got):\n%s", what, diff)
	}
}

func (n *node) wantFault(uuid string, want health.Fault) {
	n.t.Helper()
	if diff := cmp.Diff(want, n.tracker.Fault(uuid)); diff != "" {
		n.t.Errorf("fault of %s (-want +got):\n%s", uuid, diff)
	}
}

const (
	fell      = "Unhealthy: XID 79: the GPU fell off the bus"
	ecc       = "Unhealthy: XID 48: a memory error could not be corrected"
	lost      = "Lost: GPU is lost"
	wasLost   = "Unhealthy: GPU is lost"
	lostCause = "GPU is lost"
)

var lostHealth = gpu.Health{State: gpu.Lost, Reason: lostCause}

func TestXIDTakesGPUOutUntilItIsQuietAndPasses(t *testing.T) {
	n := newNode(t, 2, 0)
	n.observe()
	n.want("at first", "", "")
	bad := gpu.Health{State: gpu.Unhealthy, Reason: "XID 79: the GPU fell off the bus"}
	if diff := cmp.Diff([]health.Change{{GPU: "GPU-1", Is: bad}}, n.xid(1, 79)); diff != "" {
		t.Errorf("changes after the XID (-want +got):\n%s", diff)
	}
	n.want("after the XID", "", fell)
	n.wantFault("GPU-0", health.Fault{})
	n.wantFault("GPU-1", health.Fault{Since: start, Returns: start.Add(2 * time.Minute), Action: health.Reboot})
	if changes := n.after(2*time.Minute - 1); changes != nil {
		t.Errorf("changes within the window: %v", changes)
	}
	n.want("just before the end of the window", "", fell)
	if diff := cmp.Diff([]health.Change{{GPU: "GPU-1", Was: bad}}, n.after(1)); diff != "" {
		t.Errorf("changes at the end (-want +got):\n%s", diff)
	}
	n.want("at the end of the window", "", "")
	n.wantFault("GPU-1", health.Fault{})
}

func TestNextXIDStartsTheWindowAnew(t *testing.T) {
	n := newNode(t, 1, 0)
	n.xid(0, 79)
	n.now = start.Add(90 * time.Second)
	n.xid(0, 79)
	n.after(90 * time.Second)
	n.want("3 minutes after the first, 90 s after the last", fell)
	n.wantFault("GPU-0", health.Fault{Since: start, Returns: start.Add(210 * time.Second), Action: health.Reboot})
	n.after(30 * time.Second)
	n.want("2 minutes after the last", "")
}

func TestGPUThatFailsItsProbeStaysOut(t *testing.T) {
	n := newNode(t, 1, 0)
	n.machine.GPUs[0].Health = lostHealth
	n.xid(0, 79)
	n.want("lost", lost)
	n.wantFault("GPU-0", health.Fault{Since: start, Action: health.Reboot})
	n.after(time.Hour)
	n.want("still lost", lost)
	n.machine.GPUs[0].Health = gpu.Health{State: gpu.Unhealthy, Reason: "too hot"}
	n.after(time.Hour)
	n.want("answers, too hot", fell)
	n.wantFault("GPU-0", health.Fault{Since: start, Action: health.Reboot})
	n.machine.GPUs[0].Health = gpu.Health{}
	n.after(time.Hour)
	n.want("passes for the first time", fell)
	n.wantFault("GPU-0", health.Fault{Since: start, Returns: n.now.Add(2 * time.Minute), Action: health.Reboot})
	n.after(2 * time.Minute)
	n.want("has passed for the window", "")
}

func TestFailedProbeAlone(t *testing.T) {
	for name, c := range map[string]struct {
		probe        gpu.Health
		during, then string
	}{
		"lost":           {lostHealth, lost, wasLost},
		"unhealthy":      {gpu.Health{State: gpu.Unhealthy, Reason: "too hot"}, "Unhealthy: too hot", "Unhealthy: too hot"},
		"without reason": {gpu.Health{State: gpu.Unhealthy}, "Unhealthy: no reason is known", "Unhealthy: no reason is known"},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1, 0)
			n.machine.GPUs[0].Health = c.probe
			n.observe()
			n.want("during", c.during)
			n.wantFault("GPU-0", health.Fault{Since: start, Action: health.Unknown})
			n.machine.GPUs[0].Health = gpu.Health{}
			n.after(time.Minute)
			n.want("within the window", c.then)
			n.after(2 * time.Minute)
			n.want("after it", "")
		})
	}
}

func TestXIDsThatDoNotRemoveLeaveNoTrace(t *testing.T) {
	n := newNode(t, 1, 2)
	blank := n.encode()
	tried := make(map[int]bool)
	for xid := -1; xid < 400; xid++ {
		if health.RuleOf(xid).Removes {
			continue
		}
		tried[xid] = true
		for _, gi := range []int{gpu.AnyInstance, 1} {
			if changes := n.xidOf(0, xid, gi); changes != nil {
				t.Errorf("XID %d changes %v", xid, changes)
			}
		}
	}
	n.want("after all of them", "", "", "")
	if diff := cmp.Diff(blank, n.encode()); diff != "" {
		t.Errorf("state (-before +after):\n%s", diff)
	}
	for _, xid := range []int{13, 31, 43, 45, 63, 94, 154, 173} {
		if !tried[xid] {
			t.Errorf("XID %d removes", xid)
		}
	}
}

func TestRecoveryActionComesFirst(t *testing.T) {
	for recovery, want := range map[gpu.Recovery]health.Action{
		gpu.RecoveryReset: health.ResetGPU, gpu.RecoveryReboot: health.Reboot, gpu.RecoveryDrainP2P: health.DrainP2P,
		gpu.RecoveryDrainReset: health.DrainReset, gpu.RecoveryDrainReset + 1: health.Unknown,
	} {
		t.Run(recovery.String(), func(t *testing.T) {
			n := newNode(t, 1, 0)
			says := "Unhealthy: the driver says: " + recovery.String()
			n.machine.GPUs[0].Recovery = recovery
			n.observe()
			n.want("alone", says)
			n.wantFault("GPU-0", health.Fault{Since: start, Action: want})
			n.xid(0, 79)
			n.want("with an XID", says)
			n.machine.GPUs[0].Health = gpu.Health{State: gpu.Unhealthy, Reason: "too hot"}
			n.observe()
			n.want("with an XID and a failed probe", says)
			n.machine.GPUs[0].Health = lostHealth
			n.observe()
			n.want("lost", lost)
			n.wantFault("GPU-0", health.Fault{Since: start, Action: want})
			n.machine.GPUs[0].Health = gpu.Health{}
			n.after(time.Hour)
			n.want("while it lasts", says)
			n.machine.GPUs[0].Recovery = gpu.RecoveryNone
			n.after(time.Hour)
			n.want("when it has ended", says)
			n.wantFault("GPU-0", health.Fault{Since: start, Returns: n.now.Add(2 * time.Minute), Action: want})
			n.after(2 * time.Minute)
			n.want("after the window", "")
		})
	}
}

func TestXIDThatAsksForMostIsTold(t *testing.T) {
	for name, c := range map[string]struct {
		xids []int
		want string
	}{
		"reboot after reset":       {[]int{119, 79}, fell},
		"reboot before reset":      {[]int{79, 119}, fell},
		"the first of equals":      {[]int{95, 119}, "Unhealthy: XID 95: a memory error was not contained"},
		"what removes nothing":     {[]int{45, 48, 63, 94}, ecc},
		"a reset after memory":     {[]int{48, 95, 45}, "Unhealthy: XID 95: a memory error was not contained"},
		"the same again and again": {[]int{79, 79, 79}, fell},
	} {
		t.Run(name, func(t *testing.T) {
			together, apart := newNode(t, 1, 0), newNode(t, 1, 0)
			for _, xid := range c.xids {
				together.tracker.Event(start, gpu.Event{GPU: "GPU-0", XID: xid, GI: gpu.AnyInstance})
				apart.xid(0, xid)
			}
			together.observe()
			together.want("together", c.want)
			apart.want("apart", c.want)
		})
	}
}

// outage is how long a GPU stays out after an XID.
func (n *node) outage() time.Duration {
	n.t.Helper()
	n.xid(0, 79)
	fell := n.now
	for !n.seen.GPUs[0].Health.OK() {
		if n.after(10 * time.Second); n.now.Sub(fell) > 100*time.Hour {
			n.t.Fatal("it never returns")
		}
	}
	return n.now.Sub(fell)
}

func TestFlappingDoublesTheWindowUpToABound(t *testing.T) {
	n := newNode(t, 1, 0)
	for i, want := range []int{2, 4, 8, 16, 32, 60, 60, 60} {
		if got := n.outage(); got != time.Duration(want)*time.Minute {
			t.Errorf("fall %d: out for %v, want %d minutes", i+1, got, want)
		}
		n.after(time.Minute)
	}
}

func TestOldFallsAreForgotten(t *testing.T) {
	n := newNode(t, 1, 0)
	n.outage()
	n.now = start.Add(24 * time.Hour)
	if got := n.outage(); got != 4*time.Minute {
		t.Errorf("out for %v 24 h after a fall, want 4m", got)
	}
	n.now = start.Add(48*time.Hour + 1)
	if got := n.outage(); got != 2*time.Minute {
		t.Errorf("out for %v more than 24 h after a fall, want 2m", got)
	}
	n.after(25 * time.Hour)
	blank, err := health.New(n.policy, "boot 1").Encode()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(blank, n.encode()); diff != "" {
		t.Errorf("state when all is forgotten (-blank +got):\n%s", diff)
	}
}

func TestLongOutageIsOneFall(t *testing.T) {
	n := newNode(t, 1, 0)
	n.machine.GPUs[0].Health = lostHealth
	for range 100 {
		n.after(10 * time.Minute)
	}
	n.machine.GPUs[0].Health = gpu.Health{}
	n.after(time.Minute)
	n.after(2 * time.Minute)
	n.want("after one window", "")
}

func TestWindowDoesNotShrinkDuringAnOutage(t *testing.T) {
	n := newNode(t, 1, 0)
	n.outage()
	n.after(12 * time.Hour)
	n.machine.GPUs[0].Health = lostHealth
	n.observe()
	n.after(13 * time.Hour) // the first fall is older than the memory now
	n.machine.GPUs[0].Health = gpu.Health{}
	n.observe()
	n.after(4*time.Minute - 1)
	n.want("within the doubled window", wasLost)
	n.after(1)
	n.want("at its end", "")
}

func TestOddPolicies(t *testing.T) {
	for name, c := range map[string]struct {
		quiet, maxQuiet, memory time.Duration
		want                    []time.Duration // outages in steps of 10 s
	}{
		"no window":                 {0, time.Hour, time.Hour, []time.Duration{10 * time.Second, 10 * time.Second}},
		"negative":                  {-time.Hour, -time.Hour, -time.Hour, []time.Duration{10 * time.Second, 10 * time.Second}},
		"bound below the window":    {2 * time.Minute, time.Minute, time.Hour, []time.Duration{2 * time.Minute, 2 * time.Minute}},
		"bound between two windows": {2 * time.Minute, 3 * time.Minute, time.Hour, []time.Duration{2 * time.Minute, 3 * time.Minute, 3 * time.Minute}},
		"no memory":                 {time.Minute, time.Hour, 0, []time.Duration{time.Minute, time.Minute}},
		"the longest":               {10 * time.Second, 1<<63 - 1, 1<<63 - 1, []time.Duration{10 * time.Second, 20 * time.Second, 40 * time.Second}},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 1, 0)
			n.policy = health.Policy{Quiet: c.quiet, MaxQuiet: c.maxQuiet, Memory: c.memory}
			n.tracker = health.New(n.policy, "boot 1")
			for i, want := range c.want {
				if got := n.outage(); got != want {
					t.Errorf("fall %d: out for %v, want %v", i+1, got, want)
				}
			}
		})
	}
}

func TestRestartGoesOnWithTheWindow(t *testing.T) {
	n := newNode(t, 2, 0)
	n.xid(1, 79)
	n.after(time.Minute)
	n.restart("boot 1")
	n.wantFault("GPU-1", health.Fault{Since: start, Returns: start.Add(2 * time.Minute), Action: health.Reboot})
	if changes := n.after(time.Minute - 1); changes != nil {
		t.Errorf("the new process tells %v", changes)
	}
	n.want("just before the end", "", fell)
	n.restart("boot 1")
	n.after(1)
	n.want("at the end", "", "")
	n.restart("boot 1")
	n.after(time.Hour)
	if got := n.outage(); got != 2*time.Minute {
		t.Errorf("another GPU is out for %v, want 2m", got)
	}
	n.machine.GPUs[0], n.machine.GPUs[1] = n.machine.GPUs[1], n.machine.GPUs[0]
	if got := n.outage(); got != 4*time.Minute {
		t.Errorf("the GPU that fell before is out for %v, want 4m", got)
	}
}

func TestRestartTakesALostGPUAsLost(t *testing.T) {
	n := newNode(t, 1, 0)
	n.machine.GPUs[0].Health = lostHealth
	n.observe()
	n.restart("boot 1")
	n.machine.GPUs[0].Health = gpu.Health{}
	n.after(time.Hour)
	n.want("when it answers to the new process", wasLost)
	n.after(2 * time.Minute)
	n.want("after the window", "")
}

func TestEventBeforeARestartIsNotForgotten(t *testing.T) {
	n := newNode(t, 1, 1)
	n.tracker.Event(n.now, gpu.Event{GPU: "GPU-0", XID: 48, GI: 1})
	n.tracker.Event(n.now, gpu.Event{GPU: "GPU-0", XID: 79, GI: gpu.AnyInstance})
	n.restart("boot 1")
	n.observe()
	n.want("in the new process", fell, ecc)
}

func TestRebootCures(t *testing.T) {
	n := newNode(t, 3, 1)
	n.machine.GPUs[1].Recovery = gpu.RecoveryReboot
	n.machine.GPUs[2].Health = lostHealth
	n.xid(0, 79)
	n.xidOf(0, 48, 1)
	n.tracker.Event(n.now, gpu.Event{GPU: "GPU-1", XID: 48, GI: 1})
	before := n.seen
	n.want("before", fell, ecc, "Unhealthy: the driver says: reboot the node", "", lost, "")
	n.restart("boot 2")
	n.machine.GPUs[1].Recovery = gpu.RecoveryNone
	want := []health.Change{
		{GPU: "GPU-0", Was: before.GPUs[0].Health},
		{GPU: "GPU-0", MIG: "MIG-0-1", Was: before.GPUs[0].MIG.Devices[0].Health},
		{GPU: "GPU-1", Was: before.GPUs[1].Health},
	}
	if diff := cmp.Diff(want, n.after(time.Second)); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	n.want("after, GPU 2 is still lost", "", "", "", "", lost, "")
	n.wantFault("GPU-2", health.Fault{Since: n.now, Action: health.Unknown})
	if got := n.outage(); got != 4*time.Minute {
		t.Errorf("out for %v, want 4m: a reboot does not undo a fall", got)
	}
}

func TestRebootKeepsFallsOfWhatWasHealthy(t *testing.T) {
	n := newNode(t, 1, 0)
	n.outage()
	n.outage()
	n.restart("boot 2")
	n.restart("boot 3")
	if got := n.outage(); got != 8*time.Minute {
		t.Errorf("out for %v, want 8m", got)
	}
}

func TestEventAfterARebootCounts(t *testing.T) {
	n := newNode(t, 1, 0)
	n.xid(0, 119)
	n.restart("boot 2")
	n.xid(0, 79)
	n.want("after it", fell)
}

func TestOperatorOverridesWhatIsReported(t *testing.T) {
	n := newNode(t, 2, 1)
	n.machine.GPUs[0].Recovery = gpu.RecoveryReset
	n.xid(0, 79)
	n.xidOf(0, 48, 1)
	n.xid(1, 79)
	n.want("at first", "Unhealthy: the driver says: reset the GPU", ecc, fell, "")
	n.override = map[string]bool{"GPU-0": true}
	n.after(time.Second)
	n.want("GPU 0 is named", "", "", fell, "")
	n.xid(0, 79)
	n.xidOf(0, 48, 1)
	n.want("while it is named", "", "", fell, "")
	n.override = nil
	n.after(time.Second)
	n.want("what the driver still wants counts again, XIDs do not", "Unhealthy: the driver says: reset the GPU", "", fell, "")
	n.wantFault("GPU-0", health.Fault{Since: n.now, Action: health.ResetGPU})
}

func TestOperatorCannotOverrideAProbe(t *testing.T) {
	n := newNode(t, 1, 1)
	n.override = map[string]bool{"GPU-0": true}
	n.machine.GPUs[0].Health = lostHealth
	n.machine.GPUs[0].MIG.Devices[0].Health = gpu.Health{State: gpu.Unhealthy, Reason: "broken"}
	n.xid(0, 79)
	n.want("lost", lost, "Unhealthy: broken")
	n.wantFault("GPU-0", health.Fault{Since: start, Action: health.Unknown})
	n.machine.GPUs[0].Health = gpu.Health{State: gpu.Unhealthy, Reason: "too hot"}
	n.after(time.Hour)
	n.want("unhealthy", "Unhealthy: too hot", "Unhealthy: broken")
	n.machine = machine(1, 1)
	n.after(time.Second)
	n.want("within the window", "Unhealthy: too hot", "Unhealthy: broken")
	n.after(2 * time.Minute)
	n.want("after it", "", "")
}

func TestOverriddenXIDOfALostGPUStaysForgotten(t *testing.T) {
	n := newNode(t, 1, 0)
	n.machine.GPUs[0].Health = lostHealth
	n.xid(0, 79)
	n.override = map[string]bool{"GPU-0": true}
	n.after(time.Second)
	n.override = nil
	n.machine.GPUs[0].Health = gpu.Health{}
	n.after(time.Second)
	n.want("when it answers", wasLost)
}

func TestLostGPUDoesNotHarmOthers(t *testing.T) {
	n := newNode(t, 4, 1)
	n.machine.GPUs[2].Health = lostHealth
	for range 5 {
		n.xid(2, 79)
		n.after(time.Minute)
		n.want("with GPU 2 lost", "", "", "", "", lost, "", "", "")
	}
}

func TestEventOfAnInstanceHitsItsDevicesAlone(t *testing.T) {
	n := newNode(t, 2, 3)
	n.machine.GPUs[0].MIG.Devices[2].GI = 2 // two compute instances in one GPU instance
	changes := n.xidOf(0, 48, 2)
	n.want("XID 48 of instance 2", "", "", ecc, ecc, "", "", "", "")
	bad := n.seen.GPUs[0].MIG.Devices[1].Health
	want := []health.Change{{GPU: "GPU-0", MIG: "MIG-0-2", Is: bad}, {GPU: "GPU-0", MIG: "MIG-0-3", Is: bad}}
	if diff := cmp.Diff(want, changes); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
	if g := n.seen.GPUs[0]; !g.HealthOf("MIG-0-1").OK() || g.HealthOf("MIG-0-2") != bad || !g.HealthOf("GPU-0").OK() {
		t.Error("HealthOf differs")
	}
	n.wantFault("MIG-0-2", health.Fault{Since: start, Returns: start.Add(2 * time.Minute), Action: health.Workflow})
	n.wantFault("MIG-0-1", health.Fault{})
	n.after(2 * time.Minute)
	n.want("after the window", "", "", "", "", "", "", "", "")
}

func TestEventOfTheWholeGPUIsNotOfItsInstance(t *testing.T) {
	for _, c := range []struct{ xid, gi int }{{79, 1}, {95, 1}, {74, 1}, {48, gpu.AnyInstance}, {48, 64}, {48, -7}} {
		n := newNode(t, 1, 1)
		n.xidOf(0, c.xid, c.gi)
		if g := n.seen.GPUs[0]; g.Health.OK() || !g.MIG.Devices[0].Health.OK() {
			t.Errorf("XID %d of instance %d: %v", c.xid, c.gi, g)
		}
	}
}

func TestMIGDeviceMadeAnewIsHealthy(t *testing.T) {
	n := newNode(t, 1, 2)
	n.xidOf(0, 48, 1)
	n.want("at first", "", ecc, "")
	n.machine.GPUs[0].MIG.Devices[0].UUID = "MIG-anew"
	if changes := n.after(time.Second); changes != nil {
		t.Errorf("changes: %v", changes)
	}
	n.want("another in the same instance", "", "", "")
	n.wantFault("MIG-0-1", health.Fault{})
	n.machine = machine(1, 2)
	n.after(time.Second)
	n.want("the first again", "", "", "")
	n.xidOf(0, 48, 1)
	n.wantFault("MIG-0-1", health.Fault{Since: n.now, Returns: n.now.Add(2 * time.Minute), Action: health.Workflow})
}

func TestEventOfAnInstanceThatIsGoneIsForgotten(t *testing.T) {
	n := newNode(t, 1, 1)
	blank := n.encode()
	n.xidOf(0, 48, 5)
	n.want("instance 5 does not exist", "", "")
	if diff := cmp.Diff(blank, n.encode()); diff != "" {
		t.Errorf("state (-before +after):\n%s", diff)
	}
}

func TestMIGDevicesOfALostGPUKeepTheirState(t *testing.T) {
	n := newNode(t, 1, 2)
	n.xidOf(0, 48, 1)
	full := n.machine
	n.machine = machine(1, 0) // as after a start of the agent: nothing but the UUID is known
	n.machine.GPUs[0].Health = lostHealth
	n.xidOf(0, 48, 2)
	n.want("lost", lost)
	n.wantFault("MIG-0-1", health.Fault{Since: start, Action: health.Workflow})
	n.machine = copied(full)
	n.machine.GPUs[0].Health = lostHealth
	n.after(time.Hour)
	n.want("lost, with what was known", lost, ecc, "")
	n.machine = full
	n.after(time.Minute)
	n.want("it answers: instance 2 had an error meanwhile", wasLost, "", ecc)
}

func TestProbeOfAMIGDevicePassesOnlyIfItsGPUAnswers(t *testing.T) {
	n := newNode(t, 1, 1)
	n.machine.GPUs[0].MIG.Devices[0].Health = gpu.Health{State: gpu.Unhealthy, Reason: "broken"}
	n.observe()
	n.machine = machine(1, 1)
	n.machine.GPUs[0].Health = lostHealth
	n.after(time.Hour)
	n.machine = machine(1, 1)
	n.after(time.Hour)
	n.wantFault("MIG-0-1", health.Fault{Since: start, Returns: n.now.Add(2 * time.Minute), Action: health.Unknown})
}

func TestUnhealthyMIGDevice(t *testing.T) {
	n := newNode(t, 1, 2)
	n.machine.GPUs[0].MIG.Devices[1].Health = gpu.Health{State: gpu.Unhealthy, Reason: "broken"}
	n.observe()
	n.want("at first", "", "", "Unhealthy: broken")
	n.wantFault("MIG-0-2", health.Fault{Since: start, Action: health.Unknown})
	n.machine = machine(1, 2)
	n.after(time.Hour)
	n.want("within the window", "", "", "Unhealthy: broken")
	n.after(2 * time.Minute)
	n.want("after it", "", "", "")
}

func TestClockSetBack(t *testing.T) {
	for _, by := range []time.Duration{time.Second, time.Hour, 30 * 24 * time.Hour, 50 * 365 * 24 * time.Hour} {
		for what, fall := range map[string]func(*node){
			"an XID": func(n *node) { n.xid(0, 79); n.now = n.now.Add(-by) },
			"an event": func(n *node) {
				n.tracker.Event(n.now, gpu.Event{GPU: "GPU-0", XID: 79, GI: -1})
				n.now = n.now.Add(-by)
			},
			"an instance": func(n *node) { n.xidOf(0, 48, 1); n.now = n.now.Add(-by) },
			"a probe": func(n *node) {
				n.machine.GPUs[0].Health = lostHealth
				n.observe()
				n.machine = machine(1, 1)
				n.after(time.Second)
				n.now = n.now.Add(-by)
			},
			"a recovery action": func(n *node) {
				n.machine.GPUs[0].Recovery = gpu.RecoveryReset
				n.observe()
				n.machine = machine(1, 1)
				n.after(time.Second)
				n.now = n.now.Add(-by)
			},
		} {
			n := newNode(t, 1, 1)
			fall(n)
			n.observe()
			n.restart("boot 1")
			n.after(2*time.Minute - 1)
			if n.seen.GPUs[0].Health.OK() && n.seen.GPUs[0].MIG.Devices[0].Health.OK() {
				t.Errorf("%s, clock %v back: it returns too soon", what, by)
			}
			n.after(1)
			if !n.seen.GPUs[0].Health.OK() || !n.seen.GPUs[0].MIG.Devices[0].Health.OK() {
				t.Errorf("%s, clock %v back: it does not return", what, by)
			}
		}
	}
}

func TestClockThatJumpsBetweenEventsShortensNoWindow(t *testing.T) {
	n := newNode(t, 1, 0)
	late := start.Add(time.Minute)
	for _, at := range []time.Time{late, start} {
		n.tracker.Event(at, gpu.Event{GPU: "GPU-0", XID: 79, GI: gpu.AnyInstance})
	}
	n.now = late
	n.observe()
	n.wantFault("GPU-0", health.Fault{Since: late, Returns: late.Add(2 * time.Minute), Action: health.Reboot})
}

func TestFallsOfTheFutureAreForgottenInTime(t *testing.T) {
	n := newNode(t, 1, 0)
	n.outage()
	n.now = n.now.AddDate(-1, 0, 0)
	n.observe()
	n.after(24*time.Hour + 1)
	if got := n.outage(); got != 2*time.Minute {
		t.Errorf("out for %v, want 2m", got)
	}
}

func TestMissingGPUIsKeptForADay(t *testing.T) {
	for name, c := range map[string]struct {
		away time.Duration
		want string
	}{
		"a day":       {24 * time.Hour, wasLost},
		"longer":      {24*time.Hour + 1, ""},
		"set back":    {-time.Hour, wasLost},
		"much longer": {240 * time.Hour, ""},
	} {
		t.Run(name, func(t *testing.T) {
			n := newNode(t, 2, 0)
			n.machine.GPUs[1].Health = lostHealth
			n.observe()
			n.machine = machine(1, 0)
			n.after(time.Second)
			n.restart("boot 1")
			n.after(c.away)
			n.want("missing", "")
			n.machine = machine(2, 0)
			n.after(time.Second)
			n.want("back", "", c.want)
		})
	}
}

func TestTimeMissingIsCountedAnewEachTime(t *testing.T) {
	n := newNode(t, 2, 0)
	n.machine.GPUs[1].Health = lostHealth
	full, less := n.machine, machine(1, 0)
	n.observe()
	for range 3 {
		n.machine = less
		n.after(time.Second)
		n.after(20 * time.Hour)
		n.machine = full
		n.after(time.Second)
	}
	n.wantFault("GPU-1", health.Fault{Since: start})
}

func TestMissingGPUIsForgottenAlthoughTheClockWasSetBack(t *testing.T) {
	n := newNode(t, 2, 0)
	n.xid(1, 79)
	n.machine = machine(1, 0)
	n.after(time.Second)
	n.now = n.now.AddDate(-1, 0, 0)
	n.observe()
	n.after(24 * time.Hour)
	if n.tracker.Fault("GPU-1") == (health.Fault{}) {
		t.Error("it is forgotten too soon")
	}
	n.after(1)
	n.wantFault("GPU-1", health.Fault{})
}

func TestGPUsMissingTheLongestAreForgottenFirst(t *testing.T) {
	n := newNode(t, 301, 0)
	for i := range n.machine.GPUs {
		n.machine.GPUs[i].Health = lostHealth
	}
	n.observe()
	var gone []string // in an order that is not that of their names
	for k := range 300 {
		i := 1 + k*7919%(len(n.machine.GPUs)-1)
		gone = append(gone, n.machine.GPUs[i].UUID)
		n.machine.GPUs = slices.Delete(n.machine.GPUs, i, i+1)
		n.after(time.Second)
	}
	check := func(what string, forgotten int) {
		t.Helper()
		for i, uuid := range gone {
			if known := n.tracker.Fault(uuid) != (health.Fault{}); known == (i < forgotten) {
				t.Errorf("%s: number %d is known: %v", what, i, known)
			}
		}
	}
	check("300 are missing", 300-256)
	for i := range 10 {
		n.tracker.Event(n.now, gpu.Event{GPU: fmt.Sprintf("GPU-A%d", i), XID: 79, GI: gpu.AnyInstance})
	}
	check("events tell of 10 others", 310-256)
	data := n.encode()
	for i := range 10 {
		if uuid := fmt.Sprintf("GPU-A%d", i); !bytes.Contains(data, []byte(uuid)) {
			t.Errorf("%s is forgotten", uuid)
		}
	}
}

func TestEventsOfAMissingGPU(t *testing.T) {
	n := newNode(t, 2, 0)
	full := n.machine
	n.machine = machine(1, 0)
	away := gpu.Event{GPU: "GPU-1", XID: 79, GI: gpu.AnyInstance}
	n.tracker.Event(n.now, away)
	n.observe()
	n.after(20 * time.Hour)
	n.tracker.Event(n.now, away)
	n.after(20 * time.Hour)
	n.machine = full
	n.observe()
	n.want("40 h after the first event, 20 h after the last", "", fell)
	n.after(0)
	n.want("it has been quiet for longer than the window", "", "")
}

func TestStateIsBounded(t *testing.T) {
	n := newNode(t, 1, 0)
	n.policy = health.Policy{Quiet: 0, MaxQuiet: time.Hour, Memory: 1000 * time.Hour}
	n.tracker = health.New(n.policy, "boot 1")
	for i := range 3000 {
		n.tracker.Event(n.now, gpu.Event{GPU: fmt.Sprintf("GPU-away-%d", i), XID: 79, GI: i})
		n.tracker.Event(n.now, gpu.Event{GPU: "GPU-0", XID: 48, GI: i})
		if i%10 == 0 {
			n.xid(0, 79)
			n.after(time.Second)
		}
	}
	data := n.encode()
	if len(data) > 64<<10 {
		t.Errorf("the state has %d bytes", len(data))
	}
	for _, keep := range []string{`"GPU-0"`, `"GPU-away-2999"`} {
		if !bytes.Contains(data, []byte(keep)) {
			t.Errorf("%s is forgotten", keep)
		}
	}
	n.restart("boot 1")
	if diff := cmp.Diff(data, n.encode()); diff != "" {
		t.Errorf("state (-before +after restart):\n%s", diff)
	}
}

func TestStateDoesNotChangeWhileNothingHappens(t *testing.T) {
	n := newNode(t, 5, 1)
	n.machine.GPUs[1].Health = lostHealth
	n.machine.GPUs[2].Recovery = gpu.RecoveryReset
	n.machine.GPUs[3].MIG.Devices[0].Health = gpu.Health{State: gpu.Unhealthy, Reason: "broken"}
	n.xid(0, 79)
	n.machine.GPUs = n.machine.GPUs[:4]
	n.after(time.Second)
	before := n.encode()
	for range 10 {
		if changes := n.after(4 * time.Second); changes != nil {
			t.Errorf("changes: %v", changes)
		}
		if diff := cmp.Diff(string(before), string(n.encode())); diff != "" {
			t.Fatalf("state (-before +after):\n%s", diff)
		}
	}
}

func TestChangesAreInTheOrderOfTheMachine(t *testing.T) {
	n := newNode(t, 3, 2)
	for i := range n.machine.GPUs {
		g := &n.machine.GPUs[2-i]
		n.tracker.Event(n.now, gpu.Event{GPU: g.UUID, XID: 48, GI: 2})
		n.tracker.Event(n.now, gpu.Event{GPU: g.UUID, XID: 48, GI: 1})
		n.tracker.Event(n.now, gpu.Event{GPU: g.UUID, XID: 48, GI: -1})
	}
	var got []string
	for _, c := range n.observe() {
		got = append(got, c.GPU+" "+c.MIG)
	}
	want := []string{
		"GPU-0 ", "GPU-0 MIG-0-1", "GPU-0 MIG-0-2", "GPU-1 ", "GPU-1 MIG-1-1", "GPU-1 MIG-1-2",
		"GPU-2 ", "GPU-2 MIG-2-1", "GPU-2 MIG-2-2",
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("changes (-want +got):\n%s", diff)
	}
}

func TestPolicyOfTheNewProcessCounts(t *testing.T) {
	n := newNode(t, 1, 0)
	n.xid(0, 79)
	if err := n.policy.Override("79", ""); err != nil {
		t.Fatal(err)
	}
	n.restart("boot 1")
	n.observe()
	n.want("XID 79 is disabled now", "")
}

func TestEventWithoutGPUIsNothing(t *testing.T) {
	n := newNode(t, 1, 0)
	blank := n.encode()
	n.tracker.Event(n.now, gpu.Event{XID: 79, GI: gpu.AnyInstance})
	if diff := cmp.Diff(blank, n.encode()); diff != "" {
		t.Errorf("state (-before +after):\n%s", diff)
	}
}

func TestTimeZoneMakesNoDifference(t *testing.T) {
	here, there := newNode(t, 1, 0), newNode(t, 1, 0)
	there.now = start.In(time.FixedZone("there", 7200))
	here.xid(0, 79)
	there.xid(0, 79)
	if diff := cmp.Diff(here.encode(), there.encode()); diff != "" {
		t.Errorf("state (-here +there):\n%s", diff)
	}
}

func TestReasonsAreShort(t *testing.T) {
	for _, r := range health.Rules() {
		n := newNode(t, 1, 0)
		if n.xid(0, r.XID); !r.Removes {
			continue
		}
		if reason := n.seen.GPUs[0].Health.Reason; !strings.HasPrefix(reason, fmt.Sprintf("XID %d: ", r.XID)) || len(reason) > 100 {
			t.Errorf("XID %d: reason %q", r.XID, reason)
		}
	}
}
