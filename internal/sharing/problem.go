package sharing

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
)

// Problem is one thing that is wrong in a configuration.
type Problem struct {
	// File is the name that Parse was given, "" for a Config made in Go.
	File string
	// Line is the line in File from 1, 0 where the problem is about the whole
	// file or the Config was made in Go.
	Line int
	// Key is the path of the key, such as
	// "sharing.timeSlicing.resources[0].replicas", "" for none.
	Key string
	// Message says what is wrong and what to do. It names the key itself.
	Message string
}

// Error returns "FILE:LINE: MESSAGE", without the parts that are not known.
func (p *Problem) Error() string { return located(p.File, p.Line, p.Message) }

// Errors are all problems of a configuration, sorted by line. It is the dynamic
// type of the errors of Parse, and of those of Config.Plan that concern the
// configuration.
type Errors []*Problem

// Error returns one line per problem.
func (e Errors) Error() string {
	lines := make([]string, len(e))
	for i, p := range e {
		lines[i] = p.Error()
	}
	return strings.Join(lines, "\n")
}

// Unwrap gives errors.As each problem.
func (e Errors) Unwrap() []error {
	errs := make([]error, len(e))
	for i, p := range e {
		errs[i] = p
	}
	return errs
}

// Warning is something that is accepted and that its author should know. The
// fields are those of Problem.
type Warning struct {
	File    string
	Line    int
	Key     string
	Message string
}

// String returns "FILE:LINE: MESSAGE", without the parts that are not known.
func (w Warning) String() string { return located(w.File, w.Line, w.Message) }

func located(file string, line int, message string) string {
	switch {
	case file != "" && line > 0:
		return fmt.Sprintf("%s:%d: %s", file, line, message)
	case file != "":
		return file + ": " + message
	}
	return message
}

// byLine sorts problems by line and keeps the order within a line.
func (e Errors) byLine() {
	slices.SortStableFunc(e, func(a, b *Problem) int { return cmp.Compare(a.Line, b.Line) })
}

// listed sorts the problems and keeps the first ones where they are too many
// for anyone to read.
func (e Errors) listed() Errors {
	const most = 100
	e.byLine()
	if len(e) <= most {
		return e
	}
	rest := *e[most]
	rest.Key, rest.Message = "", fmt.Sprintf("and %d more problems from here on; correct those above first", len(e)-most)
	return append(e[:most:most], &rest)
}

// warningsByLine sorts warnings by line and keeps the order within a line.
func warningsByLine(ws []Warning) {
	slices.SortStableFunc(ws, func(a, b Warning) int { return cmp.Compare(a.Line, b.Line) })
}

// problem makes a Problem at a key of the configuration.
func (c *Config) problem(key, format string, args ...any) *Problem {
	return &Problem{File: c.file, Line: c.line(key), Key: key, Message: key + ": " + fmt.Sprintf(format, args...)}
}

// warning makes a Warning at a key of the configuration.
func (c *Config) warning(key, format string, args ...any) Warning {
	return Warning(*c.problem(key, format, args...))
}

// line is the line of a key, or of the nearest key around it that the file has.
func (c *Config) line(key string) int {
	for key != "" {
		if n, ok := c.lines[key]; ok {
			return n
		}
		key = parent(key)
	}
	return 0
}

// parent is the path of the key around a key, "" at the top.
func parent(key string) string { return key[:max(0, strings.LastIndexAny(key, ".["))] }
