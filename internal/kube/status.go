package kube

import (
	"cmp"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/ashlar-gpu/ashlar/api/v1alpha1"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// Holder is a container that holds a device of a node.
type Holder struct {
	Namespace, Pod, Container, Resource string
	Device                              gpu.DeviceID
	// GPU is the UUID of the physical GPU.
	GPU string
}

// NodeFacts are what a GPUNode tells.
type NodeFacts struct {
	// Machine has the verdicts of the health rules on it.
	Machine *gpu.Machine
	// Plan is what is offered, nil for nothing yet.
	Plan *sharing.Plan
	// Holders may be in any order.
	Holders []Holder
	// Withheld are devices that are not offered now: by resource and device id, the
	// reason.
	Withheld map[string]map[string]string
	// Cordoned are UUIDs of GPUs.
	Cordoned map[string]bool
	// Fault says since when a GPU or MIG device is unhealthy, and what must be done.
	// nil for not known.
	Fault func(uuid string) (time.Time, string)
}

// The bounds of the CustomResourceDefinition.
const (
	maxGPUs      = 64
	maxHolders   = 1024
	maxReason    = 512
	maxName      = 128
	maxShort     = 64
	maxSummary   = 256
	maxSharing   = 128
	maxResources = 256
)

// Status is the status of a GPUNode, without the state of MIG changes and of
// steering and without conditions. Equal facts give equal statuses.
func Status(f NodeFacts) v1alpha1.GPUNodeStatus {
	m := f.Machine
	s := v1alpha1.GPUNodeStatus{Driver: cut(m.Driver, maxShort), CUDA: cut(m.CUDA, 16)}
	holders := make(map[string][]v1alpha1.Holder)
	for _, h := range f.Holders {
		holders[h.GPU] = append(holders[h.GPU], v1alpha1.Holder{
			Resource: h.Resource, Device: h.Device.String(), Namespace: h.Namespace, Pod: h.Pod, Container: h.Container,
		})
	}
	for i := range m.GPUs[:min(len(m.GPUs), maxGPUs)] {
		s.GPUs = append(s.GPUs, f.gpu(&m.GPUs[i], holders[m.GPUs[i].UUID]))
	}
	s.Links = links(m)
	if f.Plan != nil {
		s.Resources = f.resources()
	}
	s.Summary = f.summary(&s)
	return s
}

func (f *NodeFacts) gpu(g *gpu.GPU, holders []v1alpha1.Holder) v1alpha1.GPU {
	a := v1alpha1.GPU{
		Index: int32(g.Index), UUID: g.UUID, Product: cut(g.Name, maxName), MemoryMiB: int64(g.MemoryMiB),
		PCIBusID: cut(g.PCIBusID, 32), PCIeRoot: cut(g.PCIeRoot, maxShort), NVSwitch: cut(g.NVSwitch, maxName), NVLinks: int32(g.NVLinks),
		Health: f.health(g.Health, g.UUID), Cordoned: f.Cordoned[g.UUID], Holders: holders,
	}
	if g.Compute.Major > 0 {
		a.Compute = g.Compute.String()
	}
	if g.NUMA >= 0 {
		a.NUMA = new(int32)
		*a.NUMA = int32(g.NUMA)
	}
	slices.SortFunc(a.Holders, func(x, y v1alpha1.Holder) int {
		return cmp.Or(cmp.Compare(x.Device, y.Device), cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Pod, y.Pod),
			cmp.Compare(x.Container, y.Container), cmp.Compare(x.Resource, y.Resource))
	})
	// A GPU has far fewer slots than this.
	a.Holders = a.Holders[:min(len(a.Holders), maxHolders)]
	if g.MIG.Capable {
		a.MIG = f.mig(g)
	}
	return a
}

func (f *NodeFacts) health(h gpu.Health, uuid string) v1alpha1.Health {
	a := v1alpha1.Health{State: v1alpha1.HealthState(h.State.String())}
	if h.OK() {
		return a
	}
	a.Reason = cut(cmp.Or(h.Reason, "no reason known"), maxReason)
	if f.Fault != nil {
		if since, action := f.Fault(uuid); !since.IsZero() {
			at := metav1.NewTime(since.UTC().Truncate(time.Second))
			a.Since, a.Action = &at, cut(action, maxShort)
		}
	}
	return a
}

func (f *NodeFacts) mig(g *gpu.GPU) *v1alpha1.MIG {
	a := &v1alpha1.MIG{Enabled: g.MIG.Enabled}
	if g.MIG.Pending != g.MIG.Enabled {
		pending := g.MIG.Pending
		a.Pending = &pending
	}
	for _, d := range g.MIG.Devices {
		device := v1alpha1.MIGDevice{
			MIGInstance: v1alpha1.MIGInstance{
				ProfileID: int32(d.ProfileID), Profile: cut(d.Profile, 32), Start: int32(d.Placement.Start), Size: int32(d.Placement.Size),
			},
			UUID: d.UUID, MemoryMiB: int64(d.MemoryMiB),
		}
		if g.Health.OK() && !d.Health.OK() {
			h := f.health(d.Health, d.UUID)
			device.Health = &h
		}
		a.Devices = append(a.Devices, device)
	}
	product := gpu.ProductByName(g.Name)
	if product == nil || product.MIG == nil {
		return a
	}
	geometry := g.MIG.Geometry()
	for i := range product.MIG.Profiles {
		p := &product.MIG.Profiles[i]
		var starts []int32
		for _, at := range product.MIG.Free(geometry, p.ID) {
			starts = append(starts, int32(at.Start))
		}
		if len(starts) > 0 {
			a.Free = append(a.Free, v1alpha1.MIGPlaces{ProfileID: int32(p.ID), Profile: p.Name, Starts: starts})
		}
	}
	return a
}

