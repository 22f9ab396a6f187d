package nvml

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

var (
	errUnknown = errors.New("NVML: ERROR_UNKNOWN")
	// errLost is what the library says of a lost GPU.
	errLost = fmt.Errorf("%w (NVML: ERROR_GPU_IS_LOST)", gpu.ErrLost)
)

// fakeDriver is a driver whose every answer a test can set.
type fakeDriver struct {
	gpus []*fakeGPU
	// errs are errors by method.
	errs map[string]error
	cuda int
	// xids are what wait returns, an error or a xid.
	xids chan any

	mu      sync.Mutex
	started bool
	watched []string // UUIDs
	calls   []string // of start, stop and unwatch
}

func newFake(gpus ...*fakeGPU) *fakeDriver {
	f := &fakeDriver{gpus: gpus, errs: make(map[string]error), cuda: 13000, xids: make(chan any, 10)}
	for i, g := range gpus {
		g.index = i
	}
	return f
}

// machine opens the fake.
func (f *fakeDriver) machine(t *testing.T) *Machine {
	t.Helper()
	m, err := open(f, t.TempDir(), func(string) error { return errUnknown })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m
}

func (f *fakeDriver) note(call string) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.calls = append(f.calls, call)
}

func (f *fakeDriver) start() error {
	f.note("start")
	if err := f.errs["start"]; err != nil {
		return err
	}
	f.started = true
	return nil
}

func (f *fakeDriver) stop() error {
	f.note("stop")
	f.started = false
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watched = nil
	return nil
}

// answer is the error of a method; all fail before start and after stop.
func (f *fakeDriver) answer(method string) error {
	if !f.started {
		return errors.New("NVML: ERROR_UNINITIALIZED")
	}
	return f.errs[method]
}

func (f *fakeDriver) driverVersion() (string, error) { return "580.95.05", f.answer("driverVersion") }
func (f *fakeDriver) cudaVersion() (int, error)      { return f.cuda, f.answer("cudaVersion") }
func (f *fakeDriver) count() (int, error)            { return len(f.gpus), f.answer("count") }

func (f *fakeDriver) device(index int) (device, error) {
	g := f.gpus[index]
	if err := g.errs["device"]; err != nil {
		return nil, err
	}
	return g, f.answer("device")
}

func (f *fakeDriver) watch(d device) error {
	g := d.(*fakeGPU)
	if err := g.errs["watch"]; err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watched = append(f.watched, g.id)
	return f.answer("watch")
}

func (f *fakeDriver) unwatch() error {
	f.note("unwatch")
	f.mu.Lock()
	defer f.mu.Unlock()
	f.watched = nil
	return nil
}

func (f *fakeDriver) wait(timeout time.Duration) (xid, bool, error) {
	if err := f.answer("wait"); err != nil {
		return xid{}, false, err
	}
	select {
	case x := <-f.xids:
		if err, ok := x.(error); ok {
			return xid{}, false, err
		}
		return x.(xid), true, nil
	case <-time.After(timeout):
		return xid{}, false, nil
	}
}

// fakeLink is an NVLink of a fakeGPU.
type fakeLink struct {
	inactive bool
	to       remote
	stateErr error
	err      error // of linkRemote
}

func toGPU(bus uint32) fakeLink { return fakeLink{to: remote{kind: remoteGPU, pci: pciInfo{bus: bus}}} }

var toSwitch = fakeLink{to: remote{kind: remoteSwitch}}

type fakeCompute struct{ id, slices int }

type fakeInstance struct {
	id int
	instance
	slices  int
	compute []fakeCompute
}

