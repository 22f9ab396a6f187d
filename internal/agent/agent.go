package agent

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/deviceplugin"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/podresources"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

const (
	// interval is the longest time between two steps. Config file, kubelet and
	// holders are looked at in each: looking is cheap and cannot miss an edit, as
	// a file watch can when a symlink is swapped.
	interval = 2 * time.Second
	// hardwareInterval is the longest time between two readings of the machine.
	hardwareInterval = 4 * time.Second
	// holdersPatience is how long a kubelet may serve device plugins without
	// answering who holds what, before its checkpoint alone is believed.
	holdersPatience = 10 * time.Second
	// callTimeout bounds a call to the kubelet or the apiserver.
	callTimeout = 5 * time.Second
	// settle is the pause after something changed, so that what belongs together
	// is handled in one step.
	settle = 100 * time.Millisecond
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

	hardware Hardware
	machine  *gpu.Machine // nil until the first reading
	readAt   time.Time
	// readErr is the driver's last error, nil while it answers.
	readErr error
	// parents remembers the GPU of every GPU and MIG device ever seen: a pod may
	// hold one that is gone.
	parents map[string]string

	config configState
	plan   *sharing.Plan // nil until the first one
	// planErr is why the present config and machine make no plan.
	planErr string

	kubelet kubeletState
	servers map[string]*served
	// held are the GPUs and MIG devices that containers hold, sorted.
	held []string
	// labels are those that the node was last given.
	labels map[string]string
	// described says for what machine and config CDI specs were last written.
	described string
	// degraded are the troubles that were reported and are not over.
	degraded map[string]string
}

// kubeletState is what is known of the kubelet that runs now.
type kubeletState struct {
	// id tells one run of the kubelet from the next, "" while it is away.
	id    string
	since time.Time
	// known says that its holders have been read.
	known bool
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
		if a.config.current.Flags.FailOnInitError {
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
	if a.hardware != nil {
		_ = a.hardware.Close()
	}
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
	a.writeCDI()
	a.serve(ctx)
	a.writeLabels(ctx)
}

// trouble reports, once, that something is degraded.
func (a *agent) trouble(what, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	if a.degraded[what] == text {
		return
	}
	a.degraded[what] = text
	a.Log.Error("degraded", "part", what, "reason", text)
	a.api.event(corev1.EventTypeWarning, reasonDegraded, "%s: %s", what, text)
}

// well says that the trouble with something is over.
func (a *agent) well(what string) {
	if _, ok := a.degraded[what]; ok {
		delete(a.degraded, what)
		a.Log.Info("recovered", "part", what)
	}
}

// openHardware opens the machine and listens to its events.
func (a *agent) openHardware() error {
	hardware, err := a.Open()
	if err != nil {
		return err
	}
	a.hardware = hardware
	go func() {
		for {
			event, ok, err := hardware.WaitEvent(time.Second)
			switch {
			case errors.Is(err, os.ErrClosed):
				return
			case err != nil:
				time.Sleep(retryPause) // the driver is in trouble; Read reports it
			case ok:
				a.Log.Warn("GPU event", "gpu", event.GPU, "xid", event.XID)
				a.kick()
			}
		}
	}()
	return nil
}

// readMachine reads the machine if it is time. While the driver does not
// answer, the last reading stands with every GPU lost.
func (a *agent) readMachine(now time.Time) {
	if a.hardware == nil {
		if err := a.openHardware(); err != nil {
			a.trouble("driver", "%v", err)
			return
		}
	}
	if now.Sub(a.readAt) < hardwareInterval && a.readErr == nil {
		return
	}
	a.readAt = now
	m, err := a.hardware.Read()
	if err == nil {
		err = m.Validate()
	}
	a.readErr = err
	if err != nil {
		a.trouble("driver", "%v", err)
		if a.machine == nil {
			return
		}
		m = *a.machine
		m.GPUs = slices.Clone(m.GPUs)
		for i := range m.GPUs {
			m.GPUs[i].Health = gpu.Health{State: gpu.Lost, Reason: "the driver does not answer"}
		}
	} else {
		a.well("driver")
	}
	a.reportHealth(&m)
	for _, g := range m.GPUs {
		a.parents[g.UUID] = g.UUID
		for _, d := range g.MIG.Devices {
			a.parents[d.UUID] = g.UUID
		}
	}
	a.machine = &m
}

// reportHealth says which GPUs changed their health since the last reading.
func (a *agent) reportHealth(m *gpu.Machine) {
	for _, g := range m.GPUs {
		was := gpu.Health{}
		if a.machine != nil {
			if old := a.machine.ByUUID(g.UUID); old != nil {
				was = old.Health
			}
		}
		switch {
		case g.Health == was:
		case g.Health.OK():
			a.Log.Info("GPU is healthy again", "gpu", g.UUID)
			a.api.event(corev1.EventTypeNormal, reasonGPUHealthy, "GPU %d (%s) is healthy again", g.Index, g.UUID)
		default:
			a.Log.Warn("GPU is unhealthy", "gpu", g.UUID, "state", g.Health.State, "reason", g.Health.Reason)
			a.api.event(corev1.EventTypeWarning, reasonGPUUnhealthy, "GPU %d (%s) is %s: %s", g.Index, g.UUID, g.Health.State, g.Health.Reason)
		}
	}
}

// meetKubelet notices that the kubelet came, went or was restarted. Each run of
// it makes its socket anew.
func (a *agent) meetKubelet(now time.Time) {
	id := ""
	info, err := os.Stat(a.kubeletSocket())
	if err == nil {
		id = fmt.Sprint(info.ModTime().UnixNano())
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			id = fmt.Sprintf("%d-%d", stat.Ino, info.ModTime().UnixNano())
		}
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		a.trouble("kubelet", "%v", err)
	}
	if id != a.kubelet.id {
		a.kubelet = kubeletState{id: id, since: now}
		a.Log.Info("kubelet", "running", id != "")
	}
}

