// Package agent runs one node: it reads the machine and the config, decides
// which resources the node offers, and keeps the device plugins, CDI specs and
// node labels in that state.
//
// # Contract
//
// It is a reconciler. Wanted is a function of config, machine and holders;
// every input (a config edit, a GPU that got lost or came back, a change of MIG
// geometry, a restarted kubelet, a pod that ended) only makes the same step run
// again, which compares wanted with served and starts, updates or retires each
// resource's server on its own. Nothing is restarted that need not be.
//
// # What can fail
//
//   - The config is bad: it is refused with file, line and key, in an Event on
//     the node and in the log; the last good one stays in force.
//   - The driver does not answer: all devices are unhealthy until it does.
//   - The kubelet is away: nothing is served until its socket is back; then each
//     resource registers again from a new socket.
//   - The apiserver is away: devices are served all the same; labels and Events
//     are written when it is back.
//   - This process is killed: holders are read back from the kubelet before
//     anything is offered again.
//
// # What must never happen
//
//   - A device is offered while another view of its GPU is in use.
//   - A bad config or one bad GPU takes good devices away.
//   - A container gets a device that the machine does not have.
package agent
