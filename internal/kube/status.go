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

// The bounds of the CustomResourceDefinition, in bytes and items.
const (
	maxGPUs       = 64
	maxMIGDevices = 16
	maxPlace      = 64 // memory units
	maxHolders    = 1024
	maxResources  = 256

	maxUUID      = 96
	maxDeviceID  = 112
	maxResource  = 317
	maxNamespace = 63
	maxPod       = 253
	maxContainer = 63
	maxReason    = 512
	maxName      = 128
	maxShort     = 64
	maxTiny      = 32
	maxVersion   = 16
	maxSummary   = 256
	maxSharing   = 128
)

const (
	// holdersSize is how much room there is for the holders of all GPUs together, in
	// bytes of JSON: etcd takes no object of more than 1.5 MiB, and an object that it
	// refuses would tell nothing at all.
	holdersSize = 512 << 10
	// holderKeys is what a holder takes besides its texts.
	holderKeys = len(`{"resource":"","device":"","namespace":"","pod":"","container":""},`)
)

// Status is the status of a GPUNode, without the state of MIG changes and of
// steering and without conditions. Equal facts give equal statuses. The machine
// must be valid; of a machine that is too large to tell, Omitted says what is
// left out.
func Status(f NodeFacts) v1alpha1.GPUNodeStatus {
	m := f.Machine
	s := v1alpha1.GPUNodeStatus{Driver: cut(m.Driver, maxShort), CUDA: cut(m.CUDA, maxVersion)}
	holders := make(map[string][]v1alpha1.Holder)
	for _, h := range f.Holders {
		holders[h.GPU] = append(holders[h.GPU], v1alpha1.Holder{
			Resource: cut(h.Resource, maxResource), Device: cut(h.Device.String(), maxDeviceID),
			Namespace: cut(h.Namespace, maxNamespace), Pod: cut(h.Pod, maxPod), Container: cut(h.Container, maxContainer),
		})
	}
	omitted := make(map[string]int)
	told := m.GPUs[:min(len(m.GPUs), maxGPUs)]
	omitted["GPUs"] = len(m.GPUs) - len(told)
	for i := range told {
		g := f.gpu(&told[i])
		g.Holders = fitting(holders[g.UUID], holdersSize/len(told))
		omitted["holders"] += len(holders[g.UUID]) - len(g.Holders)
		if g.MIG != nil {
			omitted["MIG devices"] += len(told[i].MIG.Devices) - len(g.MIG.Devices)
		}
		s.GPUs = append(s.GPUs, g)
	}
	s.Links = links(m)
	if f.Plan != nil {
		s.Resources = f.resources()
		omitted["resources"] = len(f.Plan.Resources) - len(s.Resources)
	}
	var texts []string
	for _, kind := range slices.Sorted(maps.Keys(omitted)) {
		if n := omitted[kind]; n > 0 {
			texts = append(texts, fmt.Sprintf("%d %s", n, kind))
		}
	}
	s.Omitted = strings.Join(texts, ", ")
	s.Summary = f.summary(&s)
	return s
}

// fitting sorts holders and returns the first of them that take no more than so
// many bytes: at least one, so that what is held is never told as free.
func fitting(holders []v1alpha1.Holder, size int) []v1alpha1.Holder {
	slices.SortFunc(holders, func(x, y v1alpha1.Holder) int {
		return cmp.Or(cmp.Compare(x.Device, y.Device), cmp.Compare(x.Namespace, y.Namespace), cmp.Compare(x.Pod, y.Pod),
			cmp.Compare(x.Container, y.Container), cmp.Compare(x.Resource, y.Resource))
	})
	for i, h := range holders {
		size -= holderKeys + len(h.Resource) + len(h.Device) + len(h.Namespace) + len(h.Pod) + len(h.Container)
		if i > 0 && size < 0 || i == maxHolders {
			return holders[:i]
		}
	}
	return holders
}

// gpu tells of one GPU, without its holders.
func (f *NodeFacts) gpu(g *gpu.GPU) v1alpha1.GPU {
	a := v1alpha1.GPU{
		Index: int32(g.Index), UUID: g.UUID, Product: cut(g.Name, maxName), MemoryMiB: int64(g.MemoryMiB),
		PCIBusID: cut(g.PCIBusID, maxTiny), PCIeRoot: cut(g.PCIeRoot, maxShort), NVSwitch: cut(g.NVSwitch, maxName), NVLinks: int32(g.NVLinks),
		Health: f.health(g.Health, g.UUID), Cordoned: f.Cordoned[g.UUID],
	}
	if g.Compute.Major > 0 {
		a.Compute = g.Compute.String()
	}
	if g.NUMA >= 0 {
		a.NUMA = new(int32(g.NUMA))
	}
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
		a.Pending = new(g.MIG.Pending)
	}
	for _, d := range g.MIG.Devices {
		at := d.Placement
		if len(a.Devices) == maxMIGDevices || at.Start < 0 || at.Size < 1 || at.Start+at.Size > maxPlace {
			continue
		}
		device := v1alpha1.MIGDevice{
			MIGInstance: v1alpha1.MIGInstance{
				ProfileID: int32(d.ProfileID), Profile: cut(d.Profile, maxTiny), Start: int32(at.Start), Size: int32(at.Size),
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
	if !g.MIG.Enabled || product == nil || product.MIG == nil {
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

// sharing names the ways in which GPUs and MIG devices are shared, those of the
// most slots last.
func (f *NodeFacts) sharing() string {
	if f.Plan == nil {
		return ""
	}
	type way struct {
		strategy sharing.Strategy
		replicas int
	}
	gpus := make(map[way]map[string]bool)
	for i := range f.Plan.Resources {
		r := &f.Plan.Resources[i]
		for _, d := range r.Devices {
			if d.ID.Slot == gpu.NoSlot {
				continue // the config shares others of the resource
			}
			w := way{r.Strategy, r.Replicas}
			if gpus[w] == nil {
				gpus[w] = make(map[string]bool)
			}
			gpus[w][d.GPU] = true
		}
	}
	if len(gpus) == 0 {
		return string(sharing.None)
	}
	ways := slices.SortedFunc(maps.Keys(gpus), func(x, y way) int {
		return cmp.Or(cmp.Compare(x.strategy, y.strategy), cmp.Compare(x.replicas, y.replicas))
	})
	texts := make([]string, len(ways))
	for i, w := range ways {
		texts[i] = fmt.Sprintf("%s x%d", w.strategy, w.replicas)
		if n := len(gpus[w]); n < len(f.Machine.GPUs) {
			texts[i] += fmt.Sprintf(" (%d of %d GPUs)", n, len(f.Machine.GPUs))
		}
	}
	return cut(strings.Join(texts, ", "), maxSharing)
}

// migSummary counts MIG devices by profile, the largest first.
func migSummary(m *gpu.Machine) string {
	type group struct{ size, count int }
	groups := make(map[string]*group)
	capable, enabled := false, false
	for i := range m.GPUs {
		g := &m.GPUs[i]
		capable, enabled = capable || g.MIG.Capable, enabled || g.MIG.Enabled
		for _, d := range g.MIG.Devices {
			if groups[d.Profile] == nil {
				groups[d.Profile] = &group{size: d.Placement.Size}
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
