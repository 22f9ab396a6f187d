package agent

import (
	"context"
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
	"sigs.k8s.io/controller-runtime/pkg/client"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
)

// Reasons of the Events on the node.
const (
	reasonConfigRejected = "DevicePluginConfigRejected"
	reasonConfigApplied  = "DevicePluginConfigApplied"
	reasonConfigWarning  = "DevicePluginConfigWarning"
	reasonGPUUnhealthy   = "GPUUnhealthy"
	reasonGPUHealthy     = "GPUHealthy"
	reasonXID            = "XID"
	reasonDegraded       = "AgentDegraded"
	reasonPlanMismatch   = "DevicePlanMismatch"
	reasonPlanInvalid    = "DevicePlanInvalid"
)

// nodeAPI is the node's side of the apiserver: the node with its labels, Events
// and pods, and the GPUNode. A nil *nodeAPI does nothing and knows no pods.
type nodeAPI struct {
	name   string
	client kubernetes.Interface
	// gpuNodes is nil where GPUNodes are not written.
	gpuNodes client.WithWatch
	recorder record.EventRecorder
	pods     cache.SharedIndexInformer
	nodes    cache.SharedIndexInformer // of the one node
	objects  cache.SharedIndexInformer // of the one GPUNode; nil like gpuNodes
	log      *slog.Logger
}

// newNodeAPI starts watching the node, its pods and its GPUNode, and calls changed
// whenever one changes. Everything it starts ends with ctx.
func newNodeAPI(ctx context.Context, o *Options, changed func()) (*nodeAPI, error) {
	name, c := o.NodeName, o.Client
	broadcaster := record.NewBroadcaster(record.WithContext(ctx))
	broadcaster.StartRecordingToSink(&typedcorev1.EventSinkImpl{Interface: c.CoreV1().Events("")})
	context.AfterFunc(ctx, broadcaster.Shutdown)

	onNode := fields.OneTermEqualSelector("spec.nodeName", name).String()
	pods := cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = onNode
			return c.CoreV1().Pods("").List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = onNode
			return c.CoreV1().Pods("").Watch(ctx, o)
		},
	}, c), &corev1.Pod{}, 0, cache.Indexers{})
	named := fields.OneTermEqualSelector("metadata.name", name)
	nodes := cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
		ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
			o.FieldSelector = named.String()
			return c.CoreV1().Nodes().List(ctx, o)
		},
		WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
			o.FieldSelector = named.String()
			return c.CoreV1().Nodes().Watch(ctx, o)
		},
	}, c), &corev1.Node{}, 0, cache.Indexers{})
	n := &nodeAPI{
		name: name, client: c, gpuNodes: o.GPUNodes, pods: pods, nodes: nodes, log: o.Log,
		recorder: broadcaster.NewRecorder(scheme.Scheme, corev1.EventSource{Component: "ashlar-agent", Host: name}),
	}
	informers := []cache.SharedIndexInformer{pods, nodes}
	if n.gpuNodes != nil {
		options := func(o metav1.ListOptions) *client.ListOptions {
			return &client.ListOptions{FieldSelector: named, Raw: &o}
		}
		n.objects = cache.NewSharedIndexInformer(cache.ToListWatcherWithWatchListSemantics(&cache.ListWatch{
			ListWithContextFunc: func(ctx context.Context, o metav1.ListOptions) (runtime.Object, error) {
				list := &v1alpha1.GPUNodeList{}
				return list, n.gpuNodes.List(ctx, list, options(o))
			},
			WatchFuncWithContext: func(ctx context.Context, o metav1.ListOptions) (watch.Interface, error) {
				return n.gpuNodes.Watch(ctx, &v1alpha1.GPUNodeList{}, options(o))
			},
		}, c), &v1alpha1.GPUNode{}, 0, cache.Indexers{})
		informers = append(informers, n.objects)
	}
	if err := pods.SetTransform(keep); err != nil {
		return nil, err
	}
	for _, informer := range informers {
		if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{
			AddFunc:    func(any) { changed() },
			UpdateFunc: func(any, any) { changed() },
			DeleteFunc: func(any) { changed() },
		}); err != nil {
			return nil, err
		}
		go informer.RunWithContext(ctx)
	}
	return n, nil
}

