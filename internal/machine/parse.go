package machine

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"go.yaml.in/yaml/v3"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Limits of a description. They are far above what is built and keep a typing
// error from becoming a machine of millions of GPUs.
const (
	maxDescription = 1 << 20 // bytes
	maxGPUs        = 64
	maxCPUs        = 1 << 16
	maxNUMANodes   = 64
	maxProblems    = 20
)

const (
	defaultDriver = "580.95.05"
	defaultCUDA   = "13.0"
)

// ParseDescription reads a description; the package's documentation lists the
// keys. The error has one line per problem, "FILE:LINE: FIELD: what is wrong and
// what to do"; file is used for that alone.
func ParseDescription(file string, data []byte) (*Description, error) {
	if len(data) > maxDescription {
		return nil, fmt.Errorf("%s: a machine description has at most %d bytes, this has %d", file, maxDescription, len(data))
	}
	p := parser{file: file}
	root, err := p.document(data)
	if err != nil {
		return nil, err
	}
	d := p.description(root)
	if len(p.problems) > 0 {
		return nil, errors.Join(p.problems...)
	}
	d.text = slices.Clone(data)
	return d, nil
}

// parser turns YAML nodes into a Description and collects what is wrong.
type parser struct {
	file     string
	problems []error
}

func (p *parser) fail(n *yaml.Node, field, format string, args ...any) {
	if len(p.problems) == maxProblems {
		return // nobody reads more at once
	}
	if field != "" {
		field += ": "
	}
	p.problems = append(p.problems, fmt.Errorf("%s:%d: %s%s", p.file, n.Line, field, fmt.Sprintf(format, args...)))
}

var yamlLine = regexp.MustCompile(`^yaml: (?:line (\d+): )?`)

// document returns the one value of a YAML file.
func (p *parser) document(data []byte) (*yaml.Node, error) {
	decoder := yaml.NewDecoder(strings.NewReader(string(data)))
	var doc, next yaml.Node
	err := decoder.Decode(&doc)
	if errors.Is(err, io.EOF) || err == nil && len(doc.Content) == 0 {
		return nil, fmt.Errorf("%s: is empty; a machine needs at least name, cpus, memory and gpus", p.file)
	}
	if err == nil {
		if err = decoder.Decode(&next); errors.Is(err, io.EOF) {
			return doc.Content[0], nil
		} else if err == nil {
			return nil, fmt.Errorf("%s:%d: a second document; put each machine in a file of its own", p.file, next.Line)
		}
	}
	// The parser puts the line into its text.
	text, line := err.Error(), ""
	if m := yamlLine.FindStringSubmatch(text); m != nil {
		text = text[len(m[0]):]
		if m[1] != "" {
			line = ":" + m[1]
		}
	}
	return nil, fmt.Errorf("%s%s: not valid YAML: %s", p.file, line, text)
}

// object returns the values of a mapping by key, without those that are null. It
// has no entry for what the file does not say.
func (p *parser) object(path string, n *yaml.Node, known ...string) map[string]*yaml.Node {
	n = value(n)
	if n.Kind != yaml.MappingNode {
		p.fail(n, path, "want a mapping with keys of %s", strings.Join(known, ", "))
		return nil
	}
	values := make(map[string]*yaml.Node)
	for i := 0; i+1 < len(n.Content); i += 2 {
		k, v := n.Content[i], value(n.Content[i+1])
		switch {
		case !slices.Contains(known, k.Value):
			p.fail(k, path, "unknown key %s: %s", quoted(k.Value), oneOf(k.Value, known))
		case values[k.Value] != nil:
			p.fail(k, join(path, k.Value), "is given twice, first in line %d; remove one", values[k.Value].Line)
		case v.Tag != "!!null":
			values[k.Value] = v
		}
	}
	return values
}

// list returns the items of a sequence; none of nil.
func (p *parser) list(path string, n *yaml.Node) []*yaml.Node {
	if n == nil {
		return nil
	}
	if n.Kind != yaml.SequenceNode {
		p.fail(n, path, "want a list")
		return nil
	}
	return n.Content
}

// number reads a whole number in a range, or returns the default for nil.
func (p *parser) number(path string, n *yaml.Node, least, most, otherwise int) int {
	if n == nil {
		return otherwise
	}
	i, err := strconv.Atoi(n.Value)
	if n.Kind != yaml.ScalarNode || n.Tag != "!!int" || err != nil || i < least || i > most {
		p.fail(n, path, "want a whole number from %d to %d, not %s", least, most, quoted(n.Value))
		return otherwise
	}
	return i
}

