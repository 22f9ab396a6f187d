package sharing

import (
	"fmt"
	"strconv"
	"strings"
)

// nearest returns the known word with the smallest edit distance, ignoring
// case, or "" where none is near: more than a third of the known word would
// have to change. Of equals the first wins.
func nearest(word string, known []string) string {
	best, least := "", 0
	for _, k := range known {
		limit := max(1, len(k)/3)
		if diff := len(k) - len(word); diff > limit || -diff > limit {
			continue
		}
		if d := distance(strings.ToLower(word), strings.ToLower(k)); d <= limit && (best == "" || d < least) {
			best, least = k, d
		}
	}
	return best
}

// distance is the Levenshtein distance in bytes.
func distance(a, b string) int {
	row := make([]int, len(b)+1)
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			change := diagonal
			if a[i] != b[j] {
				change++
			}
			diagonal = row[j+1]
			row[j+1] = min(change, row[j]+1, diagonal+1)
		}
	}
	return row[len(b)]
}

// wrongChoice says that a value is none of the allowed ones.
func wrongChoice(value string, allowed []string) string {
	s := fmt.Sprintf("unknown value %s; allowed: %s", quoted(value), strings.Join(allowed, ", "))
	if near := nearest(value, allowed); near != "" {
		s += fmt.Sprintf("; did you mean %q?", near)
	}
	return s
}

// quoted shows text of the file in a message, cut where it is long.
func quoted(s string) string {
	const most = 100 // bytes; resource names and UUIDs are shorter
	if len(s) > most {
		return strconv.Quote(s[:most]) + "..."
	}
	return strconv.Quote(s)
}
