// Command ashlar-agent runs on every GPU node. It takes the place of NVIDIA's
// device plugin: it reads the same config file, accepts the same flags and
// environment variables for what it serves, and offers the same resources.
//
// It needs the kubelet's folder, and with --kubeconfig or in a cluster the rights
// that docs/agent.md lists.
package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"
)

func main() { os.Exit(run(os.Args[1:], os.Stdout, os.Stderr)) }

// usageError marks an error in the command line itself.
type usageError struct{ error }

// run returns the exit code: 0 all is well, 1 it failed or found problems, 2 the
// command line was wrong.
func run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop) // a second signal kills

	root := &cobra.Command{
		Use:           "ashlar-agent",
		Short:         "The node agent of Ashlar",
		SilenceUsage:  true,
		SilenceErrors: true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	config := &cobra.Command{Use: "config", Short: "Work with config files"}
	config.AddCommand(newCheck())
	mig := &cobra.Command{Use: "mig", Short: "Work with MIG configs"}
	mig.AddCommand(newGenerate())
	root.AddCommand(newRun(), config, mig, newCapture(), newValidate())
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)

	err := root.ExecuteContext(ctx)
	var usage usageError
	switch {
	case err == nil:
		return 0
	case errors.As(err, &usage):
		fmt.Fprintf(stderr, "ashlar-agent: %v\nRun `ashlar-agent --help` for usage.\n", err)
		return 2
	default:
		fmt.Fprintln(stderr, err)
		return 1
	}
}
