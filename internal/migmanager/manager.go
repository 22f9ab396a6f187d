package migmanager

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/mig"
)

// The labels of NVIDIA's MIG manager.
const (
	labelConfig = "nvidia.com/mig.config"
	labelState  = "nvidia.com/mig.config.state"
)

// onDemand is the name of the config of nodes that are cut on demand.
const onDemand = "on-demand"

const (
	// firstRetry is the pause after a change failed; it doubles up to lastRetry.
	firstRetry = 15 * time.Second
	lastRetry  = 10 * time.Minute
	// lookAgain is when everything is compared again although nothing was heard.
	lookAgain = time.Minute
	// patchRetry is the pause after the apiserver could not be told.
	patchRetry = 2 * time.Second
	// callTimeout bounds a call to the apiserver.
	callTimeout = 5 * time.Second
	// maxReason is the longest reason in a status.
	maxReason = 1024
)

// Node is the node that is changed, as its agent knows it. Its methods may be
// called at any time.
type Node interface {
	// Look returns what is known now.
	Look() Facts
	// Block replaces the GPUs and MIG devices, by UUID, that get no new use because
	// of a change, with the reasons. When it has returned, InUse of what is blocked
	// can only shrink.
	Block(reasons map[string]string)
	// InUse lists what is in use of a GPU: itself, or some of its MIG devices.
	InUse(gpu string) []string
	// Refresh returns when the devices that are offered are those of a reading of
	// the machine that began after the call.
	Refresh(ctx context.Context) error
}

// Facts are what is known of a node. They are not changed.
type Facts struct {
	// Machine is nil before the first reading.
	Machine *gpu.Machine
	// Holders are the pods that hold something.
	Holders []Holder
	// Labels are those of the node object, nil where it has not been heard of.
	Labels map[string]string
	// Reason is the node's annotation ashlar.dev/mig.config.reason.
	Reason string
	// Wanted is the spec of the node's GPUNode.
	Wanted []v1alpha1.GPUGeometry
}

// Holder is a pod that holds a GPU or MIG device, by UUID.
type Holder struct {
	types.NamespacedName
	Base string
}

// Hardware is what the manager needs of the machine.
type Hardware interface {
	mig.Hardware
	// Processes lists the processes on a GPU.
	Processes(uuid string) ([]gpu.Process, error)
}

// Options say what to work on.
type Options struct {
	NodeName string
	Node     Node
	Hardware Hardware
	// Client reaches the apiserver.
	Client kubernetes.Interface
	// ConfigFile has the configs; "" for those that mig.Generate makes.
	ConfigFile string
	// Journal is the folder that changes under way are kept in.
	Journal string
	// DrainTimeout is how long pods have to go.
	DrainTimeout time.Duration
	// Event writes an Event on the node.
	Event func(kind, reason, format string, args ...any)
	Log   *slog.Logger
}

// Reasons of Events.
const (
	ReasonChanged = "MIGConfigApplied"
	ReasonFailed  = "MIGConfigFailed"
)

// Manager is described in the package's documentation.
type Manager struct {
	Options
	executor *mig.Executor
	wake     chan struct{}

	// failed counts the failures in a row of what was wanted.
	failed  int
	failure string    // what was wanted then
	retryAt time.Time // when it is tried again

	mu sync.Mutex
	// status is nil while nothing is wanted.
	status *v1alpha1.MIGConfigStatus
}

// New returns a Manager. Call Recover before the node's devices are offered.
func New(o Options) *Manager {
	return &Manager{
		Options: o, wake: make(chan struct{}, 1),
		executor: mig.NewExecutor(o.Hardware, o.Journal),
	}
}

// Recover ends the changes that an earlier process began. A GPU whose change
// cannot be ended is not what anybody wants; the others can be changed.
func (m *Manager) Recover() error {
	outcomes, err := m.executor.Recover()
	for _, o := range outcomes {
		m.Log.Warn("a change of MIG devices was interrupted", "outcome", o.String())
	}
	return err
}

