package agent

import (
	"context"
	"fmt"
	"time"

	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"

	"github.com/ashlar-gpu/ashlar/internal/deviceplugin"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// served is a resource that is offered to the kubelet.
type served struct {
	allocator *deviceplugin.Allocator
	// server is nil while the resource is not registered.
	server *deviceplugin.Server
	// kubelet is the run of the kubelet that it is registered with.
	kubelet string
	// watched is when the kubelet was last seen to watch it, or registered it.
	watched time.Time
}

func (s *served) close() {
	if s.server != nil {
		s.server.Close()
		s.server = nil
	}
}

// watchPatience is how long a kubelet may leave a registered resource unwatched
// before it is registered anew.
const watchPatience = 10 * time.Second

// ended says why the resource must be registered again, "" if it need not.
func (s *served) ended(kubelet string, now time.Time) string {
	if s.server == nil {
		return "it is not registered"
	}
	if s.kubelet != kubelet {
		return "the kubelet was restarted"
	}
	select {
	case <-s.server.Done():
		return fmt.Sprintf("its server ended: %v", s.server.Err())
	default:
	}
	if s.server.Watched() {
		s.watched = now
	}
	if now.Sub(s.watched) > watchPatience {
		return "the kubelet does not watch it any more"
	}
	return ""
}

// handler answers the kubelet and makes the agent look again after each
// allocation: it may withdraw other views of the GPU.
type handler struct {
	*deviceplugin.Allocator
	resource string
	// wish names the devices that a plan wants, nil for none.
	wish  func(ctx context.Context, resource string, available, required []string, size int) []string
	kick  func()
	turns *turns
}

func (h handler) Prefer(ctx context.Context, available, required []string, size int) []string {
	defer h.turns.answer(ctx)()
	return h.PreferWith(h.wish(ctx, h.resource, available, required, size), available, required, size)
}

func (h handler) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	defer h.kick()
	defer h.turns.answer(ctx)()
	return h.Allocator.Allocate(ctx, ids)
}

// serve makes the servers those of the plan, each with the devices that may be
// offered now.
func (a *agent) serve(ctx context.Context, now time.Time) {
	withheld := a.ledger.Withheld(a.plan)
	wanted := make(map[string]bool)
	for i := range a.plan.Resources {
		r := &a.plan.Resources[i]
		wanted[r.Name] = true
		config := deviceplugin.Config{Machine: a.machine, Resource: r, Flags: a.config.current.Flags, ProcRoot: a.ProcRoot}
		if a.api != nil {
			config.Reuse = a.reuse.check
		}
		s := a.servers[r.Name]
		if s == nil {
			s = &served{allocator: deviceplugin.NewAllocator(a.ledger, config)}
			a.servers[r.Name] = s
		} else {
			s.allocator.Set(config)
		}
		devices := a.offered(r, withheld[r.Name])
		why := s.ended(a.kubelet.id, now)
		if why == "" {
			s.server.Update(devices)
			continue
		}
		s.close()
		// Without knowing the holders nothing is offered.
		if a.kubelet.id != "" && a.kubelet.known {
			a.Log.Info("registering", "resource", r.Name, "because", why)
			a.register(ctx, r.Name, s, devices, now)
		}
	}
	for name, s := range a.servers {
		if wanted[name] {
			continue
		}
		a.Log.Info("resource retired", "resource", name)
		a.well(registration + name)
		// It gives nothing more while the kubelet takes the empty list.
		s.allocator.Set(deviceplugin.Config{Machine: a.machine, Resource: &sharing.Resource{Name: name}, Flags: a.config.current.Flags})
		if s.server != nil {
			s.server.Stop()
		}
		delete(a.servers, name)
	}
}

// offered are the devices as the kubelet sees them. What must not be given now is
// unhealthy to it, so that the resource's capacity stays: what is withheld, and
// what a container runtime could not look up.
func (a *agent) offered(r *sharing.Resource, withheld map[string]string) []deviceplugin.Device {
	lookup := usesCDI(&a.config.current.Flags)
	devices := make([]deviceplugin.Device, len(r.Devices))
	for i, d := range r.Devices {
		id := d.ID.String()
		healthy := d.Health.OK() && withheld[id] == "" && (!lookup || a.cdi.names[d.ID.Base])
		devices[i] = deviceplugin.Device{ID: id, Healthy: healthy, NUMA: d.NUMA}
	}
	return devices
}

// registration is the part that is degraded while a resource cannot register.
const registration = "registration of "

// register starts a new server for a resource, on a socket of its own.
func (a *agent) register(ctx context.Context, name string, s *served, devices []deviceplugin.Device, now time.Time) {
	server := deviceplugin.New(deviceplugin.Options{
		Resource: name, Dir: a.devicePlugins(), Handler: handler{s.allocator, name, a.wish, a.kick, &a.turns}, Log: a.Log,
	})
	server.Update(devices)
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := server.Start(ctx); err != nil {
		a.trouble(registration+name, "%v", err)
		return
	}
	a.well(registration + name)
	s.server, s.kubelet, s.watched = server, a.kubelet.id, now
}

// wish names the devices that a plan wants for the kubelet's question, nil for
// none.
func (a *agent) wish(ctx context.Context, resource string, available, required []string, size int) []string {
	if a.steering == nil {
		return nil
	}
	return a.steering.wish(ctx, resource, available, required, size)
}
