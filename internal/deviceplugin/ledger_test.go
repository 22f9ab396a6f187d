package deviceplugin

import (
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

var noon = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)

// dev makes a device of a plan from "UUID" or "UUID::n"; MIG devices are
// "MIG-<letter of the GPU><number>".
func dev(t testing.TB, id string) sharing.Device {
	t.Helper()
	parsed, err := gpu.ParseDeviceID(id)
	if err != nil {
		t.Fatal(err)
	}
	physical := parsed.Base
	if mig, ok := strings.CutPrefix(physical, "MIG-"); ok {
		physical = "GPU-" + mig[:1]
	}
	return sharing.Device{ID: parsed, GPU: physical, NUMA: -1}
}

func res(t testing.TB, name string, ids ...string) sharing.Resource {
	t.Helper()
	r := sharing.Resource{Name: name, Strategy: sharing.None, Replicas: 1}
	for _, id := range ids {
		r.Devices = append(r.Devices, dev(t, id))
	}
	return r
}

func holder(t testing.TB, resource, id string) Holder {
	t.Helper()
	d := dev(t, id)
	return Holder{Resource: resource, Device: d.ID, GPU: d.GPU}
}

// withheldIDs drops the reasons and says "resource id" for each.
func withheldIDs(l *Ledger, rs ...sharing.Resource) []string {
	ids := []string{}
	for resource, devices := range l.Withheld(&sharing.Plan{Resources: rs}) {
		for id := range devices {
			ids = append(ids, resource+" "+id)
		}
	}
	slices.Sort(ids)
	return ids
}

func TestViewsOfOneGPU(t *testing.T) {
	for name, test := range map[string]struct {
		heldAs, held     string
		askedAs, asked   string
		excluded         bool
		reasonInWithheld string
	}{
		"two slots":                         {"gpu", "GPU-a::0", "gpu", "GPU-a::1", false, ""},
		"the same slot":                     {"gpu", "GPU-a::0", "gpu", "GPU-a::0", false, ""},
		"the same whole GPU":                {"gpu", "GPU-a", "gpu", "GPU-a", false, ""},
		"another GPU":                       {"gpu", "GPU-a", "excl", "GPU-b", false, ""},
		"two MIG devices":                   {"mig", "MIG-a1", "mig", "MIG-a2", false, ""},
		"MIG devices of two resources":      {"mig-1g", "MIG-a1", "mig-2g", "MIG-a2", false, ""},
		"slots of two MIG devices":          {"mig", "MIG-a1::0", "mig", "MIG-a2::0", false, ""},
		"a MIG device and another's slot":   {"mig", "MIG-a1", "mig.shared", "MIG-a2::0", false, ""},
		"exclusive after a slot":            {"gpu", "GPU-a::0", "excl", "GPU-a", true, "GPU GPU-a is in use as gpu"},
		"a slot after exclusive":            {"excl", "GPU-a", "gpu", "GPU-a::0", true, "GPU GPU-a is in use as excl"},
		"whole under two resources":         {"gpu", "GPU-a", "excl", "GPU-a", true, "GPU GPU-a is in use as gpu"},
		"slots under two resources":         {"gpu", "GPU-a::0", "gpu.shared", "GPU-a::1", true, "GPU GPU-a is in use as gpu"},
		"one slot under two resources":      {"gpu", "GPU-a::0", "gpu.shared", "GPU-a::0", true, "GPU GPU-a is in use as gpu"},
		"whole, now slots, same resource":   {"gpu", "GPU-a", "gpu", "GPU-a::0", true, "GPU GPU-a is in use as gpu"},
		"slots, now whole, same resource":   {"gpu", "GPU-a::3", "gpu", "GPU-a", true, "GPU GPU-a is in use as gpu"},
		"a MIG device after the whole":      {"gpu", "GPU-a", "mig", "MIG-a1", true, "GPU GPU-a is in use as gpu"},
		"the whole after a MIG device":      {"mig", "MIG-a1", "gpu", "GPU-a", true, "MIG device MIG-a1 of GPU GPU-a is in use as mig"},
		"a slot after a MIG device":         {"mig", "MIG-a1", "gpu", "GPU-a::0", true, "MIG device MIG-a1 of GPU GPU-a is in use as mig"},
		"a slot of a MIG device held whole": {"mig", "MIG-a1", "mig", "MIG-a1::0", true, "MIG device MIG-a1 of GPU GPU-a is in use as mig"},
		"a MIG device after its slot":       {"mig", "MIG-a1::0", "mig2", "MIG-a1", true, "MIG device MIG-a1 of GPU GPU-a is in use as mig"},
		"one MIG device, two resources":     {"gpu", "MIG-a1", "mig", "MIG-a1", true, "MIG device MIG-a1 of GPU GPU-a is in use as gpu"},
	} {
		t.Run(name, func(t *testing.T) {
			r := res(t, test.askedAs, test.asked)
			if !strings.HasSuffix(test.asked, "::0") && strings.Contains(test.asked, "::") {
				r = res(t, test.askedAs, strings.TrimSuffix(test.asked, "::1")+"::0", test.asked) // room for two
			}
			asked := r.Devices[len(r.Devices)-1:]
			byHolder, byReservation := NewLedger(), NewLedger()
			byHolder.SetHolders(noon, []Holder{holder(t, test.heldAs, test.held)})
			held := res(t, test.heldAs, test.held)
			if err := byReservation.Reserve(noon, &held, held.Devices); err != nil {
				t.Fatal(err)
			}
			for kind, l := range map[string]*Ledger{"holder": byHolder, "reservation": byReservation} {
				reason := l.Withheld(&sharing.Plan{Resources: []sharing.Resource{r}})[test.askedAs][test.asked]
				if reason != test.reasonInWithheld {
					t.Errorf("%s: withheld for %q, want %q", kind, reason, test.reasonInWithheld)
				}
				err := l.Reserve(noon, &r, asked)
				if (err != nil) != test.excluded {
					t.Fatalf("%s: Reserve = %v, want an error: %v", kind, err, test.excluded)
				}
				if err != nil && (!strings.Contains(err.Error(), test.reasonInWithheld) || !strings.Contains(err.Error(), test.asked+" of "+test.askedAs)) {
					t.Errorf("%s: error %q does not name both sides", kind, err)
				}
			}
		})
	}
}

