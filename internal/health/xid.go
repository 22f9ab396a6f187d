package health

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
)

// TableVersion is the state of NVIDIA's XID catalogue that the table follows: the
// immediate actions of the analyzer's catalogue as of that day.
const TableVersion = "2025-10-29"

// Action is what must be done after an XID, or by the word of the driver.
type Action int

// The actions.
const (
	// Unknown: the table does not have it.
	Unknown Action = iota
	Ignore
	RestartApp
	ResetGPU
	Reboot
	RestartVM
	Inspect
	UpdateSoftware
	ContactSupport
	// ReadRecovery: the driver has changed its recovery action.
	ReadRecovery
	// Diagnose: the XID's details decide.
	Diagnose
	DrainP2P
	DrainReset
)

var actionTexts = map[Action]string{
	Unknown: "look it up in NVIDIA's catalogue", Ignore: "nothing", RestartApp: "restart the application",
	ResetGPU: "reset the GPU", Reboot: "reboot the node", RestartVM: "restart the virtual machine",
	Inspect: "check the mechanical parts", UpdateSoftware: "update driver and firmware",
	ContactSupport: "contact support", ReadRecovery: "see the driver's recovery action", Diagnose: "run the diagnostics",
	DrainP2P: "drain peer-to-peer traffic", DrainReset: "drain and reset the GPU",
}

func (a Action) String() string {
	if text, ok := actionTexts[a]; ok {
		return text
	}
	return "Action(" + strconv.Itoa(int(a)) + ")"
}

// Rule is what an XID means.
type Rule struct {
	XID    int
	Action Action
	// Removes says that work must be kept off the GPU.
	Removes bool
	// Whole says that it is about the GPU even where it names a MIG device.
	Whole bool
	// Why is what happened, in a few words.
	Why string
}

// spans are rows of the table: XIDs from first to last have one rule.
var spans = []struct {
	first, last    int
	action         Action
	removes, whole bool
	why            string
}{
	{8, 8, RestartApp, false, false, "the GPU stopped processing"},
	{11, 11, RestartApp, false, false, "invalid push buffer"},
	{13, 13, RestartApp, false, false, "graphics engine exception, mostly of the application"},
	{25, 25, RestartApp, false, false, "invalid display state"},
	{31, 31, RestartApp, false, false, "memory page fault, mostly of the application"},
	{32, 32, RestartApp, false, false, "corrupted push buffer"},
	{37, 38, Ignore, false, false, "firmware message"},
	{39, 41, RestartApp, false, false, "copy engine exception"},
	{43, 44, Ignore, false, false, "a channel was stopped after an error of its application"},
	{45, 45, Diagnose, false, false, "channels were cleaned up after an earlier error"},
	{46, 46, ResetGPU, true, true, "the GPU stopped processing and does not recover"},
	{48, 48, Diagnose, true, false, "uncorrectable memory error"},
	{54, 54, Inspect, true, true, "auxiliary power is not connected"},
	{60, 60, RestartApp, false, false, "video processor exception"},
	{62, 62, ResetGPU, true, true, "a microcontroller of the GPU halted"},
	{63, 63, Ignore, false, false, "a memory row will be remapped"},
	{64, 64, ResetGPU, true, true, "a memory row could not be remapped"},
	{66, 67, Ignore, false, false, "internal message"},
	{68, 72, RestartApp, false, false, "engine exception"},
	{74, 74, Diagnose, true, true, "NVLink error"},
	{75, 77, RestartApp, false, false, "engine exception"},
	{78, 78, UpdateSoftware, false, false, "a virtual GPU could not start"},
	{79, 79, Reboot, true, true, "the GPU has fallen off the bus"},
	{80, 80, RestartApp, false, false, "corrupted data was sent to the GPU"},
	{82, 86, RestartApp, false, false, "engine exception"},
	{88, 89, RestartApp, false, false, "engine exception"},
	{92, 92, Ignore, false, false, "many corrected memory errors"},
	{93, 93, Ignore, false, false, "the configuration memory was not updated"},
	{94, 94, RestartApp, false, false, "a memory error was contained to its application"},
	{95, 95, ResetGPU, true, true, "a memory error was not contained"},
	{96, 105, RestartApp, false, false, "engine exception"},
	{106, 107, Ignore, false, false, "internal message"},
	{109, 109, ResetGPU, true, true, "context switches time out"},
	{110, 110, ResetGPU, true, true, "security fault"},
	{119, 119, ResetGPU, true, true, "the GPU's system processor does not answer"},
	{120, 120, ResetGPU, true, true, "the GPU's system processor failed"},
	{121, 121, Ignore, false, false, "corrected error of the chip-to-chip link"},
	{126, 135, RestartApp, false, false, "engine exception"},
	{136, 136, ResetGPU, true, true, "link training failed"},
	{137, 137, Ignore, false, false, "NVLink fault of a remote application"},
	{139, 139, RestartApp, false, false, "engine exception"},
	{140, 140, ResetGPU, true, true, "memory errors that were not recovered"},
	{141, 141, Ignore, false, false, "internal message"},
	{142, 142, ContactSupport, true, true, "hardware fault"},
	{143, 143, ResetGPU, true, true, "initialisation failed"},
	{144, 150, Diagnose, true, true, "NVLink error"},
	{151, 151, RestartVM, true, true, "key rotation failed"},
	{152, 153, Ignore, false, false, "internal message"},
	{154, 154, ReadRecovery, false, true, "the recovery action changed"},
	{155, 155, ResetGPU, true, true, "NVLink software error"},
	{156, 156, ResetGPU, true, true, "resource retirement"},
	{157, 157, Ignore, false, false, "a resource could not be retired"},
	{158, 158, ResetGPU, true, true, "fatal time-out of the GPU"},
	{159, 159, RestartApp, false, false, "failed memory check of unified memory"},
	{160, 161, Ignore, false, false, "channel retirement"},
}

