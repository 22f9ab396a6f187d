package kube

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	corev1 "k8s.io/api/core/v1"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// DevicePlan is which devices the containers of a pod shall get, on which node.
type DevicePlan struct {
	Node       string             `json:"node"`
	Containers []ContainerDevices `json:"containers"`
}

// ContainerDevices are the devices of one container under one resource.
type ContainerDevices struct {
	Name     string `json:"name"`
	Resource string `json:"resource"`
	// Devices are the kubelet's ids. For slots a bare UUID means any slot of it.
	Devices []string `json:"devices"`
}

const (
	// maxPlan is the longest plan, in bytes. All annotations of an object together
	// may have 256 KiB.
	maxPlan = 64 << 10
	// maxPlanDevices is the most devices of one container.
	maxPlanDevices = 256
)

// ParseDevicePlan reads a plan. It refuses what String cannot have written: unknown
// fields, a container and resource twice, devices that are no device ids.
func ParseDevicePlan(text string) (DevicePlan, error) {
	if len(text) > maxPlan {
		return DevicePlan{}, fmt.Errorf("%d bytes, at most %d are read", len(text), maxPlan)
	}
	decoder := json.NewDecoder(bytes.NewReader([]byte(text)))
	decoder.DisallowUnknownFields()
	var p DevicePlan
	if err := decoder.Decode(&p); err != nil {
		return DevicePlan{}, err
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return DevicePlan{}, errors.New("something stands after the plan")
	}
	if p.Node == "" {
		return DevicePlan{}, errors.New("node is missing")
	}
	seen := make(map[[2]string]bool)
	for i, c := range p.Containers {
		field := fmt.Sprintf("containers[%d]", i)
		switch {
		case c.Name == "" || c.Resource == "":
			return DevicePlan{}, fmt.Errorf("%s: name and resource are both needed", field)
		case seen[[2]string{c.Name, c.Resource}]:
			return DevicePlan{}, fmt.Errorf("%s: %s of container %s is there twice", field, c.Resource, c.Name)
		case len(c.Devices) == 0 || len(c.Devices) > maxPlanDevices:
			return DevicePlan{}, fmt.Errorf("%s.devices: %d devices, from 1 to %d can be planned", field, len(c.Devices), maxPlanDevices)
		}
		seen[[2]string{c.Name, c.Resource}] = true
		given := make(map[string]bool)
		for j, d := range c.Devices {
			id, err := gpu.ParseDeviceID(d)
			if err != nil {
				return DevicePlan{}, fmt.Errorf("%s.devices[%d]: %w", field, j, err)
			}
			if id.Slot != gpu.NoSlot && given[d] {
				return DevicePlan{}, fmt.Errorf("%s.devices[%d]: %s is there twice", field, j, d)
			}
			given[d] = true
		}
	}
	return p, nil
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
