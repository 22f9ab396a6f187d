package deviceplugin

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
)

const resource = "nvidia.com/gpu"

// plainHandler prefers the first devices and gives everything.
type plainHandler struct{}

func (plainHandler) Prefer(_ context.Context, available, _ []string, size int) []string {
	ids := slices.Sorted(slices.Values(available))
	return ids[:min(size, len(ids))]
}

func (plainHandler) Allocate(_ context.Context, ids []string) (*pluginapi.ContainerAllocateResponse, error) {
	if slices.Contains(ids, "bad") {
		return nil, errors.New("device bad is not here")
	}
	return &pluginapi.ContainerAllocateResponse{Envs: map[string]string{"IDS": strings.Join(ids, ",")}}, nil
}

func newServer(dir string) *Server {
	return New(Options{Resource: resource, Dir: dir, Handler: plainHandler{}, Log: slog.New(slog.DiscardHandler)})
}

func startServer(t *testing.T, dir string, devices ...Device) *Server {
	t.Helper()
	s := newServer(dir)
	s.Update(devices)
	if err := s.Start(t.Context()); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.Close)
	return s
}

func healthy(ids ...string) []Device {
	var devices []Device
	for _, id := range ids {
		devices = append(devices, Device{ID: id, Healthy: true, NUMA: -1})
	}
	return devices
}

func TestServeAndAllocate(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	startServer(t, k.dir, Device{ID: "a", Healthy: true, NUMA: 1}, Device{ID: "b", Healthy: true, NUMA: -1}, Device{ID: "c", NUMA: 0})
	k.await(resource, 2, 1)
	numa := func(id string) []int64 {
		k.mu.Lock()
		defer k.mu.Unlock()
		var nodes []int64
		for _, n := range k.devices[resource][id].GetTopology().GetNodes() {
			nodes = append(nodes, n.GetID())
		}
		return nodes
	}
	if diff := cmp.Diff(map[string][]int64{"a": {1}, "b": nil, "c": {0}}, map[string][]int64{"a": numa("a"), "b": numa("b"), "c": numa("c")}); diff != "" {
		t.Errorf("NUMA nodes (-want +got):\n%s", diff)
	}
	ids, response, err := k.admit(resource, 1)
	if err != nil {
		t.Fatal(err)
	}
	if ids[0] != "a" || response.GetEnvs()["IDS"] != "a" {
		t.Errorf("got %v with %v; want the preferred a", ids, response)
	}
}

func TestAllocateErrorReachesTheKubelet(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	startServer(t, k.dir, healthy("bad")...)
	k.await(resource, 1, 0)
	if _, _, err := k.admit(resource, 1); err == nil || !strings.Contains(err.Error(), "device bad is not here") {
		t.Errorf("error is %v", err)
	}
}

// TestOneUpdateTurnsAllSlotsUnhealthy: an event of a GPU is about all its slots.
func TestOneUpdateTurnsAllSlotsUnhealthy(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	s := startServer(t, k.dir, healthy("GPU-a::0", "GPU-a::1", "GPU-a::2", "GPU-a::3", "GPU-b::0")...)
	k.await(resource, 5, 0)
	_, _, before := k.state(resource)
	devices := healthy("GPU-a::0", "GPU-a::1", "GPU-a::2", "GPU-a::3", "GPU-b::0")
	for i := range devices {
		devices[i].Healthy = devices[i].ID == "GPU-b::0"
	}
	s.Update(devices)
	k.await(resource, 1, 4)
	if _, _, after := k.state(resource); after != before+1 {
		t.Errorf("the kubelet got %d lists; want 1", after-before)
	}
	s.Update(slices.Clone(devices))
	s.Update(healthy("GPU-b::0"))
	k.await(resource, 1, 0)
	if _, _, after := k.state(resource); after != before+2 {
		t.Errorf("the kubelet got %d lists for one change; want 1", after-before-1)
	}
}

// many is a list that does not fit into the buffers of a connection.
func many(generation int) []Device {
	devices := make([]Device, 10000)
	for i := range devices {
		devices[i] = Device{ID: fmt.Sprintf("GPU-00000000-0000-0000-0000-%012d::%d", generation, i), Healthy: true}
	}
	return devices
}

