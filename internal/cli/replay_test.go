package cli

import (
	"bytes"
	"context"
	"encoding/xml"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/simulator"
)

func TestParseSeeds(t *testing.T) {
	got, err := parseSeeds("42,44,50-52,0")
	if err != nil || !slices.Equal(got, []int64{42, 44, 50, 51, 52, 0}) {
		t.Errorf("parseSeeds = %v, %v", got, err)
	}
	if got, err := parseSeeds("0-9223372036854775807"); err == nil {
		t.Errorf("parseSeeds of too wide a range = %d seeds", len(got))
	}
}

func TestGPUsKey(t *testing.T) {
	for milli, want := range map[int]string{0: "cpu", 1: "share", 999: "share", 1000: "1", 1500: "1.5", 8000: "8"} {
		if got := gpusKey(milli); got != want {
			t.Errorf("gpusKey(%d) = %q, want %q", milli, got, want)
		}
	}
}

func TestSummarise(t *testing.T) {
	outcomes := []outcome{
		{Allocated: map[string]float64{"90": 80, "95": 90}, Placed: 7, FailedByGPUs: map[string]float64{"8": 3}},
		{Allocated: map[string]float64{"90": 81}, Placed: 9},
	}
	none := map[string]float64{}
	want := outcome{
		Allocated: map[string]float64{"90": 80.5, "95": 90}, Fragmented: none, Placed: 8,
		FailedByGPUs: map[string]float64{"8": 1.5}, Reasons: none,
	}
	if diff := cmp.Diff(want, summarise(outcomes, 1, 4, mean)); diff != "" {
		t.Errorf("mean (-want +got):\n%s", diff)
	}
	want = outcome{
		Allocated: map[string]float64{"90": 0.7071}, Fragmented: none, Placed: 1.4142,
		FailedByGPUs: map[string]float64{"8": 2.1213}, Reasons: none,
	}
	if diff := cmp.Diff(want, summarise(outcomes, 2, 4, deviation)); diff != "" {
		t.Errorf("deviation (-want +got):\n%s", diff)
	}
}

// fakeRuns is a report of every policy with two seeds, without a simulation.
func fakeRuns() *replayReport {
	policies := placement.Policies()
	var runs []run
	for i := range policies {
		for seed := range 2 {
			r := &simulator.FillReport{GPUs: 14, Allocated: 90 + float64(i+seed), Points: make([]simulator.FillPoint, 131)}
			for percent := seed; percent < len(r.Points); percent += 2 {
				r.Points[percent] = simulator.FillPoint{N: 1, Allocated: min(float64(percent), r.Allocated), Fragmented: float64(percent*i) / 10}
			}
			runs = append(runs, run{int64(seed), r})
		}
	}
	load := &workload{name: `a<b>&"c".csv`, inflate: 1.3, nodes: []placement.NodeSpec{{GPUs: 8}, {GPUs: 6}}}
	return newReplayReport(&replayOptions{}, load, policies, runs)
}

func TestFigure(t *testing.T) {
	var first, second bytes.Buffer
	for _, b := range []*bytes.Buffer{&first, &second} {
		if err := fakeRuns().figure().writeTo(b); err != nil {
			t.Fatal(err)
		}
	}
	if first.String() != second.String() {
		t.Error("two pictures of the same report differ")
	}
	counts := map[string]int{}
	var texts []string
	for d := xml.NewDecoder(&first); ; {
		token, err := d.Token()
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			t.Fatalf("the picture is no XML: %v", err)
		}
		switch token := token.(type) {
		case xml.StartElement:
			counts[token.Name.Local]++
		case xml.CharData:
			texts = append(texts, string(token))
		}
	}
	lines := 2*len(placement.Policies()) + 1
	if counts["svg"] != 1 || counts["desc"] != 1 || counts["g"] != 2 || counts["title"] != 1+lines {
		t.Errorf("elements = %v, want 1 svg, 1 desc, 2 g and %d titles", counts, 1+lines)
	}
	for _, want := range []string{`a<b>&"c".csv on 2 nodes with 14 GPUs, pods for 130 % of the GPUs`, "Allocation", "Fragmentation", "120", "gpu-clustering"} {
		if !slices.Contains(texts, want) {
			t.Errorf("the picture does not have the text %q", want)
		}
	}
	if strings.Contains(second.String(), "NaN") || strings.Contains(second.String(), "Inf") {
		t.Error("the picture has coordinates that are no numbers")
	}
}

func TestTicks(t *testing.T) {
	for _, c := range []struct {
		axis axis
		want string
	}{
		{axis{"", 0, 130}, "[0 20 40 60 80 100 120]"},
		{axis{"", 0, 100}, "[0 20 40 60 80 100]"},
		{axis{"", 0, 1}, "[0 0.2 0.4 0.6 0.8 1]"},
		{axis{"", 80, 101}, "[80 85 90 95 100]"},
	} {
		var got []string
		for _, v := range c.axis.ticks(400) {
			got = append(got, number(v))
		}
		if fmt.Sprint(got) != c.want {
			t.Errorf("ticks of %v to %v = %v, want %s", c.axis.low, c.axis.high, got, c.want)
		}
	}
}

func TestInParallel(t *testing.T) {
	var active, most, calls atomic.Int32
	err := inParallel(t.Context(), 50, 3, func(int) error {
		n := active.Add(1)
		for old := most.Load(); n > old && !most.CompareAndSwap(old, n); old = most.Load() {
		}
		calls.Add(1)
		active.Add(-1)
		return nil
	})
	if err != nil || calls.Load() != 50 || most.Load() > 3 {
		t.Errorf("error %v, %d calls, %d at a time; want none, 50, at most 3", err, calls.Load(), most.Load())
	}

	for range 20 {
		err := inParallel(t.Context(), 50, 4, func(i int) error {
			if i >= 5 {
				return fmt.Errorf("error of %d", i)
			}
			return nil
		})
		if err == nil || err.Error() != "error of 5" {
			t.Fatalf("error %v, want that of the lowest number", err)
		}
	}

	// A call that never ends does not hold up an interrupt.
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	defer close(release)
	err = inParallel(ctx, 2, 1, func(int) error {
		cancel()
		<-release
		return nil
	})
	if !errors.Is(err, context.Canceled) {
		t.Errorf("error %v, want that of the context", err)
	}
}

func TestWriteFile(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "f")
	write := func(text string, err error) error {
		return writeFile(path, func(w io.Writer) error {
			_, _ = io.WriteString(w, text)
			return err
		})
	}
	if err := write("old", nil); err != nil {
		t.Fatal(err)
	}
	broken := errors.New("broken")
	if err := write("new", broken); !errors.Is(err, broken) {
		t.Errorf("error %v, want %v", err, broken)
	}
	entries, err := os.ReadDir(dir)
	data, _ := os.ReadFile(path)
	if err != nil || len(entries) != 1 || string(data) != "old" {
		t.Errorf("after an error: %q in %d files, %v; want the old file alone", data, len(entries), err)
	}
}
