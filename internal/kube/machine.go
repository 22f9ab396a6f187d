package kube

import (
	"cmp"
	"fmt"
	"math"
	"strconv"
	"strings"

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
	if err := uuidOf(a.UUID, "GPU-"); err != nil {
		return g, err
	}
	if err := within("memoryMiB", a.MemoryMiB, 0, math.MaxInt32); err != nil {
		return g, err
	}
	if err := within("nvlinks", int64(a.NVLinks), 0, math.MaxInt32); err != nil {
		return g, err
	}
	if a.NUMA != nil {
		g.NUMA = int(*a.NUMA)
		if err := within("numa", int64(g.NUMA), 0, math.MaxInt32); err != nil {
			return g, err
		}
	}
	var err error
	if a.Compute != "" {
		if g.Compute, err = computeOf(a.Compute); err != nil {
			return g, fmt.Errorf("compute: %w", err)
		}
	}
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
	if len(a.MIG.Devices) > maxMIGDevices {
		return g, fmt.Errorf("mig.devices: %d are given, at most %d are read", len(a.MIG.Devices), maxMIGDevices)
	}
	for i := range a.MIG.Devices {
		d, err := migDeviceOf(i, &a.MIG.Devices[i])
		if err != nil {
			return g, fmt.Errorf("mig.devices[%d].%w", i, err)
		}
		g.MIG.Devices = append(g.MIG.Devices, d)
	}
	return g, nil
}

func migDeviceOf(index int, a *v1alpha1.MIGDevice) (gpu.MIGDevice, error) {
	d := gpu.MIGDevice{
		Index: index, UUID: a.UUID, ProfileID: int(a.ProfileID), Profile: a.Profile,
		Placement: gpu.Placement{Start: int(a.Start), Size: int(a.Size)}, MemoryMiB: int(a.MemoryMiB),
	}
	err := cmp.Or(
		uuidOf(a.UUID, "MIG-"),
		within("profileID", int64(a.ProfileID), 0, math.MaxInt32),
		within("start", int64(a.Start), 0, maxPlace-1),
		within("size", int64(a.Size), 1, maxPlace-int64(max(a.Start, 0))),
		within("memoryMiB", a.MemoryMiB, 0, math.MaxInt32),
	)
	if err == nil && a.Health != nil {
		if d.Health, err = healthOf(a.Health); err != nil {
			err = fmt.Errorf("health.%w", err)
		}
	}
	return d, err
}

// uuidOf checks the UUID of a GPU or of a MIG device.
func uuidOf(uuid, prefix string) error {
	id, err := deviceID(uuid)
	if err != nil {
		return fmt.Errorf("uuid: %w", err)
	}
	if id.Slot != gpu.NoSlot || !strings.HasPrefix(uuid, prefix) {
		return fmt.Errorf("uuid: %q does not begin with %s, or names a slot", uuid, prefix)
	}
	return nil
}

func within(field string, value, least, most int64) error {
	if value < least || value > most {
		return fmt.Errorf("%s: %d is not from %d to %d", field, value, least, most)
	}
	return nil
}

func computeOf(text string) (gpu.ComputeCapability, error) {
	major, minor, _ := strings.Cut(text, ".")
	a, errA := strconv.ParseUint(major, 10, 15)
	b, errB := strconv.ParseUint(minor, 10, 15)
	c := gpu.ComputeCapability{Major: int(a), Minor: int(b)}
	if errA != nil || errB != nil || c.String() != text {
		return gpu.ComputeCapability{}, fmt.Errorf("%q is not major.minor", text)
	}
	return c, nil
}

func healthOf(a *v1alpha1.Health) (gpu.Health, error) {
	for _, state := range []gpu.HealthState{gpu.Healthy, gpu.Unhealthy, gpu.Lost} {
		if a.State == v1alpha1.HealthState(state.String()) {
			return gpu.Health{State: state, Reason: a.Reason}, nil
		}
	}
	return gpu.Health{}, fmt.Errorf("state: %q is no state", a.State)
}
