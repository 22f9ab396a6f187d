package trace

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

const (
	// formatVersion is the version of the format that is read and written.
	formatVersion = 1
	// maxNodes bounds the nodes of a trace.
	maxNodes = 1 << 20
	// maxMillis is the longest time of a trace in milliseconds, 69 years.
	maxMillis = 1 << 41
	// maxText is the longest name of a product or a profile.
	maxText = 100
)

// headerLine is the first line.
type headerLine struct{ version, nodes int }

func (h *headerLine) fields() []field {
	return []field{
		{key: "ashlar-trace", value: "the version of the format that can be read", to: &h.version, least: formatVersion, most: formatVersion, needed: true},
		{key: "nodes", value: "the number of node lines", to: &h.nodes, most: maxNodes},
	}
}

// nodeLine is the line of a node.
type nodeLine struct {
	node                         int
	cpu, mem, pods, gpus, gpuMem int
	product                      string
	slots                        int
	mig                          bool
}

// unset is the GPU memory of a node line that leaves it to the catalogue.
const unset = -1

func (n *nodeLine) fields() []field {
	return []field{
		{key: "node", value: "the number of the node, counted from 0", to: &n.node, most: maxNodes, needed: true},
		{key: "cpu", value: "thousandths of a core", to: &n.cpu, most: maxNumber},
		{key: "mem", value: "MiB of memory", to: &n.mem, most: maxNumber},
		{key: "pods", value: "the number of pods", to: &n.pods, most: maxNumber},
		{key: "gpus", value: "the number of GPUs", to: &n.gpus, most: placement.MaxGPUs},
		{key: "product", value: "a model of GPU in at most 100 ASCII characters", to: &n.product, text: isText},
		{key: "gpu_mem", value: "MiB of GPU memory", to: &n.gpuMem, most: maxNumber, absent: unset},
		{key: "slots", value: "the number of time-slicing slots of a GPU", to: &n.slots, most: maxNumber},
		{key: "mig", value: "true where GPUs may be cut, or leave it out", to: &n.mig},
	}
}

// jobLine is the line of a job.
type jobLine struct {
	job                      int
	at, work                 time.Duration
	cpu, mem                 int
	count, milli, gpuMem     int
	slot                     bool
	profile                  string
	products                 []string
	links                    string
	busy, priority, tenantNo int
	class                    string
}

func (j *jobLine) fields() []field {
	return []field{
		{key: "job", value: "the number of the job, counted from 0", to: &j.job, most: maxNumber, needed: true},
		{key: "at", value: "milliseconds since the start of the trace", to: &j.at, most: maxMillis, needed: true},
		{key: "for", value: "milliseconds of work", to: &j.work, most: maxMillis},
		{key: "cpu", value: "thousandths of a core", to: &j.cpu, most: maxNumber},
		{key: "mem", value: "MiB of memory", to: &j.mem, most: maxNumber},
		{key: "count", value: "the number of devices", to: &j.count, most: placement.MaxGPUs},
		{key: "milli", value: "thousandths of each GPU", to: &j.milli, most: placement.Whole},
		{key: "gpu_mem", value: "MiB of GPU memory", to: &j.gpuMem, most: maxNumber},
		{key: "slot", value: "true for time-slicing slots, or leave it out", to: &j.slot},
		{key: "profile", value: "a MIG profile in at most 100 ASCII characters", to: &j.profile, text: isText},
		{key: "products", value: "a list of models of GPU, each in at most 100 ASCII characters", to: &j.products, text: isText},
		{key: "links", value: "one of numa, nvlink", to: &j.links, text: isLinks},
		{key: "busy", value: "thousandths of each GPU", to: &j.busy, most: placement.Whole},
		{key: "prio", value: "a priority", to: &j.priority, least: -maxNumber, most: maxNumber},
		{key: "tenant", value: "the number of a tenant", to: &j.tenantNo, most: maxNumber},
		{key: "class", value: classHint, to: &j.class, text: isClass},
	}
}

// isText says whether a text can be the name of a product or a profile. It is
// printable ASCII, which reads the same everywhere.
func isText(s string) bool {
	return len(s) <= maxText && strings.IndexFunc(s, func(r rune) bool { return r < ' ' || r > '~' }) < 0
}

// linkNames are the classes of links that are written; placement.AnyLink is
// not.
var linkNames = map[string]placement.LinkClass{
	"":                          placement.AnyLink,
	placement.SameNUMA.String(): placement.SameNUMA,
	placement.NVLinked.String(): placement.NVLinked,
}

