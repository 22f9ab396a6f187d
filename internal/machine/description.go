package machine

import (
	"cmp"
	"embed"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/nearest"
)

// Description is a machine that can be simulated. It is made by
// ParseDescription, Find or Builtin, which check it; the fields are for reading.
type Description struct {
	// Name is for messages.
	Name string
	Host

	hardware hardware
	// text is the YAML that it was read from.
	text []byte
}

// Host is what a machine has besides its GPUs.
type Host struct {
	// InstanceType is the value of the label node.kubernetes.io/instance-type.
	InstanceType string
	// CPUs is the number of logical CPUs.
	CPUs int
	// Memory is a Kubernetes quantity, such as "1152Gi".
	Memory string
	// NUMANodes is at least 1. CPUs and memory are spread evenly over them.
	NUMANodes int
}

const yamlSuffix = ".yaml"

//go:embed builtin/*.yaml
var builtin embed.FS

const builtinDir = "builtin"

// BuiltinNames lists the built-in machines in alphabetical order.
func BuiltinNames() []string {
	entries, err := builtin.ReadDir(builtinDir)
	if err != nil {
		panic(err) // the folder is part of the program
	}
	names := make([]string, len(entries))
	for i, e := range entries {
		names[i] = strings.TrimSuffix(e.Name(), yamlSuffix)
	}
	slices.Sort(names)
	return names
}

// BuiltinYAML returns the text of a built-in machine's description. The error of
// an unknown name lists the known ones, the nearest first.
func BuiltinYAML(name string) ([]byte, error) {
	names := BuiltinNames()
	if !slices.Contains(names, name) {
		slices.SortStableFunc(names, func(a, b string) int {
			return cmp.Compare(nearest.Distance(name, a), nearest.Distance(name, b))
		})
		return nil, fmt.Errorf("no built-in machine is named %q; there are: %s", name, strings.Join(names, ", "))
	}
	return builtin.ReadFile(builtinDir + "/" + name + yamlSuffix)
}

// Builtin returns a built-in machine. It fails as BuiltinYAML does.
func Builtin(name string) (*Description, error) {
	text, err := BuiltinYAML(name)
	if err != nil {
		return nil, err
	}
	return ParseDescription(name+yamlSuffix, text)
}

// Find returns the description in a file, where the text holds a path separator
// or ends in .yaml or .yml, and else the built-in machine of that name.
func Find(nameOrFile string) (*Description, error) {
	ext := filepath.Ext(nameOrFile)
	if !strings.ContainsRune(nameOrFile, filepath.Separator) && ext != yamlSuffix && ext != ".yml" {
		return Builtin(nameOrFile)
	}
	data, err := os.ReadFile(nameOrFile)
	if err != nil {
		return nil, fmt.Errorf("machine description: %w", err)
	}
	return ParseDescription(nameOrFile, data)
}
