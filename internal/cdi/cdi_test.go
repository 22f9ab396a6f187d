package cdi

import (
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"
	"tags.cncf.io/container-device-interface/pkg/cdi"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

var update = flag.Bool("update", false, "write the golden files")

func machine() *gpu.Machine {
	return &gpu.Machine{
		GPUs: []gpu.GPU{
			{Index: 0, UUID: "GPU-a", Minor: 3},
			{Index: 1, UUID: "GPU-b", Minor: 1, MIG: gpu.MIGState{Enabled: true, Devices: []gpu.MIGDevice{
				{Index: 0, UUID: "MIG-b0"}, {Index: 1, UUID: "MIG-b1"},
			}}},
			{Index: 2, UUID: "GPU-c", Minor: 0, MIG: gpu.MIGState{Enabled: true}},
		},
		Links: gpu.NewLinks(3),
	}
}

func simulated(t *testing.T, m *gpu.Machine, class Class, indices bool) *specs.Spec {
	t.Helper()
	spec, err := Simulated(m, class, indices)
	if err != nil {
		t.Fatal(err)
	}
	return spec
}

func TestSimulated(t *testing.T) {
	for name, test := range map[string]struct {
		class   Class
		indices bool
	}{
		"uuid": {GPU, false}, "index": {GPU, true}, "gds": {GDS, false}, "mofed": {MOFED, true}, "gdrcopy": {GDRCopy, false},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := Write(dir, simulated(t, machine(), test.class, test.indices), nil); err != nil {
				t.Fatal(err)
			}
			got, err := os.ReadFile(filepath.Join(dir, "k8s.device-plugin.nvidia.com-"+string(test.class)+".json"))
			if err != nil {
				t.Fatal(err)
			}
			golden := filepath.Join("testdata", name+".json")
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("spec (-want +got), run with -update if it is right:\n%s", diff)
			}
		})
	}
	if _, err := Simulated(machine(), "gpus", false); err == nil || !strings.Contains(err.Error(), `"gpus"`) {
		t.Errorf("class gpus: error is %v", err)
	}
}

// TestRuntimeResolvesNames asks the library that container runtimes use.
func TestRuntimeResolvesNames(t *testing.T) {
	dir := t.TempDir()
	if err := Write(dir, simulated(t, machine(), GPU, true), nil); err != nil {
		t.Fatal(err)
	}
	cache, err := cdi.NewCache(cdi.WithSpecDirs(dir), cdi.WithAutoRefresh(false))
	if err != nil {
		t.Fatal(err)
	}
	want := []string{
		"k8s.device-plugin.nvidia.com/gpu=0", "k8s.device-plugin.nvidia.com/gpu=1:0", "k8s.device-plugin.nvidia.com/gpu=1:1",
		"k8s.device-plugin.nvidia.com/gpu=GPU-a", "k8s.device-plugin.nvidia.com/gpu=MIG-b0", "k8s.device-plugin.nvidia.com/gpu=MIG-b1",
	}
	if diff := cmp.Diff(want, cache.ListDevices()); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
	if cache.GetDevice(Name("MIG-b1")) == nil {
		t.Errorf("%s is not found", Name("MIG-b1"))
	}
}

// written returns the names in the file of the kind and nil where there is no
// file.
func written(t *testing.T, dir string) []string {
	t.Helper()
	path, err := Path(dir, Kind)
	if err != nil {
		t.Fatal(err)
	}
	spec, err := cdi.ReadSpec(path, 0)
	if os.IsNotExist(err) {
		return nil
	}
	if err != nil {
		t.Fatal(err)
	}
	var names []string
	for _, d := range spec.Devices {
		names = append(names, d.Name)
	}
	return names
}

func TestWriteKeepsWhatIsInUse(t *testing.T) {
	dir := t.TempDir()
	m := machine()
	write := func(keep ...string) {
		t.Helper()
		if err := Write(dir, simulated(t, m, GPU, false), keep); err != nil {
			t.Fatal(err)
		}
	}
	write()
	m.GPUs[1].MIG.Devices = []gpu.MIGDevice{{Index: 0, UUID: "MIG-new"}}
	write("MIG-b1", "GPU-a", "GPU-elsewhere")
	if diff := cmp.Diff([]string{"GPU-a", "MIG-new", "MIG-b1"}, written(t, dir)); diff != "" {
		t.Errorf("after a change of geometry (-want +got):\n%s", diff)
	}
	m.GPUs = nil
	write("MIG-b1") // kept from a file in which it was kept already
	if diff := cmp.Diff([]string{"MIG-b1"}, written(t, dir)); diff != "" {
		t.Errorf("with one holder (-want +got):\n%s", diff)
	}
	write()
	if names := written(t, dir); names != nil {
		t.Errorf("without devices the file has %v; want no file", names)
	}
	write() // no file to remove
}

