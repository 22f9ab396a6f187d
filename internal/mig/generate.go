package mig

import (
	"fmt"
	"slices"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Generate writes the configs that fit a machine: all-disabled, all-enabled (MIG
// mode without devices), one with as many devices of each profile as a GPU can
// have, and all-balanced with devices of several sizes. Where the machine has GPUs
// of several models, each entry names its model by PCI id.
func Generate(m *gpu.Machine) ([]byte, error) {
	var models []*gpu.Product
	filters := make(map[*gpu.Product][]string)
	for i := range m.GPUs {
		g := &m.GPUs[i]
		p := gpu.ProductByName(g.Name)
		if p == nil || p.MIG == nil || !g.MIG.Capable {
			continue
		}
		if !slices.Contains(models, p) {
			models = append(models, p)
		}
		if id := fmt.Sprintf("0x%04X10DE", g.PCIDeviceID); !slices.Contains(filters[p], id) {
			filters[p] = append(filters[p], id)
		}
	}
	if len(models) == 0 {
		return nil, fmt.Errorf("no GPU of this machine can be cut: %d GPUs", len(m.GPUs))
	}
	var b strings.Builder
	b.WriteString("# The MIG configs that fit this machine. The label nvidia.com/mig.config of the\n# node names one of them.\nversion: v1\nmig-configs:\n")
	b.WriteString("  all-disabled:\n  - devices: all\n    mig-enabled: false\n")
	b.WriteString("  all-enabled:\n  - devices: all\n    mig-enabled: true\n    mig-devices: {}\n")
	entries := make(map[string][]string)
	var names []string
	add := func(name string, p *gpu.Product, devices string) {
		if entries[name] == nil {
			names = append(names, name)
		}
		entry := "  - devices: all\n"
		if len(models) > 1 {
			entry = fmt.Sprintf("  - device-filter: [%s]\n    devices: all\n", `"`+strings.Join(filters[p], `", "`)+`"`)
		}
		entries[name] = append(entries[name], entry+"    mig-enabled: true\n    mig-devices: {"+devices+"}\n")
	}
	for _, p := range models {
		for i := range p.MIG.Profiles {
			profile := &p.MIG.Profiles[i]
			add("all-"+strings.ReplaceAll(profile.Name, "+", "."), p, fmt.Sprintf("%q: %d", profile.Name, profile.Max))
		}
		if text := balanced(p.MIG); text != "" {
			add("all-balanced", p, text)
		}
	}
	slices.Sort(names)
	for _, name := range names {
		b.WriteString("  " + name + ":\n" + strings.Join(entries[name], ""))
	}
	return []byte(b.String()), nil
}

// balanced is two small devices, a middle one, and a large one where there is
// room, as mig-parted's all-balanced is.
func balanced(t *gpu.MIGTable) string {
	shape := map[int]int{1: 2, 2: 1}
	if t.Slices == 7 {
		shape[3] = 1
	}
	var parts []string
	for n := 1; n <= 3; n++ {
		if shape[n] == 0 {
			continue
		}
		p := plain(t, n)
		if p == nil {
			return ""
		}
		parts = append(parts, fmt.Sprintf("%q: %d", p.Name, shape[n]))
	}
	return strings.Join(parts, ", ")
}

// plain is the profile with so many slices, no attributes and the least memory.
func plain(t *gpu.MIGTable, n int) *gpu.MIGProfile {
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
