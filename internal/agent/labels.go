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

const (
	// labelDomain is the domain of the labels that GPU feature discovery made
	// known.
	labelDomain = "nvidia.com/"
	// modelLabel begins the labels that describe one model of GPU each, which those
	// of labelDomain cannot on a node with several.
	modelLabel = "ashlar.dev/gpu."
	// maxLabelValue is the longest label value that Kubernetes accepts.
	maxLabelValue = 63
	// maxModel is the longest model in a label's key: "gpu.", the model and
	// ".replicas" together make a name, of which Kubernetes accepts 63.
	maxModel = 50
	// maxProfile is the longest MIG profile in a label's key. Those that drivers
	// report are less than half as long.
	maxProfile = 40
)

// Parts of the pattern of ownedLabel.
const (
	attributeLabels = `multiprocessors|slices\.(gi|ci)|engines\.(copy|decoder|encoder|jpeg|ofa)`
	sharedLabels    = `product|count|memory|replicas|sharing-strategy|` + attributeLabels
	gpuLabels       = `gpu\.(present|machine|mode|clique|family|compute\.(major|minor)|` + sharedLabels + `)`
	cudaLabels      = `cuda\.(driver\.(major|minor|rev)|runtime\.(major|minor)|` +
		`driver-version\.(major|minor|revision|full)|runtime-version\.(major|minor|full))`
	// profileName is a MIG profile as it stands in keys, such as "1g.5gb.me".
	profileName = `[0-9]([0-9a-z.-]*[0-9a-z])?`
	modelName   = `[0-9A-Za-z]([0-9A-Za-z._-]*[0-9A-Za-z])?`
)

var (
	// ownedLabel matches the labels that Labels may write, so that stale ones can
	// be taken away and no others are touched.
	ownedLabel = regexp.MustCompile(`^(nvidia\.com/(` + gpuLabels + `|` + cudaLabels +
		`|mig\.(capable|strategy)|mps\.capable|vgpu\.present|mig-` + profileName + `\.(` + sharedLabels + `))` +
		`|ashlar\.dev/gpu\.` + modelName + `\.(count|memory|replicas))$`)

	inProfile     = regexp.MustCompile(`^` + profileName + `$`)
	driverVersion = regexp.MustCompile(`^([0-9]{1,9})\.([0-9]{1,9})(?:\.([0-9]{1,9}))?$`)
	cudaVersion   = regexp.MustCompile(`^([0-9]{1,9})\.([0-9]{1,9})$`)
	// fabricClique is a name of an NVSwitch domain that says which clique of which
	// cluster it is. Others are local to the node and mean nothing elsewhere.
	fabricClique = regexp.MustCompile(`^[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}\.[0-9]{1,10}$`)
)

// Labels returns the labels of a node with the names and values of NVIDIA's
// GPU feature discovery. What is not known is left out, and so is
// gfd.timestamp: labels are written when they change, and a time would change
// them always. A node without GPUs has no labels.
//
// The unqualified gpu.* labels describe the model of the first GPU that has told
// its name, with migStrategy "single" that of the first in MIG mode if one is.
// So a node with two models always says the same. Beside them each model has
// labels under ashlar.dev/gpu.<model>: count and memory are those of the physical
// GPUs, replicas is what gpu.replicas would be.
//
// The plan is the one that is served. It is nil where there is none, and may be an
// older one where the machine breaks the rules of migStrategy "single": of that
// the machine alone decides, as sharing.Config.Plan does.
func Labels(m *gpu.Machine, plan *sharing.Plan, migStrategy string) map[string]string {
	l := labeller{m: m, plan: plan, strategy: sharing.MIGStrategy(migStrategy), labels: make(map[string]string)}
	if plan == nil {
		l.plan = &sharing.Plan{}
	}
	named := func(g gpu.GPU) bool { return g.Name != "" }
	first := slices.IndexFunc(m.GPUs, named)
	if first < 0 {
		return nil
	}
	if l.strategy == sharing.MIGSingle {
		if i := slices.IndexFunc(m.GPUs, func(g gpu.GPU) bool { return named(g) && g.MIG.Enabled }); i >= 0 {
			first = i
		}
		l.invalid = breaksSingle(m)
	}
	l.set("gpu.present", "true")
	l.versions()
	l.node()
	l.model(&m.GPUs[first])
	if l.strategy == sharing.MIGMixed {
		l.profiles()
	}
	l.models()
	return l.labels
}

