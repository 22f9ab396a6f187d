package machine

import (
	"fmt"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// masked is a machine without UUIDs: those in texts become their number in the order
// in which they come.
func masked(m gpu.Machine) gpu.Machine {
	var seen []string
	hide := func(s string) string {
		form := regexp.MustCompile(`(?i)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}`)
		for {
			uuid := form.FindString(s)
			if uuid == "" {
				return s
			}
			at := slices.Index(seen, strings.ToLower(uuid))
			if at < 0 {
				at = len(seen)
				seen = append(seen, strings.ToLower(uuid))
			}
			s = strings.Replace(s, uuid, "<"+strconv.Itoa(at)+">", 1)
		}
	}
	m.Board = hide(m.Board)
	m.GPUs = slices.Clone(m.GPUs)
	for i := range m.GPUs {
		g := &m.GPUs[i]
		g.UUID, g.NVSwitch, g.Health.Reason = "", hide(g.NVSwitch), hide(g.Health.Reason)
		g.MIG.Devices = slices.Clone(g.MIG.Devices)
		for j := range g.MIG.Devices {
			g.MIG.Devices[j].UUID = ""
		}
	}
	return m
}

// checkCapture captures a machine and makes it anew.
func checkCapture(t interface {
	Helper()
	Fatalf(format string, args ...any)
}, m gpu.Machine, host Host,
) {
	t.Helper()
	text, err := Capture("captured", &m, host)
	if err != nil {
		t.Fatalf("%v\n%+v", err, m)
	}
	again, err := Capture("captured", &m, host)
	if err != nil || string(again) != string(text) {
		t.Fatalf("the second capture is another: %v\n%s\n%s", err, text, again)
	}
	for _, g := range m.GPUs {
		for _, uuid := range append(uuidsOf(g), g.UUID) {
			if strings.Contains(string(text), strings.TrimPrefix(strings.TrimPrefix(uuid, "GPU-"), "MIG-")) {
				t.Fatalf("UUID %s is in\n%s", uuid, text)
			}
		}
	}
	desc, err := ParseDescription("captured.yaml", text)
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	got, err := New(desc, "another node").Read()
	if err != nil {
		t.Fatalf("%v\n%s", err, text)
	}
	if diff := cmp.Diff(masked(m), masked(got), equal); diff != "" {
		t.Fatalf("(-want +got)\n%s\n%s", diff, text)
	}
	if host.InstanceType == "" {
		host.InstanceType = "captured"
	}
	for _, g := range m.GPUs {
		host.NUMANodes = max(host.NUMANodes, g.NUMA+1)
	}
	if diff := cmp.Diff(host, desc.Host); diff != "" {
		t.Fatalf("host (-want +got)\n%s", diff)
	}
}

func uuidsOf(g gpu.GPU) []string {
	var uuids []string
	for _, d := range g.MIG.Devices {
		uuids = append(uuids, d.UUID)
	}
	return uuids
}

func TestCaptureOfBuiltins(t *testing.T) {
	for _, name := range BuiltinNames() {
		t.Run(name, func(t *testing.T) {
			d := mustBuiltin(t, name)
			m := New(d, "n")
			if diff := cmp.Diff(d.Host, m.Host()); diff != "" {
				t.Errorf("host (-want +got)\n%s", diff)
			}
			got := read(t, m)
			checkCapture(t, got, m.Host())
			text, err := Capture(d.Name, &got, m.Host())
			mustDo(t, err)
			original, err := BuiltinYAML(name)
			mustDo(t, err)
			// A regular machine stays short: a group for each group, and a line for
			// each link.
			if got, want := strings.Count(string(text), "product:"), strings.Count(string(original), "product:"); got > want {
				t.Errorf("%d groups, the original has %d:\n%s", got, want, text)
			}
			if got, want := strings.Count(string(text), "{a:"), strings.Count(string(original), "{a:"); got > want {
				t.Errorf("%d links, the original has %d:\n%s", got, want, text)
			}
		})
	}
}

// wild is a machine with something of everything.
func wild() gpu.Machine {
	m := gpu.Machine{
		Driver: "575.57.08", CUDA: "12.9", Board: "Z9000", Links: gpu.NewLinks(6),
		GPUs: make([]gpu.GPU, 6),
	}
	for i := range m.GPUs {
		m.GPUs[i] = gpu.GPU{
			Index: i, UUID: fmt.Sprintf("GPU-aaaaaaaa-0000-0000-0000-00000000000%d", i), Minor: 5 - i, Name: "NVIDIA H100 80GB HBM3",
			MemoryMiB: 81559, Compute: gpu.ComputeCapability{Major: 9}, PCIBusID: fmt.Sprintf("0000:%02x:00.0", 0x1b+i), PCIDeviceID: 0x2330,
			PCIClass: 0x0302, PCIeRoot: fmt.Sprintf("pci0000:%02x", 0x1a+i), NVSwitch: "cccccccc-1111-2222-3333-444444444444.7", NVLinks: 18,
			MIG: gpu.MIGState{Capable: true},
		}
	}
	cut := &m.GPUs[2]
	cut.MIG.Enabled, cut.MIG.Pending = true, false
	cut.MIG.Devices = []gpu.MIGDevice{
		{
			Index: 0, UUID: "MIG-bbbbbbbb-0000-0000-0000-000000000000", GI: 9, ProfileID: 19, Profile: "1g.10gb", Placement: gpu.Placement{Start: 6, Size: 1}, MemoryMiB: 9984,
			Attributes: gpu.MIGAttributes{SMs: 16, Slices: 1, ComputeSlices: 1, CopyEngines: 1, Decoders: 1, JPEG: 1},
		},
		{
			Index: 1, UUID: "MIG-bbbbbbbb-0000-0000-0000-000000000001", GI: 1, CI: 2, ProfileID: 9, Profile: "1c.3g.40gb", Placement: gpu.Placement{Size: 4}, MemoryMiB: 40448,
			Attributes: gpu.MIGAttributes{SMs: 20, Slices: 3, ComputeSlices: 1, CopyEngines: 3, Decoders: 3, JPEG: 3},
		},
	}
	m.GPUs[3].Recovery = gpu.RecoveryDrainReset
	m.GPUs[3].NVSwitch = ""
	m.GPUs[4] = gpu.GPU{
		Index: 4, UUID: m.GPUs[4].UUID, Minor: 1, Name: "NVIDIA Z1", MemoryMiB: 7, Compute: gpu.ComputeCapability{Major: 14, Minor: 3},
		PCIBusID: "0001:03:00.0", PCIClass: 0x0300, NUMA: -1, MIG: gpu.MIGState{Capable: true, Enabled: true, Pending: true, Devices: []gpu.MIGDevice{
			{Index: 0, UUID: "MIG-bbbbbbbb-0000-0000-0000-000000000002", GI: 1, ProfileID: 3, Profile: "1g.1gb", Placement: gpu.Placement{Start: 3, Size: 3}, MemoryMiB: 1},
		}},
	}
	m.GPUs[5] = gpu.GPU{
		Index: 5, UUID: "GPU-unknown-5", Minor: -1, NUMA: -1,
		Health: gpu.Health{State: gpu.Lost, Reason: "cannot be read: name: NVML: Unknown Error"},
	}
	for i := range 4 {
		for j := range i {
			m.Links.Merge(i, j, gpu.Link{PCIe: gpu.PCIeNode})
		}
	}
	m.Links.Merge(0, 4, gpu.Link{PCIe: gpu.PCIeSystem})
	return m
}

func TestCapture(t *testing.T) {
	host := Host{CPUs: 224, Memory: "2113400012Ki", NUMANodes: 2}
	m := wild()
	checkCapture(t, m, host)
	text, err := Capture("wild", &m, host)
	mustDo(t, err)
	golden(t, "captured", string(text))
}

// What is made from a capture works as hardware: instances that the catalogue does
// not know keep their place, and make room when they go.
func TestCapturedMachineWorks(t *testing.T) {
	m := wild()
	text, err := Capture("wild", &m, Host{CPUs: 1, Memory: "1Gi"})
	mustDo(t, err)
	desc := mustParse(t, string(text))
	machine, _ := opened(t, desc, "n")
	now := read(t, machine)
	known, unknown, lost := now.GPUs[2], now.GPUs[4], now.GPUs[5]
	_, err = machine.CreateMIG(known.UUID, threeAt0)
	wantError(t, err, gpu.ErrInvalid, "overlaps")
	mustDo(t, machine.SetProcesses(known.UUID, []gpu.Process{{PID: 1, GI: 1, CI: 2}}))
	wantError(t, machine.DestroyMIG(known.MIG.Devices[1].UUID), gpu.ErrInUse, known.UUID)
	wantError(t, machine.SetProcesses(known.UUID, []gpu.Process{{PID: 1, GI: 1, CI: 0}}), gpu.ErrInvalid, known.UUID)
	mustDo(t, machine.InjectXID(known.UUID, 94, 1, 2))
	mustDo(t, machine.SetProcesses(known.UUID, nil))
	mustDo(t, machine.DestroyMIG(known.MIG.Devices[1].UUID))
	made, err := machine.CreateMIG(known.UUID, threeAt0)
	mustDo(t, err)
	if made.GI != 1 || made.CI != 0 || made.Index != 1 || made.Attributes.SMs != 60 {
		t.Errorf("made: %+v", made)
	}
	_, err = machine.CreateMIG(unknown.UUID, oneAt0)
	wantError(t, err, gpu.ErrNotSupported, unknown.UUID)
	mustDo(t, machine.DestroyMIG(unknown.MIG.Devices[0].UUID))
	mustDo(t, machine.SetMIGMode(unknown.UUID, false))
	mustDo(t, machine.SetLost(lost.UUID, false))
	mustDo(t, machine.Reset(now.GPUs[3].UUID))
	now = read(t, machine)
	if g := now.GPUs[4]; g.MIG.Enabled || g.MIG.Pending {
		t.Errorf("MIG mode of a GPU that the catalogue does not know: %+v", g.MIG)
	}
	if !now.GPUs[5].Health.OK() || now.GPUs[3].Recovery != gpu.RecoveryNone {
		t.Errorf("found again: %v; reset: %v", now.GPUs[5].Health, now.GPUs[3].Recovery)
	}
}

func TestCaptureRefuses(t *testing.T) {
	host := Host{CPUs: 1, Memory: "1Gi", NUMANodes: 1}
	for name, c := range map[string]struct {
		spoil func(*gpu.Machine)
		host  Host
		want  string
	}{
		"no GPUs":          {func(m *gpu.Machine) { m.GPUs, m.Links = nil, gpu.NewLinks(0) }, host, "no GPUs"},
		"invalid":          {func(m *gpu.Machine) { m.GPUs[1].Index = 0 }, host, "gpu 1 has index 0"},
		"driver":           {func(m *gpu.Machine) { m.Driver = "R580" }, host, `driver: "R580" is not a version`},
		"host":             {func(*gpu.Machine) {}, Host{CPUs: 0, Memory: "1Gi"}, "cpus: want a whole number from 1"},
		"links of a lost":  {func(m *gpu.Machine) { m.Links.Merge(0, 5, gpu.Link{NVLinks: 1}) }, host, "GPU 0: NVLinks 18 would read as 17"},
		"more than it has": {func(m *gpu.Machine) { m.Links.Merge(0, 1, gpu.Link{NVLinks: 19}) }, host, "GPU 0 would use 19 NVLinks"},
		"overlap":          {func(m *gpu.Machine) { m.GPUs[2].MIG.Devices[0].Placement.Start = 3 }, host, "overlaps GPU instance"},
		"MIG mode":         {func(m *gpu.Machine) { m.GPUs[0].MIG.Capable, m.GPUs[0].MIG.Enabled = false, true }, host, "cannot do MIG"},
	} {
		t.Run(name, func(t *testing.T) {
			m := wild()
			c.spoil(&m)
			text, err := Capture("m", &m, c.host)
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q\n%s", err, c.want, text)
			}
		})
	}
}

