package agent

import (
	"context"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/deviceplugin"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
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
	// labelsAgain is when labels are looked at again although nothing changed, and
	// after the apiserver failed.
	labelsAgain = time.Minute
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
	// Client reaches the apiserver, nil for none.
	Client kubernetes.Interface
	Log    *slog.Logger
}

func (o *Options) devicePlugins() string { return filepath.Join(o.KubeletDir, "device-plugins") }

func (o *Options) kubeletSocket() string { return filepath.Join(o.devicePlugins(), "kubelet.sock") }

func (o *Options) podResourcesSocket() string {
	return filepath.Join(o.KubeletDir, "pod-resources", "kubelet.sock")
}

// agent is the reconciler. Its fields belong to the goroutine of Run.
type agent struct {
	Options
	api    *nodeAPI // nil without apiserver
	ledger *deviceplugin.Ledger
	// wake makes the next step come now.
	wake chan struct{}

	reader  reader
	machine *gpu.Machine // nil until the first reading
	// parents remembers the GPU of every GPU and MIG device ever seen: a pod may
	// hold one that is gone.
	parents map[string]string

	config configState
	plan   *sharing.Plan // nil until the first one

	kubelet kubeletState
	servers map[string]*served
	// held are the GPUs and MIG devices that containers hold, sorted.
	held []string
	cdi  cdiState
	// labels are those that the node had at labelsAt.
	labels   map[string]string
	labelsAt time.Time
	// degraded are the troubles that were reported and are not over.
	degraded map[string]string
}

// Run serves the node's GPUs until ctx ends. It returns an error only where it
// cannot begin: a driver that does not answer while the config says
// failOnInitError, or folders that cannot be used.
func Run(ctx context.Context, o Options) error {
	a := &agent{
		Options: o, ledger: deviceplugin.NewLedger(), wake: make(chan struct{}, 1),
		parents: make(map[string]string), servers: make(map[string]*served), degraded: make(map[string]string),
	}
	if a.Override == nil {
		a.Override = func(*sharing.Config) {}
	}
	if err := os.MkdirAll(a.StateDir, 0o755); err != nil {
		return fmt.Errorf("state folder: %w", err)
	}
	if a.Client != nil {
		api, err := newNodeAPI(ctx, a.Client, a.NodeName, a.kick, a.Log)
		if err != nil {
			return err
		}
		a.api = api
	}
	defer a.close()
	a.loadConfig()
	if err := a.openHardware(); err != nil {
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
	a.readMachine(now)
	if a.machine == nil {
		return
	}
	a.makePlan()
	if a.plan == nil {
		return
	}
	a.meetKubelet(now)
	a.readHolders(ctx, now)
	a.writeCDI(now)
	a.serve(ctx, now)
	a.writeLabels(ctx, now)
}

// trouble reports that a part is degraded: in the log whenever the reason
// changes, in an Event once, since reasons may hold texts that never repeat.
func (a *agent) trouble(part, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	before, already := a.degraded[part]
	if before == text {
		return
	}
	a.degraded[part] = text
	a.Log.Error("degraded", "part", part, "reason", text)
	if !already {
		a.api.event(corev1.EventTypeWarning, reasonDegraded, "%s: %s", part, text)
	}
}

// well says that the trouble with something is over.
func (a *agent) well(what string) {
	if _, ok := a.degraded[what]; ok {
		delete(a.degraded, what)
		a.Log.Info("recovered", "part", what)
	}
}

// reportHealth says which GPUs changed their health since the last reading.
func (a *agent) reportHealth(m *gpu.Machine) {
	for _, g := range m.GPUs {
		was := gpu.Healthy
		if a.machine != nil {
			if old := a.machine.ByUUID(g.UUID); old != nil {
				was = old.Health.State
			}
		}
		switch {
		case g.Health.State == was:
		case g.Health.OK():
			a.Log.Info("GPU is healthy again", "gpu", g.UUID)
			a.api.event(corev1.EventTypeNormal, reasonGPUHealthy, "GPU %d (%s) is healthy again", g.Index, g.UUID)
		default:
			a.Log.Warn("GPU is unhealthy", "gpu", g.UUID, "state", g.Health.State, "reason", g.Health.Reason)
			a.api.event(corev1.EventTypeWarning, reasonGPUUnhealthy, "GPU %d (%s) is %s: %s", g.Index, g.UUID, g.Health.State, g.Health.Reason)
		}
	}
}

// writeLabels keeps the node's labels true. They are looked at when they change
// and now and then, since others can change them.
func (a *agent) writeLabels(ctx context.Context, now time.Time) {
	if a.api == nil {
		return
	}
	want := Labels(a.machine, a.plan, string(a.config.current.Flags.MIGStrategy))
	_, failed := a.degraded["labels"]
	if (failed || maps.Equal(a.labels, want)) && now.Sub(a.labelsAt) < labelsAgain {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := a.api.setLabels(ctx, want)
	if apierrors.IsNotFound(err) {
		return // the kubelet has yet to register the node
	}
	a.labelsAt = now
	if err != nil {
		a.trouble("labels", "%v", err)
		return
	}
	a.well("labels")
	a.labels = want
}