func TestSlowReaderBlocksNobody(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	s := startServer(t, k.dir, many(0)...)
	k.await(resource, 10000, 0)
	conn, err := dial(s.path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stuck, err := pluginapi.NewDevicePluginClient(conn).ListAndWatch(t.Context(), &pluginapi.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	const updates = 20
	lists := make([][]Device, updates)
	for i := range lists {
		lists[i] = many(i + 1)
	}
	updated := make(chan struct{})
	go func() {
		defer close(updated)
		for _, devices := range lists {
			s.Update(devices)
			time.Sleep(time.Millisecond) // so that the readers take notice of each
		}
		s.Update(healthy("last"))
	}()
	select {
	case <-updated:
	case <-time.After(10 * time.Second):
		t.Fatal("Update waits for a reader that does not read")
	}
	k.await(resource, 1, 0) // the other reader has the latest

	// The slow one reads at last: something old, and then the latest.
	for got := 1; ; got++ {
		list, err := stuck.Recv()
		if err != nil {
			t.Fatal(err)
		}
		if len(list.GetDevices()) == 1 {
			if got > updates/2 {
				t.Errorf("the slow reader got %d lists; want it to skip most of %d", got, updates)
			}
			break
		}
	}
}

func TestUpdateWithoutReaders(t *testing.T) {
	s := newServer(shortDir(t))
	for i := range 100 {
		s.Update(healthy(fmt.Sprint(i)))
	}
	devices, _, _ := s.list.get()
	if diff := cmp.Diff(healthy("99"), devices); diff != "" {
		t.Errorf("list (-want +got):\n%s", diff)
	}
}

func TestList(t *testing.T) {
	l := list{changed: make(chan struct{})}
	closed := func(c <-chan struct{}) bool {
		select {
		case <-c:
			return true
		default:
			return false
		}
	}
	_, first, _ := l.get()
	l.set(healthy("a"), false)
	devices, second, last := l.get()
	if !closed(first) || closed(second) || last || !cmp.Equal(devices, healthy("a")) {
		t.Errorf("after a change: told %v and %v, last %v, %v", closed(first), closed(second), last, devices)
	}
	l.set(healthy("a"), false)
	if closed(second) {
		t.Error("readers were told of a list that is the same")
	}
	l.set(nil, true)
	l.set(healthy("b"), false)
	devices, third, last := l.get()
	if !closed(second) || closed(third) || !last || len(devices) != 0 {
		t.Errorf("after the last: told %v and %v, last %v, %v", closed(second), closed(third), last, devices)
	}
}

func TestRetire(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	s := startServer(t, k.dir, healthy("a", "b")...)
	k.await(resource, 2, 0)
	start := time.Now()
	s.Stop()
	if took := time.Since(start); took > stopTimeout {
		t.Errorf("Stop took %v with a reader that reads", took)
	}
	// Not unhealthy, which the end of the connection alone would mean: gone.
	k.await(resource, 0, 0)
	if left := sockets(t, k.dir); len(left) != 1 {
		t.Errorf("sockets left: %v; want the kubelet's alone", left)
	}
	s.Update(healthy("late"))
	s.Stop()
	s.Close()
	if err := s.Err(); err != nil {
		t.Errorf("Err = %v after Stop", err)
	}
}

func TestRetireDoesNotWaitForAStuckReader(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	s := startServer(t, k.dir, many(1)...)
	conn, err := dial(s.path)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	stuck, err := pluginapi.NewDevicePluginClient(conn).ListAndWatch(t.Context(), &pluginapi.Empty{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := stuck.Header(); err != nil { // the first list is on its way
		t.Fatal(err)
	}
	start := time.Now()
	s.Stop()
	if took := time.Since(start); took > stopTimeout+2*time.Second {
		t.Errorf("Stop took %v", took)
	}
	k.await(resource, 0, 0)
}

// TestGenerations: a new server for the same resource takes over from the old
// one without a moment in which the kubelet has no devices.
func TestGenerations(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	old := startServer(t, k.dir, healthy("a", "b")...)
	k.await(resource, 2, 0)
	next := startServer(t, k.dir, healthy("a", "b", "c")...)
	k.await(resource, 3, 0)
	if old.path == next.path {
		t.Fatalf("both serve at %s", old.path)
	}
	old.Close()
	eventually(t, func() string {
		k.mu.Lock()
		defer k.mu.Unlock()
		if n := len(k.endpoints[resource]); n != 1 {
			return fmt.Sprintf("%d endpoints", n)
		}
		return ""
	})
	k.await(resource, 3, 0)
	if _, _, err := k.admit(resource, 2); err != nil {
		t.Error(err)
	}
	next.Close()
	k.await(resource, 0, 3)
}

func TestKubeletRestart(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	s := startServer(t, k.dir, healthy("a", "b", "c")...)
	k.await(resource, 3, 0)
	held, _, err := k.admit(resource, 1)
	if err != nil {
		t.Fatal(err)
	}
	k.stop()
	k.start()
	if _, err := os.Stat(s.path); !errors.Is(err, os.ErrNotExist) {
		t.Fatalf("the socket is there after the kubelet's start: %v", err)
	}
	next := startServer(t, k.dir, healthy("a", "b", "c")...)
	s.Close()
	k.await(resource, 3, 0)
	if _, err := os.Stat(next.path); err != nil {
		t.Errorf("the end of the old server took the socket of the new one: %v", err)
	}
	others, _, err := k.admit(resource, 2)
	if err != nil {
		t.Fatal(err)
	}
	if slices.Contains(others, held[0]) {
		t.Errorf("%s was given twice", held[0])
	}
}

func TestNoGoroutinesLeft(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	before := runtime.NumGoroutine()
	for i := range 6 {
		s := newServer(k.dir)
		s.Update(healthy("a"))
		if err := s.Start(t.Context()); err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithCancel(t.Context())
		conn, err := dial(s.path)
		if err != nil {
			t.Fatal(err)
		}
		for range 3 {
			stream, err := pluginapi.NewDevicePluginClient(conn).ListAndWatch(ctx, &pluginapi.Empty{})
			if err != nil {
				t.Fatal(err)
			}
			if _, err := stream.Recv(); err != nil {
				t.Fatal(err)
			}
		}
		if i%2 == 0 {
			cancel() // readers that go, before and after the server
			conn.Close()
		}
		if i%3 == 0 {
			s.Stop()
		} else {
			s.Close()
		}
		cancel()
		conn.Close()
		<-s.Done()
	}
	eventually(t, func() string {
		if after := runtime.NumGoroutine(); after > before {
			stacks := make([]byte, 1<<20)
			return fmt.Sprintf("%d goroutines before, %d after\n%s", before, after, stacks[:runtime.Stack(stacks, true)])
		}
		return ""
	})
}

// TestReaderThatGoesEndsItsStream: the server keeps serving the others.
func TestReaderThatGoesEndsItsStream(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	s := startServer(t, k.dir, healthy("a")...)
	k.await(resource, 1, 0)
	var active atomic.Int32
	ctx, cancel := context.WithCancel(t.Context())
	stream := &recordedStream{ctx: ctx, sent: make(chan int, 10)}
	active.Add(1)
	go func() {
		defer active.Add(-1)
		_ = (&service{s: s}).ListAndWatch(&pluginapi.Empty{}, stream)
	}()
	<-stream.sent
	cancel()
	eventually(t, func() string {
		if active.Load() != 0 {
			return "the stream goes on without its reader"
		}
		return ""
	})
	s.Update(healthy("a", "b"))
	k.await(resource, 2, 0)
}

type recordedStream struct {
	pluginapi.DevicePlugin_ListAndWatchServer
	ctx  context.Context
	sent chan int
}

func (r *recordedStream) Context() context.Context { return r.ctx }

func (r *recordedStream) Send(list *pluginapi.ListAndWatchResponse) error {
	r.sent <- len(list.GetDevices())
	return nil
}

func TestStartErrors(t *testing.T) {
	noKubelet := shortDir(t)
	refused := startKubelet(t, shortDir(t))
	refused.reject = errors.New("no such resource")
	long := filepath.Join(shortDir(t), strings.Repeat("d", 100))
	for name, test := range map[string]struct{ dir, want string }{
		"no kubelet": {noKubelet, filepath.Join(noKubelet, "kubelet.sock")},
		"refused":    {refused.dir, "no such resource"},
		"no folder":  {filepath.Join(noKubelet, "missing"), "no such file or directory"},
		"long path":  {long, "bytes too long for sockets"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newServer(test.dir)
			err := s.Start(t.Context())
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), test.dir) && name != "refused" {
				t.Fatalf("Start = %v; want an error with %q", err, test.want)
			}
			if _, err := os.Stat(test.dir); err == nil {
				for _, path := range sockets(t, test.dir) {
					if filepath.Base(path) != "kubelet.sock" {
						t.Errorf("%s is left behind", path)
					}
				}
			}
			s.Stop()
			s.Close()
		})
	}
}

func TestStartOnce(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	s := startServer(t, k.dir)
	if err := s.Start(t.Context()); err == nil {
		t.Error("a second Start had no error")
	}
	k.await(resource, 0, 0)
	closed := newServer(k.dir)
	closed.Close()
	if err := closed.Start(t.Context()); err == nil {
		t.Error("Start after Close had no error")
	}
}

func TestDoneWhenTheServerDies(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	s := startServer(t, k.dir)
	select {
	case <-s.Done():
		t.Fatal("done while it serves")
	default:
	}
	if s.Err() != nil {
		t.Fatalf("Err = %v while it serves", s.Err())
	}
	s.grpc.Stop()
	select {
	case <-s.Done():
	case <-time.After(5 * time.Second):
		t.Fatal("not done")
	}
	if err := s.Err(); err != nil {
		t.Errorf("Err = %v", err)
	}
}

func TestSocketPath(t *testing.T) {
	seen := make(map[string]bool)
	for _, resource := range []string{"nvidia.com/gpu", "a/b", "nvidia.com/" + strings.Repeat("x", 100), "nvidia.com/mig-1g.5gb.me", "odd name/:%"} {
		for _, dir := range []string{"/d", "/var/lib/kubelet/device-plugins", "/" + strings.Repeat("d", 80)} {
			path, err := socketPath(dir, resource)
			if err != nil {
				t.Fatal(err)
			}
			base := filepath.Base(path)
			if len(path) > 107 || filepath.Dir(path) != dir || seen[path] || strings.ContainsAny(base, ":/% ") {
				t.Errorf("socketPath(%q, %q) = %q", dir, resource, path)
			}
			seen[path] = true
		}
	}
	if path, _ := socketPath("/d", "nvidia.com/gpu"); !strings.HasPrefix(path, "/d/ashlar-nvidia.com-gpu-") {
		t.Errorf("path is %s", path)
	}
	// The longest folder that leaves room gives a path that the system accepts.
	dir := shortDir(t)
	dir = filepath.Join(dir, strings.Repeat("d", 107-len(dir)-1-len("/ashlar--ABCDEFGHIJKL.sock")))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	path, err := socketPath(dir, "nvidia.com/gpu")
	if err != nil || len(path) != 107 {
		t.Fatalf("socketPath = %q (%d bytes), %v; want 107 bytes", path, len(path), err)
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	listener.Close()
	if _, err := socketPath(dir+"d", "nvidia.com/gpu"); err == nil || !strings.Contains(err.Error(), "1 bytes too long") {
		t.Errorf("one byte more: error is %v", err)
	}
}

func TestStaleSocketsGo(t *testing.T) {
	k := startKubelet(t, shortDir(t))
	leave := func(name string, served bool, age time.Duration) string {
		path := filepath.Join(k.dir, name)
		listener, err := net.Listen("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		if !served {
			listener.(*net.UnixListener).SetUnlinkOnClose(false)
			listener.Close()
		} else {
			t.Cleanup(func() { listener.Close() })
		}
		then := time.Now().Add(-age)
		if err := os.Chtimes(path, then, then); err != nil {
			t.Fatal(err)
		}
		return path
	}
	stale := leave("ashlar-nvidia.com-gpu-OLD.sock", false, time.Hour)
	keep := []string{
		leave("ashlar-nvidia.com-gpu-YOUNG.sock", false, 0),
		leave("ashlar-nvidia.com-gpu-SERVED.sock", true, time.Hour),
		leave("nvidia-gpu.sock", false, time.Hour),
	}
	file := filepath.Join(k.dir, "ashlar-file.sock")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Chtimes(file, time.Unix(0, 0), time.Unix(0, 0)); err != nil {
		t.Fatal(err)
	}
	startServer(t, k.dir)
	if _, err := os.Stat(stale); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("%s is still there", stale)
	}
	for _, path := range append(keep, file) {
		if _, err := os.Stat(path); err != nil {
			t.Error(err)
		}
	}
}
