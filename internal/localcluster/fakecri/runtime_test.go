package fakecri

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	cri "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// client starts a runtime and connects to it.
func client(t *testing.T) (*Runtime, cri.RuntimeServiceClient, string) {
	t.Helper()
	dir := t.TempDir()
	socket := filepath.Join(dir, "s")
	r, err := Start(socket, filepath.Join(dir, "logs"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(r.Stop)
	conn, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	return r, cri.NewRuntimeServiceClient(conn), filepath.Join(dir, "logs")
}

// run creates and starts a container in a sandbox with the annotations.
func run(t *testing.T, c cri.RuntimeServiceClient, name string, annotations map[string]string) string {
	t.Helper()
	sandbox := &cri.PodSandboxConfig{
		Metadata:     &cri.PodSandboxMetadata{Name: "pod-" + name, Namespace: "ns", Uid: "uid-" + name},
		LogDirectory: "/var/log/pods/" + name, Annotations: annotations,
	}
	s, err := c.RunPodSandbox(t.Context(), &cri.RunPodSandboxRequest{Config: sandbox})
	if err != nil {
		t.Fatal(err)
	}
	created, err := c.CreateContainer(t.Context(), &cri.CreateContainerRequest{
		PodSandboxId: s.PodSandboxId, SandboxConfig: sandbox,
		Config: &cri.ContainerConfig{
			Metadata: &cri.ContainerMetadata{Name: name}, Image: &cri.ImageSpec{Image: "i", UserSpecifiedImage: "image:1"},
			LogPath: name + "/0.log", Command: []string{"train"}, Args: []string{"fast"},
			Envs:       []*cri.KeyValue{{Key: "NVIDIA_VISIBLE_DEVICES", Value: []byte("GPU-1")}},
			CDIDevices: []*cri.CDIDevice{{Name: "vendor/gpu=GPU-1"}},
			Devices:    []*cri.Device{{HostPath: "/dev/nvidia0"}},
			Mounts:     []*cri.Mount{{ContainerPath: "/in", HostPath: "/out"}},
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.StartContainer(t.Context(), &cri.StartContainerRequest{ContainerId: created.ContainerId}); err != nil {
		t.Fatal(err)
	}
	return created.ContainerId
}

func statusOf(t *testing.T, c cri.RuntimeServiceClient, id string) *cri.ContainerStatus {
	t.Helper()
	resp, err := c.ContainerStatus(t.Context(), &cri.ContainerStatusRequest{ContainerId: id})
	if err != nil {
		t.Fatal(err)
	}
	return resp.Status
}

func awaitExit(t *testing.T, c cri.RuntimeServiceClient, id string) *cri.ContainerStatus {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(10 * time.Millisecond) {
		if s := statusOf(t, c, id); s.State == cri.ContainerState_CONTAINER_EXITED {
			return s
		}
	}
	t.Fatal("the container does not end")
	return nil
}

func TestContainersAreRecorded(t *testing.T) {
	r, c, logs := client(t)
	id := run(t, c, "a", nil)
	list := r.Containers()
	if len(list) != 1 {
		t.Fatalf("%d containers, want 1", len(list))
	}
	got := list[0]
	if got.Pod != "pod-a" || got.Namespace != "ns" || got.PodUID != "uid-a" || got.Image != "image:1" || !got.Running ||
		got.Env["NVIDIA_VISIBLE_DEVICES"] != "GPU-1" || got.CDIDevices[0] != "vendor/gpu=GPU-1" ||
		got.Devices[0] != "/dev/nvidia0" || got.Mounts["/in"] != "/out" || strings.Join(got.Command, " ") != "train fast" {
		t.Errorf("recorded %+v", got)
	}
	log, err := os.ReadFile(filepath.Join(logs, "a", "a", "0.log"))
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{"CDI device vendor/gpu=GPU-1", "NVIDIA_VISIBLE_DEVICES=GPU-1", "device node /dev/nvidia0", "stdout F"} {
		if !strings.Contains(string(log), want) {
			t.Errorf("the log lacks %q:\n%s", want, log)
		}
	}
	if got := statusOf(t, c, id).LogPath; got != "/var/log/pods/a/a/0.log" {
		t.Errorf("log path is %s", got)
	}
	if _, err := c.RemoveContainer(t.Context(), &cri.RemoveContainerRequest{ContainerId: id}); err != nil {
		t.Fatal(err)
	}
	if list := r.Containers(); len(list) != 0 {
		t.Errorf("after removal: %+v", list)
	}
}

func TestContainersEnd(t *testing.T) {
	r, c, _ := client(t)
	done := run(t, c, "done", map[string]string{DurationAnnotation: "20ms"})
	if s := awaitExit(t, c, done); s.ExitCode != 0 || s.Reason != "Completed" || s.FinishedAt == 0 {
		t.Errorf("ended as %+v", s)
	}
	failed := run(t, c, "failed", map[string]string{DurationAnnotation: "failed=20ms,other=1h", ExitCodeAnnotation: "3"})
	if s := awaitExit(t, c, failed); s.ExitCode != 3 || s.Reason != "Error" {
		t.Errorf("ended as %+v", s)
	}
	forever := run(t, c, "forever", map[string]string{DurationAnnotation: "other=1ms"})
	if _, err := c.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: forever, Timeout: 30}); err != nil {
		t.Fatal(err)
	}
	if s := statusOf(t, c, forever); s.State != cri.ContainerState_CONTAINER_EXITED || s.ExitCode != 143 {
		t.Errorf("stopped as %+v", s)
	}
	// Stopping one that has ended changes nothing.
	if _, err := c.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: done, Timeout: 30}); err != nil {
		t.Fatal(err)
	}
	if s := statusOf(t, c, done); s.ExitCode != 0 {
		t.Errorf("stopped after its end: %+v", s)
	}
	for _, k := range r.Containers() {
		if k.Running {
			t.Errorf("%s runs", k.Name)
		}
	}
}

func TestStopIsSlowIfAsked(t *testing.T) {
	_, c, _ := client(t)
	id := run(t, c, "slow", map[string]string{StopDelayAnnotation: "300ms"})
	before := time.Now()
	if _, err := c.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: id, Timeout: 30}); err != nil {
		t.Fatal(err)
	}
	if took := time.Since(before); took < 300*time.Millisecond {
		t.Errorf("took %s", took)
	}
	// SIGKILL does not wait.
	id = run(t, c, "killed", map[string]string{StopDelayAnnotation: "1h"})
	if _, err := c.StopContainer(t.Context(), &cri.StopContainerRequest{ContainerId: id, Timeout: 0}); err != nil {
		t.Fatal(err)
	}
}

