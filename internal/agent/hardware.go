package agent

import (
	"time"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Hardware is what the agent needs of a machine. The real one is in package
// nvml, the simulated one in package machine.
type Hardware interface {
	// Read returns the whole machine. A GPU that does not answer is in it with its
	// health; an error means that the driver does not answer at all.
	Read() (gpu.Machine, error)
	// WaitEvent waits for the next event, at most so long. The second result is
	// false where none came.
	// It returns os.ErrClosed after Close.
	WaitEvent(timeout time.Duration) (gpu.Event, bool, error)
	// Close ends the use of the machine.
	Close() error
}
