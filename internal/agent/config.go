package agent

import (
	"bytes"
	"os"
	"path/filepath"

	corev1 "k8s.io/api/core/v1"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// lastGood is the file that keeps the config in force over a restart.
const lastGood = "last-good-config.yaml"

// configState is the config in force and the one that would be.
type configState struct {
	// current is in force, nil while there is none.
	current *sharing.Config
	// candidate was read and has made no plan for this machine yet. It is tried
	// again in each step: the machine may change to fit it.
	candidate *configFile
	// seen is the last content of the file, good or bad.
	seen []byte
	// unsaved is the content in force that has yet to be kept as last good.
	unsaved []byte
	// refused is why the present file is not in force, "" if it is.
	refused string
}

// configFile is a config with where it comes from.
type configFile struct {
	config *sharing.Config
	text   []byte
}

// loadConfig reads the config file if it is new.
func (a *agent) loadConfig() {
	if a.ConfigFile == "" {
		if a.config.current == nil {
			a.config.current = sharing.Default()
			a.Override(a.config.current)
		}
		return
	}
	text, err := os.ReadFile(a.ConfigFile)
	if err != nil {
		a.trouble("config", "%v; the config in force stays", err)
		return
	}
	a.well("config")
	if a.config.seen != nil && bytes.Equal(text, a.config.seen) {
		return
	}
	a.config.seen, a.config.candidate, a.config.refused = text, nil, ""
	config, warnings, err := sharing.Parse(a.ConfigFile, text)
	if err != nil {
		a.reject(err)
		return
	}
	a.Override(config)
	a.warn(warnings)
	a.config.candidate = &configFile{config, text}
}

func (a *agent) warn(warnings []sharing.Warning) {
	for _, w := range warnings {
		a.Log.Warn("config", "warning", w.String())
		a.api.event(corev1.EventTypeWarning, reasonConfigWarning, "%s", w)
	}
}

// reject reports, once for each reason, that the file is not put in force.
func (a *agent) reject(err error) {
	if a.config.refused == err.Error() {
		return
	}
	a.config.refused = err.Error()
	stays := "the config in force stays"
	if a.config.current == nil {
		stays = "no config is in force"
	}
	a.Log.Error("config refused, "+stays, "error", err)
	a.api.event(corev1.EventTypeWarning, reasonConfigRejected, "%s: %v", stays, err)
}

// makePlan turns config and machine into what the node offers. A config that
// this machine cannot serve is refused like one that cannot be read, and tried
// again when the machine has changed. Where the machine changed so that the
// config in force makes no plan any more, the last plan stands for the devices
// that are still there.
func (a *agent) makePlan() {
	a.saveConfig()
	if c := a.config.candidate; c != nil {
		plan, warnings, err := c.config.Plan(a.machine)
		if err == nil {
			a.config.current, a.config.candidate, a.config.unsaved, a.config.refused = c.config, nil, c.text, ""
			a.plan = plan
			a.saveConfig()
			a.warn(warnings)
			a.Log.Info("config applied", "file", a.ConfigFile)
			a.api.event(corev1.EventTypeNormal, reasonConfigApplied, "the device-plugin config is in force")
			a.well("plan")
			return
		}
		a.reject(err)
	}
	if a.config.current == nil && !a.restoreConfig() {
		return
	}
	plan, _, err := a.config.current.Plan(a.machine)
	if err == nil {
		a.plan = plan
		a.well("plan")
		return
	}
	a.trouble("plan", "%v", err)
	if a.plan != nil {
		a.plan = remaining(a.plan, a.machine)
	}
}

// restoreConfig puts the last good config in force, which a restart must not
// lose, and says whether there is one.
func (a *agent) restoreConfig() bool {
	path := filepath.Join(a.StateDir, lastGood)
	text, err := os.ReadFile(path)
	if err != nil {
		return false
	}
	config, _, err := sharing.Parse(path, text)
	if err != nil {
		return false // of another version
	}
	a.Override(config)
	a.config.current = config
	a.Log.Warn("the last good config is in force", "file", path)
	return true
}

// saveConfig keeps what is in force as the last good config.
func (a *agent) saveConfig() {
	if a.config.unsaved == nil {
		return
	}
	path := filepath.Join(a.StateDir, lastGood)
	if err := replaceFile(path, a.config.unsaved); err != nil {
		a.trouble("state", "%v", err)
		return
	}
	a.config.unsaved = nil
	a.well("state")
}

// failOnInitError is what the config says about a driver that does not answer
// at the start.
func (c *configState) failOnInitError() bool {
	switch {
	case c.candidate != nil:
		return c.candidate.config.Flags.FailOnInitError
	case c.current != nil:
		return c.current.Flags.FailOnInitError
	}
	return sharing.Default().Flags.FailOnInitError
}

// remaining is a plan without the devices that the machine has no more, and
// with the present health of the others.
func remaining(plan *sharing.Plan, m *gpu.Machine) *sharing.Plan {
	left := &sharing.Plan{}
	for _, r := range plan.Resources {
		devices := r.Devices
		r.Devices = nil
		for _, d := range devices {
			if g := m.Parent(d.ID.Base); g != nil && (d.ID.Base != g.UUID || !g.MIG.Enabled) {
				d.Health = g.HealthOf(d.ID.Base)
				r.Devices = append(r.Devices, d)
			}
		}
		if len(r.Devices) > 0 {
			left.Resources = append(left.Resources, r)
		}
	}
	return left
}
