package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"

	"github.com/spf13/cobra"
	"sigs.k8s.io/yaml"

	"github.com/ashlar-gpu/ashlar/internal/localcluster"
)

// Exit codes.
const (
	exitOK          = 0
	exitProblems    = 1
	exitUsage       = 2
	exitUnreachable = 3
)

// usageError marks an error in the command line itself.
type usageError struct{ error }

// errProblems says that the command did its work and found problems, which it
// has already shown.
var errProblems = errors.New("problems found")

// Run runs the command line and returns the exit code. An interrupt ends the
// context of the command; a second one kills the process.
func Run(args []string, stdout, stderr io.Writer) int {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	context.AfterFunc(ctx, stop)

	root := newRoot()
	root.SetArgs(args)
	root.SetOut(stdout)
	root.SetErr(stderr)
	err := root.ExecuteContext(ctx)
	var usage usageError
	switch {
	case err == nil:
		return exitOK
	case errors.Is(err, errProblems):
		return exitProblems
	case errors.As(err, &usage), strings.HasPrefix(err.Error(), "unknown command"):
		fmt.Fprintf(stderr, "ashlar: %v\nRun `ashlar --help` for usage.\n", err)
		return exitUsage
	case errors.Is(err, localcluster.ErrNotRunning):
		fmt.Fprintln(stderr, "ashlar:", err)
		return exitUnreachable
	default:
		fmt.Fprintln(stderr, "ashlar:", err)
		return exitProblems
	}
}

func newRoot() *cobra.Command {
	root := &cobra.Command{
		Use:   "ashlar",
		Short: "GPU scheduling for Kubernetes",
		Long: "Ashlar makes the GPUs of a Kubernetes cluster shareable, placeable, queueable and accountable.\n" +
			"`ashlar up` runs a local cluster with simulated GPU machines; everything but the silicon is real.",
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          cobra.NoArgs,
		RunE:          func(cmd *cobra.Command, _ []string) error { return cmd.Help() },
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return usageError{err} })
	root.AddCommand(newUp(), newDown(), newStatus(), newDemo(), newMachines(), newFault(), newTools(), newReplay(), newScenario())
	for _, c := range root.Commands() {
		c.Args = asUsage(c.Args)
	}
	return root
}

// asUsage marks the errors of an argument check.
func asUsage(check cobra.PositionalArgs) cobra.PositionalArgs {
	return func(cmd *cobra.Command, args []string) error {
		if err := check(cmd, args); err != nil {
			return usageError{err}
		}
		return nil
	}
}

// stateDirFlag adds --state-dir.
func stateDirFlag(cmd *cobra.Command, dir *string) {
	value := os.Getenv("ASHLAR_STATE_DIR")
	if value == "" {
		value = localcluster.DefaultStateDir
	}
	cmd.Flags().StringVar(dir, "state-dir", value, "folder that holds the cluster (also $ASHLAR_STATE_DIR)")
}

// outputFlag adds -o with the given formats, the first being the default.
func outputFlag(cmd *cobra.Command, format *string, formats ...string) {
	cmd.Flags().StringVarP(format, "output", "o", formats[0], "output format: "+strings.Join(formats, ", "))
	cmd.PreRunE = func(*cobra.Command, []string) error {
		if slices.Contains(formats, *format) {
			return nil
		}
		return usageError{fmt.Errorf("-o %q: want one of %s", *format, strings.Join(formats, ", "))}
	}
}

// writeAs writes a value as json or yaml.
func writeAs(w io.Writer, format string, value any) error {
	data, err := json.MarshalIndent(value, "", "  ")
	if err != nil {
		return err
	}
	data = append(data, '\n')
	if format == "yaml" {
		if data, err = yaml.JSONToYAML(data); err != nil {
			return err
		}
	}
	_, err = w.Write(data)
	return err
}
