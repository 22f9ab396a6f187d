package trace_test

import (
	"bytes"
	"errors"
	"flag"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

var update = flag.Bool("update", false, "write the golden files")

// golden compares with a file of testdata, or writes it.
func golden(t *testing.T, file string, got []byte) {
	t.Helper()
	path := filepath.Join("testdata", file)
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), string(got)); diff != "" {
		t.Errorf("%s (-want +got), run with -update if it is right:\n%s", path, diff)
	}
}

// write returns a trace as text.
func write(t failer, nodes []placement.NodeSpec, source trace.Source) []byte {
	t.Helper()
	var b bytes.Buffer
	w, err := trace.NewWriter(&b, nodes)
	if err != nil {
		t.Fatalf("%v", err)
	}
	for {
		job, err := source.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("%v", err)
		}
		if err := w.Write(job); err != nil {
			t.Fatalf("%v", err)
		}
	}
	if err := w.Flush(); err != nil {
		t.Fatalf("%v", err)
	}
	return b.Bytes()
}

// read reads a trace that must be right.
func read(t failer, text []byte) ([]placement.NodeSpec, []trace.Job) {
	t.Helper()
	r, err := trace.NewReader(bytes.NewReader(text), "t.jsonl")
	if err != nil {
		t.Fatalf("%v", err)
	}
	return r.Nodes(), checkJobs(t, r)
}

