package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/localcluster"
)

// leftBehind lists processes, mounts and files of a cluster's folder.
func leftBehind(t *testing.T, dir string) []string {
	t.Helper()
	var left []string
	environs, err := filepath.Glob("/proc/[0-9]*/environ")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range environs {
		data, err := os.ReadFile(path)
		if err == nil && strings.Contains(string(data), "="+dir+"\x00") {
			left = append(left, "process "+filepath.Base(filepath.Dir(path)))
		}
	}
	mounts, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		t.Fatal(err)
	}
	if strings.Contains(string(mounts), dir) {
		left = append(left, "mounts")
	}
	if _, err := os.Stat(dir); err == nil {
		left = append(left, "folder "+dir)
	}
	return left
}

func eventually(t *testing.T, limit time.Duration, what string, check func() string) {
	t.Helper()
	(&cluster{t: t}).eventually(limit, what, check)
}

// TestUpStatusDown runs the command line as a user does.
func TestUpStatusDown(t *testing.T) {
	p := tools(t)
	dir := stateDir(t)
	hadKubeletDir := false
	if _, err := os.Stat("/var/lib/kubelet"); err == nil {
		hadKubeletDir = true
	}
	run := func(want int, args ...string) string {
		t.Helper()
		cmd := exec.Command(p.ashlar, append(args, "--state-dir="+dir)...)
		out, err := cmd.CombinedOutput()
		if code := cmd.ProcessState.ExitCode(); code != want {
			t.Fatalf("ashlar %v: exit code %d, want %d (%v)\n%s", args, code, want, err, out)
		}
		return string(out)
	}
	up := []string{"up", "--detach", "--node", "mixed-2"}

	run(3, "status")
	run(3, "down")
	run(2, "up")
	run(2, "up", "--node", "mixed-2=0")
	if out := run(1, "up", "--node", "mixed-3"); !strings.Contains(out, "mixed-2") {
		t.Errorf("an unknown machine's error names no near one: %s", out)
	}
	if left := leftBehind(t, dir); len(left) > 0 {
		t.Fatalf("failed starts left %v", left)
	}

	run(0, up...)
	if out := run(1, up...); !strings.Contains(out, "is running") {
		t.Errorf("second up: %s", out)
	}
	var report localcluster.Report
	if err := json.Unmarshal([]byte(run(0, "status", "-o", "json")), &report); err != nil {
		t.Fatal(err)
	}
	if len(report.Nodes) != 1 || len(report.Nodes[0].GPUs) != 4 || !report.Nodes[0].Ready || len(report.Warnings) > 0 {
		t.Errorf("status: %+v", report)
	}
	if out := run(0, "status"); !strings.Contains(out, "nvidia.com/gpu") || !strings.Contains(out, "Tesla T4") {
		t.Errorf("status: %s", out)
	}

	// A part that crashes is a warning and comes back.
	scheduler := 0
	for _, proc := range report.Processes {
		if proc.Name == "kube-scheduler" {
			scheduler = proc.PID
		}
	}
	if err := syscall.Kill(scheduler, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, 15*time.Second, "a warning about the scheduler", func() string {
		out, _ := exec.Command(p.ashlar, "status", "--state-dir="+dir).CombinedOutput()
		if strings.Contains(string(out), "kube-scheduler was started again") {
			return ""
		}
		return string(out)
	})
	run(0, "down")
	if left := leftBehind(t, dir); len(left) > 0 {
		t.Errorf("down left %v", left)
	}

	// The supervisor itself crashes: its children go with it, and down and a new
	// up remove the rest.
	run(0, up...)
	state, err := localcluster.ReadState(dir)
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(state.Supervisor, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	eventually(t, 10*time.Second, "children gone", func() string {
		for _, proc := range state.Processes {
			if _, err := os.Stat("/proc/" + strconv.Itoa(proc.PID)); err == nil {
				return proc.Name + " lives"
			}
		}
		return ""
	})
	run(3, "status")
	run(0, up...)
	run(0, "down")
	if left := leftBehind(t, dir); len(left) > 0 {
		t.Errorf("down after a crash left %v", left)
	}
	if _, err := os.Stat("/var/lib/kubelet"); (err == nil) != hadKubeletDir {
		t.Errorf("/var/lib/kubelet: there before: %v, after: %v", hadKubeletDir, err == nil)
	}
}

// TestInterrupt ends a foreground cluster as Ctrl-C does, once while it starts
// and once when it is ready.
func TestInterrupt(t *testing.T) {
	p := tools(t)
	for _, when := range []string{"starting", "Ctrl-C ends"} {
		dir := stateDir(t)
		cmd := exec.Command(p.ashlar, "up", "--node", "g4dn.xlarge", "--state-dir="+dir)
		var out output
		cmd.Stdout, cmd.Stderr = &out, &out
		if err := cmd.Start(); err != nil {
			t.Fatal(err)
		}
		eventually(t, 60*time.Second, "output", func() string {
			if strings.Contains(out.String(), when) {
				return ""
			}
			return "only " + out.String()
		})
		if err := cmd.Process.Signal(os.Interrupt); err != nil {
			t.Fatal(err)
		}
		if err := cmd.Wait(); (err == nil) != (when != "starting") {
			t.Errorf("%s: %v\n%s", when, err, out.String())
		}
		if left := leftBehind(t, dir); len(left) > 0 {
			t.Errorf("%s: left %v", when, left)
		}
	}
}

// TestDemo runs what `make demo` runs.
func TestDemo(t *testing.T) {
	p := tools(t)
	dir := stateDir(t)
	cmd := exec.Command(p.ashlar, "demo", "--state-dir="+dir, "--examples=../../examples")
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	if left := leftBehind(t, dir); len(left) > 0 {
		t.Errorf("left %v", left)
	}
}
