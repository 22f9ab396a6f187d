package trace

import (
	"encoding/csv"
	"errors"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// maxNumber bounds all numbers of a trace, so that sums over a cluster and
// products with a few thousand cannot overflow.
const maxNumber = math.MaxInt32

// column is a known column of a CSV file.
type column struct {
	name string
	// value says what to give, "MiB of memory".
	value    string
	optional bool
}

// table reads a CSV file row by row. Its errors begin with NAME:LINE.
type table struct {
	name    string
	csv     *csv.Reader
	columns []column
	// index has the position of each column in the file, -1 where it is absent.
	index map[string]int
	width int
	row   []string
	line  int
}

// newTable reads the header.
func newTable(r io.Reader, name string, columns []column) (*table, error) {
	t := &table{name: name, csv: csv.NewReader(r), columns: columns, index: make(map[string]int, len(columns)), line: 1}
	t.csv.FieldsPerRecord = -1 // a wrong number of fields gets a message of ours
	t.csv.ReuseRecord = true
	known := make([]string, len(columns))
	for i, c := range columns {
		known[i], t.index[c.name] = c.name, -1
	}
	if err := t.read(); errors.Is(err, io.EOF) {
		return nil, fmt.Errorf("%s:1: the file is empty, begin it with the header %s", name, strings.Join(known, ","))
	} else if err != nil {
		return nil, err
	}
	t.width = len(t.row)
	for i, head := range t.row {
		if at, ok := t.index[head]; !ok {
			return nil, t.fail(clip(head), "is unknown, the columns are %s", strings.Join(known, ", "))
		} else if at >= 0 {
			return nil, t.fail(head, "is there twice, keep one")
		}
		t.index[head] = i
	}
	for _, c := range columns {
		if !c.optional && t.index[c.name] < 0 {
			return nil, t.fail(c.name, "is missing, add it with %s", c.value)
		}
	}
	return t, nil
}

// read advances to the next row, of any width.
func (t *table) read() error {
	row, err := t.csv.Read()
	var syntax *csv.ParseError
	switch {
	case errors.Is(err, io.EOF):
		return io.EOF
	case errors.As(err, &syntax):
		return fmt.Errorf("%s:%d: %w, write the fields without quotes", t.name, syntax.Line, syntax.Err)
	case err != nil:
		return fmt.Errorf("%s: %w", t.name, err)
	}
	t.row = row
	t.line, _ = t.csv.FieldPos(0)
	return nil
}

// next advances to the next row, io.EOF after the last.
func (t *table) next() error {
	if err := t.read(); err != nil {
		return err
	}
	if len(t.row) != t.width {
		return fmt.Errorf("%s:%d: the line has %d fields, give %d as in the header", t.name, t.line, len(t.row), t.width)
	}
	return nil
}

// fail returns an error at a column of the current row.
func (t *table) fail(column, format string, args ...any) error {
	return fmt.Errorf("%s:%d: column %s: %s", t.name, t.line, column, fmt.Sprintf(format, args...))
}

// text returns a field, "" where its column is absent.
func (t *table) text(column string) string {
	if i := t.index[column]; i >= 0 {
		return t.row[i]
	}
	return ""
}

// number returns a field as a number from 0 to most, 0 where it is optional
// and empty.
func (t *table) number(name string, most int) (int, error) {
	c := t.columns[slices.IndexFunc(t.columns, func(c column) bool { return c.name == name })]
	text := t.text(name)
	if text == "" && c.optional {
		return 0, nil
	}
	n, err := strconv.Atoi(text)
	switch {
	case err != nil && !errors.Is(err, strconv.ErrRange):
		return 0, t.fail(name, "%q is not a whole number, give %s", clip(text), c.value)
	case n < 0:
		return 0, t.fail(name, "%s is negative, give %s", clip(text), c.value)
	case err != nil || n > most:
		return 0, t.fail(name, "%s is too much, give %s, at most %d", clip(text), c.value, most)
	}
	return n, nil
}

// clip shortens what is quoted in a message.
func clip(s string) string {
	const most = 60
	if len(s) <= most {
		return s
	}
	return strings.ToValidUTF8(s[:most], "") + "..."
}
