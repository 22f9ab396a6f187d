package agent

import (
	"fmt"
	"log/slog"
	"sync"
)

// troubles are the parts that are degraded. It is safe for concurrent use.
type troubles struct {
	log *slog.Logger
	// event tells the cluster.
	event func(format string, args ...any)

	mu  sync.Mutex
	now map[string]string
}

// report says that a part is degraded: in the log whenever the reason changes, in
// an Event once, since reasons may hold texts that never repeat.
func (t *troubles) report(part, format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	t.mu.Lock()
	before, already := t.now[part]
	t.now[part] = text
	t.mu.Unlock()
	if before == text {
		return
	}
	t.log.Error("degraded", "part", part, "reason", text)
	if !already {
		t.event("%s: %s", part, text)
	}
}

// over says that the trouble with a part is over.
func (t *troubles) over(part string) {
	t.mu.Lock()
	_, was := t.now[part]
	delete(t.now, part)
	t.mu.Unlock()
	if was {
		t.log.Info("recovered", "part", part)
	}
}