// fakeGPU is a GPU at PCI bus 0x10+bus, with the MIG geometry that is created on
// it.
type fakeGPU struct {
	index      int
	id         string
	board      string
	memoryMiB  int
	major      int
	pciInfo    pciInfo
	links      []fakeLink
	fabricInfo fabric
	levels     map[int]int // by index of the other GPU
	action     int         // of recovery
	// errs are errors by method.
	errs map[string]error

	migCapable, enabled, pending bool
	// activation is what setMIGMode says beside success.
	activation error
	profiles   map[int]profile // by constant
	instances  []fakeInstance
	created    int
	// silent says nothing of the attributes of MIG devices.
	silent bool
	// holes are MIG indices that are empty.
	holes []int
	procs []process
}

func newFakeGPU(id, board string, bus uint32) *fakeGPU {
	g := &fakeGPU{
		id: "GPU-" + id, board: board, memoryMiB: 1024, major: 8, pciInfo: pciInfo{bus: bus, id: 0x20b010de},
		errs: map[string]error{"fabric": gpu.ErrNotSupported}, levels: make(map[int]int), profiles: make(map[int]profile),
	}
	if product := gpu.ProductByName(board); product != nil {
		g.memoryMiB, g.migCapable = product.MemoryMiB, product.MIG != nil
		if product.MIG != nil {
			for _, p := range product.MIG.Profiles {
				g.profiles[p.Constant] = profile{p.ID, p.Slices}
			}
		}
	}
	return g
}

// cut adds an instance with compute instances of these slices.
func (g *fakeGPU) cut(profileID, start, size, slices int, compute ...int) {
	in := fakeInstance{id: 1 + len(g.instances), instance: instance{profileID, start, size}, slices: slices}
	for i, s := range compute {
		in.compute = append(in.compute, fakeCompute{i, s})
	}
	g.instances = append(g.instances, in)
}

func (g *fakeGPU) uuid() (string, error)         { return g.id, g.errs["uuid"] }
func (g *fakeGPU) name() (string, error)         { return g.board, g.errs["name"] }
func (g *fakeGPU) minor() (int, error)           { return g.index, g.errs["minor"] }
func (g *fakeGPU) memory() (uint64, error)       { return uint64(g.memoryMiB) << 20, g.errs["memory"] }
func (g *fakeGPU) capability() (int, int, error) { return g.major, 0, g.errs["capability"] }
func (g *fakeGPU) recovery() (int, error)        { return g.action, g.errs["recovery"] }
func (g *fakeGPU) pci() (pciInfo, error)         { return g.pciInfo, g.errs["pci"] }
func (g *fakeGPU) fabric() (fabric, error)       { return g.fabricInfo, g.errs["fabric"] }
func (g *fakeGPU) processes() ([]process, error) { return g.procs, g.errs["processes"] }
func (g *fakeGPU) ancestor(other device) (int, error) {
	level, ok := g.levels[other.(*fakeGPU).index]
	if !ok {
		return 0, errUnknown
	}
	return level, nil
}

func (g *fakeGPU) linkActive(link int) (bool, error) {
	if link >= len(g.links) {
		return false, gpu.ErrInvalid
	}
	return !g.links[link].inactive, g.links[link].stateErr
}

func (g *fakeGPU) linkRemote(link int) (remote, error) { return g.links[link].to, g.links[link].err }

func (g *fakeGPU) migMode() (bool, bool, error) {
	if !g.migCapable {
		return false, false, gpu.ErrNotSupported
	}
	return g.enabled, g.pending, g.errs["migMode"]
}

func (g *fakeGPU) setMIGMode(on bool) (error, error) {
	if err := g.errs["setMIGMode"]; err != nil {
		return nil, err
	}
	g.pending = on
	if on == g.enabled {
		return nil, nil
	}
	if g.activation == nil {
		g.enabled = on
	}
	return g.activation, nil
}

