package nvml

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Machine is the GPUs of this host. Its methods may be called at the same time.
type Machine struct {
	driver driver
	// sysfs is the folder /sys.
	sysfs string
	// resetTool resets a GPU; the library cannot.
	resetTool func(uuid string) error

	// life is held for reading while the library is used, and for writing to start
	// and stop it.
	life   sync.RWMutex
	closed chan struct{}
	once   sync.Once

	mu sync.Mutex // guards what follows and serialises all but waiting
	// last is the latest reading of each GPU.
	last []gpu.GPU

	waiting sync.Mutex // held by the one who waits; guards watched
	// watched are the GPUs whose XIDs are delivered; nil for those that have none.
	watched map[string]device
}

// Open loads the library and initialises it.
func Open() (*Machine, error) {
	d, err := newDriver()
	if err != nil {
		return nil, err
	}
	return open(d, "/sys", runResetTool)
}

func open(d driver, sysfs string, resetTool func(string) error) (*Machine, error) {
	if err := d.start(); err != nil {
		return nil, fmt.Errorf("NVIDIA driver: %w", err)
	}
	return &Machine{
		driver: d, sysfs: sysfs, resetTool: resetTool,
		closed: make(chan struct{}), watched: make(map[string]device),
	}, nil
}

// Close ends the use of the driver. It waits for calls in progress; WaitEvent
// ends within half a second. A second call does nothing.
func (m *Machine) Close() error {
	var err error
	m.once.Do(func() {
		close(m.closed)
		m.life.Lock()
		defer m.life.Unlock()
		err = m.driver.stop()
	})
	if err != nil {
		return fmt.Errorf("NVIDIA driver: %w", err)
	}
	return nil
}

// enter begins a use of the library; every success needs a leave.
func (m *Machine) enter() error {
	m.life.RLock()
	select {
	case <-m.closed:
		m.life.RUnlock()
		return fmt.Errorf("NVIDIA driver: %w", os.ErrClosed)
	default:
		return nil
	}
}

func (m *Machine) leave() { m.life.RUnlock() }

// use runs a call that neither waits nor restarts the library.
func (m *Machine) use(call func() error) error {
	if err := m.enter(); err != nil {
		return err
	}
	defer m.leave()
	m.mu.Lock()
	defer m.mu.Unlock()
	return call()
}

// fail puts the GPU and the operation before an error.
func fail(index int, uuid, what string, err error) error {
	return fmt.Errorf("GPU %d (%s): %s: %w", index, uuid, what, err)
}

// find returns the GPU with the UUID.
func (m *Machine) find(uuid, what string) (int, device, error) {
	n, err := m.driver.count()
	if err != nil {
		return 0, nil, fmt.Errorf("NVIDIA driver: count GPUs: %w", err)
	}
	for i := range n {
		d, err := m.driver.device(i)
		if err != nil {
			continue
		}
		if got, err := d.uuid(); err == nil && got == uuid {
			return i, d, nil
		}
	}
	for i, g := range m.last {
		if g.UUID == uuid {
			return 0, nil, fail(i, uuid, what, gpu.ErrLost)
		}
	}
	return 0, nil, fmt.Errorf("GPU %s: %s: %w", uuid, what, gpu.ErrNotFound)
}

// slice is the longest time for which the library is asked to wait: so long Close
// and Reset may have to.
const slice = 500 * time.Millisecond

// WaitEvent returns the next XID of any GPU, and waits for it at most so long. The
// second result is false where none came. GPUs that report none, such as virtual
// ones, are left out; a GPU that comes back is watched again. Where several
// goroutines wait, they take turns. It fails with os.ErrClosed once Close is
// called.
func (m *Machine) WaitEvent(timeout time.Duration) (gpu.Event, bool, error) {
	for deadline := time.Now().Add(timeout); ; {
		remaining := max(0, time.Until(deadline))
		event, ok, err := m.waitSlice(min(slice, remaining))
		if ok || err != nil || remaining == 0 {
			return event, ok, err
		}
	}
}