// labeller makes the labels of one node.
type labeller struct {
	m        *gpu.Machine
	plan     *sharing.Plan
	strategy sharing.MIGStrategy
	// invalid says that the machine breaks the rules of migStrategy "single".
	invalid bool
	labels  map[string]string
}

func (l *labeller) set(key, value string) { l.labels[labelDomain+key] = value }

// number sets a label to what is known to be above 0.
func (l *labeller) number(key string, n int) {
	if n > 0 {
		l.set(key, strconv.Itoa(n))
	}
}

// versions sets the labels of driver and CUDA under their old and new names. The
// revision of a driver with a version of two numbers is empty.
func (l *labeller) versions() {
	if v := driverVersion.FindStringSubmatch(l.m.Driver); v != nil {
		l.set("cuda.driver.major", v[1])
		l.set("cuda.driver.minor", v[2])
		l.set("cuda.driver.rev", v[3])
		l.set("cuda.driver-version.major", v[1])
		l.set("cuda.driver-version.minor", v[2])
		l.set("cuda.driver-version.revision", v[3])
		l.set("cuda.driver-version.full", v[0])
	}
	if v := cudaVersion.FindStringSubmatch(l.m.CUDA); v != nil {
		l.set("cuda.runtime.major", v[1])
		l.set("cuda.runtime.minor", v[2])
		l.set("cuda.runtime-version.major", v[1])
		l.set("cuda.runtime-version.minor", v[2])
		l.set("cuda.runtime-version.full", v[0])
	}
}

// node sets what is about the node as a whole.
func (l *labeller) node() {
	board := shorten(sanitise(l.m.Board))
	if board == "" {
		board = "unknown"
	}
	l.set("gpu.machine", board)

	capable, boards := false, true
	classes, cliques := make(map[uint16]bool), make(map[string]bool)
	for i := range l.m.GPUs {
		g := &l.m.GPUs[i]
		capable = capable || g.MIG.Capable
		if g.Name == "" {
			continue // it never answered
		}
		classes[g.PCIClass] = true
		boards = boards && gpu.ProductByName(g.Name) != nil
		if fabricClique.MatchString(g.NVSwitch) {
			cliques[g.NVSwitch] = true
		}
	}
	mode := "unknown"
	if len(classes) == 1 {
		switch {
		case classes[0x0300]:
			mode = "graphics"
		case classes[0x0302]:
			mode = "compute"
		}
	}
	l.set("gpu.mode", mode)
	if len(cliques) == 1 {
		for clique := range cliques {
			l.set("gpu.clique", clique)
		}
	}
	l.set("mig.capable", strconv.FormatBool(capable))
	if l.strategy != sharing.MIGNone {
		l.set("mig.strategy", string(l.strategy))
	}
	l.set("mps.capable", "false") // it is not served
	if boards {
		// A guest sees its vGPU under another name than that of a board. Of a GPU with
		// a name that the catalogue has not, it is not known which of the two it is.
		l.set("vgpu.present", "false")
	}
}

