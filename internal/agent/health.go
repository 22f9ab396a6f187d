package agent

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/health"
)

// healthFile keeps what is known of the GPUs' health over a restart.
const healthFile = "health.json"

// maxEvents bounds the events that wait for the reconciler.
const maxEvents = 1024

// inbox holds the driver's events until the reconciler takes them.
type inbox struct {
	mu     sync.Mutex
	events []gpu.Event
	lost   int
}

// put adds an event. A flood of them must not take all memory: the first ones say
// the most.
func (b *inbox) put(e gpu.Event) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.events) < maxEvents {
		b.events = append(b.events, e)
	} else {
		b.lost++
	}
}

// take returns what is there, and how many there was no room for.
func (b *inbox) take() ([]gpu.Event, int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	events, lost := b.events, b.lost
	b.events, b.lost = nil, 0
	return events, lost
}

// restoreHealth goes on with the health that an earlier process knew.
func (a *agent) restoreHealth() {
	a.tracker = health.New(a.Health, a.BootID)
	data, err := os.ReadFile(filepath.Join(a.StateDir, healthFile))
	if errors.Is(err, fs.ErrNotExist) {
		return
	}
	if err == nil {
		var tracker *health.Tracker
		if tracker, err = health.Restore(a.Health, a.BootID, data); err == nil {
			a.tracker, a.healthSaved = tracker, data
			return
		}
	}
	a.Log.Error("the health that was known before is lost", "error", err)
}

// saveHealth keeps the health for the next process.
func (a *agent) saveHealth() {
	data, err := a.tracker.Encode()
	if err == nil && bytes.Equal(data, a.healthSaved) {
		return
	}
	if err == nil {
		err = replaceFile(filepath.Join(a.StateDir, healthFile), data)
	}
	if err != nil {
		a.trouble("health state", "%v", err)
		return
	}
	a.healthSaved = data
	a.well("health state")
}

// replaceFile writes a file in one step.
func replaceFile(path string, data []byte) error {
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// takeEvents hands the driver's events to the health rules.
func (a *agent) takeEvents(now time.Time) bool {
	events, lost := a.events.take()
	for _, e := range events {
		rule := health.RuleOf(e.XID)
		a.Log.Warn("XID", "gpu", e.GPU, "xid", e.XID, "gi", e.GI, "ci", e.CI, "action", rule.Action, "means", rule.Why)
		a.api.event(corev1.EventTypeWarning, reasonXID, "GPU %s: XID %d: %s: %s", e.GPU, e.XID, rule.Why, rule.Action)
		a.tracker.Event(now, e)
	}
	if lost > 0 {
		a.Log.Error("events of GPUs were dropped, since there were too many at once", "events", lost)
	}
	return len(events) > 0
}

// judge puts the verdicts of the health rules onto a reading and makes it the
// machine that everything else looks at.
func (a *agent) judge(now time.Time, raw *gpu.Machine) {
	m := *raw
	m.GPUs = slices.Clone(raw.GPUs)
	for i := range m.GPUs {
		m.GPUs[i].MIG.Devices = slices.Clone(raw.GPUs[i].MIG.Devices)
	}
	changes := a.tracker.Observe(now, &m, a.named(&m, v1alpha1.AnnotationHealthOverride))
	a.raw, a.machine = raw, &m
	for _, g := range m.GPUs {
		a.parents[g.UUID] = g.UUID
		for _, d := range g.MIG.Devices {
			a.parents[d.UUID] = g.UUID
		}
	}
	for _, c := range changes {
		a.reportChange(&m, c)
	}
	a.saveHealth()
}

// reportChange tells of a change of health: on the node, and on the pods that
// hold the GPU or MIG device.
func (a *agent) reportChange(m *gpu.Machine, c health.Change) {
	what := fmt.Sprintf("GPU %d (%s)", m.ByUUID(c.GPU).Index, c.GPU)
	if c.MIG != "" {
		what = fmt.Sprintf("MIG device %s of GPU %d", c.MIG, m.ByUUID(c.GPU).Index)
	}
	kind, reason, text := corev1.EventTypeWarning, reasonGPUUnhealthy, fmt.Sprintf("%s is %s: %s", what, c.Is.State, c.Is.Reason)
	if c.Is.OK() {
		kind, reason, text = corev1.EventTypeNormal, reasonGPUHealthy, what+" is healthy again"
	}
	a.Log.Warn("health", "gpu", c.GPU, "mig", c.MIG, "state", c.Is.State, "reason", c.Is.Reason)
	a.api.event(kind, reason, "%s", text)
	told := make(map[string]bool)
	for _, h := range a.holders {
		if h.GPU != c.GPU || c.MIG != "" && h.Device.Base != c.MIG || told[h.Namespace+"/"+h.Pod] {
			continue
		}
		told[h.Namespace+"/"+h.Pod] = true
		if pod := a.api.podNamed(h.Namespace, h.Pod); pod != nil {
			a.api.podEvent(pod, kind, reason, "%s", text)
		}
	}
}

// named reads an annotation of the node that lists GPUs by UUID or index.
func (a *agent) named(m *gpu.Machine, annotation string) map[string]bool {
	node := a.api.node()
	if node == nil {
		return nil
	}
	gpus, unknown := gpusOf(m, node.Annotations[annotation])
	if len(unknown) > 0 {
		a.trouble(annotation, "the node's annotation names %s: name GPUs by UUID or by index from 0 to %d",
			strings.Join(unknown, ", "), len(m.GPUs)-1)
	} else {
		a.well(annotation)
	}
	return gpus
}

// gpusOf reads a list of GPUs and returns their UUIDs, and the entries that name
// none.
func gpusOf(m *gpu.Machine, list string) (map[string]bool, []string) {
	gpus := make(map[string]bool)
	var unknown []string
	for entry := range strings.SplitSeq(list, ",") {
		entry = strings.TrimSpace(entry)
		if entry == "" {
			continue
		}
		if i, err := strconv.Atoi(entry); err == nil && i >= 0 && i < len(m.GPUs) {
			gpus[m.GPUs[i].UUID] = true
		} else if m.ByUUID(entry) != nil {
			gpus[entry] = true
		} else {
			unknown = append(unknown, entry)
		}
	}
	return gpus, unknown
}

// cordon keeps new work off the GPUs that the operator names.
func (a *agent) cordon() {
	a.cordoned = a.named(a.machine, v1alpha1.AnnotationCordon)
	reasons := make(map[string]string, len(a.cordoned))
	for uuid := range a.cordoned {
		reasons[uuid] = fmt.Sprintf("GPU %s is cordoned by the annotation %s of the node", uuid, v1alpha1.AnnotationCordon)
	}
	a.blocks.set(byOperator, reasons)
}
