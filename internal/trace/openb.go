package trace

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// openbPodLimit is how many pods a node takes in the simulator that was
// published with the trace.
const openbPodLimit = 1001

var openbNodeColumns = []column{
	{name: "sn", value: "the name of the node"},
	{name: "cpu_milli", value: "thousandths of a core"},
	{name: "memory_mib", value: "MiB of memory"},
	{name: "gpu", value: "the number of GPUs"},
	{name: "model", value: "the model of the GPUs"},
}

// ReadOpenbNodes reads a node list of the openb trace (cluster-trace-gpu-v2023):
// columns sn, cpu_milli, memory_mib, gpu and model, in any order. The trace has
// no GPU memory: GPUMemoryMiB of the nodes is 0. The name of the file is used in
// messages only; they begin with NAME:LINE.
func ReadOpenbNodes(r io.Reader, name string) ([]placement.NodeSpec, error) {
	t, err := newTable(r, name, openbNodeColumns)
	if err != nil {
		return nil, err
	}
	var nodes []placement.NodeSpec
	lines := make(map[string]int)
	for {
		if err := t.next(); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			return nil, err
		}
		node, err := openbNode(t, lines)
		if err != nil {
			return nil, err
		}
		nodes = append(nodes, node)
	}
	if len(nodes) == 0 {
		return nil, fmt.Errorf("%s:%d: the file ends after the header, give a line for each node", name, t.line)
	}
	return nodes, nil
}

func openbNode(t *table, lines map[string]int) (placement.NodeSpec, error) {
	node := placement.NodeSpec{Product: strings.Clone(t.text("model")), Pods: openbPodLimit}
	var err [4]error
	node.Name, err[0] = t.unique("sn", lines)
	node.MilliCPU, err[1] = t.number("cpu_milli", maxNumber)
	node.MemoryMiB, err[2] = t.number("memory_mib", maxNumber)
	node.GPUs, err[3] = t.number("gpu", placement.MaxGPUs)
	switch e := cmp.Or(err[:]...); {
	case e != nil:
		return node, e
	case node.GPUs > 0 && node.Product == "":
		return node, t.fail("model", "is empty, give the model of the GPUs")
	case node.GPUs == 0 && node.Product != "":
		return node, t.fail("model", "is %q but the node has no GPU, leave it empty", clip(node.Product))
	}
	return node, nil
}

// unique returns the name in a column, which no other row may have. The names
// so far are in lines, with their lines.
func (t *table) unique(column string, lines map[string]int) (string, error) {
	name := strings.Clone(t.text(column)) // a field shares memory with its whole row
	if name == "" {
		return "", t.fail(column, "is empty, give a name")
	}
	if line, again := lines[name]; again {
		return "", t.fail(column, "%q is also the name at line %d, give each a name of its own", clip(name), line)
	}
	lines[name] = t.line
	return name, nil
}

// OpenbPod is a pod of the openb trace.
type OpenbPod struct {
	Name string
	// Spec is the column gpu_spec as it stands in the file: the models that
	// will do, separated by "|", in no particular order and perhaps twice; ""
	// where any will do.
	Spec string
	// MilliCPU is in thousandths of a core, MemoryMiB in MiB.
	MilliCPU, MemoryMiB int
	// GPUs is the number of GPUs and Milli the thousandths of each, 1 to 1000.
	// Milli is 1000 for several GPUs and 0 without GPUs.
	GPUs, Milli int
	// Creation and Deletion are since the start of the trace, in whole seconds.
	// Deletion is not before Creation.
	Creation, Deletion time.Duration
	// HasTimes says that Creation is known, Deleted that Deletion is too. A pod
	// that was not deleted outlives the trace.
	HasTimes, Deleted bool
}

// Request returns what the pod asks of a node, valid always. A model that Spec
// names twice stays there twice: published experiments count such pods apart.
func (p OpenbPod) Request() placement.Request {
	r := placement.Request{MilliCPU: p.MilliCPU, MemoryMiB: p.MemoryMiB, Count: p.GPUs, Milli: p.Milli}
	for model := range strings.SplitSeq(p.Spec, "|") {
		if model != "" {
			r.Products = append(r.Products, model)
		}
	}
	slices.Sort(r.Products)
	return r
}

// job returns the pod as a job without times. The trace does not say how busy
// a pod keeps its GPUs; the share that it asks for stands in.
func (p OpenbPod) job(id int) Job {
	return Job{ID: id, Activity: p.Milli, Request: p.Request()}
}

var openbPodColumns = []column{
	{name: "name", value: "the name of the pod"},
	{name: "cpu_milli", value: "thousandths of a core"},
	{name: "memory_mib", value: "MiB of memory"},
	{name: "num_gpu", value: "the number of GPUs"},
	{name: "gpu_milli", value: "thousandths of each GPU"},
	{name: "gpu_spec", value: "models", optional: true},
	{name: "qos", value: "a class of service", optional: true},
	{name: "pod_phase", value: "a phase", optional: true},
	{name: "creation_time", value: "seconds since the start of the trace", optional: true},
	{name: "deletion_time", value: "seconds since the start of the trace", optional: true},
	{name: "scheduled_time", value: "seconds since the start of the trace", optional: true},
}

// PodReader reads a pod list of the openb trace.
type PodReader struct {
	r     io.Reader
	name  string
	table *table
	lines map[string]int
	err   error
}

