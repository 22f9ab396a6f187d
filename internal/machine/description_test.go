package machine

import (
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// read reads a machine that must be readable and valid.
func read(t testing.TB, m *Machine) gpu.Machine {
	t.Helper()
	got, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	if err := got.Validate(); err != nil {
		t.Fatal(err)
	}
	return got
}

func mustBuiltin(t testing.TB, name string) *Description {
	t.Helper()
	d, err := Builtin(name)
	if err != nil {
		t.Fatal(err)
	}
	return d
}

func mustParse(t testing.TB, text string) *Description {
	t.Helper()
	d, err := ParseDescription("m.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return d
}

// show writes a machine as a person would check it.
func show(d *Description, m gpu.Machine) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s (%s): %d CPUs, %s, %d NUMA nodes, driver %s, CUDA %s\n",
		d.Name, d.InstanceType, d.CPUs, d.Memory, d.NUMANodes, m.Driver, m.CUDA)
	for _, g := range m.GPUs {
		fmt.Fprintf(&b, "%d %s /dev/nvidia%d %s %d MiB cc %s pci %s %04x root %s numa %d nvswitch %q nvlinks %d mig %v/%v %v\n",
			g.Index, g.UUID, g.Minor, g.Name, g.MemoryMiB, g.Compute, g.PCIBusID, g.PCIDeviceID, g.PCIeRoot, g.NUMA,
			g.NVSwitch, g.NVLinks, g.MIG.Capable, g.MIG.Enabled, g.Health.State)
		for _, d := range g.MIG.Devices {
			fmt.Fprintf(&b, "  %d %s gi %d ci %d %s (%d) at %s %d MiB\n",
				d.Index, d.UUID, d.GI, d.CI, d.Profile, d.ProfileID, d.Placement, d.MemoryMiB)
		}
	}
	for i := range m.GPUs {
		for j := range m.GPUs {
			link := m.Links.At(i, j)
			text := link.PCIe.String()
			switch {
			case i == j:
				text = "X"
			case link.NVLinks > 0:
				text += fmt.Sprintf("+NV%d", link.NVLinks)
			}
			fmt.Fprintf(&b, "%-9s", text)
		}
		b.WriteString("\n")
	}
	return strings.ReplaceAll(b.String(), " \n", "\n")
}

func golden(t *testing.T, name, got string) {
	t.Helper()
	file := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("(-want +got; -update rewrites)\n%s", diff)
	}
}

func TestBuiltins(t *testing.T) {
	want := []string{
		"a100-pcie-4", "a30x4", "dgx-b200", "dgx-h100", "dgx-h200", "dgx1-v100",
		"g4dn.xlarge", "g5.12xlarge", "l40s-8", "mixed-2", "p4d.24xlarge",
	}
	if diff := cmp.Diff(want, BuiltinNames()); diff != "" {
		t.Error(diff)
	}
	for _, name := range BuiltinNames() {
		t.Run(name, func(t *testing.T) {
			d := mustBuiltin(t, name)
			if d.Name != name {
				t.Errorf("named %q", d.Name)
			}
			golden(t, name, show(d, read(t, New(d, "node-1"))))
		})
	}
}

// Known facts about the machines, apart from their files.
func TestBuiltinTopology(t *testing.T) {
	dgx1 := read(t, New(mustBuiltin(t, "dgx1-v100"), "n"))
	mesh := []string{
		"01122000",
		"10210200",
		"12020010",
		"21200001",
		"20000112",
		"02001021",
		"00101202",
		"00012120",
	}
	// The second quad mirrors the first; spelt out so that a slip in either shows.
	for i, row := range mesh {
		sum := 0
		for j := range row {
			want := int(row[j] - '0')
			sum += want
			if got := dgx1.Links.At(i, j).NVLinks; got != want {
				t.Errorf("dgx1: GPUs %d and %d have %d NVLinks, want %d", i, j, got, want)
			}
		}
		if sum != 6 || dgx1.GPUs[i].NVLinks != 6 {
			t.Errorf("dgx1: GPU %d has %d NVLinks by its links and %d in all, want 6", i, sum, dgx1.GPUs[i].NVLinks)
		}
	}
	for name, links := range map[string]int{"p4d.24xlarge": 12, "dgx-h100": 18, "dgx-h200": 18, "dgx-b200": 18} {
		m := read(t, New(mustBuiltin(t, name), "n"))
		for i := range m.GPUs {
			for j := range i {
				if got := m.LinkScore(i, j) / 100; got != links {
					t.Errorf("%s: GPUs %d and %d: %d NVLinks by the switch, want %d", name, i, j, got, links)
				}
			}
		}
	}
	pcie := read(t, New(mustBuiltin(t, "a100-pcie-4"), "n"))
	for _, c := range []struct {
		i, j int
		want gpu.Link
	}{
		{0, 1, gpu.Link{NVLinks: 12, PCIe: gpu.PCIeNode}},
		{2, 3, gpu.Link{NVLinks: 12, PCIe: gpu.PCIeNode}},
		{1, 2, gpu.Link{PCIe: gpu.PCIeSystem}},
	} {
		if got := pcie.Links.At(c.i, c.j); got != c.want {
			t.Errorf("a100-pcie-4: GPUs %d and %d: %v, want %v", c.i, c.j, got, c.want)
		}
	}
}

