package cli

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/spf13/cobra"

	"github.com/ashlar-gpu/ashlar/internal/localcluster"
)

// readyFD is the environment variable that tells a detached `up` on which file
// descriptor its parent listens.
const readyFD = "ASHLAR_READY_FD"

// healthQuiet is shorter than the agent's default: simulated faults end when they
// are told to.
const healthQuiet = 10 * time.Second

// downTimeout bounds `ashlar down`.
const downTimeout = time.Minute

// upOptions are the flags of `up`.
type upOptions struct {
	stateDir string
	nodes    []string
	ready    string
	agent    string
	// controller is the ashlar-controller to run.
	controller string
	quiet      time.Duration
	detach     bool
}

func newUp() *cobra.Command {
	var o upOptions
	cmd := &cobra.Command{
		Use:   "up --node MACHINE[=COUNT][,config=FILE][,name=NAME][,label=K=V][,taint=K=V:EFFECT] ...",
		Short: "Start a local Kubernetes cluster with simulated GPU machines",
		Long: `Start a local Kubernetes cluster with simulated GPU machines.

The control plane, the kubelets and the agents are the real ones; containers do
not run anything. MACHINE is a name from "ashlar machines" or a file with a
description. config= names a device-plugin config (NVIDIA's format, or a
ConfigMap with it); the agent watches the file, so edits take effect at once.

The cluster ends with Ctrl-C, or with "ashlar down" if started with --detach.`,
		Example: "  sudo ashlar up --node p4d.24xlarge --node g5.12xlarge=2,config=timeslice.yaml",
		Args:    cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			return runUp(cmd.Context(), o, cmd.OutOrStdout(), cmd.ErrOrStderr())
		},
	}
	stateDirFlag(cmd, &o.stateDir)
	f := cmd.Flags()
	f.StringArrayVar(&o.nodes, "node", nil, "nodes to run; may be given several times")
	f.StringVar(&o.ready, "kubernetes-binaries", "", "folder of ready etcd, kube-apiserver, ... to use (default $KUBEBUILDER_ASSETS)")
	f.StringVar(&o.agent, "agent", "", "ashlar-agent to run (default: the one beside this program)")
	f.StringVar(&o.controller, "controller", "", "ashlar-controller to run (default: the one beside this program)")
	f.DurationVar(&o.quiet, "health-quiet", healthQuiet, "how long a GPU must be without faults before it is offered again")
	f.BoolVar(&o.detach, "detach", false, "return when the cluster is ready and leave it running")
	return cmd
}

func runUp(ctx context.Context, o upOptions, stdout, stderr io.Writer) error {
	specs, err := parseNodes(o.nodes)
	if err != nil {
		return err
	}
	if o.detach && os.Getenv(readyFD) == "" {
		return detach(ctx, os.Args[1:], o.stateDir, stdout, stderr)
	}
	out := &redirect{w: stderr}
	var parent *os.File
	if text := os.Getenv(readyFD); text != "" {
		fd, err := strconv.Atoi(text)
		if err != nil {
			return fmt.Errorf("%s=%q: %w", readyFD, text, err)
		}
		parent = os.NewFile(uintptr(fd), "parent")
		if err := os.Unsetenv(readyFD); err != nil {
			return err
		}
		out.set(parent)
	}
	cluster, err := start(ctx, o, specs, out)
	if err != nil {
		if parent != nil {
			fmt.Fprintln(out, "ashlar:", err)
		}
		return err
	}
	if parent != nil {
		log, err := os.Create(filepath.Join(o.stateDir, "logs", "supervisor.log"))
		if err != nil {
			return errors.Join(err, cluster.Close())
		}
		defer log.Close()
		out.set(log)
		if _, err := io.WriteString(parent, readyLine+"\n"); err != nil {
			return errors.Join(err, cluster.Close())
		}
		_ = parent.Close()
	} else {
		printReady(stdout, cluster.State())
		fmt.Fprintln(stdout, "Ctrl-C ends the cluster.")
	}
	<-ctx.Done()
	fmt.Fprintln(out, "ending the cluster")
	return cluster.Close()
}

func parseNodes(texts []string) ([]localcluster.NodeSpec, error) {
	if len(texts) == 0 {
		return nil, usageError{errors.New("up: name at least one machine with --node; `ashlar machines` lists them")}
	}
	specs := make([]localcluster.NodeSpec, len(texts))
	for i, text := range texts {
		var err error
		if specs[i], err = localcluster.ParseNodeSpec(text); err != nil {
			return nil, usageError{err}
		}
	}
	return specs, nil
}

