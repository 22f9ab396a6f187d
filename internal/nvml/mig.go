package nvml

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

const (
	// Constants beyond those that exist are asked for too: a newer driver may know
	// them, and another refuses them without harm.
	gpuInstanceConstants     = 32
	computeInstanceConstants = 16
)

// suffixes say in a profile's name what sets it apart from others of its size, by
// NVML_GPU_INSTANCE_PROFILE_* constant.
var suffixes = map[int]string{
	7: "+me", 8: "+me", 10: "+gfx", 11: "+gfx", 12: "+gfx", 17: "+gfx",
	13: "-me", 14: "-me", 15: "+me.all", 16: "+me.all",
}

// profileName is the catalogue's name of a profile, so that it is the same on all
// drivers, or else one made as NVIDIA's tools make it. A compute instance that
// does not fill its GPU instance is named so.
func profileName(d device, board string, totalMiB, profileID int, raw *migDevice) string {
	a := &raw.attributes
	var name string
	if _, p := knownProfile(board, profileID); p != nil {
		name = p.Name
	} else {
		name = sizeName(a.Slices, raw.memoryMiB, totalMiB)
		if constant, ok := constantOf(d, profileID); ok {
			name += suffixes[constant]
		}
	}
	if a.ComputeSlices > 0 && a.ComputeSlices < a.Slices {
		name = fmt.Sprintf("%dc.%s", a.ComputeSlices, name)
	}
	return name
}

// knownProfile finds a profile in the catalogue; both results are nil where it is
// not there.
func knownProfile(board string, profileID int) (*gpu.Product, *gpu.MIGProfile) {
	product := gpu.ProductByName(board)
	if product == nil || product.MIG == nil {
		return nil, nil
	}
	p := product.MIG.ByID(profileID)
	if p == nil {
		return nil, nil
	}
	return product, p
}

// complete adds what is known of a MIG device whose attributes the driver does not
// say: by the catalogue, or else the slices by the driver's list of profiles. How
// many slices the compute instance has, and so its part of the multiprocessors, is
// not known then.
func complete(d device, board string, profileID int, raw *migDevice) {
	if raw.attributes != (gpu.MIGAttributes{}) {
		return
	}
	if product, p := knownProfile(board, profileID); p != nil {
		raw.memoryMiB = cmp.Or(raw.memoryMiB, p.MemoryMiB)
		raw.attributes = product.Attributes(p)
		raw.attributes.SMs, raw.attributes.ComputeSlices = 0, 0
		return
	}
	if constant, ok := constantOf(d, profileID); ok {
		if p, err := d.profile(constant); err == nil {
			raw.attributes.Slices = p.slices
		}
	}
}

// sizeName is "<slices>g.<gigabytes>gb". The memory is rounded up to eighths of
// the GPU's, and those to whole gigabytes.
func sizeName(slices, memoryMiB, totalMiB int) string {
	if totalMiB < 1 {
		return fmt.Sprintf("%dg.%dgb", slices, (memoryMiB+512)/1024)
	}
	eighths := (memoryMiB*8 + totalMiB - 1) / totalMiB
	totalGB := (totalMiB + 1023) / 1024
	return fmt.Sprintf("%dg.%dgb", slices, (eighths*totalGB+4)/8)
}

// constantOf finds the constant by which the library knows a hardware id.
func constantOf(d device, profileID int) (int, bool) {
	for constant := range gpuInstanceConstants {
		if p, err := d.profile(constant); err == nil && p.id == profileID {
			return constant, true
		}
	}
	return 0, false
}

// tableOf is the catalogue's MIG table of a GPU, nil where there is none.
func tableOf(d device) *gpu.MIGTable {
	name, err := d.name()
	if err != nil {
		return nil
	}
	product := gpu.ProductByName(name)
	if product == nil {
		return nil
	}
	return product.MIG
}