func isLinks(s string) bool { return linkNames[s] != placement.AnyLink }

// product returns the product of the catalogue that a NodeSpec means, or nil.
func product(name string) *gpu.Product {
	if p := gpu.ProductByKey(name); p != nil {
		return p
	}
	return gpu.ProductByName(name)
}

// set makes the line of a node. It fails where the line could not say what the
// node is.
func (n *nodeLine) set(i int, spec placement.NodeSpec) error {
	*n = nodeLine{
		node: i, cpu: spec.MilliCPU, mem: spec.MemoryMiB, pods: spec.Pods,
		gpus: spec.GPUs, product: spec.Product, gpuMem: unset, slots: spec.Slots, mig: spec.MIG != nil,
	}
	p, usual := product(spec.Product), 0
	if p != nil {
		usual = p.MemoryMiB
	}
	switch {
	case spec.GPUMemoryMiB < 0:
		return fmt.Errorf("key gpu_mem: %d is out of range, give MiB of GPU memory, 0 to %d", spec.GPUMemoryMiB, maxNumber)
	case spec.GPUMemoryMiB != usual:
		n.gpuMem = spec.GPUMemoryMiB
	}
	if n.mig && p != nil && p.MIG != nil && !reflect.DeepEqual(spec.MIG, p.MIG) {
		return fmt.Errorf("key mig: the MIG table is not that of %s in the catalogue, use that one", spec.Product)
	}
	return n.check()
}

// check names the first key that does not go with the others.
func (n *nodeLine) check() error {
	p := product(n.product)
	switch {
	case n.gpus == 0 && (n.product != "" || n.gpuMem > 0 || n.slots != 0 || n.mig):
		return errors.New("key gpus: is 0, give the number of GPUs, or leave product, gpu_mem, slots and mig out")
	case n.gpus > 0 && n.product == "":
		return errors.New("key product: is missing, give the model of the GPUs")
	case n.mig && (p == nil || p.MIG == nil):
		return fmt.Errorf("key mig: the catalogue has no MIG table of %q, leave it out", clip(n.product))
	}
	return nil
}

// spec returns the node of a line that passed check.
func (n *nodeLine) spec() placement.NodeSpec {
	spec := placement.NodeSpec{
		Name: nodeName(n.node), MilliCPU: n.cpu, MemoryMiB: n.mem, Pods: n.pods, GPUs: n.gpus, Product: n.product, Slots: n.slots,
	}
	if p := product(n.product); p != nil {
		spec.GPUMemoryMiB = p.MemoryMiB
		if n.mig {
			spec.MIG = p.MIG
		}
	}
	if n.gpuMem != unset {
		spec.GPUMemoryMiB = n.gpuMem
	}
	return spec
}

func (j *jobLine) set(job *Job) {
	r := &job.Request
	*j = jobLine{
		job: job.ID, at: job.Arrival, work: job.Duration, cpu: r.MilliCPU, mem: r.MemoryMiB,
		count: r.Count, milli: r.Milli, gpuMem: r.GPUMemoryMiB, slot: r.Slot, profile: r.Profile, products: r.Products,
		busy: job.Activity, priority: job.Priority, tenantNo: job.Tenant, class: job.Class,
	}
	if r.Links != placement.AnyLink {
		j.links = r.Links.String()
	}
}

func (j *jobLine) toJob() Job {
	return Job{
		ID: j.job, Arrival: j.at, Duration: j.work, Priority: j.priority, Tenant: j.tenantNo, Class: j.class, Activity: j.busy,
		Request: placement.Request{
			MilliCPU: j.cpu, MemoryMiB: j.mem, Count: j.count, Milli: j.milli, GPUMemoryMiB: j.gpuMem,
			Slot: j.slot, Profile: j.profile, Products: j.products, Links: linkNames[j.links],
		},
	}
}

// order is what the jobs before say of the next.
type order struct {
	jobs int
	last time.Duration
}

// check names the first thing of a job that does not go with the others or
// with those before.
func (o *order) check(job *Job) error {
	switch {
	case job.ID != o.jobs:
		return fmt.Errorf("key job: is %d, give %d: jobs are numbered one by one from 0", job.ID, o.jobs)
	case job.Arrival < o.last:
		return fmt.Errorf("key at: is %d, before the %d of the job before, sort the jobs by arrival", job.Arrival.Milliseconds(), o.last.Milliseconds())
	case job.Activity > 0 && job.Request.Count == 0:
		return errors.New("key busy: the job has no devices, leave it out")
	}
	if err := job.Request.Validate(); err != nil {
		return err
	}
	o.jobs++
	o.last = job.Arrival
	return nil
}

