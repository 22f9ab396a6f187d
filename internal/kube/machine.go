package kube

import (
	"fmt"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Machine turns the status of a GPUNode back into the machine: all that placement
// looks at. It never trusts the status further than its own checks: the error names
// the field.
func Machine(s *v1alpha1.GPUNodeStatus) (*gpu.Machine, error) {
	if len(s.GPUs) > maxGPUs {
		return nil, fmt.Errorf("status.gpus: %d GPUs, at most %d are read", len(s.GPUs), maxGPUs)
	}
	m := &gpu.Machine{Driver: s.Driver, CUDA: s.CUDA, GPUs: make([]gpu.GPU, len(s.GPUs)), Links: gpu.NewLinks(len(s.GPUs))}
	for i := range s.GPUs {
		g, err := gpuOf(&s.GPUs[i])
		if err != nil {
			return nil, fmt.Errorf("status.gpus[%d].%w", i, err)
		}
		m.GPUs[i] = g
	}
	for i, l := range s.Links {
		a, b := int(l.A), int(l.B)
		if a < 0 || b <= a || b >= len(m.GPUs) {
			return nil, fmt.Errorf("status.links[%d]: %d and %d are no two GPUs in order, there are %d", i, a, b, len(m.GPUs))
		}
		level, known := gpu.ParsePCIeLevel(l.PCIe)
		if l.PCIe != "" && !known {
			return nil, fmt.Errorf("status.links[%d].pcie: %q is no level", i, l.PCIe)
		}
		if l.NVLinks < 0 {
			return nil, fmt.Errorf("status.links[%d].nvlinks: %d is below 0", i, l.NVLinks)
		}
		m.Links.Merge(a, b, gpu.Link{NVLinks: int(l.NVLinks), PCIe: level})
	}
	if err := m.Validate(); err != nil {
		return nil, fmt.Errorf("status.gpus: %w", err)
	}
	return m, nil
}

// gpuOf reads one GPU. Its errors begin with the field.
func gpuOf(a *v1alpha1.GPU) (gpu.GPU, error) {
	g := gpu.GPU{
		Index: int(a.Index), UUID: a.UUID, Name: a.Product, MemoryMiB: int(a.MemoryMiB), PCIBusID: a.PCIBusID,
		NUMA: -1, PCIeRoot: a.PCIeRoot, NVSwitch: a.NVSwitch, NVLinks: int(a.NVLinks),
	}
	if a.NUMA != nil {
		g.NUMA = int(*a.NUMA)
	}
	if a.Compute != "" {
		if _, err := fmt.Sscanf(a.Compute, "%d.%d", &g.Compute.Major, &g.Compute.Minor); err != nil || g.Compute.String() != a.Compute {
			return g, fmt.Errorf("compute: %q is not major.minor", a.Compute)
		}
	}
	var err error
	if g.Health, err = healthOf(&a.Health); err != nil {
		return g, fmt.Errorf("health.%w", err)
	}
	if a.MIG == nil {
		return g, nil
	}
	g.MIG = gpu.MIGState{Capable: true, Enabled: a.MIG.Enabled, Pending: a.MIG.Enabled}
	if a.MIG.Pending != nil {
		g.MIG.Pending = *a.MIG.Pending
	}
	for i, d := range a.MIG.Devices {
		device := gpu.MIGDevice{
			Index: i, UUID: d.UUID, ProfileID: int(d.ProfileID), Profile: d.Profile,
			Placement: gpu.Placement{Start: int(d.Start), Size: int(d.Size)}, MemoryMiB: int(d.MemoryMiB),
		}
		if d.Health != nil {
			if device.Health, err = healthOf(d.Health); err != nil {
				return g, fmt.Errorf("mig.devices[%d].health.%w", i, err)
			}
		}
		g.MIG.Devices = append(g.MIG.Devices, device)
	}
	return g, nil
}

func healthOf(a *v1alpha1.Health) (gpu.Health, error) {
	for _, state := range []gpu.HealthState{gpu.Healthy, gpu.Unhealthy, gpu.Lost} {
		if a.State == v1alpha1.HealthState(state.String()) {
			return gpu.Health{State: state, Reason: a.Reason}, nil
		}
	}
	return gpu.Health{}, fmt.Errorf("state: %q is no state", a.State)
}
