package visible

import (
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"text/tabwriter"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Report is the result of a comparison. Its form as JSON is for programs.
type Report struct {
	// OK says that the container sees what it was given and nothing else.
	OK bool `json:"ok"`
	// Devices are those that were given or are visible.
	Devices []Device `json:"devices"`
	// Nodes are the paths of the device nodes of GPUs.
	Nodes []string `json:"nodes"`
	// Problems say what is wrong, one sentence each.
	Problems []string `json:"problems"`
}

// Device is a whole GPU or a MIG device.
type Device struct {
	UUID string `json:"uuid"`
	// Model is the name of the GPU, with that of the MIG profile; "" where it is not
	// visible.
	Model string `json:"model,omitempty"`
	// Variables are the environment variables that say it was given, none where it was
	// not.
	Variables []string `json:"variables,omitempty"`
	Visible   bool     `json:"visible"`
}

// Compare compares what a container was given with what it sees. A slot is its GPU or
// MIG device. In MIG mode a GPU is seen through its MIG devices, and its own handle,
// which the driver lists with them, counts for nothing. A device node must be of a
// GPU that was given, whole or in part.
func Compare(allocated []Allocation, seen Seen) Report {
	r := Report{Devices: []Device{}, Nodes: []string{}, Problems: []string{}}
	for _, a := range allocated {
		for _, id := range a.Devices {
			d := r.device(id.Base)
			if !slices.Contains(d.Variables, a.Variable) {
				d.Variables = append(d.Variables, a.Variable)
			}
		}
	}
	given := len(r.Devices)
	for i := range seen.GPUs {
		g := &seen.GPUs[i]
		if !g.MIG.Enabled {
			r.see(g.UUID, g.Name)
			continue
		}
		for _, m := range g.MIG.Devices {
			r.see(m.UUID, g.Name+" MIG "+m.Profile)
		}
	}
	if seen.Driver != "" && given > 0 {
		r.problem("%d devices were given, and the driver cannot be asked: %s", given, seen.Driver)
	}
	for i := range r.Devices {
		switch d := &r.Devices[i]; {
		case d.Visible && len(d.Variables) == 0:
			r.problem("%s is visible and was not given: the pod is privileged, or its image or manifest sets NVIDIA_VISIBLE_DEVICES", d.UUID)
		case !d.Visible && seen.Driver == "":
			r.missing(d, seen.GPUs)
		}
	}
	for i := range seen.GPUs {
		if g := &seen.GPUs[i]; g.Health.State == gpu.Lost && r.gave(g) {
			r.problem("%s was given and does not answer: %s", g.UUID, g.Health.Reason)
		}
	}
	r.nodes(seen, given > 0)
	r.OK = len(r.Problems) == 0
	return r
}

// device returns the entry of a device, a new one where there is none.
func (r *Report) device(uuid string) *Device {
	at := slices.IndexFunc(r.Devices, func(d Device) bool { return d.UUID == uuid })
	if at < 0 {
		at = len(r.Devices)
		r.Devices = append(r.Devices, Device{UUID: uuid})
	}
	return &r.Devices[at]
}

func (r *Report) see(uuid, model string) {
	d := r.device(uuid)
	d.Visible, d.Model = true, model
}

func (r *Report) problem(format string, args ...any) {
	r.Problems = append(r.Problems, fmt.Sprintf(format, args...))
}

// missing says of a device that was given why it is not there.
func (r *Report) missing(d *Device, gpus []gpu.GPU) {
	by := strings.Join(d.Variables, ", ")
	if slices.ContainsFunc(gpus, func(g gpu.GPU) bool { return g.UUID == d.UUID }) {
		r.problem("%s was given (%s) and is in MIG mode: as a whole it cannot be used", d.UUID, by)
		return
	}
	r.problem("%s was given (%s) and is not visible", d.UUID, by)
}

// gave says whether a GPU was given, whole or in part.
func (r *Report) gave(g *gpu.GPU) bool {
	return slices.ContainsFunc(r.Devices, func(d Device) bool {
		return len(d.Variables) > 0 && (d.UUID == g.UUID || slices.ContainsFunc(g.MIG.Devices, func(m gpu.MIGDevice) bool { return m.UUID == d.UUID }))
	})
}

// nodes looks for device nodes of other GPUs. Where the driver cannot be asked, only
// a container without devices shows which those are.
func (r *Report) nodes(seen Seen, given bool) {
	for _, minor := range seen.Nodes {
		path := "/dev/nvidia" + strconv.Itoa(minor)
		r.Nodes = append(r.Nodes, path)
		allowed := slices.ContainsFunc(seen.GPUs, func(g gpu.GPU) bool { return g.Minor == minor && r.gave(&g) })
		if !allowed && (seen.Driver == "" || !given) {
			r.problem("the device node %s is of no GPU that was given and is visible", path)
		}
	}
}

// WriteTable writes the report for people.
func (r *Report) WriteTable(out io.Writer) error {
	w := tabwriter.NewWriter(out, 0, 0, 2, ' ', 0)
	fmt.Fprintln(w, "DEVICE\tGIVEN\tVISIBLE\tMODEL")
	for _, d := range r.Devices {
		fmt.Fprintf(w, "%s\t%s\t%s\t%s\n", d.UUID, yes(len(d.Variables) > 0), yes(d.Visible), dash(d.Model))
	}
	if err := w.Flush(); err != nil {
		return err
	}
	_, err := fmt.Fprintf(out, "device nodes: %s\n", dash(strings.Join(r.Nodes, " ")))
	if err != nil {
		return err
	}
	for _, p := range r.Problems {
		if _, err := fmt.Fprintln(out, "problem:", p); err != nil {
			return err
		}
	}
	if r.OK {
		_, err = fmt.Fprintln(out, "the container sees what it was given")
	}
	return err
}

func yes(b bool) string {
	if b {
		return "yes"
	}
	return "no"
}

func dash(s string) string {
	if s == "" {
		return "-"
	}
	return s
}
