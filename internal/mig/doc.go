// Package mig says how GPUs shall be cut, and cuts them.
//
// # Contract
//
// A Config is a file in the format of NVIDIA's mig-parted. Its named configs say
// for each GPU how many MIG devices of which profile it shall have; where they lie
// is decided here, so that large profiles stay possible. PlanGPU compares that with
// what a GPU has: devices that are wanted and there stay, and of the ways to do that
// it takes the one that destroys the fewest devices in use. An Executor makes the
// change of one GPU as a transaction, with a journal.
//
// # What can fail
//
//   - The file: an unknown key, a profile that the product does not have, devices
//     that do not fit together. The error has file, line and key.
//   - A step of a change: the GPU is brought back to how it was.
//   - The process, at any moment: Recover brings the GPU to what was wanted, or back
//     to how it was.
//
// # What must never happen
//
//   - A device that is in both geometries is destroyed, also on the way back.
//   - A GPU stays between two geometries without a journal that says so.
package mig
