package health

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// stateVersion is the format of the state.
const stateVersion = 1

type state struct {
	Version int                 `json:"version"`
	BootID  string              `json:"bootID"`
	GPUs    map[string]*tracked `json:"gpus"`
}

// Encode returns the state as JSON. Equal states give equal bytes, and a state does
// not change while nothing happens. It fails only with times after the year 9999.
func (t *Tracker) Encode() ([]byte, error) {
	return json.Marshal(state{stateVersion, t.bootID, t.gpus})
}

// Restore continues from what Encode returned. An error means that it is damaged or
// of another version; the caller then starts with New.
func Restore(p Policy, bootID string, data []byte) (*Tracker, error) {
	var s state
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&s); err != nil {
		return nil, fmt.Errorf("health state: %w", err)
	}
	if _, err := decoder.Token(); !errors.Is(err, io.EOF) {
		return nil, errors.New("health state: something follows its end")
	}
	if s.Version != stateVersion {
		return nil, fmt.Errorf("health state: version is %d, want %d", s.Version, stateVersion)
	}
	t := New(p, bootID)
	for uuid, g := range s.GPUs {
		if uuid == "" || g == nil {
			return nil, errors.New("health state: a GPU is empty")
		}
		if err := g.check(); err != nil {
			return nil, fmt.Errorf("health state: GPU %s: %w", uuid, err)
		}
		if s.BootID != t.bootID {
			g.reboot()
		}
		t.gpus[uuid] = g
	}
	return t, nil
}

// reboot ends all faults with the next reading, so that this one can tell what has
// changed.
func (s *tracked) reboot() {
	s.Events = nil
	s.Rebooted = true
	for _, u := range s.MIG {
		u.Rebooted = true
	}
}

// check reports what no Tracker would have written.
func (s *tracked) check() error {
	if err := s.unit.check(); err != nil {
		return err
	}
	for gi, f := range s.Events {
		if gi < gpu.AnyInstance || gi >= maxInstances || f.XID < 1 || f.At.IsZero() {
			return fmt.Errorf("events: no event of instance %d is XID %d at %s", gi, f.XID, f.At)
		}
	}
	for uuid, u := range s.MIG {
		if uuid == "" || u == nil {
			return errors.New("mig: a device is empty")
		}
		if err := u.check(); err != nil {
			return fmt.Errorf("mig: %s: %w", uuid, err)
		}
	}
	return nil
}

func (u *unit) check() error {
	switch {
	case len(u.Falls) > maxFalls:
		return fmt.Errorf("falls: %d, want at most %d", len(u.Falls), maxFalls)
	case !slices.IsSortedFunc(u.Falls, time.Time.Compare):
		return errors.New("falls: not in order")
	case u.faulty() && len(u.Falls) == 0:
		return errors.New("falls: none, although there is a fault")
	case u.XID.XID < 0 || (u.XID.XID == 0) != u.XID.At.IsZero():
		return errors.New("xid: number and time contradict each other")
	case u.Probe == "" && (u.Lost || !u.ProbeEnded.IsZero()):
		return errors.New("probe: without a reason")
	case u.Recovery == gpu.RecoveryNone && !u.RecoveryEnded.IsZero():
		return errors.New("recoveryEnded: without an action")
	}
	return nil
}
