package health_test

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/health"
)

// xids reads "8 39-41": numbers and ranges.
func xids(t *testing.T, text string) []int {
	t.Helper()
	var list []int
	for _, field := range strings.Fields(text) {
		var from, to int
		if n, _ := fmt.Sscanf(field, "%d-%d", &from, &to); n < 1 {
			t.Fatalf("%q is no range", field)
		}
		for xid := from; xid <= max(from, to); xid++ {
			list = append(list, xid)
		}
	}
	return list
}

// catalogue is the immediate action of every XID that NVIDIA's catalogue does not
// mark as unused.
var catalogue = map[health.Action]string{
	health.RestartApp:     "8 11 13 25 31 32 39-41 60 68-72 75-77 80 82-86 88 89 94 96-105 126-135 139",
	health.Ignore:         "37 38 43 44 63 66 67 92 93 106 107 121 137 141 152 153 157 160 161",
	health.ResetGPU:       "46 62 64 95 109 110 119 120 136 140 143 155 156 158",
	health.Reboot:         "79",
	health.RestartVM:      "151",
	health.Workflow:       "45 48 74 144-150",
	health.Inspect:        "54",
	health.UpdateSoftware: "78",
	health.CheckUVM:       "159",
	health.ContactSupport: "142",
	health.ReadRecovery:   "154",
	health.Unknown:        "162-172",
}

func TestTableHasTheActionsOfTheCatalogue(t *testing.T) {
	want := make(map[int]health.Action)
	for action, text := range catalogue {
		for _, xid := range xids(t, text) {
			want[xid] = action
		}
	}
	got := make(map[int]health.Action)
	for _, r := range health.Rules() {
		got[r.XID] = r.Action
		if diff := cmp.Diff(r, health.RuleOf(r.XID)); diff != "" {
			t.Errorf("RuleOf(%d) differs from Rules (-Rules +RuleOf):\n%s", r.XID, diff)
		}
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("actions (-catalogue +table):\n%s", diff)
	}
}