// text reads one line of text, or returns the default for nil. Numbers are
// taken as written, so that cuda: 13.0 needs no quotes.
func (p *parser) text(path string, n *yaml.Node, otherwise string) string {
	if n == nil {
		return otherwise
	}
	if n.Kind != yaml.ScalarNode || n.Value == "" || strings.ContainsFunc(n.Value, func(r rune) bool { return r < ' ' }) {
		p.fail(n, path, "want one line of text")
		return otherwise
	}
	return n.Value
}

func (p *parser) yes(path string, n *yaml.Node, otherwise bool) bool {
	if n == nil {
		return otherwise
	}
	if n.Kind != yaml.ScalarNode || n.Tag != "!!bool" {
		p.fail(n, path, "want true or false, not %s", quoted(n.Value))
		return otherwise
	}
	return strings.EqualFold(n.Value, "true")
}

// pcieLevels are the names that a description may use.
var pcieLevels = func() []string {
	var names []string
	for l := gpu.PCIeSystem; l <= gpu.PCIeInternal; l++ {
		names = append(names, l.String())
	}
	return names
}()

// pcie reads a PCIe level, or returns PCIeUnknown for nil.
func (p *parser) pcie(path string, n *yaml.Node) gpu.PCIeLevel {
	if n == nil {
		return gpu.PCIeUnknown
	}
	level, ok := gpu.ParsePCIeLevel(n.Value)
	if !ok || level == gpu.PCIeUnknown {
		p.fail(n, path, "unknown PCIe level %s: %s", quoted(n.Value), oneOf(n.Value, pcieLevels))
	}
	return level
}

// value follows an alias to what it stands for.
func value(n *yaml.Node) *yaml.Node {
	if n.Kind == yaml.AliasNode {
		return n.Alias
	}
	return n
}

func join(path, key string) string {
	if path == "" {
		return key
	}
	return path + "." + key
}

// quoted shows text of the file in a message, cut where it is long.
func quoted(s string) string {
	const most = 60 // bytes
	if len(s) > most {
		s = s[:most] + "..."
	}
	return strconv.Quote(s)
}

var quantity = regexp.MustCompile(`^[1-9][0-9]{0,11}([KMGT]i|[kMGT])?$`)

func (p *parser) description(root *yaml.Node) *Description {
	keys := p.object("", root, "name", "instanceType", "cpus", "memory", "numaNodes", "driver", "cuda", "gpus", "links")
	if keys == nil {
		return nil
	}
	for _, k := range []string{"name", "cpus", "memory", "gpus"} {
		if keys[k] == nil {
			p.fail(root, k, "is missing")
		}
	}
	d := &Description{
		Name:      p.text("name", keys["name"], ""),
		CPUs:      p.number("cpus", keys["cpus"], 1, maxCPUs, 1),
		Memory:    p.text("memory", keys["memory"], ""),
		NUMANodes: p.number("numaNodes", keys["numaNodes"], 1, maxNUMANodes, 1),
	}
	d.InstanceType = p.text("instanceType", keys["instanceType"], d.Name)
	if d.Memory != "" && !quantity.MatchString(d.Memory) {
		p.fail(keys["memory"], "memory", "%s is not a quantity such as 512Gi", quoted(d.Memory))
	}
	d.hardware.driver = p.version("driver", keys["driver"], driverVersion, defaultDriver)
	d.hardware.cuda = p.version("cuda", keys["cuda"], cudaVersion, defaultCUDA)
	p.gpus(d, keys["gpus"], keys["links"])
	return d
}

// What NVML reports: GPU feature discovery refuses to label with anything else.
var (
	driverVersion = regexp.MustCompile(`^[0-9]+\.[0-9]+(\.[0-9]+)?$`)
	cudaVersion   = regexp.MustCompile(`^[0-9]+\.[0-9]+$`)
)

func (p *parser) version(path string, n *yaml.Node, form *regexp.Regexp, otherwise string) string {
	v := p.text(path, n, otherwise)
	if !form.MatchString(v) {
		p.fail(n, path, "%s is not a version such as %s", quoted(v), otherwise)
	}
	return v
}