// OpenbPods returns a reader of a pod list of the openb trace: columns name,
// cpu_milli, memory_mib, num_gpu and gpu_milli in any order, and perhaps
// gpu_spec, qos, pod_phase, creation_time, deletion_time and scheduled_time.
// The name of the file is used in messages only; they begin with NAME:LINE.
//
// gpu_milli of a pod with one GPU is brought into 1 to 1000; with several it
// must be 1000. Without GPUs, gpu_milli and gpu_spec have no meaning and are
// dropped. Times are seconds; they and gpu_spec may be empty. qos, pod_phase
// and scheduled_time are not used.
//
// The reader remembers the names, to refuse one that comes twice.
func OpenbPods(r io.Reader, name string) *PodReader {
	return &PodReader{r: r, name: name, lines: make(map[string]int)}
}

// Next returns the next pod of the file as a job that comes at 0 and never
// leaves: the files are not in the order of creation. OpenbJobs makes jobs with
// times.
func (r *PodReader) Next() (Job, error) {
	id := len(r.lines)
	pod, err := r.NextPod()
	if err != nil {
		return Job{}, err
	}
	return pod.job(id), nil
}

// NextPod returns the next pod of the file, or io.EOF after the last.
func (r *PodReader) NextPod() (OpenbPod, error) {
	if r.err != nil {
		return OpenbPod{}, r.err
	}
	pod, err := r.read()
	if err != nil {
		r.err = err
		return OpenbPod{}, err
	}
	return pod, nil
}

func (r *PodReader) read() (OpenbPod, error) {
	if r.table == nil {
		table, err := newTable(r.r, r.name, openbPodColumns)
		if err != nil {
			return OpenbPod{}, err
		}
		r.table = table
	}
	if err := r.table.next(); errors.Is(err, io.EOF) && len(r.lines) == 0 {
		return OpenbPod{}, fmt.Errorf("%s:%d: the file ends after the header, give a line for each pod", r.name, r.table.line)
	} else if err != nil {
		return OpenbPod{}, err
	}
	return openbPod(r.table, r.lines)
}

func openbPod(t *table, lines map[string]int) (OpenbPod, error) {
	var p OpenbPod
	var err [8]error
	var creation, deletion int
	p.Name, err[0] = t.unique("name", lines)
	p.MilliCPU, err[1] = t.number("cpu_milli", maxNumber)
	p.MemoryMiB, err[2] = t.number("memory_mib", maxNumber)
	p.GPUs, err[3] = t.number("num_gpu", placement.MaxGPUs)
	p.Milli, err[4] = t.number("gpu_milli", maxNumber)
	creation, err[5] = t.number("creation_time", maxNumber)
	deletion, err[6] = t.number("deletion_time", maxNumber)
	_, err[7] = t.number("scheduled_time", maxNumber)
	if e := cmp.Or(err[:]...); e != nil {
		return p, e
	}
	p.HasTimes, p.Deleted = t.text("creation_time") != "", t.text("deletion_time") != ""
	p.Creation, p.Deletion = time.Duration(creation)*time.Second, time.Duration(deletion)*time.Second
	switch {
	case p.Deleted && !p.HasTimes:
		return p, t.fail("creation_time", "is empty but deletion_time is not, give both or neither")
	case p.Deleted && deletion < creation:
		return p, t.fail("deletion_time", "%d is before creation_time %d, give a later one", deletion, creation)
	case p.GPUs == 0:
		p.Milli = 0
		return p, nil
	case p.GPUs > 1 && p.Milli != placement.Whole:
		return p, t.fail("gpu_milli", "is %d of each of %d GPUs, give %d: only one GPU can be shared", p.Milli, p.GPUs, placement.Whole)
	}
	p.Spec = strings.Clone(t.text("gpu_spec"))
	p.Milli = min(max(p.Milli, 1), placement.Whole)
	return p, nil
}

// ReadOpenbPods reads a pod list of the openb trace as OpenbPods does, in the
// order of the file.
func ReadOpenbPods(r io.Reader, name string) ([]OpenbPod, error) {
	reader := OpenbPods(r, name)
	var pods []OpenbPod
	for {
		pod, err := reader.NextPod()
		if errors.Is(err, io.EOF) {
			return pods, nil
		}
		if err != nil {
			return nil, err
		}
		pods = append(pods, pod)
	}
}

// OpenbJobs returns the pods as jobs in the order of their creation; those
// created together, in the order given. A job arrives when its pod was created
// and works from then until the pod was deleted, so it includes the time that
// the pod waited for a node; a pod that was deleted in the second of its
// creation works for one second, because a duration of 0 means for ever. A pod
// without a deletion never leaves, one without times comes at 0 and never
// leaves.
func OpenbJobs(pods []OpenbPod) []Job {
	order := make([]int, len(pods))
	for i := range order {
		order[i] = i
	}
	slices.SortStableFunc(order, func(a, b int) int { return cmp.Compare(pods[a].Creation, pods[b].Creation) })
	jobs := make([]Job, len(pods))
	for id, i := range order {
		p := pods[i]
		jobs[id] = p.job(id)
		jobs[id].Arrival = p.Creation
		if p.Deleted {
			jobs[id].Duration = max(p.Deletion-p.Creation, time.Second)
		}
	}
	return jobs
}
