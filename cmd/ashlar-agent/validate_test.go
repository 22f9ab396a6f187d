package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/visible"
)

// devRoot makes the device nodes of GPUs as files.
func devRoot(t *testing.T, minors ...int) string {
	t.Helper()
	root := t.TempDir()
	if err := os.Mkdir(filepath.Join(root, "dev"), 0o755); err != nil {
		t.Fatal(err)
	}
	for _, minor := range minors {
		if err := os.WriteFile(filepath.Join(root, "dev", fmt.Sprintf("nvidia%d", minor)), nil, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return root
}

func TestValidate(t *testing.T) {
	m, dir := simulated(t, "dgx-h100")
	now, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	a, b, c := now.GPUs[0].UUID, now.GPUs[1].UUID, now.GPUs[2].UUID
	if err := m.SetMIGMode(c, true); err != nil {
		t.Fatal(err)
	}
	var migs []string
	for _, start := range []int{0, 4} {
		d, err := m.CreateMIG(c, gpu.MIGInstance{ProfileID: 9, Placement: gpu.Placement{Start: start, Size: 4}})
		if err != nil {
			t.Fatal(err)
		}
		migs = append(migs, d.UUID)
	}
	gpus, cuts := visible.Variable("nvidia.com/gpu"), visible.Variable("nvidia.com/mig-3g.40gb")
	for name, test := range map[string]struct {
		env   map[string]string
		nodes []int
		code  int
		want  string // in the output
	}{
		"nothing":              {nil, nil, 0, "the container sees what it was given"},
		"CDI":                  {map[string]string{gpus: a + "::3," + b + "::0", "NVIDIA_VISIBLE_DEVICES": "void"}, []int{0, 1}, 0, a + "  yes    yes"},
		"environment":          {map[string]string{gpus: b, "NVIDIA_VISIBLE_DEVICES": b}, nil, 0, b + "  yes    yes"},
		"GPU and MIG device":   {map[string]string{gpus: a, cuts: migs[1], "NVIDIA_VISIBLE_DEVICES": a + ",2:1"}, []int{0, 2}, 0, migs[1] + "  yes    yes"},
		"privileged":           {map[string]string{gpus: a}, []int{0, 1}, 1, b + " is visible and was not given"},
		"all":                  {map[string]string{cuts: migs[0], "NVIDIA_VISIBLE_DEVICES": "all"}, []int{2}, 1, migs[1] + " is visible and was not given"},
		"not injected":         {map[string]string{gpus: a}, nil, 1, a + " was given (ASHLAR_DEVICES_NVIDIA_COM_GPU) and is not visible"},
		"a node too many":      {map[string]string{gpus: a, "NVIDIA_VISIBLE_DEVICES": a}, []int{0, 7}, 1, "the device node /dev/nvidia7 is of no GPU"},
		"the other MIG device": {map[string]string{cuts: migs[0], "NVIDIA_VISIBLE_DEVICES": migs[1]}, []int{2}, 1, migs[0] + " was given"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Setenv("NVIDIA_VISIBLE_DEVICES", "")
			for k, v := range test.env {
				t.Setenv(k, v)
			}
			root := devRoot(t, test.nodes...)
			code, stdout, stderr := command("validate", "--machine-dir", dir, "--dev-root", root)
			if code != test.code || !strings.Contains(stdout, test.want) {
				t.Errorf("exit code %d, want %d and %q:\n%s%s", code, test.code, test.want, stdout, stderr)
			}
			if (code == 0) != (stderr == "") {
				t.Errorf("exit code %d, stderr %q", code, stderr)
			}
			asJSON, stdout, _ := command("validate", "--machine-dir", dir, "--dev-root", root, "-o", "json")
			var report visible.Report
			if err := json.Unmarshal([]byte(stdout), &report); err != nil {
				t.Fatalf("%v:\n%s", err, stdout)
			}
			if asJSON != code || report.OK != (code == 0) || report.OK != (len(report.Problems) == 0) {
				t.Errorf("exit code %d with JSON, %d with a table: %+v", asJSON, code, report)
			}
		})
	}
	t.Run("driver down", func(t *testing.T) {
		if err := m.DriverDown(true); err != nil {
			t.Fatal(err)
		}
		root := devRoot(t)
		if code, stdout, stderr := command("validate", "--machine-dir", dir, "--dev-root", root); code != 0 {
			t.Errorf("nothing given: exit code %d\n%s%s", code, stdout, stderr)
		}
		t.Setenv(gpus, a)
		if code, stdout, _ := command("validate", "--machine-dir", dir, "--dev-root", root); code != 1 || !strings.Contains(stdout, "the driver cannot be asked: ") {
			t.Errorf("exit code %d\n%s", code, stdout)
		}
	})
}

func TestValidateJSON(t *testing.T) {
	_, dir := simulated(t, "g4dn.xlarge")
	code, stdout, _ := command("validate", "--machine-dir", dir, "--dev-root", devRoot(t), "-o", "json")
	const want = `{
  "ok": true,
  "devices": [],
  "nodes": [],
  "problems": []
}
`
	if diff := cmp.Diff(want, stdout); diff != "" || code != 0 {
		t.Errorf("exit code %d\n%s", code, diff)
	}
}

func TestValidateFails(t *testing.T) {
	_, dir := simulated(t, "g4dn.xlarge")
	root := devRoot(t)
	for name, c := range map[string]struct {
		env  string
		args []string
		code int
		want string
	}{
		"format":    {"", []string{"-o", "yaml"}, 2, "-o yaml: want table or json"},
		"argument":  {"", []string{"x"}, 2, "x"},
		"flag":      {"", []string{"--all"}, 2, "--all"},
		"no nodes":  {"", []string{"--dev-root", filepath.Join(root, "none")}, 1, "device nodes"},
		"no folder": {"", []string{"--machine-dir", root, "--dev-root", root}, 1, "is not the folder of a simulated machine"},
		"variable":  {"gpu0", []string{"--machine-dir", dir, "--dev-root", root}, 1, "$ASHLAR_DEVICES_X: device id"},
	} {
		t.Run(name, func(t *testing.T) {
			if c.env != "" {
				t.Setenv("ASHLAR_DEVICES_X", c.env)
			}
			code, _, stderr := command(append([]string{"validate"}, c.args...)...)
			if code != c.code || !strings.Contains(stderr, c.want) {
				t.Errorf("exit code %d, want %d and %q: %s", code, c.code, c.want, stderr)
			}
		})
	}
}
