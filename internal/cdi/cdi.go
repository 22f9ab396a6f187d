package cdi

import (
	"fmt"
	"strconv"

	"tags.cncf.io/container-device-interface/pkg/parser"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Vendor is the vendor of all kinds here. It is the one of NVIDIA's device
// plugin, so that what knows its names knows these.
const Vendor = "k8s.device-plugin.nvidia.com"

// Kind is the kind of GPUs and MIG devices.
const Kind = Vendor + "/gpu"

// All is the only device of each class but GPU.
const All = "all"

// Name returns the fully qualified name of a GPU or MIG device, given its UUID
// or index.
func Name(id string) string { return GPU.Name(id) }

// Class is a class of devices. Each has a spec of its own.
type Class string

// The classes, named as the modes of NVIDIA's container toolkit.
const (
	// GPU: GPUs and MIG devices.
	GPU Class = "gpu"
	// GDS: GPUDirect Storage.
	GDS Class = "gds"
	// MOFED: Mellanox OFED.
	MOFED Class = "mofed"
	// GDRCopy: GPUDirect RDMA copies by the CPU.
	GDRCopy Class = "gdrcopy"
)

// Kind returns the class with its vendor.
func (c Class) Kind() string { return Vendor + "/" + string(c) }

// Name returns the fully qualified name of a device of the class.
func (c Class) Name(device string) string {
	return parser.QualifiedName(Vendor, string(c), device)
}

// simulatedNodes are the device nodes that a simulated machine claims to have
// for the classes with one device.
var simulatedNodes = map[Class]string{
	GDS:     "/dev/nvidia-fs0",
	MOFED:   "/dev/infiniband/rdma_cm",
	GDRCopy: "/dev/gdrdrv",
}

// Simulated describes a machine that has no driver: device nodes that need not
// exist and no libraries. MIG devices have no capability nodes, since only a
// driver numbers them. With indices, GPUs and MIG devices are also named by
// index, "i" and "i:j". A GPU in MIG mode has no name as a whole.
//
// The error is about a class that is none of the constants.
func Simulated(m *gpu.Machine, class Class, indices bool) (*specs.Spec, error) {
	spec := &specs.Spec{Kind: class.Kind()}
	node, feature := simulatedNodes[class]
	switch {
	case class == GPU:
		// The value keeps NVIDIA's container runtime from adding devices by
		// itself, as in the specs of its toolkit.
		spec.ContainerEdits = specs.ContainerEdits{
			Env:         []string{"NVIDIA_VISIBLE_DEVICES=void"},
			DeviceNodes: []*specs.DeviceNode{{Path: "/dev/nvidiactl"}, {Path: "/dev/nvidia-uvm"}},
		}
		spec.Devices = simulatedGPUs(m, indices)
	case feature:
		spec.Devices = []specs.Device{device(All, node)}
	default:
		return nil, fmt.Errorf("CDI class %q: want %s, %s, %s or %s", class, GPU, GDS, MOFED, GDRCopy)
	}
	version, err := specs.MinimumRequiredVersion(spec)
	if err != nil {
		return nil, err
	}
	spec.Version = version
	return spec, nil
}

func simulatedGPUs(m *gpu.Machine, indices bool) []specs.Device {
	var devices []specs.Device
	add := func(uuid, index, node string) {
		devices = append(devices, device(uuid, node))
		if indices {
			devices = append(devices, device(index, node))
		}
	}
	for i := range m.GPUs {
		g := &m.GPUs[i]
		index, node := strconv.Itoa(g.Index), "/dev/nvidia"+strconv.Itoa(g.Minor)
		if !g.MIG.Enabled {
			add(g.UUID, index, node)
			continue
		}
		for _, d := range g.MIG.Devices {
			add(d.UUID, index+":"+strconv.Itoa(d.Index), node)
		}
	}
	return devices
}

func device(name, node string) specs.Device {
	return specs.Device{Name: name, ContainerEdits: specs.ContainerEdits{
		DeviceNodes: []*specs.DeviceNode{{Path: node}},
	}}
}
