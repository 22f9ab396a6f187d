package driver

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/spec"
	"github.com/NVIDIA/nvidia-container-toolkit/pkg/nvcdi/transform/root"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Options say what to describe and where the driver is.
type Options struct {
	// Class is the class of devices to describe.
	Class cdi.Class
	// Indices names GPUs and MIG devices also by index, "i" and "i:j".
	Indices bool
	// DriverRoot and DevRoot are the roots of the driver's installation and of
	// /dev as this process sees them. "" is "/" and DriverRoot.
	DriverRoot, DevRoot string
	// HostDriverRoot and HostDevRoot are the same as the container runtime sees
	// them. "" is DriverRoot and DevRoot.
	HostDriverRoot, HostDevRoot string
	// HookPath is the path of nvidia-cdi-hook or nvidia-ctk on the host.
	HookPath string
	// Log receives what nvcdi remarks.
	Log *slog.Logger
}

// Spec describes the devices of the machine. Where some of them cannot be
// described, it returns the spec of the others together with an error that
// names each; where none can, the spec is nil. Lost GPUs are passed over
// without an error: the driver does not know them now.
func Spec(m *gpu.Machine, o Options) (*specs.Spec, error) {
	o.DriverRoot = cmp.Or(o.DriverRoot, "/")
	o.DevRoot = cmp.Or(o.DevRoot, o.DriverRoot)
	o.HostDriverRoot = cmp.Or(o.HostDriverRoot, o.DriverRoot)
	o.HostDevRoot = cmp.Or(o.HostDevRoot, o.DevRoot)
	generator, err := o.generator()
	if err != nil {
		return nil, err
	}

	ids := []string{cdi.All}
	if o.Class == cdi.GPU {
		if ids = uuids(m); len(ids) == 0 {
			return nil, errors.New("CDI: the machine has no GPU or MIG device to describe")
		}
	}
	var devices []specs.Device
	var failed []error
	for _, id := range ids {
		found, err := generator.GetDeviceSpecsByID(id)
		if err == nil && slices.ContainsFunc(found, func(d specs.Device) bool { return len(d.ContainerEdits.DeviceNodes) == 0 }) {
			err = fmt.Errorf("no device node below %s: load the kernel module or set the dev root", o.DevRoot)
		}
		if err != nil {
			failed = append(failed, fmt.Errorf("CDI device %s: %w", o.Class.Name(id), err))
			continue
		}
		devices = append(devices, found...)
	}
	if len(devices) == 0 {
		return nil, errors.Join(failed...)
	}
	edits, err := generator.GetCommonEdits()
	if err != nil {
		return nil, fmt.Errorf("CDI: driver files below %s: %w", o.DriverRoot, err)
	}
	built, err := spec.New(spec.WithVendor(cdi.Vendor), spec.WithClass(string(o.Class)),
		spec.WithDeviceSpecs(devices), spec.WithEdits(*edits.ContainerEdits))
	if err != nil {
		return nil, fmt.Errorf("CDI: %w", err)
	}
	raw := built.Raw()
	err = root.NewDriverTransformer(root.WithDriverRoot(o.DriverRoot), root.WithTargetDriverRoot(o.HostDriverRoot),
		root.WithDevRoot(o.DevRoot), root.WithTargetDevRoot(o.HostDevRoot)).Transform(raw)
	if err != nil {
		return nil, fmt.Errorf("CDI: paths on the host: %w", err)
	}
	return raw, errors.Join(failed...)
}

// modes are the ways in which nvcdi finds the devices of a class.
var modes = map[cdi.Class]nvcdi.Mode{
	cdi.GPU: nvcdi.ModeNvml, cdi.GDS: nvcdi.ModeGds, cdi.MOFED: nvcdi.ModeMofed, cdi.GDRCopy: nvcdi.ModeGdrcopy,
}

func (o *Options) generator() (nvcdi.Interface, error) {
	mode, ok := modes[o.Class]
	if !ok {
		return nil, fmt.Errorf("CDI class %q: want %s, %s, %s or %s", o.Class, cdi.GPU, cdi.GDS, cdi.MOFED, cdi.GDRCopy)
	}
	strategies := []string{nvcdi.DeviceNameStrategyUUID}
	if o.Indices {
		strategies = append(strategies, nvcdi.DeviceNameStrategyIndex)
	}
	var namers nvcdi.DeviceNamers
	for _, s := range strategies {
		namer, err := nvcdi.NewDeviceNamer(s)
		if err != nil {
			return nil, fmt.Errorf("CDI: %w", err)
		}
		namers = append(namers, namer)
	}
	generator, err := nvcdi.New(
		nvcdi.WithMode(mode), nvcdi.WithVendor(cdi.Vendor), nvcdi.WithClass(string(o.Class)),
		nvcdi.WithDriverRoot(o.DriverRoot), nvcdi.WithDevRoot(o.DevRoot), nvcdi.WithDeviceNamers(namers...),
		nvcdi.WithNVIDIACDIHookPath(o.HookPath), nvcdi.WithLogger(remarks{o.Log}),
	)
	if err != nil {
		return nil, fmt.Errorf("CDI: %w", err)
	}
	return generator, nil
}

// uuids are the GPUs and MIG devices that a container can be given.
func uuids(m *gpu.Machine) []string {
	var ids []string
	for i := range m.GPUs {
		g := &m.GPUs[i]
		switch {
		case g.Health.State == gpu.Lost:
		case !g.MIG.Enabled:
			ids = append(ids, g.UUID)
		default:
			for _, d := range g.MIG.Devices {
				ids = append(ids, d.UUID)
			}
		}
	}
	return ids
}

// remarks passes on what nvcdi logs. Most of it is about files that only some
// installations have, so nothing of it is more than information.
type remarks struct{ log *slog.Logger }

func (r remarks) Errorf(format string, args ...any)   { r.add(slog.LevelInfo, format, args) }
func (r remarks) Warningf(format string, args ...any) { r.add(slog.LevelDebug, format, args) }
func (r remarks) Infof(format string, args ...any)    { r.add(slog.LevelDebug, format, args) }
func (r remarks) Debugf(format string, args ...any)   { r.add(slog.LevelDebug, format, args) }
func (r remarks) Tracef(string, ...any)               {}

func (r remarks) add(level slog.Level, format string, args []any) {
	if r.log.Enabled(context.Background(), level) {
		r.log.Log(context.Background(), level, "nvcdi: "+fmt.Sprintf(format, args...))
	}
}
