package gpu

import (
	"fmt"
	"strconv"
	"strings"
)

// slotSeparator stands between the UUID and the number of a slot, as in the
// ids of NVIDIA's device plugin.
const slotSeparator = "::"

// DeviceID is the name by which the kubelet knows a device: the UUID of a GPU
// or of a MIG device, and for a time-sliced slot its number.
type DeviceID struct {
	// Base is the UUID of the GPU or MIG device.
	Base string
	// Slot is the number of the slot from 0, or NoSlot for the device as a whole.
	Slot int
}

// NoSlot is the Slot of a device that is not time-sliced.
const NoSlot = -1

// String returns "UUID" or "UUID::n".
func (d DeviceID) String() string {
	if d.Slot == NoSlot {
		return d.Base
	}
	return d.Base + slotSeparator + strconv.Itoa(d.Slot)
}

// ParseDeviceID reads what DeviceID.String writes and nothing else.
func ParseDeviceID(s string) (DeviceID, error) {
	base, slot, shared := strings.Cut(s, slotSeparator)
	if !strings.HasPrefix(base, "GPU-") && !strings.HasPrefix(base, "MIG-") {
		return DeviceID{}, fmt.Errorf("device id %q: want GPU-<uuid> or MIG-<uuid>, with ::<slot> if shared", s)
	}
	if !shared {
		return DeviceID{Base: base, Slot: NoSlot}, nil
	}
	n, err := strconv.Atoi(slot)
	if err != nil || n < 0 || strconv.Itoa(n) != slot {
		return DeviceID{}, fmt.Errorf("device id %q: slot %q is not a number from 0", s, slot)
	}
	return DeviceID{Base: base, Slot: n}, nil
}
