// Package kube turns Kubernetes objects into domain values and back. It is the one
// parser: whoever reads a plan, a request or a GPUNode does it here.
//
// # The plan of a pod
//
// The annotation ashlar.dev/devices says which devices the containers of a pod
// shall get, and on which node:
//
//	{"node":"gpu-1","containers":[
//	  {"name":"train","resource":"nvidia.com/gpu","devices":["GPU-1f2e...","GPU-9ab0..."]},
//	  {"name":"side","resource":"nvidia.com/gpu.shared","devices":["GPU-77c1..."]}]}
//
// Devices are the kubelet's ids: the UUID of a GPU or MIG device, for a slot with
// "::" and its number. For a resource of slots a bare UUID stands for any slot of
// it. There is one entry for each container and resource.
//
// # Contract
//
// The package is pure: no client, no clock, no I/O. Parsers are strict and bounded;
// they refuse with the field, and never panic. Output depends on the input alone.
//
// # What must never happen
//
//   - A status that the apiserver refuses: texts and lists are cut to what the
//     CustomResourceDefinition allows.
//   - Machine and Status disagree: the scheduler places by what it reads back.
package kube
