package agent

import (
	"context"
	"sync"
	"time"
)

const (
	// quietFor is how long no question of the kubelet may have been open before the
	// agent asks it who holds what: so long it takes the kubelet to note down what it
	// was given, and to ask for the next container of the pod.
	quietFor = 100 * time.Millisecond
	// quietWait is how long the agent waits for that before it goes on without.
	quietWait = 500 * time.Millisecond
	// turnPatience bounds how long a question of the kubelet waits for the agent's own.
	turnPatience = time.Second
)

// turns keeps the agent's questions to the kubelet and those of the kubelet to the
// agent apart: a kubelet that is asked who holds what while it gives devices may
// forget that it gave them (see the ADR on devices given twice). The zero value is
// ready. It is safe for concurrent use.
type turns struct {
	mu sync.Mutex
	// open counts the kubelet's questions, ended is when the last one was answered.
	open  int
	ended time.Time
	// asking is closed when the agent's question is answered, nil where there is none.
	asking chan struct{}
}

// answer begins the answer to a question of the kubelet; the function that it
// returns ends it. It waits while the agent's own question is open, but not for long.
func (t *turns) answer(ctx context.Context) (end func()) {
	t.mu.Lock()
	t.open++
	asking := t.asking
	t.mu.Unlock()
	if asking != nil {
		patience := time.NewTimer(turnPatience)
		defer patience.Stop()
		select {
		case <-asking:
		case <-patience.C:
		case <-ctx.Done():
		}
	}
	return func() {
		t.mu.Lock()
		defer t.mu.Unlock()
		t.open--
		t.ended = time.Now()
	}
}

// ask begins a question to the kubelet, as soon as it has had no open one for a
// while; the function that it returns ends it. It returns nil where there was no
// such moment.
func (t *turns) ask(ctx context.Context) (end func()) {
	for deadline := time.Now().Add(quietWait); ; {
		t.mu.Lock()
		now := time.Now()
		if t.open == 0 && now.Sub(t.ended) >= quietFor {
			done := make(chan struct{})
			t.asking = done
			t.mu.Unlock()
			return func() {
				t.mu.Lock()
				defer t.mu.Unlock()
				t.asking = nil
				close(done)
			}
		}
		t.mu.Unlock()
		if now.After(deadline) {
			return nil
		}
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(refreshPoll):
		}
	}
}
