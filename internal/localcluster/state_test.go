package localcluster

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func touch(t *testing.T, path string) {
	t.Helper()
	if err := os.WriteFile(path, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// TestForeignFilesAreSafe: a state folder named by mistake loses nothing.
func TestForeignFilesAreSafe(t *testing.T) {
	dir := t.TempDir()
	if err := foreign(dir); err != nil {
		t.Errorf("an empty folder: %v", err)
	}
	for _, name := range []string{stateFile, lockFile, "kubeconfig"} {
		touch(t, filepath.Join(dir, name))
	}
	if err := foreign(dir); err != nil {
		t.Errorf("what a cluster left: %v", err)
	}
	thesis := filepath.Join(dir, "thesis.tex")
	touch(t, thesis)
	if err := foreign(dir); err == nil || !strings.Contains(err.Error(), "thesis.tex") {
		t.Errorf("somebody's folder: got %v, want an error that names the file", err)
	}
	if err := Down(t.Context(), dir); err != nil {
		t.Error(err)
	}
	if _, err := os.Stat(thesis); err != nil {
		t.Errorf("down took it away: %v", err)
	}
	if leftovers(dir) {
		t.Error("down left parts of the cluster")
	}
	for _, bad := range []string{"/var/lib", "/var/log"} {
		if err := foreign(bad); err == nil {
			t.Errorf("%s is taken, which the kubelets do not see", bad)
		}
	}
}

func TestOneClusterPerFolder(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "state")
	if _, err := ReadState(dir); !errors.Is(err, ErrNotRunning) {
		t.Errorf("no folder: got %v", err)
	}
	lock, err := takeLock(dir)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := takeLock(dir); !errors.Is(err, ErrRunning) {
		t.Errorf("second lock: got %v, want ErrRunning", err)
	}
	if err := release(dir, lock); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(dir); err == nil {
		t.Error("the empty folder stays")
	}
	if err := Down(t.Context(), dir); !errors.Is(err, ErrNotRunning) {
		t.Errorf("down of nothing: got %v", err)
	}
}

func TestHasVariable(t *testing.T) {
	environ := []byte("A=1\x00" + markVariable + "=/run/ashlar\x00B=2\x00")
	if !hasVariable(environ, markVariable+"=/run/ashlar") {
		t.Error("the mark is not found")
	}
	// A longer folder's name is another cluster's.
	if hasVariable(environ, markVariable+"=/run/ash") || hasVariable(environ, "=1") {
		t.Error("part of a variable is taken for it")
	}
}
