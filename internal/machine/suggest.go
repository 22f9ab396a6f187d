package machine

import (
	"fmt"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/nearest"
)

// oneOf says which values are allowed, and which of them is probably meant.
func oneOf(word string, known []string) string {
	text := "want one of " + strings.Join(known, ", ")
	if best := nearest.Word(word, known); best != "" {
		text += fmt.Sprintf("; did you mean %q?", best)
	}
	return text
}
