package kube

import (
	"cmp"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
)

// nvidia is the domain of the resources of GPUs, unless they are renamed.
const nvidia = "nvidia.com/"

// ContainerKind says when a container of a pod runs, and so with which others its
// devices are held at once.
type ContainerKind int

// The kinds.
const (
	// MainContainer runs with all others of its kind.
	MainContainer ContainerKind = iota
	// InitContainer has ended before the next container starts.
	InitContainer
	// Sidecar is an init container with the restart policy Always: it starts in its
	// turn and runs until the pod ends.
	Sidecar
)

// ContainerRequest is what one container asks for under one resource.
type ContainerRequest struct {
	Container string
	Kind      ContainerKind
	Resource  string
	// Count is above 0.
	Count int64
}

// GPURequests lists what the containers of a pod ask for under resources of the
// domain nvidia.com and under those that are named. The order is that in which the
// kubelet admits containers, then by resource.
func GPURequests(pod *corev1.Pod, named map[string]bool) []ContainerRequest {
	var all []ContainerRequest
	add := func(c *corev1.Container, kind ContainerKind) {
		first := len(all)
		// Requests of extended resources are equal to limits.
		for name, quantity := range c.Resources.Limits {
			resource, count := string(name), quantity.Value()
			if count > 0 && (named[resource] || strings.HasPrefix(resource, nvidia)) {
				all = append(all, ContainerRequest{Container: c.Name, Kind: kind, Resource: resource, Count: count})
			}
		}
		slices.SortFunc(all[first:], func(x, y ContainerRequest) int { return cmp.Compare(x.Resource, y.Resource) })
	}
	for i := range pod.Spec.InitContainers {
		c := &pod.Spec.InitContainers[i]
		kind := InitContainer
		if c.RestartPolicy != nil && *c.RestartPolicy == corev1.ContainerRestartPolicyAlways {
			kind = Sidecar
		}
		add(c, kind)
	}
	for i := range pod.Spec.Containers {
		add(&pod.Spec.Containers[i], MainContainer)
	}
	return all
}