// Kick makes the manager look again soon. It never blocks.
func (m *Manager) Kick() {
	select {
	case m.wake <- struct{}{}:
	default:
	}
}

// Status is the state of what is wanted, nil for nothing.
func (m *Manager) Status() *v1alpha1.MIGConfigStatus {
	m.mu.Lock()
	defer m.mu.Unlock()
	return m.status.DeepCopy()
}

// Run works until ctx ends.
func (m *Manager) Run(ctx context.Context) {
	for {
		again := m.reconcile(ctx)
		timer := time.NewTimer(again)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-m.wake:
		case <-timer.C:
		}
		timer.Stop()
	}
}

// reconcile compares once, changes what differs, and returns when to look again.
func (m *Manager) reconcile(ctx context.Context) time.Duration {
	facts := m.Node.Look()
	if facts.Machine == nil || facts.Labels == nil {
		return lookAgain
	}
	if err := m.restoreClients(ctx, facts.Labels); err != nil {
		m.Log.Error("clients that were paused for a MIG change stay paused for now", "error", err)
		return patchRetry
	}
	config, demand := facts.Labels[labelConfig], facts.Labels[v1alpha1.LabelMIGOnDemand] == "true"
	if config == "" && !demand {
		m.setStatus(nil)
		return lookAgain
	}
	targets, wanted, err := m.targets(facts, config, demand)
	if wanted != m.failure {
		m.failure, m.failed, m.retryAt = wanted, 0, time.Time{}
	}
	if wait := time.Until(m.retryAt); wait > 0 {
		return m.tell(ctx, facts, min(wait, lookAgain))
	}
	if err == nil {
		err = m.apply(ctx, facts, targets, config, demand)
	}
	if ctx.Err() != nil {
		return lookAgain // the next process goes on
	}
	name := config
	if demand && config == "" {
		name = onDemand
	}
	if err == nil {
		m.failed, m.retryAt = 0, time.Time{}
		m.state(name, v1alpha1.MIGSuccess, "")
		return m.tell(ctx, m.Node.Look(), lookAgain)
	}
	pause := min(firstRetry<<min(m.failed, 10), lastRetry)
	m.failed++
	m.retryAt = time.Now().Add(pause)
	m.Log.Error("MIG devices are not as wanted", "config", name, "error", err, "retry", pause)
	m.Event(corev1.EventTypeWarning, ReasonFailed, "MIG config %s: %v", name, err)
	m.state(name, v1alpha1.MIGFailed, fmt.Sprintf("%v; tried again in %s", err, pause))
	return m.tell(ctx, m.Node.Look(), min(pause, lookAgain))
}

// targets is what is wanted of each GPU, nil for those that stay as they are, and
// a text that changes whenever it does.
func (m *Manager) targets(facts Facts, config string, demand bool) ([]*mig.Target, string, error) {
	if demand {
		if config != "" {
			return nil, config, fmt.Errorf("the node is cut on demand: take away one of the labels %s and %s", labelConfig, v1alpha1.LabelMIGOnDemand)
		}
		key, err := json.Marshal(facts.Wanted)
		if err != nil {
			return nil, "", err
		}
		targets := make([]*mig.Target, len(facts.Machine.GPUs))
		for _, w := range facts.Wanted {
			g := facts.Machine.ByUUID(w.UUID)
			if g == nil {
				continue // it has been taken out of the machine
			}
			t := &mig.Target{Enabled: len(w.Instances) > 0}
			for _, in := range w.Instances {
				t.Instances = append(t.Instances, gpu.MIGInstance{
					ProfileID: int(in.ProfileID), Placement: gpu.Placement{Start: int(in.Start), Size: int(in.Size)},
				})
			}
			targets[g.Index] = t
		}
		return targets, string(key), nil
	}
	var text []byte
	var err error
	file := m.ConfigFile
	if file == "" {
		file = "the configs generated for this machine"
		text, err = mig.Generate(facts.Machine)
	} else {
		text, err = os.ReadFile(file)
	}
	if err != nil {
		return nil, config, err
	}
	key := config + "\n" + string(text)
	configs, err := mig.ParseConfig(file, text)
	if err != nil {
		return nil, key, err
	}
	targets, err := configs.Targets(config, facts.Machine)
	return targets, key, err
}

