// Package nearest finds the word that somebody meant and misspelt, for error
// messages. It is pure.
package nearest

import "strings"

// Word returns the known word with the smallest Distance, or "" where none is
// near: more than a third of the known word would have to change. Of equals the
// first wins.
func Word(word string, known []string) string {
	best, least := "", 0
	for _, k := range known {
		limit := max(1, len(k)/3)
		// The lengths alone tell most words apart, and bound the work on long input.
		if diff := len(k) - len(word); diff > limit || -diff > limit {
			continue
		}
		if d := Distance(word, k); d <= limit && (best == "" || d < least) {
			best, least = k, d
		}
	}
	return best
}

// Distance is the Levenshtein distance in bytes, ignoring case: how many must be
// inserted, removed or replaced to turn a into b. It takes len(a)*len(b) steps.
func Distance(a, b string) int {
	a, b = strings.ToLower(a), strings.ToLower(b)
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
