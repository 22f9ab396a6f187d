package sharing

import (
	"errors"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

var ignorePlaces = cmpopts.IgnoreUnexported(Config{})

func TestParseEmptyIsDefault(t *testing.T) {
	for _, text := range []string{
		"", "\n", "# nothing\n", "---\n---\n", "{}", "version: v1\n", "version:\nflags:\n", `version: ""`,
		"apiVersion: v1\nkind: ConfigMap\ndata:\n  a.yaml: ''\n",
		"apiVersion: v1\nkind: ConfigMap\ndata:\n  a.yaml:\n",
	} {
		c, warnings, err := Parse("f", []byte(text))
		if err != nil || len(warnings) > 0 {
			t.Errorf("Parse(%q): warnings %v, error %v", text, warnings, err)
			continue
		}
		if diff := cmp.Diff(Default(), c, ignorePlaces); diff != "" {
			t.Errorf("Parse(%q) (-default +got):\n%s", text, diff)
		}
	}
}

// Every key has another value than its default, so each must arrive.
func TestParseEveryKey(t *testing.T) {
	const text = `
version: v1
flags:
  migStrategy: single
  failOnInitError: false
  mpsRoot: /mps
  nvidiaDriverRoot: /driver
  nvidiaDevRoot: /dev-root
  gdrcopyEnabled: true
  gdsEnabled: true
  mofedEnabled: true
  useNodeFeatureAPI: false
  deviceDiscoveryStrategy: nvml
  plugin:
    passDeviceSpecs: true
    deviceListStrategy: [envvar, cdi-annotations]
    deviceIDStrategy: index
    cdiAnnotationPrefix: cdi.example.com/
    nvidiaCTKPath: /bin/ctk
    containerDriverRoot: /in-container
    sharedDevicesAllocationPolicy: packed
  gfd:
    oneshot: true
    noTimestamp: true
    sleepInterval: 1500
    outputFile: /labels
    machineTypeFile: /type
resources:
  gpus:
  - pattern: "*H100*"
    name: h100
  mig:
  - {name: example.com/small, pattern: 1g.*}
sharing:
  timeSlicing:
    renameByDefault: true
    failRequestsGreaterThanOne: true
    resources:
    - name: h100
      rename: h100-slot
      devices: 3
      replicas: 5
  mps:
    failRequestsGreaterThanOne: false
    resources:
    - name: example.com/small
      devices: [0, "1:0", GPU-01234567-89ab-cdef-0123-456789abcdef, MIG-GPU-01234567-89ab-cdef-0123-456789abcdef/7/0]
      replicas: 2
imex:
  channelIDs: [0]
  required: true
`
	want := &Config{
		Flags: Flags{
			MIGStrategy: MIGSingle, MPSRoot: "/mps", DriverRoot: "/driver", DevRoot: "/dev-root",
			GDRCopyEnabled: true, GDSEnabled: true, MOFEDEnabled: true, DeviceDiscovery: DiscoveryNVML,
			Plugin: PluginFlags{
				PassDeviceSpecs: true, DeviceListStrategies: []DeviceListStrategy{ListEnvvar, ListCDIAnnotations},
				DeviceIDStrategy: IDByIndex, CDIAnnotationPrefix: "cdi.example.com/", NVIDIACTKPath: "/bin/ctk",
				ContainerDriverRoot: "/in-container", AllocationPolicy: Packed,
			},
			GFD: GFDFlags{Oneshot: true, NoTimestamp: true, SleepInterval: 1500, OutputFile: "/labels", MachineTypeFile: "/type"},
		},
		Resources: Resources{
			GPUs: []ResourcePattern{{Pattern: "*H100*", Name: "nvidia.com/h100"}},
			MIG:  []ResourcePattern{{Pattern: "1g.*", Name: "example.com/small"}},
		},
		TimeSlicing: &Sharing{
			RenameByDefault: true, FailRequestsGreaterThanOne: true,
			Resources: []SharedResource{{Name: "nvidia.com/h100", Rename: "nvidia.com/h100-slot", Devices: Devices{Count: 3}, Replicas: 5}},
		},
		MPS: &Sharing{Resources: []SharedResource{{
			Name: "example.com/small", Replicas: 2, Devices: Devices{List: []string{
				"0", "1:0", "GPU-01234567-89ab-cdef-0123-456789abcdef", "MIG-GPU-01234567-89ab-cdef-0123-456789abcdef/7/0",
			}},
		}}},
		IMEX: IMEX{ChannelIDs: []int{0}, Required: true},
	}
	c, _, err := Parse("f", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(want, c, ignorePlaces); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseValues(t *testing.T) {
	parse := func(text string) *Config {
		t.Helper()
		c, _, err := Parse("f", []byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	for value, want := range map[string]time.Duration{
		"90s": 90 * time.Second, `"2m"`: 2 * time.Minute, "infinite": Infinite, "60000000000": time.Minute,
	} {
		if got := parse("flags: {gfd: {sleepInterval: " + value + "}}").Flags.GFD.SleepInterval; got != want {
			t.Errorf("sleepInterval %s is %v, want %v", value, got, want)
		}
	}
	if got := parse("flags: {nvidiaDriverRoot: /opt}").Flags.DevRoot; got != "/opt" {
		t.Errorf("without nvidiaDevRoot it is %q, want that of nvidiaDriverRoot", got)
	}
	if got := parse("flags: {plugin: {deviceListStrategy: volume-mounts}}").Flags.Plugin.DeviceListStrategies; !cmp.Equal(got, []DeviceListStrategy{ListVolumeMounts}) {
		t.Errorf("one deviceListStrategy is read as %v", got)
	}
	const mps = "flags: {mpsRoot: /m}\nsharing: {mps: {resources: [{name: gpu, replicas: 2}]}}"
	if !parse(mps).MPS.FailRequestsGreaterThanOne {
		t.Error("failRequestsGreaterThanOne of MPS is false by default, want true")
	}
	if got := parse("flags: {plugin: {}}\nsharing: {mig: {strategy: mixed}}").Flags.MIGStrategy; got != MIGMixed {
		t.Errorf("sharing.mig.strategy gives migStrategy %s", got)
	}
}

func TestParseBounds(t *testing.T) {
	tests := map[string]string{
		strings.Repeat("#", MaxSize+1):                                                            "f: is 1048577 bytes long, more than the 1048576 that a ConfigMap can hold",
		"flags: " + strings.Repeat("[", 200_000):                                                  `f:1: is not valid YAML: exceeded max depth of 10000`,
		"flags:\n  " + strings.Repeat("x", 300) + ": 1":                                           `f:2: unknown key "flags.` + strings.Repeat("x", 100) + `..."; no known key is near, known are: `,
		"a: &a [x,x]\nb: &b [*a,*a,*a,*a]\nc: &c [*b,*b,*b,*b]\nflags: {migStrategy: [*c,*c,*c]}": `f:1: unknown key "a"; `,
	}
	for text, want := range tests {
		_, _, err := Parse("f", []byte(text))
		if err == nil || !strings.HasPrefix(err.Error(), want) {
			t.Errorf("Parse of %.30q... = %.200v, want %s", text, err, want)
		}
	}
}

func TestErrorsGiveTheirProblems(t *testing.T) {
	_, _, err := Parse("dir/f.yaml", []byte("version: v3\nflags:\n  gdsEnabled: 1\n"))
	var p *Problem
	if !errors.As(err, &p) {
		t.Fatalf("no Problem in %v", err)
	}
	want := &Problem{File: "dir/f.yaml", Line: 1, Key: "version", Message: `version: unknown version "v3"; write v1, the only one`}
	if diff := cmp.Diff(want, p); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if n := strings.Count(err.Error(), "\n") + 1; n != 2 {
		t.Errorf("error has %d lines, want one per problem:\n%v", n, err)
	}
}

func TestErrorsAreBounded(t *testing.T) {
	_, _, err := Parse("f", []byte(strings.Repeat("x: 1\n", 500)))
	var errs Errors
	if !errors.As(err, &errs) || len(errs) != 101 {
		t.Fatalf("%d problems, want 100 and one about the rest", len(errs))
	}
	if got, want := errs[100].Error(), "f:101: and 400 more problems from here on; correct those above first"; got != want {
		t.Errorf("last problem %q, want %q", got, want)
	}
}

// The manifests that the project must accept as they are.
func TestSeedManifests(t *testing.T) {
	dir := filepath.Join("..", "..", "..", "shared", "seed", "manifests")
	if _, err := os.Stat(dir); err != nil {
		t.Skipf("the manifests are not beside this checkout: %v", err)
	}
	tests := []struct {
		file     string
		machine  *gpu.Machine
		warnings []string // keys
		want     []summary
	}{
		{"nvidia-device-plugin-config.yaml", fourA10G(), nil, []summary{{"nvidia.com/gpu", 16, TimeSlicing, 4, false}}},
		{"time-slicing-config.yaml", fourA10G(), []string{"sharing.timeSlicing.resources[1].replicas"}, []summary{
			{"nvidia.com/gpu", 32, TimeSlicing, 8, false}, {"nvidia.com/gpu-exclusive", 4, None, 1, true},
		}},
		{"mig-device-plugin-config.yaml", eightA100(), []string{"sharing.mig.strategy", "resources"}, []summary{{"nvidia.com/gpu", 8, None, 1, false}}},
		{"mig-device-plugin-config.yaml", allMIG(), []string{"sharing.mig.strategy", "resources"}, []summary{{"nvidia.com/mig-3g.20gb", 4, None, 1, false}}},
	}
	for _, tt := range tests {
		t.Run(tt.file, func(t *testing.T) {
			data, err := os.ReadFile(filepath.Join(dir, tt.file))
			if err != nil {
				t.Fatal(err)
			}
			c, warnings, err := Parse(tt.file, data)
			if err != nil {
				t.Fatal(err)
			}
			var keys []string
			for _, w := range warnings {
				keys = append(keys, w.Key)
			}
			if diff := cmp.Diff(tt.warnings, keys); diff != "" {
				t.Errorf("keys of the warnings (-want +got):\n%s", diff)
			}
			plan, more, err := c.Plan(tt.machine)
			if err != nil || len(more) > 0 {
				t.Fatalf("Plan: warnings %v, error %v", more, err)
			}
			if diff := cmp.Diff(tt.want, summarise(plan)); diff != "" {
				t.Errorf("resources (-want +got):\n%s", diff)
			}
		})
	}
}

type summary struct {
	Name      string
	Devices   int
	Strategy  Strategy
	Replicas  int
	Exclusive bool
}

func summarise(p *Plan) []summary {
	var all []summary
	for _, r := range p.Resources {
		all = append(all, summary{r.Name, len(r.Devices), r.Strategy, r.Replicas, r.Exclusive})
	}
	return all
}

func TestPlanDevices(t *testing.T) {
	m := machine(2, "A100-40")
	m.GPUs[1].Health = gpu.Health{State: gpu.Unhealthy, Reason: "XID 79"}
	cut(&m.GPUs[1], "3g.20gb")
	c := Default()
	c.Flags.MIGStrategy = MIGMixed
	c.TimeSlicing = &Sharing{Resources: []SharedResource{{Name: "nvidia.com/mig-3g.20gb", Replicas: 2}}}
	plan, warnings, err := c.Plan(m)
	if err != nil || len(warnings) > 0 {
		t.Fatalf("warnings %v, error %v", warnings, err)
	}
	g0, g1, mig := m.GPUs[0].UUID, m.GPUs[1].UUID, m.GPUs[1].MIG.Devices[0].UUID
	health := gpu.Health{State: gpu.Unhealthy, Reason: "XID 79"}
	want := &Plan{Resources: []Resource{
		{Name: "nvidia.com/gpu", Strategy: None, Replicas: 1, Devices: []Device{
			{ID: gpu.DeviceID{Base: g0, Slot: gpu.NoSlot}, GPU: g0, Index: "0", NUMA: 0},
		}},
		{Name: "nvidia.com/mig-3g.20gb", Strategy: TimeSlicing, Replicas: 2, Devices: []Device{
			{ID: gpu.DeviceID{Base: mig, Slot: 0}, GPU: g1, Index: "1:0", NUMA: 1, Health: health},
			{ID: gpu.DeviceID{Base: mig, Slot: 1}, GPU: g1, Index: "1:0", NUMA: 1, Health: health},
		}},
	}}
	if diff := cmp.Diff(want, plan); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

// A MIG device can be listed under each of its names.
func TestPlanMIGNames(t *testing.T) {
	m := allMIG()
	old := "MIG-" + m.GPUs[0].UUID + "/4/0"
	for _, name := range []string{"0:1", m.GPUs[0].MIG.Devices[1].UUID, old} {
		c := Default()
		c.Flags.MIGStrategy = MIGSingle
		c.TimeSlicing = &Sharing{Resources: []SharedResource{{Name: "nvidia.com/gpu", Rename: "nvidia.com/slot", Replicas: 2, Devices: Devices{List: []string{name}}}}}
		plan, warnings, err := c.Plan(m)
		if err != nil || len(warnings) > 0 {
			t.Fatalf("%s: warnings %v, error %v", name, warnings, err)
		}
		want := []summary{{"nvidia.com/gpu", 3, None, 1, false}, {"nvidia.com/slot", 2, TimeSlicing, 2, false}}
		if diff := cmp.Diff(want, summarise(plan)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
		if got := plan.Resources[1].Devices[0].Index; got != "0:1" {
			t.Errorf("%s selects device %s", name, got)
		}
	}
}

// A lost GPU may have lost its MIG state from sight: it must not take the
// others with it.
func TestPlanSingleToleratesLost(t *testing.T) {
	m := machine(3, "A100-40")
	cut(&m.GPUs[0], "3g.20gb")
	cut(&m.GPUs[1])
	m.GPUs[1].Health.State = gpu.Lost
	m.GPUs[2].Health.State = gpu.Lost
	c := Default()
	c.Flags.MIGStrategy = MIGSingle
	plan, warnings, err := c.Plan(m)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]summary{{"nvidia.com/gpu", 1, None, 1, false}}, summarise(plan)); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	if len(warnings) != 2 || !strings.Contains(warnings[0].Message, m.GPUs[1].UUID) || !strings.Contains(warnings[1].Message, m.GPUs[2].UUID) {
		t.Errorf("warnings %v, want one about each lost GPU", warnings)
	}
}

func TestPlanRefuses(t *testing.T) {
	slices := func(entries ...SharedResource) *Sharing { return &Sharing{Resources: entries} }
	tests := []struct {
		name    string
		machine *gpu.Machine
		change  func(*Config)
		want    string
	}{
		{"MPS", fourA10G(), func(c *Config) {
			c.Flags.MPSRoot, c.MPS = "/mps", slices(SharedResource{Name: "nvidia.com/gpu", Replicas: 2})
		}, "sharing.mps: MPS is not served; share by sharing.timeSlicing instead, with the same resources"},
		{"invalid value", fourA10G(), func(c *Config) { c.Flags.MIGStrategy = "" },
			`flags.migStrategy: unknown value ""; allowed: none, single, mixed`},
		{"no replicas", fourA10G(), func(c *Config) { c.TimeSlicing = slices(SharedResource{Name: "nvidia.com/gpu"}) },
			"sharing.timeSlicing.resources[0].replicas: is missing; give the number of slots per device, at least 2"},
		{"rename to a MIG resource", mixed(), func(c *Config) {
			c.Flags.MIGStrategy = MIGMixed
			c.TimeSlicing = slices(SharedResource{Name: "nvidia.com/gpu", Rename: "nvidia.com/mig-1g.5gb", Replicas: 2})
		}, "sharing.timeSlicing.resources[0].rename: nvidia.com/mig-1g.5gb is the name of other devices of this node; choose another"},
		{"exclusive twice by two names", fourA10G(), func(c *Config) {
			c.TimeSlicing = slices(SharedResource{Name: "nvidia.com/gpu", Replicas: 2},
				SharedResource{Name: "nvidia.com/a", Replicas: 1, Devices: Devices{List: []string{"1"}}},
				SharedResource{Name: "nvidia.com/b", Replicas: 1, Devices: Devices{List: []string{testUUID("GPU", 1)}}})
		}, "sharing.timeSlicing.resources[2].devices: GPU 1 has an exclusive view already, nvidia.com/a; set devices of both apart"},
		{"invalid machine", &gpu.Machine{GPUs: make([]gpu.GPU, 1)}, func(*Config) {}, "machine: gpu 0 has no UUID"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := Default()
			tt.change(c)
			plan, _, err := c.Plan(tt.machine)
			if err == nil || err.Error() != tt.want || plan != nil {
				t.Errorf("Plan = %v, %v\nwant error %s", plan, err, tt.want)
			}
		})
	}
}

func TestMatches(t *testing.T) {
	words := []string{"", "a", "ab", "ba", "aab", "abab", "1g.5gb", "NVIDIA A100-SXM4-40GB"}
	patterns := []string{"", "*", "**", "a", "a*", "*a", "*b", "a*b", "*a*", "a*b*", "ab*ab", "a*a*b", "1g.*", "1g*5gb", "*A100*40GB", "NVIDIA?A100*"}
	for _, p := range patterns {
		oracle := regexp.MustCompile("^" + strings.ReplaceAll(regexp.QuoteMeta(p), `\*`, ".*") + "$")
		for _, w := range words {
			if got, want := matches(p, w), oracle.MatchString(w); got != want {
				t.Errorf("matches(%q, %q) = %v, want %v", p, w, got, want)
			}
		}
	}
}

type brokenWriter struct{}

var errBroken = errors.New("broken")

func (brokenWriter) Write([]byte) (int, error) { return 0, errBroken }

func TestWriteTableReportsTheWriter(t *testing.T) {
	if err := (&Plan{}).WriteTable(brokenWriter{}); !errors.Is(err, errBroken) {
		t.Errorf("error %v, want that of the writer", err)
	}
}
