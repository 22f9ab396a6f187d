// Package placement decides where a request runs and which devices it gets. It is
// pure: no clock, no global randomness, no I/O; the same input gives the same
// output.
//
// There are four doors. Cluster.Fit says whether a node can run a request and if
// not, why. Placer.Place chooses a node and devices by a Policy, and
// Placer.Explain says why it found none. Assign chooses among the devices that one
// machine offers.
//
// A Cluster holds the nodes and what runs on them. Apply and Remove are exact
// opposites, and Fork undoes everything in it unless it is committed. A GPU is
// given out one way at a time: whole, in shares of thousandths and MiB, in
// time-slicing slots, or in MIG devices at legal placements.
//
// What must never happen: a GPU beyond its thousandths or its memory, MIG devices
// that overlap or exceed the compute slices, a device given twice or of a GPU that
// is not healthy, a request refused that fits somewhere.
//
// A Placer remembers what it found for each node and request until the node
// changes, so that a decision costs what changed since the last one for the same
// request. Requests that are equal are one class; nodes that look the same to a
// policy are one shape.
package placement
