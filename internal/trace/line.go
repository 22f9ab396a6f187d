package trace

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"slices"
	"strconv"
	"strings"
	"time"
)

// maxLine is the longest line that is read, in bytes.
const maxLine = 1 << 20

// field is one key of a line. One table drives both reader and writer, so that
// they cannot differ.
type field struct {
	key string
	// value says what to give.
	value string
	// to is where the value is: an *int, a *time.Duration (written in
	// milliseconds), a *bool, a *string or a *[]string.
	to any
	// least and most bound numbers, in the unit that is written.
	least, most int64
	// text says what strings may be, and value says it too.
	text func(string) bool
	// absent is the number of a key that is not there.
	absent int
	needed bool
}

// check says whether the value may be written.
func (f *field) check() error {
	if f.isAbsent() {
		return nil
	}
	switch to := f.to.(type) {
	case *int:
		return f.checkNumber(int64(*to))
	case *time.Duration:
		if *to%time.Millisecond != 0 {
			return fmt.Errorf("key %s: %v is not a whole number of milliseconds, round it", f.key, *to)
		}
		return f.checkNumber(to.Milliseconds())
	case *string:
		return f.checkText(*to)
	case *[]string:
		for _, s := range *to {
			if err := f.checkText(s); err != nil {
				return err
			}
		}
	}
	return nil
}

func (f *field) checkNumber(n int64) error {
	switch {
	case n >= f.least && n <= f.most:
		return nil
	case f.least == f.most:
		return fmt.Errorf("key %s: is %d, give %d, %s", f.key, n, f.least, f.value)
	}
	return fmt.Errorf("key %s: %d is out of range, give %s, %d to %d", f.key, n, f.value, f.least, f.most)
}

func (f *field) checkText(s string) error {
	if s != "" && f.text(s) {
		return nil
	}
	return fmt.Errorf("key %s: %q cannot stand here, give %s", f.key, clip(s), f.value)
}

// isAbsent says whether the value is that of a key that is not there.
func (f *field) isAbsent() bool {
	switch to := f.to.(type) {
	case *int:
		return *to == f.absent && !f.needed
	case *time.Duration:
		return *to == 0 && !f.needed
	case *bool:
		return !*to
	case *string:
		return *to == ""
	case *[]string:
		return len(*to) == 0
	}
	return false
}

// reset makes the value that of a key that is not there.
func (f *field) reset() {
	switch to := f.to.(type) {
	case *int:
		*to = f.absent
	case *time.Duration:
		*to = 0
	case *bool:
		*to = false
	case *string:
		*to = ""
	case *[]string:
		*to = nil // what was read is the caller's
	}
}

// appendLine writes the fields as a line, those that are absent left out.
func appendLine(line []byte, fields []field) []byte {
	line = append(line, '{')
	for i := range fields {
		f := &fields[i]
		if f.isAbsent() {
			continue
		}
		if line[len(line)-1] != '{' {
			line = append(line, ',')
		}
		line = append(strconv.AppendQuote(line, f.key), ':')
		switch to := f.to.(type) {
		case *int:
			line = strconv.AppendInt(line, int64(*to), 10)
		case *time.Duration:
			line = strconv.AppendInt(line, to.Milliseconds(), 10)
		case *bool:
			line = strconv.AppendBool(line, *to)
		case *string: // texts are printable ASCII, so this is JSON
			line = strconv.AppendQuote(line, *to)
		case *[]string:
			for i, s := range *to {
				line = append(line, "[,"[min(i, 1)])
				line = strconv.AppendQuote(line, s)
			}
			line = append(line, ']')
		}
	}
	return append(line, "}\n"...)
}

// lines reads a file line by line. Its errors begin with NAME:LINE.
type lines struct {
	name    string
	scanner *bufio.Scanner
	line    int
}

func newLines(r io.Reader, name string) *lines {
	l := &lines{name: name, scanner: bufio.NewScanner(r)}
	l.scanner.Buffer(nil, maxLine)
	return l
}

// fail returns an error at the current line.
func (l *lines) fail(format string, args ...any) error {
	return fmt.Errorf("%s:%d: %w", l.name, l.line, fmt.Errorf(format, args...))
}