// keep drops what the agent does not need of a pod from the cache.
func keep(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	k := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion,
			CreationTimestamp: pod.CreationTimestamp, DeletionTimestamp: pod.DeletionTimestamp,
		},
		Status: corev1.PodStatus{Phase: pod.Status.Phase},
	}
	for _, key := range []string{corev1.MirrorPodAnnotationKey, v1alpha1.AnnotationDevices} {
		if value, ok := pod.Annotations[key]; ok {
			metav1.SetMetaDataAnnotation(&k.ObjectMeta, key, value)
		}
	}
	return k, nil
}

// cached lists what an informer knows.
func cached[T any](informer cache.SharedIndexInformer) []T {
	if informer == nil {
		return nil
	}
	var list []T
	for _, object := range informer.GetStore().List() {
		if o, ok := object.(T); ok {
			list = append(list, o)
		}
	}
	return list
}

// node is the node as it was last heard of, nil before that.
func (n *nodeAPI) node() *corev1.Node {
	if n == nil {
		return nil
	}
	for _, node := range cached[*corev1.Node](n.nodes) {
		return node
	}
	return nil
}

// gpuNode is the GPUNode as it was last heard of, nil before that.
func (n *nodeAPI) gpuNode() *v1alpha1.GPUNode {
	if n == nil {
		return nil
	}
	for _, object := range cached[*v1alpha1.GPUNode](n.objects) {
		return object
	}
	return nil
}

// podsNow asks the apiserver for the pods of the node: a pod is bound before the
// kubelet hears of it, but the cache may hear of it later.
func (n *nodeAPI) podsNow(ctx context.Context) ([]*corev1.Pod, error) {
	list, err := n.client.CoreV1().Pods("").List(ctx, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("spec.nodeName", n.name).String(),
	})
	if err != nil {
		return nil, err
	}
	pods := make([]*corev1.Pod, len(list.Items))
	for i := range list.Items {
		pods[i] = &list.Items[i]
	}
	return pods, nil
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

// podEvent writes an Event on a pod.
func (n *nodeAPI) podEvent(pod *corev1.Pod, kind, reason, format string, args ...any) {
	if n == nil {
		return
	}
	ref := &corev1.ObjectReference{Kind: "Pod", APIVersion: "v1", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID}
	n.recorder.Eventf(ref, kind, reason, format, args...)
}

// podOf finds the pod that the kubelet knows by the UID: of a static pod it is the
// one that its mirror is annotated with.
func (n *nodeAPI) podOf(uid string) *corev1.Pod {
	for _, pod := range cached[*corev1.Pod](n.pods) {
		if known(pod, uid) {
			return pod
		}
	}
	return nil
}

// known says whether the kubelet knows the pod by the UID.
func known(pod *corev1.Pod, uid string) bool {
	static, mirror := pod.Annotations[corev1.MirrorPodAnnotationKey]
	return string(pod.UID) == uid || mirror && static == uid
}

// podNamed finds a pod by its name, nil where it is not known.
func (n *nodeAPI) podNamed(namespace, name string) *corev1.Pod {
	if n == nil {
		return nil
	}
	object, found, err := n.pods.GetStore().GetByKey(namespace + "/" + name)
	if err != nil || !found {
		return nil
	}
	pod, _ := object.(*corev1.Pod)
	return pod
}

// alive says whether the pod may still hold devices. A pod is taken for alive
// as long as the apiserver has not been heard.
func (n *nodeAPI) alive(uid string) bool {
	if !n.pods.HasSynced() {
		return true
	}
	pod := n.podOf(uid)
	return pod != nil && pod.Status.Phase != corev1.PodSucceeded && pod.Status.Phase != corev1.PodFailed
}
