package machine

import (
	"cmp"
	"errors"
	"fmt"
	"os"
	"slices"
	"sync"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// pollInterval is how long an event can take to reach WaitEvent.
const pollInterval = 100 * time.Millisecond

// lostReason is why a GPU is lost of which nothing else is said.
const lostReason = "GPU is lost"

var errDriverDown = errors.New("the driver does not answer (simulated)")

// Machine is a simulated machine. Its methods may be called at the same time.
type Machine struct {
	hardware *hardware
	host     Host
	// what names the state in errors.
	what string

	mu    sync.Mutex // serialises the handle's use of the store
	store store
	// seen is the number of events that this handle has delivered or was opened
	// after.
	seen int

	closing sync.Once
	closed  chan struct{}
}

func newMachine(d *Description, s store, what string) *Machine {
	return &Machine{hardware: &d.hardware, host: d.Host, store: s, what: what, closed: make(chan struct{})}
}

// New returns a machine in memory, as it is delivered. The seed makes the UUIDs;
// see Init.
func New(desc *Description, seed string) *Machine {
	data, err := newState(&desc.hardware, seed).encode()
	if err != nil {
		panic(err) // it is made of numbers and text
	}
	return newMachine(desc, &memory{data}, "state")
}

// Host is what the machine has besides its GPUs.
func (m *Machine) Host() Host { return m.host }

// Close ends the use of the machine and wakes WaitEvent. The machine itself, where
// it is in a folder, stays. A second call does nothing.
func (m *Machine) Close() error {
	var err error
	m.closing.Do(func() {
		close(m.closed)
		m.mu.Lock()
		defer m.mu.Unlock()
		err = m.store.close()
	})
	return err
}

func (m *Machine) isClosed() bool {
	select {
	case <-m.closed:
		return true
	default:
		return false
	}
}

// view returns the present state.
func (m *Machine) view() (*state, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.isClosed() {
		return nil, fmt.Errorf("simulated machine: %w", os.ErrClosed)
	}
	return m.loaded()
}

// loaded reads the state; the caller holds mu.
func (m *Machine) loaded() (*state, error) {
	data, err := m.store.load()
	if err != nil {
		return nil, fmt.Errorf("simulated machine: %w", err)
	}
	s, err := decodeState(data, m.hardware)
	if err != nil {
		return nil, fmt.Errorf("simulated machine: %s: %w; remove its folder and make the machine anew", m.what, err)
	}
	return s, nil
}

// update changes the state. If change fails, nothing is changed.
func (m *Machine) update(change func(*state) error) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.isClosed() {
		return fmt.Errorf("simulated machine: %w", os.ErrClosed)
	}
	unlock, err := m.store.lock()
	if err != nil {
		return fmt.Errorf("simulated machine: %w", err)
	}
	defer unlock()
	s, err := m.loaded()
	if err != nil {
		return err
	}
	if err := change(s); err != nil {
		return err
	}
	data, err := s.encode()
	if err != nil {
		return err
	}
	if err := m.store.save(data); err != nil {
		return fmt.Errorf("simulated machine: %w", err)
	}
	return nil
}

// Read returns the whole machine. Lost GPUs are in it, with all that was known of
// them and their links unknown. It fails while the driver is down.
func (m *Machine) Read() (gpu.Machine, error) {
	s, err := m.view()
	if err != nil {
		return gpu.Machine{}, err
	}
	if s.DriverDown {
		return gpu.Machine{}, errDriverDown
	}
	return s.machine(m.hardware), nil
}

// machine is what the driver reports.
func (s *state) machine(h *hardware) gpu.Machine {
	n := len(h.units)
	read := gpu.Machine{Driver: h.driver, CUDA: h.cuda, Board: h.board, GPUs: make([]gpu.GPU, n), Links: gpu.NewLinks(n)}
	for i := range n {
		read.GPUs[i] = s.gpu(h, i)
	}
	for b := range n {
		for a := range b {
			if s.GPUs[a].Lost || s.GPUs[b].Lost || slices.Contains(s.FailedLinks, linkPair{a, b}) {
				continue
			}
			read.Links.Merge(a, b, h.links.At(a, b))
		}
	}
	return read
}

