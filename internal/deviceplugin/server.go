package deviceplugin

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const (
	// startTimeout bounds Start: the kubelet allows itself 10 seconds to connect.
	startTimeout = 15 * time.Second
	// stopTimeout bounds how long Stop waits for the kubelet to take the last list.
	stopTimeout = time.Second
	// maxSocketPath is what fits into the address of a unix socket on Linux.
	maxSocketPath = 107
	// staleAfter is the age at which a socket that nobody serves counts as left
	// behind. A younger one may be about to be served.
	staleAfter = time.Minute

	socketPrefix, socketSuffix = "ashlar-", ".sock"
)

// Handler answers the kubelet's questions about one resource.
type Handler interface {
	// Prefer returns the devices that the kubelet should give: size of available,
	// all of required among them. There is no error to return, because the kubelet
	// would refuse the pod.
	Prefer(ctx context.Context, available, required []string, size int) []string
	// Allocate is called when the kubelet is about to give the devices to a
	// container. The kubelet refuses the pod with the error.
	Allocate(ctx context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error)
}

// Options say what a Server serves.
type Options struct {
	// Resource is the full name of the resource.
	Resource string
	// Dir is the kubelet's folder for device plugins.
	Dir     string
	Handler Handler
	Log     *slog.Logger
}

// Device is a device as the kubelet sees it.
type Device struct {
	ID string
	// Healthy is false for a device that must not be given now.
	Healthy bool
	// NUMA is the NUMA node next to it, negative where it is not known.
	NUMA int
}

// Server is one registration of a resource with the kubelet. It is used once:
// New, Start, any number of Updates, then Stop or Close. After a restart of the
// kubelet, which forgets all registrations, make a new one.
//
// Each has a socket file name of its own, also among those of other processes,
// because a kubelet that is given a name again may drop the new connection when
// it notices the end of the old one.
type Server struct {
	Options
	list list
	// readers counts the streams of the list.
	readers atomic.Int32

	mu      sync.Mutex // guards what follows
	grpc    *grpc.Server
	path    string
	stopped bool

	done chan struct{}
	err  error // why the server ended; set before done is closed
}

// New returns a Server that does not serve yet. Its list of devices is empty.
func New(o Options) *Server {
	return &Server{Options: o, list: list{changed: make(chan struct{})}, done: make(chan struct{})}
}

// Update replaces the list of devices. It never waits for a reader, and sends
// nothing where the list is the same. The slice must not be changed afterwards.
func (s *Server) Update(devices []Device) { s.list.set(devices, false) }

// Start serves and registers. The context bounds Start and not the server. On
// error nothing is left behind, and the server cannot be started again.
func (s *Server) Start(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	if err := s.serve(); err != nil {
		return err
	}
	if err := s.register(ctx); err != nil {
		s.Close()
		return fmt.Errorf("device plugin for %s: %w", s.Resource, err)
	}
	s.Log.Info("registered with the kubelet", "resource", s.Resource, "socket", s.path)
	return nil
}

// serve opens the socket and serves in the background.
func (s *Server) serve() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.grpc != nil || s.stopped {
		return fmt.Errorf("device plugin for %s: a server is started only once", s.Resource)
	}
	path, err := socketPath(s.Dir, s.Resource)
	if err != nil {
		return err
	}
	s.removeStale()
	listener, err := net.Listen("unix", path) // removes the file when it is closed
	if err != nil {
		return fmt.Errorf("device plugin for %s: %w", s.Resource, err)
	}
	server := grpc.NewServer()
	s.path, s.grpc = path, server
	pluginapi.RegisterDevicePluginServer(server, &service{s: s})
	go func() {
		if err := server.Serve(listener); !errors.Is(err, grpc.ErrServerStopped) {
			s.err = err
		}
		close(s.done)
	}()
	return nil
}

