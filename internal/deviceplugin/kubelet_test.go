package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

// fakeKubelet does what a kubelet 1.37 does with device plugins: it dials the
// plugin while it registers, keeps one list per resource whichever endpoint sent
// it, counts all devices as unhealthy when the last endpoint is gone, and fills
// up from a map what the plugin does not prefer. Allocations outlive a restart.
type fakeKubelet struct {
	t      *testing.T
	dir    string
	server *grpc.Server

	mu        sync.Mutex
	reject    error // of the next registrations
	endpoints map[string][]*endpoint
	devices   map[string]map[string]*pluginapi.Device
	lists     map[string]int            // lists received
	held      map[string]map[string]int // by resource and device, how often
	wg        sync.WaitGroup
}

type endpoint struct {
	socket string
	conn   *grpc.ClientConn
	client pluginapi.DevicePluginClient
}

// shortDir is a folder whose path leaves room for socket names.
func shortDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "dp")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	return dir
}

func startKubelet(t *testing.T, dir string) *fakeKubelet {
	t.Helper()
	k := &fakeKubelet{t: t, dir: dir, held: make(map[string]map[string]int)}
	k.start()
	t.Cleanup(k.stop)
	return k
}

func (k *fakeKubelet) start() {
	k.t.Helper()
	k.endpoints = make(map[string][]*endpoint)
	k.devices = make(map[string]map[string]*pluginapi.Device)
	k.lists = make(map[string]int)
	for _, socket := range sockets(k.t, k.dir) {
		if err := os.Remove(socket); err != nil {
			k.t.Fatal(err)
		}
	}
	listener, err := net.Listen("unix", filepath.Join(k.dir, "kubelet.sock"))
	if err != nil {
		k.t.Fatal(err)
	}
	k.server = grpc.NewServer()
	pluginapi.RegisterRegistrationServer(k.server, registration{k: k})
	server := k.server
	k.wg.Go(func() { _ = server.Serve(listener) })
}

func (k *fakeKubelet) stop() {
	k.server.Stop()
	k.mu.Lock()
	for _, es := range k.endpoints {
		for _, e := range es {
			e.conn.Close()
		}
	}
	k.mu.Unlock()
	k.wg.Wait()
}

type registration struct {
	pluginapi.UnimplementedRegistrationServer
	k *fakeKubelet
}