// gpu is one GPU in its present state.
func (s *state) gpu(h *hardware, index int) gpu.GPU {
	g, now := h.units[index].gpu, &s.GPUs[index]
	g.UUID = gpuUUID(s.Seed, index)
	g.Recovery = now.Recovery
	g.MIG.Enabled, g.MIG.Pending = now.MIGEnabled, now.MIGPending
	for j := range now.Instances {
		g.MIG.Devices = append(g.MIG.Devices, h.units[index].migDevice(&now.Instances[j], j))
	}
	switch {
	case now.Lost:
		g.Health = gpu.Health{State: gpu.Lost, Reason: cmp.Or(now.LostReason, lostReason)}
	case now.Unhealthy != "":
		g.Health = gpu.Health{State: gpu.Unhealthy, Reason: now.Unhealthy}
	}
	return g
}

// WaitEvent returns the next event that was injected after this handle was
// opened, and waits for it at most so long. The second result is false where none
// came. A handle that is more than 256 events behind misses the oldest ones. Where
// several goroutines wait, each event goes to one of them. It fails with
// os.ErrClosed once Close is called, also while it waits.
func (m *Machine) WaitEvent(timeout time.Duration) (gpu.Event, bool, error) {
	deadline := time.Now().Add(timeout)
	for {
		event, ok, err := m.nextEvent()
		if ok || err != nil {
			return event, ok, err
		}
		wait := min(pollInterval, time.Until(deadline))
		if wait <= 0 {
			return gpu.Event{}, false, nil
		}
		select {
		case <-m.closed:
		case <-time.After(wait):
		}
	}
}

func (m *Machine) nextEvent() (gpu.Event, bool, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.isClosed() {
		return gpu.Event{}, false, fmt.Errorf("simulated machine: %w", os.ErrClosed)
	}
	s, err := m.loaded()
	if err != nil {
		return gpu.Event{}, false, err
	}
	if s.DriverDown {
		return gpu.Event{}, false, errDriverDown
	}
	first := s.EventCount - len(s.Events)
	m.seen = max(m.seen, first)
	if m.seen >= s.EventCount {
		return gpu.Event{}, false, nil
	}
	event := s.Events[m.seen-first]
	m.seen++
	return event, true, nil
}

// fail puts the GPU and the operation before an error.
func fail(index int, uuid, what string, err error) error {
	return fmt.Errorf("GPU %d (%s): %s: %w", index, uuid, what, err)
}

// SetMIGMode switches MIG mode on or off. On products that need a reset for that
// it sets the pending mode only; what the catalogue does not know switches at once.
// It fails with gpu.ErrNotSupported where the
// product cannot do MIG, and with gpu.ErrInUse where a process runs on the GPU
// or, for switching off, where MIG devices exist. Wanting the mode that the GPU
// has needs no idle GPU: it takes back a pending change.
func (m *Machine) SetMIGMode(uuid string, on bool) error {
	return m.drive(uuid, "set MIG mode", func(_ *state, index int, g *gpuState) error {
		u := &m.hardware.units[index]
		switch {
		case !u.gpu.MIG.Capable:
			return fmt.Errorf("%s cannot do MIG: %w", u.gpu.Name, gpu.ErrNotSupported)
		case on == g.MIGEnabled:
			g.MIGPending = on
			return nil
		case len(g.Processes) > 0:
			return inUse(len(g.Processes), "processes")
		case !on && len(g.Instances) > 0:
			return inUse(len(g.Instances), "MIG devices")
		}
		g.MIGPending = on
		if table := u.table(); table == nil || !table.ResetForMode {
			g.MIGEnabled = on
		}
		return nil
	})
}

func inUse(n int, by string) error { return fmt.Errorf("%w by %d %s", gpu.ErrInUse, n, by) }

