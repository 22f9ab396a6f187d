package machinetest

import (
	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
)

// TB is the part of a test that is needed, also of one of package rapid.
type TB interface {
	Helper()
	Fatal(args ...any)
}

// New makes a machine with the GPUs that a description lists: its text after "gpus:",
// further keys of the machine included.
func New(t TB, gpus string) *machine.Machine {
	t.Helper()
	desc, err := machine.ParseDescription("machine.yaml", []byte("name: test\ncpus: 8\nmemory: 64Gi\ngpus:\n"+gpus))
	if err != nil {
		t.Fatal(err)
	}
	return machine.New(desc, "test")
}

// Read returns what New makes as it is read.
func Read(t TB, gpus string) *gpu.Machine {
	t.Helper()
	return read(t, New(t, gpus))
}

// Builtin returns a built-in machine as it is read.
func Builtin(t TB, name string) *gpu.Machine {
	t.Helper()
	desc, err := machine.Builtin(name)
	if err != nil {
		t.Fatal(err)
	}
	return read(t, machine.New(desc, "test"))
}

func read(t TB, m *machine.Machine) *gpu.Machine {
	t.Helper()
	r, err := m.Read()
	if err != nil {
		t.Fatal(err)
	}
	return &r
}
