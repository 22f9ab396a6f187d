package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	pluginapi "k8s.io/kubelet/pkg/apis/deviceplugin/v1beta1"
	podresourcesapi "k8s.io/kubelet/pkg/apis/podresources/v1"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/health"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/machine/machinetest"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// kubelet is the part of a kubelet that an agent talks to.
type kubelet struct {
	pluginapi.UnimplementedRegistrationServer
	podresourcesapi.UnimplementedPodResourcesListerServer
	t   *testing.T
	dir string

	servers []*grpc.Server

	mu sync.Mutex
	// lists are the answers of ListAndWatch by resource, in order.
	lists map[string][][]*pluginapi.Device
	// endpoints are the socket names by resource, in order of registration.
	endpoints map[string][]string
	held      []*podresourcesapi.PodResources
	// forget ends each watch after its next answer, once.
	forget bool
	// broken makes the pod-resources API fail.
	broken bool
}

// newKubelet makes the folders of a kubelet that does not run.
func newKubelet(t *testing.T) *kubelet {
	t.Helper()
	dir, err := os.MkdirTemp("", "k")
	if err != nil {
		t.Fatal(err)
	}
	k := &kubelet{t: t, dir: dir}
	for _, d := range []string{"device-plugins", "pod-resources"} {
		if err := os.Mkdir(filepath.Join(dir, d), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	t.Cleanup(func() {
		k.shutdown()
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	return k
}

// boot runs the kubelet, which removes all sockets first as a real one does.
func (k *kubelet) boot() {
	k.t.Helper()
	k.mu.Lock()
	k.lists, k.endpoints = make(map[string][][]*pluginapi.Device), make(map[string][]string)
	k.mu.Unlock()
	old, err := filepath.Glob(filepath.Join(k.dir, "*", "*.sock"))
	if err != nil {
		k.t.Fatal(err)
	}
	for _, path := range old {
		if err := os.Remove(path); err != nil {
			k.t.Fatal(err)
		}
	}
	for _, d := range []string{"pod-resources", "device-plugins"} {
		listener, err := net.Listen("unix", filepath.Join(k.dir, d, "kubelet.sock"))
		if err != nil {
			k.t.Fatal(err)
		}
		server := grpc.NewServer()
		if d == "device-plugins" {
			pluginapi.RegisterRegistrationServer(server, k)
		} else {
			podresourcesapi.RegisterPodResourcesListerServer(server, k)
		}
		k.servers = append(k.servers, server)
		go func() { _ = server.Serve(listener) }()
	}
}

func (k *kubelet) shutdown() {
	for _, s := range k.servers {
		s.Stop()
	}
	k.servers = nil
}

func (k *kubelet) List(context.Context, *podresourcesapi.ListPodResourcesRequest) (*podresourcesapi.ListPodResourcesResponse, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.broken {
		return nil, errors.New("broken")
	}
	return &podresourcesapi.ListPodResourcesResponse{PodResources: k.held}, nil
}

func (k *kubelet) Register(_ context.Context, r *pluginapi.RegisterRequest) (*pluginapi.Empty, error) {
	k.mu.Lock()
	defer k.mu.Unlock()
	k.endpoints[r.ResourceName] = append(k.endpoints[r.ResourceName], r.Endpoint)
	go k.watch(r.ResourceName, r.Endpoint)
	return &pluginapi.Empty{}, nil
}

func (k *kubelet) dial(endpoint string) (pluginapi.DevicePluginClient, func(), error) {
	conn, err := grpc.NewClient("unix://"+filepath.Join(k.dir, "device-plugins", endpoint), grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		return nil, nil, err
	}
	return pluginapi.NewDevicePluginClient(conn), func() { _ = conn.Close() }, nil
}

func (k *kubelet) watch(resource, endpoint string) {
	client, done, err := k.dial(endpoint)
	if err != nil {
		return
	}
	defer done()
	stream, err := client.ListAndWatch(context.Background(), &pluginapi.Empty{})
	for err == nil {
		var answer *pluginapi.ListAndWatchResponse
		if answer, err = stream.Recv(); err == nil {
			k.mu.Lock()
			k.lists[resource] = append(k.lists[resource], answer.Devices)
			stop := k.forget
			k.forget = false
			k.mu.Unlock()
			if stop {
				return
			}
		}
	}
}

// healthy counts the healthy devices of the last list of a resource; -1 where
// there is none.
func (k *kubelet) healthy(resource string) int {
	k.mu.Lock()
	defer k.mu.Unlock()
	lists := k.lists[resource]
	if len(lists) == 0 {
		return -1
	}
	return healthy(lists[len(lists)-1])
}

func healthy(devices []*pluginapi.Device) int {
	n := 0
	for _, d := range devices {
		if d.Health == pluginapi.Healthy {
			n++
		}
	}
	return n
}

// counts are the numbers of healthy devices of all lists of a resource so far.
func (k *kubelet) counts(resource string) []int {
	k.mu.Lock()
	defer k.mu.Unlock()
	var counts []int
	for _, l := range k.lists[resource] {
		counts = append(counts, healthy(l))
	}
	return counts
}

// await waits until a resource has so many healthy devices.
func (k *kubelet) await(resource string, want int) {
	k.t.Helper()
	for deadline := time.Now().Add(15 * time.Second); k.healthy(resource) != want; time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			k.t.Fatalf("%s: %d healthy devices, want %d; lists so far: %v", resource, k.healthy(resource), want, k.counts(resource))
		}
	}
}

// sockets lists the sockets of the agent.
func (k *kubelet) sockets() []string {
	k.t.Helper()
	paths, err := filepath.Glob(filepath.Join(k.dir, "device-plugins", "ashlar-*"))
	if err != nil {
		k.t.Fatal(err)
	}
	return paths
}

// records keeps what an agent logs.
type records struct {
	mu   sync.Mutex
	text strings.Builder
}

func (r *records) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.text.Write(p)
}

func (r *records) contains(parts ...string) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.ContainsFunc(strings.Split(r.text.String(), "\n"), func(line string) bool {
		return !slices.ContainsFunc(parts, func(p string) bool { return !strings.Contains(line, p) })
	})
}