func TestOnlyHardwareAndDriverErrorsRemove(t *testing.T) {
	var removing, ofInstance []int
	for _, r := range health.Rules() {
		if r.Removes {
			removing = append(removing, r.XID)
			if !r.Whole {
				ofInstance = append(ofInstance, r.XID)
			}
		}
	}
	want := xids(t, "46 48 54 62 64 74 79 95 109 110 119 120 136 140 142 143 151 155 156 158")
	if diff := cmp.Diff(want, removing); diff != "" {
		t.Errorf("XIDs that remove (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff([]int{48, 142}, ofInstance); diff != "" {
		t.Errorf("XIDs that remove an instance alone (-want +got):\n%s", diff)
	}
}

func TestTableIsWellFormed(t *testing.T) {
	rules := health.Rules()
	if !slices.IsSortedFunc(rules, func(a, b health.Rule) int { return a.XID - b.XID }) {
		t.Error("Rules is not in ascending order")
	}
	for i, r := range rules {
		if i > 0 && rules[i-1].XID == r.XID {
			t.Errorf("XID %d is there twice", r.XID)
		}
		if r.Why == "" || len(r.Why) > 80 || strings.ContainsAny(r.Why, "\n:;") || strings.HasSuffix(r.Why, ".") {
			t.Errorf("XID %d: %q is no short phrase", r.XID, r.Why)
		}
	}
	seen := make(map[string]bool)
	for a := health.Unknown; a <= health.ContactSupport; a++ {
		// The API allows 64 characters.
		if s := a.String(); s == "" || seen[s] || len(s) > 64 || strings.HasPrefix(s, "Action(") {
			t.Errorf("action %d has the text %q", int(a), s)
		}
		seen[a.String()] = true
	}
	for _, a := range []health.Action{-1, health.ContactSupport + 1} {
		if want := fmt.Sprintf("Action(%d)", int(a)); a.String() != want {
			t.Errorf("got %q, want %q", a, want)
		}
	}
}

func TestUnknownXIDRemovesNothing(t *testing.T) {
	for _, xid := range []int{-1, 0, 1, 14, 108, 173, 1 << 40} {
		r := health.RuleOf(xid)
		if r.XID != xid || r.Action != health.Unknown || r.Removes || r.Why == "" {
			t.Errorf("RuleOf(%d) = %+v", xid, r)
		}
	}
}

// removes says whether an XID of a GPU takes it out under a policy.
func removes(p health.Policy, xid int) bool {
	m := machine(1, 0)
	tracker := health.New(p, "boot")
	tracker.Event(start, gpu.Event{GPU: m.GPUs[0].UUID, XID: xid, GI: gpu.AnyInstance, CI: gpu.AnyInstance})
	tracker.Observe(start, m, nil)
	return !m.GPUs[0].Health.OK()
}

func TestOverrideOfXIDs(t *testing.T) {
	for name, c := range map[string]struct {
		disable, enable string
		remove, keep    []int
	}{
		"nothing is set":                  {"", "", []int{48, 79}, []int{13, 31, 63, 94, 154, 173}},
		"a list is disabled":              {"79, 109", "", []int{48}, []int{79, 109, 13}},
		"all are disabled":                {"all", "", nil, []int{48, 79, 13}},
		"xids stands for all":             {"xids", "", nil, []int{48, 79}},
		"words are read in any case":      {" XIDs ", "", nil, []int{48, 79}},
		"a word in a list counts":         {"13,xids", "", nil, []int{48, 79}},
		"enabling beats disabling":        {"all", "79,13", []int{79, 13}, []int{48}},
		"enabling beats the table":        {"", "13,999", []int{13, 999, 79}, []int{31}},
		"all are enabled":                 {"79", "all", []int{13, 79, 94, 999}, nil},
		"empty entries are nothing":       {",79,,", ",", []int{48}, []int{79, 13}},
		"an entry twice is the same once": {"79,79", "13,13", []int{13}, []int{79}},
	} {
		t.Run(name, func(t *testing.T) {
			p := health.DefaultPolicy()
			if err := p.Override(c.disable, c.enable); err != nil {
				t.Fatal(err)
			}
			for _, xid := range c.remove {
				if !removes(p, xid) {
					t.Errorf("XID %d does not remove", xid)
				}
			}
			for _, xid := range c.keep {
				if removes(p, xid) {
					t.Errorf("XID %d removes", xid)
				}
			}
		})
	}
}

func TestOverrideRefusesWhatIsNoXID(t *testing.T) {
	for name, c := range map[string]struct {
		disable, enable string
		want            []string
	}{
		"a word":        {"79,none", "", []string{"DP_DISABLE_HEALTHCHECKS", `"none"`, "numbers from 1"}},
		"zero":          {"", "0", []string{"DP_ENABLE_HEALTHCHECKS", `"0"`}},
		"negative":      {"", "-1", []string{"DP_ENABLE_HEALTHCHECKS", `"-1"`}},
		"other commas":  {"13;31", "", []string{"DP_DISABLE_HEALTHCHECKS", `"13;31"`}},
		"too large":     {"99999999999999999999", "", []string{"99999999999999999999"}},
		"both are told": {"a", "b", []string{"DP_DISABLE_HEALTHCHECKS", `"a"`, "DP_ENABLE_HEALTHCHECKS", `"b"`}},
	} {
		t.Run(name, func(t *testing.T) {
			p := health.DefaultPolicy()
			if err := p.Override("48", ""); err != nil {
				t.Fatal(err)
			}
			err := p.Override(c.disable, c.enable)
			for _, part := range c.want {
				if err == nil || !strings.Contains(err.Error(), part) {
					t.Errorf("got %v, want %s in it", err, part)
				}
			}
			if removes(p, 48) || !removes(p, 79) || removes(p, 13) {
				t.Error("the policy has changed")
			}
		})
	}
}

func FuzzOverride(f *testing.F) {
	f.Add("all", "13,31")
	f.Add("xids,79", " ,0")
	f.Fuzz(func(t *testing.T, disable, enable string) {
		p := health.DefaultPolicy()
		err := p.Override(disable, enable)
		if err != nil && !strings.Contains(err.Error(), "DP_") {
			t.Errorf("%v names no variable", err)
		}
		if err != nil && (removes(p, 13) || !removes(p, 79)) {
			t.Error("a refused override is in force")
		}
	})
}
