package trace_test

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

const (
	nodeHeader = "sn,cpu_milli,memory_mib,gpu,model\n"
	podHeader  = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time\n"
)

func TestReadOpenbNodes(t *testing.T) {
	got, err := trace.ReadOpenbNodes(strings.NewReader("gpu,sn,cpu_milli,memory_mib,model\r\n2,a,64000,262144,P100\r\n0,b,32000,1024,\r\n"), "n.csv")
	if err != nil {
		t.Fatal(err)
	}
	want := []placement.NodeSpec{
		{Name: "a", MilliCPU: 64000, MemoryMiB: 262144, Pods: 1001, GPUs: 2, Product: "P100"},
		{Name: "b", MilliCPU: 32000, MemoryMiB: 1024, Pods: 1001},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
}

func TestReadOpenbNodesErrors(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"", "n.csv:1: the file is empty, begin it with the header sn,cpu_milli,memory_mib,gpu,model"},
		{nodeHeader, "n.csv:1: the file ends after the header, give a line for each node"},
		{"sn,cpu_milli,memory_mib,gpu\n", "n.csv:1: column model: is missing, add it with the model of the GPUs"},
		{"sn,cpu_milli,memory_mib,gpu,model,rack\n", "n.csv:1: column rack: is unknown, the columns are sn, cpu_milli, memory_mib, gpu, model"},
		{"sn,sn,memory_mib,gpu,model\n", "n.csv:1: column sn: is there twice, keep one"},
		{nodeHeader + "a,1,1,0\n", "n.csv:2: the line has 4 fields, give 5 as in the header"},
		{nodeHeader + "a,1,1,0,,\n", "n.csv:2: the line has 6 fields, give 5 as in the header"},
		{nodeHeader + "a,1,1,0,\n,1,1,0,\n", "n.csv:3: column sn: is empty, give a name"},
		{nodeHeader + "a,1,1,0,\nb,1,1,0,\na,1,1,0,\n", `n.csv:4: column sn: "a" is also the name at line 2, give each a name of its own`},
		{nodeHeader + "a,1.5,1,0,\n", `n.csv:2: column cpu_milli: "1.5" is not a whole number, give thousandths of a core`},
		{nodeHeader + "a,1,,0,\n", `n.csv:2: column memory_mib: "" is not a whole number, give MiB of memory`},
		{nodeHeader + "a,1,-1,0,\n", "n.csv:2: column memory_mib: -1 is negative, give MiB of memory"},
		{nodeHeader + "a,1,2147483648,0,\n", "n.csv:2: column memory_mib: 2147483648 is too much, give MiB of memory, at most 2147483647"},
		{nodeHeader + "a,1,99999999999999999999,0,\n", "n.csv:2: column memory_mib: 99999999999999999999 is too much, give MiB of memory, at most 2147483647"},
		{nodeHeader + "a,1,-99999999999999999999,0,\n", "n.csv:2: column memory_mib: -99999999999999999999 is negative, give MiB of memory"},
		{nodeHeader + "a,1,1,17,T4\n", "n.csv:2: column gpu: 17 is too much, give the number of GPUs, at most 16"},
		{nodeHeader + "a,1,1,1,\n", "n.csv:2: column model: is empty, give the model of the GPUs"},
		{nodeHeader + "a,1,1,0,T4\n", `n.csv:2: column model: is "T4" but the node has no GPU, leave it empty`},
		{nodeHeader + "a,1,1,0,\n\"b", "n.csv:3: extraneous or missing \" in quoted-field, write the fields without quotes"},
		{strings.Repeat("x", 100) + "\n", "n.csv:1: column " + strings.Repeat("x", 60) + "...: is unknown, the columns are sn, cpu_milli, memory_mib, gpu, model"},
	} {
		nodes, err := trace.ReadOpenbNodes(strings.NewReader(c.in), "n.csv")
		if err == nil || err.Error() != c.want || nodes != nil {
			t.Errorf("%q:\n got %v, error %v\nwant %s", c.in, nodes, err, c.want)
		}
	}
}