func TestUnknownBuiltin(t *testing.T) {
	_, err := Builtin("dgx-h10")
	const want = `no built-in machine is named "dgx-h10"; there are: dgx-h100, dgx-h200, `
	if err == nil || !strings.HasPrefix(err.Error(), want) {
		t.Errorf("got %v, want %s...", err, want)
	}
}

func TestFind(t *testing.T) {
	file := filepath.Join(t.TempDir(), "mine.yaml")
	if err := os.WriteFile(file, []byte("{name: mine, cpus: 1, memory: 1Gi, gpus: [{product: T4}]}"), 0o644); err != nil {
		t.Fatal(err)
	}
	for in, want := range map[string]string{file: "mine", "a30x4": "a30x4"} {
		d, err := Find(in)
		if err != nil || d.Name != want {
			t.Errorf("Find(%s) = %v, %v; want %s", in, d, err, want)
		}
	}
	if _, err := Find("./missing"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a missing file: %v", err)
	}
}

// The example of the package documentation must be right.
func TestDocumentedExample(t *testing.T) {
	doc, err := os.ReadFile("doc.go")
	if err != nil {
		t.Fatal(err)
	}
	var examples []string
	inside := false
	for line := range strings.Lines(string(doc)) {
		example, ok := strings.CutPrefix(line, "//\t")
		if ok && !inside {
			examples = append(examples, "")
		}
		if inside = ok; ok {
			examples[len(examples)-1] += example
		}
	}
	if len(examples) != 2 {
		t.Fatalf("%d examples", len(examples))
	}
	var out strings.Builder
	for _, text := range []string{examples[0], "name: captured\ncpus: 1\nmemory: 1Gi\n" + examples[1]} {
		d := mustParse(t, text)
		out.WriteString(show(d, read(t, New(d, "node-1"))))
	}
	golden(t, "documented", out.String())
}

func TestDefaults(t *testing.T) {
	d := mustParse(t, `
name: small
cpus: 2
memory: 4Gi
driver:
gpus:
- product: &card NVIDIA A30
  numa: -1
- {product: *card, mig: [{profile: 1g.6gb}]}
`)
	if d.InstanceType != "small" || d.NUMANodes != 1 {
		t.Errorf("instance type %q, %d NUMA nodes", d.InstanceType, d.NUMANodes)
	}
	m := read(t, New(d, "s"))
	if m.Driver != "580.95.05" || m.CUDA != "13.0" {
		t.Errorf("driver %s, CUDA %s", m.Driver, m.CUDA)
	}
	if m.GPUs[0].NUMA != -1 || m.GPUs[0].MIG.Enabled || m.Links.At(0, 1).PCIe != gpu.PCIeUnknown {
		t.Errorf("unknown NUMA node: %+v, link %+v", m.GPUs[0], m.Links.At(0, 1))
	}
	if !m.GPUs[1].MIG.Enabled || !m.GPUs[1].MIG.Pending || len(m.GPUs[1].MIG.Devices) != 1 {
		t.Errorf("instances without migEnabled: %+v", m.GPUs[1].MIG)
	}
}

