package agent

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/kubernetes/scheme"
	typedcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/record"
)

// Reasons of the Events on the node.
const (
	reasonConfigRejected = "DevicePluginConfigRejected"
	reasonConfigApplied  = "DevicePluginConfigApplied"
	reasonConfigWarning  = "DevicePluginConfigWarning"
	reasonGPUUnhealthy   = "GPUUnhealthy"
	reasonGPUHealthy     = "GPUHealthy"
	reasonDegraded       = "AgentDegraded"
)

// nodeAPI is the node's side of the apiserver: its labels, Events and pods. A
// nil *nodeAPI does nothing and knows no pods.
type nodeAPI struct {
	name     string
	client   kubernetes.Interface
	recorder record.EventRecorder
	pods     cache.SharedIndexInformer
	log      *slog.Logger
}

// newNodeAPI starts watching the pods of the node and calls changed whenever
// one changes. Everything it starts ends with ctx.
func newNodeAPI(ctx context.Context, client kubernetes.Interface, name string, changed func(), log *slog.Logger) (*nodeAPI, error) {
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: client.CoreV1().Events("")})
	context.AfterFunc(ctx, broadcaster.Shutdown)

	selector := fields.OneTermEqualSelector("spec.nodeName", name).String()
	pods := cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = selector
			return client.CoreV1().Pods("").List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = selector
			return client.CoreV1().Pods("").Watch(ctx, o)
		},
	}, client), &corev1.Pod{}, 0, cache.Indexers{})
	err := pods.SetTransform(func(object any) (any, error) {
		pod, ok := object.(*corev1.Pod)
		if !ok {
			return object, nil
		}
		return kept(pod), nil
	})
	if err != nil {
		return nil, err
	}
	if _, err := pods.AddEventHandler(cache.ResourceEventHandlerFuncs{
		AddFunc:    func(any) { changed() },
		UpdateFunc: func(any, any) { changed() },
		DeleteFunc: func(any) { changed() },
	}); err != nil {
		return nil, err
	}
	go pods.RunWithContext(ctx)
	return &nodeAPI{
		name: name, client: client, pods: pods, log: log,
		recorder: broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "ashlar-agent", Host: name}),
	}, nil
}

// kept is what alive needs of a pod.
func kept(pod *corev1.Pod) *corev1.Pod {
	k := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion},
		Status:     corev1.PodStatus{Phase: pod.Status.Phase},
	}
	if static, ok := pod.Annotations[corev1.MirrorPodAnnotationKey]; ok {
		k.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: static}
	}
	return k
}

// event writes an Event on the node. Its text must be stable, so that repeated
// ones are counted and not listed.
func (n *nodeAPI) event(kind, reason, format string, args ...any) {
	message := fmt.Sprintf(format, args...)
	if n == nil {
		return
	}
	// The kubelet, too, names the node by its name in place of a UID.
	ref := &corev1.ObjectReference{Kind: "Node", APIVersion: "v1", Name: n.name, UID: types.UID(n.name)}
	n.recorder.Event(ref, kind, reason, message)
}

// alive says whether the pod may still hold devices. A pod is taken for alive
// as long as the apiserver has not been heard.
func (n *nodeAPI) alive(uid string) bool {
	if !n.pods.HasSynced() {
		return true
	}
	for _, object := range n.pods.GetStore().List() {
		pod, ok := object.(*corev1.Pod)
		if !ok {
			continue
		}
		// The kubelet knows a static pod by the UID that its mirror is annotated with.
		static, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
		if string(pod.UID) == uid || mirror && static == uid {
			return pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed
		}
	}
	return false
}

// setLabels makes the node carry exactly the wanted labels of those that the
// agent owns.
func (n *nodeAPI) setLabels(ctx context.Context, want map[string]string) error {
	node, err := n.client.CoreV1().Nodes().Get(ctx, n.name, metav1.GetOptions{})
	if err != nil {
		return err
	}
	change := labelChange(node.Labels, want)
	if len(change) == 0 {
		return nil
	}
	patch, err := json.Marshal(map[string]any{"metadata": map[string]any{"labels": change}})
	if err != nil {
		return err
	}
	_, err = n.client.CoreV1().Nodes().Patch(ctx, n.name, types.MergePatchType, patch, metav1.PatchOptions{})
	return err
}