// modeOf returns the MIG mode of a GPU that can do MIG.
func modeOf(d device) (enabled, pending bool, err error) {
	enabled, pending, err = d.migMode()
	if errors.Is(err, gpu.ErrNotSupported) {
		err = fmt.Errorf("the product cannot do MIG: %w", err)
	}
	return enabled, pending, err
}

// SetMIGMode switches MIG mode on or off. Where the product needs a reset for it
// the driver may keep the mode as pending until Reset. It fails with
// gpu.ErrNotSupported where the product cannot do MIG, and with gpu.ErrInUse where
// a process runs on the GPU, where MIG devices exist at switching off, or where the
// driver finds another user. Wanting the mode that the GPU has needs no idle GPU:
// it takes back a pending change.
func (m *Machine) SetMIGMode(uuid string, on bool) error {
	return m.drive(uuid, "set MIG mode", func(d device) error {
		enabled, pending, err := modeOf(d)
		if err != nil {
			return err
		}
		switch {
		case enabled != on:
			if err := errors.Join(idle(d), withoutInstances(d, enabled)); err != nil {
				return err
			}
		case pending == on:
			return nil
		}
		activation, err := d.setMIGMode(on)
		if err != nil {
			return err
		}
		if table := tableOf(d); activation == nil || table == nil || table.ResetForMode {
			return nil
		}
		// A refusal changes nothing, but the driver has noted the wish.
		if _, err := d.setMIGMode(enabled); err != nil {
			return fmt.Errorf("%w; the mode stays pending: %w", activation, err)
		}
		return activation
	})
}

// idle fails where a process runs on the GPU.
func idle(d device) error {
	processes, err := listProcesses(d)
	if err != nil {
		return fmt.Errorf("list processes: %w", err)
	}
	if len(processes) > 0 {
		return inUse(len(processes), "processes")
	}
	return nil
}

// withoutInstances fails where a GPU in MIG mode has MIG devices.
func withoutInstances(d device, enabled bool) error {
	if !enabled {
		return nil
	}
	devices, err := readMIGDevices(d, "", 0)
	if err != nil {
		return fmt.Errorf("list MIG devices: %w", err)
	}
	if len(devices) > 0 {
		return inUse(len(devices), "MIG devices")
	}
	return nil
}

// CreateMIG creates a GPU instance at exactly that place, with one compute
// instance that fills it. It fails with gpu.ErrNotSupported where the product
// cannot do MIG, and with gpu.ErrInvalid and the reason where MIG mode is off or
// the instance does not fit.
func (m *Machine) CreateMIG(uuid string, inst gpu.MIGInstance) (gpu.MIGDevice, error) {
	var made gpu.MIGDevice
	err := m.drive(uuid, "create MIG device", func(d device) (err error) {
		made, err = create(d, inst)
		return err
	})
	if err != nil {
		return gpu.MIGDevice{}, err
	}
	return made, nil
}

func create(d device, inst gpu.MIGInstance) (gpu.MIGDevice, error) {
	none := gpu.MIGDevice{}
	enabled, _, err := modeOf(d)
	if err != nil {
		return none, err
	}
	if !enabled {
		return none, fmt.Errorf("MIG mode is off: %w", gpu.ErrInvalid)
	}
	devices, err := readMIGDevices(d, "", 0)
	if err != nil {
		return none, fmt.Errorf("list MIG devices: %w", err)
	}
	// Compute instances of one GPU instance are several devices at one place.
	var state gpu.MIGState
	for i, have := range devices {
		if !slices.ContainsFunc(devices[:i], func(m gpu.MIGDevice) bool { return m.GI == have.GI }) {
			state.Devices = append(state.Devices, have)
		}
	}
	// The driver's own refusal has no reason, so the catalogue speaks first.
	if table := tableOf(d); table != nil && table.ByID(inst.ProfileID) != nil {
		if err := table.Check(state.Geometry(), inst); err != nil {
			return none, fmt.Errorf("%w: %w", gpu.ErrInvalid, err)
		}
	}
	constant, ok := constantOf(d, inst.ProfileID)
	if !ok {
		return none, fmt.Errorf("%w: no MIG profile with id %d", gpu.ErrInvalid, inst.ProfileID)
	}
	p, err := d.profile(constant)
	if err != nil {
		return none, err
	}
	gi, err := d.createInstance(p.id, inst.Placement.Start, inst.Placement.Size)
	if err != nil {
		return none, fmt.Errorf("profile %d at %s: %w", inst.ProfileID, inst.Placement, err)
	}
	made, err := fill(d, gi, p.slices)
	if err == nil {
		return made, nil
	}
	if undo := d.destroyInstance(gi); undo != nil {
		return none, fmt.Errorf("%w; GPU instance %d is left without a compute instance: %w", err, gi, undo)
	}
	return none, err
}

