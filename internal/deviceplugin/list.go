package deviceplugin

import (
	"slices"
	"sync"
)

// list is the latest list of devices, for any number of readers. A reader that
// is slow misses what was replaced meanwhile, and holds up nobody.
type list struct {
	mu      sync.Mutex
	devices []Device
	// changed is closed when devices is replaced.
	changed chan struct{}
	// last says that devices is not replaced any more.
	last bool
}

// set replaces the devices unless they are the same. After the last ones it does
// nothing.
func (l *list) set(devices []Device, last bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.last || !last && slices.Equal(l.devices, devices) {
		return
	}
	l.devices, l.last = devices, last
	close(l.changed)
	l.changed = make(chan struct{})
}

// get returns the devices, a channel that is closed when there are others, and
// whether there will be none.
func (l *list) get() ([]Device, <-chan struct{}, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.devices, l.changed, l.last
}
