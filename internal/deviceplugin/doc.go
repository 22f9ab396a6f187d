// Package deviceplugin gives a node's devices to the kubelet through its
// device-plugin API, version v1beta1.
//
// # Contract
//
// There are three parts. A Server is one registration of one resource: it serves
// from a socket of its own, sends the kubelet the list of devices, and passes
// its questions on to a Handler. An Allocator is what answers for a resource: it
// chooses devices with package placement and tells the container runtime about
// them. The Ledger is shared by all resources: it knows who holds which GPU, and
// through which view.
//
// What is served can change at any time without a new registration: Server.Update
// replaces the list, Allocator.Set everything else.
//
// # What can fail
//
//   - Server.Start: the folder cannot be used, or the kubelet does not accept the
//     registration.
//   - Allocate: the kubelet asks for a device that is unknown, unhealthy or in
//     use by another view of its GPU, or for more than the configuration allows.
//     The pod is then refused with that reason.
//
// # What must never happen
//
//   - Two views of a GPU that exclude each other are in use at once, or a GPU or
//     MIG device has more sharers than slots after an Allocate.
//   - The question for preferred devices fails: the kubelet would refuse the pod.
//   - A reader of the device list that is slow or gone holds up the others or
//     Update.
//   - A server leaves goroutines or its socket behind.
package deviceplugin
