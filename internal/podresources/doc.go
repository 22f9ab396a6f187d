// Package podresources reads from the kubelet which container holds which
// device. The kubelet's answer is the truth: nothing else on a node knows.
//
// It reads two sources. List asks the kubelet's pod-resources API, which leaves
// out init containers that are not sidecars, and for a moment after the
// kubelet's start also pods that it has not seen again yet. Checkpoint reads
// the file in which the kubelet's device manager keeps every allocation; it has
// both, but also pods that ended since the last allocation.
package podresources
