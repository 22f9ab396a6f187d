// Package migmanager changes how the GPUs of a node are cut while pods run on it.
//
// # Contract
//
// What is wanted comes from one of two places. The node label
// nvidia.com/mig.config names a config of the config file, as with NVIDIA's MIG
// manager; the label nvidia.com/mig.config.state then says pending, success or
// failed, and the annotation ashlar.dev/mig.config.reason why. Or, where the label
// ashlar.dev/mig.on-demand is true, the spec of the node's GPUNode says it for
// each GPU.
//
// MIG devices that are wanted and there already stay, with the pods on them. What
// goes gets no new use first. For a config the pods that hold it are then evicted,
// as their disruption budgets allow, until a deadline; on demand nobody is evicted,
// and a GPU that is held in a way that is in the way is left as it is. Then package
// mig makes the change, GPU by GPU. Where a GPU must be idle as a whole, NVIDIA's
// own clients are paused by the labels nvidia.com/gpu.deploy.*.
//
// # What can fail
//
//   - The config, its name, or what it asks for: failed, and tried again when the
//     label, the file or the machine changes, and after a pause.
//   - Pods that do not go: failed after the deadline, with their names; tried again
//     with growing pauses. Those that went are not brought back.
//   - The hardware: the GPU is put back as it was; tried again with growing pauses.
//   - This process ends at any moment: Recover goes on at the next start.
//   - The apiserver is away: nothing is begun; what is under way ends.
//
// # What must never happen
//
//   - A MIG device that is in use is destroyed.
//   - The state says success while the geometry is another one.
//   - Clients stay paused while no change is under way.
package migmanager
