package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/machine"
)

// simulated makes a machine in a folder.
func simulated(t *testing.T, builtin string) (*machine.Machine, string) {
	t.Helper()
	desc, err := machine.Builtin(builtin)
	if err != nil {
		t.Fatal(err)
	}
	dir := filepath.Join(t.TempDir(), "machine")
	if err := machine.Init(dir, desc, "node-1"); err != nil {
		t.Fatal(err)
	}
	m, err := machine.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := m.Close(); err != nil {
			t.Error(err)
		}
	})
	return m, dir
}

// command runs the program.
func command(args ...string) (code int, stdout, stderr string) {
	var out, errs strings.Builder
	code = run(args, &out, &errs)
	return code, out.String(), errs.String()
}

func TestCapture(t *testing.T) {
	m, dir := simulated(t, "p4d.24xlarge")
	now, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	if err := m.SetLost(now.GPUs[2].UUID, true); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "report.yaml")
	if code, _, stderr := command("capture", "--machine-dir", dir, "-o", file); code != 0 {
		t.Fatalf("exit code %d: %s", code, stderr)
	}
	_, stdout, _ := command("capture", "--machine-dir", dir)
	text, err := os.ReadFile(file)
	if err != nil || string(text) != stdout {
		t.Fatalf("%v\n%s\n%s", err, text, stdout)
	}
	desc, err := machine.ParseDescription(file, text)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(m.Host(), desc.Host); diff != "" {
		t.Error(diff)
	}
	replayed, err := machine.New(desc, "x").Read()
	if err != nil {
		t.Fatal(err)
	}
	if len(replayed.GPUs) != 8 || replayed.GPUs[2].Health.Reason != "GPU is lost" || replayed.Links.At(0, 1) != now.Links.At(0, 1) {
		t.Errorf("replayed: %+v", replayed)
	}
	for _, g := range now.GPUs {
		if strings.Contains(stdout, strings.TrimPrefix(g.UUID, "GPU-")) {
			t.Errorf("has UUID %s", g.UUID)
		}
	}
}

func TestCaptureFails(t *testing.T) {
	if code, _, stderr := command("capture", "--machine-dir", t.TempDir()); code != 1 || !strings.Contains(stderr, "is not the folder of a simulated machine") {
		t.Errorf("exit code %d: %s", code, stderr)
	}
	if code, _, _ := command("capture", "x"); code != 2 {
		t.Errorf("with an argument: exit code %d", code)
	}
	m, dir := simulated(t, "g4dn.xlarge")
	if err := m.DriverDown(true); err != nil {
		t.Fatal(err)
	}
	if code, stdout, stderr := command("capture", "--machine-dir", dir); code != 1 || stdout != "" || !strings.Contains(stderr, "the driver does not answer") {
		t.Errorf("driver down: exit code %d: %s%s", code, stdout, stderr)
	}
}

func TestReadHost(t *testing.T) {
	const meminfo = "MemTotal:       2113400012 kB\nMemFree:        1 kB\n"
	for name, c := range map[string]struct {
		files map[string]string
		want  machine.Host
		err   string
	}{
		"two sockets": {
			map[string]string{"proc/meminfo": meminfo, "sys/devices/system/cpu/online": "0-223\n", "sys/devices/system/node/has_cpu": "0-1\n"},
			machine.Host{CPUs: 224, Memory: "2113400012Ki", NUMANodes: 2}, "",
		},
		"holes": {
			map[string]string{"proc/meminfo": meminfo, "sys/devices/system/cpu/online": "0,2-5,9\n", "sys/devices/system/node/has_cpu": "0,8\n"},
			machine.Host{CPUs: 6, Memory: "2113400012Ki", NUMANodes: 9}, "",
		},
		"no NUMA":   {map[string]string{"proc/meminfo": meminfo, "sys/devices/system/cpu/online": "0"}, machine.Host{CPUs: 1, Memory: "2113400012Ki", NUMANodes: 1}, ""},
		"no CPUs":   {map[string]string{"proc/meminfo": meminfo}, machine.Host{}, "CPUs of this host"},
		"bad CPUs":  {map[string]string{"proc/meminfo": meminfo, "sys/devices/system/cpu/online": "3-1"}, machine.Host{}, `"3-1" is not a list of ranges`},
		"no memory": {map[string]string{"proc/meminfo": "MemFree: 1 kB\n", "sys/devices/system/cpu/online": "0"}, machine.Host{}, "has no MemTotal"},
		"bad NUMA":  {map[string]string{"proc/meminfo": meminfo, "sys/devices/system/cpu/online": "0", "sys/devices/system/node/has_cpu": ""}, machine.Host{}, "NUMA nodes of this host"},
	} {
		t.Run(name, func(t *testing.T) {
			root := t.TempDir()
			for file, text := range c.files {
				path := filepath.Join(root, file)
				if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			got, err := readHost(filepath.Join(root, "proc"), filepath.Join(root, "sys"))
			if c.err != "" {
				if err == nil || !strings.Contains(err.Error(), c.err) {
					t.Errorf("got %v, want %q", err, c.err)
				}
				return
			}
			if err != nil || got != c.want {
				t.Errorf("got %+v, %v; want %+v", got, err, c.want)
			}
		})
	}
	if host, err := readHost("/proc", "/sys"); err != nil || host.CPUs < 1 || host.NUMANodes < 1 {
		t.Errorf("this host: %+v, %v", host, err)
	}
}