// CreateMIG creates a GPU instance at exactly that place, with one compute
// instance that fills it. It fails with gpu.ErrNotSupported where the product
// cannot do MIG or its profiles are not known, and with gpu.ErrInvalid and the
// reason where MIG mode is off or the instance does not fit.
func (m *Machine) CreateMIG(uuid string, inst gpu.MIGInstance) (gpu.MIGDevice, error) {
	var made gpu.MIGDevice
	err := m.drive(uuid, "create MIG device", func(s *state, index int, g *gpuState) error {
		u := &m.hardware.units[index]
		if !u.gpu.MIG.Capable {
			return fmt.Errorf("%s cannot do MIG: %w", u.gpu.Name, gpu.ErrNotSupported)
		}
		if !g.MIGEnabled {
			return fmt.Errorf("MIG mode is off: %w", gpu.ErrInvalid)
		}
		switch err := u.fits(g.Instances, inst); {
		case errors.Is(err, gpu.ErrNotSupported):
			return err
		case err != nil:
			return fmt.Errorf("%w: %w", gpu.ErrInvalid, err)
		}
		in := s.create(index, instance{GI: freeGI(g.Instances), MIG: inst})
		made = u.migDevice(in, len(g.Instances)-1)
		return nil
	})
	if err != nil {
		return gpu.MIGDevice{}, err
	}
	return made, nil
}

// DestroyMIG destroys a MIG device with its instances. The indices of those
// behind it move up. It fails with gpu.ErrNotFound for another UUID and with
// gpu.ErrInUse where a process runs in it.
func (m *Machine) DestroyMIG(migUUID string) error {
	is := func(in instance) bool { return in.UUID == migUUID }
	return m.update(func(s *state) error {
		if s.DriverDown {
			return errDriverDown
		}
		const what = "destroy MIG device"
		index := slices.IndexFunc(s.GPUs, func(g gpuState) bool { return slices.ContainsFunc(g.Instances, is) })
		if index < 0 {
			return fmt.Errorf("%s %s: %w", what, migUUID, gpu.ErrNotFound)
		}
		g, uuid := &s.GPUs[index], gpuUUID(s.Seed, index)
		at := slices.IndexFunc(g.Instances, is)
		switch {
		case g.Lost:
			return fail(index, uuid, what, gpu.ErrLost)
		case g.uses(&g.Instances[at]):
			return fail(index, uuid, what, fmt.Errorf("%s is %w by a process", migUUID, gpu.ErrInUse))
		}
		g.Instances = slices.Delete(g.Instances, at, at+1)
		return nil
	})
}

// Reset resets a GPU: the pending MIG mode becomes the mode, and MIG devices are
// gone, as they are after any reset of a real GPU; the driver no longer asks for a
// reset. It fails with gpu.ErrInUse where a process runs on the GPU.
func (m *Machine) Reset(uuid string) error {
	return m.drive(uuid, "reset", func(_ *state, _ int, g *gpuState) error {
		if len(g.Processes) > 0 {
			return inUse(len(g.Processes), "processes")
		}
		g.MIGEnabled = g.MIGPending
		g.Instances = nil
		if g.Recovery == gpu.RecoveryReset || g.Recovery == gpu.RecoveryDrainReset {
			g.Recovery = gpu.RecoveryNone
		}
		return nil
	})
}

// Processes lists the processes on a GPU; with MIG mode on, each names its MIG
// device.
func (m *Machine) Processes(uuid string) ([]gpu.Process, error) {
	s, err := m.view()
	if err != nil {
		return nil, err
	}
	_, g, err := s.answering(uuid, "list processes")
	if err != nil {
		return nil, err
	}
	return g.Processes, nil
}

// drive changes a GPU by way of the driver.
func (m *Machine) drive(uuid, what string, change func(*state, int, *gpuState) error) error {
	return m.update(func(s *state) error {
		index, g, err := s.answering(uuid, what)
		if err != nil {
			return err
		}
		if err := change(s, index, g); err != nil {
			return fail(index, uuid, what, err)
		}
		return nil
	})
}

// answering returns a GPU that the driver can reach.
func (s *state) answering(uuid, what string) (int, *gpuState, error) {
	if s.DriverDown {
		return 0, nil, errDriverDown
	}
	index, g, err := s.named(uuid, what)
	if err == nil && g.Lost {
		err = fail(index, uuid, what, gpu.ErrLost)
	}
	return index, g, err
}

// named returns the GPU with the UUID.
func (s *state) named(uuid, what string) (int, *gpuState, error) {
	for i := range s.GPUs {
		if gpuUUID(s.Seed, i) == uuid {
			return i, &s.GPUs[i], nil
		}
	}
	return 0, nil, fmt.Errorf("GPU %s: %s: %w", uuid, what, gpu.ErrNotFound)
}
