package simulator

import (
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/ashlar-gpu/ashlar/internal/placement"
	"github.com/ashlar-gpu/ashlar/internal/trace"
)

// Waiting is a job in the queue.
type Waiting struct {
	Job   trace.Job
	Class placement.ClassID
	// Since is when it came, or came back after its node failed.
	Since time.Duration
}

// Queue decides in which order jobs are tried. It is what a quota package may
// take the place of.
type Queue interface {
	// Add puts a job in.
	Add(w *Waiting)
	// Len is the number of jobs in the queue.
	Len() int
	// Each calls try for jobs in order. A job for which it returns true has
	// started and leaves the queue. reserve returns when a job could start at
	// the latest if nothing else started, and false where never.
	Each(now time.Duration, try func(w *Waiting) bool, reserve func(w *Waiting) (time.Duration, bool))
}

// NewQueue returns a queue by the name of its order:
//
//   - fifo: by arrival; one that does not fit is passed over, as kube-scheduler
//     does, which comes back to it on every change.
//   - strict-fifo: by arrival; behind one that does not fit all wait.
//   - backfill: by priority, then arrival. The first that does not fit holds its
//     place: behind it only those start that end before it could (EASY), with the
//     duration of a job as its estimate.
func NewQueue(name string) (Queue, error) {
	switch name {
	case "fifo":
		return &queue{}, nil
	case "strict-fifo":
		return &queue{strict: true}, nil
	case "backfill":
		return &queue{strict: true, backfill: true}, nil
	}
	return nil, fmt.Errorf("no queue %q: use one of %s", name, strings.Join(QueueNames(), ", "))
}

// QueueNames lists the orders that NewQueue knows.
func QueueNames() []string { return []string{"fifo", "strict-fifo", "backfill"} }

type queue struct {
	waiting          []*Waiting
	strict, backfill bool
}

func (q *queue) Len() int { return len(q.waiting) }

func (q *queue) Add(w *Waiting) {
	at := len(q.waiting)
	for at > 0 && q.before(w, q.waiting[at-1]) {
		at--
	}
	q.waiting = slices.Insert(q.waiting, at, w)
}

// before says whether a goes before b. Jobs that came back keep their place by
// arrival.
func (q *queue) before(a, b *Waiting) bool {
	if q.backfill && a.Job.Priority != b.Job.Priority {
		return a.Job.Priority > b.Job.Priority
	}
	return a.Job.ID < b.Job.ID
}

func (q *queue) Each(now time.Duration, try func(*Waiting) bool, reserve func(*Waiting) (time.Duration, bool)) {
	var head *Waiting
	var until time.Duration
	kept := q.waiting[:0]
	for i, w := range q.waiting {
		if head != nil && (!q.backfill || w.Job.Duration == 0 || now+w.Job.Duration > until) {
			kept = append(kept, w)
			continue
		}
		if try(w) {
			continue
		}
		kept = append(kept, w)
		if head == nil && q.strict {
			if at, ever := reserve(w); ever {
				head, until = w, at
				if !q.backfill {
					kept = append(kept, q.waiting[i+1:]...)
					break
				}
			}
		}
	}
	clear(q.waiting[len(kept):])
	q.waiting = kept
}