func TestReserveIsAllOrNothing(t *testing.T) {
	l := NewLedger()
	l.SetHolders(noon, []Holder{holder(t, "excl", "GPU-b"), holder(t, "gpu", "GPU-c::0")})
	shared := res(t, "gpu", "GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-c::0", "GPU-c::1")
	ask := []sharing.Device{dev(t, "GPU-c::0"), dev(t, "GPU-a::0"), dev(t, "GPU-b::0")}
	if err := l.Reserve(noon, &shared, ask); err == nil || !strings.Contains(err.Error(), "GPU-b::0") {
		t.Fatalf("Reserve = %v; want an error about GPU-b::0", err)
	}
	// GPU-a is as it was, and GPU-c is held and not reserved.
	l.SetHolders(noon.Add(time.Second), []Holder{holder(t, "excl", "GPU-b")})
	exclusive := res(t, "excl", "GPU-a", "GPU-b", "GPU-c")
	if diff := cmp.Diff([]string{}, withheldIDs(l, exclusive)); diff != "" {
		t.Errorf("withheld (-want +got):\n%s", diff)
	}
}

// TestReserveChecksItsOwnDevices: no plan has such a resource, but the ledger
// does not depend on that.
func TestReserveChecksItsOwnDevices(t *testing.T) {
	l := NewLedger()
	r := res(t, "gpu", "GPU-a", "GPU-a::0")
	if err := l.Reserve(noon, &r, r.Devices); err == nil {
		t.Error("a GPU and its slot were reserved together")
	}
	if ids := withheldIDs(l, res(t, "excl", "GPU-a")); len(ids) != 0 {
		t.Errorf("withheld %v after a refusal", ids)
	}
}

func TestReservationsUntilTheKubeletConfirms(t *testing.T) {
	second := func(n int) time.Time { return noon.Add(time.Duration(n) * time.Second) }
	slot := holder(t, "gpu", "GPU-a::0")
	type answer struct {
		asked   int // seconds
		holders []Holder
	}
	for name, test := range map[string]struct {
		answers []answer
		inUse   bool
	}{
		"not asked yet":              {nil, true},
		"asked before":               {[]answer{{9, nil}}, true},
		"asked at the same moment":   {[]answer{{10, nil}}, true},
		"not listed yet":             {[]answer{{11, nil}, {39, nil}}, true},
		"lapsed":                     {[]answer{{11, nil}, {40, nil}}, false},
		"confirmed":                  {[]answer{{11, []Holder{slot}}}, true},
		"confirmed and released":     {[]answer{{11, []Holder{slot}}, {12, nil}}, false},
		"held by another before":     {[]answer{{9, []Holder{slot}}, {12, nil}}, true},
		"held by another, confirmed": {[]answer{{9, []Holder{slot}}, {12, []Holder{slot}}, {13, nil}}, false},
		"asked long after":           {[]answer{{5000, nil}}, false},
		"named twice":                {[]answer{{11, []Holder{slot, slot}}, {12, nil}}, false},
	} {
		t.Run(name, func(t *testing.T) {
			l := NewLedger()
			r := res(t, "gpu", "GPU-a::0", "GPU-a::1")
			if err := l.Reserve(second(10), &r, r.Devices[:1]); err != nil {
				t.Fatal(err)
			}
			for _, a := range test.answers {
				l.SetHolders(second(a.asked), a.holders)
			}
			inUse := len(withheldIDs(l, res(t, "excl", "GPU-a"))) == 1
			if inUse != test.inUse {
				t.Errorf("in use: %v, want %v", inUse, test.inUse)
			}
		})
	}
	t.Run("reserved again", func(t *testing.T) {
		l := NewLedger()
		l.LapseAfter = time.Minute
		r := res(t, "gpu", "GPU-a::0")
		for _, at := range []int{0, 50} {
			if err := l.Reserve(second(at), &r, r.Devices); err != nil {
				t.Fatal(err)
			}
		}
		l.SetHolders(second(100), nil)
		if ids := withheldIDs(l, res(t, "excl", "GPU-a")); len(ids) != 1 {
			t.Errorf("withheld %v; the second reservation stands", ids)
		}
		l.SetHolders(second(110), nil)
		if ids := withheldIDs(l, res(t, "excl", "GPU-a")); len(ids) != 0 {
			t.Errorf("withheld %v; the reservation lapsed", ids)
		}
	})
}

