// Package placement decides which devices a request gets. It is pure: no
// clock, no randomness, no I/O; the same input gives the same output.
//
// Assign chooses among the devices of one machine. It fails only where no
// answer exists: with ErrInvalid where the request contradicts itself or the
// machine, with ErrUnavailable where the machine does not offer enough. It must
// never return fewer devices than asked while enough are available, never one
// twice, never one that was not offered, and never one of a GPU that is not
// healthy.
package placement
