package localcluster

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"
)

// KubernetesVersion is the version of the programs that tools/kubernetes/go.mod
// pins.
const KubernetesVersion = "v1.37.2"

// toolsModule is the module path of tools/kubernetes.
const toolsModule = "github.com/ashlar-gpu/ashlar/tools/kubernetes"

// program is one program of the cluster.
type program struct {
	name string
	// pkg is its main package.
	pkg string
	// ours marks programs whose source is in tools/kubernetes: they are rebuilt
	// when it changes, and no ready binary of others can stand in.
	ours bool
}

var programs = []program{
	{name: "etcd", pkg: "go.etcd.io/etcd/server/v3"},
	{name: "kube-apiserver", pkg: "k8s.io/kubernetes/cmd/kube-apiserver"},
	{name: "kube-controller-manager", pkg: "k8s.io/kubernetes/cmd/kube-controller-manager"},
	{name: "kube-scheduler", pkg: "k8s.io/kubernetes/cmd/kube-scheduler"},
	{name: "kubectl", pkg: "k8s.io/kubernetes/cmd/kubectl"},
	{name: "sim-kubelet", pkg: toolsModule + "/sim-kubelet", ours: true},
}

// Binaries maps the name of a program to its path.
type Binaries map[string]string

// BinaryOptions says where programs come from.
type BinaryOptions struct {
	// Ready is a folder of ready-made binaries, "" for $KUBEBUILDER_ASSETS.
	// Programs that it lacks are built.
	Ready string
	// Source is the folder tools/kubernetes of a checkout, "" to look for it
	// from the working folder and the executable upwards.
	Source string
	// Cache is where built binaries are kept, "" for the user's cache folder.
	Cache string
	// Progress is where progress is written, with elapsed time.
	Progress io.Writer
}

// EnsureBinaries returns the paths of all programs and builds those that are
// missing. A build needs the go command, a checkout and the Go module proxy;
// it takes about ten minutes on two cores the first time and nothing after.
// Each binary is built beside its place and renamed into it, so an interrupted
// build leaves none that is broken; builds of several processes at once are
// serialised.
func EnsureBinaries(ctx context.Context, o BinaryOptions) (Binaries, error) {
	if o.Ready == "" {
		o.Ready = os.Getenv("KUBEBUILDER_ASSETS")
	}
	if o.Cache == "" {
		base, err := os.UserCacheDir()
		if err != nil {
			return nil, fmt.Errorf("no cache folder for the Kubernetes programs: %w", err)
		}
		o.Cache = filepath.Join(base, "ashlar", "tools")
	}
	o.Cache = filepath.Join(o.Cache, "kubernetes-"+KubernetesVersion+"-"+runtime.GOOS+"-"+runtime.GOARCH)
	if o.Source == "" {
		o.Source = findSource()
	}
	found := make(Binaries)
	missing, err := o.locate(found)
	if err != nil || len(missing) == 0 {
		return found, err
	}
	if o.Source == "" {
		return nil, fmt.Errorf("%s: not in %s, and no checkout of Ashlar to build from: run `make tools` in one, or name ready binaries by KUBEBUILDER_ASSETS or --kubernetes-binaries",
			strings.Join(names(missing), ", "), o.Cache)
	}
	unlock, err := lockFolder(o.Cache)
	if err != nil {
		return nil, err
	}
	defer unlock()
	// Another process may have built them while this one waited for the lock.
	if missing, err = o.locate(found); err != nil {
		return nil, err
	}
	for i, p := range missing {
		if err := o.build(ctx, p, fmt.Sprintf("[%d/%d]", i+1, len(missing))); err != nil {
			return nil, err
		}
	}
	_, err = o.locate(found)
	return found, err
}

func names(ps []program) []string {
	var list []string
	for _, p := range ps {
		list = append(list, p.name)
	}
	return list
}

// locate fills in the programs that are there and returns the others.
func (o *BinaryOptions) locate(found Binaries) ([]program, error) {
	var missing []program
	for _, p := range programs {
		cached, err := o.cached(p)
		if err != nil {
			return nil, err
		}
		candidates := []string{cached}
		if o.Ready != "" && !p.ours {
			candidates = []string{filepath.Join(o.Ready, p.name), cached}
		}
		i := slices.IndexFunc(candidates, executable)
		if i < 0 {
			missing = append(missing, p)
			continue
		}
		found[p.name] = candidates[i]
	}
	return missing, nil
}

func executable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode()&0o111 != 0
}

// cached is the path of a program in the cache. That of a program of ours
// carries a hash of its source where there is a checkout; without one the
// newest build is taken.
func (o *BinaryOptions) cached(p program) (string, error) {
	path := filepath.Join(o.Cache, p.name)
	if !p.ours {
		return path, nil
	}
	if o.Source == "" {
		return newest(path + "-*")
	}
	sum, err := hashSource(o.Source, filepath.Base(p.pkg))
	return path + "-" + sum, err
}

