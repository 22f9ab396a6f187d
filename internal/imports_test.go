// Package internal holds the test of the import rules of docs/architecture.md.
package internal

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"io"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

const module = "github.com/ashlar-gpu/ashlar/"

// pure are the packages whose output depends on their arguments alone.
var pure = []string{"gpu", "placement", "quota", "trace", "simulator", "kube", "sharing", "lint", "nearest", "health"}

// layers says which packages of this module a package may import, where that
// is limited. Packages that do not exist yet are listed too.
var layers = map[string]struct {
	allowed []string
	reason  string
}{
	"gpu":       {nil, "the domain knows nothing of the rest"},
	"placement": {[]string{"gpu"}, "the engine must run without Kubernetes"},
	"quota":     {[]string{"gpu"}, "queue arithmetic must run without Kubernetes"},
	"trace":     {[]string{"gpu", "placement"}, "traces are data"},
	"simulator": {[]string{"gpu", "placement", "quota", "trace"}, "replay must run without Kubernetes"},
	"sharing":   {[]string{"gpu", "nearest"}, "a config is turned into a plan without a node"},
	"nvml":      {[]string{"gpu"}, "hardware is read into the domain model and no further"},
	"health":    {[]string{"gpu"}, "verdicts follow from facts, without a node"},
	"mig":       {[]string{"gpu", "nearest", "placement"}, "a change of MIG devices is planned without a cluster"},
	"visible":   {[]string{"gpu"}, "a container is checked without a cluster"},
	"kube":      {[]string{"api/v1alpha1", "gpu", "sharing"}, "objects are turned into domain values and back, without a client"},
	"machine":   {[]string{"gpu", "nearest"}, "a simulated machine stands in for nvml and must not know more"},
}

// stdlibOnly are the packages that may import nothing outside the standard
// library and this module.
var stdlibOnly = map[string]string{
	"gpu":       "the domain model must not change with a dependency",
	"placement": "the engine must not change with a dependency",
	"quota":     "the engine must not change with a dependency",
}

// owners gives one package the sole use of a library.
var owners = map[string]struct {
	owner  []string
	reason string
}{
	"github.com/NVIDIA/go-nvml":           {[]string{"internal/nvml"}, "it needs cgo and a driver; everything else must run without both"},
	"k8s.io/kubernetes":                   {[]string{"internal/scheduler"}, "it has no stable API"},
	"github.com/prometheus/client_golang": {[]string{"internal/metrics"}, "metric names and labels are decided in one place"},
}

// programBans are what a program must not link, even indirectly.
var programBans = []struct{ program, banned, reason string }{
	{"cmd/ashlar", "github.com/NVIDIA/go-nvml", "the command line runs where no driver and no cgo is"},
	{"cmd/ashlar", module + "internal/agent", "the command line talks to agents, it is none"},
	{"cmd/ashlar", module + "internal/nvml", "the command line runs where no driver and no cgo is"},
	{"cmd/ashlar", "k8s.io/kubernetes", "the command line must stay small"},
	{"cmd/ashlar-agent", "k8s.io/kubernetes", "an agent runs on every node and must stay small"},
	{"cmd/ashlar-agent", module + "internal/localcluster", "what simulates a cluster is not shipped to nodes"},
	{"cmd/ashlar-agent", "testing", "test code is not shipped to nodes"},
}

// impureImports are imports that a pure package cannot have a use for.
var impureImports = map[string]string{
	"context": "nothing in it may wait", "log": "it returns what there is to say", "log/slog": "it returns what there is to say",
	"os": "it does no I/O", "os/exec": "it does no I/O", "net": "it does no I/O", "net/http": "it does no I/O",
	"k8s.io/klog/v2": "it returns what there is to say", "math/rand": "randomness comes from a seed in the input (math/rand/v2 with a source)",
	"k8s.io/client-go/kubernetes": "it has no client", "sync": "it starts no goroutines",
}

// impureAllowed are exceptions, one for a package. Published experiments can only
// be repeated with the numbers of math/rand; the test below still bans its global
// source.
var impureAllowed = map[string]string{"trace": "math/rand"}

// clock are the functions of package time that read or wait for a clock.
var clock = []string{"Now", "Since", "Until", "Sleep", "After", "AfterFunc", "Tick", "NewTimer", "NewTicker"}

// seededRand are the names of math/rand and math/rand/v2 that do not draw on the
// global source.
var seededRand = []string{"New", "NewSource", "NewPCG", "NewChaCha8", "NewZipf", "Rand", "Source", "PCG", "ChaCha8", "Zipf"}

type goPackage struct {
	ImportPath string
	Dir        string
	GoFiles    []string
	CgoFiles   []string
	Imports    []string
	Deps       []string
}

func listPackages(t *testing.T) map[string]goPackage {
	t.Helper()
	cmd := exec.Command("go", "list", "-json=ImportPath,Dir,GoFiles,CgoFiles,Imports,Deps", "./...")
	cmd.Dir = ".."
	out, err := cmd.Output()
	if err != nil {
		var exit *exec.ExitError
		if errors.As(err, &exit) {
			t.Fatalf("go list: %v\n%s", err, exit.Stderr)
		}
		t.Fatal(err)
	}
	packages := make(map[string]goPackage)
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p goPackage
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			break
		} else if err != nil {
			t.Fatal(err)
		}
		packages[strings.TrimPrefix(p.ImportPath, module)] = p
	}
	if len(packages) < 5 {
		t.Fatalf("go list found %d packages only", len(packages))
	}
	return packages
}

