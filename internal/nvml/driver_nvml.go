//go:build linux && cgo

package nvml

import (
	"encoding/binary"
	"errors"
	"fmt"
	"time"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

func newDriver() (driver, error) { return &library{nvml: nvml.New()}, nil }

// library is the driver behind the real NVML.
type library struct {
	nvml nvml.Interface
	// events is nil where nothing is watched.
	events nvml.EventSet
}

// kinds are the answers that package gpu has an error for.
var kinds = map[nvml.Return]error{
	nvml.ERROR_GPU_IS_LOST:            gpu.ErrLost,
	nvml.ERROR_NOT_FOUND:              gpu.ErrNotFound,
	nvml.ERROR_GPU_NOT_FOUND:          gpu.ErrNotFound,
	nvml.ERROR_IN_USE:                 gpu.ErrInUse,
	nvml.ERROR_NOT_SUPPORTED:          gpu.ErrNotSupported,
	nvml.ERROR_FUNCTION_NOT_FOUND:     gpu.ErrNotSupported,
	nvml.ERROR_INVALID_ARGUMENT:       gpu.ErrInvalid,
	nvml.ERROR_INSUFFICIENT_RESOURCES: gpu.ErrInvalid,
}

// result turns an answer of the library into an error, or nil for success.
func result(r nvml.Return) error {
	if r == nvml.SUCCESS {
		return nil
	}
	switch kind := kinds[r]; {
	case kind != nil:
		return fmt.Errorf("%w (NVML: %s)", kind, r.Error())
	case r == nvml.ERROR_NO_PERMISSION:
		return errors.New("NVML: no permission; run as root")
	case r == nvml.ERROR_LIBRARY_NOT_FOUND:
		return errors.New("libnvidia-ml.so.1 cannot be loaded: this host needs NVIDIA's driver, and a container must be given the driver's files; or use a simulated machine")
	case r == nvml.ERROR_DRIVER_NOT_LOADED:
		return errors.New("the kernel module is not loaded: load it (modprobe nvidia), or use a simulated machine")
	}
	return fmt.Errorf("NVML: %s", r.Error())
}

// has says whether the driver's library has a function. Calling one that it lacks
// would end the process.
func (l *library) has(symbol string) error {
	if err := l.nvml.Extensions().LookupSymbol(symbol); err != nil {
		return fmt.Errorf("%w: the driver is too old: %s", gpu.ErrNotSupported, symbol)
	}
	return nil
}

func (l *library) start() error { return result(l.nvml.Init()) }

func (l *library) stop() error {
	return errors.Join(l.unwatch(), result(l.nvml.Shutdown()))
}

func (l *library) driverVersion() (string, error) {
	v, r := l.nvml.SystemGetDriverVersion()
	return v, result(r)
}

func (l *library) cudaVersion() (int, error) {
	v, r := l.nvml.SystemGetCudaDriverVersion_v2()
	return v, result(r)
}

func (l *library) count() (int, error) {
	n, r := l.nvml.DeviceGetCount()
	return n, result(r)
}

func (l *library) device(index int) (device, error) {
	d, r := l.nvml.DeviceGetHandleByIndex(index)
	if err := result(r); err != nil {
		return nil, err
	}
	return handle{l, d}, nil
}

func (l *library) watch(d device) error {
	if l.events == nil {
		set, r := l.nvml.EventSetCreate()
		if err := result(r); err != nil {
			return err
		}
		l.events = set
	}
	return result(d.(handle).d.RegisterEvents(nvml.EventTypeXidCriticalError, l.events))
}

func (l *library) unwatch() error {
	if l.events == nil {
		return nil
	}
	err := result(l.events.Free())
	l.events = nil
	return err
}

func (l *library) wait(timeout time.Duration) (xid, bool, error) {
	data, r := l.events.Wait(uint32(timeout.Milliseconds()))
	if r == nvml.ERROR_TIMEOUT {
		return xid{}, false, nil
	}
	if err := result(r); err != nil {
		return xid{}, false, err
	}
	if data.EventType != nvml.EventTypeXidCriticalError {
		return xid{}, false, nil
	}
	return xid{handle{l, data.Device}, data.EventData, data.GpuInstanceId, data.ComputeInstanceId}, true, nil
}

// handle is a GPU of the library.
type handle struct {
	l *library
	d nvml.Device
}

func (h handle) uuid() (string, error) {
	v, r := h.d.GetUUID()
	return v, result(r)
}

func (h handle) name() (string, error) {
	v, r := h.d.GetName()
	return v, result(r)
}

func (h handle) minor() (int, error) {
	v, r := h.d.GetMinorNumber()
	return v, result(r)
}

func (h handle) memory() (uint64, error) {
	v, r := h.d.GetMemoryInfo()
	return v.Total, result(r)
}

func (h handle) capability() (int, int, error) {
	major, minor, r := h.d.GetCudaComputeCapability()
	return major, minor, result(r)
}

func pciOf(p nvml.PciInfo) pciInfo {
	return pciInfo{domain: p.Domain, bus: p.Bus, device: p.Device, id: p.PciDeviceId}
}

func (h handle) pci() (pciInfo, error) {
	v, r := h.d.GetPciInfo()
	return pciOf(v), result(r)
}

func (h handle) recovery() (int, error) {
	if err := h.l.has("nvmlDeviceGetFieldValues"); err != nil {
		return 0, err
	}
	values := []nvml.FieldValue{{FieldId: nvml.FI_DEV_GET_GPU_RECOVERY_ACTION}}
	if err := result(h.d.GetFieldValues(values)); err != nil {
		return 0, err
	}
	// The call can succeed where the value cannot be read.
	if err := result(nvml.Return(values[0].NvmlReturn)); err != nil {
		return 0, err
	}
	return fieldNumber(&values[0])
}

// fieldNumber reads the whole number of a field value.
func fieldNumber(v *nvml.FieldValue) (int, error) {
	bytes := v.Value[:]
	switch nvml.ValueType(v.ValueType) {
	case nvml.VALUE_TYPE_UNSIGNED_INT, nvml.VALUE_TYPE_SIGNED_INT:
		return int(int32(binary.NativeEndian.Uint32(bytes))), nil
	case nvml.VALUE_TYPE_UNSIGNED_LONG, nvml.VALUE_TYPE_UNSIGNED_LONG_LONG, nvml.VALUE_TYPE_SIGNED_LONG_LONG:
		return int(binary.NativeEndian.Uint64(bytes)), nil
	case nvml.VALUE_TYPE_UNSIGNED_SHORT:
		return int(binary.NativeEndian.Uint16(bytes)), nil
	}
	return 0, fmt.Errorf("NVML: field %d has a value of type %d", v.FieldId, v.ValueType)
}

func (h handle) linkActive(link int) (bool, error) {
	v, r := h.d.GetNvLinkState(link)
	return v == nvml.FEATURE_ENABLED, result(r)
}

func (h handle) linkRemote(link int) (remote, error) {
	// Without a type, the address shows by itself whether it is of a GPU here.
	other := remote{kind: remoteGPU}
	if h.l.has("nvmlDeviceGetNvLinkRemoteDeviceType") == nil {
		kind, r := h.d.GetNvLinkRemoteDeviceType(link)
		if err := result(r); err != nil {
			return remote{}, err
		}
		switch kind {
		case nvml.NVLINK_DEVICE_TYPE_GPU:
		case nvml.NVLINK_DEVICE_TYPE_SWITCH:
			return remote{kind: remoteSwitch}, nil
		default:
			return remote{}, nil
		}
	}
	p, r := h.d.GetNvLinkRemotePciInfo(link)
	other.pci = pciOf(p)
	return other, result(r)
}

func (h handle) fabric() (fabric, error) {
	if err := h.l.has("nvmlDeviceGetGpuFabricInfoV"); err != nil {
		return fabric{}, err
	}
	v, r := h.d.GetGpuFabricInfoV().V2()
	if err := result(r); err != nil {
		return fabric{}, err
	}
	if v.State == nvml.GPU_FABRIC_STATE_NOT_SUPPORTED {
		return fabric{}, gpu.ErrNotSupported
	}
	completed := v.State == nvml.GPU_FABRIC_STATE_COMPLETED && nvml.Return(v.Status) == nvml.SUCCESS
	return fabric{completed, v.ClusterUuid, v.CliqueId}, nil
}

func (h handle) ancestor(other device) (int, error) {
	v, r := h.d.GetTopologyCommonAncestor(other.(handle).d)
	return int(v), result(r)
}

func (h handle) migMode() (enabled, pending bool, err error) {
	if err := h.l.has("nvmlDeviceGetMigMode"); err != nil {
		return false, false, err
	}
	current, next, r := h.d.GetMigMode()
	return current == nvml.DEVICE_MIG_ENABLE, next == nvml.DEVICE_MIG_ENABLE, result(r)
}

func (h handle) setMIGMode(on bool) (activation, err error) {
	mode := nvml.DEVICE_MIG_DISABLE
	if on {
		mode = nvml.DEVICE_MIG_ENABLE
	}
	status, r := h.d.SetMigMode(mode)
	if err := result(r); err != nil {
		return nil, err
	}
	return result(status), nil
}

func (h handle) migMax() (int, error) {
	v, r := h.d.GetMaxMigDeviceCount()
	return v, result(r)
}

func (h handle) migDevice(index int) (migDevice, error) {
	d, r := h.d.GetMigDeviceHandleByIndex(index)
	if err := result(r); err != nil {
		return migDevice{}, err
	}
	var m migDevice
	if m.uuid, r = d.GetUUID(); r != nvml.SUCCESS {
		return migDevice{}, fmt.Errorf("UUID: %w", result(r))
	}
	if m.gi, r = d.GetGpuInstanceId(); r != nvml.SUCCESS {
		return migDevice{}, fmt.Errorf("GPU instance: %w", result(r))
	}
	if m.ci, r = d.GetComputeInstanceId(); r != nvml.SUCCESS {
		return migDevice{}, fmt.Errorf("compute instance: %w", result(r))
	}
	a, r := d.GetAttributes()
	switch err := result(r); {
	case errors.Is(err, gpu.ErrNotSupported):
		if memory, r := d.GetMemoryInfo(); r == nvml.SUCCESS {
			m.memoryMiB = int(memory.Total >> 20)
		}
		return m, nil
	case err != nil:
		return migDevice{}, fmt.Errorf("attributes: %w", err)
	}
	m.memoryMiB = int(a.MemorySizeMB)
	m.attributes = gpu.MIGAttributes{
		SMs: int(a.MultiprocessorCount), Slices: int(a.GpuInstanceSliceCount), ComputeSlices: int(a.ComputeInstanceSliceCount),
		CopyEngines: int(a.SharedCopyEngineCount), Decoders: int(a.SharedDecoderCount), Encoders: int(a.SharedEncoderCount),
		JPEG: int(a.SharedJpegCount), OFA: int(a.SharedOfaCount),
	}
	return m, nil
}

func (h handle) gpuInstance(gi int) (nvml.GpuInstance, error) {
	in, r := h.d.GetGpuInstanceById(gi)
	return in, result(r)
}

func (h handle) instance(gi int) (instance, error) {
	in, err := h.gpuInstance(gi)
	if err != nil {
		return instance{}, err
	}
	info, r := in.GetInfo()
	return instance{int(info.ProfileId), int(info.Placement.Start), int(info.Placement.Size)}, result(r)
}

func (h handle) profile(constant int) (profile, error) {
	info, r := h.d.GetGpuInstanceProfileInfo(constant)
	return profile{int(info.Id), int(info.SliceCount)}, result(r)
}

func (h handle) createInstance(profileID, start, size int) (int, error) {
	if err := h.l.has("nvmlDeviceCreateGpuInstanceWithPlacement"); err != nil {
		return 0, err
	}
	// Of the profile only the id is read.
	in, r := h.d.CreateGpuInstanceWithPlacement(
		&nvml.GpuInstanceProfileInfo{Id: uint32(profileID)},
		&nvml.GpuInstancePlacement{Start: uint32(start), Size: uint32(size)},
	)
	if err := result(r); err != nil {
		return 0, err
	}
	info, r := in.GetInfo()
	if err := result(r); err != nil {
		return 0, errors.Join(err, result(in.Destroy()))
	}
	return int(info.Id), nil
}

func (h handle) destroyInstance(gi int) error {
	in, err := h.gpuInstance(gi)
	if err != nil {
		return err
	}
	return result(in.Destroy())
}

func (h handle) computeProfile(gi, constant int) (profile, error) {
	in, err := h.gpuInstance(gi)
	if err != nil {
		return profile{}, err
	}
	info, r := in.GetComputeInstanceProfileInfo(constant, nvml.COMPUTE_INSTANCE_ENGINE_PROFILE_SHARED)
	return profile{int(info.Id), int(info.SliceCount)}, result(r)
}

func (h handle) createCompute(gi, profileID int) (int, error) {
	in, err := h.gpuInstance(gi)
	if err != nil {
		return 0, err
	}
	// Of the profile only the id is read.
	compute, r := in.CreateComputeInstance(&nvml.ComputeInstanceProfileInfo{Id: uint32(profileID)})
	if err := result(r); err != nil {
		return 0, err
	}
	info, r := compute.GetInfo()
	if err := result(r); err != nil {
		return 0, errors.Join(err, result(compute.Destroy()))
	}
	return int(info.Id), nil
}

func (h handle) destroyCompute(gi, ci int) error {
	in, err := h.gpuInstance(gi)
	if err != nil {
		return err
	}
	compute, r := in.GetComputeInstanceById(ci)
	if err := result(r); err != nil {
		return err
	}
	return result(compute.Destroy())
}

func (h handle) processes() ([]process, error) {
	var all []process
	compute, r := h.d.GetComputeRunningProcesses()
	if err := result(r); err != nil {
		return nil, err
	}
	graphics, r := h.d.GetGraphicsRunningProcesses()
	if err := result(r); err != nil && !errors.Is(err, gpu.ErrNotSupported) {
		return nil, err
	}
	for _, list := range [][]nvml.ProcessInfo{compute, graphics} {
		for _, p := range list {
			all = append(all, process{p.Pid, p.UsedGpuMemory, p.GpuInstanceId, p.ComputeInstanceId})
		}
	}
	return all, nil
}
