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
	// Unhealthy is the reason, "" for healthy.
	Unhealthy  string     `json:"unhealthy,omitempty"`
	MIGEnabled bool       `json:"migEnabled,omitempty"`
	MIGPending bool       `json:"migPending,omitempty"`
	Instances  []instance `json:"instances,omitempty"`
	// Created is the number of MIG devices ever made, so that no UUID comes twice.
	Created   int           `json:"created,omitempty"`
	Processes []gpu.Process `json:"processes,omitempty"`
}

// instance is a GPU instance with its compute instance, which is always number
// 0: it is the only one.
type instance struct {
	UUID string          `json:"uuid"`
	GI   int             `json:"gi"`
	MIG  gpu.MIGInstance `json:"mig"`
}

// newState is the state of a machine as it is delivered.
func newState(h *hardware, seed string) *state {
	s := &state{Version: stateVersion, Seed: seed, GPUs: make([]gpuState, len(h.units))}
	for i, u := range h.units {
		g := &s.GPUs[i]
		g.MIGEnabled, g.MIGPending = u.migEnabled, u.migEnabled
		for _, in := range u.geometry {
			s.create(i, in)
		}
	}
	return s
}

// create adds an instance to a GPU; that it fits is checked before.
func (s *state) create(index int, in gpu.MIGInstance) *instance {
	g := &s.GPUs[index]
	gi := 1
	for slices.ContainsFunc(g.Instances, func(i instance) bool { return i.GI == gi }) {
		gi++
	}
	g.Instances = append(g.Instances, instance{UUID: migUUID(s.Seed, index, g.Created), GI: gi, MIG: in})
	g.Created++
	return &g.Instances[len(g.Instances)-1]
}

func (g *gpuState) geometry() []gpu.MIGInstance {
	geometry := make([]gpu.MIGInstance, len(g.Instances))
	for i, in := range g.Instances {
		geometry[i] = in.MIG
	}
	return geometry
}

// hasInstance says whether GI and CI name an instance of the GPU.
func (g *gpuState) hasInstance(gi, ci int) bool {
	return ci == 0 && slices.ContainsFunc(g.Instances, func(in instance) bool { return in.GI == gi })
}

// uses says whether a process runs in the instance.
func (g *gpuState) uses(gi int) bool {
	return slices.ContainsFunc(g.Processes, func(p gpu.Process) bool { return p.GI == gi })
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
		if err := s.GPUs[i].check(h.units[i].mig); err != nil {
			return nil, fmt.Errorf("gpu %d: %w", i, err)
		}
	}
	return &s, nil
}

func (g *gpuState) check(table *gpu.MIGTable) error {
	if table == nil && (g.MIGEnabled || g.MIGPending) {
		return errors.New("MIG mode is on, the product cannot do MIG")
	}
	if !g.MIGEnabled && len(g.Instances) > 0 {
		return fmt.Errorf("%d MIG instances, MIG mode is off", len(g.Instances))
	}
	geometry := g.geometry()
	for i, in := range g.Instances {
		if err := table.Check(geometry[:i], in.MIG); err != nil {
			return fmt.Errorf("MIG instance %d: %w", i, err)
		}
	}
	return nil
}