// model sets the labels of the whole GPUs of a model, or with migStrategy "single"
// of their MIG devices instead.
func (l *labeller) model(model *gpu.GPU) {
	if c := model.Compute; c.Major > 0 {
		l.set("gpu.family", c.Family())
		l.set("gpu.compute.major", strconv.Itoa(c.Major))
		l.set("gpu.compute.minor", strconv.Itoa(c.Minor))
	}
	product := sanitise(model.Name)
	if l.invalid {
		l.set("gpu.product", suffixed(product, "-MIG-INVALID"))
		for _, key := range []string{"gpu.count", "gpu.replicas", "gpu.memory"} {
			l.set(key, "0")
		}
		l.set("gpu.sharing-strategy", "")
		return
	}
	same := func(g *gpu.GPU) bool { return g.Name == model.Name }
	var count, cut int
	var device *gpu.MIGDevice // the first
	for i := range l.m.GPUs {
		g := &l.m.GPUs[i]
		if !same(g) {
			continue
		}
		count++
		cut += len(g.MIG.Devices)
		if device == nil && len(g.MIG.Devices) > 0 {
			device = &g.MIG.Devices[0]
		}
	}
	o := l.offer(l.views(same))
	if l.strategy == sharing.MIGSingle && device != nil {
		l.device("gpu", product, cut, device, o)
		return
	}
	l.offered("gpu", product, "", count, o)
	l.number("gpu.memory", model.MemoryMiB)
}

// profiles sets the labels of the MIG devices by profile. Those of several models
// that share a profile are described by the first one.
func (l *labeller) profiles() {
	type profile struct {
		product string
		device  *gpu.MIGDevice
		uuids   map[string]bool
	}
	found := make(map[string]*profile)
	for i := range l.m.GPUs {
		g := &l.m.GPUs[i]
		for j := range g.MIG.Devices {
			d := &g.MIG.Devices[j]
			name := dotted(d.Profile)
			if len(name) > maxProfile || !inProfile.MatchString(name) {
				continue // no key can have it
			}
			if found[name] == nil {
				found[name] = &profile{sanitise(g.Name), d, make(map[string]bool)}
			}
			found[name].uuids[d.UUID] = true
		}
	}
	for name, p := range found {
		l.device("mig-"+name, p.product, len(p.uuids), p.device, l.offer(func(d sharing.Device) bool { return p.uuids[d.ID.Base] }))
	}
}

// models sets the labels of each model of GPU. Models whose names do not differ in
// what a key can have of them count as one.
func (l *labeller) models() {
	done := make(map[string]bool)
	for i := range l.m.GPUs {
		first := &l.m.GPUs[i]
		key := modelKey(first.Name)
		if key == "" || done[key] {
			continue
		}
		done[key] = true
		same := func(g *gpu.GPU) bool { return modelKey(g.Name) == key }
		count, replicas := 0, 0
		for j := range l.m.GPUs {
			if same(&l.m.GPUs[j]) {
				count++
			}
		}
		if !l.invalid {
			replicas = l.offer(l.views(same)).replicas
		}
		l.labels[modelLabel+key+".count"] = strconv.Itoa(count)
		l.labels[modelLabel+key+".replicas"] = strconv.Itoa(replicas)
		if first.MemoryMiB > 0 {
			l.labels[modelLabel+key+".memory"] = strconv.Itoa(first.MemoryMiB)
		}
	}
}

// modelKey is a model's name as it stands in keys.
func modelKey(name string) string { return trimmed(sanitise(name), maxModel) }

// views matches what a pod is given that asks for a GPU of a kind. With
// migStrategy "mixed", MIG devices are described on their own.
func (l *labeller) views(kind func(*gpu.GPU) bool) func(sharing.Device) bool {
	return func(d sharing.Device) bool {
		g := l.m.ByUUID(d.GPU)
		return g != nil && kind(g) && (l.strategy != sharing.MIGMixed || d.ID.Base == d.GPU)
	}
}

// offer is how some devices are offered.
type offer struct {
	resource string
	// replicas is the number of slots of each, 1 where they are not shared, 0 where
	// nothing offers them.
	replicas int
	strategy sharing.Strategy
}

// offer says how the devices that match are offered: by the resource that has the
// most of them and is not an exclusive second view, so that sharing some of the
// GPUs shows.
func (l *labeller) offer(match func(sharing.Device) bool) offer {
	best, most := offer{strategy: sharing.None}, 0
	for i := range l.plan.Resources {
		r := &l.plan.Resources[i]
		if r.Exclusive {
			continue
		}
		n, slots := 0, make(map[string]int)
		replicas := 0
		for _, d := range r.Devices {
			if match(d) {
				n++
				slots[d.ID.Base]++
				replicas = max(replicas, slots[d.ID.Base])
			}
		}
		if n > most {
			best, most = offer{r.Name, replicas, sharing.None}, n
			if replicas > 1 {
				best.strategy = r.Strategy
			}
		}
	}
	return best
}

