package agent

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync/atomic"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/migmanager"
)

// migJournal is the folder of the changes of MIG devices that are under way.
const migJournal = "mig-changes"

const (
	// hardwareInterval is the shortest time between two readings of the machine,
	// unless an event asks for one.
	hardwareInterval = 4 * time.Second
	// readTimeout is how long a reading may take before the driver counts as not
	// answering. A driver in trouble can hang in a call for good.
	readTimeout = 10 * time.Second
	// eventWait is how long one waits for an event at a time; so long the end of the
	// agent may take.
	eventWait = 500 * time.Millisecond
	// retryPause is how long a driver that fails to wait for events is left alone.
	retryPause = time.Second
)

// Hardware is what the agent needs of a machine. The real one is in package
// nvml, the simulated one in package machine.
type Hardware interface {
	migmanager.Hardware
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
	// listening is closed when nobody waits for events any more.
	listening chan struct{}
	// hurry says that the next reading must not wait.
	hurry atomic.Bool
	// begun counts the readings; taken is the number of the last one whose result
	// was looked at.
	begun atomic.Int64
	taken int64
}

type reading struct {
	number  int64
	machine gpu.Machine
	err     error
}

// close ends the use of the hardware, unless it hangs: then only the end of the
// process helps.
func (r *reader) close() {
	if r.hardware == nil {
		return
	}
	select {
	case <-r.listening:
	case <-time.After(retryPause):
	}
	if r.began.IsZero() {
		_ = r.hardware.Close()
	}
}

// openHardware opens the machine, ends a change of MIG devices that was
// interrupted, and listens to events.
func (a *agent) openHardware(ctx context.Context) error {
	hardware, err := a.Open()
	if err != nil {
		return err
	}
	a.reader.hardware, a.reader.result = hardware, make(chan reading, 1)
	manager := migmanager.New(migmanager.Options{
		NodeName: a.NodeName, Node: &node{a}, Hardware: hardware, Client: a.Client, ConfigFile: a.MIGConfigFile,
		Journal: filepath.Join(a.StateDir, migJournal), DrainTimeout: a.DrainTimeout, Event: a.api.event, Log: a.Log,
	})
	// Before anything is offered: the machine may be between two geometries.
	if err := manager.Recover(); err != nil {
		a.trouble("MIG", "%v", err)
	}
	if a.Client != nil {
		a.mig = manager
		a.beside.Go(func() { manager.Run(ctx) })
	}
	a.reader.listening = make(chan struct{})
	go func() {
		defer close(a.reader.listening)
		for ctx.Err() == nil {
			event, ok, err := hardware.WaitEvent(eventWait)
			switch {
			case errors.Is(err, os.ErrClosed):
				return
			case err != nil:
				select {
				case <-ctx.Done():
				case <-time.After(retryPause): // the driver is in trouble; Read reports it
				}
			case ok:
				a.events.put(event)
				a.reader.hurry.Store(true)
				a.kick()
			}
		}
	}()
	return nil
}

// readMachine takes the reading that has ended, if one has, and begins the next
// if it is time. While the driver does not answer, the last reading stands with
// every GPU lost.
func (a *agent) readMachine(ctx context.Context, now time.Time) {
	r := &a.reader
	if r.hardware == nil {
		if err := a.openHardware(ctx); err != nil {
			a.trouble("driver", "%v", err)
			return
		}
	}
	news := a.takeEvents(now)
	select {
	case read := <-r.result:
		r.began, r.ended, r.taken, news = time.Time{}, now, read.number, false
		a.takeReading(now, &read.machine, read.err)
	default:
		if !r.began.IsZero() && now.Sub(r.began) > readTimeout {
			a.driverFailed(now, fmt.Errorf("a reading takes longer than %s", readTimeout))
		}
	}
	if news && a.raw != nil {
		a.judge(now, a.raw)
	}
	if !r.began.IsZero() {
		return
	}
	if hurried := r.hurry.Swap(false); !hurried && now.Sub(r.ended) < hardwareInterval {
		return
	}
	r.began = now
	number, hardware, result := r.begun.Add(1), r.hardware, r.result
	go func() {
		m, err := hardware.Read()
		result <- reading{number, m, err}
		a.kick()
	}()
}

// takeReading makes a reading the machine, unless it failed.
func (a *agent) takeReading(now time.Time, m *gpu.Machine, err error) {
	if err == nil {
		err = m.Validate()
	}
	if err != nil {
		a.driverFailed(now, err)
		return
	}
	a.well("driver")
	a.judge(now, m)
}

// driverFailed counts every GPU as lost.
func (a *agent) driverFailed(now time.Time, err error) {
	a.trouble("driver", "%v", err)
	if a.raw == nil {
		return
	}
	m := *a.raw
	m.GPUs = slices.Clone(m.GPUs)
	for i := range m.GPUs {
		m.GPUs[i].Health = gpu.Health{State: gpu.Lost, Reason: "the driver does not answer"}
	}
	a.judge(now, &m)
}