func TestReadOpenbPods(t *testing.T) {
	got, err := trace.ReadOpenbPods(strings.NewReader(podHeader+
		"none,1000,2000,0,500,T4,LS,Running,0,7,0\n"+
		"share,1,2,1,460,V100M32|P100||V100M32|,BE,Failed,10,10,\n"+
		"low,0,0,1,0,,,,20,,\n"+
		"high,0,0,1,1001,,,,,,\n"+
		"whole,0,0,8,1000,,,,5,6,5\n"), "p.csv")
	if err != nil {
		t.Fatal(err)
	}
	want := []trace.OpenbPod{
		{Name: "none", MilliCPU: 1000, MemoryMiB: 2000, Deletion: 7 * time.Second, HasTimes: true, Deleted: true},
		{
			Name: "share", Spec: "V100M32|P100||V100M32|", MilliCPU: 1, MemoryMiB: 2, GPUs: 1, Milli: 460,
			Creation: 10 * time.Second, Deletion: 10 * time.Second, HasTimes: true, Deleted: true,
		},
		{Name: "low", GPUs: 1, Milli: 1, Creation: 20 * time.Second, HasTimes: true},
		{Name: "high", GPUs: 1, Milli: 1000},
		{Name: "whole", GPUs: 8, Milli: 1000, Creation: 5 * time.Second, Deletion: 6 * time.Second, HasTimes: true, Deleted: true},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("pods (-want +got):\n%s", diff)
	}
	gpu := func(count, milli int) placement.Request { return placement.Request{Count: count, Milli: milli} }
	share := placement.Request{MilliCPU: 1, MemoryMiB: 2, Count: 1, Milli: 460, Products: []string{"P100", "V100M32", "V100M32"}}
	none := placement.Request{MilliCPU: 1000, MemoryMiB: 2000}
	wantJobs := []trace.Job{
		{ID: 0, Duration: 7 * time.Second, Request: none},
		{ID: 1, Activity: 1000, Request: gpu(1, 1000)}, // without times: at 0, for ever
		{ID: 2, Arrival: 5 * time.Second, Duration: time.Second, Activity: 1000, Request: gpu(8, 1000)},
		{ID: 3, Arrival: 10 * time.Second, Duration: time.Second, Activity: 460, Request: share}, // deleted at once: one second
		{ID: 4, Arrival: 20 * time.Second, Activity: 1, Request: gpu(1, 1)},
	}
	if diff := cmp.Diff(wantJobs, trace.OpenbJobs(got)); diff != "" {
		t.Errorf("jobs (-want +got):\n%s", diff)
	}
}

