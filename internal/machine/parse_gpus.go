package machine

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// gpus reads the groups and the links between them.
func (p *parser) gpus(d *Description, groups, links *yaml.Node) {
	h := &d.hardware
	roots := make(map[string]bool) // root complexes, and whether groups name them
	// inside[i] is the group of GPU i and the level that it declares.
	type membership struct {
		group int
		level *gpu.PCIeLevel
	}
	var inside []membership
	items := p.list("gpus", groups)
	if groups != nil && groups.Kind == yaml.SequenceNode && len(items) == 0 {
		p.fail(groups, "gpus", "is empty; a GPU machine has at least one")
	}
	for i, item := range items {
		path := fmt.Sprintf("gpus[%d]", i)
		units, level := p.group(path, value(item), d.NUMANodes, len(h.units), roots)
		if len(h.units)+len(units) > maxGPUs {
			p.fail(item, path, "more than %d GPUs in all; lower the counts", maxGPUs)
			return
		}
		h.units = append(h.units, units...)
		for range units {
			inside = append(inside, membership{i, level})
		}
	}
	if len(p.problems) > 0 {
		return // the indices that links use may be wrong
	}
	n := len(h.units)
	given := p.links(h, links)
	h.links = gpu.NewLinks(n)
	for b := range n {
		for a := range b {
			link := gpu.Link{NVLinks: given[pair{a, b}].nvlinks, PCIe: defaultPCIe(&h.units[a].gpu, &h.units[b].gpu)}
			if inside[a].group == inside[b].group && inside[a].level != nil {
				link.PCIe = *inside[a].level
			}
			if level := given[pair{a, b}].pcie; level != nil {
				link.PCIe = *level
			}
			h.links.Merge(a, b, link)
		}
	}
}

// defaultPCIe is the level of two GPUs of which the description says nothing.
func defaultPCIe(a, b *gpu.GPU) gpu.PCIeLevel {
	switch {
	case a.PCIeRoot == b.PCIeRoot && a.PCIeRoot != "":
		return gpu.PCIeHostBridge
	case a.NUMA < 0 || b.NUMA < 0:
		return gpu.PCIeUnknown
	case a.NUMA == b.NUMA:
		return gpu.PCIeNode
	}
	return gpu.PCIeSystem
}

// madeUpBus is the PCI bus of a GPU that the description gives none: one bus and one
// bridge for each, as behind a root port.
func madeUpBus(index int) int { return 0x10 + 2*index }

func madeUpBusID(index int) string { return fmt.Sprintf("0000:%02x:00.0", madeUpBus(index)) }

// madeUpRoot is the root complex of such a GPU, or of a group that shares one and
// whose first GPU it is.
func madeUpRoot(index int) string { return fmt.Sprintf("pci0000:%02x", madeUpBus(index)-1) }

// group reads one entry of gpus, whose first GPU gets the given index.
func (p *parser) group(path string, n *yaml.Node, numaNodes, first int, roots map[string]bool) ([]unit, *gpu.PCIeLevel) {
	keys := p.object(path, n, "product", "name", "count", "memoryMiB", "compute", "minor", "pciBusID", "pciDeviceID", "pciClass",
		"numa", "pcieRoot", "pcie", "nvswitch", "nvlinks", "migCapable", "migEnabled", "migPending", "mig", "lost", "unhealthy", "recovery")
	if keys == nil {
		return nil, nil
	}
	at := func(key string) string { return join(path, key) }
	common, ok := p.model(path, n, keys)
	if !ok {
		return nil, nil
	}
	g := &common.gpu
	count := p.number(at("count"), keys["count"], 1, maxGPUs, 1)
	level := p.pcie(at("pcie"), keys["pcie"])
	g.NUMA = p.number(at("numa"), keys["numa"], -1, numaNodes-1, 0)
	g.PCIClass = p.id(at("pciClass"), keys["pciClass"], defaultClass)
	p.switches(path, &common, keys)
	p.mig(path, &common, keys)
	p.faults(path, &common.delivered, keys)

	for _, key := range []string{"minor", "pciBusID"} {
		if k := keys[key]; count > 1 && k != nil && k.Kind == yaml.ScalarNode && k.Value != "" && k.Value != "-1" {
			p.fail(k, at(key), "is of one GPU and the group has %d: list one for each", count)
		}
	}
	minors, buses := p.each(at("minor"), keys["minor"], count), p.each(at("pciBusID"), keys["pciBusID"], count)
	rootNames := p.each(at("pcieRoot"), keys["pcieRoot"], count)
	units := make([]unit, count)
	for i := range units {
		u := common
		index := first + i
		u.gpu.Index = index
		u.gpu.Minor = p.number(at("minor"), minors[i], -1, maxMinor, index)
		u.gpu.PCIBusID = p.busID(at("pciBusID"), buses[i], madeUpBusID(index))
		bridge, where := index, n
		if level != nil && *level >= gpu.PCIeHostBridge {
			bridge = first
		}
		if rootNames[i] != nil {
			where = rootNames[i]
		}
		u.gpu.PCIeRoot = p.maybe(at("pcieRoot"), rootNames[i], madeUpRoot(bridge))
		named, known := roots[u.gpu.PCIeRoot]
		if known && named != (rootNames[i] != nil) {
			p.fail(where, at("pcieRoot"), "%s is what a GPU without a pcieRoot gets; choose another name", quoted(u.gpu.PCIeRoot))
		}
		roots[u.gpu.PCIeRoot] = rootNames[i] != nil
		units[i] = u
	}
	return units, level
}

