package agent

import (
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// labelDomain is the domain of the labels that GPU feature discovery made
// known.
const labelDomain = "nvidia.com/"

// maxLabelValue is the longest label value that Kubernetes accepts.
const maxLabelValue = 63

// ownedLabel matches the labels that Labels may write, so that stale ones can
// be taken away and no others are touched.
var ownedLabel = regexp.MustCompile(`^nvidia\.com/(gpu\.(present|product|count|memory|replicas|sharing-strategy|family|compute\.(major|minor))|mig\.(capable|strategy)|mig-[0-9a-z.+-]+\.(count|product|memory|replicas|sharing-strategy))$`)

// Labels returns the labels of a node with the names and values of NVIDIA's
// GPU feature discovery. The unqualified gpu.* labels describe the model of the
// first GPU that has told its name, so a node with two models always says the
// same. What is not known is left out; a node without GPUs has no labels.
func Labels(m *gpu.Machine, plan *sharing.Plan, migStrategy string) map[string]string {
	first := slices.IndexFunc(m.GPUs, func(g gpu.GPU) bool { return g.Name != "" })
	if first < 0 {
		return nil
	}
	labels := make(map[string]string)
	set := func(key, value string) { labels[labelDomain+key] = value }

	model := &m.GPUs[first]
	memory := model.MemoryMiB
	count, capable, uncut := 0, false, false
	for i := range m.GPUs {
		g := &m.GPUs[i]
		capable = capable || g.MIG.Capable
		if g.Name == model.Name {
			count++
			uncut = uncut || !g.MIG.Enabled
		}
	}
	product, replicas, strategy := sanitise(model.Name), 1, sharing.None
	if !uncut {
		replicas = 0 // as a full GPU there is none
	}
	if r := viewOf(m, plan, model.Name, migStrategy); r != nil {
		replicas, strategy = r.Replicas, r.Strategy
		if d := migOf(m, r.Devices[0]); d != nil {
			product += "-MIG-" + dotted(d.Profile)
			count, memory = bases(r), d.MemoryMiB
		}
		// A renamed resource is told apart by its name, so the product keeps its own.
		if r.Replicas > 1 && r.Name == labelDomain+"gpu" {
			product += "-SHARED"
		}
	}
	set("gpu.present", "true")
	set("gpu.product", shorten(product))
	set("gpu.count", strconv.Itoa(count))
	set("gpu.replicas", strconv.Itoa(replicas))
	set("gpu.sharing-strategy", string(strategy))
	if memory > 0 {
		set("gpu.memory", strconv.Itoa(memory))
	}
	if c := model.Compute; c.Major > 0 {
		set("gpu.family", c.Family())
		set("gpu.compute.major", strconv.Itoa(c.Major))
		set("gpu.compute.minor", strconv.Itoa(c.Minor))
	}
	set("mig.capable", strconv.FormatBool(capable))
	if migStrategy != string(sharing.MIGNone) {
		set("mig.strategy", migStrategy)
	}
	if migStrategy == string(sharing.MIGMixed) {
		for _, p := range profilesOf(m, plan) {
			key := "mig-" + p.name + "."
			set(key+"count", strconv.Itoa(len(p.devices)))
			set(key+"product", shorten(p.product))
			set(key+"memory", strconv.Itoa(p.memoryMiB))
			set(key+"replicas", strconv.Itoa(p.replicas))
			set(key+"sharing-strategy", string(p.strategy))
		}
	}
	return labels
}

// viewOf returns the resource that a pod asks for to get a GPU of the model: of
// those that offer it and are not the exclusive second view, the one with the
// most devices, so that sharing some of the GPUs shows. With migStrategy mixed,
// MIG devices are described on their own.
func viewOf(m *gpu.Machine, plan *sharing.Plan, model, migStrategy string) *sharing.Resource {
	var best *sharing.Resource
	for i := range plan.Resources {
		r := &plan.Resources[i]
		d := r.Devices[0]
		if r.Exclusive || m.ByUUID(d.GPU).Name != model || migStrategy == string(sharing.MIGMixed) && migOf(m, d) != nil {
			continue
		}
		if best == nil || len(r.Devices) > len(best.Devices) {
			best = r
		}
	}
	return best
}

// profile is what labels say of the MIG devices of a profile.
type profile struct {
	name, product string
	memoryMiB     int
	devices       map[string]bool
	replicas      int
	strategy      sharing.Strategy
}

// profilesOf gathers the profiles of all resources, sorted by name. Where only
// some devices of a profile are shared, the sharing of those counts.
func profilesOf(m *gpu.Machine, plan *sharing.Plan) []*profile {
	found := make(map[string]*profile)
	for i := range plan.Resources {
		r := &plan.Resources[i]
		for _, device := range r.Devices {
			d := migOf(m, device)
			if d == nil {
				continue
			}
			name := dotted(d.Profile)
			p := found[name]
			if p == nil {
				p = &profile{
					name: name, product: sanitise(m.ByUUID(device.GPU).Name) + "-MIG-" + name, memoryMiB: d.MemoryMiB,
					devices: make(map[string]bool), replicas: 1, strategy: sharing.None,
				}
				found[name] = p
			}
			p.devices[d.UUID] = true
			if r.Replicas > p.replicas {
				p.replicas, p.strategy = r.Replicas, r.Strategy
				if r.Name == labelDomain+gpu.MIGResource(d.Profile) && !strings.HasSuffix(p.product, "-SHARED") {
					p.product += "-SHARED"
				}
			}
		}
	}
	var list []*profile
	for _, name := range slices.Sorted(maps.Keys(found)) {
		list = append(list, found[name])
	}
	return list
}

// dotted is a profile's name as it stands in labels.
func dotted(profile string) string { return strings.ReplaceAll(profile, "+", ".") }

// migOf returns the MIG device that a device is a view of, or nil.
func migOf(m *gpu.Machine, d sharing.Device) *gpu.MIGDevice {
	g := m.ByUUID(d.GPU)
	if i := slices.IndexFunc(g.MIG.Devices, func(x gpu.MIGDevice) bool { return x.UUID == d.ID.Base }); i >= 0 {
		return &g.MIG.Devices[i]
	}
	return nil
}

// bases counts the GPUs or MIG devices behind a resource's devices.
func bases(r *sharing.Resource) int {
	seen := make(map[string]bool)
	for _, d := range r.Devices {
		seen[d.ID.Base] = true
	}
	return len(seen)
}

var (
	notInLabel = regexp.MustCompile(`[^A-Za-z0-9\-_. ]`)
	spaces     = regexp.MustCompile(`\s+`)
)

// sanitise turns a product name into a label value as GPU feature discovery
// does: foreign characters are dropped, runs of spaces become a hyphen.
func sanitise(name string) string {
	return spaces.ReplaceAllString(notInLabel.ReplaceAllString(strings.TrimSpace(name), ""), "-")
}

// shorten cuts a value to what Kubernetes accepts.
func shorten(value string) string {
	if len(value) > maxLabelValue {
		value = value[:maxLabelValue]
	}
	return strings.Trim(value, "-_.")
}

// labelChange returns the merge patch value that turns the labels that a node
// has into the wanted ones: nil takes a label away. Labels that others own stay.
func labelChange(have, want map[string]string) map[string]*string {
	change := make(map[string]*string)
	for key := range have {
		if _, keep := want[key]; !keep && ownedLabel.MatchString(key) {
			change[key] = nil
		}
	}
	for _, key := range slices.Sorted(maps.Keys(want)) {
		if value := want[key]; have[key] != value {
			change[key] = &value
		}
	}
	return change
}
