package nvml

import (
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// driver is what is used of the library as a whole. Its errors wrap those of
// package gpu where one fits. Start and stop are called alone; watch, unwatch and
// wait one at a time; wait may last while other calls are made, as NVML allows.
type driver interface {
	// start loads and initialises the library, stop undoes it.
	start() error
	stop() error
	driverVersion() (string, error)
	// cudaVersion is 1000*major + 10*minor.
	cudaVersion() (int, error)
	count() (int, error)
	device(index int) (device, error)
	// watch adds a GPU to those whose XIDs wait returns; unwatch removes all. What
	// is watched twice is watched once.
	watch(d device) error
	unwatch() error
	// wait returns false where no XID came in time.
	wait(timeout time.Duration) (xid, bool, error)
}

// device is what is used of a GPU. Values of one GPU are equal.
type device interface {
	uuid() (string, error)
	name() (string, error)
	minor() (int, error)
	memory() (bytes uint64, err error)
	capability() (major, minor int, err error)
	pci() (pciInfo, error)
	// recovery is the recovery action as NVML numbers it.
	recovery() (int, error)

	// linkActive fails for links that the GPU does not have.
	linkActive(link int) (bool, error)
	linkRemote(link int) (remote, error)
	fabric() (fabric, error)
	// ancestor is the PCIe level as NVML numbers it.
	ancestor(other device) (int, error)

	migMode() (enabled, pending bool, err error)
	// setMIGMode asks for a mode; activation is why it is not in effect at once.
	setMIGMode(on bool) (activation, err error)
	// migMax is one more than the highest index that migDevice knows.
	migMax() (int, error)
	migDevice(index int) (migDevice, error)
	instance(gi int) (instance, error)
	// profile takes an NVML_GPU_INSTANCE_PROFILE_* constant.
	profile(constant int) (profile, error)
	createInstance(profileID, start, size int) (gi int, err error)
	destroyInstance(gi int) error
	// computeProfile takes an NVML_COMPUTE_INSTANCE_PROFILE_* constant.
	computeProfile(gi, constant int) (profile, error)
	createCompute(gi, profileID int) (ci int, err error)
	destroyCompute(gi, ci int) error

	// processes may list one process several times.
	processes() ([]process, error)
}

// noInstance is NVML's "no GPU or compute instance".
const noInstance = 0xFFFFFFFF

// unknownMemory is NVML's "memory not available".
const unknownMemory = 1<<64 - 1

type xid struct {
	device device
	number uint64
	gi, ci uint32 // or noInstance
}

type pciInfo struct {
	domain, bus, device uint32
	// id is the PCI device id over the vendor's.
	id uint32
}

// remoteKind says what is at the other end of an NVLink.
type remoteKind int

const (
	remoteOther remoteKind = iota
	remoteGPU
	remoteSwitch
)

type remote struct {
	kind remoteKind
	pci  pciInfo // of a GPU
}

// fabric is how a GPU stands with the fabric manager.
type fabric struct {
	// completed says that the GPU was let into the fabric.
	completed bool
	cluster   [16]byte
	clique    uint32
}

type migDevice struct {
	uuid   string
	gi, ci int
	// memoryMiB and attributes are zero where the driver does not say them.
	memoryMiB  int
	attributes gpu.MIGAttributes
}

type instance struct{ profileID, start, size int }

type profile struct{ id, slices int }

type process struct {
	pid    uint32
	memory uint64 // bytes, or unknownMemory
	gi, ci uint32 // or noInstance
}
