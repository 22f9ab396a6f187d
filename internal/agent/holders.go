package agent

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"

	"github.com/ashlar-gpu/ashlar/internal/deviceplugin"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/kube"
	"github.com/ashlar-gpu/ashlar/internal/podresources"
)

const (
	// holdersPatience is how long the pod-resources API may fail before the
	// kubelet's checkpoint alone is believed. While it fails, the last answer
	// stands; before the first, nothing is offered.
	holdersPatience = 10 * time.Second
	// syncPatience is how long a kubelet may take after its start to see its pods
	// again, and the apiserver to be heard first.
	syncPatience = 30 * time.Second
)

// kubeletState is what is known of the kubelet that runs now.
type kubeletState struct {
	// id tells one run of the kubelet from the next, "" while it is away.
	id    string
	since time.Time
	// known says that its holders have been read, and asked when that was last tried.
	known bool
	asked time.Time
	// silent is since when its pod-resources API has failed, zero while it works.
	silent time.Time
}

// meetKubelet notices that the kubelet came, went or was restarted. Each run of
// it makes its socket anew.
func (a *agent) meetKubelet(now time.Time) {
	id := ""
	info, err := os.Stat(a.kubeletSocket())
	switch {
	case err == nil:
		id = fmt.Sprint(info.ModTime().UnixNano())
		if stat, ok := info.Sys().(*syscall.Stat_t); ok {
			id = fmt.Sprintf("%d-%s", stat.Ino, id)
		}
		a.well("kubelet")
	case errors.Is(err, fs.ErrNotExist):
		a.well("kubelet") // it is away, which is no trouble of ours
	default:
		a.trouble("kubelet", "%v", err)
	}
	if id != a.kubelet.id {
		a.kubelet = kubeletState{id: id, since: now}
		a.Log.Info("kubelet", "running", id != "")
	}
}

// readHolders asks the kubelet who holds which device. See the ADR on holders
// for the two sources, and for what is believed while one of them fails.
func (a *agent) readHolders(ctx context.Context, now time.Time) {
	if a.kubelet.id == "" {
		return // it gives nothing to anybody now
	}
	if a.kubelet.known {
		end := a.turns.ask(ctx)
		if end == nil && now.Sub(a.kubelet.asked) < holdersPatience {
			return // it gives devices all the time; the last answer stands for a while
		}
		if end != nil {
			defer end()
		}
	}
	a.kubelet.asked = now
	ctx, cancel := context.WithTimeout(ctx, callTimeout)
	defer cancel()
	list, listErr := podresources.List(ctx, a.podResourcesSocket())
	if listErr != nil {
		if a.kubelet.silent.IsZero() {
			a.kubelet.silent = now
		}
		if now.Sub(a.kubelet.silent) < holdersPatience {
			return // it starts this API a moment after that of device plugins
		}
		a.trouble("holders", "%v; the kubelet's checkpoint alone is believed", listErr)
	} else {
		a.kubelet.silent = time.Time{}
		a.well("holders")
	}
	entries, err := podresources.Checkpoint(a.devicePlugins())
	if err != nil {
		a.trouble("checkpoint", "%v; devices of init containers are not seen", err)
		if listErr != nil || now.Sub(a.kubelet.since) < syncPatience {
			return // the list alone is not enough yet
		}
	} else {
		a.well("checkpoint")
	}
	var holders []kube.Holder
	for _, l := range list {
		holders = append(holders, a.holdersOf(l)...)
	}
	// Without an apiserver nothing tells an entry of a pod that has ended, so entries
	// count only where the list does not answer or not for all pods yet.
	if a.api != nil || listErr != nil || now.Sub(a.kubelet.since) < syncPatience {
		holders = append(holders, a.holdersInCheckpoint(entries)...)
	}
	a.setHolders(now, holders)
	a.kubelet.known = true
	if listErr == nil {
		a.settle(now, list)
	}
	if a.api == nil {
		return
	}
	switch {
	case a.api.pods.HasSynced():
		a.well("pods")
	case now.Sub(a.kubelet.since) > syncPatience:
		a.trouble("pods", "the apiserver does not list the pods of this node; devices of pods that ended may be withheld")
	}
}

// holdersInCheckpoint are the holds of the pods that have not ended.
func (a *agent) holdersInCheckpoint(entries []podresources.Entry) []kube.Holder {
	var holders []kube.Holder
	for _, e := range entries {
		allocation := podresources.Allocation{Container: e.Container, Resource: e.Resource, Devices: e.Devices}
		if a.api != nil {
			if !a.api.alive(e.PodUID) {
				continue
			}
			if pod := a.api.podOf(e.PodUID); pod != nil {
				allocation.Namespace, allocation.Pod = pod.Namespace, pod.Name
			}
		}
		holders = append(holders, a.holdersOf(allocation)...)
	}
	return holders
}

// holdersOf are the holds of an allocation on devices of this node. Devices of
// other plugins are left out.
func (a *agent) holdersOf(l podresources.Allocation) []kube.Holder {
	var holders []kube.Holder
	for _, text := range l.Devices {
		id, err := gpu.ParseDeviceID(text)
		if err != nil {
			continue
		}
		if parent, ours := a.parents[id.Base]; ours {
			holders = append(holders, kube.Holder{
				Namespace: l.Namespace, Pod: l.Pod, Container: l.Container, Resource: l.Resource, Device: id, GPU: parent,
			})
		}
	}
	return holders
}

// setHolders makes these the present holders. The same hold may be told twice.
func (a *agent) setHolders(now time.Time, holders []kube.Holder) {
	known := make(map[kube.Holder]bool)
	holders = slices.DeleteFunc(holders, func(h kube.Holder) bool {
		twice := known[h]
		known[h] = true
		return twice
	})
	inLedger := make([]deviceplugin.Holder, len(holders))
	a.holders, a.held = holders, a.held[:0]
	for i, h := range holders {
		inLedger[i] = deviceplugin.Holder{Resource: h.Resource, Device: h.Device, GPU: h.GPU}
		a.held = append(a.held, h.Device.Base)
	}
	a.ledger.SetHolders(now, inLedger)
	slices.Sort(a.held)
	a.held = slices.Compact(a.held)
}

// settle compares what containers were given with what was planned for them.
func (a *agent) settle(now time.Time, list []podresources.Allocation) {
	if a.steering == nil || !a.api.pods.HasSynced() {
		return
	}
	for _, m := range a.steering.settle(now, cached[*corev1.Pod](a.api.pods), list) {
		a.Log.Error("container was given other devices than planned", "namespace", m.Namespace, "pod", m.Pod,
			"container", m.Container, "planned", m.Planned, "got", m.Got)
		if pod := a.api.podNamed(m.Namespace, m.Pod); pod != nil {
			a.api.podEvent(pod, corev1.EventTypeWarning, reasonPlanMismatch, "container %s was given %s, not %s as planned",
				m.Container, strings.Join(m.Got, ", "), strings.Join(m.Planned, ", "))
		}
	}
}
