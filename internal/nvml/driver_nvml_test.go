//go:build linux && cgo

package nvml

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"

	"github.com/NVIDIA/go-nvml/pkg/nvml"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

func TestResult(t *testing.T) {
	if err := result(nvml.SUCCESS); err != nil {
		t.Error(err)
	}
	all := []error{gpu.ErrLost, gpu.ErrNotFound, gpu.ErrInUse, gpu.ErrNotSupported, gpu.ErrInvalid}
	for r, want := range map[nvml.Return]error{
		nvml.ERROR_GPU_IS_LOST:            gpu.ErrLost,
		nvml.ERROR_NOT_FOUND:              gpu.ErrNotFound,
		nvml.ERROR_GPU_NOT_FOUND:          gpu.ErrNotFound,
		nvml.ERROR_IN_USE:                 gpu.ErrInUse,
		nvml.ERROR_NOT_SUPPORTED:          gpu.ErrNotSupported,
		nvml.ERROR_INVALID_ARGUMENT:       gpu.ErrInvalid,
		nvml.ERROR_INSUFFICIENT_RESOURCES: gpu.ErrInvalid,
		nvml.ERROR_UNKNOWN:                nil,
		nvml.ERROR_NO_PERMISSION:          nil,
	} {
		err := result(r)
		if err == nil {
			t.Errorf("%v is no error", r)
		}
		for _, kind := range all {
			if got, wanted := errors.Is(err, kind), errors.Is(want, kind); got != wanted {
				t.Errorf("%v: is %q: %v", r, kind, got)
			}
		}
	}
}

func TestConstants(t *testing.T) {
	// What the conversions repeat of the library.
	if nvml.NVLINK_MAX_LINKS > maxLinks {
		t.Errorf("a GPU may have %d NVLinks, %d are asked for", nvml.NVLINK_MAX_LINKS, maxLinks)
	}
	if nvml.GPU_INSTANCE_PROFILE_COUNT > gpuInstanceConstants || nvml.COMPUTE_INSTANCE_PROFILE_COUNT > computeInstanceConstants {
		t.Errorf("%d and %d profile constants, %d and %d are asked for",
			nvml.GPU_INSTANCE_PROFILE_COUNT, nvml.COMPUTE_INSTANCE_PROFILE_COUNT, gpuInstanceConstants, computeInstanceConstants)
	}
	for number, want := range map[nvml.GpuTopologyLevel]gpu.PCIeLevel{
		nvml.TOPOLOGY_INTERNAL: gpu.PCIeInternal, nvml.TOPOLOGY_SINGLE: gpu.PCIeSingle, nvml.TOPOLOGY_MULTIPLE: gpu.PCIeMultiple,
		nvml.TOPOLOGY_HOSTBRIDGE: gpu.PCIeHostBridge, nvml.TOPOLOGY_NODE: gpu.PCIeNode, nvml.TOPOLOGY_SYSTEM: gpu.PCIeSystem,
	} {
		if got := levels[int(number)]; got != want {
			t.Errorf("level %d is %v, want %v", number, got, want)
		}
	}
	for action, want := range map[nvml.DeviceGpuRecoveryAction]gpu.Recovery{
		nvml.GPU_RECOVERY_ACTION_NONE: gpu.RecoveryNone, nvml.GPU_RECOVERY_ACTION_GPU_RESET: gpu.RecoveryReset,
		nvml.GPU_RECOVERY_ACTION_NODE_REBOOT: gpu.RecoveryReboot, nvml.GPU_RECOVERY_ACTION_DRAIN_P2P: gpu.RecoveryDrainP2P,
		nvml.GPU_RECOVERY_ACTION_DRAIN_AND_RESET: gpu.RecoveryDrainReset,
	} {
		if gpu.Recovery(action) != want {
			t.Errorf("recovery action %d is %v, want %v", action, gpu.Recovery(action), want)
		}
	}
	for constant, want := range map[int]string{
		nvml.GPU_INSTANCE_PROFILE_1_SLICE: "", nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV1: "+me", nvml.GPU_INSTANCE_PROFILE_2_SLICE_REV1: "+me",
		nvml.GPU_INSTANCE_PROFILE_1_SLICE_REV2: "", nvml.GPU_INSTANCE_PROFILE_1_SLICE_GFX: "+gfx", nvml.GPU_INSTANCE_PROFILE_2_SLICE_GFX: "+gfx",
		nvml.GPU_INSTANCE_PROFILE_3_SLICE_GFX: "+gfx", nvml.GPU_INSTANCE_PROFILE_4_SLICE_GFX: "+gfx",
		nvml.GPU_INSTANCE_PROFILE_1_SLICE_NO_ME: "-me", nvml.GPU_INSTANCE_PROFILE_2_SLICE_NO_ME: "-me",
		nvml.GPU_INSTANCE_PROFILE_1_SLICE_ALL_ME: "+me.all", nvml.GPU_INSTANCE_PROFILE_2_SLICE_ALL_ME: "+me.all",
	} {
		if got := suffixes[constant]; got != want {
			t.Errorf("profile constant %d has suffix %q, want %q", constant, got, want)
		}
	}
}

func TestFieldNumber(t *testing.T) {
	value := func(kind nvml.ValueType, bits uint64) *nvml.FieldValue {
		v := nvml.FieldValue{ValueType: uint32(kind)}
		binary.NativeEndian.PutUint64(v.Value[:], bits)
		return &v
	}
	four := func(kind nvml.ValueType, bits uint32) *nvml.FieldValue {
		v := value(kind, ^uint64(0)) // what lies behind is not part of it
		binary.NativeEndian.PutUint32(v.Value[:], bits)
		return v
	}
	for _, c := range []struct {
		value *nvml.FieldValue
		want  int
	}{
		{four(nvml.VALUE_TYPE_UNSIGNED_INT, 4), 4}, {four(nvml.VALUE_TYPE_SIGNED_INT, 0xFFFFFFFF), -1},
		{value(nvml.VALUE_TYPE_UNSIGNED_LONG, 1<<33), 1 << 33}, {value(nvml.VALUE_TYPE_UNSIGNED_LONG_LONG, 7), 7},
		{value(nvml.VALUE_TYPE_SIGNED_LONG_LONG, 1), 1},
	} {
		if got, err := fieldNumber(c.value); err != nil || got != c.want {
			t.Errorf("type %d: %d, %v; want %d", c.value.ValueType, got, err, c.want)
		}
	}
	for _, kind := range []nvml.ValueType{nvml.VALUE_TYPE_DOUBLE, 99} {
		if got, err := fieldNumber(value(kind, 1)); err == nil {
			t.Errorf("type %d is read as %d", kind, got)
		}
	}
}

// On a host without the driver Open says what to do; on one with it, the machine
// must be readable.
func TestOpen(t *testing.T) {
	m, err := Open()
	if err != nil {
		for _, part := range []string{"NVIDIA driver: ", "use a simulated machine"} {
			if !strings.Contains(err.Error(), part) {
				t.Errorf("%q does not say %q", err, part)
			}
		}
		return
	}
	defer func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	}()
	got, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	if err := got.Validate(); err != nil {
		t.Error(err)
	}
}