// start brings up a cluster, building its programs first where they are missing.
func start(ctx context.Context, o upOptions, specs []localcluster.NodeSpec, progress io.Writer) (*localcluster.Cluster, error) {
	for _, p := range []struct {
		path *string
		name string
	}{{&o.agent, "agent"}, {&o.controller, "controller"}} {
		if *p.path == "" {
			exe, err := os.Executable()
			if err != nil {
				return nil, err
			}
			*p.path = filepath.Join(filepath.Dir(exe), "ashlar-"+p.name)
		}
		if _, err := os.Stat(*p.path); err != nil {
			return nil, fmt.Errorf("%s: %w; build it with `make build` or name it with --%s", p.name, err, p.name)
		}
	}
	binaries, err := localcluster.EnsureBinaries(ctx, localcluster.BinaryOptions{Ready: o.ready, Progress: progress})
	if err != nil {
		return nil, err
	}
	return localcluster.Up(ctx, localcluster.Options{
		StateDir: o.stateDir, Nodes: specs, Binaries: binaries, Agent: o.agent, Controller: o.controller,
		HealthQuiet: o.quiet, Progress: progress,
	})
}

func printReady(w io.Writer, s localcluster.State) {
	fmt.Fprintf(w, "\nKubernetes %s with %d nodes is ready.\n\n  export KUBECONFIG=%s\n  alias kubectl=%s\n\n", s.Kubernetes, len(s.Nodes), s.Kubeconfig, s.Kubectl)
}

// readyLine is what a detached cluster tells its parent last.
const readyLine = "ready"

// detach runs `ashlar` with the arguments of an `up` in a session of its own
// and waits until the cluster is ready.
func detach(ctx context.Context, args []string, stateDir string, stdout, stderr io.Writer) error {
	exe, err := os.Executable()
	if err != nil {
		return err
	}
	r, w, err := os.Pipe()
	if err != nil {
		return err
	}
	defer r.Close()
	child := exec.Command(exe, args...)
	child.ExtraFiles = []*os.File{w}
	child.Env = append(os.Environ(), readyFD+"=3")
	child.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := child.Start(); err != nil {
		return errors.Join(err, w.Close())
	}
	if err := w.Close(); err != nil {
		return err
	}
	stop := context.AfterFunc(ctx, func() { _ = child.Process.Signal(syscall.SIGTERM) })
	defer stop()
	lines := bufio.NewScanner(r)
	for lines.Scan() {
		if lines.Text() != readyLine {
			fmt.Fprintln(stderr, lines.Text())
			continue
		}
		s, err := localcluster.ReadState(stateDir)
		if err != nil {
			return err
		}
		printReady(stdout, *s)
		fmt.Fprintln(stdout, "`ashlar status` shows it, `ashlar down` ends it.")
		return child.Process.Release()
	}
	if err := child.Wait(); err != nil {
		return errProblems // the child has said why
	}
	return ctx.Err()
}

func newDown() *cobra.Command {
	var dir string
	cmd := &cobra.Command{
		Use:   "down",
		Short: "End the local cluster and remove all that it left",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			ctx, cancel := context.WithTimeout(cmd.Context(), downTimeout)
			defer cancel()
			if err := localcluster.Down(ctx, dir); err != nil {
				return err
			}
			fmt.Fprintln(cmd.OutOrStdout(), "The cluster has ended.")
			return nil
		},
	}
	stateDirFlag(cmd, &dir)
	return cmd
}

func newTools() *cobra.Command {
	var o localcluster.BinaryOptions
	cmd := &cobra.Command{
		Use:   "tools",
		Short: "Build the Kubernetes programs of the local cluster, or show where they are",
		Args:  cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			o.Progress = cmd.ErrOrStderr()
			binaries, err := localcluster.EnsureBinaries(cmd.Context(), o)
			if err != nil {
				return err
			}
			return binaries.Write(cmd.OutOrStdout())
		},
	}
	cmd.Flags().StringVar(&o.Ready, "kubernetes-binaries", "", "folder of ready binaries to use (default $KUBEBUILDER_ASSETS)")
	return cmd
}

// redirect is a writer whose target can change while others write.
type redirect struct {
	mu sync.Mutex
	w  io.Writer
}

func (r *redirect) set(w io.Writer) {
	r.mu.Lock()
	r.w = w
	r.mu.Unlock()
}

func (r *redirect) Write(p []byte) (int, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.w.Write(p)
}
