package agent

import (
	"context"
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
}

func (s *served) close() {
	if s.server != nil {
		s.server.Close()
		s.server = nil
	}
}

// alive says whether the resource is registered with this run of the kubelet.
func (s *served) alive(kubelet string) bool {
	if s.server == nil || s.kubelet != kubelet {
		return false
	}
	select {
	case <-s.server.Done():
		return false
	default:
		return true
	}
}

// handler answers the kubelet and makes the agent look again after each
// allocation: it may withdraw other views of the GPU.
type handler struct {
	*deviceplugin.Allocator
	kick func()
}

func (h handler) Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	defer h.kick()
	return h.Allocator.Allocate(ctx, ids)
}

// serve makes the servers those of the plan, each with the devices that may be
// offered now.
func (a *agent) serve(ctx context.Context) {
	withheld := a.ledger.Withheld(a.plan)
	wanted := make(map[string]bool)
	for i := range a.plan.Resources {
		r := &a.plan.Resources[i]
		wanted[r.Name] = true
		config := deviceplugin.Config{Machine: a.machine, Resource: r, Flags: a.config.current.Flags, ProcRoot: a.ProcRoot}
		s := a.servers[r.Name]
		if s == nil {
			s = &served{allocator: deviceplugin.NewAllocator(a.ledger, config)}
			a.servers[r.Name] = s
		} else {
			s.allocator.Set(config)
		}
		devices := offered(r, withheld[r.Name])
		if s.alive(a.kubelet.id) {
			s.server.Update(devices)
			continue
		}
		s.close()
		// Without knowing the holders nothing is offered.
		if a.kubelet.id != "" && a.kubelet.known {
			a.register(ctx, r.Name, s, devices)
		}
	}
	for name, s := range a.servers {
		if wanted[name] {
			continue
		}
		a.Log.Info("resource retired", "resource", name)
		// It gives nothing more while the kubelet takes the empty list.
		s.allocator.Set(deviceplugin.Config{Machine: a.machine, Resource: &sharing.Resource{Name: name}, Flags: a.config.current.Flags})
		if s.server != nil {
			s.server.Stop()
		}
		delete(a.servers, name)
	}
}

// offered are the devices as the kubelet sees them. What is withheld is
// unhealthy to it: the resource's capacity stays.
func offered(r *sharing.Resource, withheld map[string]string) []deviceplugin.Device {
	devices := make([]deviceplugin.Device, len(r.Devices))
	for i, d := range r.Devices {
		id := d.ID.String()
		devices[i] = deviceplugin.Device{ID: id, Healthy: d.Health.OK() && withheld[id] == "", NUMA: d.NUMA}
	}
	return devices
}

// register starts a new server for a resource, on a socket of its own.
func (a *agent) register(ctx context.Context, name string, s *served, devices []deviceplugin.Device) {
	server := deviceplugin.New(deviceplugin.Options{
		Resource: name, Dir: a.devicePlugins(), Handler: handler{s.allocator, a.kick}, Log: a.Log,
	})
	server.Update(devices)
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	if err := server.Start(ctx); err != nil {
		a.trouble("registration of "+name, "%v", err)
		return
	}
	a.well("registration of " + name)
	s.server, s.kubelet = server, a.kubelet.id
}

// retryPause is how long a driver that fails to wait for events is left alone.
const retryPause = time.Second
