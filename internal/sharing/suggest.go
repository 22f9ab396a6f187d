package sharing

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/nearest"
)

// wrongChoice says that a value is none of the allowed ones.
func wrongChoice(value string, allowed []string) string {
	s := fmt.Sprintf("unknown value %s; allowed: %s", quoted(value), strings.Join(allowed, ", "))
	if near := nearest.Word(value, allowed); near != "" {
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
