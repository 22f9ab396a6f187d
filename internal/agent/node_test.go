package agent

import (
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/fake"
)

// eventually waits until check returns "".
func eventually(t *testing.T, what string, check func() string) {
	t.Helper()
	for deadline := time.Now().Add(15 * time.Second); ; time.Sleep(50 * time.Millisecond) {
		problem := check()
		if problem == "" {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s: %s", what, problem)
		}
	}
}

func TestNodeObject(t *testing.T) {
	client := fake.NewClientset(&corev1.Node{ObjectMeta: metav1.ObjectMeta{
		Name: "node", Labels: map[string]string{"team": "a", "nvidia.com/mig-1g.5gb.count": "7", "nvidia.com/gpu.product": "old"},
	}})
	r := start(t, twoA100, slices4("4"))
	r.await("nvidia.com/gpu", 8)
	r.stop()
	r.options.Client = client
	r.run()
	labels := func() map[string]string {
		n, err := client.CoreV1().Nodes().Get(t.Context(), "node", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		return n.Labels
	}
	eventually(t, "labels", func() string {
		l := labels()
		_, stale := l["nvidia.com/mig-1g.5gb.count"]
		if l["nvidia.com/gpu.product"] == "NVIDIA-A100-SXM4-40GB-SHARED" && l["nvidia.com/gpu.replicas"] == "4" && l["team"] == "a" && !stale {
			return ""
		}
		return strings.Join(keys(l), " ")
	})
	r.write("sharing: 1\n")
	eventually(t, "Event about the bad config", func() string {
		list, err := client.CoreV1().Events("default").List(t.Context(), metav1.ListOptions{})
		if err != nil {
			t.Fatal(err)
		}
		var reasons []string
		for _, e := range list.Items {
			reasons = append(reasons, e.Reason)
			if e.Reason == reasonConfigRejected && e.InvolvedObject.Name == "node" && strings.Contains(e.Message, r.config+":1") {
				return ""
			}
		}
		return strings.Join(reasons, " ")
	})
}

func keys(m map[string]string) []string {
	var list []string
	for k, v := range m {
		list = append(list, k+"="+v)
	}
	return list
}

func TestAlive(t *testing.T) {
	pod := func(name, uid string, phase corev1.PodPhase, mirrorOf string) *corev1.Pod {
		p := &corev1.Pod{
			ObjectMeta: metav1.ObjectMeta{Namespace: "d", Name: name, UID: types.UID(uid)},
			Spec:       corev1.PodSpec{NodeName: "node"}, Status: corev1.PodStatus{Phase: phase},
		}
		if mirrorOf != "" {
			p.Annotations = map[string]string{corev1.MirrorPodAnnotationKey: mirrorOf}
		}
		return p
	}
	client := fake.NewClientset(
		pod("pending", "1", corev1.PodPending, ""), pod("running", "2", corev1.PodRunning, ""),
		pod("done", "3", corev1.PodSucceeded, ""), pod("failed", "4", corev1.PodFailed, ""), pod("static", "5", corev1.PodRunning, "s5"),
	)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	options := &Options{NodeName: "node", Client: client, Log: slog.New(slog.DiscardHandler)}
	api, err := newNodeAPI(ctx, options, func() {})
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "sync", func() string {
		if api.pods.HasSynced() {
			return ""
		}
		return "not synced"
	})
	for uid, want := range map[string]bool{"1": true, "2": true, "3": false, "4": false, "s5": true, "6": false, "": false} {
		if got := api.alive(uid); got != want {
			t.Errorf("alive(%q) = %v, want %v", uid, got, want)
		}
	}
	// Without having heard the apiserver, everything may be.
	unheard, stop := context.WithCancel(t.Context())
	stop()
	api, err = newNodeAPI(unheard, options, func() {})
	if err != nil {
		t.Fatal(err)
	}
	if !api.alive("6") {
		t.Error("a pod counts as ended before the apiserver was heard")
	}
	var none *nodeAPI
	none.event(corev1.EventTypeNormal, "r", "nothing happens")
}
