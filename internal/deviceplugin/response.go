package deviceplugin

import (
	"bufio"
	"bytes"
	"crypto/rand"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
	"github.com/ashlar-gpu/ashlar/internal/visible"
)

// Names that NVIDIA's container runtime knows.
const (
	visibleDevices = "NVIDIA_VISIBLE_DEVICES"
	// mountRoot is the value of visibleDevices that refers to mounts, and the
	// folder of these mounts.
	mountRoot = "/var/run/nvidia-container-devices"
)

// annotationName is the second part of the keys of CDI annotations, before
// something unique: a container may get devices of several resources.
const annotationName = "nvidia-device-plugin_"

// controlNodes are the driver's device nodes that belong to no GPU.
var controlNodes = []string{"/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools", "/dev/nvidia-modeset"}

// response tells the container runtime of the devices, by each device list
// strategy of the flags. Slots of one GPU are that GPU, once. Device nodes and
// the variables of GDS, MOFED and GDRCopy are for the strategies without CDI,
// whose specs have them.
//
// Whatever the strategies, a variable for each resource lists the ids of the devices,
// so that a container can be checked from inside (see package visible).
//
// With envvar and volume-mounts together, the variable refers to the mounts: it
// can have one value, and the mounts are what a container cannot forge.
func (c *indexed) response(devices []sharing.Device, exists func(string) bool) (*pluginapi.ContainerAllocateResponse, error) {
	lists := c.Flags.Plugin.DeviceListStrategies
	if len(lists) == 0 {
		return nil, errors.New("flags.plugin.deviceListStrategy is empty: name at least one")
	}
	ids := make([]string, len(devices))
	for i, d := range devices {
		ids[i] = d.ID.String()
	}
	// Slots of one device are next to each other.
	devices = slices.CompactFunc(slices.Clone(devices), func(x, y sharing.Device) bool { return x.ID.Base == y.ID.Base })
	names := make([]string, len(devices))
	for i, d := range devices {
		names[i] = d.ID.Base
		if c.Flags.Plugin.DeviceIDStrategy == sharing.IDByIndex {
			names[i] = d.Index
		}
	}

	r := &pluginapi.ContainerAllocateResponse{Envs: map[string]string{visible.Variable(c.Resource.Name): strings.Join(ids, ",")}}
	if slices.Contains(lists, sharing.ListCDIAnnotations) {
		key := c.Flags.Plugin.CDIAnnotationPrefix + annotationName + rand.Text()
		r.Annotations = map[string]string{key: strings.Join(c.cdiNames(names), ",")}
	}
	if slices.Contains(lists, sharing.ListCDICRI) {
		for _, name := range c.cdiNames(names) {
			r.CdiDevices = append(r.CdiDevices, &pluginapi.CDIDevice{Name: name})
		}
	}
	envvar, mounts := slices.Contains(lists, sharing.ListEnvvar), slices.Contains(lists, sharing.ListVolumeMounts)
	if !envvar && !mounts {
		return r, nil
	}

	r.Envs[visibleDevices] = strings.Join(names, ",")
	if mounts {
		r.Envs[visibleDevices] = mountRoot
		for _, name := range names {
			r.Mounts = append(r.Mounts, &pluginapi.Mount{HostPath: "/dev/null", ContainerPath: mountRoot + "/" + name})
		}
	}
	for name, on := range map[string]bool{
		"NVIDIA_GDRCOPY": c.Flags.GDRCopyEnabled, "NVIDIA_GDS": c.Flags.GDSEnabled, "NVIDIA_MOFED": c.Flags.MOFEDEnabled,
	} {
		if on {
			r.Envs[name] = "enabled"
		}
	}
	if !c.Flags.Plugin.PassDeviceSpecs {
		return r, nil
	}
	nodes, err := c.deviceNodes(devices, exists)
	if err != nil {
		return nil, err
	}
	for _, node := range nodes {
		r.Devices = append(r.Devices, &pluginapi.DeviceSpec{
			ContainerPath: node, HostPath: filepath.Join("/", c.Flags.DevRoot, node), Permissions: "rw",
		})
	}
	return r, nil
}

// cdiNames are the CDI names of devices and of what else is enabled.
func (c *indexed) cdiNames(devices []string) []string {
	var names []string
	for _, d := range devices {
		names = append(names, cdi.Name(d))
	}
	if c.Flags.GDRCopyEnabled {
		names = append(names, cdi.GDRCopy.Name(cdi.All))
	}
	if c.Flags.GDSEnabled {
		names = append(names, cdi.GDS.Name(cdi.All))
	}
	if c.Flags.MOFEDEnabled {
		names = append(names, cdi.MOFED.Name(cdi.All))
	}
	return names
}

// deviceNodes are the paths of the device nodes that the devices need: the
// control nodes that exist, a node for each GPU, and two capability nodes for
// each MIG device.
func (c *indexed) deviceNodes(devices []sharing.Device, exists func(string) bool) ([]string, error) {
	nodes := slices.DeleteFunc(slices.Clone(controlNodes), func(path string) bool { return !exists(path) })
	add := func(node string) {
		if !slices.Contains(nodes, node) {
			nodes = append(nodes, node)
		}
	}
	var caps map[string]int // read when the first MIG device needs it
	for _, d := range devices {
		g := c.Machine.Parent(d.ID.Base)
		if g == nil {
			return nil, fmt.Errorf("device %s: the machine does not have it now", d.ID)
		}
		add("/dev/nvidia" + strconv.Itoa(g.Minor))
		if d.ID.Base == g.UUID || c.ProcRoot == "" {
			continue
		}
		if caps == nil {
			var err error
			if caps, err = readMIGMinors(c.ProcRoot); err != nil {
				return nil, fmt.Errorf("capability nodes of MIG device %s: %w", d.ID.Base, err)
			}
		}
		for i := range g.MIG.Devices {
			m := &g.MIG.Devices[i]
			if m.UUID != d.ID.Base {
				continue
			}
			instance := fmt.Sprintf("gpu%d/gi%d", g.Minor, m.GI)
			for _, name := range []string{instance + "/access", fmt.Sprintf("%s/ci%d/access", instance, m.CI)} {
				minor, ok := caps[name]
				if !ok {
					return nil, fmt.Errorf("capability nodes of MIG device %s: the driver lists no %s", d.ID.Base, name)
				}
				add("/dev/nvidia-caps/nvidia-cap" + strconv.Itoa(minor))
			}
		}
	}
	return nodes, nil
}

// readMIGMinors reads the numbers of the driver's capability nodes by name.
func readMIGMinors(procRoot string) (map[string]int, error) {
	path := filepath.Join(procRoot, "driver/nvidia-caps/mig-minors")
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	minors, err := parseMIGMinors(data)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	return minors, nil
}

// parseMIGMinors reads lines such as "gpu0/gi1/ci0/access 13".
func parseMIGMinors(data []byte) (map[string]int, error) {
	minors := make(map[string]int)
	lines := bufio.NewScanner(bytes.NewReader(data))
	for n := 1; lines.Scan(); n++ {
		fields := strings.Fields(lines.Text())
		if len(fields) == 0 {
			continue
		}
		if len(fields) != 2 {
			return nil, fmt.Errorf("line %d: %d words: want a name and a number", n, len(fields))
		}
		minor, err := strconv.ParseUint(fields[1], 10, 31)
		if err != nil {
			return nil, fmt.Errorf("line %d: %q is not a minor number", n, fields[1])
		}
		minors[fields[0]] = int(minor)
	}
	if err := lines.Err(); err != nil {
		return nil, err
	}
	return minors, nil
}