func (r registration) Register(ctx context.Context, req *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k := r.k
	if req.GetVersion() != "v1beta1" {
		return nil, fmt.Errorf("version %q", req.GetVersion())
	}
	if k.reject != nil {
		return nil, k.reject
	}
	e := &endpoint{socket: filepath.Join(k.dir, req.GetEndpoint())}
	var err error
	e.conn, err = grpc.NewClient("unix:"+e.socket, grpc.WithTransportCredentials(insecure.NewCredentials()), grpc.WithAuthority("localhost"))
	if err != nil {
		return nil, err
	}
	e.client = pluginapi.NewDevicePluginClient(e.conn)
	options, err := e.client.GetDevicePluginOptions(ctx, &pluginapi.Empty{}) // fails at once where nobody serves yet
	if err != nil {
		return nil, err
	}
	if !options.GetGetPreferredAllocationAvailable() || options.GetPreStartRequired() {
		return nil, fmt.Errorf("options are %v", options)
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	name := req.GetResourceName()
	for _, other := range k.endpoints[name] {
		if other.socket == e.socket {
			return nil, errors.New("device plugin already connected")
		}
	}
	k.endpoints[name] = append(k.endpoints[name], e)
	k.wg.Go(func() { k.watch(name, e) })
	return &pluginapi.Empty{}, nil
}

func (k *fakeKubelet) watch(name string, e *endpoint) {
	defer e.conn.Close()
	if stream, err := e.client.ListAndWatch(context.Background(), &pluginapi.Empty{}); err == nil {
		for {
			list, err := stream.Recv()
			if err != nil {
				break
			}
			k.mu.Lock()
			k.devices[name] = make(map[string]*pluginapi.Device)
			for _, d := range list.GetDevices() {
				k.devices[name][d.GetID()] = d
			}
			k.lists[name]++
			k.mu.Unlock()
		}
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.endpoints[name] = slices.DeleteFunc(k.endpoints[name], func(o *endpoint) bool { return o == e })
	if len(k.endpoints[name]) == 0 {
		for _, d := range k.devices[name] {
			d.Health = pluginapi.Unhealthy
		}
	}
}

// state returns the ids that the kubelet counts as healthy and as unhealthy, and
// the number of lists it got.
func (k *fakeKubelet) state(resource string) (healthy, unhealthy []string, lists int) {
	k.mu.Lock()
	defer k.mu.Unlock()
	for id, d := range k.devices[resource] {
		if d.GetHealth() == pluginapi.Healthy {
			healthy = append(healthy, id)
		} else {
			unhealthy = append(unhealthy, id)
		}
	}
	slices.Sort(healthy)
	slices.Sort(unhealthy)
	return healthy, unhealthy, k.lists[resource]
}

// await waits until the kubelet counts so many devices as healthy and unhealthy.
func (k *fakeKubelet) await(resource string, healthy, unhealthy int) {
	k.t.Helper()
	eventually(k.t, func() string {
		h, u, _ := k.state(resource)
		if len(h) == healthy && len(u) == unhealthy {
			return ""
		}
		return fmt.Sprintf("%s: healthy %v, unhealthy %v; want %d and %d", resource, h, u, healthy, unhealthy)
	})
}

// admit gives a container n devices of the resource.
func (k *fakeKubelet) admit(resource string, n int) ([]string, *pluginapi.ContainerAllocateResponse, error) {
	k.mu.Lock()
	var available []string
	for id, d := range k.devices[resource] {
		if d.GetHealth() == pluginapi.Healthy && k.held[resource][id] == 0 {
			available = append(available, id)
		}
	}
	es := slices.Clone(k.endpoints[resource])
	k.mu.Unlock()
	if len(available) < n || len(es) == 0 {
		return nil, nil, fmt.Errorf("requested %d of %s, available %d", n, resource, len(available))
	}
	client := es[rand.IntN(len(es))].client
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	chosen := available
	if n < len(available) {
		r, err := client.GetPreferredAllocation(ctx, &pluginapi.PreferredAllocationRequest{
			ContainerRequests: []*pluginapi.ContainerPreferredAllocationRequest{{AvailableDeviceIDs: available, AllocationSize: int32(n)}},
		})
		if err != nil {
			return nil, nil, fmt.Errorf("preferred allocation: %w", err)
		}
		chosen = fill(r.GetContainerResponses()[0].GetDeviceIDs(), available, n)
	}
	r, err := client.Allocate(ctx, &pluginapi.AllocateRequest{ContainerRequests: []*pluginapi.ContainerAllocateRequest{{DevicesIds: chosen}}})
	if err != nil {
		return nil, nil, err
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.held[resource] == nil {
		k.held[resource] = make(map[string]int)
	}
	for _, id := range chosen {
		k.held[resource][id]++
	}
	return slices.Sorted(slices.Values(chosen)), r.GetContainerResponses()[0], nil
}

// fill takes the preferred devices that are available and, in any order, others
// until there are n.
func fill(preferred, available []string, n int) []string {
	left := make(map[string]bool)
	for _, id := range available {
		left[id] = true
	}
	var chosen []string
	for _, id := range slices.Concat(preferred, slices.Collect(maps.Keys(left))) {
		if len(chosen) < n && left[id] {
			delete(left, id)
			chosen = append(chosen, id)
		}
	}
	return chosen
}

// sockets are the socket files in a folder.
func sockets(t testing.TB, dir string) []string {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	var paths []string
	for _, e := range entries {
		if e.Type() == os.ModeSocket {
			paths = append(paths, filepath.Join(dir, e.Name()))
		}
	}
	return paths
}

// eventually waits until the check has nothing to say.
func eventually(t testing.TB, check func() string) {
	t.Helper()
	deadline := time.Now().Add(5 * time.Second)
	for {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatal(problem)
		}
		time.Sleep(5 * time.Millisecond)
	}
}