// within says whether an import path is the library or lies below it.
func within(path, library string) bool {
	return path == library || strings.HasPrefix(path, library+"/")
}

func TestImports(t *testing.T) {
	packages := listPackages(t)
	for name, p := range packages {
		for _, imp := range p.Imports {
			for _, ban := range importBans(name, imp) {
				t.Errorf("%s imports %s: %s", name, imp, ban)
			}
		}
	}
	for _, ban := range programBans {
		p, ok := packages[ban.program]
		if !ok {
			t.Errorf("no program %s", ban.program)
			continue
		}
		for _, dep := range p.Deps {
			if within(dep, ban.banned) {
				t.Errorf("%s links %s: %s", ban.program, dep, ban.reason)
			}
		}
	}
}

// importBans returns the reasons why a package of this module must not import a
// path.
func importBans(name, imp string) []string {
	var bans []string
	short := strings.TrimPrefix(name, "internal/")
	if ours, ok := strings.CutPrefix(imp, module); ok {
		if layer, limited := layers[short]; limited && !slices.Contains(layer.allowed, strings.TrimPrefix(ours, "internal/")) {
			bans = append(bans, layer.reason)
		}
	} else if reason, only := stdlibOnly[short]; only && strings.Contains(strings.Split(imp, "/")[0], ".") {
		bans = append(bans, reason)
	}
	for library, rule := range owners {
		if within(imp, library) && !slices.Contains(rule.owner, name) {
			bans = append(bans, "only "+strings.Join(rule.owner, ", ")+" may: "+rule.reason)
		}
	}
	if slices.Contains(pure, short) {
		if reason, ok := impureImports[imp]; ok && impureAllowed[short] != imp {
			bans = append(bans, "it is pure: "+reason)
		}
	}
	return bans
}

func TestImportBansBite(t *testing.T) {
	for _, c := range []struct{ name, imp string }{
		{"internal/gpu", module + "internal/placement"},
		{"internal/gpu", "github.com/google/go-cmp/cmp"},
		{"internal/placement", module + "internal/agent"},
		{"internal/sharing", "os"},
		{"internal/agent", "github.com/NVIDIA/go-nvml/pkg/nvml"},
		{"internal/cli", "k8s.io/kubernetes/pkg/scheduler"},
	} {
		if len(importBans(c.name, c.imp)) == 0 {
			t.Errorf("%s may import %s", c.name, c.imp)
		}
	}
	for _, c := range []struct{ name, imp string }{
		{"internal/gpu", "slices"},
		{"internal/placement", module + "internal/gpu"},
		{"internal/nvml", "github.com/NVIDIA/go-nvml/pkg/nvml"},
		{"internal/agent", "os"},
	} {
		if bans := importBans(c.name, c.imp); len(bans) > 0 {
			t.Errorf("%s may not import %s: %v", c.name, c.imp, bans)
		}
	}
}

func TestPurePackagesReadNoClock(t *testing.T) {
	for name, p := range listPackages(t) {
		if !slices.Contains(pure, strings.TrimPrefix(name, "internal/")) {
			continue
		}
		for _, file := range p.GoFiles {
			fset := token.NewFileSet()
			parsed, err := parser.ParseFile(fset, filepath.Join(p.Dir, file), nil, 0)
			if err != nil {
				t.Fatal(err)
			}
			for _, found := range impurities(parsed) {
				t.Errorf("%s: %s: %s is pure", fset.Position(found.pos), found.what, name)
			}
		}
	}
}

type impurity struct {
	pos  token.Pos
	what string
}

// impurities finds goroutines, clocks and global randomness in a file.
func impurities(file *ast.File) []impurity {
	var found []impurity
	ast.Inspect(file, func(n ast.Node) bool {
		switch n := n.(type) {
		case *ast.GoStmt:
			found = append(found, impurity{n.Pos(), "starts a goroutine"})
		case *ast.SelectorExpr:
			x, ok := n.X.(*ast.Ident)
			if !ok || x.Obj != nil {
				break
			}
			if x.Name == "time" && slices.Contains(clock, n.Sel.Name) {
				found = append(found, impurity{n.Pos(), "reads a clock"})
			}
			if x.Name == "rand" && !slices.Contains(seededRand, n.Sel.Name) {
				found = append(found, impurity{n.Pos(), "draws on global randomness"})
			}
		}
		return true
	})
	return found
}

func TestImpuritiesAreFound(t *testing.T) {
	source := `package p
import ("math/rand/v2"; "time")
func f(seed uint64) { go f(1); _ = time.Now(); _ = rand.IntN(3); _ = rand.New(rand.NewPCG(seed, 0)); _ = time.Second }`
	file, err := parser.ParseFile(token.NewFileSet(), "p.go", source, 0)
	if err != nil {
		t.Fatal(err)
	}
	if found := impurities(file); len(found) != 3 {
		t.Errorf("found %v, want a goroutine, a clock and global randomness", found)
	}
}
