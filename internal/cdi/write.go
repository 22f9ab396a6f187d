package cdi

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"
)

// Path is the file of the spec of a kind in a folder of CDI specs.
func Path(dir, kind string) (string, error) {
	name, err := cdi.GenerateNameForSpec(&specs.Spec{Kind: kind})
	if err != nil {
		return "", fmt.Errorf("CDI kind %q: %w", kind, err)
	}
	return filepath.Join(dir, name+".json"), nil
}

// Write makes the spec the one of its kind in the folder, which it creates if
// need be. Devices of the spec that was there and that keep names stay, with
// the edits that they had, unless the new spec has a device of that name: keep
// are the names that containers hold. Nothing is touched where the file would
// not change, and a spec without devices, which CDI does not allow, is no file.
//
// The spec is not changed. Write must not run twice at a time for one file.
func Write(dir string, spec *specs.Spec, keep []string) error {
	path, err := Path(dir, spec.Kind)
	if err != nil {
		return err
	}
	old, err := os.ReadFile(path)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("CDI spec: %w", err)
	}
	merged := *spec
	merged.Devices = slices.Concat(spec.Devices, kept(path, spec, keep))
	if len(merged.Devices) == 0 {
		if err := os.Remove(path); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return fmt.Errorf("CDI spec: %w", err)
		}
		return nil
	}
	if merged.Version, err = specs.MinimumRequiredVersion(&merged); err != nil {
		return fmt.Errorf("CDI spec %s: %w", path, err)
	}
	data, err := json.MarshalIndent(&merged, "", "  ")
	if err != nil {
		return fmt.Errorf("CDI spec %s: %w", path, err)
	}
	data = append(data, '\n')
	if bytes.Equal(data, old) {
		return nil
	}
	if err := replace(path, data); err != nil {
		return fmt.Errorf("CDI spec %s: %w", path, err)
	}
	return nil
}

// kept returns the devices of the old file that stay, by name. An old file that
// is not a valid spec is of no use to a runtime either and has none.
func kept(path string, spec *specs.Spec, keep []string) []specs.Device {
	old, err := cdi.ReadSpec(path, 0)
	if err != nil {
		return nil
	}
	taken := make(map[string]bool)
	for _, d := range spec.Devices {
		taken[d.Name] = true
	}
	var devices []specs.Device
	for _, d := range old.Devices {
		if !taken[d.Name] && slices.Contains(keep, d.Name) {
			taken[d.Name] = true
			devices = append(devices, d)
		}
	}
	slices.SortFunc(devices, func(a, b specs.Device) int { return strings.Compare(a.Name, b.Name) })
	return devices
}

// replace puts data in the place of a file in one step, once it is read back as
// a runtime reads it. Runtimes pass over the temporary name, which has no
// extension of theirs.
func replace(path string, data []byte) error {
	dir := filepath.Dir(path)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	file, err := os.CreateTemp(dir, filepath.Base(path)+".*.tmp")
	if err != nil {
		return err
	}
	defer func() { _ = os.Remove(file.Name()) }() // fails after the rename, as it should
	_, err = file.Write(data)
	err = errors.Join(err, file.Chmod(0o644), file.Close())
	if err != nil {
		return err
	}
	if _, err := cdi.ReadSpec(file.Name(), 0); err != nil {
		return err
	}
	return os.Rename(file.Name(), path)
}
