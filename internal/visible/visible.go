package visible

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// prefix begins the names of the variables.
const prefix = "ASHLAR_DEVICES_"

// Variable is the environment variable that tells a container which devices of a
// resource it was given: their ids, comma-separated. Each resource has one of its
// own, so that a container may have several. All but letters and digits of the
// resource's name becomes "_", as in ASHLAR_DEVICES_NVIDIA_COM_GPU.
func Variable(resource string) string {
	return prefix + strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z':
			return r - 'a' + 'A'
		case r >= 'A' && r <= 'Z' || r >= '0' && r <= '9':
			return r
		}
		return '_'
	}, resource)
}

// Allocation is what a container was given of one resource.
type Allocation struct {
	// Variable is the environment variable that says so.
	Variable string
	Devices  []gpu.DeviceID
}

// Allocated reads what a container was given from its environment, whose entries are
// "name=value". The order is that of the variables' names.
func Allocated(environ []string) ([]Allocation, error) {
	var allocations []Allocation
	for _, entry := range environ {
		name, value, _ := strings.Cut(entry, "=")
		if !strings.HasPrefix(name, prefix) {
			continue
		}
		a := Allocation{Variable: name}
		for text := range strings.SplitSeq(value, ",") {
			id, err := gpu.ParseDeviceID(text)
			if err != nil {
				return nil, fmt.Errorf("$%s: %w", name, err)
			}
			a.Devices = append(a.Devices, id)
		}
		allocations = append(allocations, a)
	}
	slices.SortFunc(allocations, func(a, b Allocation) int { return strings.Compare(a.Variable, b.Variable) })
	return allocations, nil
}

// Seen is what a container sees.
type Seen struct {
	// GPUs are those that the driver lists.
	GPUs []gpu.GPU
	// Driver is why the driver cannot be asked, "" where it can.
	Driver string
	// Nodes are the minor numbers of the device nodes of GPUs.
	Nodes []int
}

// Nodes lists the minor numbers of the device nodes /dev/nvidia<minor> below a root,
// in ascending order.
func Nodes(root string) ([]int, error) {
	entries, err := os.ReadDir(filepath.Join(root, "dev"))
	if err != nil {
		return nil, fmt.Errorf("device nodes: %w", err)
	}
	var minors []int
	for _, e := range entries {
		number, ok := strings.CutPrefix(e.Name(), "nvidia")
		if minor, err := strconv.Atoi(number); ok && err == nil && strconv.Itoa(minor) == number && minor >= 0 {
			minors = append(minors, minor)
		}
	}
	slices.Sort(minors)
	return minors, nil
}

// Simulated returns the GPUs of a simulated machine that a container sees, since that
// has no driver to ask: those that the value of NVIDIA_VISIBLE_DEVICES names, by UUID
// or by index as "i" and "i:j". Where the value does not name devices, those whose
// device nodes are there. It fails for a name that is no device, and where nothing
// says which MIG devices are visible.
func Simulated(m *gpu.Machine, value string, nodes []int) ([]gpu.GPU, error) {
	switch {
	case value == "all":
		return m.GPUs, nil
	case value == "none":
		return nil, nil
	case value == "" || value == "void" || strings.HasPrefix(value, "/"):
		var seen []gpu.GPU
		for _, g := range m.GPUs {
			if !slices.Contains(nodes, g.Minor) {
				continue
			}
			if g.MIG.Enabled && len(g.MIG.Devices) > 0 {
				return nil, fmt.Errorf("GPU %d of the simulated machine is cut: set NVIDIA_VISIBLE_DEVICES to the MIG devices that are visible", g.Index)
			}
			seen = append(seen, g)
		}
		return seen, nil
	}
	names := strings.Split(value, ",")
	var seen []gpu.GPU
	for _, g := range m.GPUs {
		named := func(uuid, index string) bool {
			before := len(names)
			names = slices.DeleteFunc(names, func(n string) bool { return n == uuid || n == index })
			return len(names) < before
		}
		index := strconv.Itoa(g.Index)
		whole := named(g.UUID, index)
		var devices []gpu.MIGDevice
		for _, d := range g.MIG.Devices {
			if named(d.UUID, index+":"+strconv.Itoa(d.Index)) {
				devices = append(devices, d)
			}
		}
		g.MIG.Devices = devices
		if whole || len(devices) > 0 {
			seen = append(seen, g)
		}
	}
	if len(names) > 0 {
		return nil, fmt.Errorf("NVIDIA_VISIBLE_DEVICES: the simulated machine has no %s", strings.Join(names, ", "))
	}
	return seen, nil
}
