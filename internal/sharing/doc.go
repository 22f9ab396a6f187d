// Package sharing reads the configuration of a node's device plugin and turns
// it into the plan of what the node offers: which resources, and which devices
// each consists of.
//
// The format is version v1 of the configuration file of NVIDIA's device plugin,
// read strictly: an unknown key, a key given twice or a value of the wrong type
// is an error that names file, line, key and remedy. What that format promises
// and NVIDIA's plugin throws away is honoured here: names by `resources`,
// `rename`, and `devices` that limit sharing to some GPUs. Two forms beyond the
// format are read with a warning: an exclusive view of shared GPUs (an entry
// with `replicas: 1`, see SharedResource) and the keys `sharing.mig.strategy`
// and `resources` as a list.
//
// What can fail: Parse, with all problems of the file at once (see Errors), and
// Config.Plan, where the machine contradicts the configuration, as with
// migStrategy "single" on a GPU without MIG devices. Settings that are valid
// but do nothing on this machine are warnings, because one file serves many
// nodes.
//
// What must never happen: a device that the machine does not have, a device in
// two resources (save the exclusive view, which is marked), a GPU in MIG mode
// offered as a whole, a setting dropped without a word, a panic on any input.
//
// The package is pure: no I/O, no clock, and the same output for the same
// input.
package sharing
