package visible

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

func TestVariable(t *testing.T) {
	for resource, want := range map[string]string{
		"nvidia.com/gpu":               "ASHLAR_DEVICES_NVIDIA_COM_GPU",
		"nvidia.com/mig-1g.10gb.me":    "ASHLAR_DEVICES_NVIDIA_COM_MIG_1G_10GB_ME",
		"nvidia.com/gpu.shared":        "ASHLAR_DEVICES_NVIDIA_COM_GPU_SHARED",
		"Example.org/A100-SXM4-40GB-ä": "ASHLAR_DEVICES_EXAMPLE_ORG_A100_SXM4_40GB__",
	} {
		if got := Variable(resource); got != want {
			t.Errorf("%s: %s, want %s", resource, got, want)
		}
	}
}

func TestAllocated(t *testing.T) {
	got, err := Allocated([]string{
		"PATH=/bin", Variable("b/gpu") + "=GPU-b::0,GPU-b::3", "ASHLAR_DEVICES=x", Variable("a/mig") + "=MIG-a",
	})
	want := []Allocation{
		{"ASHLAR_DEVICES_A_MIG", []gpu.DeviceID{{Base: "MIG-a", Slot: gpu.NoSlot}}},
		{"ASHLAR_DEVICES_B_GPU", []gpu.DeviceID{{Base: "GPU-b", Slot: 0}, {Base: "GPU-b", Slot: 3}}},
	}
	if diff := cmp.Diff(want, got); diff != "" || err != nil {
		t.Error(err, diff)
	}
	for _, value := range []string{"", "all", "GPU-a,", "GPU-a::x"} {
		if _, err := Allocated([]string{"ASHLAR_DEVICES_X=" + value}); err == nil || !strings.Contains(err.Error(), "$ASHLAR_DEVICES_X: device id") {
			t.Errorf("%q: %v", value, err)
		}
	}
}

