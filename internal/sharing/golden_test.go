package sharing

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

var update = flag.Bool("update", false, "rewrite the golden files")

// golden compares text with a file, or rewrites the file.
func golden(t *testing.T, file, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(string(want), got); diff != "" {
		t.Errorf("%s (-want +got):\n%s", file, diff)
	}
}

func testFiles(t testing.TB, pattern string, least int) []string {
	t.Helper()
	files, err := filepath.Glob(pattern)
	if err != nil {
		t.Fatal(err)
	}
	if len(files) < least {
		t.Fatalf("%s: found %d files, want at least %d", pattern, len(files), least)
	}
	return files
}

func TestParseRefuses(t *testing.T) {
	for _, file := range testFiles(t, "testdata/bad/*.yaml", 22) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			c, warnings, err := Parse(filepath.Base(file), data)
			if err == nil || c != nil || warnings != nil {
				t.Fatalf("Parse = %v, %v, %v; want an error alone", c, warnings, err)
			}
			checkProblems(t, err, string(data))
			golden(t, strings.TrimSuffix(file, ".yaml")+".txt", err.Error()+"\n")
		})
	}
}

// checkProblems asserts what holds for every error of Parse.
func checkProblems(t testing.TB, err error, text string) {
	t.Helper()
	var errs Errors
	if !errors.As(err, &errs) || len(errs) == 0 {
		t.Fatalf("error is a %T with %d problems, want Errors with at least one", err, len(errs))
	}
	last := 0
	for _, p := range errs {
		if p.Line < last || p.Line > 1+strings.Count(text, "\n")+strings.Count(text, "\r")+
			strings.Count(text, "\u0085")+strings.Count(text, "\u2028")+strings.Count(text, "\u2029") {
			t.Errorf("line %d after %d, or beyond the file: %s", p.Line, last, p)
		}
		last = p.Line
		if p.Line == 0 && p.Key != "" || p.Message == "" {
			t.Errorf("problem without a line or message: %#v", p)
		}
	}
}

func TestPlanOfFiles(t *testing.T) {
	machines := []struct {
		name    string
		machine *gpu.Machine
	}{{"8 A100", eightA100()}, {"4 A10G", fourA10G()}, {"all MIG", allMIG()}, {"mixed", mixed()}}
	for _, file := range testFiles(t, "testdata/good/*.yaml", 10) {
		t.Run(filepath.Base(file), func(t *testing.T) {
			data, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			c, warnings, err := Parse(filepath.Base(file), data)
			if err != nil {
				t.Fatal(err)
			}
			var b strings.Builder
			for _, w := range warnings {
				fmt.Fprintf(&b, "warning: %s\n", w)
			}
			for _, m := range machines {
				fmt.Fprintf(&b, "\n== %s\n", m.name)
				plan, warnings, err := c.Plan(m.machine)
				for _, w := range warnings {
					fmt.Fprintf(&b, "warning: %s\n", w)
				}
				if err != nil {
					fmt.Fprintf(&b, "error: %s\n", err)
					continue
				}
				if err := plan.WriteTable(&b); err != nil {
					t.Fatal(err)
				}
				for _, r := range plan.Resources {
					fmt.Fprintf(&b, "%s:", r.Name)
					for _, d := range r.Devices {
						if b.WriteString(" " + d.Index); d.ID.Slot != gpu.NoSlot {
							fmt.Fprintf(&b, "/%d", d.ID.Slot)
						}
					}
					b.WriteByte('\n')
				}
			}
			golden(t, strings.TrimSuffix(file, ".yaml")+".txt", b.String())
		})
	}
}

// machine returns n GPUs of a product, by its key in the catalogue.
func machine(n int, product string) *gpu.Machine {
	p := gpu.ProductByKey(product)
	m := &gpu.Machine{Links: gpu.NewLinks(n)}
	for i := range n {
		m.GPUs = append(m.GPUs, gpu.GPU{
			Index: i, Minor: i, UUID: testUUID("GPU", i), Name: p.Names[0], MemoryMiB: p.MemoryMiB, Compute: p.Compute,
			NUMA: i * 2 / n, MIG: gpu.MIGState{Capable: p.MIG != nil},
		})
	}
	return m
}

func testUUID(kind string, n int) string {
	return fmt.Sprintf("%s-00000000-0000-4000-8000-%012d", kind, n)
}

// cut turns MIG mode on and makes devices of the given profiles.
func cut(g *gpu.GPU, profiles ...string) {
	table := gpu.ProductByName(g.Name).MIG
	g.MIG.Enabled, g.MIG.Pending = true, true
	for j, name := range profiles {
		p := table.ByName(name)
		at := table.Free(g.MIG.Geometry(), p.ID)[0]
		g.MIG.Devices = append(g.MIG.Devices, gpu.MIGDevice{
			Index: j, UUID: testUUID("MIG", 100*g.Index+j), GI: 3 + j, ProfileID: p.ID,
			Profile: name, Placement: at, MemoryMiB: p.MemoryMiB,
		})
	}
}

func eightA100() *gpu.Machine { return machine(8, "A100-40") }

func fourA10G() *gpu.Machine { return machine(4, "A10G") }

func allMIG() *gpu.Machine {
	m := machine(2, "A100-40")
	cut(&m.GPUs[0], "3g.20gb", "3g.20gb")
	cut(&m.GPUs[1], "3g.20gb", "3g.20gb")
	return m
}

// mixed has a whole GPU, two in MIG mode of which one is empty, an unhealthy
// one, a lost one, and another model.
func mixed() *gpu.Machine {
	m := machine(6, "A100-40")
	cut(&m.GPUs[1], "3g.20gb", "1g.5gb", "1g.5gb", "1g.5gb+me")
	cut(&m.GPUs[2])
	m.GPUs[3].Health = gpu.Health{State: gpu.Unhealthy, Reason: "XID 79"}
	m.GPUs[4].Health = gpu.Health{State: gpu.Lost, Reason: "fell off the bus"}
	a10g := gpu.ProductByKey("A10G")
	m.GPUs[5].Name, m.GPUs[5].MemoryMiB, m.GPUs[5].MIG = a10g.Names[0], a10g.MemoryMiB, gpu.MIGState{}
	return m
}