func TestFewerReplicasThanSharers(t *testing.T) {
	now := res(t, "gpu", "GPU-a::0", "GPU-a::1", "GPU-a::2", "GPU-b::0", "GPU-b::1", "GPU-b::2")
	for name, test := range map[string]struct {
		held     []string
		withheld []string
		// possible says, of the three slots of GPU-a, which Reserve gives.
		possible []bool
	}{
		"none":                      {nil, []string{}, []bool{true, true, true}},
		"all within":                {[]string{"GPU-a::0", "GPU-a::2"}, []string{}, []bool{true, true, true}},
		"one beyond":                {[]string{"GPU-a::7"}, []string{"gpu GPU-a::2"}, []bool{true, true, true}},
		"one beyond, last one held": {[]string{"GPU-a::2", "GPU-a::7"}, []string{"gpu GPU-a::1"}, []bool{true, true, true}},
		"two beyond":                {[]string{"GPU-a::6", "GPU-a::7"}, []string{"gpu GPU-a::1", "gpu GPU-a::2"}, []bool{true, true, true}},
		"as many beyond as slots": {
			[]string{"GPU-a::5", "GPU-a::6", "GPU-a::7"},
			[]string{"gpu GPU-a::0", "gpu GPU-a::1", "gpu GPU-a::2"}, []bool{false, false, false},
		},
		"more than slots, one within": {
			[]string{"GPU-a::1", "GPU-a::5", "GPU-a::6", "GPU-a::7"},
			[]string{"gpu GPU-a::0", "gpu GPU-a::2"}, []bool{false, false, false},
		},
	} {
		t.Run(name, func(t *testing.T) {
			var holders []Holder
			for _, id := range test.held {
				holders = append(holders, holder(t, "gpu", id))
			}
			l := NewLedger()
			l.SetHolders(noon, holders)
			if diff := cmp.Diff(test.withheld, withheldIDs(l, now)); diff != "" {
				t.Errorf("withheld (-want +got):\n%s", diff)
			}
			for slot, possible := range test.possible {
				l := NewLedger()
				l.SetHolders(noon, holders)
				err := l.Reserve(noon, &now, now.Devices[slot:slot+1])
				if (err == nil) != possible {
					t.Errorf("Reserve of slot %d = %v, want it possible: %v", slot, err, possible)
				}
			}
			// All together fit only if none of them is withheld.
			l = NewLedger()
			l.SetHolders(noon, holders)
			if err := l.Reserve(noon, &now, now.Devices[:3]); (err == nil) != (len(test.withheld) == 0) {
				t.Errorf("Reserve of all slots = %v with %v withheld", err, test.withheld)
			}
		})
	}
}

// TestGivenBack: what was withdrawn for a holder is offered when it is gone.
func TestGivenBack(t *testing.T) {
	plan := []sharing.Resource{res(t, "excl", "GPU-a", "GPU-b"), res(t, "gpu", "GPU-a::0", "GPU-a::1", "GPU-b::0", "GPU-b::1")}
	l := NewLedger()
	if err := l.Reserve(noon, &plan[0], plan[0].Devices[:1]); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"gpu GPU-a::0", "gpu GPU-a::1"}, withheldIDs(l, plan...)); diff != "" {
		t.Errorf("while GPU-a is held (-want +got):\n%s", diff)
	}
	l.SetHolders(noon.Add(1), []Holder{holder(t, "excl", "GPU-a"), holder(t, "gpu", "GPU-b::1")})
	if diff := cmp.Diff([]string{"excl GPU-b", "gpu GPU-a::0", "gpu GPU-a::1"}, withheldIDs(l, plan...)); diff != "" {
		t.Errorf("while both are held (-want +got):\n%s", diff)
	}
	l.SetHolders(noon.Add(2), nil)
	if diff := cmp.Diff([]string{}, withheldIDs(l, plan...)); diff != "" {
		t.Errorf("after the release (-want +got):\n%s", diff)
	}
	if len(l.uses) != 0 {
		t.Errorf("the ledger still has %v", slices.Collect(maps.Keys(l.uses)))
	}
}
