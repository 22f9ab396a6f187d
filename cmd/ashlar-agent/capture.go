package main

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/spf13/cobra"

	"github.com/ashlar-gpu/ashlar/internal/agent"
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
)

// capturedName is the name of every captured machine: that of the host is nobody's
// business.
const capturedName = "captured"

func newCapture() *cobra.Command {
	var file, machineDir string
	cmd := &cobra.Command{
		Use:   "capture [-o FILE]",
		Short: "Write this machine as a description that can be simulated",
		Long: `Write this machine as a description that can be simulated.

The description has all that is known of the GPUs and what matters of the host, so
that a report of a fault can be replayed anywhere: give the file to
` + "`ashlar up --node`" + ` or ` + "`ashlar-agent config check --machine`" + `. It has no UUIDs, serial
numbers or names of hosts and users; identifiers of fabric clusters are made up.`,
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) (err error) {
			m, host, err := readMachine(machineDir)
			if err != nil {
				return err
			}
			text, err := machine.Capture(capturedName, m, host)
			if err != nil {
				return err
			}
			if file != "" && file != "-" {
				return os.WriteFile(file, text, 0o644)
			}
			_, err = cmd.OutOrStdout().Write(text)
			return err
		},
	}
	cmd.Flags().StringVarP(&file, "output", "o", "", "file to write (default: standard output)")
	cmd.Flags().StringVar(&machineDir, "machine-dir", "", "folder of a simulated machine, in place of this one")
	return cmd
}

// noArgs refuses arguments as a wrong command line.
func noArgs(cmd *cobra.Command, args []string) error {
	if err := cobra.NoArgs(cmd, args); err != nil {
		return usageError{err}
	}
	return nil
}

// readMachine reads this machine, or the simulated one in a folder.
func readMachine(dir string) (*gpu.Machine, machine.Host, error) {
	if dir != "" {
		simulated, err := machine.Open(dir)
		if err != nil {
			return nil, machine.Host{}, err
		}
		m, err := readOnce(simulated)
		return m, simulated.Host(), err
	}
	driver, err := openDriver()
	if err != nil {
		return nil, machine.Host{}, err
	}
	m, err := readOnce(driver)
	if err != nil {
		return nil, machine.Host{}, err
	}
	host, err := readHost("/proc", "/sys")
	return m, host, err
}

// readOnce reads a machine and closes it.
func readOnce(hardware agent.Hardware) (*gpu.Machine, error) {
	m, err := hardware.Read()
	if err = errors.Join(err, hardware.Close()); err != nil {
		return nil, err
	}
	return &m, nil
}

// readHost reads what a host has besides its GPUs: the CPUs that are online, the
// memory, and the NUMA nodes with CPUs, one where the kernel tells of none.
func readHost(proc, sys string) (machine.Host, error) {
	var host machine.Host
	cpus, err := readRanges(filepath.Join(sys, "devices/system/cpu/online"))
	if err != nil {
		return host, fmt.Errorf("CPUs of this host: %w", err)
	}
	for _, r := range cpus {
		host.CPUs += r.last - r.first + 1
	}
	meminfo := filepath.Join(proc, "meminfo")
	text, err := os.ReadFile(meminfo)
	if err != nil {
		return host, fmt.Errorf("memory of this host: %w", err)
	}
	total := memTotal.FindSubmatch(text)
	if total == nil {
		return host, fmt.Errorf("memory of this host: %s has no MemTotal", meminfo)
	}
	host.Memory = string(total[1]) + "Ki"
	nodes, err := readRanges(filepath.Join(sys, "devices/system/node/has_cpu"))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		host.NUMANodes = 1
	case err != nil:
		return host, fmt.Errorf("NUMA nodes of this host: %w", err)
	default:
		host.NUMANodes = nodes[len(nodes)-1].last + 1
	}
	return host, nil
}

var memTotal = regexp.MustCompile(`(?m)^MemTotal:\s+([0-9]+) kB$`)

// numbers is a range of numbers, both ends included.
type numbers struct{ first, last int }

// readRanges reads a file of the kernel such as "0-31,64-95".
func readRanges(file string) ([]numbers, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return nil, err
	}
	var ranges []numbers
	for part := range strings.SplitSeq(strings.TrimSpace(string(text)), ",") {
		from, to, isRange := strings.Cut(part, "-")
		first, err := strconv.Atoi(from)
		last := first
		if isRange && err == nil {
			last, err = strconv.Atoi(to)
		}
		if err != nil || first < 0 || last < first {
			return nil, fmt.Errorf("%s: %q is not a list of ranges such as 0-31,64-95", file, part)
		}
		ranges = append(ranges, numbers{first, last})
	}
	return ranges, nil
}
