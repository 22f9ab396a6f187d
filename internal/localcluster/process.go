package localcluster

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// markVariable is set in the environment of every process of a cluster to its
// state folder, so that Sweep knows them.
const markVariable = "ASHLAR_LOCAL_CLUSTER"

// Pauses before a process that died is started again. A process that lived
// longer than pauseReset starts over with the shortest.
const (
	pauseFirst = 500 * time.Millisecond
	pauseMost  = 8 * time.Second
	pauseReset = 30 * time.Second
)

// stopGrace is how long a process may take to end after SIGTERM. It is short:
// the data of a cluster ends with it.
const stopGrace = 2 * time.Second

// command is a process to keep running.
type command struct {
	// name is unique in the cluster, such as "etcd" or "kubelet/NODE".
	name string
	path string
	args []string
	env  []string
	// ownMounts starts it in a mount namespace of its own.
	ownMounts bool
}

// supervisor keeps processes running.
type supervisor struct {
	stateDir string
	logDir   string
	events   io.Writer
	wait     sync.WaitGroup
	spawn    chan func()

	mu    sync.Mutex
	procs []*process // in order of start
}

// process is a command with its present incarnation.
type process struct {
	command
	logPath string
	// stop ends the process and its restarts.
	stop context.CancelFunc
	done chan struct{}

	mu       sync.Mutex
	pid      int // 0 while not running
	restarts int
}

// newSupervisor starts children from one thread that lives as long as the
// program: the kernel takes the death of the thread that forked for the death
// of the parent.
func newSupervisor(stateDir, logDir string, events io.Writer) *supervisor {
	s := &supervisor{stateDir: stateDir, logDir: logDir, events: events, spawn: make(chan func())}
	go func() {
		runtime.LockOSThread()
		for f := range s.spawn {
			f()
		}
	}()
	return s
}

// start runs the command until ctx ends or stop is called.
func (s *supervisor) start(ctx context.Context, c command) error {
	ctx, cancel := context.WithCancel(ctx)
	p := &process{
		command: c, stop: cancel, done: make(chan struct{}),
		logPath: filepath.Join(s.logDir, filepath.FromSlash(c.name)+".log"),
	}
	if err := os.MkdirAll(filepath.Dir(p.logPath), 0o755); err != nil {
		cancel()
		return err
	}
	s.mu.Lock()
	s.procs = append(s.procs, p)
	s.mu.Unlock()
	s.wait.Go(func() {
		defer close(p.done)
		s.keep(ctx, p)
	})
	return nil
}

// keep starts the process again whenever it dies.
func (s *supervisor) keep(ctx context.Context, p *process) {
	pause := pauseFirst
	for ctx.Err() == nil {
		began := time.Now()
		err := s.once(ctx, p)
		if ctx.Err() != nil {
			return
		}
		if time.Since(began) > pauseReset {
			pause = pauseFirst
		}
		fmt.Fprintf(s.events, "%s ended (%v), starting it again in %s; log: %s\n", p.name, err, pause, p.logPath)
		select {
		case <-ctx.Done():
			return
		case <-time.After(pause):
		}
		pause = min(2*pause, pauseMost)
		p.mu.Lock()
		p.restarts++
		p.mu.Unlock()
	}
}

// once runs the process to its end.
func (s *supervisor) once(ctx context.Context, p *process) error {
	log, err := os.OpenFile(p.logPath, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o644)
	if err != nil {
		return err
	}
	defer log.Close()
	cmd := exec.Command(p.path, p.args...)
	cmd.Env = append(append(os.Environ(), p.env...), markVariable+"="+s.stateDir)
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
	if p.ownMounts {
		cmd.SysProcAttr.Unshareflags = syscall.CLONE_NEWNS
	}
	started := make(chan error, 1)
	s.spawn <- func() { started <- cmd.Start() }
	if err := <-started; err != nil {
		return err
	}
	p.setPID(cmd.Process.Pid)
	defer p.setPID(0)
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	select {
	case err := <-ended:
		if err == nil {
			err = errors.New("exit status 0")
		}
		return err
	case <-ctx.Done():
	}
	// How it ends does not matter any more, only that it does.
	_ = cmd.Process.Signal(syscall.SIGTERM)
	hard := time.AfterFunc(stopGrace, func() { _ = syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) })
	defer hard.Stop()
	if err := <-ended; err != nil {
		return err
	}
	return ctx.Err()
}

func (p *process) setPID(pid int) {
	p.mu.Lock()
	p.pid = pid
	p.mu.Unlock()
}

// ProcessStatus is the state of one process of the cluster.
type ProcessStatus struct {
	Name     string `json:"name"`
	PID      int    `json:"pid"`
	Restarts int    `json:"restarts"`
	Log      string `json:"log"`
}

// status lists the processes in order of start.
func (s *supervisor) status() []ProcessStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	list := make([]ProcessStatus, 0, len(s.procs))
	for _, p := range s.procs {
		p.mu.Lock()
		list = append(list, ProcessStatus{Name: p.name, PID: p.pid, Restarts: p.restarts, Log: p.logPath})
		p.mu.Unlock()
	}
	return list
}

// stopAll ends the processes, those that were started last first, and waits.
// Processes of the nodes end together: none needs another to stop.
func (s *supervisor) stopAll() {
	s.mu.Lock()
	procs := s.procs
	s.mu.Unlock()
	for _, p := range procs {
		p.stop()
	}
	s.wait.Wait()
	close(s.spawn)
}

// tail returns the last lines of a log for an error message.
func tail(path string, lines int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(data), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
