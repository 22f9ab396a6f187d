package driver

import (
	"errors"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"tags.cncf.io/container-device-interface/specs-go"

	"github.com/ashlar-gpu/ashlar/internal/cdi"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

func options(t *testing.T, class cdi.Class) Options {
	return Options{Class: class, DriverRoot: t.TempDir(), HookPath: "/usr/bin/nvidia-cdi-hook", Log: slog.New(slog.DiscardHandler)}
}

// charDevice makes a device node, with the number of /dev/null.
func charDevice(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	err := unix.Mknod(path, unix.S_IFCHR|0o666, int(unix.Mkdev(1, 3)))
	if errors.Is(err, unix.EPERM) {
		t.Skip("device nodes can be made by root only")
	}
	if err != nil {
		t.Fatal(err)
	}
}

func TestSpecOfAFeature(t *testing.T) {
	o := options(t, cdi.MOFED)
	o.HostDriverRoot = "/run/nvidia/driver"
	charDevice(t, filepath.Join(o.DriverRoot, "dev/infiniband/uverbs0"))
	got, err := Spec(&gpu.Machine{}, o)
	if err != nil {
		t.Fatal(err)
	}
	if got.Kind != "k8s.device-plugin.nvidia.com/mofed" || len(got.Devices) != 1 || got.Devices[0].Name != "all" {
		t.Fatalf("got %+v; want the device all of kind mofed", got)
	}
	want := []*specs.DeviceNode{{Path: "/dev/infiniband/uverbs0", HostPath: "/run/nvidia/driver/dev/infiniband/uverbs0", Major: 1, Minor: 3}}
	nodes := got.Devices[0].ContainerEdits.DeviceNodes
	for _, n := range nodes {
		n.FileMode, n.GID, n.Permissions = nil, nil, ""
	}
	if diff := cmp.Diff(want, nodes); diff != "" {
		t.Errorf("device nodes (-want +got):\n%s", diff)
	}
	if env := got.ContainerEdits.Env; !cmp.Equal(env, []string{"NVIDIA_VISIBLE_DEVICES=void"}) {
		t.Errorf("env = %v", env)
	}
}

func TestSpecSaysWhatIsMissing(t *testing.T) {
	machine := &gpu.Machine{
		GPUs:  []gpu.GPU{{UUID: "GPU-a"}, {Index: 1, UUID: "GPU-b", Health: gpu.Health{State: gpu.Lost}}},
		Links: gpu.NewLinks(2),
	}
	lost := &gpu.Machine{GPUs: []gpu.GPU{{UUID: "GPU-b", Health: gpu.Health{State: gpu.Lost}}}, Links: gpu.NewLinks(1)}
	for name, test := range map[string]struct {
		machine *gpu.Machine
		class   cdi.Class
		want    string
	}{
		"no driver":      {machine, cdi.GPU, "gpu=GPU-a"},
		"all lost":       {lost, cdi.GPU, "no GPU or MIG device to describe"},
		"no module":      {machine, cdi.GDS, "gds=all: no device node below"},
		"unknown class":  {machine, "gpus", `CDI class "gpus": want gpu, gds, mofed or gdrcopy`},
		"feature absent": {machine, cdi.GDRCopy, "gdrcopy=all"},
	} {
		t.Run(name, func(t *testing.T) {
			spec, err := Spec(test.machine, options(t, test.class))
			if spec != nil || err == nil || !strings.Contains(err.Error(), test.want) {
				t.Fatalf("Spec = %v, %v; want no spec and an error with %q", spec, err, test.want)
			}
			if strings.Contains(err.Error(), "GPU-b") {
				t.Errorf("%v: names a lost GPU", err)
			}
		})
	}
}

func TestUUIDs(t *testing.T) {
	m := &gpu.Machine{GPUs: []gpu.GPU{
		{UUID: "GPU-a"},
		{UUID: "GPU-b", MIG: gpu.MIGState{Enabled: true, Devices: []gpu.MIGDevice{{UUID: "MIG-1"}, {UUID: "MIG-2"}}}},
		{UUID: "GPU-c", MIG: gpu.MIGState{Enabled: true}},
		{UUID: "GPU-d", Health: gpu.Health{State: gpu.Unhealthy}},
		{UUID: "GPU-e", Health: gpu.Health{State: gpu.Lost}},
	}}
	if diff := cmp.Diff([]string{"GPU-a", "MIG-1", "MIG-2", "GPU-d"}, uuids(m)); diff != "" {
		t.Errorf("uuids (-want +got):\n%s", diff)
	}
}