func TestSandboxStopEndsContainers(t *testing.T) {
	_, c, _ := client(t)
	id := run(t, c, "a", nil)
	list, err := c.ListPodSandbox(t.Context(), &cri.ListPodSandboxRequest{})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := c.StopPodSandbox(t.Context(), &cri.StopPodSandboxRequest{PodSandboxId: list.Items[0].Id}); err != nil {
		t.Fatal(err)
	}
	if s := statusOf(t, c, id); s.State != cri.ContainerState_CONTAINER_EXITED {
		t.Errorf("is %v", s.State)
	}
}

func TestBadAnnotationsAreRefused(t *testing.T) {
	for key, values := range map[string][]string{
		DurationAnnotation:  {"", "soon", "-1s", "a=", "a=x", "a=1s,b", "30"},
		ExitCodeAnnotation:  {"", "256", "-1", "one"},
		StopDelayAnnotation: {"", "x", "-1s"},
	} {
		for _, v := range values {
			if _, err := parseBehaviour(map[string]string{key: v}, "a"); err == nil || !strings.Contains(err.Error(), key) {
				t.Errorf("%s=%q: got %v, want an error that names it", key, v, err)
			}
		}
	}
}

func FuzzParseDuration(f *testing.F) {
	f.Add("30s", "a")
	f.Add("a=1s,b=2m", "b")
	f.Fuzz(func(t *testing.T, text, container string) {
		d, ends, err := parseDuration(text, container)
		if d < 0 || err != nil && ends {
			t.Errorf("%q for %q: %v, %v, %v", text, container, d, ends, err)
		}
	})
}
