// Package visible compares the GPUs that a container sees with those that it was
// given.
//
// What it was given is in environment variables that the device plugin adds to every
// allocation, one for each resource (see Variable). What it sees is what the driver
// lists inside it, and the device nodes of GPUs.
//
// What can fail: reading the environment, where a variable does not have device ids;
// reading the device nodes. Compare never fails: a driver that cannot be asked is a
// finding where devices were given.
//
// What must never happen: a container that sees a GPU or MIG device that it was not
// given, or not all that it was given, is found to be well.
package visible