// register waits until the own socket answers and registers it.
func (s *Server) register(ctx context.Context) error {
	self, err := dial(s.path)
	if err != nil {
		return err
	}
	defer self.Close()
	options, err := pluginapi.NewDevicePluginClient(self).GetDevicePluginOptions(ctx, &pluginapi.Empty{}, grpc.WaitForReady(true))
	if err != nil {
		return fmt.Errorf("own socket %s does not answer: %w", s.path, err)
	}

	socket := filepath.Join(s.Dir, filepath.Base(pluginapi.KubeletSocket))
	kubelet, err := dial(socket)
	if err != nil {
		return err
	}
	defer kubelet.Close()
	_, err = pluginapi.NewRegistrationClient(kubelet).Register(ctx, &pluginapi.RegisterRequest{
		Version: pluginapi.Version, Endpoint: filepath.Base(s.path), ResourceName: s.Resource, Options: options,
	})
	if err != nil {
		return fmt.Errorf("registration with the kubelet at %s: %w", socket, err)
	}
	return nil
}

// Stop retires the resource: the kubelet is sent an empty list, so that the node
// offers none of it any more, and then the server ends. It takes a second at
// most. Use Close instead where another server for the resource follows, as the
// empty list would count for that one, too.
func (s *Server) Stop() {
	s.list.set(nil, true)
	if server := s.end(); server != nil {
		timer := time.AfterFunc(stopTimeout, server.Stop)
		server.GracefulStop() // returns when the readers have got the last list
		timer.Stop()
		<-s.done
	}
}

// Close ends the server at once. The kubelet then counts its devices as
// unhealthy, and after five minutes as gone, unless they are registered again.
func (s *Server) Close() {
	if server := s.end(); server != nil {
		server.Stop()
		<-s.done
	}
}

// end returns the gRPC server, nil where it does not serve.
func (s *Server) end() *grpc.Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.stopped = true
	return s.grpc
}

// Watched says whether the kubelet reads the list of devices now. One that has
// registered a server and does not read its list has forgotten it.
func (s *Server) Watched() bool { return s.readers.Load() > 0 }

// Done is closed when a started server has ended, by Stop, by Close or by
// itself.
func (s *Server) Done() <-chan struct{} { return s.done }

// Err is why the server ended by itself. It is nil before Done and after Stop
// and Close.
func (s *Server) Err() error {
	select {
	case <-s.done:
		return s.err
	default:
		return nil
	}
}

// removeStale removes the sockets that killed processes left behind. The kubelet
// does so too, but only when it starts.
func (s *Server) removeStale() {
	paths, err := filepath.Glob(filepath.Join(s.Dir, socketPrefix+"*"+socketSuffix))
	if err != nil {
		return // Dir is no valid pattern: then nothing is found
	}
	for _, path := range paths {
		info, err := os.Lstat(path)
		if err != nil || info.Mode().Type() != os.ModeSocket || time.Since(info.ModTime()) < staleAfter {
			continue
		}
		conn, err := net.DialTimeout("unix", path, stopTimeout)
		switch {
		case err == nil:
			_ = conn.Close()
		case errors.Is(err, syscall.ECONNREFUSED):
			s.Log.Info("removing a socket that nobody serves", "socket", path)
			if err := os.Remove(path); err != nil {
				s.Log.Warn("socket that nobody serves stays", "error", err)
			}
		}
	}
}

// socketPath returns a path that no other server has. The name of the resource
// is in it for people, as far as there is room.
func socketPath(dir, resource string) (string, error) {
	unique := "-" + rand.Text()[:12] + socketSuffix // 60 random bits
	room := maxSocketPath - len(filepath.Join(dir, socketPrefix)) - len(unique)
	if room < 0 {
		return "", fmt.Errorf("device plugin folder %s: the path is %d bytes too long for sockets in it, which may have %d bytes in all: mount the folder at a shorter path",
			dir, -room, maxSocketPath)
	}
	name := strings.Map(func(r rune) rune {
		switch {
		case r >= 'a' && r <= 'z', r >= 'A' && r <= 'Z', r >= '0' && r <= '9', r == '.', r == '-':
			return r
		}
		return '-'
	}, resource)
	return filepath.Join(dir, socketPrefix+name[:min(room, len(name))]+unique), nil
}