var rules = func() map[int]Rule {
	table := make(map[int]Rule)
	for _, s := range spans {
		for xid := s.first; xid <= s.last; xid++ {
			table[xid] = Rule{XID: xid, Action: s.action, Removes: s.removes, Whole: s.whole, Why: s.why}
		}
	}
	return table
}()

// RuleOf returns the rule of an XID. One that the table does not have removes
// nothing: the catalogue grows with XIDs that only inform, and those that matter
// change the driver's recovery action as well.
func RuleOf(xid int) Rule {
	if r, ok := rules[xid]; ok {
		return r
	}
	return Rule{XID: xid, Why: "not in the table of " + TableVersion}
}

// Rules lists the table in the order of XIDs.
func Rules() []Rule {
	list := make([]Rule, 0, len(rules))
	for _, r := range rules {
		list = append(list, r)
	}
	slices.SortFunc(list, func(a, b Rule) int { return cmp.Compare(a.XID, b.XID) })
	return list
}

// all stands for every XID in an Override.
const all = "all"

// Override takes in NVIDIA's variables DP_DISABLE_HEALTHCHECKS, "all", "xids" or
// XIDs that are ignored, and DP_ENABLE_HEALTHCHECKS, "all" or XIDs that take a GPU
// out of service whatever the table says. Lists are separated by commas. What is
// in both is enabled. The error names the variable and the entry.
func (p *Policy) Override(disable, enable string) error {
	parse := func(variable, text string, words ...string) (map[int]bool, bool, error) {
		xids := make(map[int]bool)
		every := false
		for entry := range strings.SplitSeq(text, ",") {
			entry = strings.TrimSpace(entry)
			if entry == "" {
				continue
			}
			if slices.Contains(words, entry) {
				every = true
				continue
			}
			xid, err := strconv.Atoi(entry)
			if err != nil || xid < 1 {
				return nil, false, fmt.Errorf("%s: %q is not an XID: give numbers from 1, or %s", variable, entry, strings.Join(words, ", "))
			}
			xids[xid] = true
		}
		return xids, every, nil
	}
	var err error
	if p.ignored, p.ignoreAll, err = parse("DP_DISABLE_HEALTHCHECKS", disable, all, "xids"); err != nil {
		return err
	}
	p.enabled, p.enableAll, err = parse("DP_ENABLE_HEALTHCHECKS", enable, all)
	return err
}

// removes says whether an XID takes a unit out of service.
func (p *Policy) removes(r Rule) bool {
	switch {
	case p.enableAll || p.enabled[r.XID]:
		return true
	case p.ignoreAll || p.ignored[r.XID]:
		return false
	}
	return r.Removes
}
