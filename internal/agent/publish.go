package agent

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"reflect"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
)

const (
	// publishPause is the shortest time between two writes: pods that start one
	// after the other need not be a write each.
	publishPause = 500 * time.Millisecond
	// publishAgain is when everything is compared with the apiserver although
	// nothing changed here: others can change it.
	publishAgain = time.Minute
	// publishRetry is the pause after the first failed write; it doubles up to
	// publishAgain.
	publishRetry = time.Second
)

// publication is what the apiserver shall know of the node. It is a value: it is
// not changed once it is given away.
type publication struct {
	labels map[string]string
	status v1alpha1.GPUNodeStatus
	// conditions are those of the status, without times.
	conditions []metav1.Condition
}

// publisher writes publications, the latest one only, outside of the reconciler:
// a slow apiserver must not delay devices.
type publisher struct {
	api      *nodeAPI
	troubles *troubles
	wake     chan struct{}

	mu   sync.Mutex
	want *publication
}

func newPublisher(api *nodeAPI, t *troubles) *publisher {
	return &publisher{api: api, troubles: t, wake: make(chan struct{}, 1)}
}

// set replaces what shall be known. It never waits.
func (p *publisher) set(want *publication) {
	p.mu.Lock()
	same := p.want != nil && reflect.DeepEqual(p.want, want)
	p.want = want
	p.mu.Unlock()
	if same {
		return
	}
	select {
	case p.wake <- struct{}{}:
	default:
	}
}

func (p *publisher) latest() *publication {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.want
}

// run writes until ctx ends.
func (p *publisher) run(ctx context.Context) {
	retry := publishRetry
	again := publishAgain
	for {
		timer := time.NewTimer(again)
		select {
		case <-ctx.Done():
			timer.Stop()
			return
		case <-p.wake:
		case <-timer.C:
		}
		timer.Stop()
		again = publishAgain
		want := p.latest()
		if want == nil {
			continue
		}
		if !p.write(ctx, want) {
			again = retry
			retry = min(2*retry, publishAgain)
		} else {
			retry = publishRetry
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(publishPause):
		}
	}
}

// write makes the apiserver know it, and says whether it does. Each part is
// tried, whatever becomes of the others.
func (p *publisher) write(ctx context.Context, want *publication) bool {
	good := true
	for _, part := range []struct {
		name  string
		write func(context.Context, *publication) error
	}{{"labels", p.api.writeLabels}, {"node condition", p.api.writeCondition}, {"GPUNode", p.api.writeGPUNode}} {
		err := func() error {
			ctx, cancel := context.WithTimeout(ctx, callTimeout)
			defer cancel()
			return part.write(ctx, want)
		}()
		switch {
		case err == nil:
			p.troubles.over(part.name)
		case ctx.Err() != nil:
			return false
		case errors.Is(err, errNoNode):
			good = false // the kubelet has yet to register the node
		default:
			good = false
			p.troubles.report(part.name, "%v", err)
		}
	}
	return good
}

// errNoNode says that the node object does not exist.
var errNoNode = errors.New("the node is not registered")

// get asks for the node.
func (n *nodeAPI) get(ctx context.Context) (*corev1.Node, error) {
	node, err := n.client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, errNoNode
	}
	return node, err
}

// writeLabels makes the node carry exactly the wanted labels of those that the
// agent owns.
func (n *nodeAPI) writeLabels(ctx context.Context, want *publication) error {
	node, err := n.get(ctx)
	if err != nil {
		return err
	}
	return n.patchMeta(ctx, labelChange(node.Labels, want.labels), nil)
}

// patchMeta changes labels and annotations of the node; nil takes one away.
func (n *nodeAPI) patchMeta(ctx context.Context, labels, annotations map[string]*string) error {
	change := make(map[string]any)
	if len(labels) > 0 {
		change["labels"] = labels
	}
	if len(annotations) > 0 {
		change["annotations"] = annotations
	}
	if len(change) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": change})
	if err != nil {
		return err
	}
	_, err = n.client.CoreV1().Nodes().Patch(ctx, n.name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}

// writeCondition makes the node's condition GPUHealthy say what the GPUNode's
// condition Healthy does.
func (n *nodeAPI) writeCondition(ctx context.Context, want *publication) error {
	healthy := meta.FindStatusCondition(want.conditions, v1alpha1.ConditionHealthy)
	if healthy == nil {
		return nil
	}
	node, err := n.get(ctx)
	if err != nil {
		return err
	}
	now := metav1.Now()
	c := corev1.NodeCondition{
		Type: v1alpha1.NodeGPUHealthy, Status: corev1.ConditionStatus(healthy.Status), Reason: healthy.Reason,
		Message: healthy.Message, LastTransitionTime: now, LastHeartbeatTime: now,
	}
	for _, have := range node.Status.Conditions {
		if have.Type != c.Type {
			continue
		}
		if have.Status == c.Status && have.Reason == c.Reason && have.Message == c.Message {
			return nil
		}
		if have.Status == c.Status {
			c.LastTransitionTime = have.LastTransitionTime
		}
	}
	patch, err := json.Marshal(map[string]any{"status": map[string]any{"conditions": []corev1.NodeCondition{c}}})
	if err != nil {
		return err
	}
	_, err = n.client.CoreV1().Nodes().Patch(ctx, n.name, types.StrategicMergePatchType, patch, metav1.PatchOptions{}, "status")
	return err
}

// writeGPUNode makes the GPUNode and keeps its status. It goes with the node.
func (n *nodeAPI) writeGPUNode(ctx context.Context, want *publication) error {
	if n.gpuNodes == nil {
		return nil
	}
	node, err := n.get(ctx)
	if err != nil {
		return err
	}
	object := &v1alpha1.GPUNode{}
	err = n.gpuNodes.Get(ctx, types.NamespacedName{Name: n.name}, object)
	switch {
	case apierrors.IsNotFound(err):
		object = &v1alpha1.GPUNode{ObjectMeta: metav1.ObjectMeta{Name: n.name, OwnerReferences: owner(node)}}
		err = n.gpuNodes.Create(ctx, object)
	case err == nil && !equality.Semantic.DeepEqual(object.OwnerReferences, owner(node)):
		// The node was registered anew.
		object.OwnerReferences = owner(node)
		err = n.gpuNodes.Update(ctx, object)
	}
	if meta.IsNoMatchError(err) {
		return fmt.Errorf("%w: install the CustomResourceDefinitions of Ashlar", err)
	}
	if err != nil {
		return err
	}
	status := want.status
	status.Conditions = append([]metav1.Condition(nil), object.Status.Conditions...)
	for _, c := range want.conditions {
		meta.SetStatusCondition(&status.Conditions, c)
	}
	if equality.Semantic.DeepEqual(object.Status, status) {
		return nil
	}
	object.Status = status
	return n.gpuNodes.Status().Update(ctx, object)
}

func owner(node *corev1.Node) []metav1.OwnerReference {
	return []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node.Name, UID: node.UID}}
}