// awaitLog waits for a line of the log with all the parts.
func awaitLog(t *testing.T, r *records, parts ...string) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); !r.contains(parts...); time.Sleep(20 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("no line with %q in the log:\n%s", parts, r.text.String())
		}
	}
}

// running is an agent on a simulated machine.
type running struct {
	*kubelet
	machine *machine.Machine
	log     *records
	options Options
	config  string
	stop    func()
}

// start runs an agent on a machine with a config, "" for none.
func start(t *testing.T, description, config string) *running {
	t.Helper()
	t.Parallel()
	r := &running{kubelet: newKubelet(t), machine: machinetest.New(t, description), log: &records{}}
	r.boot()
	r.options = Options{
		NodeName: "node", KubeletDir: r.dir, StateDir: t.TempDir(), CDIDir: t.TempDir(),
		Open: func() (Hardware, error) { return unclosed{r.machine}, nil },
		Describe: func(m *gpu.Machine, class cdi.Class, _ *sharing.Flags) (*specs.Spec, error) {
			return cdi.Simulated(m, class, false)
		},
		Health: health.Policy{Quiet: time.Second, MaxQuiet: time.Minute, Memory: time.Hour}, DrainTimeout: 5 * time.Second,
		Log: slog.New(slog.NewTextHandler(r.log, nil)),
	}
	if config != "" {
		r.config = filepath.Join(t.TempDir(), "config.yaml")
		r.options.ConfigFile = r.config
		r.write(config)
	}
	r.run()
	t.Cleanup(func() { r.stop() })
	return r
}

// unclosed keeps the machine open for the next agent.
type unclosed struct{ *machine.Machine }

func (unclosed) Close() error { return nil }

// run starts the agent.
func (r *running) run() {
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	options := r.options
	go func() { ended <- Run(ctx, options) }()
	r.stop = sync.OnceFunc(func() {
		cancel()
		if err := <-ended; err != nil {
			r.t.Errorf("the agent ended with %v", err)
		}
	})
}