// fill creates the compute instance that takes all slices of a GPU instance, and
// finds the MIG device that the two are.
func fill(d device, gi, slices int) (gpu.MIGDevice, error) {
	none := gpu.MIGDevice{}
	for constant := range computeInstanceConstants {
		p, err := d.computeProfile(gi, constant)
		if err != nil || p.slices != slices {
			continue
		}
		ci, err := d.createCompute(gi, p.id)
		if err != nil {
			return none, fmt.Errorf("compute instance of GPU instance %d: %w", gi, err)
		}
		made, err := lookUp(d, gi, ci)
		if err != nil {
			return none, errors.Join(err, d.destroyCompute(gi, ci))
		}
		return made, nil
	}
	return none, fmt.Errorf("GPU instance %d: no compute instance of %d slices: %w", gi, slices, gpu.ErrNotSupported)
}

func lookUp(d device, gi, ci int) (gpu.MIGDevice, error) {
	none := gpu.MIGDevice{}
	name, err := d.name()
	if err != nil {
		return none, err
	}
	g := gpu.GPU{}
	if err := readMemory(d, &g); err != nil {
		return none, err
	}
	devices, err := readMIGDevices(d, name, g.MemoryMiB)
	if err != nil {
		return none, fmt.Errorf("list MIG devices: %w", err)
	}
	i := slices.IndexFunc(devices, func(m gpu.MIGDevice) bool { return m.GI == gi && m.CI == ci })
	if i < 0 {
		return none, fmt.Errorf("MIG device %d/%d was made and is not listed: %w", gi, ci, gpu.ErrNotFound)
	}
	return devices[i], nil
}

// DestroyMIG destroys a MIG device: its compute instance, and its GPU instance
// where no other is in it. It fails with gpu.ErrNotFound for another UUID and with
// gpu.ErrInUse where a process runs in it.
func (m *Machine) DestroyMIG(migUUID string) error {
	return m.use(func() error {
		const what = "destroy MIG device"
		n, err := m.driver.count()
		if err != nil {
			return fmt.Errorf("NVIDIA driver: count GPUs: %w", err)
		}
		answered := make(map[string]error) // why the GPU cannot list its MIG devices
		for i := range n {
			d, err := m.driver.device(i)
			if err != nil {
				continue
			}
			uuid, err := d.uuid()
			if err != nil {
				continue
			}
			found, err := destroy(d, migUUID)
			if found && err != nil {
				return fail(i, uuid, what, err)
			}
			if found {
				return nil
			}
			answered[uuid] = err
		}
		known := gpu.Machine{GPUs: m.last}
		if g := known.Parent(migUUID); g != nil {
			err, ok := answered[g.UUID]
			if !ok {
				err = gpu.ErrLost
			}
			if err != nil {
				return fail(g.Index, g.UUID, what, err)
			}
		}
		return fmt.Errorf("%s %s: %w", what, migUUID, gpu.ErrNotFound)
	})
}