// Keys that a capture needs, where a person writes them.
func TestExplicitKeys(t *testing.T) {
	d := mustParse(t, `
name: odd
board: PowerEdge R7525
cpus: 2
memory: 4Gi
numaNodes: 2
cuda: ""
gpus:
- {product: A100-40, name: A100-SXM4-40GB, count: 2, minor: [7, 3], pcieRoot: r, pcie: unknown, migPending: true}
- {product: T4, numa: 1, pcieRoot: r, recovery: reset the GPU, unhealthy: hot}
- {lost: gone, pcieRoot: ""}
links: [{a: 0, b: 2, pcie: unknown}]
`)
	m := read(t, New(d, "s"))
	if m.Board != "PowerEdge R7525" || m.CUDA != "" {
		t.Errorf("board %q, CUDA %q", m.Board, m.CUDA)
	}
	a := m.GPUs[1]
	if a.Name != "A100-SXM4-40GB" || a.Minor != 3 || a.PCIClass != 0x0302 || a.MIG.Enabled || !a.MIG.Pending || !a.MIG.Capable {
		t.Errorf("GPU 1: %+v", a)
	}
	if b := m.GPUs[2]; b.Recovery != gpu.RecoveryReset || b.Health != (gpu.Health{State: gpu.Unhealthy, Reason: "hot"}) || b.NUMA != 1 || b.PCIeRoot != "r" {
		t.Errorf("GPU 2: %+v", b)
	}
	if c := m.GPUs[3]; c.Health != (gpu.Health{State: gpu.Lost, Reason: "gone"}) || c.Name != "" {
		t.Errorf("GPU 3: %+v", c)
	}
	for pair, want := range map[[2]int]gpu.PCIeLevel{{0, 1}: gpu.PCIeUnknown, {0, 2}: gpu.PCIeUnknown, {1, 2}: gpu.PCIeHostBridge} {
		if got := m.Links.At(pair[0], pair[1]).PCIe; got != want {
			t.Errorf("link %v: %v, want %v", pair, got, want)
		}
	}
}

