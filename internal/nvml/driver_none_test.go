//go:build !linux || !cgo

package nvml

import (
	"strings"
	"testing"
)

func TestOpen(t *testing.T) {
	if _, err := Open(); err == nil || !strings.Contains(err.Error(), "cgo") || !strings.Contains(err.Error(), "use a simulated machine") {
		t.Errorf("got %v", err)
	}
}
