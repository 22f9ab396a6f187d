// Command ashlar-controller runs Ashlar's controllers, once in a cluster: see package
// controller.
//
// It needs to get, list and watch nodes, pods and gpunodes.ashlar.dev, to patch
// gpunodes.ashlar.dev, and to create and patch events of the groups "" and
// events.k8s.io; with --leader-elect also to get, create and update leases of
// coordination.k8s.io in its namespace.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/go-logr/logr"
	"github.com/spf13/cobra"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/klog/v2"
	ctrl "sigs.k8s.io/controller-runtime"
	"sigs.k8s.io/controller-runtime/pkg/cache"
	"sigs.k8s.io/controller-runtime/pkg/metrics/server"

	"github.com/ashlar-gpu/ashlar/internal/controller"
	"github.com/ashlar-gpu/ashlar/internal/mig"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// usageError marks an error in the command line itself.
type usageError struct{ error }

// run returns the exit code: 0 all is well, 1 it failed, 2 the command line was
// wrong.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal kills

	root := &cobra.Command{
		Use:           "ashlar-controller",
		Short:         "The controllers of Ashlar",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newRun())
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)

	err := root.ExecuteContext(ctx)
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "ashlar-controller: %v\nRun `ashlar-controller --help` for usage.\n", err)
		return 2
	default:
		fmt.Fprintln(stderr, err)
		return 1
	}
}

// options are the flags of `run`.
type options struct {
	controller.Options
	kubeconfig, namespace string
	elect                 bool
}

func newRun() *cobra.Command {
	o := options{Options: controller.Options{OnDemand: mig.DefaultOnDemandPolicy()}}
	cmd := &cobra.Command{
		Use:   "run",
		Short: "Run the controllers",
		Args: func(cmd *cobra.Command, args []string) error {
			if err := cobra.NoArgs(cmd, args); err != nil {
				return usageError{err}
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, _ []string) error {
			for flag, d := range map[string]time.Duration{"mig-min-life": o.OnDemand.MinLife, "mig-idle-after": o.OnDemand.IdleAfter} {
				if d < 0 {
					return usageError{fmt.Errorf("--%s %s: want a duration that is not negative", flag, d)}
				}
			}
			return o.run(cmd.Context(), slog.New(slog.NewTextHandler(cmd.ErrOrStderr(), nil)))
		},
	}
	f := cmd.Flags()
	f.StringVar(&o.kubeconfig, "kubeconfig", "", "kubeconfig to reach the apiserver (default: that of the pod)")
	f.BoolVar(&o.elect, "leader-elect", false, "let one of several replicas work at a time")
	f.StringVar(&o.namespace, "leader-elect-namespace", "", "namespace of the lease (default: that of the pod)")
	f.DurationVar(&o.OnDemand.MinLife, "mig-min-life", o.OnDemand.MinLife, "shortest time between a change of a GPU on demand and the next that takes something away")
	f.DurationVar(&o.OnDemand.IdleAfter, "mig-idle-after", o.OnDemand.IdleAfter, "how long a GPU that was cut on demand must be of no use before it is made whole again")
	return cmd
}

func (o *options) run(ctx context.Context, log *slog.Logger) error {
	config, err := rest.InClusterConfig()
	if o.kubeconfig != "" {
		config, err = clientcmd.BuildConfigFromFlags("", o.kubeconfig)
	}
	switch {
	case errors.Is(err, rest.ErrNotInCluster):
		return usageError{errors.New("outside a cluster --kubeconfig is needed")}
	case err != nil:
		return fmt.Errorf("apiserver: %w", err)
	}
	scheme, err := controller.Scheme()
	if err != nil {
		return err
	}
	logger := logr.FromSlogHandler(log.Handler())
	ctrl.SetLogger(logger)
	klog.SetLogger(logger)
	manager, err := ctrl.NewManager(config, ctrl.Options{
		Scheme: scheme, Logger: logger,
		LeaderElection: o.elect, LeaderElectionID: "ashlar-controller", LeaderElectionNamespace: o.namespace,
		LeaderElectionReleaseOnCancel: true,
		Metrics:                       server.Options{BindAddress: "0"},
		Cache:                         cache.Options{DefaultTransform: cache.TransformStripManagedFields()},
	})
	if err != nil {
		return fmt.Errorf("apiserver: %w", err)
	}
	if err := controller.Add(manager, o.Options); err != nil {
		return err
	}
	return manager.Start(ctx)
}