func (r *running) write(config string) {
	r.t.Helper()
	if err := os.WriteFile(r.config, []byte(config), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

func slices4(replicas string) string {
	return "sharing:\n  timeSlicing:\n    resources:\n    - name: nvidia.com/gpu\n      replicas: " + replicas + "\n"
}

const twoA100 = "- {product: NVIDIA A100-SXM4-40GB, count: 2}\n"

func TestConfigIsReloaded(t *testing.T) {
	r := start(t, twoA100, slices4("4"))
	r.await("nvidia.com/gpu", 8)
	r.write(slices4("8"))
	r.await("nvidia.com/gpu", 16)
	r.write(slices4("x"))
	awaitLog(t, r.log, "config refused", r.config+":5", "replicas")
	if err := os.Remove(r.config); err != nil {
		t.Fatal(err)
	}
	awaitLog(t, r.log, "degraded", "no such file")
	r.write(slices4("2"))
	r.await("nvidia.com/gpu", 4)
	if got := r.counts("nvidia.com/gpu"); !slices.Equal(got, []int{8, 16, 4}) {
		t.Errorf("healthy devices over time were %v, want 8, 16, 4: a bad or missing config changes nothing", got)
	}
	if n := len(r.endpoints["nvidia.com/gpu"]); n != 1 {
		t.Errorf("registered %d times, want once", n)
	}
}

// TestConfigMapVolume swaps the config as the kubelet does in a volume: the file
// is a link to ..data/config.yaml, and ..data a link that is replaced.
func TestConfigMapVolume(t *testing.T) {
	r := start(t, twoA100, slices4("4"))
	r.await("nvidia.com/gpu", 8)
	r.stop()

	volume := t.TempDir()
	put := func(version, config string) {
		t.Helper()
		dir := filepath.Join(volume, version)
		if err := os.Mkdir(dir, 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(dir, "config.yaml"), []byte(config), 0o600); err != nil {
			t.Fatal(err)
		}
		if err := os.Symlink(version, filepath.Join(volume, "..data_tmp")); err != nil {
			t.Fatal(err)
		}
		if err := os.Rename(filepath.Join(volume, "..data_tmp"), filepath.Join(volume, "..data")); err != nil {
			t.Fatal(err)
		}
	}
	put("..2026_1", slices4("2"))
	r.config = filepath.Join(volume, "config.yaml")
	r.options.ConfigFile = r.config
	if err := os.Symlink("..data/config.yaml", r.config); err != nil {
		t.Fatal(err)
	}
	r.run()
	r.await("nvidia.com/gpu", 4)
	put("..2026_2", slices4("3"))
	r.await("nvidia.com/gpu", 6)
}

func TestLastGoodConfigSurvivesARestart(t *testing.T) {
	r := start(t, twoA100, slices4("4"))
	r.await("nvidia.com/gpu", 8)
	r.write("sharing: 3\n")
	awaitLog(t, r.log, "config refused")
	r.stop()
	r.run()
	awaitLog(t, r.log, "the last good config is in force")
	r.await("nvidia.com/gpu", 8)
	// One that is good by itself and not for this machine is bad, too.
	r.write("flags: {migStrategy: single}\nsharing: {mps: {resources: [{name: nvidia.com/gpu, replicas: 2}]}}\n")
	awaitLog(t, r.log, "config refused", "mps")
	r.stop()
	r.run()
	r.await("nvidia.com/gpu", 8)
}

// TestRefusedConfigIsTriedAgain edits the config before the machine is cut to
// fit it, as people do.
func TestRefusedConfigIsTriedAgain(t *testing.T) {
	r := start(t, "- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 3g.20gb, start: 0}]}\n- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 1g.5gb, start: 0}]}\n", "flags: {migStrategy: mixed}\n")
	r.await("nvidia.com/mig-3g.20gb", 1)
	r.write("flags: {migStrategy: single}\n")
	awaitLog(t, r.log, "config refused, the config in force stays", "single")
	m, err := r.machine.Read()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.machine.DestroyMIG(m.GPUs[1].MIG.Devices[0].UUID); err != nil {
		t.Fatal(err)
	}
	if _, err := r.machine.CreateMIG(m.GPUs[1].UUID, gpu.MIGInstance{ProfileID: 9, Placement: gpu.Placement{Start: 4, Size: 4}}); err != nil {
		t.Fatal(err)
	}
	r.await("nvidia.com/gpu", 2)
	r.await("nvidia.com/mig-3g.20gb", 0)
}

func TestNothingIsOfferedWithoutAGoodConfig(t *testing.T) {
	r := start(t, twoA100, "version: v9\n")
	awaitLog(t, r.log, "config refused, no config is in force", "v9")
	time.Sleep(3 * time.Second)
	if got := r.healthy("nvidia.com/gpu"); got != -1 {
		t.Errorf("%d GPUs are offered by a config that nobody wrote", got)
	}
	r.write("version: v1\n")
	r.await("nvidia.com/gpu", 2)
}

// hanging is a driver whose reading may never return.
type hanging struct {
	*machine.Machine
	hang chan struct{}
}

func (hanging) Close() error { return nil }

func (h hanging) Read() (gpu.Machine, error) {
	<-h.hang
	return h.Machine.Read()
}

func TestHangingDriver(t *testing.T) {
	r := start(t, twoA100, "")
	r.await("nvidia.com/gpu", 2)
	r.stop()
	h := hanging{r.machine, make(chan struct{}, 100)}
	r.options.Open = func() (Hardware, error) { return h, nil }
	h.hang <- struct{}{} // one reading returns, the next hangs
	r.run()
	awaitLog(t, r.log, "a reading takes longer")
	r.await("nvidia.com/gpu", 0)
	// It still obeys, and still notices a kubelet's restart.
	r.shutdown()
	time.Sleep(100 * time.Millisecond)
	r.boot()
	r.await("nvidia.com/gpu", 0)
	for range 50 {
		h.hang <- struct{}{}
	}
	r.await("nvidia.com/gpu", 2)
}

// TestKubeletThatForgets ends the kubelet's watch while it runs on.
func TestKubeletThatForgets(t *testing.T) {
	r := start(t, twoA100, "")
	r.await("nvidia.com/gpu", 2)
	r.mu.Lock()
	r.forget = true
	r.mu.Unlock()
	m, err := r.machine.Read()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.machine.SetLost(m.GPUs[0].UUID, true); err != nil {
		t.Fatal(err)
	}
	awaitLog(t, r.log, "registering", "does not watch it any more")
	r.await("nvidia.com/gpu", 1)
}

func TestAllSlotsOfALostGPUGoAtOnce(t *testing.T) {
	r := start(t, twoA100, slices4("4"))
	r.await("nvidia.com/gpu", 8)
	m, err := r.machine.Read()
	if err != nil {
		t.Fatal(err)
	}
	if err := r.machine.SetLost(m.GPUs[1].UUID, true); err != nil {
		t.Fatal(err)
	}
	r.await("nvidia.com/gpu", 4)
	if err := r.machine.SetLost(m.GPUs[1].UUID, false); err != nil {
		t.Fatal(err)
	}
	r.await("nvidia.com/gpu", 8)
	if err := r.machine.DriverDown(true); err != nil {
		t.Fatal(err)
	}
	r.await("nvidia.com/gpu", 0)
	if err := r.machine.DriverDown(false); err != nil {
		t.Fatal(err)
	}
	r.await("nvidia.com/gpu", 8)
	if got := r.counts("nvidia.com/gpu"); !slices.Equal(got, []int{8, 4, 8, 0, 8}) {
		t.Errorf("healthy devices over time were %v, want 8, 4, 8, 0, 8", got)
	}
}

func TestMIGChangeRetiresOldResources(t *testing.T) {
	r := start(t, "- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 1g.5gb, count: 7}]}\n", "flags: {migStrategy: mixed}\n")
	r.await("nvidia.com/mig-1g.5gb", 7)
	old := r.sockets()
	m, err := r.machine.Read()
	if err != nil {
		t.Fatal(err)
	}
	for _, d := range m.GPUs[0].MIG.Devices {
		if err := r.machine.DestroyMIG(d.UUID); err != nil {
			t.Fatal(err)
		}
	}
	for _, start := range []int{0, 4} {
		if _, err := r.machine.CreateMIG(m.GPUs[0].UUID, gpu.MIGInstance{ProfileID: 9, Placement: gpu.Placement{Start: start, Size: 4}}); err != nil {
			t.Fatal(err)
		}
	}
	r.await("nvidia.com/mig-3g.20gb", 2)
	r.await("nvidia.com/mig-1g.5gb", 0)
	for deadline := time.Now().Add(5 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		now := r.sockets()
		if len(now) == 1 && now[0] != old[0] {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("sockets are %v, of the old resource %v", now, old)
		}
	}
	spec, err := os.ReadFile(filepath.Join(r.options.CDIDir, "k8s.device-plugin.nvidia.com-gpu.json"))
	if err != nil {
		t.Fatal(err)
	}
	if m, err = r.machine.Read(); err != nil {
		t.Fatal(err)
	}
	for _, d := range m.GPUs[0].MIG.Devices {
		if !strings.Contains(string(spec), d.UUID) {
			t.Errorf("the CDI spec lacks %s:\n%s", d.UUID, spec)
		}
	}
}

func TestKubeletRestart(t *testing.T) {
	r := start(t, twoA100, "")
	r.await("nvidia.com/gpu", 2)
	first := r.sockets()
	r.shutdown()
	time.Sleep(100 * time.Millisecond)
	r.boot()
	r.await("nvidia.com/gpu", 2)
	if second := r.sockets(); len(second) != 1 || second[0] == first[0] {
		t.Errorf("sockets were %v and are %v; each registration needs a new one", first, second)
	}
}

func TestHoldersAreReadBeforeAnythingIsOffered(t *testing.T) {
	r := start(t, twoA100, slices4("2")+"    - name: nvidia.com/gpu-exclusive\n      replicas: 1\n")
	r.await("nvidia.com/gpu", 4)
	r.await("nvidia.com/gpu-exclusive", 2)
	r.stop()
	m, err := r.machine.Read()
	if err != nil {
		t.Fatal(err)
	}
	hold := func(resource string, ids ...string) {
		r.mu.Lock()
		defer r.mu.Unlock()
		r.held = nil
		if len(ids) > 0 {
			r.held = []*podresourcesapi.PodResources{{Name: "p", Namespace: "d", Containers: []*podresourcesapi.ContainerResources{
				{Name: "c", Devices: []*podresourcesapi.ContainerDevices{{ResourceName: resource, DeviceIds: ids}}},
			}}}
		}
	}
	hold("nvidia.com/gpu-exclusive", m.GPUs[0].UUID)
	r.shutdown()
	time.Sleep(100 * time.Millisecond)
	r.boot()
	r.run()
	r.await("nvidia.com/gpu", 2)
	if got := r.counts("nvidia.com/gpu"); slices.Max(got) > 2 {
		t.Errorf("healthy slots over time were %v; those of the held GPU were offered", got)
	}
	hold("nvidia.com/gpu", m.GPUs[1].UUID+"::1")
	r.await("nvidia.com/gpu-exclusive", 1)
	r.await("nvidia.com/gpu", 4)
	hold("")
	r.await("nvidia.com/gpu-exclusive", 2)
}

// checkpoint writes the kubelet's checkpoint with one allocation, or a file that
// is none.
func (r *running) checkpoint(uid, resource, device string) {
	r.t.Helper()
	text := "?"
	if uid != "" {
		text = fmt.Sprintf(`{"Data":{"PodDeviceEntries":[{"PodUID":%q,"ContainerName":"c","ResourceName":%q,"DeviceIDs":{"0":[%q]}}]}}`, uid, resource, device)
	}
	if err := os.WriteFile(filepath.Join(r.dir, "device-plugins", "kubelet_internal_checkpoint"), []byte(text), 0o600); err != nil {
		r.t.Fatal(err)
	}
}

const bothViews = "sharing: {timeSlicing: {resources: [{name: nvidia.com/gpu, replicas: 2}, {name: nvidia.com/gpu-exclusive, replicas: 1}]}}\n"

// TestCheckpointCounts: right after a kubelet's start its list is empty, and
// without an apiserver nothing says that the pods in the checkpoint have ended.
func TestCheckpointCounts(t *testing.T) {
	r := start(t, twoA100, bothViews)
	r.await("nvidia.com/gpu", 4)
	m, err := r.machine.Read()
	if err != nil {
		t.Fatal(err)
	}
	r.shutdown()
	time.Sleep(100 * time.Millisecond)
	r.checkpoint("u", "nvidia.com/gpu-exclusive", m.GPUs[0].UUID)
	r.boot()
	r.await("nvidia.com/gpu", 2)
	if got := r.counts("nvidia.com/gpu"); slices.Max(got) > 2 {
		t.Errorf("healthy slots over time were %v; the slots of a held GPU were offered", got)
	}
}

// TestNothingIsOfferedWithoutHolders: with neither source nobody knows what is
// held.
func TestNothingIsOfferedWithoutHolders(t *testing.T) {
	r := start(t, twoA100, bothViews)
	r.await("nvidia.com/gpu", 4)
	r.shutdown()
	time.Sleep(100 * time.Millisecond)
	r.mu.Lock()
	r.broken = true
	r.mu.Unlock()
	r.checkpoint("", "", "")
	r.boot()
	awaitLog(t, r.log, "degraded", "part=checkpoint")
	time.Sleep(2 * interval)
	if got := r.healthy("nvidia.com/gpu"); got != -1 {
		t.Errorf("%d slots are offered although holders are not known", got)
	}
	// The checkpoint alone is believed, and followed.
	m, err := r.machine.Read()
	if err != nil {
		t.Fatal(err)
	}
	r.checkpoint("u", "nvidia.com/gpu-exclusive", m.GPUs[0].UUID)
	r.await("nvidia.com/gpu", 2)
	r.checkpoint("u", "nvidia.com/gpu-exclusive", "GPU-of-another-node")
	r.await("nvidia.com/gpu", 4)
}

// TestUnwritableCDI: a container runtime could not look the devices up.
func TestUnwritableCDI(t *testing.T) {
	r := start(t, twoA100, "")
	r.await("nvidia.com/gpu", 2)
	r.stop()
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	r.options.CDIDir = filepath.Join(file, "cdi")
	r.shutdown()
	time.Sleep(100 * time.Millisecond)
	r.boot()
	r.run()
	r.await("nvidia.com/gpu", 0)
	r.stop()
	// Other strategies do without.
	r.options.Override = func(c *sharing.Config) {
		c.Flags.Plugin.DeviceListStrategies = []sharing.DeviceListStrategy{sharing.ListEnvvar}
	}
	r.run()
	r.await("nvidia.com/gpu", 2)
}

func TestBrokenDriverAtTheStart(t *testing.T) {
	t.Parallel()
	k := newKubelet(t)
	k.boot()
	o := Options{
		NodeName: "n", KubeletDir: k.dir, StateDir: t.TempDir(), CDIDir: t.TempDir(), Log: slog.New(slog.DiscardHandler),
		Open: func() (Hardware, error) { return nil, os.ErrNotExist },
	}
	if err := Run(t.Context(), o); err == nil {
		t.Error("no error although failOnInitError is the default")
	}
	// Told not to fail, it waits for the driver.
	var mu sync.Mutex
	tries := 0
	o.Open = func() (Hardware, error) {
		mu.Lock()
		defer mu.Unlock()
		if tries++; tries < 3 {
			return nil, os.ErrNotExist
		}
		return machinetest.New(t, twoA100), nil
	}
	o.Override = func(c *sharing.Config) { c.Flags.FailOnInitError = false }
	o.Describe = func(m *gpu.Machine, class cdi.Class, _ *sharing.Flags) (*specs.Spec, error) {
		return cdi.Simulated(m, class, false)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- Run(ctx, o) }()
	k.await("nvidia.com/gpu", 2)
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func TestAgentEndsWithoutEmptyingTheNode(t *testing.T) {
	r := start(t, twoA100, "")
	r.await("nvidia.com/gpu", 2)
	r.stop()
	if got := r.counts("nvidia.com/gpu"); !slices.Equal(got, []int{2}) {
		t.Errorf("healthy devices over time were %v, want 2 alone: a successor takes over", got)
	}
	if left := r.sockets(); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}

func TestRemaining(t *testing.T) {
	m := machinetest.Read(t, "- {product: NVIDIA A100-SXM4-40GB, count: 2}\n- {product: NVIDIA A100-SXM4-40GB, mig: [{profile: 3g.20gb, count: 2}]}\n")
	p, _ := plan(t, m, "flags: {migStrategy: mixed}")
	changed := *m
	changed.GPUs = slices.Clone(m.GPUs)
	changed.GPUs[0].MIG.Enabled = true // cannot be used as a whole any more
	changed.GPUs[1].Health = gpu.Health{State: gpu.Unhealthy, Reason: "test"}
	changed.GPUs[2].MIG.Devices = nil
	left := remaining(p, &changed)
	if len(left.Resources) != 1 || len(left.Resources[0].Devices) != 1 {
		t.Fatalf("left %+v, want GPU 1 alone", left)
	}
	if d := left.Resources[0].Devices[0]; d.GPU != m.GPUs[1].UUID || d.Health.OK() {
		t.Errorf("left %+v, want GPU 1 with its present health", d)
	}
	if len(p.Resources) != 2 {
		t.Error("the old plan was changed")
	}
}