// Reader reads a trace in the format of this package.
type Reader struct {
	lines  *lines
	nodes  []placement.NodeSpec
	line   jobLine
	fields []field
	order  order
	err    error
}

// NewReader reads the header and the nodes of a trace. The name of the file is
// used in messages only; they begin with NAME:LINE and name the key, or the
// field of the request. What r holds beyond the last line that was asked for
// may have been read too.
func NewReader(r io.Reader, name string) (*Reader, error) {
	t := &Reader{lines: newLines(r, name)}
	t.fields = t.line.fields()
	var header headerLine
	if err := t.lines.read("a header", header.fields()); errors.Is(err, io.EOF) {
		return nil, fmt.Errorf(`%s:1: the file is empty, begin it with {"ashlar-trace":%d}`, name, formatVersion)
	} else if err != nil {
		return nil, err
	}
	var line nodeLine
	fields := line.fields()
	for i := range header.nodes {
		if err := t.lines.read("a node", fields); errors.Is(err, io.EOF) {
			return nil, t.lines.fail("the file ends after %d of %d nodes, complete it or correct key nodes of the header", i, header.nodes)
		} else if err != nil {
			return nil, err
		}
		if line.node != i {
			return nil, t.lines.fail("key node: is %d, give %d: nodes are numbered one by one from 0", line.node, i)
		}
		if err := line.check(); err != nil {
			return nil, t.lines.fail("%w", err)
		}
		t.nodes = append(t.nodes, line.spec())
	}
	return t, nil
}

// Nodes returns the nodes of the trace, in a slice of the caller's. Those with
// the same product share its MIG table: do not change it.
func (r *Reader) Nodes() []placement.NodeSpec { return slices.Clone(r.nodes) }

// Next returns the next job, or io.EOF after the last. After an error it
// returns the same error again.
func (r *Reader) Next() (Job, error) {
	if r.err != nil {
		return Job{}, r.err
	}
	if r.err = r.lines.read("a job", r.fields); r.err != nil {
		return Job{}, r.err
	}
	job := r.line.toJob()
	if err := r.order.check(&job); err != nil {
		r.err = r.lines.fail("%w", err)
		return Job{}, r.err
	}
	return job, nil
}

// Writer writes a trace in the format of this package.
type Writer struct {
	w      *bufio.Writer
	line   jobLine
	fields []field
	buffer []byte
	order  order
	err    error
}

// NewWriter writes the header and the nodes of a trace; the caller writes the
// jobs and then calls Flush. Names and Machines of the nodes are not written.
// It fails, naming the key, where a node has what a line cannot say, such as a
// MIG table that is not in the catalogue.
func NewWriter(w io.Writer, nodes []placement.NodeSpec) (*Writer, error) {
	t := &Writer{w: bufio.NewWriter(w)}
	t.fields = t.line.fields()
	header := headerLine{version: formatVersion, nodes: len(nodes)}
	if err := t.write(header.fields()); err != nil {
		return nil, fmt.Errorf("header: %w", err)
	}
	var line nodeLine
	fields := line.fields()
	for i := range nodes {
		err := line.set(i, nodes[i])
		if err == nil {
			err = t.write(fields)
		}
		if err != nil {
			return nil, fmt.Errorf("node %d: %w", i, err)
		}
	}
	return t, nil
}

// write writes a line after a check of its fields.
func (t *Writer) write(fields []field) error {
	for i := range fields {
		if err := fields[i].check(); err != nil {
			return err
		}
	}
	t.buffer = appendLine(t.buffer[:0], fields)
	_, err := t.w.Write(t.buffer)
	return err
}

// Write writes the next job. The ID must be the number of jobs before it, the
// arrival not before theirs, and times whole milliseconds; the request must
// pass Validate. Otherwise the error names the key or the field, and nothing is
// written. After an error Write returns the same error again.
func (t *Writer) Write(job Job) error {
	if t.err != nil {
		return t.err
	}
	t.line.set(&job)
	err := t.order.check(&job)
	if err == nil {
		err = t.write(t.fields)
	}
	if err != nil {
		t.err = fmt.Errorf("job %d: %w", job.ID, err)
	}
	return t.err
}

// Flush writes what is still in memory. It returns the error of an earlier
// Write.
func (t *Writer) Flush() error {
	if t.err != nil {
		return t.err
	}
	return t.w.Flush()
}
