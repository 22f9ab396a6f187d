package mig

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Generate writes the configs that fit a machine: all-disabled, all-enabled (MIG
// mode without devices), one with as many devices of each profile as a GPU can
// have, and all-balanced with devices of several sizes. Where not all GPUs that can
// do MIG are of one known model, each entry names its model by PCI id. It fails
// where no GPU can be cut.
func Generate(m *gpu.Machine) ([]byte, error) {
	models, mixed := modelsOf(m)
	if len(models) == 0 {
		return nil, fmt.Errorf("no GPU of this machine has MIG profiles that are known: %d GPUs", len(m.GPUs))
	}
	entries := make(map[string]string)
	for _, model := range models {
		add := func(name, rest string) {
			filter := ""
			if mixed {
				filter = "device-filter: [" + strings.Join(model.filters, ", ") + "]\n    "
			}
			entries[name] += "  - " + filter + "devices: all\n    " + rest + "\n"
		}
		add("all-disabled", "mig-enabled: false")
		enabled := func(devices string) string { return "mig-enabled: true\n    mig-devices: {" + devices + "}" }
		add("all-enabled", enabled(""))
		for i := range model.MIG.Profiles {
			p := &model.MIG.Profiles[i]
			// A label cannot have a plus.
			add("all-"+strings.ReplaceAll(p.Name, "+", "."), enabled(fmt.Sprintf("%q: %d", p.Name, p.Max)))
		}
		if devices := balanced(model.MIG); devices != "" {
			add("all-balanced", enabled(devices))
		}
	}
	var b strings.Builder
	b.WriteString("# The MIG configs that fit this machine. The label nvidia.com/mig.config of the\n# node names one of them.\nversion: v1\nmig-configs:\n")
	for _, name := range slices.Sorted(maps.Keys(entries)) {
		b.WriteString("  " + name + ":\n" + entries[name])
	}
	return []byte(b.String()), nil
}

// model is a product of the machine with the PCI ids that it has there.
type model struct {
	*gpu.Product
	filters []string
}

// modelsOf lists the models that can be cut, in the order of indices. They are
// mixed where there are several, or others that can do MIG and are not known.
func modelsOf(m *gpu.Machine) (models []model, mixed bool) {
	for i := range m.GPUs {
		g := &m.GPUs[i]
		if !g.MIG.Capable {
			continue
		}
		product := gpu.ProductByName(g.Name)
		if product == nil || product.MIG == nil {
			mixed = true
			continue
		}
		at := slices.IndexFunc(models, func(m model) bool { return m.Product == product })
		if at < 0 {
			at = len(models)
			models = append(models, model{Product: product})
		}
		if id := fmt.Sprintf("\"0x%04X10DE\"", g.PCIDeviceID); !slices.Contains(models[at].filters, id) {
			models[at].filters = append(models[at].filters, id)
		}
	}
	return models, mixed || len(models) > 1
}

// balanced is two small devices, a middle one, and a large one where there is
// room, as mig-parted's all-balanced is.
func balanced(t *gpu.MIGTable) string {
	shape := []struct{ slices, count int }{{1, 2}, {2, 1}, {3, 1}}
	if t.Slices < 7 {
		shape = shape[:2]
	}
	var parts []string
	for _, s := range shape {
		p := plainest(t, s.slices)
		if p == nil {
			return ""
		}
		parts = append(parts, fmt.Sprintf("%q: %d", p.Name, s.count))
	}
	return strings.Join(parts, ", ")
}

// plainest is the profile with so many slices, no attributes and the least memory,
// nil where there is none.
func plainest(t *gpu.MIGTable, n int) *gpu.MIGProfile {
	var best *gpu.MIGProfile
	for i := range t.Profiles {
		p := &t.Profiles[i]
		name, err := parseProfile(p.Name)
		if err == nil && name.attributes == "" && p.Slices == n && (best == nil || p.MemoryMiB < best.MemoryMiB) {
			best = p
		}
	}
	return best
}
