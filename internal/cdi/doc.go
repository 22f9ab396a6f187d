// Package cdi makes and keeps the CDI specs of a node: the files in which a
// container runtime looks up what a device name stands for.
//
// # Contract
//
// A spec of class GPU names each GPU and MIG device by its UUID, on request also
// by its index. Simulated describes a machine that exists only as data; package
// driver describes a real one. Write replaces a spec in one step: a runtime
// that reads the folder sees the old file or the new one, each whole.
//
// # What can fail
//
// Write, where the folder cannot be written or the spec would not be accepted
// by a runtime. The file that was there then stays.
//
// # What must never happen
//
// A name that a container was given stops being known while the container may
// still be restarted: Write keeps the devices that it is told are in use.
package cdi