func links(m *gpu.Machine) []v1alpha1.Link {
	var list []v1alpha1.Link
	for a := range min(len(m.GPUs), maxGPUs) {
		for b := a + 1; b < min(len(m.GPUs), maxGPUs); b++ {
			l := m.Links.At(a, b)
			link := v1alpha1.Link{A: int32(a), B: int32(b), NVLinks: int32(l.NVLinks)}
			if l.PCIe != gpu.PCIeUnknown {
				link.PCIe = l.PCIe.String()
			}
			if link.NVLinks > 0 || link.PCIe != "" {
				list = append(list, link)
			}
		}
	}
	return list
}

func (f *NodeFacts) resources() []v1alpha1.Resource {
	var list []v1alpha1.Resource
	for i := range f.Plan.Resources {
		r := &f.Plan.Resources[i]
		a := v1alpha1.Resource{
			Name: r.Name, Strategy: string(r.Strategy), Replicas: int32(max(r.Replicas, 1)), Devices: int32(len(r.Devices)), Exclusive: r.Exclusive,
		}
		seen := make(map[int32]bool)
		for _, d := range r.Devices {
			if d.Health.OK() && f.Withheld[r.Name][d.ID.String()] == "" {
				a.Offered++
			}
			if g := f.Machine.ByUUID(d.GPU); g != nil {
				seen[int32(g.Index)] = true
			}
		}
		a.GPUs = slices.Sorted(maps.Keys(seen))
		a.GPUs = a.GPUs[:min(len(a.GPUs), maxGPUs)]
		list = append(list, a)
	}
	slices.SortFunc(list, func(x, y v1alpha1.Resource) int { return cmp.Compare(x.Name, y.Name) })
	return list[:min(len(list), maxResources)]
}

func (f *NodeFacts) summary(s *v1alpha1.GPUNodeStatus) v1alpha1.GPUNodeSummary {
	sum := v1alpha1.GPUNodeSummary{GPUs: int32(len(s.GPUs)), Sharing: f.sharing(), MIG: migSummary(f.Machine)}
	products := make(map[string]int)
	var order []string
	for i := range s.GPUs {
		g := &s.GPUs[i]
		healthy := g.Health.State == v1alpha1.Healthy
		if g.MIG != nil && slices.ContainsFunc(g.MIG.Devices, func(d v1alpha1.MIGDevice) bool { return d.Health != nil }) {
			healthy = false
		}
		switch {
		case !healthy:
			sum.Unhealthy++
		case !g.Cordoned && len(g.Holders) == 0:
			sum.Free++
		}
		name := cmp.Or(g.Product, "unknown")
		if products[name] == 0 {
			order = append(order, name)
		}
		products[name]++
	}
	var texts []string
	for _, name := range order {
		texts = append(texts, fmt.Sprintf("%dx %s", products[name], name))
	}
	sum.Product = cut(strings.Join(texts, ", "), maxSummary)
	return sum
}

// sharing names the ways in which GPUs and MIG devices are shared.
func (f *NodeFacts) sharing() string {
	if f.Plan == nil {
		return ""
	}
	var texts []string
	for _, r := range f.Plan.Resources {
		if r.Replicas < 2 {
			continue
		}
		text := fmt.Sprintf("%s x%d", r.Strategy, r.Replicas)
		gpus := make(map[string]bool)
		for _, d := range r.Devices {
			gpus[d.GPU] = true
		}
		if len(gpus) < len(f.Machine.GPUs) {
			text += fmt.Sprintf(" (%d of %d GPUs)", len(gpus), len(f.Machine.GPUs))
		}
		if !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	if len(texts) == 0 {
		return string(sharing.None)
	}
	return cut(strings.Join(texts, ", "), maxSharing)
}

// migSummary counts MIG devices by profile, the largest first.
func migSummary(m *gpu.Machine) string {
	type group struct{ id, size, count int }
	groups := make(map[string]*group)
	capable, enabled := false, false
	for i := range m.GPUs {
		g := &m.GPUs[i]
		capable, enabled = capable || g.MIG.Capable, enabled || g.MIG.Enabled
		for _, d := range g.MIG.Devices {
			if groups[d.Profile] == nil {
				groups[d.Profile] = &group{id: d.ProfileID, size: d.Placement.Size}
			}
			groups[d.Profile].count++
		}
	}
	switch {
	case !capable:
		return "-"
	case !enabled:
		return "off"
	case len(groups) == 0:
		return "empty"
	}
	names := slices.SortedFunc(maps.Keys(groups), func(a, b string) int {
		return cmp.Or(cmp.Compare(groups[b].size, groups[a].size), cmp.Compare(a, b))
	})
	var texts []string
	for _, name := range names {
		texts = append(texts, fmt.Sprintf("%dx%s", groups[name].count, name))
	}
	return cut(strings.Join(texts, ","), maxSummary)
}

// cut shortens a text to so many bytes, visibly.
func cut(text string, most int) string {
	text = strings.ToValidUTF8(text, "?")
	if len(text) <= most {
		return text
	}
	return strings.ToValidUTF8(text[:most-3], "") + "..."
}