var (
	capability = regexp.MustCompile(`^([0-9]{1,3})\.([0-9]{1,3})$`)
	busID      = regexp.MustCompile(`^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$`)
)

// model reads what a GPU is. A lost GPU need not be anything.
func (p *parser) model(path string, n *yaml.Node, keys map[string]*yaml.Node) (unit, bool) {
	at := func(key string) string { return join(path, key) }
	u := unit{}
	g := &u.gpu
	switch {
	case keys["product"] != nil:
		u.product, g.Name = p.product(at("product"), keys["product"])
		if u.product == nil {
			return u, false
		}
		g.MemoryMiB, g.Compute, g.MIG.Capable = u.product.MemoryMiB, u.product.Compute, u.product.MIG != nil
		if len(u.product.PCIDeviceIDs) > 0 {
			g.PCIDeviceID = u.product.PCIDeviceIDs[0]
		}
	case keys["name"] == nil && keys["lost"] == nil:
		p.fail(n, at("product"), "is missing; a GPU that the catalogue does not know needs name, memoryMiB and compute in its place")
		return u, false
	case keys["lost"] == nil:
		for _, key := range []string{"memoryMiB", "compute"} {
			if keys[key] == nil {
				p.fail(n, at(key), "is missing; a GPU without product needs it")
			}
		}
	}
	g.Name = p.maybe(at("name"), keys["name"], g.Name)
	g.MemoryMiB = p.number(at("memoryMiB"), keys["memoryMiB"], 0, maxMemoryMiB, g.MemoryMiB)
	g.PCIDeviceID = p.id(at("pciDeviceID"), keys["pciDeviceID"], g.PCIDeviceID)
	if text := p.text(at("compute"), keys["compute"], ""); text != "" {
		parts := capability.FindStringSubmatch(text)
		if parts == nil {
			p.fail(keys["compute"], at("compute"), "%s is not a compute capability such as 9.0", quoted(text))
			return u, false
		}
		g.Compute.Major, _ = strconv.Atoi(parts[1]) // digits, and few
		g.Compute.Minor, _ = strconv.Atoi(parts[2])
	}
	g.MIG.Capable = p.yes(at("migCapable"), keys["migCapable"], g.MIG.Capable)
	return u, true
}

// product finds a product by catalogue key or board name, and says what NVML
// calls the board.
func (p *parser) product(path string, n *yaml.Node) (product *gpu.Product, board string) {
	name := p.text(path, n, "")
	if name == "" {
		return nil, ""
	}
	if product := gpu.ProductByKey(name); product != nil {
		return product, product.Names[0]
	}
	if product := gpu.ProductByName(name); product != nil {
		return product, name
	}
	var known []string
	for _, product := range gpu.Products() {
		known = append(known, product.Key)
	}
	p.fail(n, path, "unknown product %s: %s; or the name of a board as nvidia-smi prints it", quoted(name), oneOf(name, known))
	return nil, ""
}

