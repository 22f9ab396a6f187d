package agent

import (
	"maps"
	"sync"

	"github.com/ashlar-gpu/ashlar/internal/deviceplugin"
)

// blocks joins what keeps new uses off GPUs and MIG devices, from several
// sources. It is safe for concurrent use.
type blocks struct {
	ledger *deviceplugin.Ledger
	mu     sync.Mutex
	by     [2]map[string]string
}

// source is who blocks.
type source int

const (
	byOperator source = iota
	byMIGChange
)

// set replaces what a source blocks. When it has returned the ledger knows.
func (b *blocks) set(s source, reasons map[string]string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.by[s] = maps.Clone(reasons)
	all := make(map[string]string)
	for _, reasons := range b.by {
		maps.Copy(all, reasons)
	}
	b.ledger.SetBlocked(all)
}
