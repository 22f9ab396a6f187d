package mig

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/machine/machinetest"
)

var update = flag.Bool("update", false, "write golden files")

const example = `version: v1
mig-configs:
  all-disabled:
  - devices: all
    mig-enabled: false
  half:
  - devices: [0, 1, 2, 3]
    mig-enabled: true
    mig-devices: {1g.5gb: 2, "1g.10gb": 1, 3g.20gb: 1}
  layered:
  - device-filter: ["0x20B010DE", "0x20F110DE"]
    devices: all
    mig-enabled: true
    mig-devices:
      3g.20gb: 2
  - devices: [0]
    mig-enabled: false
  empty:
  - devices: all
    mig-enabled: true
    mig-devices: {}
`

func TestTargets(t *testing.T) {
	c, err := ParseConfig("f.yaml", []byte(example))
	if err != nil {
		t.Fatal(err)
	}
	p4d, mixed := machinetest.Builtin(t, "p4d.24xlarge"), machinetest.Builtin(t, "mixed-2")
	off, on := &Target{}, &Target{Enabled: true}
	half := &Target{Enabled: true, Profiles: []int{19, 19, 15, 9}}
	large := &Target{Enabled: true, Profiles: []int{9, 9}}
	for _, test := range []struct {
		config  string
		machine *gpu.Machine
		want    []*Target
	}{
		{"all-disabled", p4d, []*Target{off, off, off, off, off, off, off, off}},
		{"half", p4d, []*Target{half, half, half, half, nil, nil, nil, nil}},
		{"layered", p4d, []*Target{off, large, large, large, large, large, large, large}},
		// The GPUs that cannot do MIG are passed over.
		{"empty", mixed, []*Target{on, on, nil, nil}},
		{"all-disabled", mixed, []*Target{off, off, nil, nil}},
	} {
		got, err := c.Targets(test.config, test.machine)
		if err != nil {
			t.Errorf("%s: %v", test.config, err)
		}
		if diff := cmp.Diff(test.want, got); diff != "" {
			t.Errorf("%s: %s", test.config, diff)
		}
	}
}

func TestTargetsThatCannotBe(t *testing.T) {
	for _, test := range []struct{ name, text, machine, want string }{
		{"unknown name", "  other: [{devices: all, mig-enabled: false}]", "p4d.24xlarge", `no config "x"; there are: other`},
		{"index that is not there", "  x: [{devices: [8], mig-enabled: false}]", "p4d.24xlarge", "f.yaml:3: devices names GPU 8, the machine has 8"},
		{"GPU without MIG by index", "  x: [{devices: [2], mig-enabled: true, mig-devices: {}}]", "mixed-2", "GPU 2: Tesla T4 cannot do MIG"},
		{"profile of another product", "  x: [{devices: all, mig-enabled: true, mig-devices: {1g.6gb: 1}}]", "a100-pcie-4", "has no MIG profile 1g.6gb; there are: 7g.80gb"},
		{"too much", "  x: [{devices: all, mig-enabled: true, mig-devices: {3g.20gb: 3}}]", "p4d.24xlarge", "do not fit"},
		{"subsystem", `  x: [{device-filter: "0x20B010DE:0x134F10DE", devices: all, mig-enabled: false}]`, "p4d.24xlarge", "leave out what is after the colon"},
	} {
		t.Run(test.name, func(t *testing.T) {
			c, err := ParseConfig("f.yaml", []byte("version: v1\nmig-configs:\n"+test.text+"\n"))
			if err != nil {
				t.Fatal(err)
			}
			_, err = c.Targets("x", machinetest.Builtin(t, test.machine))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want %q in it", err, test.want)
			}
		})
	}
}

