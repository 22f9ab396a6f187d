package health

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
)

// TableVersion is the day of NVIDIA's catalogue of XIDs whose immediate actions the
// table has: docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.
const TableVersion = "2025-10-29"

// Action is what must be done about a fault. Of two actions the greater asks for
// more.
type Action int

// The actions: the buckets of NVIDIA's catalogue, and those that drivers name as
// recovery action.
const (
	// Unknown: neither the table nor the driver says.
	Unknown Action = iota
	Ignore
	// ReadRecovery: the driver has changed its recovery action, which a reading shows.
	ReadRecovery
	RestartApp
	UpdateSoftware
	CheckUVM
	DrainP2P
	// Workflow: the catalogue has a procedure, as the number alone does not decide.
	Workflow
	ResetGPU
	DrainReset
	RestartVM
	Reboot
	// Inspect: somebody must look at power, cables and seat of the board.
	Inspect
	ContactSupport
)

var actionTexts = [...]string{
	Unknown: "investigate", Ignore: "nothing", ReadRecovery: "see the driver's recovery action",
	RestartApp: "restart the application", UpdateSoftware: "update driver and firmware",
	CheckUVM: "check unified memory", DrainP2P: "drain peer-to-peer traffic",
	Workflow: "follow NVIDIA's procedure for it", ResetGPU: "reset the GPU",
	DrainReset: "drain and reset the GPU", RestartVM: "restart the virtual machine", Reboot: "reboot the node",
	Inspect: "check power, cables and seat of the board", ContactSupport: "contact support",
}

// String tells people what to do, such as "reset the GPU".
func (a Action) String() string {
	if a >= 0 && int(a) < len(actionTexts) {
		return actionTexts[a]
	}
	return "Action(" + strconv.Itoa(int(a)) + ")"
}

// Rule is what an XID means.
type Rule struct {
	XID int
	// Action is the immediate action of NVIDIA's catalogue.
	Action Action
	// Removes takes the unit out of service: the action is about hardware or driver,
	// and not about an application.
	Removes bool
	// Whole is true where the unit is the whole GPU even if the XID names a GPU
	// instance, since the action cannot be done to less. Without it an XID of an
	// instance takes away that alone: 48, as uncorrectable memory is contained to its
	// instance unless 95 follows, and 142, as encoders belong to instances.
	Whole bool
	// Why is what happened, in a few words.
	Why string
}

// row is what some XIDs have in common.
type row struct {
	xids           []int
	action         Action
	removes, whole bool
	why            string
}

// table has no row for numbers that the catalogue marks as unused. Whether an XID
// removes follows from its action but for those with a procedure:
//
//   - 48 and 74 need a reset, says the catalogue, so they remove.
//   - 45 follows another XID, or an application that was killed, so it does not.
//   - 144-150 mean anything from nothing to a reset, by a code that NVML does not
//     tell. The drivers of the GPUs that have them name the recovery action, so the
//     number alone removes nothing.
var table = []row{
	{[]int{8}, RestartApp, false, false, "a channel of an application stopped"},
	{[]int{11, 25, 32}, RestartApp, false, false, "an application's command stream is corrupt"},
	{[]int{13}, RestartApp, false, false, "an application made the graphics engine fail"},
	{[]int{31}, RestartApp, false, false, "an application used an invalid address"},
	{[]int{39, 40, 41, 70, 71, 72, 75, 76, 77, 85, 126, 127, 128, 129, 130, 131, 132, 133, 134, 135}, RestartApp, false, false, "a copy engine failed"},
	{[]int{60}, RestartApp, false, false, "the video processor failed"},
	{[]int{68, 83, 84, 88, 89, 96, 97, 98}, RestartApp, false, false, "a video decoder failed"},
	{[]int{69}, RestartApp, false, false, "an application used the graphics engine wrongly"},
	{[]int{80}, RestartApp, false, false, "corrupt data was sent to the GPU"},
	{[]int{82, 99, 100, 101, 102, 103, 104, 105}, RestartApp, false, false, "a JPEG engine failed"},
	{[]int{86, 139}, RestartApp, false, false, "an optical flow engine failed"},
	{[]int{94}, RestartApp, false, false, "a memory error was contained to one application"},

	{[]int{37, 38}, Ignore, false, false, "the scheduling firmware reports an error"},
	{[]int{43}, Ignore, false, false, "an application failed and was stopped"},
	{[]int{44}, Ignore, false, false, "the graphics engine failed in a context switch"},
	{[]int{63}, Ignore, false, false, "a row of memory is being replaced"},
	{[]int{66, 67}, Ignore, false, false, "the driver made a forbidden access"},
	{[]int{92}, Ignore, false, false, "many memory errors were corrected"},
	{[]int{93}, Ignore, false, false, "the InfoROM has reached its wear limit"},
	{[]int{106, 107}, Ignore, false, false, "test message of the management bus"},
	{[]int{121}, Ignore, false, false, "the link to the CPU corrected errors"},
	{[]int{137}, Ignore, false, false, "an application made an invalid access over NVLink"},
	{[]int{141}, Ignore, false, false, "a fast path of CUDA failed"},
	{[]int{152, 153}, Ignore, false, false, "the deep learning accelerator failed"},
	{[]int{157}, Ignore, false, false, "a broken part could not be retired"},
	{[]int{160}, Ignore, false, false, "a channel was retired"},
	{[]int{161}, Ignore, false, false, "a channel could not be retired"},

	{[]int{46}, ResetGPU, true, true, "the GPU stopped processing"},
	{[]int{62}, ResetGPU, true, true, "the power controller halted"},
	{[]int{64}, ResetGPU, true, true, "a row of memory could not be replaced"},
	{[]int{95}, ResetGPU, true, true, "a memory error was not contained"},
	{[]int{109}, ResetGPU, true, true, "a context switch timed out"},
	{[]int{110}, ResetGPU, true, true, "a security fault"},
	{[]int{119}, ResetGPU, true, true, "the GPU's system processor does not answer"},
	{[]int{120}, ResetGPU, true, true, "the GPU's system processor failed"},
	{[]int{136}, ResetGPU, true, true, "an NVLink could not be trained"},
	{[]int{140}, ResetGPU, true, true, "a memory error was not recovered"},
	{[]int{143}, ResetGPU, true, true, "the GPU could not be initialised"},
	{[]int{155}, ResetGPU, true, true, "an NVLink went down"},
	{[]int{156}, ResetGPU, true, true, "a broken part is being retired"},
	{[]int{158}, ResetGPU, true, true, "the GPU timed out for good"},

	{[]int{79}, Reboot, true, true, "the GPU fell off the bus"},
	{[]int{151}, RestartVM, true, true, "a key could not be renewed"},
	{[]int{54}, Inspect, true, true, "the auxiliary power is not connected"},
	{[]int{142}, ContactSupport, true, false, "a video encoder failed"},
	{[]int{78}, UpdateSoftware, false, false, "a virtual GPU could not start"},
	{[]int{159}, CheckUVM, false, false, "the link to the CPU reports an error"},
	{[]int{154}, ReadRecovery, false, true, "the driver changed the recovery action"},

	{[]int{45}, Workflow, false, false, "work was removed, after another error or with its application"},
	{[]int{48}, Workflow, true, false, "a memory error could not be corrected"},
	{[]int{74}, Workflow, true, true, "an NVLink failed"},
	{[]int{144, 145, 146, 147, 148, 149, 150}, Workflow, false, true, "an NVLink reports an error"},

	// The catalogue has these without an action.
	{[]int{162, 163, 164, 165}, Unknown, false, true, "power smoothing changed"},
	{[]int{166, 170}, Unknown, false, true, "encryption of NVLink reports an error"},
	{[]int{167}, Unknown, false, true, "a fatal timeout on PCIe"},
	{[]int{168}, Unknown, false, true, "the GPU has less memory than it should"},
	{[]int{169}, Unknown, false, true, "the security controller halted"},
	{[]int{171, 172}, Unknown, false, false, "details of a memory error that could not be corrected"},
}

