package machine

import (
	"fmt"
	"strings"
)

// oneOf says which values are allowed, and which of them is probably meant.
func oneOf(word string, known []string) string {
	best := ""
	for _, k := range known {
		// More than a third changed is another word.
		if d := distance(word, k); d <= max(1, len(k)/3) && (best == "" || d < distance(word, best)) {
			best = k
		}
	}
	text := "want one of " + strings.Join(known, ", ")
	if best != "" {
		text += fmt.Sprintf("; did you mean %q?", best)
	}
	return text
}

// distance is the number of bytes that must be inserted, removed or replaced to
// turn a into b, ignoring case.
func distance(a, b string) int {
	a, b = strings.ToLower(a), strings.ToLower(b)
	previous := make([]int, len(b)+1)
	for j := range previous {
		previous[j] = j
	}
	for i := range len(a) {
		row := make([]int, len(b)+1)
		row[0] = i + 1
		for j := range len(b) {
			replaced := previous[j]
			if a[i] != b[j] {
				replaced++
			}
			row[j+1] = min(replaced, previous[j+1]+1, row[j]+1)
		}
		previous = row
	}
	return previous[len(b)]
}