// gpus reads the groups and the links between them.
func (p *parser) gpus(d *Description, groups, links *yaml.Node) {
	h := &d.hardware
	roots := make(map[string]root)
	// inside[i] is the group of GPU i and the level that it declares.
	type membership struct {
		group int
		level gpu.PCIeLevel
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
			link := given[pair{a, b}]
			if link.PCIe == gpu.PCIeUnknown && inside[a].group == inside[b].group {
				link.PCIe = inside[a].level
			}
			if link.PCIe == gpu.PCIeUnknown {
				link.PCIe = defaultPCIe(&h.units[a].gpu, &h.units[b].gpu)
			}
			h.links.Merge(a, b, link)
		}
	}
}

// defaultPCIe is the level of two GPUs of which the description says nothing.
func defaultPCIe(a, b *gpu.GPU) gpu.PCIeLevel {
	switch {
	case a.PCIeRoot == b.PCIeRoot:
		return gpu.PCIeHostBridge
	case a.NUMA < 0 || b.NUMA < 0:
		return gpu.PCIeUnknown
	case a.NUMA == b.NUMA:
		return gpu.PCIeNode
	}
	return gpu.PCIeSystem
}

// group reads one entry of gpus, whose first GPU gets the given index.
func (p *parser) group(path string, n *yaml.Node, numaNodes, first int, roots map[string]root) ([]unit, gpu.PCIeLevel) {
	keys := p.object(path, n, "product", "count", "numa", "pcieRoot", "pcie", "nvswitch", "nvlinks", "migEnabled", "mig")
	if keys == nil {
		return nil, gpu.PCIeUnknown
	}
	at := func(key string) string { return join(path, key) }
	product, board := p.product(at("product"), n, keys["product"])
	if product == nil {
		return nil, gpu.PCIeUnknown
	}
	count := p.number(at("count"), keys["count"], 1, maxGPUs, 1)
	level := p.pcie(at("pcie"), keys["pcie"])
	common := unit{mig: product.MIG, gpu: gpu.GPU{
		Name: board, MemoryMiB: product.MemoryMiB, Compute: product.Compute,
		NUMA:     p.number(at("numa"), keys["numa"], -1, numaNodes-1, 0),
		PCIeRoot: p.text(at("pcieRoot"), keys["pcieRoot"], ""),
		NVSwitch: p.text(at("nvswitch"), keys["nvswitch"], ""),
	}}
	common.gpu.MIG.Capable = product.MIG != nil
	if len(product.PCIDeviceIDs) > 0 {
		common.gpu.PCIDeviceID = product.PCIDeviceIDs[0]
	}
	p.root(keys["pcieRoot"], at("pcieRoot"), roots, root{common.gpu.PCIeRoot, common.gpu.NUMA, true})
	switch {
	case common.gpu.NVSwitch != "" && product.NVLinks == 0:
		p.fail(keys["nvswitch"], at("nvswitch"), "%s has no NVLinks; remove it", product.Key)
	case common.gpu.NVSwitch != "":
		common.gpu.NVLinks = p.number(at("nvlinks"), keys["nvlinks"], 1, product.NVLinks, product.NVLinks)
	case keys["nvlinks"] != nil:
		p.fail(keys["nvlinks"], at("nvlinks"), "is about links to switches: name their domain in nvswitch; links between two GPUs belong under the top key links")
	}
	common.geometry = p.geometry(at("mig"), keys["mig"], product)
	common.migEnabled = p.yes(at("migEnabled"), keys["migEnabled"], len(common.geometry) > 0)
	switch {
	case common.migEnabled && product.MIG == nil:
		if keys["migEnabled"] != nil {
			p.fail(keys["migEnabled"], at("migEnabled"), "%s cannot do MIG; remove it", product.Key)
		}
	case !common.migEnabled && len(common.geometry) > 0:
		p.fail(keys["migEnabled"], at("migEnabled"), "is false, but mig lists instances; remove one of the two")
	}
	units := make([]unit, count)
	for i := range units {
		u := common
		index := first + i
		// One bus and one bridge for each GPU, as behind a root port.
		bus := 0x10 + 2*index
		u.gpu.Index, u.gpu.Minor = index, index
		u.gpu.PCIBusID = fmt.Sprintf("0000:%02x:00.0", bus)
		if u.gpu.PCIeRoot == "" {
			if level >= gpu.PCIeHostBridge {
				bus = 0x10 + 2*first
			}
			u.gpu.PCIeRoot = fmt.Sprintf("pci0000:%02x", bus-1)
			p.root(n, at("pcieRoot"), roots, root{u.gpu.PCIeRoot, u.gpu.NUMA, false})
		}
		units[i] = u
	}
	return units, level
}

