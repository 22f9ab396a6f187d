package machine

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"syscall"
)

// store keeps the encoded state.
type store interface {
	// lock keeps others from changing the state until unlock.
	lock() (unlock func(), err error)
	load() ([]byte, error)
	// save replaces the state in one step. The caller holds the lock.
	save(data []byte) error
	close() error
}

// memory is a store of one process; its user serialises the calls.
type memory struct{ data []byte }

func (m *memory) lock() (func(), error)  { return func() {}, nil }
func (m *memory) load() ([]byte, error)  { return m.data, nil }
func (m *memory) save(data []byte) error { m.data = data; return nil }
func (m *memory) close() error           { return nil }

// The files of a folder. The description is written last and so says that the
// folder is complete.
const (
	descriptionFile = "machine.yaml"
	stateFile       = "state.json"
	lockFile        = "lock"
	filePerm        = 0o644
	dirPerm         = 0o755
)

// folder is a store that processes share.
type folder struct {
	dir string
	// guard is the file that is locked. It stays, unlike those that renames
	// replace.
	guard *os.File
}

func openFolder(dir string) (*folder, error) {
	guard, err := os.OpenFile(filepath.Join(dir, lockFile), os.O_RDWR|os.O_CREATE, filePerm)
	if err != nil {
		return nil, err
	}
	return &folder{dir, guard}, nil
}

func (f *folder) lock() (func(), error) {
	fd := int(f.guard.Fd())
	for {
		err := syscall.Flock(fd, syscall.LOCK_EX)
		if err == nil {
			break
		}
		if !errors.Is(err, syscall.EINTR) {
			return nil, fmt.Errorf("lock %s: %w", f.guard.Name(), err)
		}
	}
	return func() {
		// It cannot fail on a file that was just locked; the end of the process
		// unlocks as well.
		_ = syscall.Flock(fd, syscall.LOCK_UN)
	}, nil
}

// load needs no lock: a rename shows either the old file or the new one.
func (f *folder) load() ([]byte, error) { return os.ReadFile(f.path(stateFile)) }

func (f *folder) save(data []byte) error { return f.replace(stateFile, data) }

func (f *folder) close() error { return f.guard.Close() }

func (f *folder) path(name string) string { return filepath.Join(f.dir, name) }

// replace writes a file beside the old one and renames it. Under the lock one
// name for it is enough, and what a killed process leaves is overwritten.
func (f *folder) replace(name string, data []byte) error {
	temporary := f.path(name + ".new")
	if err := os.WriteFile(temporary, data, filePerm); err != nil {
		return err
	}
	return os.Rename(temporary, f.path(name))
}

// Init makes a folder that Open opens, with the machine as it is delivered. The
// seed makes the UUIDs and is usually the name of the node: machines of one seed
// and index have the same UUIDs. It fails with fs.ErrExist where the folder holds
// a machine already.
func Init(dir string, desc *Description, seed string) (err error) {
	if len(desc.text) == 0 {
		return errors.New("machine description: was not made by ParseDescription, Find or Builtin")
	}
	if err := os.MkdirAll(dir, dirPerm); err != nil {
		return fmt.Errorf("simulated machine: %w", err)
	}
	f, err := openFolder(dir)
	if err != nil {
		return fmt.Errorf("simulated machine: %w", err)
	}
	defer func() { err = errors.Join(err, f.close()) }()
	unlock, err := f.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := os.Stat(f.path(descriptionFile)); err == nil {
		return fmt.Errorf("simulated machine: %s: %w; remove the folder %s to make another", f.path(descriptionFile), fs.ErrExist, dir)
	}
	data, err := newState(&desc.hardware, seed).encode()
	if err != nil {
		return err
	}
	if err := f.save(data); err != nil {
		return fmt.Errorf("simulated machine: %w", err)
	}
	if err := f.replace(descriptionFile, desc.text); err != nil {
		return fmt.Errorf("simulated machine: %w", err)
	}
	return nil
}

// Open opens the machine in a folder that Init has made. Events from before are
// not delivered. Any number of handles and processes may have it open.
func Open(dir string) (*Machine, error) {
	file := filepath.Join(dir, descriptionFile)
	text, err := os.ReadFile(file)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%s is not the folder of a simulated machine: %w", dir, err)
	} else if err != nil {
		return nil, fmt.Errorf("simulated machine: %w", err)
	}
	desc, err := ParseDescription(file, text)
	if err != nil {
		return nil, err
	}
	f, err := openFolder(dir)
	if err != nil {
		return nil, fmt.Errorf("simulated machine: %w", err)
	}
	m := newMachine(desc, f, f.path(stateFile))
	s, err := m.view()
	if err != nil {
		return nil, errors.Join(err, f.close())
	}
	m.seen = s.EventCount
	return m, nil
}
