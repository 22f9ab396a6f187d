package localcluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/kubernetes"

	"github.com/ashlar-gpu/ashlar/internal/localcluster/fakecri"
)

// DefaultStateDir is where a cluster lives unless told otherwise. It is short
// since unix sockets' paths must be.
const DefaultStateDir = "/run/ashlar"

// Options says what cluster to bring up.
type Options struct {
	// StateDir holds everything of the cluster.
	StateDir string
	Nodes    []NodeSpec
	Binaries Binaries
	// Agent and Controller are the paths of ashlar-agent and ashlar-controller.
	Agent, Controller string
	// HealthQuiet is how long a GPU must be quiet before it returns; 0 for the
	// agent's default. Simulated faults need no long one.
	HealthQuiet time.Duration
	// ControllerArgs are more arguments of the controller.
	ControllerArgs []string
	// Progress is where steps and warnings are written.
	Progress io.Writer
}

// State is what a running cluster says of itself in state.json.
type State struct {
	// Supervisor is the process that keeps the cluster.
	Supervisor int `json:"supervisor"`
	// Ready is set when Up has returned.
	Ready      bool            `json:"ready"`
	Kubernetes string          `json:"kubernetes"`
	Server     string          `json:"server"`
	Kubeconfig string          `json:"kubeconfig"`
	Kubectl    string          `json:"kubectl"`
	Nodes      []NodeState     `json:"nodes"`
	Processes  []ProcessStatus `json:"processes"`
}

// Cluster is a running cluster.
type Cluster struct {
	options Options
	lock    *os.File
	ca      *authority
	procs   *supervisor
	client  kubernetes.Interface
	nodes   []*node

	cancel  context.CancelFunc
	closing sync.Once
	ended   chan struct{}

	mu    sync.Mutex
	state State
}

// ErrRunning says that the state folder holds a living cluster.
var ErrRunning = errors.New("a cluster is running")

// ErrNotRunning says that the state folder holds none.
var ErrNotRunning = errors.New("no cluster is running")

// Up brings up a cluster. It stays up until Close is called or this process
// ends; ctx bounds only the start.
func Up(ctx context.Context, o Options) (*Cluster, error) {
	if os.Geteuid() != 0 {
		return nil, errors.New("a local cluster runs real kubelets and needs root: use sudo")
	}
	dir, err := filepath.Abs(o.StateDir)
	if err != nil {
		return nil, err
	}
	o.StateDir = dir
	lock, err := takeLock(dir)
	if err != nil {
		return nil, err
	}
	if err := foreign(dir); err != nil {
		return nil, errors.Join(err, release(dir, lock))
	}
	if leftovers(dir) {
		fmt.Fprintf(o.Progress, "removing what an earlier cluster left in %s\n", dir)
		if err := sweep(dir); err != nil {
			return nil, errors.Join(err, lock.Close())
		}
	}
	c := &Cluster{options: o, lock: lock, ended: make(chan struct{})}
	c.state = State{
		Supervisor: os.Getpid(), Kubernetes: KubernetesVersion,
		Kubeconfig: c.path("kubeconfig"), Kubectl: o.Binaries["kubectl"],
	}
	c.procs = newSupervisor(dir, c.path("logs"), o.Progress)
	run, cancel := context.WithCancel(context.Background())
	c.cancel = cancel
	if err := c.bringUp(ctx, run); err != nil {
		return nil, errors.Join(err, c.Close())
	}
	go c.keepState(run)
	return c, nil
}

func (c *Cluster) path(parts ...string) string {
	return filepath.Join(append([]string{c.options.StateDir}, parts...)...)
}

