package agent

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

const (
	// hardwareInterval is the shortest time between two readings of the machine,
	// unless an event asks for one.
	hardwareInterval = 4 * time.Second
	// readTimeout is how long a reading may take before the driver counts as not
	// answering. A driver in trouble can hang in a call for good.
	readTimeout = 10 * time.Second
	// retryPause is how long a driver that fails to wait for events is left alone.
	retryPause = time.Second
)

// Hardware is what the agent needs of a machine. The real one is in package
// nvml, the simulated one in package machine.
type Hardware interface {
	// Read returns the whole machine. A GPU that does not answer is in it with its
	// health; an error means that the driver does not answer at all.
	Read() (gpu.Machine, error)
	// WaitEvent waits for the next event, at most so long. The second result is
	// false where none came.
	// It returns os.ErrClosed after Close.
	WaitEvent(timeout time.Duration) (gpu.Event, bool, error)
	// Close ends the use of the machine.
	Close() error
}

// reader reads the machine outside of the reconciler's goroutine.
type reader struct {
	hardware Hardware // nil until it could be opened
	// began is when the reading that is under way began, zero for none.
	began time.Time
	// ended is when the last reading ended.
	ended time.Time
	// result has the reading that was under way.
	result chan reading
	// hurry is set by an event: the next reading must not wait.
	hurry *atomic.Bool
}

type reading struct {
	machine gpu.Machine
	err     error
}

// close ends the use of the hardware, unless it hangs: then only the end of the
// process helps.
func (r *reader) close() {
	if r.hardware != nil && r.began.IsZero() {
		_ = r.hardware.Close()
	}
}

// openHardware opens the machine and listens to its events.
func (a *agent) openHardware() error {
	hardware, err := a.Open()
	if err != nil {
		return err
	}
	hurry := &atomic.Bool{}
	a.reader = reader{hardware: hardware, result: make(chan reading, 1), hurry: hurry}
	go func() {
		for {
			event, ok, err := hardware.WaitEvent(time.Second)
			switch {
			case errors.Is(err, os.ErrClosed):
				return
			case err != nil:
				time.Sleep(retryPause) // the driver is in trouble; Read reports it
			case ok:
				a.Log.Warn("GPU event", "gpu", event.GPU, "xid", event.XID)
				hurry.Store(true)
				a.kick()
			}
		}
	}()
	return nil
}

// readMachine takes the reading that has ended, if one has, and begins the next
// if it is time. While the driver does not answer, the last reading stands with
// every GPU lost.
func (a *agent) readMachine(now time.Time) {
	r := &a.reader
	if r.hardware == nil {
		if err := a.openHardware(); err != nil {
			a.trouble("driver", "%v", err)
			return
		}
	}
	select {
	case read := <-r.result:
		r.began, r.ended = time.Time{}, now
		err := read.err
		if err == nil {
			err = read.machine.Validate()
		}
		if err == nil {
			a.well("driver")
			a.setMachine(&read.machine)
		} else {
			a.driverFailed(err)
		}
	default:
		if !r.began.IsZero() && now.Sub(r.began) > readTimeout {
			a.driverFailed(fmt.Errorf("a reading takes longer than %s", readTimeout))
		}
	}
	if !r.began.IsZero() {
		return
	}
	if hurried := r.hurry.Swap(false); !hurried && now.Sub(r.ended) < hardwareInterval {
		return
	}
	r.began = now
	hardware, result := r.hardware, r.result
	go func() {
		m, err := hardware.Read()
		result <- reading{m, err}
		a.kick()
	}()
}

// driverFailed counts every GPU as lost.
func (a *agent) driverFailed(err error) {
	a.trouble("driver", "%v", err)
	if a.machine == nil {
		return
	}
	m := *a.machine
	m.GPUs = slices.Clone(m.GPUs)
	for i := range m.GPUs {
		m.GPUs[i].Health = gpu.Health{State: gpu.Lost, Reason: "the driver does not answer"}
	}
	a.setMachine(&m)
}

// setMachine makes a reading the present one.
func (a *agent) setMachine(m *gpu.Machine) {
	a.reportHealth(m)
	for _, g := range m.GPUs {
		a.parents[g.UUID] = g.UUID
		for _, d := range g.MIG.Devices {
			a.parents[d.UUID] = g.UUID
		}
	}
	a.machine = m
}