// state replaces the status.
func (m *Manager) state(config string, state v1alpha1.MIGConfigState, reason string) {
	if len(reason) > maxReason {
		reason = reason[:maxReason-3] + "..."
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	s := &v1alpha1.MIGConfigStatus{Config: config, State: state, Reason: reason, Since: metav1.Now()}
	if old := m.status; old != nil && old.Config == s.Config && old.State == s.State {
		s.Since = old.Since
	}
	m.status = s
}

func (m *Manager) setStatus(s *v1alpha1.MIGConfigStatus) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.status = s
}

// tell writes the state to the node, if it says something else, and returns when
// to look again.
func (m *Manager) tell(ctx context.Context, facts Facts, again time.Duration) time.Duration {
	s := m.Status()
	if s == nil || s.Config == onDemand {
		return again
	}
	labels, annotations := make(map[string]*string), make(map[string]*string)
	if state := string(s.State); facts.Labels[labelState] != state {
		labels[labelState] = &state
	}
	switch s.Reason {
	case facts.Reason:
	case "":
		annotations[v1alpha1.AnnotationMIGReason] = nil
	default:
		annotations[v1alpha1.AnnotationMIGReason] = &s.Reason
	}
	if err := m.patch(ctx, labels, annotations); err != nil {
		m.Log.Error("the state of the MIG config cannot be written", "state", s.State, "error", err)
		return patchRetry
	}
	return again
}

// patch changes labels and annotations of the node.
func (m *Manager) patch(ctx context.Context, labels, annotations map[string]*string) error {
	if len(labels)+len(annotations) == 0 {
		return nil
	}
	data, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": labels, "annotations": annotations}})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	_, err = m.Client.CoreV1().Nodes().Patch(ctx, m.NodeName, types.MergePatchType, data, metav1.PatchOptions{})
	return err
}

// clients are the parts of labels nvidia.com/gpu.deploy.* whose programs hold GPUs
// open, as NVIDIA's MIG manager lists them.
var clients = []string{"device-plugin", "gpu-feature-discovery", "dcgm-exporter", "dcgm", "nvsm", "client"}

const (
	deploy       = "nvidia.com/gpu.deploy."
	deployed     = "true"
	deployPaused = "paused-for-mig-change"
)

// pauseClients stops NVIDIA's programs on the node.
func (m *Manager) pauseClients(ctx context.Context, labels map[string]string) error {
	return m.switchClients(ctx, labels, deployed, deployPaused)
}

// restoreClients lets those run again that were paused, by whomever.
func (m *Manager) restoreClients(ctx context.Context, labels map[string]string) error {
	return m.switchClients(ctx, labels, deployPaused, deployed)
}

func (m *Manager) switchClients(ctx context.Context, labels map[string]string, from, to string) error {
	change := make(map[string]*string)
	for _, c := range clients {
		if labels[deploy+c] == from {
			change[deploy+c] = &to
		}
	}
	return m.patch(ctx, change, nil)
}

// apply makes the machine what is wanted. On demand nobody is evicted, and what
// is in the way stays.
func (m *Manager) apply(ctx context.Context, facts Facts, targets []*mig.Target, config string, demand bool) error {
	unfinished := m.Recover()
	changes, err := m.plan(facts, targets)
	err = errors.Join(unfinished, err)
	if len(changes) == 0 {
		return err
	}
	name := config
	if demand {
		name = onDemand
	}
	m.state(name, v1alpha1.MIGPending, describe(changes))
	m.tell(ctx, facts, 0)
	m.block(changes)
	defer m.Node.Block(nil)
	if demand {
		changes = m.idle(changes)
	} else if drainErr := m.drain(ctx, changes); drainErr != nil {
		return errors.Join(err, drainErr)
	}
	err = errors.Join(err, m.change(ctx, changes))
	// What is offered must be what there is before anything is given again.
	return errors.Join(err, m.Node.Refresh(ctx))
}