func (m *Machine) waitSlice(timeout time.Duration) (gpu.Event, bool, error) {
	m.waiting.Lock()
	defer m.waiting.Unlock()
	if err := m.enter(); err != nil {
		return gpu.Event{}, false, err
	}
	defer m.leave()
	watching, err := m.watchAll()
	if err != nil {
		return gpu.Event{}, false, err
	}
	if !watching {
		// The library returns at once where there is nothing to wait for.
		select {
		case <-m.closed:
		case <-time.After(timeout):
		}
		return gpu.Event{}, false, nil
	}
	x, ok, err := m.driver.wait(timeout)
	if errors.Is(err, gpu.ErrLost) {
		// The library says so again and again, and nothing of the others, until the
		// lost GPU is no longer watched.
		m.watched = make(map[string]device)
		err = errors.Join(err, m.driver.unwatch())
	}
	if err != nil {
		return gpu.Event{}, false, fmt.Errorf("NVIDIA driver: wait for events: %w", err)
	}
	if !ok {
		return gpu.Event{}, false, nil
	}
	uuid, err := m.nameOf(x.device)
	if err != nil {
		return gpu.Event{}, false, fmt.Errorf("XID %d of a GPU that cannot be named: %w", x.number, err)
	}
	return gpu.Event{GPU: uuid, XID: int(x.number), GI: instanceID(x.gi), CI: instanceID(x.ci)}, true, nil
}

// nameOf is the UUID of a GPU, also of one that has just been lost.
func (m *Machine) nameOf(d device) (string, error) {
	for uuid, w := range m.watched {
		if w == d {
			return uuid, nil
		}
	}
	return d.uuid()
}

// watchAll watches every GPU that answers and is not watched yet, and says
// whether any is.
func (m *Machine) watchAll() (bool, error) {
	n, err := m.driver.count()
	if err != nil {
		return false, fmt.Errorf("NVIDIA driver: count GPUs: %w", err)
	}
	for i := range n {
		d, err := m.driver.device(i)
		if err != nil {
			continue // lost; Read says so
		}
		uuid, err := d.uuid()
		if err != nil {
			continue
		}
		if _, known := m.watched[uuid]; known {
			continue
		}
		switch err := m.driver.watch(d); {
		case err == nil:
			m.watched[uuid] = d
		case errors.Is(err, gpu.ErrNotSupported):
			m.watched[uuid] = nil
		}
		// After other errors the next call tries again.
	}
	for _, d := range m.watched {
		if d != nil {
			return true, nil
		}
	}
	return false, nil
}

func instanceID(id uint32) int {
	if id == noInstance {
		return gpu.AnyInstance
	}
	return int(id)
}

// Processes lists the processes on a GPU, those of all its MIG devices with MIG
// mode on. Memory that the driver does not know is 0.
func (m *Machine) Processes(uuid string) ([]gpu.Process, error) {
	var processes []gpu.Process
	err := m.use(func() error {
		const what = "list processes"
		index, d, err := m.find(uuid, what)
		if err != nil {
			return err
		}
		if processes, err = listProcesses(d); err != nil {
			return fail(index, uuid, what, err)
		}
		return nil
	})
	return processes, err
}

// listProcesses converts the library's list and joins what is of one process.
func listProcesses(d device) ([]gpu.Process, error) {
	raw, err := d.processes()
	if err != nil {
		return nil, err
	}
	type key struct{ pid, gi, ci uint32 }
	at := make(map[key]int)
	var processes []gpu.Process
	for _, r := range raw {
		memory := 0
		if r.memory != unknownMemory {
			memory = int(r.memory >> 20)
		}
		k := key{r.pid, r.gi, r.ci}
		if i, again := at[k]; again {
			processes[i].MemoryMiB = max(processes[i].MemoryMiB, memory)
			continue
		}
		at[k] = len(processes)
		processes = append(processes, gpu.Process{PID: int(r.pid), MemoryMiB: memory, GI: instanceID(r.gi), CI: instanceID(r.ci)})
	}
	return processes, nil
}

func inUse(n int, by string) error {
	return fmt.Errorf("%w by %d %s", gpu.ErrInUse, n, by)
}