// destroy destroys the MIG device where the GPU has it.
func destroy(d device, migUUID string) (found bool, err error) {
	g := gpu.GPU{}
	if err := readMIG(d, &g); err != nil {
		return false, fmt.Errorf("list MIG devices: %w", err)
	}
	devices := g.MIG.Devices
	at := slices.IndexFunc(devices, func(m gpu.MIGDevice) bool { return m.UUID == migUUID })
	if at < 0 {
		return false, nil
	}
	target := devices[at]
	processes, err := listProcesses(d)
	if err != nil {
		return true, fmt.Errorf("list processes: %w", err)
	}
	users := 0
	for _, p := range processes {
		// Without a name of its instance a process may be in any.
		if p.GI == gpu.AnyInstance || p.GI == target.GI && (p.CI == gpu.AnyInstance || p.CI == target.CI) {
			users++
		}
	}
	if users > 0 {
		return true, fmt.Errorf("%s: %w", migUUID, inUse(users, "processes"))
	}
	if err := d.destroyCompute(target.GI, target.CI); err != nil {
		return true, fmt.Errorf("%s: %w", migUUID, err)
	}
	if slices.ContainsFunc(devices, func(m gpu.MIGDevice) bool { return m.GI == target.GI && m.CI != target.CI }) {
		return true, nil
	}
	if err := d.destroyInstance(target.GI); err != nil {
		return true, fmt.Errorf("%s: GPU instance %d is left without a compute instance: %w", migUUID, target.GI, err)
	}
	return true, nil
}

// drive changes one GPU.
func (m *Machine) drive(uuid, what string, change func(device) error) error {
	return m.use(func() error {
		index, d, err := m.find(uuid, what)
		if err != nil {
			return err
		}
		if err := change(d); err != nil {
			return fail(index, uuid, what, err)
		}
		return nil
	})
}

// Reset resets a GPU: the pending MIG mode becomes the mode, and MIG devices are
// gone. It fails with gpu.ErrInUse where anything uses the GPU. The library has no
// call for it, so nvidia-smi must be installed; and since the library itself uses
// every GPU, all other methods wait for the reset.
func (m *Machine) Reset(uuid string) error {
	const what = "reset"
	index := 0
	err := m.use(func() error {
		i, d, err := m.find(uuid, what)
		if err != nil {
			return err
		}
		index = i
		if err := idle(d); err != nil {
			return fail(index, uuid, what, err)
		}
		return nil
	})
	if err != nil {
		return err
	}
	m.waiting.Lock()
	defer m.waiting.Unlock()
	m.life.Lock()
	defer m.life.Unlock()
	select {
	case <-m.closed:
		return fail(index, uuid, what, os.ErrClosed)
	default:
	}
	m.watched = make(map[string]device)
	if err := m.driver.stop(); err != nil {
		return fail(index, uuid, what, err)
	}
	err = m.resetTool(uuid)
	if again := m.driver.start(); again != nil {
		err = errors.Join(err, fmt.Errorf("the driver does not start again: %w", again))
	}
	if err != nil {
		return fail(index, uuid, what, err)
	}
	return nil
}

// resetTimeout bounds a reset, which takes seconds.
const resetTimeout = 2 * time.Minute

// runResetTool resets a GPU with NVIDIA's command-line tool.
func runResetTool(uuid string) error {
	ctx, cancel := context.WithTimeout(context.Background(), resetTimeout)
	defer cancel()
	out, err := exec.CommandContext(ctx, "nvidia-smi", "--gpu-reset", "-i", uuid).CombinedOutput()
	text := strings.TrimSpace(string(out))
	switch {
	case err == nil:
		return nil
	case errors.Is(err, exec.ErrNotFound):
		return fmt.Errorf("a reset needs nvidia-smi, which is not in PATH: %w", gpu.ErrNotSupported)
	case strings.Contains(text, "in use"):
		return fmt.Errorf("%w: nvidia-smi: %s", gpu.ErrInUse, text)
	}
	return fmt.Errorf("nvidia-smi --gpu-reset: %w: %s", err, text)
}