// plan finds what each GPU needs. A GPU that cannot be planned does not keep the
// others from it.
func (m *Manager) plan(facts Facts, targets []*mig.Target) ([]*mig.Change, error) {
	held := make(map[string]bool)
	for i := range facts.Machine.GPUs {
		for _, base := range m.Node.InUse(facts.Machine.GPUs[i].UUID) {
			held[base] = true
		}
	}
	var changes []*mig.Change
	var errs []error
	for i, target := range targets {
		if target == nil {
			continue
		}
		g := &facts.Machine.GPUs[i]
		product := gpu.ProductByName(g.Name)
		switch {
		case g.Health.State == gpu.Lost:
			errs = append(errs, fmt.Errorf("GPU %d (%s) is lost: %s", g.Index, g.UUID, g.Health.Reason))
			continue
		case product == nil || product.MIG == nil:
			errs = append(errs, fmt.Errorf("GPU %d (%s): %s has no known MIG profiles", g.Index, g.UUID, g.Name))
			continue
		}
		change, err := mig.PlanGPU(g, product.MIG, *target, held)
		switch {
		case err != nil:
			errs = append(errs, err)
		case change != nil:
			changes = append(changes, change)
		}
	}
	return changes, errors.Join(errs...)
}

// describe names the GPUs that change.
func describe(changes []*mig.Change) string {
	names := make([]string, len(changes))
	for i, c := range changes {
		names[i] = strconv.Itoa(c.Index)
	}
	return "changing GPUs " + strings.Join(names, ", ")
}

// goes lists what of a GPU must not be in use for the change.
func goes(c *mig.Change, inUse []string) []string {
	if c.NeedsIdle {
		return inUse
	}
	return slices.DeleteFunc(slices.Clone(inUse), func(base string) bool { return !slices.Contains(c.Destroyed, base) })
}

// block keeps new uses off what goes.
func (m *Manager) block(changes []*mig.Change) {
	reasons := make(map[string]string)
	for _, c := range changes {
		if c.NeedsIdle {
			reasons[c.GPU] = fmt.Sprintf("GPU %s is about to be cut anew", c.GPU)
		}
		for _, uuid := range c.Destroyed {
			reasons[uuid] = fmt.Sprintf("MIG device %s is about to be destroyed", uuid)
		}
	}
	m.Node.Block(reasons)
}

// idle keeps the changes that nobody is in the way of.
func (m *Manager) idle(changes []*mig.Change) []*mig.Change {
	return slices.DeleteFunc(changes, func(c *mig.Change) bool {
		held := goes(c, m.Node.InUse(c.GPU))
		if len(held) > 0 {
			m.Log.Info("GPU stays as it is, since it is held", "gpu", c.GPU, "held", held)
		}
		return len(held) > 0
	})
}

// change makes the changes. Each GPU is tried.
func (m *Manager) change(ctx context.Context, changes []*mig.Change) error {
	if len(changes) == 0 {
		return nil
	}
	if slices.ContainsFunc(changes, func(c *mig.Change) bool { return c.NeedsIdle }) {
		defer func() {
			// Where this fails, the next look does it.
			if err := m.restoreClients(ctx, m.Node.Look().Labels); err != nil {
				m.Log.Error("paused clients", "error", err)
			}
		}()
		if err := m.pause(ctx, changes); err != nil {
			return err
		}
	}
	var errs []error
	for _, c := range changes {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := m.executor.Apply(c); err != nil {
			errs = append(errs, err)
			continue
		}
		m.Log.Info("MIG devices changed", "gpu", c.GPU, "destroyed", c.Destroyed, "kept", c.Kept)
		m.Event(corev1.EventTypeNormal, ReasonChanged, "GPU %d: %s", c.Index, c.Wanted)
	}
	return errors.Join(errs...)
}
