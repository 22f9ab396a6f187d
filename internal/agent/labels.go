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
// GPU feature discovery. The unqualified gpu.* labels describe the model of
// GPU 0, so a node with two models always says the same. A node without GPUs
// has none.
func Labels(m *gpu.Machine, plan *sharing.Plan, migStrategy string) map[string]string {
	if len(m.GPUs) == 0 {
		return nil
	}
	labels := make(map[string]string)
	set := func(key, value string) { labels[labelDomain+key] = value }

	model := m.GPUs[0]
	count, capable := 0, false
	for _, g := range m.GPUs {
		if g.Name == model.Name {
			count++
		}
		capable = capable || g.MIG.Capable
	}
	set("gpu.present", "true")
	set("gpu.memory", strconv.Itoa(model.MemoryMiB))
	set("gpu.family", model.Compute.Family())
	set("gpu.compute.major", strconv.Itoa(model.Compute.Major))
	set("gpu.compute.minor", strconv.Itoa(model.Compute.Minor))
	set("mig.capable", strconv.FormatBool(capable))
	if migStrategy != "none" {
		set("mig.strategy", migStrategy)
	}

	product, replicas, strategy := sanitise(model.Name), 1, sharing.None
	if r := viewOf(m, plan, model.Name); r != nil {
		replicas, strategy = r.Replicas, r.Strategy
		if d := migOf(m, r.Devices[0]); d != nil {
			product += "-MIG-" + d.Profile
			count = bases(r)
			set("gpu.memory", strconv.Itoa(d.MemoryMiB))
		}
		// A renamed resource is told apart by its name, so the product keeps its own.
		if r.Replicas > 1 && r.Name == labelDomain+"gpu" {
			product += "-SHARED"
		}
	}
	set("gpu.product", shorten(product))
	set("gpu.count", strconv.Itoa(count))
	set("gpu.replicas", strconv.Itoa(replicas))
	set("gpu.sharing-strategy", string(strategy))

	if migStrategy != "mixed" {
		return labels
	}
	for i := range plan.Resources {
		r := &plan.Resources[i]
		d := migOf(m, r.Devices[0])
		if d == nil {
			continue
		}
		profile := strings.ReplaceAll(d.Profile, "+", ".")
		suffix := ""
		if r.Replicas > 1 {
			suffix = "-SHARED"
		}
		key := "mig-" + profile + "."
		set(key+"count", strconv.Itoa(bases(r)))
		set(key+"product", shorten(sanitise(m.ByUUID(r.Devices[0].GPU).Name)+"-MIG-"+profile+suffix))
		set(key+"memory", strconv.Itoa(d.MemoryMiB))
		set(key+"replicas", strconv.Itoa(r.Replicas))
		set(key+"sharing-strategy", string(r.Strategy))
	}
	return labels
}

// viewOf returns the resource that a pod asks for to get a GPU of the model:
// of those that offer it and are not the exclusive second view, the one with
// the most devices, so that sharing some of the GPUs shows.
func viewOf(m *gpu.Machine, plan *sharing.Plan, model string) *sharing.Resource {
	var best *sharing.Resource
	for i := range plan.Resources {
		r := &plan.Resources[i]
		if r.Exclusive || strings.HasPrefix(r.Name, labelDomain+"mig-") || m.ByUUID(r.Devices[0].GPU).Name != model {
			continue
		}
		if best == nil || len(r.Devices) > len(best.Devices) {
			best = r
		}
	}
	return best
}

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