// switches reads the NVLinks that lead to no GPU by themselves.
func (p *parser) switches(path string, u *unit, keys map[string]*yaml.Node) {
	domain, count := keys["nvswitch"], keys["nvlinks"]
	most := u.nvlinks()
	switch {
	case domain == nil && count != nil:
		p.fail(count, join(path, "nvlinks"), "is about links to switches: name their domain in nvswitch, \"\" where it is not known; links between two GPUs belong under the top key links")
	case domain == nil:
	case most == 0:
		p.fail(domain, join(path, "nvswitch"), "%s has no NVLinks; remove it", u.what())
	case u.product == nil && count == nil:
		p.fail(domain, join(path, "nvlinks"), "is missing; the catalogue does not know how many this GPU has")
	default:
		u.gpu.NVSwitch = p.maybe(join(path, "nvswitch"), domain, "")
		u.gpu.NVLinks = p.number(join(path, "nvlinks"), count, 1, most, most)
	}
}

// mig reads the MIG mode and the MIG devices of each GPU of a group.
func (p *parser) mig(path string, u *unit, keys map[string]*yaml.Node) {
	at := func(key string) string { return join(path, key) }
	s := &u.delivered
	if !u.gpu.MIG.Capable {
		if len(p.list(at("mig"), keys["mig"])) > 0 {
			p.fail(keys["mig"], at("mig"), "%s cannot do MIG; remove it", u.what())
		}
		for _, key := range []string{"migEnabled", "migPending"} {
			if p.yes(at(key), keys[key], false) {
				p.fail(keys[key], at(key), "%s cannot do MIG; remove it", u.what())
			}
		}
		return
	}
	s.Instances = p.geometry(at("mig"), keys["mig"], u)
	s.MIGEnabled = p.yes(at("migEnabled"), keys["migEnabled"], len(s.Instances) > 0)
	s.MIGPending = p.yes(at("migPending"), keys["migPending"], s.MIGEnabled)
	if !s.MIGEnabled && len(s.Instances) > 0 {
		p.fail(keys["migEnabled"], at("migEnabled"), "is false, but mig lists instances; remove one of the two")
	}
}

// faults reads what is wrong with each GPU of a group.
func (p *parser) faults(path string, s *gpuState, keys map[string]*yaml.Node) {
	s.LostReason = p.text(join(path, "lost"), keys["lost"], "")
	s.Lost = s.LostReason != ""
	s.Unhealthy = p.text(join(path, "unhealthy"), keys["unhealthy"], "")
	if s.Lost && s.Unhealthy != "" {
		p.fail(keys["unhealthy"], join(path, "unhealthy"), "the GPU is lost; remove one of the two")
	}
	if n := keys["recovery"]; n != nil {
		at := slices.Index(recoveries, p.text(join(path, "recovery"), n, ""))
		if at < 0 {
			p.fail(n, join(path, "recovery"), "no recovery action is called %s: %s", quoted(n.Value), oneOf(n.Value, recoveries))
			return
		}
		s.Recovery = gpu.Recovery(at)
	}
}

// recoveries are the names of the recovery actions by number, with some to spare for
// newer drivers.
var recoveries = func() []string {
	var names []string
	for r := gpu.RecoveryNone; r < 16; r++ {
		names = append(names, r.String())
	}
	return names
}()

func (p *parser) busID(path string, n *yaml.Node, otherwise string) string {
	id := p.maybe(path, n, otherwise)
	if id != "" && !busID.MatchString(id) {
		p.fail(n, path, "%s is not a PCI bus id such as 0000:17:00.0", quoted(id))
	}
	return id
}

// geometry reads the MIG instances of each GPU of a group.
func (p *parser) geometry(path string, n *yaml.Node, u *unit) []instance {
	var geometry []instance
	for i, item := range p.list(path, n) {
		path := fmt.Sprintf("%s[%d]", path, i)
		item = value(item)
		keys := p.object(path, item, "profile", "start", "count", "gi", "id", "size", "ci", "memoryMiB", "attributes")
		if keys == nil {
			continue
		}
		if keys["profile"] == nil {
			p.fail(item, path+".profile", "is missing")
			continue
		}
		for _, key := range []string{"start", "gi"} {
			if keys[key] != nil && keys["count"] != nil {
				p.fail(keys["count"], path+".count", "%s is of one instance; remove count, or %s to have it chosen", key, key)
				return geometry
			}
		}
		if keys["id"] != nil {
			geometry = append(geometry, p.reported(path, item, u, geometry, keys)...)
			continue
		}
		for _, key := range []string{"size", "ci", "memoryMiB", "attributes"} {
			if keys[key] != nil {
				p.fail(keys[key], path+"."+key, "belongs to an instance that is listed as the driver reports it; give its profile's id too, or remove it")
			}
		}
		geometry = append(geometry, p.instances(path, item, u, geometry, keys)...)
	}
	return geometry
}