func TestOpenbPodsKeepTheOrderOfTheFile(t *testing.T) {
	source := trace.OpenbPods(strings.NewReader("name,cpu_milli,memory_mib,num_gpu,gpu_milli\nb,1,2,0,0\na,3,4,1,5\n"), "p.csv")
	got, err := trace.Collect(source)
	if err != nil {
		t.Fatal(err)
	}
	want := []trace.Job{
		{ID: 0, Request: placement.Request{MilliCPU: 1, MemoryMiB: 2}},
		{ID: 1, Activity: 5, Request: placement.Request{MilliCPU: 3, MemoryMiB: 4, Count: 1, Milli: 5}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("jobs (-want +got):\n%s", diff)
	}
	if _, err := source.Next(); !errors.Is(err, io.EOF) {
		t.Errorf("after the end: %v, want io.EOF", err)
	}
}

func TestReadOpenbPodsErrors(t *testing.T) {
	for _, c := range []struct{ in, want string }{
		{"", "p.csv:1: the file is empty, begin it with the header name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"},
		{podHeader, "p.csv:1: the file ends after the header, give a line for each pod"},
		{"name,cpu_milli,memory_mib,num_gpu\n", "p.csv:1: column gpu_milli: is missing, add it with thousandths of each GPU"},
		{podHeader + "a,1,1,0,0,,,,,\n", "p.csv:2: the line has 10 fields, give 11 as in the header"},
		{podHeader + "a,1,1,x,0,,,,,,\n", `p.csv:2: column num_gpu: "x" is not a whole number, give the number of GPUs`},
		{podHeader + "a,1,1,17,1000,,,,,,\n", "p.csv:2: column num_gpu: 17 is too much, give the number of GPUs, at most 16"},
		{podHeader + "a,1,1,1,,,,,,,\n", `p.csv:2: column gpu_milli: "" is not a whole number, give thousandths of each GPU`},
		{podHeader + "a,1,1,2,500,,,,,,\n", "p.csv:2: column gpu_milli: is 500 of each of 2 GPUs, give 1000: only one GPU can be shared"},
		{podHeader + "a,1,1,0,0,,,,noon,,\n", `p.csv:2: column creation_time: "noon" is not a whole number, give seconds since the start of the trace`},
		{podHeader + "a,1,1,0,0,,,,9,8,\n", "p.csv:2: column deletion_time: 8 is before creation_time 9, give a later one"},
		{podHeader + "a,1,1,0,0,,,,,8,\n", "p.csv:2: column creation_time: is empty but deletion_time is not, give both or neither"},
		{podHeader + "a,1,1,0,0,,,,1,2,-1\n", "p.csv:2: column scheduled_time: -1 is negative, give seconds since the start of the trace"},
		{podHeader + "a,1,1,0,0,,,,1,2,\na,1,1,0,0,,,,1,2,\n", `p.csv:3: column name: "a" is also the name at line 2, give each a name of its own`},
	} {
		pods, err := trace.ReadOpenbPods(strings.NewReader(c.in), "p.csv")
		if err == nil || err.Error() != c.want || pods != nil {
			t.Errorf("%q:\n got %v, error %v\nwant %s", c.in, pods, err, c.want)
		}
	}
}

func TestOpenbErrorsOfTheReader(t *testing.T) {
	broken := errors.New("broken")
	source := trace.OpenbPods(io.MultiReader(strings.NewReader(podHeader+"a,1,1,0,0,,,,,,\n"), iotest.ErrReader(broken)), "p.csv")
	if _, err := source.Next(); err != nil {
		t.Fatal(err)
	}
	for range 2 { // an error stays
		if _, err := source.Next(); !errors.Is(err, broken) || err.Error() != "p.csv: broken" {
			t.Errorf("got %v, want p.csv: broken", err)
		}
	}
	if _, err := trace.ReadOpenbNodes(iotest.ErrReader(broken), "n.csv"); !errors.Is(err, broken) {
		t.Errorf("got %v, want it to wrap the error of the reader", err)
	}
}

// openOpenb opens a file of the published trace, or skips the test.
func openOpenb(t *testing.T, file string) io.Reader {
	t.Helper()
	path := filepath.Join("..", "..", "..", "shared", "openb", file)
	data, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		t.Skipf("%s is not there: put the CSV files of cluster-trace-gpu-v2023 into its folder to run this test", path)
	}
	if err != nil {
		t.Fatal(err)
	}
	return bytes.NewReader(data)
}

func TestOpenbPublishedNodes(t *testing.T) {
	for _, c := range []struct {
		file             string
		nodes, gpus, cpu int
	}{
		{"openb_node_list_gpu_node.csv", 1213, 6212, 107018000},
		{"openb_node_list_all_node.csv", 1523, 6212, 125514000},
	} {
		nodes, err := trace.ReadOpenbNodes(openOpenb(t, c.file), c.file)
		if err != nil {
			t.Fatal(err)
		}
		gpus, cpu := 0, 0
		for _, n := range nodes {
			gpus += n.GPUs
			cpu += n.MilliCPU
		}
		if len(nodes) != c.nodes || gpus != c.gpus || cpu != c.cpu {
			t.Errorf("%s: %d nodes, %d GPUs, %d milli CPU; want %d, %d, %d", c.file, len(nodes), gpus, cpu, c.nodes, c.gpus, c.cpu)
		}
	}
}