// drawRaw draws a machine as drivers can report one.
func drawRaw(t *rapid.T) gpu.Machine {
	word := rapid.StringMatching(`[ -~äλ]{0,20}`)
	n := rapid.IntRange(1, 7).Draw(t, "GPUs")
	m := gpu.Machine{
		Driver: rapid.StringMatching(`[0-9]{3}\.[0-9]{2}(\.[0-9]{2})?`).Draw(t, "driver"),
		CUDA:   rapid.StringMatching(`([0-9]{1,2}\.[0-9])?`).Draw(t, "CUDA"),
		Board:  rapid.OneOf(rapid.Just("captured"), word).Draw(t, "board"),
		GPUs:   make([]gpu.GPU, n), Links: gpu.NewLinks(n),
	}
	// Some machines are regular, so that there is something to group.
	regular := rapid.Bool().Draw(t, "regular")
	var names []string
	for _, p := range gpu.Products() {
		names = append(names, p.Names...)
	}
	for i := range m.GPUs {
		g := &m.GPUs[i]
		if regular && i > 0 && rapid.IntRange(0, 3).Draw(t, "other") > 0 {
			*g = m.GPUs[i-1]
			g.MIG.Devices = slices.Clone(g.MIG.Devices)
		} else {
			*g = drawGPU(t, rapid.OneOf(rapid.SampledFrom(names), word).Draw(t, "name"))
		}
		g.Index, g.UUID = i, fmt.Sprintf("GPU-dddddddd-0000-0000-0000-%012d", i)
		for j := range g.MIG.Devices {
			g.MIG.Devices[j].UUID = fmt.Sprintf("MIG-eeeeeeee-0000-0000-%04d-%012d", i, j)
		}
		if regular {
			g.Minor, g.PCIBusID = i, madeUpBusID(i)
		} else {
			g.PCIBusID = rapid.StringMatching(`(0000:[0-9a-f]{2}:00\.0)?`).Draw(t, "bus")
			g.Minor = rapid.IntRange(-1, 9).Draw(t, "minor")
		}
		g.PCIeRoot = rapid.SampledFrom([]string{"", madeUpRoot(i), madeUpRoot(i), madeUpRoot(0), "pci0001:00"}).Draw(t, "root")
	}
	level := gpu.PCIeLevel(rapid.IntRange(0, 6).Draw(t, "usual level"))
	for i := range m.GPUs {
		for j := range i {
			a, b := &m.GPUs[i], &m.GPUs[j]
			if a.Health.State == gpu.Lost || b.Health.State == gpu.Lost {
				continue
			}
			link := gpu.Link{PCIe: level}
			if !regular {
				link.PCIe = gpu.PCIeLevel(rapid.IntRange(0, 6).Draw(t, "level"))
			}
			if rapid.Bool().Draw(t, "linked") {
				link.NVLinks = rapid.IntRange(0, 4).Draw(t, "nvlinks")
			}
			m.Links.Merge(i, j, link)
			a.NVLinks += link.NVLinks
			b.NVLinks += link.NVLinks
		}
	}
	return m
}

