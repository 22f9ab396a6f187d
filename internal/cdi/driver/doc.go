// Package driver describes the devices of a real machine as CDI specs, through
// the nvcdi package of NVIDIA's container toolkit: device nodes, the driver's
// libraries, and the hooks that make them usable. It is apart from package cdi
// because it needs cgo.
//
// What can fail: Spec, where the driver does not answer or its files are not
// where the options say. One device that cannot be described must never keep
// the others from being described.
package driver