func TestOpenbPublishedPods(t *testing.T) {
	for _, c := range []struct {
		workload string
		pods     int
		times    bool
	}{
		{"default", 8152, true},
		{"cpu050", 7439, true},
		{"cpu100", 7853, true},
		{"cpu200", 8832, true},
		{"cpu250", 9420, true},
		{"gpushare40", 8152, true},
		{"gpushare60", 8152, true},
		{"gpushare80", 8152, true},
		{"gpushare100", 8152, true},
		{"gpuspec10", 8152, true},
		{"gpuspec20", 8152, true},
		{"gpuspec25", 8152, true},
		{"gpuspec33", 8152, true},
		{"multigpu20", 8324, false},
		{"multigpu30", 8508, false},
		{"multigpu40", 8746, false},
		{"multigpu50", 9061, false},
	} {
		file := fmt.Sprintf("openb_pod_list_%s.csv", c.workload)
		pods, err := trace.ReadOpenbPods(openOpenb(t, file), file)
		if err != nil {
			t.Error(err)
			continue
		}
		if len(pods) != c.pods {
			t.Errorf("%s: %d pods, want %d", file, len(pods), c.pods)
		}
		for _, p := range pods {
			if p.HasTimes != c.times || p.Deleted != c.times {
				t.Fatalf("%s: %s has times: %v, %v, want %v", file, p.Name, p.HasTimes, p.Deleted, c.times)
			}
		}
		checkJobs(t, trace.FromSlice(trace.OpenbJobs(pods)))
	}
}

// failer is a test of any kind.
type failer interface {
	Helper()
	Errorf(format string, args ...any)
	Fatalf(format string, args ...any)
}

// checkJobs reads a source to its end and checks what Job promises.
func checkJobs(t failer, source trace.Source) []trace.Job {
	t.Helper()
	jobs, err := trace.Collect(source)
	if err != nil {
		t.Fatalf("%v", err)
	}
	last := time.Duration(0)
	for i, job := range jobs {
		if job.ID != i || job.Arrival < last || job.Duration < 0 || job.Tenant < 0 || job.Activity < 0 || job.Activity > 1000 {
			t.Fatalf("job %d after %v is %+v", i, last, job)
		}
		if err := job.Request.Validate(); err != nil {
			t.Fatalf("job %d: %v", i, err)
		}
		last = job.Arrival
	}
	return jobs
}

func FuzzOpenbNodes(f *testing.F) {
	f.Add(nodeHeader + "a,1,1,2,T4\nb,1,1,0,\n")
	f.Add(nodeHeader + "a,1,1,0\n")
	f.Fuzz(func(t *testing.T, in string) {
		nodes, err := trace.ReadOpenbNodes(strings.NewReader(in), "n.csv")
		if err != nil {
			if nodes != nil || !strings.HasPrefix(err.Error(), "n.csv:") {
				t.Errorf("%q: %v, %v", in, nodes, err)
			}
			return
		}
		for _, n := range nodes {
			if n.Name == "" || n.MilliCPU < 0 || n.MemoryMiB < 0 || n.GPUs < 0 || n.GPUs > placement.MaxGPUs || (n.GPUs == 0) != (n.Product == "") {
				t.Errorf("%q gives %+v", in, n)
			}
		}
	})
}

func FuzzOpenbPods(f *testing.F) {
	f.Add(podHeader + "a,1000,2000,1,460,T4|A10,LS,Running,0,7,0\nb,1,1,8,1000,,,,,,\n")
	f.Add("name,cpu_milli,memory_mib,num_gpu,gpu_milli\na,1,1,0,0\n")
	f.Fuzz(func(t *testing.T, in string) {
		pods, err := trace.ReadOpenbPods(strings.NewReader(in), "p.csv")
		if err != nil {
			if pods != nil || !strings.HasPrefix(err.Error(), "p.csv:") {
				t.Errorf("%q: %v, %v", in, pods, err)
			}
			return
		}
		checkJobs(t, trace.FromSlice(trace.OpenbJobs(pods)))
		checkJobs(t, trace.OpenbPods(strings.NewReader(in), "p.csv"))
	})
}