func TestWriteTouchesNothingWithoutAChange(t *testing.T) {
	dir := t.TempDir()
	spec := simulated(t, machine(), GPU, false)
	if err := Write(dir, spec, nil); err != nil {
		t.Fatal(err)
	}
	path, _ := Path(dir, Kind)
	before, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, spec, []string{"GPU-a"}); err != nil {
		t.Fatal(err)
	}
	after, err := os.Stat(path)
	if err != nil {
		t.Fatal(err)
	}
	if !os.SameFile(before, after) {
		t.Error("the file was replaced by an equal one")
	}
	if mode := after.Mode().Perm(); mode != 0o644 {
		t.Errorf("mode = %o, want 644", mode)
	}
}

func TestWriteReplacesABrokenFile(t *testing.T) {
	dir := t.TempDir()
	path, _ := Path(dir, Kind)
	if err := os.WriteFile(path, []byte("{"), 0o644); err != nil {
		t.Fatal(err)
	}
	if err := Write(dir, simulated(t, machine(), GPU, false), []string{"MIG-old"}); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"GPU-a", "MIG-b0", "MIG-b1"}, written(t, dir)); diff != "" {
		t.Errorf("devices (-want +got):\n%s", diff)
	}
}

func TestWriteRefusesWhatARuntimeWouldRefuse(t *testing.T) {
	twice := simulated(t, machine(), GPU, false)
	twice.Devices = append(twice.Devices, twice.Devices[0])
	for name, spec := range map[string]*specs.Spec{
		"a name twice": twice,
		"no edits":     {Kind: Kind, Devices: []specs.Device{{Name: "GPU-x"}}},
		"bad name":     {Kind: Kind, Devices: []specs.Device{device("GPU x", "/dev/null")}},
		"bad kind":     {Kind: "gpu", Devices: []specs.Device{device("GPU-x", "/dev/null")}},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			good := simulated(t, machine(), GPU, false)
			if err := Write(dir, good, nil); err != nil {
				t.Fatal(err)
			}
			if err := Write(dir, spec, nil); err == nil {
				t.Fatal("no error")
			}
			if diff := cmp.Diff([]string{"GPU-a", "MIG-b0", "MIG-b1"}, written(t, dir)); diff != "" {
				t.Errorf("the good file changed (-want +got):\n%s", diff)
			}
			entries, err := os.ReadDir(dir)
			if err != nil {
				t.Fatal(err)
			}
			if len(entries) != 1 {
				t.Errorf("the folder has %v; want the good file alone", entries)
			}
		})
	}
}

func TestWriteNamesTheFolderThatItCannotUse(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	if err := os.WriteFile(file, nil, 0o644); err != nil {
		t.Fatal(err)
	}
	err := Write(filepath.Join(file, "cdi"), simulated(t, machine(), GPU, false), nil)
	if err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("error is %v; want one that names %s", err, file)
	}
}

// TestWriteSequences writes machines that change at random. Whatever comes, the
// file has the machine's devices and those of the file before that are kept.
func TestWriteSequences(t *testing.T) {
	all := []string{"GPU-a", "GPU-b", "GPU-c", "GPU-d"}
	rapid.Check(t, func(rt *rapid.T) {
		dir, err := os.MkdirTemp(t.TempDir(), "cdi")
		if err != nil {
			rt.Fatal(err)
		}
		var before []string
		for range rapid.IntRange(1, 6).Draw(rt, "steps") {
			subset := rapid.SliceOfDistinct(rapid.SampledFrom(all), rapid.ID[string])
			now, keep := subset.Draw(rt, "machine"), subset.Draw(rt, "keep")
			m := &gpu.Machine{}
			for i, uuid := range now {
				m.GPUs = append(m.GPUs, gpu.GPU{Index: i, UUID: uuid, Minor: i})
			}
			if err := Write(dir, simulated(t, m, GPU, false), keep); err != nil {
				rt.Fatal(err)
			}
			var want []string
			for _, uuid := range all {
				if slices.Contains(now, uuid) || slices.Contains(before, uuid) && slices.Contains(keep, uuid) {
					want = append(want, uuid)
				}
			}
			before = slices.Sorted(slices.Values(written(t, dir)))
			if !slices.Equal(want, before) {
				rt.Fatalf("file has %v, want %v", before, want)
			}
		}
	})
}

// FuzzWrite puts any text in the place of the old file.
func FuzzWrite(f *testing.F) {
	good, err := json.Marshal(&specs.Spec{Version: "0.3.0", Kind: Kind, Devices: []specs.Device{device("MIG-old", "/dev/null")}})
	if err != nil {
		f.Fatal(err)
	}
	f.Add(good)
	f.Add([]byte("devices: [{name: MIG-old}]"))
	f.Add([]byte("null"))
	f.Fuzz(func(t *testing.T, old []byte) {
		dir := t.TempDir()
		path, _ := Path(dir, Kind)
		if err := os.WriteFile(path, old, 0o644); err != nil {
			t.Fatal(err)
		}
		if err := Write(dir, simulated(t, machine(), GPU, false), []string{"MIG-old"}); err != nil {
			t.Fatal(err)
		}
		if names := written(t, dir); !slices.Contains(names, "MIG-b1") {
			t.Errorf("devices are %v", names)
		}
	})
}