func TestParseErrors(t *testing.T) {
	const head = "name: m\ncpus: 1\nmemory: 1Gi\n" // lines 1 to 3
	for _, c := range []struct{ name, text, want string }{
		{"empty", "", "m.yaml: is empty; a machine needs at least name, cpus, memory and gpus"},
		{"no mapping", "- 1", "m.yaml:1: want a mapping with keys of name, instanceType, board, cpus, memory, numaNodes, driver, cuda, gpus, links"},
		{"not YAML", head + "gpus: [", "m.yaml:4: not valid YAML: did not find expected node content"},
		{"two documents", head + "gpus: [{product: T4}]\n---\nname: n", "m.yaml:5: a second document; put each machine in a file of its own"},
		{"missing", "name: m", "m.yaml:1: cpus: is missing\nm.yaml:1: memory: is missing\nm.yaml:1: gpus: is missing"},
		{
			"unknown key", head + "gpus: [{product: T4}]\nnumanodes: 2",
			`m.yaml:5: unknown key "numanodes": want one of name, instanceType, board, cpus, memory, numaNodes, driver, cuda, gpus, links; did you mean "numaNodes"?`,
		},
		{"twice", head + "gpus: [{product: T4}]\nname: n", "m.yaml:5: name: is given twice, first in line 1; remove one"},
		{"not a number", "name: m\ncpus: many\nmemory: 1Gi\ngpus: [{product: T4}]", `m.yaml:2: cpus: want a whole number from 1 to 65536, not "many"`},
		{"fraction", "name: m\ncpus: 1.5\nmemory: 1Gi\ngpus: [{product: T4}]", `m.yaml:2: cpus: want a whole number from 1 to 65536, not "1.5"`},
		{"quantity", "name: m\ncpus: 1\nmemory: 1 GiB\ngpus: [{product: T4}]", `m.yaml:3: memory: "1 GiB" is not a quantity such as 512Gi`},
		{"no text", "name: [m]\ncpus: 1\nmemory: 1Gi\ngpus: [{product: T4}]", "m.yaml:1: name: want one line of text"},
		{"version", head + "driver: newest\ngpus: [{product: T4}]", `m.yaml:4: driver: "newest" is not a version such as 580.95.05`},
		{"gpus no list", head + "gpus: {product: T4}", "m.yaml:4: gpus: want a list"},
		{"no gpus", head + "gpus: []", "m.yaml:4: gpus: is empty; a GPU machine has at least one"},
		{"no product", head + "gpus:\n- count: 2", "m.yaml:5: gpus[0].product: is missing; a GPU that the catalogue does not know needs name, memoryMiB and compute in its place"},
		{
			"product", head + "gpus:\n- product: A100-400",
			`m.yaml:5: gpus[0].product: unknown product "A100-400": want one of V100, T4, A10G, A100-40, A100-80, A30, L40S, H100-80, H100-94, H200, B200, RTX-PRO-6000; did you mean "A100-40"?; or the name of a board as nvidia-smi prints it`,
		},
		{"count", head + "gpus: [{product: T4, count: 65}]", `m.yaml:4: gpus[0].count: want a whole number from 1 to 64, not "65"`},
		{"too many", head + "gpus:\n- {product: T4, count: 40}\n- {product: T4, count: 40}", "m.yaml:6: gpus[1]: more than 64 GPUs in all; lower the counts"},
		{"numa", head + "gpus: [{product: T4, numa: 1}]", `m.yaml:4: gpus[0].numa: want a whole number from -1 to 0, not "1"`},
		{
			"root of another", head + "gpus:\n- {product: T4}\n- {product: T4, pcieRoot: \"pci0000:0f\"}",
			`m.yaml:6: gpus[1].pcieRoot: "pci0000:0f" is what a GPU without a pcieRoot gets; choose another name`,
		},
		{
			"root of another, the other way", head + "gpus:\n- {product: T4, pcieRoot: \"pci0000:11\"}\n- {product: T4}",
			`m.yaml:6: gpus[1].pcieRoot: "pci0000:11" is what a GPU without a pcieRoot gets; choose another name`,
		},
		{"pcie", head + "gpus: [{product: T4, pcie: PIXX}]", `m.yaml:4: gpus[0].pcie: no PCIe level is named "PIXX": want one of unknown, SYS, NODE, PHB, PXB, PIX, INTERNAL; did you mean "PIX"?`},
		{"no switch", head + "gpus: [{product: T4, nvswitch: s}]", "m.yaml:4: gpus[0].nvswitch: T4 has no NVLinks; remove it"},
		{"links to nothing", head + "gpus: [{product: H200, nvlinks: 2}]", "m.yaml:4: gpus[0].nvlinks: is about links to switches: name their domain in nvswitch, \"\" where it is not known; links between two GPUs belong under the top key links"},
		{"too many to switch", head + "gpus: [{product: H200, nvswitch: s, nvlinks: 19}]", `m.yaml:4: gpus[0].nvlinks: want a whole number from 1 to 18, not "19"`},
		{"no MIG", head + "gpus: [{product: T4, migEnabled: true}]", "m.yaml:4: gpus[0].migEnabled: T4 cannot do MIG; remove it"},
		{"no MIG instances", head + "gpus: [{product: T4, mig: [{profile: 1g.5gb}]}]", "m.yaml:4: gpus[0].mig: T4 cannot do MIG; remove it"},
		{"MIG off", head + "gpus: [{product: A30, migEnabled: false, mig: [{profile: 1g.6gb}]}]", "m.yaml:4: gpus[0].migEnabled: is false, but mig lists instances; remove one of the two"},
		{"no bool", head + "gpus: [{product: A30, migEnabled: 1}]", `m.yaml:4: gpus[0].migEnabled: want true or false, not "1"`},
		{"no profile", head + "gpus: [{product: A30, mig: [{start: 0}]}]", "m.yaml:4: gpus[0].mig[0].profile: is missing"},
		{
			"profile", head + "gpus: [{product: A30, mig: [{profile: 1g.5gb}]}]",
			`m.yaml:4: gpus[0].mig[0].profile: A30 has no profile "1g.5gb": want one of 4g.24gb, 2g.12gb, 2g.12gb+me, 1g.6gb, 1g.6gb+me; did you mean "1g.6gb"?`,
		},
		{"place", head + "gpus: [{product: A30, mig: [{profile: 2g.12gb, start: 1}]}]", "m.yaml:4: gpus[0].mig[0].start: profile 2g.12gb cannot be placed at 1:2; legal places of it are 0, 2"},
		{
			"overlap", head + "gpus: [{product: A100-40, mig: [{profile: 3g.20gb, start: 4}, {profile: 2g.10gb, start: 4}]}]",
			"m.yaml:4: gpus[0].mig[1].start: profile 2g.10gb at 4:2 overlaps 3g.20gb at 4:4; legal places of it are 0, 2, 4",
		},
		{
			"no room", head + "gpus: [{product: A100-40, mig: [{profile: 4g.20gb}, {profile: 3g.20gb, count: 2}]}]",
			"m.yaml:4: gpus[0].mig[1]: 3g.20gb does not fit with the instances above it; remove some, or name a start for each",
		},
		{"start and count", head + "gpus: [{product: A30, mig: [{profile: 1g.6gb, start: 0, count: 2}]}]", "m.yaml:4: gpus[0].mig[0].count: start is of one instance; remove count, or start to have it chosen"},
		{"no model", head + "gpus: [{name: Z}]", "m.yaml:4: gpus[0].memoryMiB: is missing; a GPU without product needs it\nm.yaml:4: gpus[0].compute: is missing; a GPU without product needs it"},
		{"compute", head + "gpus: [{product: T4, compute: sm_75}]", `m.yaml:4: gpus[0].compute: "sm_75" is not a compute capability such as 9.0`},
		{"class", head + "gpus: [{product: T4, pciClass: 0x30200}]", `m.yaml:4: gpus[0].pciClass: want a number from 0 to 0xffff, not "0x30200"`},
		{"bus", head + "gpus: [{product: T4, pciBusID: 17:00.0}]", `m.yaml:4: gpus[0].pciBusID: "17:00.0" is not a PCI bus id such as 0000:17:00.0`},
		{"one bus", head + "gpus: [{product: T4, count: 2, pciBusID: \"0000:17:00.0\"}]", "m.yaml:4: gpus[0].pciBusID: is of one GPU and the group has 2: list one for each"},
		{"few buses", head + "gpus: [{product: T4, count: 2, minor: [3]}]", "m.yaml:4: gpus[0].minor: lists 1, the group has 2 GPUs"},
		{"unknown switch", head + "gpus: [{name: Z, memoryMiB: 1, compute: 9.0, nvswitch: s}]", "m.yaml:4: gpus[0].nvlinks: is missing; the catalogue does not know how many this GPU has"},
		{"not capable", head + "gpus: [{product: A30, migCapable: false, mig: [{profile: 1g.6gb}]}]", "m.yaml:4: gpus[0].mig: A30 cannot do MIG; remove it"},
		{
			"unknown MIG", head + "gpus: [{name: Z, memoryMiB: 1, compute: 9.0, migCapable: true, mig: [{profile: 1g.6gb}]}]",
			"m.yaml:4: gpus[0].mig[0]: the catalogue does not know how Z can be cut; give id, start, size, memoryMiB and attributes as the driver reports them",
		},
		{"id alone", head + "gpus: [{product: A30, mig: [{profile: x, id: 99}]}]", "m.yaml:4: gpus[0].mig[0].size: is missing; the catalogue does not know this profile\nm.yaml:4: gpus[0].mig[0].start: is missing; an instance with an id is at one place"},
		{"no id", head + "gpus: [{product: A30, mig: [{profile: 1g.6gb, ci: 1}]}]", "m.yaml:4: gpus[0].mig[0].ci: belongs to an instance that is listed as the driver reports it; give its profile's id too, or remove it"},
		{
			"GI twice", head + "gpus: [{product: A30, mig: [{profile: 1g.6gb, gi: 3}, {profile: 1g.6gb, gi: 3}]}]",
			"m.yaml:4: gpus[0].mig[1].gi: GPU instance 3 is there above; choose another number",
		},
		{
			"CI twice", head + "gpus: [{product: A30, mig: [{profile: x, id: 14, start: 0, gi: 1}, {profile: x, id: 14, start: 0, gi: 1}]}]",
			"m.yaml:4: gpus[0].mig[1]: GPU instance 1 with compute instance 0 is there above; give another gi or ci",
		},
		{
			"one GI at two places", head + "gpus: [{product: A30, mig: [{profile: x, id: 14, start: 0, gi: 1}, {profile: x, id: 14, start: 1, gi: 1, ci: 1}]}]",
			"m.yaml:4: gpus[0].mig[1]: GPU instance 1 is another one above; compute instances of one have the same id, start and size",
		},
		{
			"reported overlap", head + "gpus: [{product: A30, mig: [{profile: 2g.12gb, start: 2}, {profile: x, id: 99, start: 3, size: 2}]}]",
			"m.yaml:4: gpus[0].mig[1].start: place 3:2 overlaps GPU instance 1 at 2:2",
		},
		{"lost and unhealthy", head + "gpus: [{product: T4, lost: gone, unhealthy: hot}]", "m.yaml:4: gpus[0].unhealthy: the GPU is lost; remove one of the two"},
		{"lost says nothing", head + "gpus: [{product: T4, lost: [x]}]", "m.yaml:4: gpus[0].lost: want one line of text"},
		{"one end", head + "gpus: [{product: V100, count: 2}]\nlinks: [{a: 0}]", "m.yaml:5: links[0]: a and b name the two GPUs by index; one is missing"},
		{"index", head + "gpus: [{product: V100, count: 2}]\nlinks:\n- {a: 0, b: 2, nvlinks: 1}", `m.yaml:6: links[0].b: want a whole number from 0 to 1, not "2"`},
		{"itself", head + "gpus: [{product: V100, count: 2}]\nlinks: [{a: 1, b: 1, nvlinks: 1}]", "m.yaml:5: links[0]: a and b are the same GPU"},
		{
			"link twice", head + "gpus: [{product: V100, count: 2}]\nlinks:\n- {a: 0, b: 1, nvlinks: 1}\n- {a: 1, b: 0, pcie: PIX}",
			"m.yaml:7: links[1]: GPUs 0 and 1 have a link above; merge the two",
		},
		{"link of nothing", head + "gpus: [{product: V100, count: 2}]\nlinks: [{a: 0, b: 1}]", "m.yaml:5: links[0]: says neither nvlinks nor pcie"},
		{
			"too many NVLinks", head + "gpus: [{product: V100, count: 2}]\nlinks: [{a: 0, b: 1, nvlinks: 7}]",
			"m.yaml:5: links[0].nvlinks: GPU 0 would use 7 NVLinks, Tesla V100-SXM2-16GB has 6\n" +
				"m.yaml:5: links[0].nvlinks: GPU 1 would use 7 NVLinks, Tesla V100-SXM2-16GB has 6",
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			_, err := ParseDescription("m.yaml", []byte(c.text))
			if err == nil {
				t.Fatal("accepted")
			}
			if diff := cmp.Diff(c.want, err.Error()); diff != "" {
				t.Error(diff)
			}
		})
	}
	t.Run("too long", func(t *testing.T) {
		_, err := ParseDescription("m.yaml", make([]byte, maxDescription+1))
		if err == nil || !strings.Contains(err.Error(), "at most 1048576 bytes") {
			t.Error(err)
		}
	})
	t.Run("many problems", func(t *testing.T) {
		_, err := ParseDescription("m.yaml", []byte(head+"gpus:\n"+strings.Repeat("- {}\n", 1000)))
		if n := strings.Count(err.Error(), "\n") + 1; n != maxProblems {
			t.Errorf("%d problems are told, want %d", n, maxProblems)
		}
	})
}

func FuzzParseDescription(f *testing.F) {
	for _, name := range BuiltinNames() {
		text, err := BuiltinYAML(name)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Add([]byte("name: a\ncpus: 1\nmemory: 1Gi\ngpus: [{product: A30, mig: [{profile: 1g.6gb, count: 4}]}]\nlinks: [&a {a: 0, b: 1, pcie: SYS}, *a]"))
	captured, err := os.ReadFile(filepath.Join("testdata", "captured.golden"))
	if err != nil {
		f.Fatal(err)
	}
	f.Add(captured)
	f.Fuzz(func(t *testing.T, data []byte) {
		d, err := ParseDescription("f.yaml", data)
		if err != nil {
			if !strings.HasPrefix(err.Error(), "f.yaml:") {
				t.Errorf("the error does not name the file: %v", err)
			}
			return
		}
		m := read(t, New(d, "seed"))
		if len(m.GPUs) == 0 || d.CPUs < 1 || d.NUMANodes < 1 || d.Name == "" {
			t.Errorf("accepted: %+v", d)
		}
		checkCapture(t, m, d.Host)
	})
}