// dial connects to a unix socket when the connection is first used.
func dial(path string) (*grpc.ClientConn, error) {
	return grpc.NewClient("passthrough:///localhost", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			return (&net.Dialer{}).DialContext(ctx, "unix", path)
		}))
}

// service is the API that the kubelet calls.
type service struct {
	pluginapi.UnimplementedDevicePluginServer
	s *Server
}

// GetDevicePluginOptions says that the plugin has preferences.
func (*service) GetDevicePluginOptions(context.Context, *pluginapi.Empty) (*pluginapi.DevicePluginOptions, error) {
	return &pluginapi.DevicePluginOptions{GetPreferredAllocationAvailable: true}, nil
}

// ListAndWatch sends the list and then each change, until the reader goes or the
// server ends.
func (p *service) ListAndWatch(_ *pluginapi.Empty, stream pluginapi.DevicePlugin_ListAndWatchServer) error {
	p.s.readers.Add(1)
	defer p.s.readers.Add(-1)
	for {
		devices, changed, last := p.s.list.get()
		if err := stream.Send(&pluginapi.ListAndWatchResponse{Devices: message(devices)}); err != nil {
			return err
		}
		if last {
			return nil
		}
		select {
		case <-changed:
		case <-stream.Context().Done():
			return nil
		}
	}
}

// GetPreferredAllocation asks the Handler, for each container.
func (p *service) GetPreferredAllocation(ctx context.Context, r *pluginapi.PreferredAllocationRequest) (*pluginapi.PreferredAllocationResponse, error) {
	response := &pluginapi.PreferredAllocationResponse{}
	for _, c := range r.GetContainerRequests() {
		ids := p.s.Handler.Prefer(ctx, c.GetAvailableDeviceIDs(), c.GetMustIncludeDeviceIDs(), int(c.GetAllocationSize()))
		response.ContainerResponses = append(response.ContainerResponses, &pluginapi.ContainerPreferredAllocationResponse{DeviceIDs: ids})
	}
	return response, nil
}

// Allocate asks the Handler, for each container.
func (p *service) Allocate(ctx context.Context, r *pluginapi.AllocateRequest) (*pluginapi.AllocateResponse, error) {
	response := &pluginapi.AllocateResponse{}
	for _, c := range r.GetContainerRequests() {
		one, err := p.s.Handler.Allocate(ctx, c.GetDevicesIds())
		if err != nil {
			p.s.Log.Warn("allocation refused", "resource", p.s.Resource, "devices", c.GetDevicesIds(), "reason", err)
			return nil, err
		}
		p.s.Log.Info("allocated", "resource", p.s.Resource, "devices", c.GetDevicesIds())
		response.ContainerResponses = append(response.ContainerResponses, one)
	}
	return response, nil
}

// PreStartContainer is in the API and not asked for: see
// GetDevicePluginOptions.
func (*service) PreStartContainer(context.Context, *pluginapi.PreStartContainerRequest) (*pluginapi.PreStartContainerResponse, error) {
	return &pluginapi.PreStartContainerResponse{}, nil
}

func message(devices []Device) []*pluginapi.Device {
	all := make([]*pluginapi.Device, len(devices))
	for i, d := range devices {
		all[i] = &pluginapi.Device{ID: d.ID, Health: pluginapi.Unhealthy}
		if d.Healthy {
			all[i].Health = pluginapi.Healthy
		}
		if d.NUMA >= 0 {
			all[i].Topology = &pluginapi.TopologyInfo{Nodes: []*pluginapi.NUMANode{{ID: int64(d.NUMA)}}}
		}
	}
	return all
}
