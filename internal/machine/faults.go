package machine

import (
	"fmt"
	"slices"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// inject changes a GPU behind the driver's back.
func (m *Machine) inject(uuid, what string, change func(*state, *gpuState) error) error {
	return m.update(func(s *state) error {
		index, g, err := s.named(uuid, what)
		if err != nil {
			return err
		}
		if err := change(s, g); err != nil {
			return fail(index, uuid, what, err)
		}
		return nil
	})
}

// SetLost makes a GPU fall off the bus, or come back as it was. It sends no
// event; InjectXID with 79 is what a driver reports then.
func (m *Machine) SetLost(uuid string, lost bool) error {
	return m.inject(uuid, "set lost", func(_ *state, g *gpuState) error {
		g.Lost, g.LostReason = lost, ""
		return nil
	})
}

// SetUnhealthy makes Read report the GPU as unhealthy for a reason, which must not
// be empty. A reset does not cure it; ClearUnhealthy does.
func (m *Machine) SetUnhealthy(uuid, reason string) error {
	return m.inject(uuid, "set unhealthy", func(_ *state, g *gpuState) error {
		if reason == "" {
			return fmt.Errorf("no reason given: %w", gpu.ErrInvalid)
		}
		g.Unhealthy = reason
		return nil
	})
}

// ClearUnhealthy ends what SetUnhealthy began.
func (m *Machine) ClearUnhealthy(uuid string) error {
	return m.inject(uuid, "clear unhealthy", func(_ *state, g *gpuState) error {
		g.Unhealthy = ""
		return nil
	})
}

// SetRecovery makes the driver say that something must be done with a GPU. A reset
// clears an action that is one.
func (m *Machine) SetRecovery(uuid string, action gpu.Recovery) error {
	return m.inject(uuid, "set recovery", func(_ *state, g *gpuState) error {
		if action < gpu.RecoveryNone {
			return fmt.Errorf("recovery action %d: %w", int(action), gpu.ErrInvalid)
		}
		g.Recovery = action
		return nil
	})
}

// InjectXID makes the driver report an XID, from 1, of a GPU, or of one MIG device
// that gi and ci name. ci is gpu.AnyInstance for an event about the GPU instance,
// both are for one about the whole GPU. The GPU may be lost.
func (m *Machine) InjectXID(uuid string, xid, gi, ci int) error {
	return m.inject(uuid, "inject XID", func(s *state, g *gpuState) error {
		if xid < 1 {
			return fmt.Errorf("XID %d is not a number from 1: %w", xid, gpu.ErrInvalid)
		}
		ofInstance := g.hasInstance(gi, ci)
		ofGPU := gi == gpu.AnyInstance && ci == gpu.AnyInstance
		if !ofInstance && !ofGPU {
			return fmt.Errorf("MIG device %d/%d: %w", gi, ci, gpu.ErrNotFound)
		}
		s.log(gpu.Event{GPU: uuid, XID: xid, GI: gi, CI: ci})
		return nil
	})
}

// SetProcesses replaces the processes on a GPU. With MIG mode on each must name a
// MIG device, with MIG mode off none may; else it fails with gpu.ErrInvalid.
func (m *Machine) SetProcesses(uuid string, processes []gpu.Process) error {
	return m.inject(uuid, "set processes", func(_ *state, g *gpuState) error {
		for _, p := range processes {
			switch {
			case p.PID < 1 || p.MemoryMiB < 0:
				return fmt.Errorf("process %d with %d MiB: %w", p.PID, p.MemoryMiB, gpu.ErrInvalid)
			case g.MIGEnabled && (p.CI == gpu.AnyInstance || !g.hasInstance(p.GI, p.CI)):
				return fmt.Errorf("process %d: MIG device %d/%d does not exist: %w", p.PID, p.GI, p.CI, gpu.ErrInvalid)
			case !g.MIGEnabled && (p.GI != gpu.AnyInstance || p.CI != gpu.AnyInstance):
				return fmt.Errorf("process %d: names a MIG device, MIG mode is off: %w", p.PID, gpu.ErrInvalid)
			}
		}
		g.Processes = processes
		return nil
	})
}

// FailLinkQuery makes the query of the link of GPUs i and j fail, or work again. It
// fails with gpu.ErrNotFound where there are no two such GPUs.
func (m *Machine) FailLinkQuery(i, j int, failing bool) error {
	return m.update(func(s *state) error {
		at := pairOf(i, j)
		if at.a < 0 || at.b >= len(s.GPUs) || at.a == at.b {
			return fmt.Errorf("link of GPUs %d and %d: %w", i, j, gpu.ErrNotFound)
		}
		link := linkPair{at.a, at.b}
		s.FailedLinks = slices.DeleteFunc(s.FailedLinks, func(l linkPair) bool { return l == link })
		if failing {
			s.FailedLinks = append(s.FailedLinks, link)
		}
		return nil
	})
}

// DriverDown makes the driver stop answering, or answer again. All methods but
// those that inject faults and Close fail meanwhile.
func (m *Machine) DriverDown(down bool) error {
	return m.update(func(s *state) error {
		s.DriverDown = down
		return nil
	})
}