// instances reads an entry of instances that the catalogue knows, beside those above.
func (p *parser) instances(path string, item *yaml.Node, u *unit, above []instance, keys map[string]*yaml.Node) []instance {
	table := u.table()
	if table == nil {
		p.fail(item, path, "the catalogue does not know how %s can be cut; give id, start, size, memoryMiB and attributes as the driver reports them", u.what())
		return nil
	}
	name := p.text(path+".profile", keys["profile"], "")
	profile := table.ByName(name)
	if profile == nil {
		p.fail(keys["profile"], path+".profile", "%s has no profile %s: %s", u.what(), quoted(name), oneOf(name, table.Names()))
		return nil
	}
	count := p.number(path+".count", keys["count"], 1, profile.Max, 1)
	start := p.number(path+".start", keys["start"], 0, table.Units-1, 0)
	geometry := slices.Clone(above)
	for range count {
		add := gpu.MIGInstance{ProfileID: profile.ID, Placement: gpu.Placement{Start: start, Size: profile.Placements[0].Size}}
		if keys["start"] == nil {
			free := slices.IndexFunc(profile.Placements, func(at gpu.Placement) bool {
				return u.fits(geometry, gpu.MIGInstance{ProfileID: profile.ID, Placement: at}) == nil
			})
			if free < 0 {
				p.fail(item, path, "%s does not fit with the instances above it; remove some, or name a start for each", profile.Name)
				break
			}
			add.Placement = profile.Placements[free]
		} else if err := u.fits(geometry, add); err != nil {
			p.fail(keys["start"], path+".start", "%v; legal places of it are %s", err, starts(profile))
			break
		}
		gi := p.number(path+".gi", keys["gi"], 0, maxInstanceID, freeGI(geometry))
		if (&gpuState{Instances: geometry}).hasInstance(gi, gpu.AnyInstance) {
			p.fail(keys["gi"], path+".gi", "GPU instance %d is there above; choose another number", gi)
		}
		geometry = append(geometry, instance{GI: gi, MIG: add})
	}
	return geometry[len(above):]
}

func starts(profile *gpu.MIGProfile) string {
	texts := make([]string, len(profile.Placements))
	for i, at := range profile.Placements {
		texts[i] = strconv.Itoa(at.Start)
	}
	return strings.Join(texts, ", ")
}

// maxUnits is above the number of memory units of any GPU.
const maxUnits = 256

// reported reads an instance that is listed as a driver reports it, whatever the
// catalogue says. Values that are not given are the catalogue's.
func (p *parser) reported(path string, item *yaml.Node, u *unit, above []instance, keys map[string]*yaml.Node) []instance {
	in := instance{As: &reported{Profile: p.maybe(path+".profile", keys["profile"], "")}}
	in.MIG.ProfileID = p.number(path+".id", keys["id"], 0, 1<<16, 0)
	if table := u.table(); table != nil && table.ByID(in.MIG.ProfileID) != nil {
		profile := table.ByID(in.MIG.ProfileID)
		in.MIG.Placement.Size = profile.Placements[0].Size
		in.As.MemoryMiB, in.As.Attributes = profile.MemoryMiB, u.product.Attributes(profile)
	} else if keys["size"] == nil {
		p.fail(item, path+".size", "is missing; the catalogue does not know this profile")
	}
	if keys["start"] == nil {
		p.fail(item, path+".start", "is missing; an instance with an id is at one place")
	}
	if keys["count"] != nil {
		p.fail(keys["count"], path+".count", "an instance with an id is one; remove it")
	}
	in.MIG.Placement.Start = p.number(path+".start", keys["start"], 0, maxUnits, 0)
	in.MIG.Placement.Size = p.number(path+".size", keys["size"], 1, maxUnits, in.MIG.Placement.Size)
	in.As.MemoryMiB = p.number(path+".memoryMiB", keys["memoryMiB"], 0, maxMemoryMiB, in.As.MemoryMiB)
	if keys["attributes"] != nil {
		in.As.Attributes = p.attributes(path+".attributes", keys["attributes"])
	}
	in.GI = p.number(path+".gi", keys["gi"], 0, maxInstanceID, freeGI(above))
	in.CI = p.number(path+".ci", keys["ci"], 0, maxInstanceID, 0)
	for _, other := range above {
		switch same := other.GI == in.GI; {
		case same && other.CI == in.CI:
			p.fail(item, path, "GPU instance %d with compute instance %d is there above; give another gi or ci", in.GI, in.CI)
		case same && other.MIG != in.MIG:
			p.fail(item, path, "GPU instance %d is another one above; compute instances of one have the same id, start and size", in.GI)
		case !same && other.MIG.Placement.Overlaps(in.MIG.Placement):
			p.fail(item, path+".start", "place %s overlaps GPU instance %d at %s", in.MIG.Placement, other.GI, other.MIG.Placement)
		}
	}
	return []instance{in}
}