// drawGPU draws a GPU without what must be its own.
func drawGPU(t *rapid.T, name string) gpu.GPU {
	few := rapid.IntRange(0, 3)
	g := gpu.GPU{Name: name, NUMA: rapid.IntRange(-1, 3).Draw(t, "NUMA"), Recovery: gpu.Recovery(rapid.IntRange(0, 7).Draw(t, "recovery"))}
	p := gpu.ProductByName(name)
	if p != nil && rapid.Bool().Draw(t, "as the catalogue") {
		g.MemoryMiB, g.Compute, g.MIG.Capable, g.PCIClass = p.MemoryMiB, p.Compute, p.MIG != nil, defaultClass
		if len(p.PCIDeviceIDs) > 0 {
			g.PCIDeviceID = p.PCIDeviceIDs[0]
		}
	} else {
		g.MemoryMiB, g.Compute = few.Draw(t, "memory"), gpu.ComputeCapability{Major: few.Draw(t, "major"), Minor: few.Draw(t, "minor")}
		g.MIG.Capable = rapid.Bool().Draw(t, "capable")
		g.PCIDeviceID, g.PCIClass = rapid.Uint16().Draw(t, "device id"), rapid.SampledFrom([]uint16{0, 0x0300, 0x0302}).Draw(t, "class")
	}
	if g.NVLinks = rapid.SampledFrom([]int{0, 0, 4, 12, 18}).Draw(t, "links to switches"); g.NVLinks > 0 {
		g.NVSwitch = rapid.SampledFrom([]string{"", "nvswitch", "a", "99999999-89ab-CDEF-0123-456789abcdef.3", "88888888-89ab-cdef-0123-456789abcdef.3"}).Draw(t, "domain")
	}
	reason := rapid.StringMatching(`[a-z"': ]{1,20}|GPU 77777777-89ab-cdef-0123-456789abcdef`)
	switch rapid.IntRange(0, 5).Draw(t, "health") {
	case 0:
		g.Health = gpu.Health{State: gpu.Lost, Reason: reason.Draw(t, "reason")}
	case 1:
		g.Health = gpu.Health{State: gpu.Unhealthy, Reason: reason.Draw(t, "reason")}
	}
	if !g.MIG.Capable {
		return g
	}
	g.MIG.Pending = rapid.Bool().Draw(t, "pending")
	if g.MIG.Enabled = rapid.Bool().Draw(t, "MIG mode"); g.MIG.Enabled {
		g.MIG.Devices = drawMIG(t, p)
	}
	return g
}