// everything has each field of nodes and jobs.
func everything() ([]placement.NodeSpec, []trace.Job) {
	a100, h100 := gpu.ProductByKey("A100-40"), gpu.ProductByKey("H100-80")
	nodes := []placement.NodeSpec{
		{Name: "a", MilliCPU: 96000, MemoryMiB: 1 << 20, Pods: 110, GPUs: 8, Product: "A100-40", GPUMemoryMiB: a100.MemoryMiB, MIG: a100.MIG},
		{Name: "b", MilliCPU: 96000, MemoryMiB: 1 << 20, GPUs: 8, Product: h100.Names[0], GPUMemoryMiB: h100.MemoryMiB, Slots: 4},
		{Name: "c", MilliCPU: 64000, MemoryMiB: 262144, Pods: 1001, GPUs: 2, Product: "T4"}, // memory not known
		{Name: "d", GPUs: 1, Product: "P100", GPUMemoryMiB: 16384},
		{Name: "e", MilliCPU: 32000, MemoryMiB: 1024, Machine: &gpu.Machine{}},
	}
	jobs := []trace.Job{
		{},
		{Duration: time.Second, Priority: -5, Tenant: 3, Request: placement.Request{MilliCPU: 500, MemoryMiB: 1024}},
		{Arrival: time.Millisecond, Class: "test-1", Activity: 230, Request: placement.Request{Count: 1, Milli: 250, GPUMemoryMiB: 4096, Products: []string{"A100-40", `odd "one"\`}}},
		{Arrival: time.Hour, Duration: 36 * time.Hour, Priority: 10, Activity: 1000, Request: placement.Request{Count: 8, Milli: 1000, Links: placement.NVLinked}},
		{Arrival: time.Hour, Request: placement.Request{Count: 2, Milli: 1000, Links: placement.SameNUMA}},
		{Arrival: time.Hour, Request: placement.Request{Count: 2, Profile: "1g.5gb"}},
		{Arrival: 60 * 365 * 24 * time.Hour, Request: placement.Request{Count: 2, Slot: true}},
	}
	for i := range jobs {
		jobs[i].ID = i
	}
	return nodes, jobs
}

func TestFormat(t *testing.T) {
	nodes, jobs := everything()
	text := write(t, nodes, trace.FromSlice(jobs))
	golden(t, "everything.jsonl", text)
	gotNodes, gotJobs := read(t, text)
	for i := range nodes { // what is not written
		nodes[i].Name = gotNodes[i].Name
		nodes[i].Machine = nil
	}
	if nodes[3].Name != "node-0003" {
		t.Errorf("the fourth node is called %s", nodes[3].Name)
	}
	if diff := cmp.Diff(nodes, gotNodes); diff != "" {
		t.Errorf("nodes (-want +got):\n%s", diff)
	}
	if diff := cmp.Diff(jobs, gotJobs); diff != "" {
		t.Errorf("jobs (-want +got):\n%s", diff)
	}
}

func TestFormatHasNoNames(t *testing.T) {
	text := write(t, []placement.NodeSpec{{Name: "secret-host", GPUs: 1, Product: "T4"}}, trace.FromSlice(nil))
	if want := `{"ashlar-trace":1,"nodes":1}` + "\n" + `{"node":0,"gpus":1,"product":"T4","gpu_mem":0}` + "\n"; string(text) != want {
		t.Errorf("got %s\nwant %s", text, want)
	}
}

func TestReaderTakesJSONInAnyForm(t *testing.T) {
	nodes, jobs := read(t, []byte("{\"nodes\" : 1, \"ashlar-trace\":1}\r\n { \"mig\":true,\"product\":\"\\u004130\",\"gpus\":4,\"gpu_mem\":24576,\"node\":0 }\n{\"milli\":1000,\"count\":1,\"cpu\":0,\"at\":7,\"job\":0,\"products\":[]}"))
	if got, want := string(write(t, nodes, trace.FromSlice(jobs))), `{"ashlar-trace":1,"nodes":1}
{"node":0,"gpus":4,"product":"A30","mig":true}
{"job":0,"at":7,"count":1,"milli":1000}
`; got != want {
		t.Errorf("got %s\nwant %s", got, want)
	}
}

func TestReaderErrors(t *testing.T) {
	const header, node = `{"ashlar-trace":1}` + "\n", `{"ashlar-trace":1,"nodes":1}` + "\n"
	for _, c := range []struct{ in, want string }{
		{"", `t.jsonl:1: the file is empty, begin it with {"ashlar-trace":1}`},
		{"\n", "t.jsonl:1: the line is not a JSON object, give one for a header"},
		{"name,cpu_milli\n", "t.jsonl:1: the line is not a JSON object, give one for a header"},
		{`{"nodes":1}`, "t.jsonl:1: key ashlar-trace: is missing, give the version of the format that can be read"},
		{`{"ashlar-trace":2,"new":1}`, "t.jsonl:1: key ashlar-trace: is 2, give 1, the version of the format that can be read"},
		{`{"ashlar-trace":1,"nodes":-1}`, "t.jsonl:1: key nodes: -1 is out of range, give the number of node lines, 0 to 1048576"},
		{`{"ashlar-trace":1,"jobs":1}`, `t.jsonl:1: key "jobs": is unknown in the line of a header, the keys are ashlar-trace, nodes`},
		{node, "t.jsonl:2: the file ends after 0 of 1 nodes, complete it or correct key nodes of the header"},
		{node + `{"job":0,"at":0}`, `t.jsonl:2: key "job": is unknown in the line of a node, the keys are node, cpu, mem, pods, gpus, product, gpu_mem, slots, mig`},
		{node + `{"node":1}`, "t.jsonl:2: key node: is 1, give 0: nodes are numbered one by one from 0"},
		{node + `{"node":0,"gpus":17}`, "t.jsonl:2: key gpus: 17 is out of range, give the number of GPUs, 0 to 16"},
		{node + `{"node":0,"gpus":1}`, "t.jsonl:2: key product: is missing, give the model of the GPUs"},
		{node + `{"node":0,"product":"T4"}`, "t.jsonl:2: key gpus: is 0, give the number of GPUs, or leave product, gpu_mem, slots and mig out"},
		{node + `{"node":0,"gpus":1,"product":"T4","gpu_mem":-1}`, "t.jsonl:2: key gpu_mem: -1 is out of range, give MiB of GPU memory, 0 to 2147483647"},
		{node + `{"node":0,"gpus":1,"product":"T4","mig":true}`, `t.jsonl:2: key mig: the catalogue has no MIG table of "T4", leave it out`},
		{node + `{"node":0,"gpus":1,"product":"T4","mig":false}`, "t.jsonl:2: key mig: false cannot stand here, give true where GPUs may be cut, or leave it out"},
		{header + `{"node":0}`, `t.jsonl:2: key "node": is unknown in the line of a job, the keys are job, at, for, cpu, mem, count, milli, gpu_mem, slot, profile, products, links, busy, prio, tenant, class`},
		{header + `{"job":0,"name":"pod"}`, `t.jsonl:2: key "name": is unknown in the line of a job, the keys are job, at, for, cpu, mem, count, milli, gpu_mem, slot, profile, products, links, busy, prio, tenant, class`},
		{header + `{"job":0}`, "t.jsonl:2: key at: is missing, give milliseconds since the start of the trace"},
		{header + `{"job":1,"at":0}`, "t.jsonl:2: key job: is 1, give 0: jobs are numbered one by one from 0"},
		{header + `{"job":0,"at":9}` + "\n" + `{"job":1,"at":8}`, "t.jsonl:3: key at: is 8, before the 9 of the job before, sort the jobs by arrival"},
		{header + `{"job":0,"at":0,"cpu":1,"cpu":1}`, "t.jsonl:2: key cpu: is there twice, keep one"},
		{header + `{"job":0,"at":0,"cpu":1.5}`, "t.jsonl:2: key cpu: 1.5 cannot stand here, give thousandths of a core"},
		{header + `{"job":0,"at":0,"cpu":"1"}`, `t.jsonl:2: key cpu: "1" cannot stand here, give thousandths of a core`},
		{header + `{"job":0,"at":0,"cpu":null}`, "t.jsonl:2: key cpu: null cannot stand here, give thousandths of a core"},
		{header + `{"job":0,"at":0,"cpu":[1]}`, "t.jsonl:2: key cpu: a list cannot stand here, give thousandths of a core"},
		{header + `{"job":0,"at":0,"cpu":{}}`, "t.jsonl:2: key cpu: an object cannot stand here, give thousandths of a core"},
		{header + `{"job":0,"at":2199023255553}`, "t.jsonl:2: key at: 2199023255553 is out of range, give milliseconds since the start of the trace, 0 to 2199023255552"},
		{header + `{"job":0,"at":99999999999999999999}`, "t.jsonl:2: key at: 99999999999999999999 is out of range, give milliseconds since the start of the trace, 0 to 2199023255552"},
		{header + `{"job":0,"at":0,"links":"any"}`, `t.jsonl:2: key links: "any" cannot stand here, give one of numa, nvlink`},
		{header + `{"job":0,"at":0,"class":"My Pod"}`, `t.jsonl:2: key class: "My Pod" cannot stand here, give up to 32 lower-case letters, digits and hyphens`},
		{header + `{"job":0,"at":0,"class":""}`, `t.jsonl:2: key class: "" cannot stand here, give up to 32 lower-case letters, digits and hyphens`},
		{header + `{"job":0,"at":0,"profile":"\u00e9"}`, `t.jsonl:2: key profile: "é" cannot stand here, give a MIG profile in at most 100 ASCII characters`},
		{header + `{"job":0,"at":0,"products":"T4"}`, `t.jsonl:2: key products: "T4" cannot stand here, give a list of models of GPU, each in at most 100 ASCII characters`},
		{header + `{"job":0,"at":0,"products":[1]}`, `t.jsonl:2: key products: 1 cannot stand here, give a list of models of GPU, each in at most 100 ASCII characters`},
		{header + `{"job":0,"at":0,"count":1,"milli":1000,"products":["b","a"]}`, "t.jsonl:2: invalid request: Products is [b a]: sort them"},
		{header + `{"job":0,"at":0,"count":1}`, "t.jsonl:2: invalid request: Milli is 0: give exactly one of Milli, Slot and Profile"},
		{header + `{"job":0,"at":0,"busy":1}`, "t.jsonl:2: key busy: the job has no devices, leave it out"},
		{header + `{"job":0,"at":0`, "t.jsonl:2: the line is not JSON: unexpected end of JSON input, complete or correct it"},
		{header + `{"job":0,"products":["a"`, "t.jsonl:2: the line is not JSON: unexpected end of JSON input, complete or correct it"},
		{header + `{"job":0 "at":0}`, "t.jsonl:2: the line is not JSON: invalid character '\"' after object key:value pair, complete or correct it"},
		{header + `{"job":0,"at":0}{}`, "t.jsonl:2: the line is not JSON: invalid character '{' after top-level value, complete or correct it"},
		{header + `{"job":0,"at":0}` + "\n\n", "t.jsonl:3: the line is not a JSON object, give one for a job"},
		{header + "{" + strings.Repeat(" ", 1<<20) + "}", "t.jsonl:2: the line is longer than 1048576 bytes, give one node or job a line"},
	} {
		r, err := trace.NewReader(strings.NewReader(c.in), "t.jsonl")
		if err == nil {
			_, err = trace.Collect(r)
			if _, again := r.Next(); !errors.Is(again, err) {
				t.Errorf("%q: %v, and then %v", c.in, err, again)
			}
		}
		if err == nil || err.Error() != c.want {
			t.Errorf("%.200q:\n got %v\nwant %s", c.in, err, c.want)
		}
	}
}

func TestReaderWrapsErrors(t *testing.T) {
	broken := errors.New("broken")
	r, err := trace.NewReader(io.MultiReader(strings.NewReader("{\"ashlar-trace\":1}\n"), iotest.ErrReader(broken)), "t.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Next(); !errors.Is(err, broken) || err.Error() != "t.jsonl:2: broken" {
		t.Errorf("got %v, want t.jsonl:2: broken", err)
	}
	if _, err := trace.NewReader(strings.NewReader(`{"ashlar-trace":1`), "t.jsonl"); err == nil {
		t.Error("half a header is read")
	}
	r, err = trace.NewReader(strings.NewReader("{\"ashlar-trace\":1}\n"+`{"job":0,"at":0,"count":1}`), "t.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	if _, err := r.Next(); !errors.Is(err, placement.ErrInvalid) {
		t.Errorf("got %v, want it to wrap placement.ErrInvalid", err)
	}
}

func TestWriterErrors(t *testing.T) {
	other := *gpu.ProductByKey("A30").MIG
	for _, c := range []struct {
		node placement.NodeSpec
		want string
	}{
		{placement.NodeSpec{MilliCPU: -1}, "node 0: key cpu: -1 is out of range, give thousandths of a core, 0 to 2147483647"},
		{placement.NodeSpec{GPUs: 1}, "node 0: key product: is missing, give the model of the GPUs"},
		{placement.NodeSpec{GPUs: 1, Product: "T4", GPUMemoryMiB: -1}, "node 0: key gpu_mem: -1 is out of range, give MiB of GPU memory, 0 to 2147483647"},
		{placement.NodeSpec{GPUs: 1, Product: "T\n4"}, `node 0: key product: "T\n4" cannot stand here, give a model of GPU in at most 100 ASCII characters`},
		{placement.NodeSpec{GPUs: 1, Product: "P100", MIG: &other}, `node 0: key mig: the catalogue has no MIG table of "P100", leave it out`},
		{placement.NodeSpec{GPUs: 1, Product: "A100-40", MIG: &other}, "node 0: key mig: the MIG table is not that of A100-40 in the catalogue, use that one"},
	} {
		if _, err := trace.NewWriter(io.Discard, []placement.NodeSpec{c.node}); err == nil || err.Error() != c.want {
			t.Errorf("%+v:\n got %v\nwant %s", c.node, err, c.want)
		}
	}
	for _, c := range []struct {
		job  trace.Job
		want string
	}{
		{trace.Job{ID: 1}, "job 1: key job: is 1, give 0: jobs are numbered one by one from 0"},
		{trace.Job{Arrival: -time.Second}, "job 0: key at: is -1000, before the 0 of the job before, sort the jobs by arrival"},
		{trace.Job{Duration: time.Microsecond}, "job 0: key for: 1µs is not a whole number of milliseconds, round it"},
		{trace.Job{Duration: -time.Second}, "job 0: key for: -1000 is out of range, give milliseconds of work, 0 to 2199023255552"},
		{trace.Job{Tenant: -1}, "job 0: key tenant: -1 is out of range, give the number of a tenant, 0 to 2147483647"},
		{trace.Job{Class: "Team A"}, `job 0: key class: "Team A" cannot stand here, give up to 32 lower-case letters, digits and hyphens`},
		{trace.Job{Request: placement.Request{Products: []string{""}}}, `job 0: key products: "" cannot stand here, give a list of models of GPU, each in at most 100 ASCII characters`},
		{trace.Job{Request: placement.Request{Count: 1}}, "job 0: invalid request: Milli is 0: give exactly one of Milli, Slot and Profile"},
	} {
		w, err := trace.NewWriter(io.Discard, nil)
		if err != nil {
			t.Fatal(err)
		}
		err = w.Write(c.job)
		if err == nil || err.Error() != c.want {
			t.Errorf("%+v:\n got %v\nwant %s", c.job, err, c.want)
		}
		if again := w.Write(trace.Job{}); !errors.Is(again, err) || !errors.Is(w.Flush(), err) {
			t.Errorf("%+v: %v, and then %v and %v", c.job, err, again, w.Flush())
		}
	}
}

// drawJob draws a job of any kind.
func drawJob(t *rapid.T, id int, last time.Duration) trace.Job {
	product := rapid.SampledFrom([]string{"A100-40", "T4", "G2", "V100M16"})
	job := trace.Job{
		ID:       id,
		Arrival:  last + time.Duration(rapid.IntRange(0, 1e6).Draw(t, "wait"))*time.Millisecond,
		Duration: time.Duration(rapid.IntRange(0, 1e9).Draw(t, "for")) * time.Millisecond,
		Priority: rapid.IntRange(-1000, 1000).Draw(t, "priority"),
		Tenant:   rapid.IntRange(0, 9).Draw(t, "tenant"),
		Class:    rapid.StringMatching(`([a-z0-9-]{1,32})?`).Draw(t, "class"),
		Request: placement.Request{
			MilliCPU: rapid.IntRange(0, 128000).Draw(t, "cpu"), MemoryMiB: rapid.IntRange(0, 1<<20).Draw(t, "mem"),
			Count: rapid.IntRange(0, placement.MaxGPUs).Draw(t, "count"),
		},
	}
	r := &job.Request
	if r.Count == 0 {
		return job
	}
	job.Activity = rapid.IntRange(0, 1000).Draw(t, "busy")
	r.Links = rapid.SampledFrom([]placement.LinkClass{placement.AnyLink, placement.SameNUMA, placement.NVLinked}).Draw(t, "links")
	if models := rapid.SliceOfNDistinct(product, 0, 3, rapid.ID).Draw(t, "products"); len(models) > 0 {
		slices.Sort(models)
		r.Products = models
	}
	switch rapid.IntRange(0, 2).Draw(t, "kind") {
	case 0:
		r.Milli, r.GPUMemoryMiB = rapid.IntRange(1, 1000).Draw(t, "milli"), rapid.IntRange(0, 80000).Draw(t, "gpu_mem")
	case 1:
		r.Slot = true
	case 2:
		r.Profile = rapid.SampledFrom([]string{"1g.5gb", "7g.40gb"}).Draw(t, "profile")
		r.Links = placement.AnyLink
	}
	return job
}

func TestFormatRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var jobs []trace.Job
		last := time.Duration(0)
		for i := range rapid.IntRange(0, 8).Draw(t, "jobs") {
			jobs = append(jobs, drawJob(t, i, last))
			last = jobs[i].Arrival
		}
		products := gpu.Products()
		var nodes []placement.NodeSpec
		for range rapid.IntRange(0, 4).Draw(t, "nodes") {
			p := products[rapid.IntRange(0, len(products)-1).Draw(t, "product")]
			node := placement.NodeSpec{Name: "n", MilliCPU: rapid.IntRange(0, 1e6).Draw(t, "cpu"), GPUs: rapid.IntRange(0, placement.MaxGPUs).Draw(t, "gpus")}
			if node.GPUs > 0 {
				node.Product = rapid.SampledFrom([]string{p.Key, p.Names[0], "G2"}).Draw(t, "model")
				node.GPUMemoryMiB = rapid.SampledFrom([]int{0, p.MemoryMiB, 12345}).Draw(t, "memory")
				node.Slots = rapid.IntRange(0, 8).Draw(t, "slots")
				if node.Product != "G2" && rapid.Bool().Draw(t, "mig") {
					node.MIG = p.MIG
				}
			}
			nodes = append(nodes, node)
		}
		text := write(t, nodes, trace.FromSlice(jobs))
		gotNodes, gotJobs := read(t, text)
		if diff := cmp.Diff(jobs, gotJobs); diff != "" {
			t.Errorf("jobs (-want +got):\n%s", diff)
		}
		for i := range gotNodes {
			gotNodes[i].Name = "n"
		}
		if diff := cmp.Diff(nodes, gotNodes); diff != "" {
			t.Errorf("nodes (-want +got):\n%s", diff)
		}
		if again := write(t, gotNodes, trace.FromSlice(gotJobs)); !bytes.Equal(again, text) {
			t.Errorf("written %s\nand again %s", text, again)
		}
	})
}

func FuzzReader(f *testing.F) {
	nodes, jobs := everything()
	// Short seeds: long ones are minimised for minutes.
	for i := range nodes {
		f.Add(write(f, nodes[i:i+1], trace.FromSlice(nil)))
	}
	for _, job := range jobs {
		job.ID = 0
		f.Add(write(f, nil, trace.FromSlice([]trace.Job{job})))
	}
	f.Add([]byte("{\"ashlar-trace\":1}\n{\"j\\u006fb\":0, \"at\":0}\r\n"))
	f.Fuzz(func(t *testing.T, in []byte) {
		r, err := trace.NewReader(bytes.NewReader(in), "t.jsonl")
		var jobs []trace.Job
		if err == nil {
			jobs, err = trace.Collect(r)
		}
		if err != nil {
			if !strings.HasPrefix(err.Error(), "t.jsonl:") {
				t.Errorf("%q: %v", in, err)
			}
			return
		}
		text := write(t, r.Nodes(), trace.FromSlice(jobs))
		gotNodes, gotJobs := read(t, text)
		if diff := cmp.Diff(r.Nodes(), gotNodes); diff != "" {
			t.Errorf("nodes (-want +got):\n%s", diff)
		}
		if diff := cmp.Diff(jobs, gotJobs); diff != "" {
			t.Errorf("jobs (-want +got):\n%s", diff)
		}
		if again := write(t, gotNodes, trace.FromSlice(gotJobs)); !bytes.Equal(again, text) {
			t.Errorf("written %s\nand again %s", text, again)
		}
	})
}
