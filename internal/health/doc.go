// Package health judges GPUs by facts: what the driver reports of its own accord,
// what a reading of the machine shows, and what the operator says.
//
// A unit is a GPU or a MIG device. Its faults have three sources:
//
//   - the driver's recovery action, where a reading names one. It comes first in
//     reason and action, since the driver knows its hardware;
//   - an XID whose rule takes units out of service (see Rules);
//   - the probe, which is the reading itself, where the unit is lost or unhealthy.
//
// A unit is unhealthy from its first fault until it has been quiet for a window and
// the present reading passes: it is healthy and the driver wants nothing. A probe
// that fails, and a recovery action, last until a reading without them. Each earlier
// fall within the policy's memory doubles the window, so that what flaps stays out
// longer. The window is set at the fall and does not shrink meanwhile.
//
// An XID that blames the application, or that the table does not know, takes nothing
// away. One that names a GPU instance is about the MIG devices in that instance,
// unless its rule is about the whole GPU (see Rule.Whole). A MIG device that an
// answering GPU no longer has is forgotten with its faults: one made anew starts
// healthy.
//
// The state outlives the process (Encode, Restore) with the id of the boot. Another
// boot ends all faults, as it resets every GPU; what is still broken fails its probe
// again. The falls still count.
//
// What can fail: Restore, with a state that is damaged or of another version, and
// Policy.Override, with an entry that is no XID.
//
// What must never happen: a fault of one GPU that shows on another, XID 13 or 31
// taking a device away unless the operator said so, a unit that is out for good
// because the clock was set back, a state that grows without bound, a panic on any
// input.
//
// The package is pure: no clock, no I/O, and the same output for the same input.
package health
