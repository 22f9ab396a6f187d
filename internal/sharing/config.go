package sharing

import (
	"math"
	"time"
)

// Config is the configuration of a node's device plugin: version v1 of the file
// of NVIDIA's device plugin.
//
// It may be made in Go as well, starting from Default: Config.Plan checks the
// values that Parse checks. It must not be changed while others use it.
type Config struct {
	Flags     Flags
	Resources Resources
	// TimeSlicing is nil where no GPU is shared by time-slicing.
	TimeSlicing *Sharing
	// MPS is nil where no GPU is shared by MPS. It is read and checked, but not
	// served: Config.Plan refuses it.
	MPS  *Sharing
	IMEX IMEX

	// file and lines say where a value was read: the line of each key that the
	// file has, by its path.
	file  string
	lines map[string]int
}

// Flags is `flags`: what NVIDIA's plugin also takes from its command line.
type Flags struct {
	// MIGStrategy says how MIG devices are offered.
	MIGStrategy MIGStrategy
	// FailOnInitError stops the agent where the driver does not answer, instead
	// of offering nothing.
	FailOnInitError bool
	// MPSRoot is the folder of the MPS control daemons on the host, "" for none.
	MPSRoot string
	// DriverRoot is the root of the driver's installation on the host.
	DriverRoot string
	// DevRoot is the root of the device nodes on the host. Parse sets it to
	// DriverRoot where the file has none.
	DevRoot string
	// GDRCopyEnabled, GDSEnabled and MOFEDEnabled give containers the device
	// nodes of GDRCopy, GPUDirect Storage and Mellanox OFED.
	GDRCopyEnabled, GDSEnabled, MOFEDEnabled bool
	// UseNodeFeatureAPI is about how NVIDIA's GPU feature discovery publishes
	// labels. It has no effect here.
	UseNodeFeatureAPI bool
	// DeviceDiscovery says how GPUs are found.
	DeviceDiscovery DeviceDiscovery
	Plugin          PluginFlags
	GFD             GFDFlags
}

// MIGStrategy says how MIG devices are offered.
type MIGStrategy string

// The MIG strategies.
const (
	// MIGNone offers no MIG devices. A GPU in MIG mode is left out.
	MIGNone MIGStrategy = "none"
	// MIGSingle offers the MIG devices of a node where all are of one type under
	// the name of whole GPUs.
	MIGSingle MIGStrategy = "single"
	// MIGMixed offers MIG devices under a name per profile, beside whole GPUs.
	MIGMixed MIGStrategy = "mixed"
)

// DeviceDiscovery is a way of finding GPUs.
type DeviceDiscovery string

// The ways of finding GPUs.
const (
	DiscoveryAuto  DeviceDiscovery = "auto"
	DiscoveryNVML  DeviceDiscovery = "nvml"
	DiscoveryTegra DeviceDiscovery = "tegra"
)

// PluginFlags is `flags.plugin`.
type PluginFlags struct {
	// PassDeviceSpecs names the device nodes to the kubelet as well, which
	// clusters with the static CPU manager need.
	PassDeviceSpecs bool
	// DeviceListStrategies are the ways in which a container is told its
	// devices, at least one.
	DeviceListStrategies []DeviceListStrategy
	// DeviceIDStrategy says by what a container is told its devices.
	DeviceIDStrategy DeviceIDStrategy
	// CDIAnnotationPrefix is the prefix of the annotations of
	// ListCDIAnnotations.
	CDIAnnotationPrefix string
	// NVIDIACTKPath is the path of nvidia-ctk on the host, called by the hooks
	// of CDI specs.
	NVIDIACTKPath string
	// ContainerDriverRoot has no effect here.
	ContainerDriverRoot string
	// AllocationPolicy says which slots a container gets that asks for several.
	AllocationPolicy AllocationPolicy
}

// DeviceListStrategy is a way in which a container is told its devices.
type DeviceListStrategy string

// The device list strategies.
const (
	ListEnvvar         DeviceListStrategy = "envvar"
	ListVolumeMounts   DeviceListStrategy = "volume-mounts"
	ListCDIAnnotations DeviceListStrategy = "cdi-annotations"
	ListCDICRI         DeviceListStrategy = "cdi-cri"
)

// DeviceIDStrategy says by what a container is told its devices.
type DeviceIDStrategy string

// The device id strategies.
const (
	IDByUUID  DeviceIDStrategy = "uuid"
	IDByIndex DeviceIDStrategy = "index"
)

// AllocationPolicy says which slots a container gets that asks for several.
type AllocationPolicy string

// The allocation policies.
const (
	// Distributed takes slots of the least used GPU first.
	Distributed AllocationPolicy = "distributed"
	// Packed takes slots of the most used GPU first.
	Packed AllocationPolicy = "packed"
)

