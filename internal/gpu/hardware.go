package gpu

import "errors"

// What a driver may answer. Test for them with errors.Is; the texts around them
// name the GPU.
var (
	// ErrNotFound: no GPU or MIG device has that UUID.
	ErrNotFound = errors.New("not found")
	// ErrLost: the GPU no longer answers.
	ErrLost = errors.New("GPU is lost")
	// ErrInUse: a process or a MIG instance holds the GPU.
	ErrInUse = errors.New("in use")
	// ErrNotSupported: the product or the driver cannot do it.
	ErrNotSupported = errors.New("not supported")
	// ErrInvalid: the request contradicts the state, such as overlapping MIG
	// placements.
	ErrInvalid = errors.New("invalid")
)

// Event is something that a driver reports of a GPU on its own account.
type Event struct {
	// GPU is the UUID of the physical GPU.
	GPU string
	// XID is the driver's error number.
	XID int
	// GI and CI narrow the event to a MIG device, AnyInstance where it is about
	// the whole GPU.
	GI, CI int
}

// AnyInstance is the GI and CI of an event about a whole GPU.
const AnyInstance = -1

// Process is a process that uses a GPU or a MIG device.
type Process struct {
	// PID is the process id in the host's namespace.
	PID int
	// MemoryMiB is the GPU memory that it holds.
	MemoryMiB int
	// GI and CI name the MIG device, AnyInstance for a whole GPU.
	GI, CI int
}
