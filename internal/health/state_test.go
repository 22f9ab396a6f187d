package health_test

import (
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/health"
)

// full is a state in which everything is set.
func full(t *testing.T) []byte {
	n := newNode(t, 5, 2)
	n.machine.GPUs[1].Health = lostHealth
	n.machine.GPUs[2].Recovery = gpu.RecoveryReset
	n.machine.GPUs[3].Health = gpu.Health{State: gpu.Unhealthy, Reason: "too hot"}
	n.xid(0, 79)
	n.xidOf(0, 48, 1)
	n.machine.GPUs[2].Recovery = gpu.RecoveryNone
	n.machine.GPUs[3].Health = gpu.Health{}
	n.xid(4, 119)
	n.machine.GPUs = n.machine.GPUs[:4]
	n.after(time.Second)
	n.tracker.Event(n.now, gpu.Event{GPU: "GPU-1", XID: 48, GI: 2})
	return n.encode()
}

func TestStateIsRestoredAsItWas(t *testing.T) {
	data := full(t)
	for _, field := range []string{"falls", "xid", "recovery", "recoveryEnded", "probe", "lost", "probeEnded", "events", "mig", "missing"} {
		if !strings.Contains(string(data), `"`+field+`"`) {
			t.Errorf("no %s in %s", field, data)
		}
	}
	tracker, err := health.Restore(health.DefaultPolicy(), "boot 1", data)
	if err != nil {
		t.Fatal(err)
	}
	again, err := tracker.Encode()
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(data), string(again)); diff != "" {
		t.Errorf("state (-before +after):\n%s", diff)
	}
}

func TestRestoreRefusesWhatNoTrackerWrote(t *testing.T) {
	const falls, xid = `"falls":["2026-01-01T00:00:00Z"]`, `"xid":{"xid":79,"at":"2026-01-01T00:00:00Z"}`
	in := func(g string) string { return `{"version":1,"bootID":"b","gpus":{"GPU-0":` + g + `}}` }
	for name, c := range map[string]struct{ data, want string }{
		"empty":                   {"", "health state"},
		"no JSON":                 {"GPU-0", "health state"},
		"cut off":                 {`{"version":1,"bootID":"b","gpus":{`, "health state"},
		"something follows":       {`{"version":1,"bootID":"b","gpus":{}} {}`, "follows"},
		"another version":         {`{"version":2,"bootID":"b","gpus":{}}`, "version is 2, want 1"},
		"no version":              {`{}`, "version is 0"},
		"null":                    {`null`, "version is 0"},
		"unknown field":           {`{"version":1,"color":"red"}`, "color"},
		"no UUID":                 {`{"version":1,"gpus":{"":{}}}`, "GPU is empty"},
		"null GPU":                {in(`null`), "GPU is empty"},
		"no time":                 {in(`{"falls":["yesterday"]}`), "health state"},
		"fault without fall":      {in(`{` + xid + `}`), "GPU-0: falls"},
		"falls not in order":      {in(`{"falls":["2026-01-02T00:00:00Z","2026-01-01T00:00:00Z"]}`), "not in order"},
		"too many falls":          {in(`{"falls":[` + strings.Repeat(`"2026-01-01T00:00:00Z",`, 64) + `"2026-01-01T00:00:00Z"]}`), "65"},
		"XID without time":        {in(`{` + falls + `,"xid":{"xid":79}}`), "xid"},
		"time without XID":        {in(`{` + falls + `,"xid":{"at":"2026-01-01T00:00:00Z"}}`), "xid"},
		"negative XID":            {in(`{` + falls + `,"xid":{"xid":-1,"at":"2026-01-01T00:00:00Z"}}`), "xid"},
		"lost without reason":     {in(`{` + falls + `,"lost":true}`), "probe"},
		"end without probe":       {in(`{` + falls + `,"probeEnded":"2026-01-01T00:00:00Z"}`), "probe"},
		"end without action":      {in(`{` + falls + `,"recoveryEnded":"2026-01-01T00:00:00Z"}`), "recoveryEnded"},
		"event of no instance":    {in(`{"events":{"64":{"xid":79,"at":"2026-01-01T00:00:00Z"}}}`), "events"},
		"event without XID":       {in(`{"events":{"1":{"at":"2026-01-01T00:00:00Z"}}}`), "events"},
		"null MIG device":         {in(`{"mig":{"MIG-0":null}}`), "GPU-0: mig"},
		"MIG device without UUID": {in(`{"mig":{"":{}}}`), "GPU-0: mig"},
		"damaged MIG device":      {in(`{"mig":{"MIG-0":{"lost":true}}}`), "MIG-0: probe"},
	} {
		t.Run(name, func(t *testing.T) {
			tracker, err := health.Restore(health.DefaultPolicy(), "b", []byte(c.data))
			if err == nil || tracker != nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, %v, want an error with %q", tracker, err, c.want)
			}
		})
	}
	if _, err := health.Restore(health.DefaultPolicy(), "b", []byte(in(`{`+falls+`,`+xid+`}`))); err != nil {
		t.Errorf("a state that is well: %v", err)
	}
}

// A state that is taken, whatever it is, must work: it is written as it was read,
// and lets every unit return.
func FuzzRestore(f *testing.F) {
	n := newNode(&testing.T{}, 2, 2)
	n.machine.GPUs[1].Health = lostHealth
	n.xid(0, 79)
	n.xidOf(0, 48, 1)
	f.Add(n.encode(), "boot 1")
	f.Add(n.encode(), "boot 2")
	f.Add([]byte(`{"version":1,"bootID":"b","gpus":{"GPU-0":{"falls":["9999-12-31T23:59:59Z"],"probe":"x","lost":true,"rebooted":true}}}`), "b")
	f.Add([]byte(`{"version":1,"gpus":{"GPU-1":{"missing":"2300-01-01T00:00:00+05:00","events":{"-1":{"xid":48}}}}}`), "")
	f.Fuzz(func(t *testing.T, data []byte, boot string) {
		p := health.DefaultPolicy()
		tracker, err := health.Restore(p, boot, data)
		if err != nil {
			return
		}
		check := func(tracker *health.Tracker) []byte {
			data, err := tracker.Encode()
			if err != nil {
				t.Fatal(err)
			}
			again, err := health.Restore(p, boot, data)
			if err != nil {
				t.Fatalf("%v: %s", err, data)
			}
			second, err := again.Encode()
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(data), string(second)); diff != "" {
				t.Errorf("state changes by a restart (-before +after):\n%s", diff)
			}
			return data
		}
		check(tracker)
		now := start
		for range 3 {
			m := machine(2, 2)
			tracker.Observe(now, m, nil)
			check(tracker)
			for _, g := range m.GPUs {
				if f := tracker.Fault(g.UUID); f.Since.IsZero() != g.Health.OK() || f.Since.After(now) || g.Health.OK() != (g.Health.Reason == "") {
					t.Errorf("health %v with fault %v", g.Health, f)
				}
			}
			now = now.Add(time.Hour)
		}
		m := machine(2, 2)
		tracker.Observe(now, m, nil)
		if diff := cmp.Diff(machine(2, 2), m, cmp.AllowUnexported(gpu.Links{})); diff != "" {
			t.Errorf("not all have returned (-want +got):\n%s", diff)
		}
	})
}
