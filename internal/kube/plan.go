package kube

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	strictjson "sigs.k8s.io/json"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// DevicePlan is which devices the containers of a pod shall get, on which node.
type DevicePlan struct {
	Node string `json:"node"`
	// Containers has an entry for each container and resource, in any order.
	Containers []ContainerDevices `json:"containers"`
}

// ContainerDevices are the devices of one container under one resource.
type ContainerDevices struct {
	Name     string `json:"name"`
	Resource string `json:"resource"`
	// Devices are the kubelet's ids. For slots a bare UUID means any slot of it, and
	// is repeated for several.
	Devices []string `json:"devices"`
}

const (
	// maxPlan is the longest plan, in bytes. All annotations of an object together
	// may have 256 KiB.
	maxPlan = 64 << 10
	// maxPlanDevices is the most devices of one container under one resource.
	maxPlanDevices = 256
)

// ParseDevicePlan reads a plan. It refuses, and names the field: texts longer than
// 64 KiB, unknown fields, a field, a container and resource or a slot twice, names
// that Kubernetes does not know, and what is no device id. What it reads it reads
// from String again.
func ParseDevicePlan(text string) (DevicePlan, error) {
	var p DevicePlan
	if len(text) > maxPlan {
		return p, fmt.Errorf("%d bytes, at most %d are read", len(text), maxPlan)
	}
	// The decoder of the standard library takes Node for node, and the last of two.
	strict, err := strictjson.UnmarshalStrict([]byte(text), &p)
	if err != nil {
		return DevicePlan{}, err
	}
	if len(strict) > 0 {
		return DevicePlan{}, strict[0]
	}
	if err := p.check(); err != nil {
		return DevicePlan{}, err
	}
	return p, nil
}

func (p *DevicePlan) check() error {
	if bad := validation.IsDNS1123Subdomain(p.Node); bad != nil {
		return fmt.Errorf("node: %q is no name of a node: %s", p.Node, bad[0])
	}
	if len(p.Containers) == 0 {
		return errors.New("containers: nothing is planned; give a container with its devices, or no plan")
	}
	type key struct{ name, resource string }
	seen := make(map[key]bool)
	for i := range p.Containers {
		c := &p.Containers[i]
		if err := c.check(); err != nil {
			return fmt.Errorf("containers[%d].%w", i, err)
		}
		if seen[key{c.Name, c.Resource}] {
			return fmt.Errorf("containers[%d]: %s of container %s is there twice", i, c.Resource, c.Name)
		}
		seen[key{c.Name, c.Resource}] = true
	}
	return nil
}

// check is about one entry. Its errors begin with the field.
func (c *ContainerDevices) check() error {
	if bad := validation.IsDNS1123Label(c.Name); bad != nil {
		return fmt.Errorf("name: %q is no name of a container: %s", c.Name, bad[0])
	}
	if bad := validation.IsQualifiedName(c.Resource); bad != nil || !strings.Contains(c.Resource, "/") {
		return fmt.Errorf("resource: %q is no name of an extended resource, such as nvidia.com/gpu", c.Resource)
	}
	if len(c.Devices) == 0 || len(c.Devices) > maxPlanDevices {
		return fmt.Errorf("devices: %d are planned, give from 1 to %d", len(c.Devices), maxPlanDevices)
	}
	given := make(map[string]bool)
	for i, text := range c.Devices {
		id, err := deviceID(text)
		if err != nil {
			return fmt.Errorf("devices[%d]: %w", i, err)
		}
		if id.Slot != gpu.NoSlot && given[text] {
			return fmt.Errorf("devices[%d]: %s is there twice", i, text)
		}
		given[text] = true
	}
	return nil
}

// deviceID reads the kubelet's id of a device. It takes only what the status of a
// GPUNode can hold, and UUIDs only of the characters that drivers use.
func deviceID(text string) (gpu.DeviceID, error) {
	if len(text) > maxDeviceID {
		return gpu.DeviceID{}, fmt.Errorf("a device id of %d bytes, no driver's is longer than %d", len(text), maxDeviceID)
	}
	id, err := gpu.ParseDeviceID(text)
	if err != nil {
		return gpu.DeviceID{}, err
	}
	bad := func(r rune) bool {
		return r != '-' && r != '/' && (r < '0' || r > '9') && (r < 'A' || r > 'Z') && (r < 'a' || r > 'z')
	}
	if strings.ContainsFunc(id.Base, bad) || len(id.Base) > maxUUID || len(id.Base) == len("GPU-") {
		return gpu.DeviceID{}, fmt.Errorf("device id %q: %q is no UUID of a driver", text, id.Base)
	}
	return id, nil
}

// String returns the plan as it stands in the annotation.
func (p DevicePlan) String() string {
	text, err := json.Marshal(p)
	if err != nil {
		panic(err) // it is made of texts
	}
	return string(text)
}

// PlanOf returns the plan of a pod, nil where it has none.
func PlanOf(pod *corev1.Pod) (*DevicePlan, error) {
	text, ok := pod.Annotations[v1alpha1.AnnotationDevices]
	if !ok {
		return nil, nil //nolint:nilnil // nil is documented as "none"
	}
	p, err := ParseDevicePlan(text)
	if err != nil {
		return nil, fmt.Errorf("annotation %s: %w", v1alpha1.AnnotationDevices, err)
	}
	return &p, nil
}
