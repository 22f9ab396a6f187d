//go:build !linux || !cgo

package nvml

import "errors"

// newDriver fails: the library is called through cgo, and exists on Linux.
func newDriver() (driver, error) {
	return nil, errors.New("this program was built without NVML, which needs Linux and cgo (CGO_ENABLED=1); use a simulated machine")
}
