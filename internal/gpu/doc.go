// Package gpu is the domain model: physical GPUs, their MIG slices, the links
// between them, and the names of the devices that containers are given.
//
// A GPU is one physical device and the only thing that has state. A Device is
// always a view of one GPU: the whole of it, one time-sliced slot, or a MIG
// device. Health, loss and pending changes belong to the GPU and therefore
// hold for every view of it at once.
//
// Units: memory in MiB, MIG placements in the GPU's own memory units, link
// quality in the points of Links.Score. There are no floats: accounting must
// add up exactly.
//
// The package is pure: it imports the standard library alone, reads no clock,
// does no I/O, and returns the same output for the same input.
package gpu
