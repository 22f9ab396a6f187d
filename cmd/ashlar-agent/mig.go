package main

import (
	"fmt"

	"github.com/spf13/cobra"

	"github.com/ashlar-gpu/ashlar/internal/agent"
	"github.com/ashlar-gpu/ashlar/internal/machine"
	"github.com/ashlar-gpu/ashlar/internal/mig"
)

func newGenerate() *cobra.Command {
	var name string
	cmd := &cobra.Command{
		Use:   "generate [--machine NAME]",
		Short: "Write the MIG configs that fit this machine",
		Long: `Write the MIG configs that fit this machine, in the format of NVIDIA's
mig-parted: all-disabled, all-enabled, all-balanced and one for each profile. The
node label nvidia.com/mig.config then names one of them.`,
		Args: cobra.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error {
			var hardware agent.Hardware
			if name == "" {
				h, err := openDriver()
				if err != nil {
					return err
				}
				hardware = h
			} else {
				desc, err := machine.Find(name)
				if err != nil {
					return usageError{err}
				}
				hardware = machine.New(desc, name)
			}
			m, err := hardware.Read()
			if err != nil {
				return err
			}
			text, err := mig.Generate(&m)
			if err != nil {
				return err
			}
			_, err = fmt.Fprint(cmd.OutOrStdout(), string(text))
			return err
		},
	}
	cmd.Flags().StringVar(&name, "machine", "", "a simulated machine, by name or file, in place of this one")
	return cmd
}
