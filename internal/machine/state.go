package machine

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// stateVersion is the format of the state; another one is refused.
const stateVersion = 1

// maxEvents bounds the log of events. A reader that falls further behind misses
// the oldest, as with a driver.
const maxEvents = 256

// state is everything of a machine that can change. It is stored as JSON.
type state struct {
	Version int `json:"version"`
	// Seed makes the UUIDs.
	Seed       string     `json:"seed"`
	DriverDown bool       `json:"driverDown,omitempty"`
	GPUs       []gpuState `json:"gpus"`
	// FailedLinks are the pairs, lower index first, whose query fails.
	FailedLinks []linkPair `json:"failedLinks,omitempty"`
	// EventCount is the number of events ever; Events are the last of them.
	EventCount int         `json:"eventCount"`
	Events     []gpu.Event `json:"events,omitempty"`
}

// linkPair is a pair as JSON.
type linkPair [2]int

type gpuState struct {
	Lost bool `json:"lost,omitempty"`
	// LostReason is "" for the usual one.
	LostReason string `json:"lostReason,omitempty"`
	// Unhealthy is the reason, "" for healthy.
	Unhealthy  string       `json:"unhealthy,omitempty"`
	Recovery   gpu.Recovery `json:"recovery,omitempty"`
	MIGEnabled bool         `json:"migEnabled,omitempty"`
	MIGPending bool         `json:"migPending,omitempty"`
	Instances  []instance   `json:"instances,omitempty"`
	// Created is the number of MIG devices ever made, so that no UUID comes twice.
	Created   int           `json:"created,omitempty"`
	Processes []gpu.Process `json:"processes,omitempty"`
}

// instance is a MIG device: a GPU instance with its compute instance, or one of
// several compute instances where the description lists them.
type instance struct {
	UUID string          `json:"uuid"`
	GI   int             `json:"gi"`
	CI   int             `json:"ci,omitempty"`
	MIG  gpu.MIGInstance `json:"mig"`
	// As is what the driver reports of it, nil where that is what the catalogue says.
	As *reported `json:"as,omitempty"`
}

// reported is the part of a MIG device that the catalogue would know.
type reported struct {
	Profile    string            `json:"profile"`
	MemoryMiB  int               `json:"memoryMiB"`
	Attributes gpu.MIGAttributes `json:"attributes"`
}

// newState is the state of a machine as it is delivered.
func newState(h *hardware, seed string) *state {
	s := &state{Version: stateVersion, Seed: seed, GPUs: make([]gpuState, len(h.units))}
	for i, u := range h.units {
		s.GPUs[i] = u.delivered
		s.GPUs[i].Instances = nil
		for _, in := range u.delivered.Instances {
			s.create(i, in)
		}
	}
	return s
}

// create adds an instance to a GPU and gives it a UUID; that it fits is checked
// before.
func (s *state) create(index int, in instance) *instance {
	g := &s.GPUs[index]
	in.UUID = migUUID(s.Seed, index, g.Created)
	g.Instances = append(g.Instances, in)
	g.Created++
	return &g.Instances[len(g.Instances)-1]
}

// freeGI is the number that the next GPU instance gets.
func freeGI(instances []instance) int {
	gi := 1
	for slices.ContainsFunc(instances, func(in instance) bool { return in.GI == gi }) {
		gi++
	}
	return gi
}

// hasInstance says whether GI and CI name an instance of the GPU; CI may be
// gpu.AnyInstance.
func (g *gpuState) hasInstance(gi, ci int) bool {
	return slices.ContainsFunc(g.Instances, func(in instance) bool {
		return in.GI == gi && (in.CI == ci || ci == gpu.AnyInstance)
	})
}

// uses says whether a process runs in the instance.
func (g *gpuState) uses(in *instance) bool {
	return slices.ContainsFunc(g.Processes, func(p gpu.Process) bool { return p.GI == in.GI && p.CI == in.CI })
}

// log appends an event and forgets the oldest.
func (s *state) log(e gpu.Event) {
	s.Events = append(s.Events, e)
	s.EventCount++
	if over := len(s.Events) - maxEvents; over > 0 {
		s.Events = slices.Delete(s.Events, 0, over)
	}
}

func gpuUUID(seed string, index int) string {
	return "GPU-" + uuid(fmt.Sprintf("gpu %d of %s", index, seed))
}

func migUUID(seed string, index, serial int) string {
	return "MIG-" + uuid(fmt.Sprintf("mig %d of gpu %d of %s", serial, index, seed))
}

// uuid makes the same text into the same 128 bits, in the usual form.
func uuid(text string) string {
	h := sha256.Sum256([]byte(text))
	return fmt.Sprintf("%x-%x-%x-%x-%x", h[:4], h[4:6], h[6:8], h[8:10], h[10:16])
}

func (s *state) encode() ([]byte, error) { return json.MarshalIndent(s, "", " ") }

// decodeState reads a state of the given hardware and refuses one that the
// hardware cannot be in.
func decodeState(data []byte, h *hardware) (*state, error) {
	var s state
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, err
	}
	if s.Version != stateVersion {
		return nil, fmt.Errorf("version %d, want %d", s.Version, stateVersion)
	}
	if len(s.GPUs) != len(h.units) {
		return nil, fmt.Errorf("is of %d GPUs, the machine has %d", len(s.GPUs), len(h.units))
	}
	if len(s.Events) > s.EventCount {
		return nil, fmt.Errorf("eventCount is %d, but %d events are listed", s.EventCount, len(s.Events))
	}
	for i := range s.GPUs {
		if err := s.GPUs[i].check(&h.units[i]); err != nil {
			return nil, fmt.Errorf("gpu %d: %w", i, err)
		}
	}
	return &s, nil
}

func (g *gpuState) check(u *unit) error {
	if !u.gpu.MIG.Capable && (g.MIGEnabled || g.MIGPending) {
		return errors.New("MIG mode is on, the product cannot do MIG")
	}
	if !g.MIGEnabled && len(g.Instances) > 0 {
		return fmt.Errorf("%d MIG instances, MIG mode is off", len(g.Instances))
	}
	for i, in := range g.Instances {
		before := gpuState{Instances: g.Instances[:i]}
		if before.hasInstance(in.GI, in.CI) {
			return fmt.Errorf("MIG instance %d: GI %d, CI %d is there twice", i, in.GI, in.CI)
		}
		if in.As != nil {
			continue // the catalogue has no say in it
		}
		if err := u.fits(before.Instances, in.MIG); err != nil {
			return fmt.Errorf("MIG instance %d: %w", i, err)
		}
	}
	return nil
}
