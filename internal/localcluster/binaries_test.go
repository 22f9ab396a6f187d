package localcluster

import (
	"context"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestVersionIsTheOneThatIsPinned(t *testing.T) {
	data, err := os.ReadFile("../../tools/kubernetes/go.mod")
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(data), "k8s.io/kubernetes "+KubernetesVersion) {
		t.Errorf("tools/kubernetes/go.mod does not require %s", KubernetesVersion)
	}
	if minor := strings.Split(KubernetesVersion, ".")[1]; strings.Count(string(data), "v0."+minor+".") < 30 {
		t.Errorf("tools/kubernetes/go.mod does not replace the staging modules by v0.%s", minor)
	}
}

// fakeProgram writes an executable file.
func fakeProgram(t *testing.T, path string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"), 0o755); err != nil {
		t.Fatal(err)
	}
}

func TestReadyBinariesAreUsed(t *testing.T) {
	ready := t.TempDir()
	o := BinaryOptions{Ready: ready, Cache: t.TempDir(), Source: "../../tools/kubernetes", Progress: io.Discard}
	for _, p := range programs {
		if !p.ours {
			fakeProgram(t, filepath.Join(ready, p.name))
		}
	}
	found := make(Binaries)
	missing, err := o.locate(found)
	if err != nil {
		t.Fatal(err)
	}
	if len(missing) != 1 || missing[0].name != "sim-kubelet" {
		t.Errorf("missing are %v, want the kubelet of simulated machines alone", names(missing))
	}
	if found["etcd"] != filepath.Join(ready, "etcd") {
		t.Errorf("etcd is %s", found["etcd"])
	}

	t.Setenv("KUBEBUILDER_ASSETS", ready)
	o = BinaryOptions{Cache: t.TempDir(), Source: "/nonexistent", Progress: io.Discard}
	if _, err := EnsureBinaries(t.Context(), o); err == nil {
		t.Error("sim-kubelet was found without a source")
	}
}

func TestInterruptedBuildLeavesNothing(t *testing.T) {
	cache := t.TempDir()
	o := BinaryOptions{Cache: cache, Source: "../../tools/kubernetes", Progress: io.Discard}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := o.build(ctx, programs[0], "[1/1]"); err == nil || !strings.Contains(err.Error(), "interrupted") {
		t.Errorf("got %v, want an interruption", err)
	}
	if err := o.build(t.Context(), program{name: "none", pkg: "example.invalid/none"}, "[1/1]"); err == nil {
		t.Error("an impossible build succeeds")
	}
	entries, err := os.ReadDir(cache)
	if err != nil {
		t.Fatal(err)
	}
	if len(entries) > 0 {
		t.Errorf("left %v", entries)
	}
}

func TestHashFollowsTheSource(t *testing.T) {
	source := t.TempDir()
	write := func(text string) string {
		t.Helper()
		fakeProgram(t, filepath.Join(source, "p", "x")) // not a Go file
		if err := os.WriteFile(filepath.Join(source, "p", "main.go"), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		sum, err := hashSource(source, "p")
		if err != nil {
			t.Fatal(err)
		}
		return sum
	}
	a, b, again := write("a"), write("b"), write("a")
	if a == b || a != again {
		t.Errorf("hashes are %s, %s, %s", a, b, again)
	}
}

func TestTail(t *testing.T) {
	path := filepath.Join(t.TempDir(), "log")
	for _, c := range []struct{ text, want string }{{"a\nb\nc\n", "b\nc"}, {"a\n", "a"}, {"", ""}} {
		if err := os.WriteFile(path, []byte(c.text), 0o600); err != nil {
			t.Fatal(err)
		}
		if got := tail(path, 2); got != c.want {
			t.Errorf("tail(%q) = %q, want %q", c.text, got, c.want)
		}
	}
}