// offered sets the labels that everything has that can be asked for. The suffix
// says what it is of the product.
func (l *labeller) offered(prefix, product, suffix string, count int, o offer) {
	// A renamed resource is told apart by its name, so the product keeps its own.
	if o.replicas > 1 && o.resource == labelDomain+prefix {
		suffix += "-SHARED"
	}
	l.set(prefix+".product", suffixed(product, suffix))
	l.set(prefix+".count", strconv.Itoa(count))
	l.set(prefix+".replicas", strconv.Itoa(o.replicas))
	l.set(prefix+".sharing-strategy", string(o.strategy))
}

// device sets the labels of MIG devices of one kind.
func (l *labeller) device(prefix, product string, count int, d *gpu.MIGDevice, o offer) {
	l.offered(prefix, product, "-MIG-"+sanitise(dotted(d.Profile)), count, o)
	l.number(prefix+".memory", d.MemoryMiB)
	a := &d.Attributes
	l.number(prefix+".multiprocessors", a.SMs)
	l.number(prefix+".slices.gi", a.Slices)
	l.number(prefix+".slices.ci", a.ComputeSlices)
	l.number(prefix+".engines.copy", a.CopyEngines)
	l.number(prefix+".engines.decoder", a.Decoders)
	l.number(prefix+".engines.encoder", a.Encoders)
	l.number(prefix+".engines.jpeg", a.JPEG)
	l.number(prefix+".engines.ofa", a.OFA)
}

// breaksSingle says whether MIG devices of the machine cannot be one resource. The
// rules are those by which sharing.Config.Plan refuses it.
func breaksSingle(m *gpu.Machine) bool {
	if !slices.ContainsFunc(m.GPUs, func(g gpu.GPU) bool { return g.MIG.Enabled }) {
		return false
	}
	var first *gpu.GPU // that has MIG devices
	for i := range m.GPUs {
		g := &m.GPUs[i]
		// Of a lost GPU it may not be known how it is cut.
		if g.Health.State != gpu.Lost && (!g.MIG.Enabled || len(g.MIG.Devices) == 0) {
			return true
		}
		if !g.MIG.Enabled {
			continue
		}
		for j := range g.MIG.Devices {
			if first == nil {
				first = g
			}
			if g.Name != first.Name || g.MIG.Devices[j].ProfileID != first.MIG.Devices[0].ProfileID {
				return true
			}
		}
	}
	return false
}

// dotted is a profile's name as it stands in labels.
func dotted(profile string) string { return strings.ReplaceAll(profile, "+", ".") }

var (
	notInLabel = regexp.MustCompile(`[^A-Za-z0-9\-_. ]`)
	spaces     = regexp.MustCompile(`\s+`)
)

// sanitise turns a product name into a label value as GPU feature discovery
// does: foreign characters are dropped, runs of spaces become a hyphen.
func sanitise(name string) string {
	return spaces.ReplaceAllString(strings.TrimSpace(notInLabel.ReplaceAllString(name, "")), "-")
}

// suffixed is a value of a product with its suffix. Of a product that is too long
// for both, the end is cut off.
func suffixed(product, suffix string) string {
	return shorten(trimmed(product, max(maxLabelValue-len(suffix), 0)) + suffix)
}

// shorten cuts a value to what Kubernetes accepts.
func shorten(value string) string { return trimmed(value, maxLabelValue) }

// trimmed cuts a text to what can be in a label.
func trimmed(text string, most int) string {
	return strings.Trim(text[:min(len(text), most)], "-_.")
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
		// An empty value is not the same as none.
		if value, there := have[key]; !there || value != want[key] {
			change[key] = new(want[key])
		}
	}
	return change
}