var rules = func() map[int]Rule {
	rules := make(map[int]Rule)
	for _, r := range table {
		for _, xid := range r.xids {
			rules[xid] = Rule{XID: xid, Action: r.action, Removes: r.removes, Whole: r.whole, Why: r.why}
		}
	}
	return rules
}()

// RuleOf returns the rule of an XID. One that the table does not have removes
// nothing.
func RuleOf(xid int) Rule {
	if r, ok := rules[xid]; ok {
		return r
	}
	return Rule{XID: xid, Why: "not in NVIDIA's catalogue of " + TableVersion}
}

// Rules returns the table in ascending order of XIDs.
func Rules() []Rule {
	list := make([]Rule, 0, len(rules))
	for _, xid := range slices.Sorted(maps.Keys(rules)) {
		list = append(list, rules[xid])
	}
	return list
}

// xidSet is a set of XIDs.
type xidSet struct {
	all  bool
	some map[int]bool
}

func (s xidSet) has(xid int) bool { return s.all || s.some[xid] }

// The variables of NVIDIA's device plugin that Override takes.
const (
	disableVariable = "DP_DISABLE_HEALTHCHECKS"
	enableVariable  = "DP_ENABLE_HEALTHCHECKS"
)

// Override takes the values of NVIDIA's variables DP_DISABLE_HEALTHCHECKS, XIDs that
// shall remove nothing, and DP_ENABLE_HEALTHCHECKS, XIDs that shall remove whatever
// the table says. Both are numbers separated by commas, or "all" or "xids" for every
// XID; "" is none. An XID in both removes. Probes and recovery actions are no XIDs
// and stay in force. An error names the variable and the entry, and leaves the policy
// as it was.
func (p *Policy) Override(disable, enable string) error {
	ignored, err1 := parseXIDs(disableVariable, disable)
	enabled, err2 := parseXIDs(enableVariable, enable)
	if err := errors.Join(err1, err2); err != nil {
		return err
	}
	p.ignored, p.enabled = ignored, enabled
	return nil
}

func parseXIDs(variable, list string) (xidSet, error) {
	set := xidSet{some: make(map[int]bool)}
	for entry := range strings.SplitSeq(list, ",") {
		entry = strings.TrimSpace(entry)
		switch strings.ToLower(entry) {
		case "":
			continue
		case "all", "xids":
			set.all = true
			continue
		}
		xid, err := strconv.Atoi(entry)
		if err != nil || xid < 1 {
			return xidSet{}, fmt.Errorf(`%s: %q is not an XID: give numbers from 1 with commas between, or "all"`, variable, entry)
		}
		set.some[xid] = true
	}
	return set, nil
}

// removes says whether an XID takes its unit out of service.
func (p *Policy) removes(xid int) bool {
	return p.enabled.has(xid) || !p.ignored.has(xid) && RuleOf(xid).Removes
}