func newest(pattern string) (string, error) {
	matches, err := filepath.Glob(pattern)
	if err != nil {
		return "", err
	}
	best, at := pattern, time.Time{}
	for _, m := range matches {
		if info, err := os.Stat(m); err == nil && info.ModTime().After(at) {
			best, at = m, info.ModTime()
		}
	}
	return best, nil
}

// hashSource hashes the Go files of a package of tools/kubernetes.
func hashSource(source, pkg string) (string, error) {
	hash := sha256.New()
	files, err := filepath.Glob(filepath.Join(source, pkg, "*.go"))
	if err != nil {
		return "", err
	}
	for _, f := range files {
		data, err := os.ReadFile(f)
		if err != nil {
			return "", err
		}
		fmt.Fprintf(hash, "%s %d\n%s", filepath.Base(f), len(data), data)
	}
	return hex.EncodeToString(hash.Sum(nil))[:12], nil
}

// findSource looks for tools/kubernetes in the folders above the working folder
// and above the executable.
func findSource() string {
	var starts []string
	if dir, err := os.Getwd(); err == nil {
		starts = append(starts, dir)
	}
	if exe, err := os.Executable(); err == nil {
		starts = append(starts, filepath.Dir(exe))
	}
	for _, dir := range starts {
		for {
			source := filepath.Join(dir, "tools", "kubernetes")
			data, err := os.ReadFile(filepath.Join(source, "go.mod"))
			if err == nil && strings.HasPrefix(string(data), "module "+toolsModule+"\n") {
				return source
			}
			parent := filepath.Dir(dir)
			if parent == dir {
				break
			}
			dir = parent
		}
	}
	return ""
}

// lockFolder makes the folder and takes the lock in it.
func lockFolder(dir string) (unlock func(), err error) {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, err
	}
	file, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_EX); err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", file.Name(), err), file.Close())
	}
	return func() { _ = file.Close() }, nil
}

// build compiles one program into its place in the cache.
func (o *BinaryOptions) build(ctx context.Context, p program, counter string) error {
	target, err := o.cached(p)
	if err != nil {
		return err
	}
	partial := fmt.Sprintf("%s.partial-%d", target, os.Getpid())
	defer func() {
		// After the rename there is nothing to remove.
		if err := os.Remove(partial); err != nil && !errors.Is(err, fs.ErrNotExist) {
			fmt.Fprintf(o.Progress, "remove %s: %v\n", partial, err)
		}
	}()
	cmd := exec.CommandContext(ctx, "go", "build", "-trimpath", "-ldflags", versionFlags(), "-o", partial, p.pkg)
	cmd.Dir = o.Source
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0", "GOWORK=off", "GOFLAGS=-mod=readonly -buildvcs=false")
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = 10 * time.Second
	var output strings.Builder
	cmd.Stdout, cmd.Stderr = &output, &output

	start := time.Now()
	line := func(format string, args ...any) {
		fmt.Fprintf(o.Progress, "%s %-24s %s\n", counter, p.name, fmt.Sprintf(format, args...))
	}
	line("building (Kubernetes %s, from source)", KubernetesVersion)
	finished := make(chan error, 1)
	go func() { finished <- cmd.Run() }()
	tick := time.NewTicker(20 * time.Second)
	defer tick.Stop()
	for {
		select {
		case <-tick.C:
			line("still building, %s", time.Since(start).Round(time.Second))
			continue
		case err = <-finished:
		}
		break
	}
	if ctx.Err() != nil {
		return fmt.Errorf("build of %s interrupted: %w", p.name, ctx.Err())
	}
	if err != nil {
		return fmt.Errorf("build of %s in %s: %w\n%s", p.name, o.Source, err, output.String())
	}
	if err := os.Rename(partial, target); err != nil {
		return err
	}
	line("ready after %s", time.Since(start).Round(time.Second))
	return nil
}

// versionFlags stamps the binaries, so that `kubectl version` is true.
func versionFlags() string {
	major, minor, _ := strings.Cut(strings.TrimPrefix(KubernetesVersion, "v"), ".")
	minor, _, _ = strings.Cut(minor, ".")
	flags := []string{"-s", "-w"}
	for _, pkg := range []string{"k8s.io/component-base/version", "k8s.io/client-go/pkg/version"} {
		for _, kv := range []string{"gitVersion=" + KubernetesVersion, "gitMajor=" + major, "gitMinor=" + minor, "gitTreeState=clean"} {
			flags = append(flags, "-X", pkg+"."+kv)
		}
	}
	return strings.Join(flags, " ")
}

// Write lists the programs with their paths.
func (b Binaries) Write(w io.Writer) error {
	for _, name := range slices.Sorted(maps.Keys(b)) {
		if _, err := fmt.Fprintf(w, "%-24s %s\n", name, b[name]); err != nil {
			return err
		}
	}
	return nil
}
