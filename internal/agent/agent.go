package agent

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"
	"sigs.k8s.io/controller-runtime/pkg/client"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/deviceplugin"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/health"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/migmanager"
	"github.com/ashlar-gpu/ashlar/internal/podresources"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

const (
	// interval is the longest time between two steps. Config file, kubelet and
	// holders are looked at in each: looking is cheap and cannot miss an edit, as
	// a file watch can when a symlink is swapped.
	interval = 2 * time.Second
	// callTimeout bounds a call to the kubelet or the apiserver.
	callTimeout = 5 * time.Second
	// settle is the pause after something changed, so that what belongs together
	// is handled in one step.
	settle = 100 * time.Millisecond
	// refreshPoll is how often one who waits for a new reading looks for it.
	refreshPoll = 20 * time.Millisecond
)

// Options says what to run on.
type Options struct {
	// NodeName is the name of the node object.
	NodeName string
	// KubeletDir is the kubelet's folder, usually /var/lib/kubelet.
	KubeletDir string
	// StateDir is where the last good config is kept.
	StateDir string
	// CDIDir is where CDI specs are written, usually /var/run/cdi.
	CDIDir string
	// ConfigFile is the device-plugin config, "" for the default one.
	ConfigFile string
	// Override changes a config that was read, as flags do; nil for none.
	Override func(*sharing.Config)
	// Open opens the machine. It is called again after it has failed.
	Open func() (Hardware, error)
	// Describe makes the CDI spec of a class of devices.
	Describe func(m *gpu.Machine, class cdi.Class, flags *sharing.Flags) (*specs.Spec, error)
	// ProcRoot is where the driver's files under /proc are, "" for a machine
	// without a driver.
	ProcRoot string
	// Health says when a GPU counts as unhealthy and how it returns.
	Health health.Policy
	// BootID tells one boot of the host from the next.
	BootID string
	// MIGConfigFile has the configs that the label nvidia.com/mig.config names, ""
	// for those that fit the machine.
	MIGConfigFile string
	// DrainTimeout is how long pods have to leave a GPU that is cut anew.
	DrainTimeout time.Duration
	// Client reaches the apiserver, nil for none.
	Client kubernetes.Interface
	// GPUNodes reaches the GPUNodes, nil where none is written.
	GPUNodes client.WithWatch
	Log      *slog.Logger
}

func (o *Options) devicePlugins() string { return filepath.Join(o.KubeletDir, "device-plugins") }

func (o *Options) kubeletSocket() string { return filepath.Join(o.devicePlugins(), "kubelet.sock") }

func (o *Options) podResourcesSocket() string {
	return filepath.Join(o.KubeletDir, "pod-resources", "kubelet.sock")
}

// agent is the reconciler. Its fields belong to the goroutine of Run, but for
// those that say otherwise.
type agent struct {
	Options
	*troubles
	api       *nodeAPI // nil without apiserver
	publisher *publisher
	steering  *steering
	mig       *migmanager.Manager // nil without apiserver or machine
	ledger    *deviceplugin.Ledger
	turns     turns
	reuse     reuse
	blocks    blocks
	// wake makes the next step come now.
	wake chan struct{}
	// beside are the goroutines that end before Run returns.
	beside sync.WaitGroup

	reader reader
	events inbox
	// raw is the last reading, machine the same with the verdicts of the health
	// rules; both are nil until the first.
	raw, machine *gpu.Machine
	tracker      *health.Tracker
	healthSaved  []byte
	cordoned     map[string]bool
	// parents remembers the GPU of every GPU and MIG device ever seen: a pod may
	// hold one that is gone.
	parents map[string]string

	config configState
	plan   *sharing.Plan // nil until the first one

	kubelet kubeletState
	servers map[string]*served
	// holders are the containers that hold devices; held are the UUIDs of these,
	// sorted.
	holders []kube.Holder
	held    []string
	cdi     cdiState

	// facts are what the MIG manager looks at, and served the number of the reading
	// that is offered.
	facts  atomic.Pointer[migmanager.Facts]
	served atomic.Int64
}

// Run serves the node's GPUs until ctx ends. It returns an error only where it
// cannot begin: a driver that does not answer while the config says
// failOnInitError, or folders that cannot be used.
func Run(ctx context.Context, o Options) error {
	a := newAgent(o)
	if a.Override == nil {
		a.Override = func(*sharing.Config) {}
	}
	if err := os.MkdirAll(a.StateDir, 0o755); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	if a.Client != nil {
		api, err := newNodeAPI(ctx, &a.Options, a.kick)
		if err != nil {
			return err
		}
		a.api, a.publisher = api, newPublisher(api, a.troubles)
		a.reuse = reuse{listPods: api.podsNow, checkpoint: func() ([]podresources.Entry, error) {
			return podresources.Checkpoint(a.devicePlugins())
		}}
		a.steering = newSteering(a.NodeName, api.podsNow, a.Log)
		a.steering.listed = func(err error) {
			if err != nil {
				a.trouble("steering", "the pods of the node cannot be listed, so plans are not followed: %v", err)
			} else {
				a.well("steering")
			}
		}
		a.steering.invalid = func(pod *corev1.Pod, err error) {
			api.podEvent(pod, corev1.EventTypeWarning, reasonPlanInvalid, "%v", err)
		}
	}
	// What runs beside the reconciler ends before it returns.
	ctx, cancel := context.WithCancel(ctx)
	defer func() {
		cancel()
		a.beside.Wait()
		a.close()
	}()
	if a.publisher != nil {
		a.beside.Go(func() { a.publisher.run(ctx) })
	}
	a.restoreHealth()
	a.loadConfig()
	if err := a.openHardware(ctx); err != nil {
		if a.config.failOnInitError() {
			return err
		}
		a.trouble("driver", "%v", err)
	}
	for {
		a.step(ctx, time.Now())
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(interval):
		case <-a.wake:
			select {
			case <-ctx.Done():
				return nil
			case <-time.After(settle):
			}
		}
	}
}

// newAgent returns an agent that has done nothing yet.
func newAgent(o Options) *agent {
	a := &agent{
		Options: o, ledger: deviceplugin.NewLedger(), wake: make(chan struct{}, 1),
		parents: make(map[string]string), servers: make(map[string]*served),
	}
	a.troubles = &troubles{log: o.Log, now: make(map[string]string), event: func(format string, args ...any) {
		a.api.event(corev1.EventTypeWarning, reasonDegraded, format, args...)
	}}
	a.blocks.ledger = a.ledger
	return a
}

// kick makes the next step come soon. It never blocks.
func (a *agent) kick() {
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

// close ends the servers without emptying them: the kubelet then keeps the
// node's capacity for a while, and a successor takes over.
func (a *agent) close() {
	for _, s := range a.servers {
		s.close()
	}
	a.reader.close()
}

// step compares wanted with served and mends the difference. Each part copes
// with the failure of the ones before.
func (a *agent) step(ctx context.Context, now time.Time) {
	a.loadConfig()
	a.readMachine(ctx, now)
	if a.machine == nil {
		return
	}
	a.cordon()
	a.makePlan()
	if a.plan == nil {
		return
	}
	a.meetKubelet(now)
	a.readHolders(ctx, now)
	a.writeCDI(now)
	a.serve(ctx, now)
	a.inform()
	a.served.Store(a.reader.taken)
}

// trouble reports that a part is degraded.
func (a *agent) trouble(part, format string, args ...any) { a.report(part, format, args...) }

// well says that the trouble with a part is over.
func (a *agent) well(part string) { a.over(part) }
