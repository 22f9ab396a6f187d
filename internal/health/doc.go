// Package health judges GPUs by facts: what the driver reports of its own accord,
// what it answers when it is read, and what the operator says.
//
// # Contract
//
// A unit is a GPU, or a MIG device. It turns unhealthy with its first fault:
//
//   - a reading in which it is lost or unhealthy, which is a probe that failed;
//   - a reading in which the driver names a recovery action;
//   - an XID whose rule takes devices out of service (see Rules).
//
// It is healthy again at the first reading without a fault after it has been quiet
// for a window. Each fall within a memory before doubles the window, so a unit that
// flaps stays out longer and longer. The driver's action is told before the
// table's: it knows the machine.
//
// An XID that blames the application, or that the table does not know, never takes
// anything away. An XID of one GPU instance takes that alone, unless its rule is
// about the whole GPU.
//
// Time, boot id and policy are arguments; the package reads no clock and does no
// I/O. A Tracker's state can be kept over a restart. What a reboot cures ends with
// the boot, and the falls are remembered.
//
// # What can fail
//
// Restore, for a state of another version or a damaged one: then begin anew.
//
// # What must never happen
//
//   - A fault of one GPU shows in another.
//   - A unit stays out for good because the clock was set back.
//   - The state grows without bound.
package health