// placed are the MIG devices in index order, with nil for holes.
func (g *fakeGPU) placed() []*migDevice {
	var all []*migDevice
	for _, in := range g.instances {
		for _, c := range in.compute {
			for slices.Contains(g.holes, len(all)) {
				all = append(all, nil)
			}
			all = append(all, &migDevice{
				uuid: fmt.Sprintf("MIG-%s-%d-%d", g.id, in.id, c.id), gi: in.id, ci: c.id,
				memoryMiB:  in.size * g.memoryMiB / 8,
				attributes: gpu.MIGAttributes{SMs: 14 * c.slices, Slices: in.slices, ComputeSlices: c.slices, CopyEngines: in.slices},
			})
			if g.silent {
				*all[len(all)-1] = migDevice{uuid: all[len(all)-1].uuid, gi: in.id, ci: c.id}
			}
		}
	}
	return all
}

func (g *fakeGPU) migMax() (int, error) { return 7, g.errs["migMax"] }

func (g *fakeGPU) migDevice(index int) (migDevice, error) {
	if err := g.errs["migDevice"]; err != nil {
		return migDevice{}, err
	}
	if all := g.placed(); index < len(all) && all[index] != nil {
		return *all[index], nil
	}
	return migDevice{}, gpu.ErrNotFound
}

func (g *fakeGPU) at(gi int) int {
	return slices.IndexFunc(g.instances, func(in fakeInstance) bool { return in.id == gi })
}

func (g *fakeGPU) instance(gi int) (instance, error) {
	at := g.at(gi)
	if at < 0 {
		return instance{}, gpu.ErrNotFound
	}
	return g.instances[at].instance, g.errs["instance"]
}

func (g *fakeGPU) profile(constant int) (profile, error) {
	p, ok := g.profiles[constant]
	if !ok {
		return profile{}, gpu.ErrInvalid
	}
	return p, g.errs["profile"]
}

func (g *fakeGPU) createInstance(profileID, start, size int) (int, error) {
	if err := g.errs["createInstance"]; err != nil {
		return 0, err
	}
	for _, p := range g.profiles {
		if p.id == profileID {
			g.cut(profileID, start, size, p.slices)
			g.created++
			return g.instances[len(g.instances)-1].id, nil
		}
	}
	return 0, gpu.ErrInvalid
}

func (g *fakeGPU) destroyInstance(gi int) error {
	if err := g.errs["destroyInstance"]; err != nil {
		return err
	}
	at := g.at(gi)
	if len(g.instances[at].compute) > 0 {
		return gpu.ErrInUse
	}
	g.instances = slices.Delete(g.instances, at, at+1)
	return nil
}

// computeProfile knows constants 0 to 6, of 1, 2, 3, 4, 7, 8 and 6 slices, with
// ids of their own.
func (g *fakeGPU) computeProfile(_, constant int) (profile, error) {
	sizes := []int{1, 2, 3, 4, 7, 8, 6}
	if constant >= len(sizes) {
		return profile{}, gpu.ErrInvalid
	}
	return profile{id: 100 + constant, slices: sizes[constant]}, g.errs["computeProfile"]
}

func (g *fakeGPU) createCompute(gi, profileID int) (int, error) {
	if err := g.errs["createCompute"]; err != nil {
		return 0, err
	}
	p, err := g.computeProfile(gi, profileID-100)
	if err != nil {
		return 0, err
	}
	in := &g.instances[g.at(gi)]
	in.compute = append(in.compute, fakeCompute{len(in.compute), p.slices})
	return len(in.compute) - 1, nil
}

func (g *fakeGPU) destroyCompute(gi, ci int) error {
	if err := g.errs["destroyCompute"]; err != nil {
		return err
	}
	in := &g.instances[g.at(gi)]
	in.compute = slices.DeleteFunc(in.compute, func(c fakeCompute) bool { return c.id == ci })
	return nil
}

// both makes two GPUs see each other at a PCIe level.
func both(a, b *fakeGPU, level int) {
	a.levels[b.index], b.levels[a.index] = level, level
}

// without removes the errors that a test set, so that the GPU answers again.
func (g *fakeGPU) without(methods ...string) {
	maps.DeleteFunc(g.errs, func(m string, _ error) bool { return slices.Contains(methods, m) })
}