// read sets fields from the next line, which is of the given kind, "a node". It
// returns io.EOF after the last line.
func (l *lines) read(kind string, fields []field) error {
	l.line++
	if !l.scanner.Scan() {
		switch err := l.scanner.Err(); {
		case err == nil:
			return io.EOF
		case errors.Is(err, bufio.ErrTooLong):
			return l.fail("the line is longer than %d bytes, give one node or job a line", maxLine)
		default:
			return l.fail("%w", err)
		}
	}
	for i := range fields {
		fields[i].reset()
	}
	c := cursor{l.scanner.Bytes()}
	if c.peek() != '{' {
		return l.fail("the line is not a JSON object, give one for %s", kind)
	}
	if !json.Valid(c.rest) {
		var v json.RawMessage
		return l.fail("the line is not JSON: %w, complete or correct it", json.Unmarshal(c.rest, &v))
	}
	c.next()
	seen := 0 // bit i for fields[i]
	for c.peek() != '}' {
		key := c.next()
		i := find(fields, key)
		switch {
		case i < 0:
			known := make([]string, len(fields))
			for i, f := range fields {
				known[i] = f.key
			}
			return l.fail("key %s: is unknown in the line of %s, the keys are %s", clip(string(key)), kind, strings.Join(known, ", "))
		case seen&(1<<i) != 0:
			return l.fail("key %s: is there twice, keep one", fields[i].key)
		}
		seen |= 1 << i
		if err := fields[i].parse(&c); err != nil {
			return l.fail("%w", err)
		}
	}
	for i := range fields {
		if f := &fields[i]; f.needed && seen&(1<<i) == 0 {
			return l.fail("key %s: is missing, give %s", f.key, f.value)
		}
	}
	return nil
}

// find returns the index of the field with a key, given with its quotes, or -1.
func find(fields []field, key []byte) int {
	for i := range fields {
		if string(key[1:len(key)-1]) == fields[i].key {
			return i
		}
	}
	if bytes.IndexByte(key, '\\') >= 0 {
		if plain, ok := text(key); ok {
			return slices.IndexFunc(fields, func(f field) bool { return f.key == plain })
		}
	}
	return -1
}

// parse sets the value from what follows the key.
func (f *field) parse(c *cursor) error {
	raw := c.next()
	var ok bool
	switch to := f.to.(type) {
	case *bool:
		*to, ok = true, string(raw) == "true"
	case *string:
		*to, ok = text(raw)
		ok = ok && *to != ""
	case *[]string:
		if ok = raw[0] == '['; !ok {
			break
		}
		for c.peek() != ']' && ok {
			var s string
			raw = c.next()
			s, ok = text(raw)
			*to = append(*to, s)
		}
		if ok {
			c.next()
		}
	default:
		return f.parseNumber(raw)
	}
	if !ok {
		return f.wrong(raw)
	}
	return f.check()
}

// parseNumber sets a number after a check: milliseconds may overflow a
// time.Duration.
func (f *field) parseNumber(raw []byte) error {
	n, err := strconv.ParseInt(string(raw), 10, 64)
	if errors.Is(err, strconv.ErrRange) {
		return fmt.Errorf("key %s: %s is out of range, give %s, %d to %d", f.key, clip(string(raw)), f.value, f.least, f.most)
	}
	if err != nil {
		return f.wrong(raw)
	}
	if err := f.checkNumber(n); err != nil {
		return err
	}
	switch to := f.to.(type) {
	case *int:
		*to = int(n)
	case *time.Duration:
		*to = time.Duration(n) * time.Millisecond
	}
	return nil
}

// wrong says that a value is of another type than the key has.
func (f *field) wrong(raw []byte) error {
	what := clip(string(raw))
	switch raw[0] {
	case '[':
		what = "a list"
	case '{':
		what = "an object"
	}
	return fmt.Errorf("key %s: %s cannot stand here, give %s", f.key, what, f.value)
}

// cursor walks over text that is known to be valid JSON. That makes it several
// times as fast as a json.Decoder, which a trace of a million lines is worth.
type cursor struct{ rest []byte }

// peek returns the first byte of what is next, 0 at the end.
func (c *cursor) peek() byte {
	c.rest = bytes.TrimLeft(c.rest, " \t\r,:")
	if len(c.rest) == 0 {
		return 0
	}
	return c.rest[0]
}

// next returns a number, a string with its quotes, a word such as true, or one
// bracket.
func (c *cursor) next() []byte {
	end := 1
	switch c.peek() {
	case 0:
		return nil
	case '{', '}', '[', ']':
	case '"':
		for c.rest[end] != '"' {
			if c.rest[end] == '\\' {
				end++
			}
			end++
		}
		end++
	default:
		for end < len(c.rest) && strings.IndexByte(" \t\r,:{}[]", c.rest[end]) < 0 {
			end++
		}
	}
	token := c.rest[:end]
	c.rest = c.rest[end:]
	return token
}

// text returns the string that a token of JSON is.
func text(raw []byte) (string, bool) {
	if raw[0] != '"' {
		return "", false
	}
	if plain := raw[1 : len(raw)-1]; bytes.IndexFunc(plain, func(r rune) bool { return r == '\\' || r > '~' }) < 0 {
		return string(plain), true
	}
	var s string
	err := json.Unmarshal(raw, &s)
	return s, err == nil
}