func TestNodes(t *testing.T) {
	root := t.TempDir()
	if _, err := Nodes(root); err == nil {
		t.Error("no folder dev is no error")
	}
	for _, name := range []string{"nvidia10", "nvidia2", "nvidia0", "nvidiactl", "nvidia-uvm", "nvidia02", "nvidia-1", "nvidia+3", "null"} {
		file := filepath.Join(root, "dev", name)
		if err := os.MkdirAll(filepath.Dir(file), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(file, nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	got, err := Nodes(root)
	if diff := cmp.Diff([]int{0, 2, 10}, got); diff != "" || err != nil {
		t.Error(err, diff)
	}
}

// machine has GPUs a and b with minors 4 and 5, and c with minor 6 and MIG devices c0
// and c1.
func machine() gpu.Machine {
	return gpu.Machine{GPUs: []gpu.GPU{
		{Index: 0, UUID: "GPU-a", Minor: 4, Name: "A"},
		{Index: 1, UUID: "GPU-b", Minor: 5, Name: "A"},
		{Index: 2, UUID: "GPU-c", Minor: 6, Name: "C", MIG: gpu.MIGState{Capable: true, Enabled: true, Devices: []gpu.MIGDevice{
			{Index: 0, UUID: "MIG-c0", Profile: "1g.5gb"}, {Index: 1, UUID: "MIG-c1", Profile: "1g.5gb"},
		}}},
	}}
}

// only is the machine as a container sees it that is given some devices.
func only(uuids ...string) []gpu.GPU {
	m := machine()
	seen, err := Simulated(&m, strings.Join(uuids, ","), nil)
	if err != nil {
		panic(err)
	}
	return seen
}

func given(ids ...string) []Allocation {
	if len(ids) == 0 {
		return nil
	}
	a, err := Allocated([]string{Variable("r/gpu") + "=" + strings.Join(ids, ",")})
	if err != nil {
		panic(err)
	}
	return a
}

func TestCompare(t *testing.T) {
	lost := only("GPU-a")
	lost[0].Health = gpu.Health{State: gpu.Lost, Reason: "GPU is lost"}
	cut := only("GPU-a")
	cut[0].MIG = gpu.MIGState{Capable: true, Enabled: true}
	for name, c := range map[string]struct {
		given []Allocation
		seen  Seen
		want  []string // a part of each problem
	}{
		"nothing":                    {nil, Seen{}, nil},
		"nothing and no driver":      {nil, Seen{Driver: "no library"}, nil},
		"a GPU":                      {given("GPU-a"), Seen{GPUs: only("GPU-a"), Nodes: []int{4}}, nil},
		"slots of a GPU":             {given("GPU-a::0", "GPU-a::1"), Seen{GPUs: only("GPU-a"), Nodes: []int{4}}, nil},
		"two resources":              {append(given("GPU-a"), given("MIG-c1")...), Seen{GPUs: only("GPU-a", "MIG-c1"), Nodes: []int{4, 6}}, nil},
		"one GPU by two resources":   {[]Allocation{{"X", given("GPU-a")[0].Devices}, {"Y", given("GPU-a::0")[0].Devices}}, Seen{GPUs: only("GPU-a"), Nodes: []int{4}}, nil},
		"a MIG device":               {given("MIG-c1"), Seen{GPUs: only("MIG-c1"), Nodes: []int{6}}, nil},
		"slots of a MIG device":      {given("MIG-c1::0", "MIG-c1::2"), Seen{GPUs: only("MIG-c1"), Nodes: []int{6}}, nil},
		"no nodes, as without Linux": {given("GPU-a"), Seen{GPUs: only("GPU-a")}, nil},

		"no driver":       {given("GPU-a", "GPU-b"), Seen{Driver: "no library", Nodes: []int{4, 5}}, []string{"2 devices were given, and the driver cannot be asked: no library"}},
		"fewer":           {given("GPU-a", "GPU-b"), Seen{GPUs: only("GPU-b"), Nodes: []int{5}}, []string{"GPU-a was given (ASHLAR_DEVICES_R_GPU) and is not visible"}},
		"more":            {given("GPU-a"), Seen{GPUs: only("GPU-a", "GPU-b"), Nodes: []int{4, 5}}, []string{"GPU-b is visible and was not given", "/dev/nvidia5"}},
		"another":         {given("GPU-a"), Seen{GPUs: only("GPU-b"), Nodes: []int{5}}, []string{"GPU-a was given (ASHLAR_DEVICES_R_GPU) and is not", "GPU-b is visible and was not", "/dev/nvidia5"}},
		"all of nothing":  {nil, Seen{GPUs: machine().GPUs, Nodes: []int{4, 5, 6}}, []string{"GPU-a is", "GPU-b is", "MIG-c0 is", "MIG-c1 is", "nvidia4", "nvidia5", "nvidia6"}},
		"nodes alone":     {given("GPU-a"), Seen{GPUs: only("GPU-a"), Nodes: []int{4, 5}}, []string{"the device node /dev/nvidia5 is of no GPU"}},
		"nodes, none":     {nil, Seen{Driver: "no library", Nodes: []int{0}}, []string{"the device node /dev/nvidia0 is of no GPU"}},
		"other MIG":       {given("MIG-c1"), Seen{GPUs: only("MIG-c0"), Nodes: []int{6}}, []string{"MIG-c1 was given (ASHLAR_DEVICES_R_GPU) and is not visible", "MIG-c0 is visible and was not", "nvidia6"}},
		"all MIG":         {given("MIG-c1"), Seen{GPUs: only("MIG-c0", "MIG-c1"), Nodes: []int{6}}, []string{"MIG-c0 is visible and was not given"}},
		"parent of a MIG": {given("MIG-c1"), Seen{GPUs: only("GPU-a", "MIG-c1"), Nodes: []int{4, 6}}, []string{"GPU-a is visible", "nvidia4"}},
		"bare parent":     {given("MIG-c1"), Seen{GPUs: only("GPU-c"), Nodes: []int{6}}, []string{"MIG-c1 was given (ASHLAR_DEVICES_R_GPU) and is not visible", "nvidia6"}},
		"MIG mode since":  {given("GPU-a"), Seen{GPUs: cut, Nodes: []int{4}}, []string{"GPU-a was given (ASHLAR_DEVICES_R_GPU) and is in MIG mode"}},
		"lost":            {given("GPU-a"), Seen{GPUs: lost, Nodes: []int{4}}, []string{"GPU-a was given and does not answer: GPU is lost"}},
	} {
		t.Run(name, func(t *testing.T) {
			got := Compare(c.given, c.seen)
			if got.OK != (len(c.want) == 0) || len(got.Problems) != len(c.want) {
				t.Fatalf("ok %v, problems %q; want %q", got.OK, got.Problems, c.want)
			}
			for i, part := range c.want {
				if !strings.Contains(got.Problems[i], part) {
					t.Errorf("problem %q, want %q", got.Problems[i], part)
				}
			}
		})
	}
}

func TestReport(t *testing.T) {
	got := Compare(given("GPU-a::1", "MIG-c1"), Seen{GPUs: only("GPU-a", "GPU-b"), Nodes: []int{4}})
	want := Report{
		Devices: []Device{
			{UUID: "GPU-a", Model: "A", Variables: []string{"ASHLAR_DEVICES_R_GPU"}, Visible: true},
			{UUID: "MIG-c1", Variables: []string{"ASHLAR_DEVICES_R_GPU"}},
			{UUID: "GPU-b", Model: "A", Visible: true},
		},
		Nodes: []string{"/dev/nvidia4"},
	}
	if diff := cmp.Diff(want, got, cmpopts.IgnoreFields(Report{}, "Problems")); diff != "" {
		t.Error(diff)
	}
	var out strings.Builder
	if err := got.WriteTable(&out); err != nil {
		t.Fatal(err)
	}
	const table = `DEVICE  GIVEN  VISIBLE  MODEL
GPU-a   yes    yes      A
MIG-c1  yes    no       -
GPU-b   no     yes      A
device nodes: /dev/nvidia4
problem: MIG-c1 was given (ASHLAR_DEVICES_R_GPU) and is not visible
problem: GPU-b is visible and was not given: the pod is privileged, or its image or manifest sets NVIDIA_VISIBLE_DEVICES
`
	if diff := cmp.Diff(table, out.String()); diff != "" {
		t.Error(diff)
	}
}

func TestSimulated(t *testing.T) {
	m := machine()
	for _, c := range []struct {
		value string
		nodes []int
		want  string // UUIDs
		err   string
	}{
		{"all", nil, "GPU-a GPU-b GPU-c MIG-c0 MIG-c1", ""},
		{"none", []int{4}, "", ""},
		{"", []int{5}, "GPU-b", ""},
		{"void", []int{4, 5}, "GPU-a GPU-b", ""},
		{"void", nil, "", ""},
		{"/var/run/nvidia-container-devices", []int{4}, "GPU-a", ""},
		{"void", []int{6}, "", "GPU 2 of the simulated machine is cut"},
		{"GPU-b,2:1", nil, "GPU-b GPU-c MIG-c1", ""},
		{"0,MIG-c0", nil, "GPU-a GPU-c MIG-c0", ""},
		{"3,GPU-a,2:2", nil, "", "no 3, 2:2"},
	} {
		got, err := Simulated(&m, c.value, c.nodes)
		if (err == nil) != (c.err == "") || err != nil && !strings.Contains(err.Error(), c.err) {
			t.Errorf("%q: %v, want %q", c.value, err, c.err)
		}
		var uuids []string
		for _, g := range got {
			uuids = append(uuids, g.UUID)
			for _, d := range g.MIG.Devices {
				uuids = append(uuids, d.UUID)
			}
		}
		if strings.Join(uuids, " ") != c.want {
			t.Errorf("%q: %v, want %s", c.value, uuids, c.want)
		}
	}
	if len(m.GPUs[2].MIG.Devices) != 2 {
		t.Error("the machine was changed")
	}
}

// A container is well if and only if it sees the devices that it was given, and has
// no device node of another GPU.
func TestCompareIsSetEquality(t *testing.T) {
	m := machine()
	devices := []string{"GPU-a", "GPU-b", "MIG-c0", "MIG-c1"}
	parent := map[string]int{"GPU-a": 4, "GPU-b": 5, "MIG-c0": 6, "MIG-c1": 6}
	rapid.Check(t, func(t *rapid.T) {
		pick := func(what string) []string {
			var some []string
			for _, d := range devices {
				if rapid.Bool().Draw(t, what+" "+d) {
					some = append(some, d)
				}
			}
			return some
		}
		gave, sees := pick("given"), pick("visible")
		value := strings.Join(sees, ",")
		if value == "" {
			value = "none"
		}
		gpus, err := Simulated(&m, value, nil)
		if err != nil {
			t.Fatal(err)
		}
		seen := Seen{GPUs: gpus}
		want := cmp.Equal(gave, sees)
		for minor := 4; minor <= 6; minor++ {
			if !rapid.Bool().Draw(t, "node") {
				continue
			}
			seen.Nodes = append(seen.Nodes, minor)
			foreign := true
			for _, d := range gave {
				foreign = foreign && parent[d] != minor
			}
			want = want && !foreign
		}
		if got := Compare(given(gave...), seen); got.OK != want {
			t.Fatalf("given %v, visible %v, nodes %v: ok %v, want %v: %q", gave, sees, seen.Nodes, got.OK, want, got.Problems)
		}
	})
}