func TestBadConfigsAreRefusedWithLineAndKey(t *testing.T) {
	for _, test := range []struct{ name, text, want string }{
		{"empty", "", "is empty"},
		{"no YAML", "a: [", "f.yaml: yaml"},
		{"version", "version: v2\nmig-configs: {}", `f.yaml:1: version is "v2"`},
		{"no version", "mig-configs: {}", "version is missing"},
		{"unknown key", "version: v1\nmig-configs:\n  x:\n  - {devices: all, mig-enable: true}\n", "f.yaml:4: mig-configs.x[0] has the unknown key mig-enable; did you mean mig-enabled?"},
		{"empty list", "version: v1\nmig-configs:\n  x: []\n", "f.yaml:3: mig-configs.x is not a list"},
		{"devices", "version: v1\nmig-configs:\n  x: [{devices: some, mig-enabled: false}]\n", "f.yaml:3: mig-configs.x[0].devices is neither"},
		{"enabled without devices", "version: v1\nmig-configs:\n  x: [{devices: all, mig-enabled: true}]\n", "mig-devices is missing"},
		{"disabled with devices", "version: v1\nmig-configs:\n  x: [{devices: all, mig-enabled: false, mig-devices: {1g.5gb: 1}}]\n", "must be empty"},
		{"count", "version: v1\nmig-configs:\n  x: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: -1}}]\n", `mig-devices.1g.5gb is "-1"`},
		{"all zero", "version: v1\nmig-configs:\n  x: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 0}}]\n", "has no device"},
		{"profile", "version: v1\nmig-configs:\n  x: [{devices: all, mig-enabled: true, mig-devices: {small: 1}}]\n", `"small" is not the name of a MIG profile`},
		{"filter", "version: v1\nmig-configs:\n  x: [{device-filter: A100, devices: all, mig-enabled: false}]\n", `device-filter has "A100"`},
		{"not a bool", "version: v1\nmig-configs:\n  x: [{devices: all, mig-enabled: yes please}]\n", "neither true nor false"},
	} {
		t.Run(test.name, func(t *testing.T) {
			_, err := ParseConfig("f.yaml", []byte(test.text))
			if err == nil || !strings.Contains(err.Error(), test.want) {
				t.Errorf("error is %v, want %q in it", err, test.want)
			}
		})
	}
}

func TestNamesOfProfilesMayDriftWithTheDriver(t *testing.T) {
	b200 := gpu.ProductByKey("B200").MIG
	for name, want := range map[string]int{"1g.23gb": 19, "1g.24gb": 19, "1g.23gb.me": 20, "1g.23gb+me": 20, "3g.93gb": 9, "1g.45gb": 15, "7g.186gb": 0} {
		if id, err := profileOf(b200, name); err != nil || id != want {
			t.Errorf("%s is %d (%v), want %d", name, id, err, want)
		}
	}
	for _, name := range []string{"1g.5gb", "5g.100gb", "1g.23gb+gfx", "1c.2g.45gb", ""} {
		if id, err := profileOf(b200, name); err == nil {
			t.Errorf("%q is taken for %d", name, id)
		}
	}
}

// Every config that is generated fits, for every machine that is built in.
func TestGeneratedConfigsFitTheMachine(t *testing.T) {
	for _, name := range machine.BuiltinNames() {
		m := machinetest.Builtin(t, name)
		text, err := Generate(m)
		capable := false
		for _, g := range m.GPUs {
			capable = capable || g.MIG.Capable
		}
		if capable != (err == nil) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil {
			continue
		}
		c, err := ParseConfig(name, text)
		if err != nil {
			t.Errorf("%s: %v\n%s", name, err, text)
			continue
		}
		for _, config := range c.Names() {
			targets, err := c.Targets(config, m)
			if err != nil {
				t.Errorf("%s: %s: %v", name, config, err)
			}
			for i, target := range targets {
				if target == nil {
					continue
				}
				if _, err := PlanGPU(&m.GPUs[i], gpu.ProductByName(m.GPUs[i].Name).MIG, *target, nil); err != nil {
					t.Errorf("%s: %s: %v", name, config, err)
				}
			}
		}
	}
	golden := "testdata/p4d.24xlarge.yaml"
	text, err := Generate(machinetest.Builtin(t, "p4d.24xlarge"))
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(golden, text, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(golden)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(text)); diff != "" {
		t.Error(diff)
	}
}

func FuzzParseConfig(f *testing.F) {
	f.Add([]byte(example))
	f.Add([]byte("version: v1\nmig-configs: {x: [{devices: all, mig-enabled: true, mig-devices: {1g.5gb: 7}}]}"))
	f.Add([]byte("a: &a [*a]"))
	m := machinetest.Builtin(f, "p4d.24xlarge")
	f.Fuzz(func(t *testing.T, data []byte) {
		c, err := ParseConfig("f", data)
		if err != nil {
			return
		}
		for _, name := range c.Names() {
			targets, err := c.Targets(name, m)
			if err == nil && len(targets) != len(m.GPUs) {
				t.Errorf("%d targets for %d GPUs", len(targets), len(m.GPUs))
			}
		}
	})
}
