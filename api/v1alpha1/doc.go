// Package v1alpha1 is the API group ashlar.dev/v1alpha1: what Ashlar's programs
// and its users tell each other through the apiserver.
//
// A GPUNode is what one node's GPUs are and who holds them. Its status is written
// by the agent of that node and by nobody else; its spec by the controller that
// cuts GPUs on demand.
//
// The deep copies and the manifests in crds/ are generated: run `make generate`
// after a change. A test fails where they are not what the types say.
//
// +kubebuilder:object:generate=true
// +groupName=ashlar.dev
package v1alpha1
