package fakecri

import (
	"fmt"
	"strconv"
	"strings"
	"time"
)

// The annotations of a pod that the runtime obeys.
const (
	DurationAnnotation  = "ashlar.dev/sim-duration"
	ExitCodeAnnotation  = "ashlar.dev/sim-exit-code"
	StopDelayAnnotation = "ashlar.dev/sim-stop-delay"
)

// behaviour is what a pod's annotations say of one container.
type behaviour struct {
	ends      bool
	duration  time.Duration
	exitCode  int32
	stopDelay time.Duration
}

// parseBehaviour reads the annotations for the named container.
func parseBehaviour(annotations map[string]string, container string) (behaviour, error) {
	var b behaviour
	if text, ok := annotations[DurationAnnotation]; ok {
		var err error
		if b.duration, b.ends, err = parseDuration(text, container); err != nil {
			return b, fmt.Errorf("annotation %s: %w", DurationAnnotation, err)
		}
	}
	if text, ok := annotations[ExitCodeAnnotation]; ok {
		code, err := strconv.ParseUint(text, 10, 8)
		if err != nil {
			return b, fmt.Errorf("annotation %s: %q is not an exit code from 0 to 255", ExitCodeAnnotation, text)
		}
		b.exitCode = int32(code)
	}
	if text, ok := annotations[StopDelayAnnotation]; ok {
		delay, err := positive(text)
		if err != nil {
			return b, fmt.Errorf("annotation %s: %w", StopDelayAnnotation, err)
		}
		b.stopDelay = delay
	}
	return b, nil
}

// parseDuration reads "30s" or "name=30s,other=1m". The second result is false
// where the container is not named.
func parseDuration(text, container string) (time.Duration, bool, error) {
	if !strings.Contains(text, "=") {
		d, err := positive(text)
		return d, err == nil, err
	}
	var found time.Duration
	ends := false
	for part := range strings.SplitSeq(text, ",") {
		name, value, ok := strings.Cut(strings.TrimSpace(part), "=")
		if !ok {
			return 0, false, fmt.Errorf("%q: want CONTAINER=DURATION", part)
		}
		d, err := positive(value)
		if err != nil {
			return 0, false, err
		}
		if name == container {
			found, ends = d, true
		}
	}
	return found, ends, nil
}

func positive(text string) (time.Duration, error) {
	d, err := time.ParseDuration(strings.TrimSpace(text))
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%q is not a duration such as 30s or 5m", text)
	}
	return d, nil
}
