package machine

import "github.com/ashlar-gpu/ashlar/internal/gpu"

// hardware is what never changes in a machine.
type hardware struct {
	driver, cuda string
	units        []unit
	links        gpu.Links
}

// unit is one GPU as it was built in.
type unit struct {
	// gpu has everything but what depends on seed and state: UUIDs, MIG modes and
	// devices, health.
	gpu gpu.GPU
	// mig is nil where the product cannot be cut.
	mig *gpu.MIGTable
	// migEnabled and geometry are what the description asks for.
	migEnabled bool
	geometry   []gpu.MIGInstance
}