// attributes reads the parts of a MIG device; what is not given is not known.
func (p *parser) attributes(path string, n *yaml.Node) gpu.MIGAttributes {
	var a gpu.MIGAttributes
	parts := partsOf(&a)
	names := make([]string, len(parts))
	for i, part := range parts {
		names[i] = part.name
	}
	keys := p.object(path, n, names...)
	for _, part := range parts {
		*part.number = p.number(path+"."+part.name, keys[part.name], 0, 1<<16, 0)
	}
	return a
}

// part is one of the numbers of MIG attributes under its key.
type part struct {
	name   string
	number *int
}

func partsOf(a *gpu.MIGAttributes) []part {
	return []part{
		{"sms", &a.SMs}, {"slices", &a.Slices}, {"computeSlices", &a.ComputeSlices}, {"copyEngines", &a.CopyEngines},
		{"decoders", &a.Decoders}, {"encoders", &a.Encoders}, {"jpeg", &a.JPEG}, {"ofa", &a.OFA},
	}
}

// pair names two GPUs, the lower index first.
type pair struct{ a, b int }

func pairOf(i, j int) pair { return pair{min(i, j), max(i, j)} }

// givenLink is what an entry of links says; pcie is nil where it says nothing of it.
type givenLink struct {
	nvlinks int
	pcie    *gpu.PCIeLevel
}

// links reads the pairs that differ from the rule and counts their NVLinks with
// their GPUs.
func (p *parser) links(h *hardware, n *yaml.Node) map[pair]givenLink {
	given := make(map[pair]givenLink)
	for i, item := range p.list("links", n) {
		path := fmt.Sprintf("links[%d]", i)
		item = value(item)
		keys := p.object(path, item, "a", "b", "nvlinks", "pcie")
		if keys == nil {
			continue
		}
		if keys["a"] == nil || keys["b"] == nil {
			p.fail(item, path, "a and b name the two GPUs by index; one is missing")
			continue
		}
		problems := len(p.problems)
		most := len(h.units) - 1
		at := pairOf(p.number(path+".a", keys["a"], 0, most, -1), p.number(path+".b", keys["b"], 0, most, -1))
		link := givenLink{
			nvlinks: p.number(path+".nvlinks", keys["nvlinks"], 0, maxNVLinks, 0),
			pcie:    p.pcie(path+".pcie", keys["pcie"]),
		}
		switch _, twice := given[at]; {
		case len(p.problems) > problems:
			continue
		case at.a == at.b:
			p.fail(item, path, "a and b are the same GPU")
			continue
		case twice:
			p.fail(item, path, "GPUs %d and %d have a link above; merge the two", at.a, at.b)
			continue
		case keys["nvlinks"] == nil && keys["pcie"] == nil:
			p.fail(item, path, "says neither nvlinks nor pcie")
			continue
		}
		given[at] = link
		if link.nvlinks == 0 {
			continue
		}
		for _, index := range []int{at.a, at.b} {
			u := &h.units[index]
			u.gpu.NVLinks += link.nvlinks
			if has := u.nvlinks(); u.gpu.NVLinks > has {
				p.fail(keys["nvlinks"], path+".nvlinks", "GPU %d would use %d NVLinks, %s has %d", index, u.gpu.NVLinks, u.gpu.Name, has)
			}
		}
	}
	return given
}
