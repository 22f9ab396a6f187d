package agent

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/migmanager"
)

// refreshTimeout bounds how long one waits for a new reading to be served.
const refreshTimeout = 30 * time.Second

// inform tells the apiserver and the MIG manager what is now.
func (a *agent) inform() {
	if a.api == nil {
		return
	}
	facts := migmanager.Facts{Machine: a.machine}
	for _, h := range a.holders {
		facts.Holders = append(facts.Holders, migmanager.Holder{
			NamespacedName: types.NamespacedName{Namespace: h.Namespace, Name: h.Pod}, Base: h.Device.Base,
		})
	}
	if node := a.api.node(); node != nil {
		facts.Labels, facts.Reason = node.Labels, node.Annotations[v1alpha1.AnnotationMIGReason]
		if facts.Labels == nil {
			facts.Labels = map[string]string{}
		}
	}
	if object := a.api.gpuNode(); object != nil {
		facts.Wanted = object.Spec.MIG
	}
	if old := a.facts.Swap(&facts); a.mig != nil && (old == nil || !reflect.DeepEqual(*old, facts)) {
		a.mig.Kick()
	}
	strategy := string(a.config.current.Flags.MIGStrategy)
	status := kube.Status(kube.NodeFacts{
		Machine: a.machine, Plan: a.plan, Holders: a.holders, Withheld: a.ledger.Withheld(a.plan),
		Cordoned: a.cordoned, Fault: a.fault,
	})
	if a.mig != nil {
		status.MIGConfig = a.mig.Status()
	}
	status.Steering = a.steering.status()
	a.publisher.set(&publication{
		labels: Labels(a.machine, a.plan, strategy), status: status, conditions: a.conditions(),
	})
}

// fault says since when a GPU or MIG device is unhealthy, and what must be done.
func (a *agent) fault(uuid string) (time.Time, string) {
	f := a.tracker.Fault(uuid)
	if f.Since.IsZero() {
		return time.Time{}, ""
	}
	return f.Since, f.Action.String()
}

// conditions are those of the GPUNode, without times.
func (a *agent) conditions() []metav1.Condition {
	ready := metav1.Condition{Type: v1alpha1.ConditionReady, Status: metav1.ConditionTrue, Reason: "Serving", Message: "devices are served and their holders are known"}
	switch {
	case a.kubelet.id == "":
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, "KubeletAway", "the kubelet does not run"
	case !a.kubelet.known:
		ready.Status, ready.Reason, ready.Message = metav1.ConditionFalse, "HoldersUnknown", "the kubelet has not said yet who holds which device"
	}
	for name, s := range a.servers {
		if s.server == nil && ready.Status == metav1.ConditionTrue {
			ready.Status, ready.Reason = metav1.ConditionFalse, "NotRegistered"
			ready.Message = fmt.Sprintf("%s is not registered with the kubelet", name)
		}
	}
	healthy := metav1.Condition{Type: v1alpha1.ConditionHealthy, Status: metav1.ConditionTrue, Reason: "AllHealthy", Message: "no GPU is unhealthy"}
	var bad []string
	for _, g := range a.machine.GPUs {
		if !g.Health.OK() {
			bad = append(bad, fmt.Sprintf("GPU %d is %s: %s", g.Index, g.Health.State, g.Health.Reason))
		}
		for _, d := range g.MIG.Devices {
			if g.Health.OK() && !d.Health.OK() {
				bad = append(bad, fmt.Sprintf("MIG device %d:%d is %s: %s", g.Index, d.Index, d.Health.State, d.Health.Reason))
			}
		}
	}
	if len(bad) > 0 {
		healthy.Status, healthy.Reason, healthy.Message = metav1.ConditionFalse, "Unhealthy", shortened(strings.Join(bad, "; "))
	}
	return []metav1.Condition{ready, healthy}
}

// shortened cuts a text to what a condition's message holds.
func shortened(text string) string {
	const most = 1024
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most-3], "") + "..."
}

// node is the agent as the MIG manager sees it.
type node struct{ a *agent }

// Look returns what is known now.
func (n *node) Look() migmanager.Facts {
	if facts := n.a.facts.Load(); facts != nil {
		return *facts
	}
	return migmanager.Facts{}
}

// Block keeps new uses off what is about to change.
func (n *node) Block(reasons map[string]string) {
	n.a.blocks.set(byMIGChange, reasons)
	n.a.kick()
}

// InUse asks the ledger.
func (n *node) InUse(gpu string) []string { return n.a.ledger.InUse(gpu) }

// Refresh waits for a new reading to be served.
func (n *node) Refresh(ctx context.Context) error {
	want := n.a.reader.begun.Load() + 1
	n.a.reader.hurry.Store(true)
	n.a.kick()
	ctx, cancel := context.WithTimeout(ctx, refreshTimeout)
	defer cancel()
	for n.a.served.Load() < want {
		select {
		case <-ctx.Done():
			return errors.New("the machine cannot be read anew: see the agent's log")
		case <-time.After(refreshPoll):
		}
	}
	return nil
}
