package mig

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"

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
	dir      string
}

// NewExecutor returns an Executor that keeps its journal in a folder: a file for
// each GPU whose change is under way.
func NewExecutor(h Hardware, dir string) *Executor { return &Executor{hardware: h, dir: dir} }

// record is a change under way.
type record struct {
	Version int      `json:"version"`
	GPU     string   `json:"gpu"`
	Before  Geometry `json:"before"`
	Wanted  Geometry `json:"wanted"`
}

const (
	recordVersion = 1
	recordSuffix  = ".json"
)

func (x *Executor) path(uuid string) string { return filepath.Join(x.dir, uuid+recordSuffix) }

// Apply makes a change. If a step fails, the GPU is brought back to how it was, and
// the error is that of the step. If that fails, too, both are in the error, and
// Recover must end it.
func (x *Executor) Apply(c *Change) error {
	if _, err := os.Lstat(x.path(c.GPU)); err == nil {
		return fmt.Errorf("GPU %d (%s): an earlier change of its MIG devices has not ended", c.Index, c.GPU)
	}
	r := &record{Version: recordVersion, GPU: c.GPU, Before: c.Before, Wanted: c.Wanted}
	if err := x.save(r); err != nil {
		return fmt.Errorf("journal of MIG changes: %w", err)
	}
	err := x.converge(r.GPU, r.Wanted)
	if err != nil {
		if back := x.converge(r.GPU, r.Before); back != nil {
			return errors.Join(err, fmt.Errorf("and back again: %w", back))
		}
		err = fmt.Errorf("%w; the GPU is cut as before", err)
	}
	return errors.Join(err, x.drop(r.GPU))
}

// Outcome is how an interrupted change has ended.
type Outcome struct {
	GPU string
	// Done says that the GPU is cut as was wanted, else it is as it was before; Gone
	// that the machine has it no more.
	Done, Gone bool
}

func (o Outcome) String() string {
	switch {
	case o.Gone:
		return o.GPU + " is no more in the machine"
	case o.Done:
		return o.GPU + " is cut as was wanted"
	}
	return o.GPU + " is cut as before"
}

// Recover ends the changes that an earlier process left: towards what was wanted,
// and where that fails, back. A change that it cannot end is in the error and stays
// in the journal; the others are ended all the same. It must be called before any
// Apply, and again while it fails.
func (x *Executor) Recover() ([]Outcome, error) {
	records, err := x.load()
	if err != nil {
		return nil, fmt.Errorf("journal of MIG changes: %w", err)
	}
	var outcomes []Outcome
	var errs []error
	for _, r := range records {
		o, err := x.end(r)
		if err == nil {
			err = x.drop(r.GPU)
		}
		if err != nil {
			errs = append(errs, err)
			continue
		}
		outcomes = append(outcomes, o)
	}
	return outcomes, errors.Join(errs...)
}

func (x *Executor) end(r *record) (Outcome, error) {
	m, err := x.hardware.Read()
	if err != nil {
		return Outcome{}, err
	}
	if m.ByUUID(r.GPU) == nil {
		return Outcome{GPU: r.GPU, Gone: true}, nil
	}
	err = x.converge(r.GPU, r.Wanted)
	if err == nil {
		return Outcome{GPU: r.GPU, Done: true}, nil
	}
	if back := x.converge(r.GPU, r.Before); back != nil {
		return Outcome{}, errors.Join(err, fmt.Errorf("and back again: %w", back))
	}
	return Outcome{GPU: r.GPU}, nil
}

// Pending lists the GPUs whose change is under way.
func (x *Executor) Pending() ([]string, error) {
	records, err := x.load()
	var uuids []string
	for _, r := range records {
		uuids = append(uuids, r.GPU)
	}
	return uuids, err
}

// maxSteps is above the number of steps of any change: 16 devices to destroy, as
// many to make, a mode and a reset.
const maxSteps = 40

// converge brings a GPU to a geometry, step by step. Each step is found from what
// the GPU is then, and the last reading is the proof that it is there.
func (x *Executor) converge(uuid string, want Geometry) error {
	for range maxSteps {
		m, err := x.hardware.Read()
		if err != nil {
			return err
		}
		g := m.ByUUID(uuid)
		if g == nil {
			return fmt.Errorf("GPU %s: %w", uuid, gpu.ErrNotFound)
		}
		if g.Health.State == gpu.Lost {
			return fmt.Errorf("GPU %d (%s): %w: %s", g.Index, uuid, gpu.ErrLost, g.Health.Reason)
		}
		s, more := nextStep(&g.MIG, want)
		if !more {
			return nil
		}
		if err := x.do(uuid, s); err != nil {
			return fmt.Errorf("%s: %w", s, err)
		}
	}
	return fmt.Errorf("GPU %s does not become what is wanted, %s, in %d steps", uuid, want, maxSteps)
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

// save writes a record so that it outlives even the host.
func (x *Executor) save(r *record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(x.dir, 0o755); err != nil {
		return err
	}
	path := x.path(r.GPU)
	f, err := os.OpenFile(path+".new", os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err == nil {
		err = f.Sync()
	}
	if err = errors.Join(err, f.Close()); err != nil {
		return err
	}
	if err := os.Rename(path+".new", path); err != nil {
		return err
	}
	return x.sync()
}

// drop removes a record.
func (x *Executor) drop(uuid string) error {
	if err := os.Remove(x.path(uuid)); err != nil {
		return fmt.Errorf("journal of MIG changes: %w", err)
	}
	return x.sync()
}

// sync makes the names in the folder outlive the host.
func (x *Executor) sync() error {
	d, err := os.Open(x.dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

// load reads all records, in the order of names. A file that was not finished is
// of a change that had not begun.
func (x *Executor) load() ([]*record, error) {
	entries, err := os.ReadDir(x.dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, err
	}
	var records []*record
	for _, e := range entries {
		if !strings.HasSuffix(e.Name(), recordSuffix) {
			continue
		}
		path := filepath.Join(x.dir, e.Name())
		data, err := os.ReadFile(path)
		if err != nil {
			return nil, err
		}
		r := &record{}
		if err := json.Unmarshal(data, r); err != nil {
			return nil, fmt.Errorf("%s: %w; cut the GPU by hand and remove the file", path, err)
		}
		if r.Version != recordVersion || r.GPU+recordSuffix != e.Name() {
			return nil, fmt.Errorf("%s: version %d of GPU %q, this program writes version %d of its GPU; cut the GPU by hand and remove the file",
				path, r.Version, r.GPU, recordVersion)
		}
		records = append(records, r)
	}
	return records, nil
}
