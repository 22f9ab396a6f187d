package nearest

import (
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestWord(t *testing.T) {
	known := []string{"replicas", "rename", "devices", "name", "timeSlicing", "mps", "all"}
	for word, want := range map[string]string{
		"replica": "replicas", "REPLICAS": "replicas", "relpicas": "replicas", "renam": "rename", "nme": "name",
		"time-slicing": "timeSlicing", "MPS": "mps", "al": "all", "": "", "x": "", "colour": "", strings.Repeat("x", 1<<20): "",
	} {
		if got := Word(word, known); got != want {
			t.Errorf("Word(%.20q) = %q, want %q", word, got, want)
		}
	}
	if got := Word("aa", []string{"ab", "ac"}); got != "ab" {
		t.Errorf("of equals %q wins, want the first", got)
	}
}

// slow is the definition of the distance.
func slow(a, b string) int {
	switch {
	case a == "" || b == "":
		return len(a) + len(b)
	case a[0] == b[0]:
		return slow(a[1:], b[1:])
	}
	return 1 + min(slow(a[1:], b), slow(a, b[1:]), slow(a[1:], b[1:]))
}

func TestDistance(t *testing.T) {
	word := rapid.StringMatching(`[abC]{0,6}`)
	rapid.Check(t, func(t *rapid.T) {
		a, b := word.Draw(t, "a"), word.Draw(t, "b")
		if got, want := Distance(a, b), slow(strings.ToLower(a), strings.ToLower(b)); got != want {
			t.Fatalf("Distance(%q, %q) = %d, want %d", a, b, got, want)
		}
	})
}