// bringUp starts the parts in order. Processes live as long as run.
func (c *Cluster) bringUp(ctx, run context.Context) error {
	if err := c.prepareNodes(); err != nil {
		return err
	}
	if err := c.saveState(); err != nil {
		return err
	}
	start := time.Now()
	step := func(format string, args ...any) {
		fmt.Fprintf(c.options.Progress, "%5.1fs  %s\n", time.Since(start).Seconds(), fmt.Sprintf(format, args...))
	}
	step("starting etcd and the control plane of Kubernetes %s", KubernetesVersion)
	// The wait for the apiserver ends with ctx, the processes with run.
	stop := context.AfterFunc(ctx, c.cancel)
	defer stop()
	if err := c.startControlPlane(run); err != nil {
		return err
	}
	step("control plane is ready, starting %d nodes", len(c.nodes))
	for _, n := range c.nodes {
		if err := c.startNode(run, n); err != nil {
			return fmt.Errorf("node %s: %w", n.Name, err)
		}
	}
	group, groupCtx := errgroup.WithContext(ctx)
	for _, n := range c.nodes {
		group.Go(func() error {
			if err := c.awaitNode(groupCtx, n); err != nil {
				return fmt.Errorf("node %s: %w", n.Name, err)
			}
			step("node %s is ready", n.Name)
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	c.mu.Lock()
	c.state.Ready = true
	c.mu.Unlock()
	return c.saveState()
}

// Wait returns when the cluster has been closed.
func (c *Cluster) Wait() { <-c.ended }

// State returns the present state.
func (c *Cluster) State() State {
	c.mu.Lock()
	defer c.mu.Unlock()
	s := c.state
	s.Processes = c.procs.status()
	return s
}

// Containers lists the containers of a node as its runtime recorded them.
func (c *Cluster) Containers(node string) ([]fakecri.Container, error) {
	for _, n := range c.nodes {
		if n.Name == node {
			return n.runtime.Containers(), nil
		}
	}
	return nil, fmt.Errorf("no node %q", node)
}

// keepState writes state.json whenever a process changed.
func (c *Cluster) keepState(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
			if err := c.saveState(); err != nil {
				fmt.Fprintf(c.options.Progress, "write state: %v\n", err)
			}
		}
	}
}

// saveState writes state.json if it differs from what is there.
func (c *Cluster) saveState() error {
	data, err := json.MarshalIndent(c.State(), "", "  ")
	if err != nil {
		return err
	}
	path := c.path(stateFile)
	if old, err := os.ReadFile(path); err == nil && string(old) == string(data) {
		return nil
	}
	if err := os.WriteFile(path+".new", data, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}

// Close ends all parts and removes the state folder.
func (c *Cluster) Close() error {
	var err error
	c.closing.Do(func() {
		c.cancel()
		c.procs.stopAll()
		for _, n := range c.nodes {
			if n.runtime != nil {
				n.runtime.Stop()
			}
		}
		err = errors.Join(sweep(c.options.StateDir), release(c.options.StateDir, c.lock))
		close(c.ended)
	})
	return err
}

const (
	stateFile = "state.json"
	lockFile  = "lock"
)

// contents are all names that a cluster has in its state folder beside the lock,
// in the order in which they are removed.
var contents = []string{
	"nodes", "etcd", "certs", "logs", "kubeconfig", "controller-manager.kubeconfig", "scheduler.kubeconfig", "controller.kubeconfig",
	stateFile + ".new", stateFile,
}

// foreign returns an error where the folder holds something that is not a
// cluster's: then it was named by mistake.
func foreign(dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		if e.Name() != lockFile && !slices.Contains(contents, e.Name()) {
			return fmt.Errorf("state folder %s holds %s, which is not of a cluster; choose an empty folder", dir, e.Name())
		}
	}
	// The kubelets see their own /var/lib and /var/log.
	for _, parent := range []string{filepath.Dir(kubeletDir), filepath.Dir(podLogDir)} {
		if strings.HasPrefix(dir+"/", parent+"/") {
			return fmt.Errorf("state folder %s is below %s, which the kubelets do not see; choose another", dir, parent)
		}
	}
	return nil
}

// takeLock makes the state folder and takes the lock that a living cluster
// holds.
func takeLock(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	path := filepath.Join(dir, lockFile)
	file, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	err = syscall.Flock(int(file.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if err == nil {
		// The last owner may have removed the file between the open and the lock.
		mine, err1 := file.Stat()
		there, err2 := os.Stat(path)
		if err1 == nil && err2 == nil && os.SameFile(mine, there) {
			return file, nil
		}
		_ = file.Close()
		return takeLock(dir)
	}
	_ = file.Close()
	if !errors.Is(err, syscall.EWOULDBLOCK) {
		return nil, fmt.Errorf("lock %s: %w", path, err)
	}
	detail := ""
	if s, err := readStateFile(dir); err == nil {
		detail = fmt.Sprintf(" (process %d)", s.Supervisor)
	}
	return nil, fmt.Errorf("%w in %s%s: see `ashlar status`, end it with `ashlar down`, or choose another --state-dir", ErrRunning, dir, detail)
}

// release removes the lock and, if nothing else is in it, the state folder.
func release(dir string, lock *os.File) error {
	return errors.Join(os.Remove(filepath.Join(dir, lockFile)), removeEmpty(dir), lock.Close())
}

func readStateFile(dir string) (*State, error) {
	data, err := os.ReadFile(filepath.Join(dir, stateFile))
	if err != nil {
		return nil, err
	}
	var s State
	if err := json.Unmarshal(data, &s); err != nil {
		return nil, fmt.Errorf("%s: %w", filepath.Join(dir, stateFile), err)
	}
	return &s, nil
}

// ReadState returns the state of the cluster that lives in the folder. Its
// error is ErrNotRunning where there is none, also where one died.
func ReadState(dir string) (*State, error) {
	file, err := os.Open(filepath.Join(dir, lockFile))
	if errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("%w in %s: start one with `ashlar up`", ErrNotRunning, dir)
	}
	if err != nil {
		return nil, err
	}
	defer file.Close()
	if err := syscall.Flock(int(file.Fd()), syscall.LOCK_SH|syscall.LOCK_NB); err == nil {
		detail := ""
		if leftovers(dir) {
			detail = "; an earlier one died, `ashlar down` removes its files"
		}
		return nil, fmt.Errorf("%w in %s%s", ErrNotRunning, dir, detail)
	}
	return readStateFile(dir)
}

// leftovers says whether the folder holds parts of a cluster.
func leftovers(dir string) bool {
	return slices.ContainsFunc(contents, func(name string) bool {
		_, err := os.Lstat(filepath.Join(dir, name))
		return err == nil
	})
}

// Down ends the cluster of the folder and removes what it left, whoever is
// still alive of it. It returns ErrNotRunning where there was nothing to do.
func Down(ctx context.Context, dir string) error {
	dir, err := filepath.Abs(dir)
	if err != nil {
		return err
	}
	state, err := ReadState(dir)
	if errors.Is(err, ErrNotRunning) && !leftovers(dir) {
		return err
	}
	if err == nil {
		// The lock is held, so the supervisor lives and its id is its own.
		if err := syscall.Kill(state.Supervisor, syscall.SIGTERM); err != nil {
			return fmt.Errorf("end process %d: %w", state.Supervisor, err)
		}
	}
	for {
		lock, err := takeLock(dir)
		if err == nil {
			return errors.Join(sweep(dir), release(dir, lock))
		}
		if !errors.Is(err, ErrRunning) {
			return err
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("process %d did not end: %w", state.Supervisor, ctx.Err())
		case <-time.After(100 * time.Millisecond):
		}
	}
}

// removeEmpty removes a folder if nothing is in it.
func removeEmpty(dir string) error {
	err := os.Remove(dir)
	if errors.Is(err, syscall.ENOTEMPTY) || errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.EBUSY) {
		return nil
	}
	return err
}

// sweep removes everything of a cluster but the lock: processes that carry its
// mark, mounts in its folder, its files. The caller holds the lock.
func sweep(dir string) error {
	var errs []error
	if err := killMarked(dir); err != nil {
		errs = append(errs, err)
	}
	if err := unmountBelow(dir); err != nil {
		errs = append(errs, err)
	}
	for _, name := range contents {
		errs = append(errs, os.RemoveAll(filepath.Join(dir, name)))
	}
	return errors.Join(errs...)
}

// killMarked ends all processes that were started for the cluster of the
// folder.
func killMarked(dir string) error {
	mark := markVariable + "=" + dir
	deadline := time.Now().Add(stopGrace)
	for {
		entries, err := os.ReadDir("/proc")
		if err != nil {
			return err
		}
		alive := 0
		for _, e := range entries {
			var pid int
			if _, err := fmt.Sscanf(e.Name(), "%d", &pid); err != nil || pid == os.Getpid() {
				continue
			}
			// A process may end between the two; its environment is then gone.
			environ, err := os.ReadFile(filepath.Join("/proc", e.Name(), "environ"))
			if err != nil || !hasVariable(environ, mark) {
				continue
			}
			alive++
			if err := syscall.Kill(pid, syscall.SIGKILL); err != nil && !errors.Is(err, syscall.ESRCH) {
				return fmt.Errorf("end process %d: %w", pid, err)
			}
		}
		if alive == 0 {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%d processes of %s do not end", alive, dir)
		}
		time.Sleep(50 * time.Millisecond)
	}
}

func hasVariable(environ []byte, variable string) bool {
	for v := range strings.SplitSeq(string(environ), "\x00") {
		if v == variable {
			return true
		}
	}
	return false
}

// unmountBelow takes away mounts in the folder, the innermost first.
func unmountBelow(dir string) error {
	data, err := os.ReadFile("/proc/self/mountinfo")
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(string(data)), "\n")
	var errs []error
	for i := len(lines) - 1; i >= 0; i-- {
		fields := strings.Fields(lines[i])
		if len(fields) < 5 || !strings.HasPrefix(fields[4], dir+"/") {
			continue
		}
		if err := syscall.Unmount(fields[4], syscall.MNT_DETACH); err != nil {
			errs = append(errs, fmt.Errorf("unmount %s: %w", fields[4], err))
		}
	}
	return errors.Join(errs...)
}