// GFDFlags is `flags.gfd`, the settings of NVIDIA's GPU feature discovery. They
// have no effect here.
type GFDFlags struct {
	Oneshot, NoTimestamp bool
	// SleepInterval is the pause between two readings, Infinite for no second.
	SleepInterval   time.Duration
	OutputFile      string
	MachineTypeFile string
}

// Infinite is the duration that the file calls "infinite".
const Infinite = time.Duration(math.MaxInt64)

// Resources is `resources`: names for GPUs and MIG devices. The first pattern
// that matches gives the name. After those of the file stand the defaults: "*"
// is nvidia.com/gpu for GPUs, and for MIG devices nvidia.com/mig-<profile>
// under MIGMixed and nvidia.com/gpu under MIGSingle.
type Resources struct {
	// GPUs are matched with the marketing name, such as
	// "NVIDIA A100-SXM4-40GB".
	GPUs []ResourcePattern
	// MIG are matched with the display name of the profile, such as "1g.5gb".
	MIG []ResourcePattern
}

// ResourcePattern names the devices that match.
type ResourcePattern struct {
	// Pattern is compared with the whole name; "*" stands for any text, also
	// none, and there is no other wildcard.
	Pattern string
	// Name is the full resource name.
	Name string
}

// Sharing is `sharing.timeSlicing` or `sharing.mps`.
type Sharing struct {
	// RenameByDefault offers shared devices as "<name>.shared" where the entry
	// has no Rename.
	RenameByDefault bool
	// FailRequestsGreaterThanOne refuses containers that ask for several slots.
	FailRequestsGreaterThanOne bool
	// Resources has at least one entry, and each name once.
	Resources []SharedResource
}

// SharedResource shares the devices of one resource.
//
// An entry of TimeSlicing with Replicas 1, under a name that no device has by
// itself, is an exclusive view: it offers whole GPUs that other entries share a
// second time, unshared. NVIDIA's plugin refuses it.
type SharedResource struct {
	// Name is the full name of the resource.
	Name string
	// Rename is the full name under which the shared devices are offered, "" for
	// Name or, with RenameByDefault, for "<name>.shared". Devices that are not
	// shared stay under Name.
	Rename string
	// Devices are the devices of the resource that are shared.
	Devices Devices
	// Replicas is the number of slots per device, from 2 to MaxReplicas, or 1
	// for an exclusive view.
	Replicas int
}

// MaxReplicas bounds the slots of a device. The kubelet takes a resource's
// devices in one message of 4 MiB at most, the default of gRPC; 16 GPUs with
// this many slots need about a third of it.
const MaxReplicas = 1024

// Devices selects devices of a resource. The zero value selects all.
type Devices struct {
	// Count above 0 selects the first Count in the order of GPU index and MIG
	// index. List is then empty.
	Count int
	// List selects by name, where it is not empty: "i" is GPU i, "i:j" its MIG
	// device j, and otherwise the UUID of a GPU or a MIG device; MIG devices
	// also by their old name, "MIG-GPU-<uuid>/<gi>/<ci>".
	List []string
}

// IMEX is `imex`. It has no effect here.
type IMEX struct {
	// ChannelIDs is empty or 0 alone.
	ChannelIDs []int
	Required   bool
}

// Default is the configuration of an empty file. It differs from the default of
// NVIDIA's plugin in one value: devices are listed by CDI (ListCDICRI) and not
// by environment variable.
func Default() *Config {
	return &Config{Flags: Flags{
		MIGStrategy:       MIGNone,
		FailOnInitError:   true,
		DriverRoot:        "/",
		DevRoot:           "/",
		UseNodeFeatureAPI: true,
		DeviceDiscovery:   DiscoveryAuto,
		Plugin: PluginFlags{
			DeviceListStrategies: []DeviceListStrategy{ListCDICRI},
			DeviceIDStrategy:     IDByUUID,
			CDIAnnotationPrefix:  "cdi.k8s.io/",
			NVIDIACTKPath:        "/usr/bin/nvidia-ctk",
			ContainerDriverRoot:  "/driver-root",
			AllocationPolicy:     Distributed,
		},
		GFD: GFDFlags{
			SleepInterval:   time.Minute,
			OutputFile:      "/etc/kubernetes/node-feature-discovery/features.d/gfd",
			MachineTypeFile: "/sys/class/dmi/id/product_name",
		},
	}}
}

// exclusive says whether the entry is an exclusive view.
func (r *SharedResource) exclusive() bool { return r.Replicas == 1 }

// sharedName is the name under which the entry's shared devices are offered.
func (s *Sharing) sharedName(r *SharedResource) string {
	switch {
	case r.Rename != "":
		return r.Rename
	case s.RenameByDefault && !r.exclusive():
		return r.Name + ".shared"
	}
	return r.Name
}
