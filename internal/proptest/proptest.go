package proptest

import (
	"flag"
	"strconv"
	"testing"

	_ "pgregory.net/rapid" // it defines the flag
)

// AtLeast makes rapid check so many cases in this test, unless it is asked for
// more.
func AtLeast(t *testing.T, n int) {
	t.Helper()
	f := flag.Lookup("rapid.checks")
	was := f.Value.String()
	if f.Value.(flag.Getter).Get().(int) >= n {
		return
	}
	if err := f.Value.Set(strconv.Itoa(n)); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = f.Value.Set(was) })
}
