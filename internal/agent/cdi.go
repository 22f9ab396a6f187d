package agent

import (
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// describeAgain is the pause after CDI specs could not be made.
const describeAgain = 30 * time.Second

// cdiState is what the CDI specs on disk were made from.
type cdiState struct {
	// key stands for machine and flags, held for the holders.
	key, held string
	specs     []*specs.Spec
	// failedAt is when something last failed, zero if nothing did.
	failedAt time.Time
	// names are the GPUs and MIG devices that are in the specs on disk.
	names map[string]bool
}

// usesCDI says whether containers are told their devices by CDI names.
func usesCDI(flags *sharing.Flags) bool {
	return slices.ContainsFunc(flags.Plugin.DeviceListStrategies, func(s sharing.DeviceListStrategy) bool {
		return s == sharing.ListCDICRI || s == sharing.ListCDIAnnotations
	})
}

// writeCDI keeps the CDI specs those of machine and config. Names that
// containers hold stay in them. Making specs reads the driver's files, so it is
// done only when machine or config changed, and after a failure not at once.
func (a *agent) writeCDI(now time.Time) {
	flags := &a.config.current.Flags
	if !usesCDI(flags) {
		a.cdi = cdiState{}
		a.well("cdi")
		return
	}
	key, held := a.cdiKey(), strings.Join(a.held, " ")
	failed := !a.cdi.failedAt.IsZero()
	if key == a.cdi.key && held == a.cdi.held && (!failed || now.Sub(a.cdi.failedAt) < describeAgain) {
		return
	}
	var errs []error
	if key != a.cdi.key || failed {
		a.cdi.specs = nil
		classes := []cdi.Class{cdi.GPU}
		for _, extra := range []struct {
			class cdi.Class
			on    bool
		}{{cdi.GDRCopy, flags.GDRCopyEnabled}, {cdi.GDS, flags.GDSEnabled}, {cdi.MOFED, flags.MOFEDEnabled}} {
			if extra.on {
				classes = append(classes, extra.class)
			}
		}
		for _, class := range classes {
			// A spec may come with an error about some of its devices.
			spec, err := a.Describe(a.machine, class, flags)
			errs = append(errs, err)
			if spec != nil {
				a.cdi.specs = append(a.cdi.specs, spec)
			}
		}
	}
	names := make(map[string]bool)
	for _, spec := range a.cdi.specs {
		if err := cdi.Write(a.CDIDir, spec, a.held); err != nil {
			errs = append(errs, err)
			continue
		}
		for _, d := range spec.Devices {
			names[d.Name] = true
		}
	}
	err := errors.Join(errs...)
	if err != nil {
		// A spec that could not be replaced is still there with its names.
		maps.Copy(names, a.cdi.names)
	}
	a.cdi.key, a.cdi.held, a.cdi.names, a.cdi.failedAt = key, held, names, time.Time{}
	if err != nil {
		a.cdi.failedAt = now
		a.trouble("cdi", "%v", err)
		return
	}
	a.well("cdi")
}

// cdiKey changes whenever the specs would.
func (a *agent) cdiKey() string {
	flags := a.config.current.Flags
	key := fmt.Sprint(flags, a.machine.Driver)
	for _, g := range a.machine.GPUs {
		key += fmt.Sprint(" ", g.UUID, g.Minor, g.Health.State, g.MIG)
	}
	return key
}
