// Package controller has the controllers of ashlar-controller. All of them are
// listed in all.go.
//
// # MIG on demand
//
// On nodes with the label ashlar.dev/mig.on-demand=true idle GPUs are cut for pods
// that wait for MIG devices, and are made whole again when nobody uses them. What is
// decided is decided by mig.OnDemand; here objects are turned into its input, and its
// answer is written into the spec of GPUNodes, which the agents carry out. What the
// decision goes by:
//
//   - nodes that are ready, schedulable and offer MIG devices (the label
//     nvidia.com/mig.strategy is "mixed"), and have no MIG config by label;
//   - pods that the scheduler could not place, on the nodes where nothing but GPUs is
//     missing: by taints, node selector and affinity, and resources of other kinds;
//   - pods that are bound and not yet among the holders of their node.
//
// # What can fail
//
//   - The apiserver, and writes that conflict: tried again with growing pauses.
//   - What the cache says is older than what was written: waited for, by generation.
//   - The process: the spec has all that matters; a new one waits IdleAfter again
//     before it merges a GPU.
//
// # What must never happen
//
//   - A GPU that is in use loses a device. The agent refuses that as well.
//   - GPUs are cut and merged again and again: see mig.OnDemandPolicy.
package controller