// root is a root complex. It is on one NUMA node, and only GPUs whose groups name
// it share it.
type root struct {
	name  string
	numa  int
	named bool
}

// root notes a root complex that a group uses.
func (p *parser) root(n *yaml.Node, path string, roots map[string]root, r root) {
	if r.name == "" {
		return
	}
	switch old, known := roots[r.name]; {
	case !known:
		roots[r.name] = r
	case old.named != r.named:
		p.fail(n, path, "%s is what a GPU without a pcieRoot gets; choose another name", quoted(r.name))
	case old.numa != r.numa:
		p.fail(n, path, "%s is on NUMA node %d in a group above and on %d here; a root complex is on one", quoted(r.name), old.numa, r.numa)
	}
}

// product finds a product by catalogue key or board name, and says what NVML
// calls the board.
func (p *parser) product(path string, group, n *yaml.Node) (product *gpu.Product, board string) {
	if n == nil {
		p.fail(group, path, "is missing")
		return nil, ""
	}
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

// geometry reads the MIG instances of each GPU of a group.
func (p *parser) geometry(path string, n *yaml.Node, product *gpu.Product) []gpu.MIGInstance {
	items := p.list(path, n)
	if len(items) > 0 && product.MIG == nil {
		p.fail(n, path, "%s cannot do MIG; remove it", product.Key)
		return nil
	}
	var geometry []gpu.MIGInstance
	for i, item := range items {
		path := fmt.Sprintf("%s[%d]", path, i)
		item = value(item)
		keys := p.object(path, item, "profile", "start", "count")
		if keys == nil {
			continue
		}
		if keys["profile"] == nil {
			p.fail(item, path+".profile", "is missing")
			continue
		}
		name := p.text(path+".profile", keys["profile"], "")
		profile := product.MIG.ByName(name)
		if profile == nil {
			p.fail(keys["profile"], path+".profile", "%s has no profile %s: %s", product.Key, quoted(name), oneOf(name, product.MIG.Names()))
			continue
		}
		if keys["start"] != nil && keys["count"] != nil {
			p.fail(keys["count"], path+".count", "start places one instance; remove count, or start to have the places chosen")
			continue
		}
		count := p.number(path+".count", keys["count"], 1, profile.Max, 1)
		start := p.number(path+".start", keys["start"], 0, product.MIG.Units-1, 0)
		for range count {
			add := gpu.MIGInstance{ProfileID: profile.ID, Placement: gpu.Placement{Start: start, Size: profile.Placements[0].Size}}
			if keys["start"] == nil {
				free := product.MIG.Free(geometry, profile.ID)
				if len(free) == 0 {
					p.fail(item, path, "%s does not fit with the instances above it; remove some, or name a start for each", profile.Name)
					break
				}
				add.Placement = free[0]
			} else if err := product.MIG.Check(geometry, add); err != nil {
				p.fail(keys["start"], path+".start", "%v; legal places of it are %s", err, starts(profile))
				break
			}
			geometry = append(geometry, add)
		}
	}
	return geometry
}

func starts(profile *gpu.MIGProfile) string {
	texts := make([]string, len(profile.Placements))
	for i, at := range profile.Placements {
		texts[i] = strconv.Itoa(at.Start)
	}
	return strings.Join(texts, ", ")
}

// pair names two GPUs, the lower index first.
type pair struct{ a, b int }

func pairOf(i, j int) pair { return pair{min(i, j), max(i, j)} }

// links reads the pairs that differ from the rule and counts their NVLinks with
// their GPUs.
func (p *parser) links(h *hardware, n *yaml.Node) map[pair]gpu.Link {
	given := make(map[pair]gpu.Link)
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
		link := gpu.Link{
			NVLinks: p.number(path+".nvlinks", keys["nvlinks"], 0, maxGPUs, 0),
			PCIe:    p.pcie(path+".pcie", keys["pcie"]),
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
		if link.NVLinks == 0 {
			continue
		}
		for _, index := range []int{at.a, at.b} {
			g := &h.units[index].gpu
			g.NVLinks += link.NVLinks
			if has := gpu.ProductByName(g.Name).NVLinks; g.NVLinks > has {
				p.fail(keys["nvlinks"], path+".nvlinks", "GPU %d would use %d NVLinks, %s has %d", index, g.NVLinks, g.Name, has)
			}
		}
	}
	return given
}
