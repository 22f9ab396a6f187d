package mig

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Hardware is what an Executor changes. Packages nvml and machine have it.
type Hardware interface {
	Read() (gpu.Machine, error)
	SetMIGMode(uuid string, on bool) error
	CreateMIG(uuid string, inst gpu.MIGInstance) (gpu.MIGDevice, error)
	DestroyMIG(migUUID string) error
	Reset(uuid string) error
}

// Executor changes how GPUs are cut, one at a time. It is not safe for concurrent
// use, and one folder belongs to one Executor.
type Executor struct {
	hardware Hardware
	journal  journal
	// missed are the GPUs of which Recover has said that they are gone.
	missed map[string]bool
}

// NewExecutor returns an Executor that keeps its journal in a folder: a file for
// each GPU whose change is under way. The folder need not exist.
func NewExecutor(h Hardware, dir string) *Executor { return newExecutor(h, folder(dir)) }

func newExecutor(h Hardware, d disk) *Executor {
	return &Executor{hardware: h, journal: journal{d}, missed: make(map[string]bool)}
}

// Apply makes a change. If a step fails, the GPU is brought back to how it was, and
// the error is that of the step. If that fails, too, both are in the error, the
// change stays in the journal, and Recover must end it. A change is refused, and
// nothing done, where the GPU is no more as it was when the change was planned.
func (x *Executor) Apply(c *Change) error {
	what := fmt.Sprintf("GPU %d (%s)", c.Index, c.GPU)
	if err := x.ready(c); err != nil {
		return fmt.Errorf("%s: %w", what, err)
	}
	r := &record{Version: recordVersion, GPU: c.GPU, Before: c.Before, Wanted: c.Wanted}
	if err := x.journal.begin(r); err != nil {
		return fmt.Errorf("%s: journal of MIG changes: %w", what, err)
	}
	why, err := x.end(r)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", what, err)
	case why != nil:
		return fmt.Errorf("%s: %w; the GPU is cut as before", what, why)
	}
	return nil
}

// ready says why a change cannot begin.
func (x *Executor) ready(c *Change) error {
	open, err := x.journal.open(c.GPU)
	if err != nil {
		return fmt.Errorf("journal of MIG changes: %w", err)
	}
	if open {
		return errors.New("an earlier change of its MIG devices has not ended")
	}
	g, err := x.read(c.GPU)
	if err != nil {
		return err
	}
	// What came since was not asked to go, so it may be in use.
	known := slices.Concat(c.Kept, c.Destroyed)
	if len(g.MIG.Devices) != len(known) || !sameGeometry(GeometryOf(&g.MIG), c.Before) ||
		slices.ContainsFunc(g.MIG.Devices, func(d gpu.MIGDevice) bool { return !slices.Contains(known, d.UUID) }) {
		return errors.New("its MIG devices are no more those for which the change was planned")
	}
	return nil
}

func sameGeometry(a, b Geometry) bool {
	rest := slices.Clone(b.Instances)
	for _, in := range a.Instances {
		at := slices.Index(rest, in)
		if at < 0 {
			return false
		}
		rest = slices.Delete(rest, at, at+1)
	}
	return a.Enabled == b.Enabled && len(rest) == 0
}

// end brings a GPU to what is wanted, or else back to what was before, and removes
// the record. In the second case why says why. If it fails the record stays.
func (x *Executor) end(r *record) (why, err error) {
	why = x.converge(r.GPU, r.Wanted, forward)
	if why != nil {
		if err := x.converge(r.GPU, r.Before, back); err != nil {
			return nil, fmt.Errorf("%w; and back again: %w", why, err)
		}
	}
	if err := x.journal.end(r.GPU); err != nil {
		return nil, errors.Join(why, fmt.Errorf("journal of MIG changes: %w", err))
	}
	return why, nil
}

// Outcome is how an interrupted change has ended.
type Outcome struct {
	GPU string
	// Done says that the GPU is cut as was wanted; else it is as it was before, and
	// Err says why.
	Done bool
	Err  error
	// Gone says that the machine does not have the GPU. Its change stays in the
	// journal and is ended when it comes back.
	Gone bool
}

func (o Outcome) String() string {
	switch {
	case o.Gone:
		return o.GPU + " is not in the machine; its change waits for it"
	case o.Done:
		return o.GPU + " is cut as was wanted"
	}
	return fmt.Sprintf("%s is cut as before: %v", o.GPU, o.Err)
}

// Recover ends the changes that an earlier process left: towards what was wanted,
// and where that fails, back. A change that it cannot end is in the error and stays
// in the journal; the others are ended all the same. It must be called before any
// Apply, and again while it fails. Of a GPU that is gone it tells once.
func (x *Executor) Recover() ([]Outcome, error) {
	records, err := x.journal.load()
	var errs []error
	if err != nil {
		errs = append(errs, fmt.Errorf("journal of MIG changes: %w", err))
	}
	if len(records) > 0 {
		// Whoever wrote them may have died before their names were safe.
		if err := x.journal.sync(); err != nil {
			return nil, errors.Join(append(errs, fmt.Errorf("journal of MIG changes: %w", err))...)
		}
	}
	var outcomes []Outcome
	for _, r := range records {
		m, err := x.hardware.Read()
		if err == nil && m.ByUUID(r.GPU) == nil {
			if !x.missed[r.GPU] {
				x.missed[r.GPU] = true
				outcomes = append(outcomes, Outcome{GPU: r.GPU, Gone: true})
			}
			continue
		}
		delete(x.missed, r.GPU)
		var why error
		if err == nil {
			why, err = x.end(r)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("GPU %s: %w", r.GPU, err))
			continue
		}
		outcomes = append(outcomes, Outcome{GPU: r.GPU, Done: why == nil, Err: why})
	}
	return outcomes, errors.Join(errs...)
}

// Pending lists the GPUs whose change is under way.
func (x *Executor) Pending() ([]string, error) {
	records, err := x.journal.load()
	uuids := make([]string, len(records))
	for i, r := range records {
		uuids[i] = r.GPU
	}
	return uuids, err
}

// maxSteps is above the number of steps of any change: 16 devices to destroy, as
// many to make, a mode and a reset.
const maxSteps = 40

// converge brings a GPU to a geometry, step by step. Each step is found from what
// the GPU is then, and the last reading is the proof that it is there.
func (x *Executor) converge(uuid string, to Geometry, way direction) error {
	for range maxSteps {
		g, err := x.read(uuid)
		if err != nil {
			return err
		}
		s, more := nextStep(&g.MIG, to, way)
		if !more {
			return nil
		}
		if err := x.do(uuid, s); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return fmt.Errorf("does not become what is wanted, %s, in %d steps", to, maxSteps)
}

// read returns a GPU that answers.
func (x *Executor) read(uuid string) (*gpu.GPU, error) {
	m, err := x.hardware.Read()
	if err != nil {
		return nil, err
	}
	g := m.ByUUID(uuid)
	if g == nil {
		return nil, gpu.ErrNotFound
	}
	if g.Health.State == gpu.Lost {
		return nil, fmt.Errorf("%w: %s", gpu.ErrLost, g.Health.Reason)
	}
	return g, nil
}

func (x *Executor) do(uuid string, s step) error {
	switch s.op {
	case setMode:
		return x.hardware.SetMIGMode(uuid, s.on)
	case reset:
		return x.hardware.Reset(uuid)
	case destroy:
		return x.hardware.DestroyMIG(s.uuid)
	default:
		_, err := x.hardware.CreateMIG(uuid, s.instance)
		return err
	}
}
