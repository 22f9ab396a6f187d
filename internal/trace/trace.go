package trace

import (
	"errors"
	"io"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// Job is one pod of a trace: what it needs, when it comes, how long it works.
type Job struct {
	// ID is the position in the trace, from 0.
	ID int
	// Arrival is the time since the start of the trace. It never decreases
	// from one job to the next.
	Arrival time.Duration
	// Duration is how long the job works at full speed, on devices of its own;
	// 0 means that it never leaves.
	Duration time.Duration
	// Priority is higher for what goes first; 0 is usual.
	Priority int
	// Tenant is the number of a tenant, 0 where there are none. It is never a
	// name.
	Tenant int
	// Class is the name of the class of a generated job, "" for others.
	Class string
	// Activity is how much of each of its GPUs the job keeps busy when alone,
	// in thousandths, 0 to 1000. With GPUs, 0 means that it is not known; count
	// it as 1000 then.
	Activity int
	// Request is what the job asks of a node.
	Request placement.Request
}

// Source yields the jobs of a trace in their order.
type Source interface {
	// Next returns the next job, or io.EOF after the last. After an error it
	// returns the same error again.
	Next() (Job, error)
}

// Collect reads a source to its end.
func Collect(s Source) ([]Job, error) {
	var jobs []Job
	for {
		job, err := s.Next()
		if errors.Is(err, io.EOF) {
			return jobs, nil
		}
		if err != nil {
			return nil, err
		}
		jobs = append(jobs, job)
	}
}

// FromSlice returns a source of the given jobs.
func FromSlice(jobs []Job) Source { return &sliceSource{jobs} }

type sliceSource struct{ rest []Job }

func (s *sliceSource) Next() (Job, error) {
	if len(s.rest) == 0 {
		return Job{}, io.EOF
	}
	job := s.rest[0]
	s.rest = s.rest[1:]
	return job, nil
}
