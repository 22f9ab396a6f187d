package mig

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
)

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
	// newSuffix marks a record that is being written. Its change has not begun.
	newSuffix = ".new"
)

// disk is what a journal needs of a folder.
type disk interface {
	// write makes or replaces a file, and lets its content outlive the host.
	write(name string, data []byte) error
	rename(from, to string) error
	remove(name string) error
	// sync lets the names of the files outlive the host.
	sync() error
	// list returns the names of the files in order, none where there is no folder.
	list() ([]string, error)
	read(name string) ([]byte, error)
}

// journal keeps the changes that are under way, one for each GPU.
type journal struct{ disk }

// begin writes a record. If it fails there is none.
func (j journal) begin(r *record) error {
	data, err := json.Marshal(r)
	if err != nil {
		return err
	}
	name := r.GPU + recordSuffix
	if err := j.write(name+newSuffix, data); err != nil {
		return err
	}
	if err := j.rename(name+newSuffix, name); err != nil {
		return err
	}
	if err := j.sync(); err != nil {
		// Whoever finds the record would make a change that nobody waits for.
		return errors.Join(err, j.end(r.GPU))
	}
	return nil
}

// end removes a record.
func (j journal) end(uuid string) error {
	if err := j.remove(uuid + recordSuffix); err != nil {
		return err
	}
	return j.sync()
}

// open says whether a change of the GPU is under way.
func (j journal) open(uuid string) (bool, error) {
	_, err := j.read(uuid + recordSuffix)
	if errors.Is(err, fs.ErrNotExist) {
		return false, nil
	}
	return true, err
}

// load reads all records in the order of UUIDs. The error is of those that cannot
// be read.
func (j journal) load() ([]*record, error) {
	names, err := j.list()
	if err != nil {
		return nil, err
	}
	var records []*record
	var errs []error
	for _, name := range names {
		uuid, ok := strings.CutSuffix(name, recordSuffix)
		if !ok {
			continue
		}
		r := &record{}
		data, err := j.read(name)
		if err == nil {
			err = json.Unmarshal(data, r)
		}
		switch {
		case err != nil:
		case r.Version != recordVersion:
			err = fmt.Errorf("is of version %d, this program knows %d", r.Version, recordVersion)
		case r.GPU != uuid:
			err = fmt.Errorf("is about GPU %q", r.GPU)
		default:
			records = append(records, r)
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w; cut the GPU by hand and remove the file", name, err))
		}
	}
	return records, errors.Join(errs...)
}

// folder is a disk.
type folder string

func (f folder) path(name string) string { return filepath.Join(string(f), name) }

func (f folder) write(name string, data []byte) error {
	if err := os.MkdirAll(string(f), 0o755); err != nil {
		return err
	}
	file, err := os.OpenFile(f.path(name), os.O_CREATE|os.O_WRONLY|os.O_TRUNC, 0o600)
	if err != nil {
		return err
	}
	_, err = file.Write(data)
	if err == nil {
		err = file.Sync()
	}
	return errors.Join(err, file.Close())
}

func (f folder) rename(from, to string) error { return os.Rename(f.path(from), f.path(to)) }

func (f folder) remove(name string) error { return os.Remove(f.path(name)) }

func (f folder) sync() error {
	d, err := os.Open(string(f))
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}

func (f folder) list() ([]string, error) {
	entries, err := os.ReadDir(string(f))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = e.Name()
	}
	return names, err
}

func (f folder) read(name string) ([]byte, error) { return os.ReadFile(f.path(name)) }