// drawMIG draws MIG devices that do not overlap, of profiles of the product or
// others.
func drawMIG(t *rapid.T, p *gpu.Product) []gpu.MIGDevice {
	few := rapid.IntRange(0, 3)
	var devices []gpu.MIGDevice
	start := 0
	for gi := range rapid.IntRange(0, 4).Draw(t, "instances") {
		d := gpu.MIGDevice{GI: gi + few.Draw(t, "GI")*10, Placement: gpu.Placement{Start: start + few.Draw(t, "gap"), Size: rapid.IntRange(1, 4).Draw(t, "size")}}
		if p != nil && p.MIG != nil && rapid.Bool().Draw(t, "known") {
			profile := rapid.SampledFrom(p.MIG.Profiles).Draw(t, "profile")
			d.ProfileID, d.Profile, d.MemoryMiB, d.Attributes = profile.ID, profile.Name, profile.MemoryMiB, p.Attributes(&profile)
			for _, at := range profile.Placements {
				if at.Start >= start {
					d.Placement = at
					break
				}
			}
		} else {
			d.ProfileID, d.Profile = rapid.IntRange(0, 99).Draw(t, "id"), rapid.StringMatching(`[0-9a-z.+]{0,9}`).Draw(t, "profile")
			d.MemoryMiB, d.Attributes = few.Draw(t, "memory"), gpu.MIGAttributes{SMs: few.Draw(t, "SMs"), Encoders: few.Draw(t, "encoders"), OFA: few.Draw(t, "OFA")}
		}
		if d.Placement.Start < start {
			continue
		}
		start = d.Placement.Start + d.Placement.Size
		for ci := range rapid.SampledFrom([]int{1, 1, 1, 2}).Draw(t, "compute instances") {
			d.Index, d.CI = len(devices), ci+few.Draw(t, "CI")*ci
			devices = append(devices, d)
		}
	}
	if len(devices) > 1 {
		devices = rapid.Permutation(devices).Draw(t, "order")
	}
	for i := range devices {
		devices[i].Index = i
	}
	return devices
}

func TestCaptureOfAnyMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawRaw(t)
		host := Host{
			CPUs: rapid.IntRange(1, 512).Draw(t, "CPUs"), Memory: rapid.StringMatching(`[1-9][0-9]{0,6}[KMG]i`).Draw(t, "memory"),
			NUMANodes:    rapid.IntRange(1, 4).Draw(t, "NUMA nodes"),
			InstanceType: rapid.SampledFrom([]string{"", "p5.48xlarge"}).Draw(t, "instance type"),
		}
		checkCapture(t, m, host)
	})
}

// Of simulated machines in any state.
func TestCaptureOfAnySimulatedMachine(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		name := rapid.SampledFrom(BuiltinNames()).Draw(t, "machine")
		d, err := Builtin(name)
		if err != nil {
			t.Fatal(err)
		}
		m := New(d, "n")
		for range rapid.IntRange(0, 12).Draw(t, "steps") {
			now, err := m.Read()
			if err != nil {
				t.Fatal(err)
			}
			g := rapid.SampledFrom(now.GPUs).Draw(t, "GPU")
			// What is refused changes nothing.
			switch rapid.IntRange(0, 8).Draw(t, "step") {
			case 0:
				_ = m.SetLost(g.UUID, rapid.Bool().Draw(t, "lost"))
			case 1:
				_ = m.SetUnhealthy(g.UUID, "row remap failed")
			case 2:
				_ = m.SetRecovery(g.UUID, gpu.Recovery(rapid.IntRange(0, 5).Draw(t, "action")))
			case 3:
				_ = m.FailLinkQuery(g.Index, rapid.IntRange(0, 7).Draw(t, "other"), true)
			case 4:
				_ = m.Reset(g.UUID)
			case 5:
				if len(g.MIG.Devices) > 0 {
					_ = m.DestroyMIG(rapid.SampledFrom(g.MIG.Devices).Draw(t, "MIG device").UUID)
				}
			default:
				_ = m.SetMIGMode(g.UUID, true)
				if table := gpu.ProductByName(g.Name).MIG; table != nil {
					profile := rapid.SampledFrom(table.Profiles).Draw(t, "profile")
					_, _ = m.CreateMIG(g.UUID, gpu.MIGInstance{ProfileID: profile.ID, Placement: rapid.SampledFrom(profile.Placements).Draw(t, "place")})
				}
			}
		}
		now, err := m.Read()
		if err != nil {
			t.Fatal(err)
		}
		checkCapture(t, now, m.Host())
	})
}