// readHolders asks the kubelet who holds which device. See the ADR on holders
// for the two sources.
func (a *agent) readHolders(ctx context.Context, now time.Time) {
	if a.kubelet.id == "" {
		return // it gives nothing to anybody now
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	var holders []deviceplugin.Holder
	add := func(resource string, ids []string) {
		for _, text := range ids {
			id, err := gpu.ParseDeviceID(text)
			if err != nil {
				continue // a device of another plugin
			}
			if parent, ours := a.parents[id.Base]; ours {
				holders = append(holders, deviceplugin.Holder{Resource: resource, Device: id, GPU: parent})
			}
		}
	}
	list, err := podresources.List(ctx, a.podResourcesSocket())
	if err != nil {
		if !a.kubelet.known && now.Sub(a.kubelet.since) < holdersPatience {
			return // it starts this API a moment after that of device plugins
		}
		a.trouble("holders", "%v", err)
		if a.kubelet.known {
			return // the last answer stands
		}
	} else {
		a.well("holders")
	}
	for _, l := range list {
		add(l.Resource, l.Devices)
	}
	if a.api != nil {
		entries, err := podresources.Checkpoint(a.devicePlugins())
		if err != nil {
			a.trouble("checkpoint", "%v; devices of init containers are not seen", err)
		} else {
			a.well("checkpoint")
		}
		for _, e := range entries {
			if a.api.alive(e.PodUID) {
				add(e.Resource, e.Devices)
			}
		}
	}
	a.ledger.SetHolders(now, holders)
	a.kubelet.known = true
	a.held = a.held[:0]
	for _, h := range holders {
		a.held = append(a.held, h.Device.Base)
	}
	slices.Sort(a.held)
	a.held = slices.Compact(a.held)
}

// writeCDI writes the CDI specs where machine, config or holders changed since
// the last time. Names that containers hold stay in them.
func (a *agent) writeCDI() {
	flags := &a.config.current.Flags
	classes := []cdi.Class{cdi.GPU}
	if flags.GDRCopyEnabled {
		classes = append(classes, cdi.GDRCopy)
	}
	if flags.GDSEnabled {
		classes = append(classes, cdi.GDS)
	}
	if flags.MOFEDEnabled {
		classes = append(classes, cdi.MOFED)
	}
	state := fmt.Sprint(classes, flags, a.held)
	for _, g := range a.machine.GPUs {
		state += fmt.Sprint(g.UUID, g.Minor, g.Health.State, g.MIG)
	}
	if state == a.described {
		return
	}
	var errs []error
	for _, class := range classes {
		spec, err := a.Describe(a.machine, class, flags)
		errs = append(errs, err)
		if spec != nil {
			errs = append(errs, cdi.Write(a.CDIDir, spec, a.held))
		}
	}
	if err := errors.Join(errs...); err != nil {
		a.trouble("cdi", "%v", err)
		return
	}
	a.well("cdi")
	a.described = state
}

// writeLabels keeps the node's labels true.
func (a *agent) writeLabels(ctx context.Context) {
	if a.api == nil {
		return
	}
	want := Labels(a.machine, a.plan, string(a.config.current.Flags.MIGStrategy))
	if a.labels != nil && maps.Equal(a.labels, want) {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	err := a.api.setLabels(ctx, want)
	if apierrors.IsNotFound(err) {
		return // the kubelet has yet to register the node
	}
	if err != nil {
		a.trouble("labels", "%v", err)
		return
	}
	a.well("labels")
	a.labels = want
}

// configState is the config in force and the last one that was read.
type configState struct {
	// current is in force; never nil after the first load.
	current *sharing.Config
	text    []byte
	// seen is the last content that was looked at, good or bad.
	seen []byte
	// fresh says that current has yet to make a plan.
	fresh bool
	// previous is what was in force before a fresh one.
	previous *sharing.Config
}

// lastGood is the file that keeps the config in force over a restart.
const lastGood = "last-good-config.yaml"

// loadConfig reads the config file and puts it in force if it is good and new.
func (a *agent) loadConfig() {
	first := a.config.current == nil
	if first {
		a.config.current = sharing.Default()
		a.Override(a.config.current)
	}
	if a.ConfigFile == "" {
		return
	}
	text, err := os.ReadFile(a.ConfigFile)
	if err != nil {
		a.trouble("config", "%v; the last good one stays", err)
	} else {
		a.well("config")
		if a.config.seen != nil && bytes.Equal(text, a.config.seen) {
			return
		}
		a.config.seen = text
		if a.accept(a.ConfigFile, text) {
			return
		}
	}
	if first {
		a.restoreConfig()
	}
}

// restoreConfig puts the last good config in force, which a restart must not
// lose, and says whether there was one.
func (a *agent) restoreConfig() bool {
	path := filepath.Join(a.StateDir, lastGood)
	text, err := os.ReadFile(path)
	if err != nil || bytes.Equal(text, a.config.text) || !a.accept(path, text) {
		return false
	}
	a.Log.Warn("the last good config is in force", "file", path)
	return true
}

// accept puts a config in force if it can be read.
func (a *agent) accept(file string, text []byte) bool {
	config, warnings, err := sharing.Parse(file, text)
	if err != nil {
		a.reject(err)
		return false
	}
	a.Override(config)
	for _, w := range warnings {
		a.Log.Warn("config", "warning", w.String())
		a.api.event(corev1.EventTypeWarning, reasonConfigWarning, "%s", w)
	}
	a.config.previous, a.config.current, a.config.text, a.config.fresh = a.config.current, config, text, true
	return true
}

func (a *agent) reject(err error) {
	a.Log.Error("config refused, the last good one stays", "error", err)
	a.api.event(corev1.EventTypeWarning, reasonConfigRejected, "the last good config stays in force: %v", err)
}

// makePlan turns config and machine into what the node offers. A config that
// this machine cannot serve is refused like one that cannot be read. Where the
// machine changed so that the config in force makes no plan any more, the last
// plan stands for the devices that are still there.
func (a *agent) makePlan() {
	plan, warnings, err := a.config.current.Plan(a.machine)
	if err != nil && a.config.fresh && a.plan != nil {
		a.reject(err)
		a.config.current, a.config.fresh = a.config.previous, false
		plan, warnings, err = a.config.current.Plan(a.machine)
	}
	if err != nil && a.planErr != err.Error() {
		a.planErr = err.Error()
		a.reject(err)
		if a.plan == nil && a.restoreConfig() {
			plan, warnings, err = a.config.current.Plan(a.machine)
		}
	}
	if err != nil {
		if a.plan != nil {
			a.plan = remaining(a.plan, a.machine)
		}
		return
	}
	a.planErr = ""
	if a.config.fresh {
		a.config.fresh = false
		for _, w := range warnings {
			a.Log.Warn("config", "warning", w.String())
			a.api.event(corev1.EventTypeWarning, reasonConfigWarning, "%s", w)
		}
		if err := writeFile(filepath.Join(a.StateDir, lastGood), a.config.text); err != nil {
			a.trouble("state", "%v", err)
		}
		a.Log.Info("config applied", "file", a.ConfigFile)
		a.api.event(corev1.EventTypeNormal, reasonConfigApplied, "the device-plugin config is in force")
	}
	a.plan = plan
}

// remaining is a plan without the devices that the machine has no more, and
// with the present health of the others.
func remaining(plan *sharing.Plan, m *gpu.Machine) *sharing.Plan {
	left := &sharing.Plan{}
	for _, r := range plan.Resources {
		devices := r.Devices
		r.Devices = nil
		for _, d := range devices {
			if g := m.Parent(d.ID.Base); g != nil && (d.ID.Base != g.UUID || !g.MIG.Enabled) {
				d.Health = g.Health
				r.Devices = append(r.Devices, d)
			}
		}
		if len(r.Devices) > 0 {
			left.Resources = append(left.Resources, r)
		}
	}
	return left
}

// writeFile replaces a file in one step.
func writeFile(path string, data []byte) error {
	temporary := path + ".new"
	if err := os.WriteFile(temporary, data, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}
