package sharing

import (
	"errors"
	"fmt"
	"io"
	"regexp"
	"slices"
	"sort"
	"strings"

	"go.yaml.in/yaml/v3"
)

// MaxSize is the largest file that Parse reads, in bytes: the limit of a
// Kubernetes ConfigMap.
const MaxSize = 1 << 20

// configKey is the key of a ConfigMap that holds the configuration, where there
// are several.
const configKey = "config.yaml"

// Parse reads a configuration. The data is either the configuration itself, or
// a Kubernetes manifest with exactly one ConfigMap that holds it, under the key
// config.yaml or its only key; other objects of the manifest are skipped. An
// empty file is Default. The name of the file is used in messages only, and
// line numbers are those of the file, also for text inside a ConfigMap that
// stands there as a block ("|"). Of text in another style, such as quotes, the
// lines of the file cannot be told apart: all its problems are at its first
// line.
//
// The error is of type Errors and lists all problems, 100 at most; of a file
// that is not valid YAML only that is said.
func Parse(file string, data []byte) (*Config, []Warning, error) {
	r := reader{config: Default(), damaged: make(map[string]bool), place: func(line int) int { return line }}
	c := r.config
	c.file, c.lines = file, make(map[string]int)
	if len(data) > MaxSize {
		r.add(0, "", "is %d bytes long, more than the %d that a ConfigMap can hold", len(data), MaxSize)
	} else if root := r.root(string(data)); root != nil {
		r.read(root)
	}
	for _, p := range c.validate() {
		if !r.silent(p.Key) {
			r.problems = append(r.problems, p)
		}
	}
	if len(r.problems) > 0 {
		return nil, nil, r.problems.listed()
	}
	warnings := slices.Concat(r.warnings, c.remarks())
	warningsByLine(warnings)
	return c, warnings, nil
}

// reader fills a Config from YAML nodes and collects what is wrong.
type reader struct {
	config   *Config
	problems Errors
	warnings []Warning
	// damaged are the keys that could not be read. Their values in config are
	// not those of the file, so nothing more is said of them.
	damaged map[string]bool
	// schema are the keys at the top.
	schema []field
	// place turns a line of the text that is read into a line of the file.
	place func(line int) int
}

// add records a problem at a line of the file.
func (r *reader) add(line int, key, format string, args ...any) {
	r.problems = append(r.problems, &Problem{File: r.config.file, Line: line, Key: key, Message: fmt.Sprintf(format, args...)})
}

// fail records that the value of a key cannot be read.
func (r *reader) fail(key, format string, args ...any) {
	r.problems = append(r.problems, r.config.problem(key, format, args...))
	r.damaged[key] = true
}

// silent says whether a key or one around it is damaged.
func (r *reader) silent(key string) bool {
	for !r.damaged[key] {
		if key == "" {
			return false
		}
		key = parent(key)
	}
	return true
}

// decode returns the top node of each YAML document, null for an empty one.
func decode(text string) ([]*yaml.Node, error) {
	decoder := yaml.NewDecoder(strings.NewReader(text))
	var tops []*yaml.Node
	for {
		var document yaml.Node
		if err := decoder.Decode(&document); errors.Is(err, io.EOF) {
			return tops, nil
		} else if err != nil {
			return nil, err
		}
		tops = append(tops, document.Content[0])
	}
}

// The decoder puts a line into its messages that is often the one where the
// enclosing block begins, and counted from 0.
var decoderLine = regexp.MustCompile(`^yaml: (line \d+: )?`)

// documents decodes text and drops empty documents. A syntax error is recorded
// at the line that ends the shortest beginning of the text which fails the same
// way.
func (r *reader) documents(text string) (tops []*yaml.Node, ok bool) {
	tops, err := decode(text)
	if err == nil {
		return slices.DeleteFunc(tops, isNull), true
	}
	ends := []int{} // ends[i] is where line i+1 ends
	for i, b := range []byte(text) {
		if b == '\n' || i == len(text)-1 {
			ends = append(ends, i+1)
		}
	}
	line := 1 + sort.Search(len(ends)-1, func(i int) bool {
		_, e := decode(text[:ends[i]])
		return e != nil && e.Error() == err.Error()
	})
	message := decoderLine.ReplaceAllString(err.Error(), "")
	if strings.Contains(message, "alphabetic or numeric") { // of the name of an alias or anchor
		message += "; write a value that begins with * or & in quotes"
	}
	r.add(r.place(line), "", "is not valid YAML: %s", message)
	return nil, false
}

// root returns the top node of the configuration, in the file itself or in its
// ConfigMap. It returns nil where there is none: the file is empty, or problems
// say why. For a ConfigMap it sets r.place.
func (r *reader) root(text string) *yaml.Node {
	tops, ok := r.documents(text)
	if !ok || len(tops) == 0 {
		return nil
	}
	if !slices.ContainsFunc(tops, isObject) {
		return r.only(tops)
	}
	var maps []*yaml.Node
	var kinds []string
	for _, top := range tops {
		switch kind := kindOf(top); {
		case !isObject(top):
			r.add(top.Line, "", "this YAML document is no Kubernetes object, as others of the file are; give it apiVersion and kind, or remove it")
		case kind == "ConfigMap":
			maps = append(maps, top)
		default:
			kinds = append(kinds, kind)
		}
	}
	switch {
	case len(maps) == 0:
		r.add(0, "", "holds no ConfigMap, only %s; give a ConfigMap with the key %s, or the configuration itself", strings.Join(kinds, ", "), configKey)
	case len(maps) > 1:
		r.add(maps[1].Line, "", "second ConfigMap, after the one at line %d; keep the one with the configuration", maps[0].Line)
	}
	if len(r.problems) > 0 {
		return nil
	}
	return r.inConfigMap(maps[0])
}

// only returns the one top node of a configuration.
func (r *reader) only(tops []*yaml.Node) *yaml.Node {
	switch len(tops) {
	case 0:
		return nil
	case 1:
		return tops[0]
	}
	r.add(r.place(tops[1].Line), "", "second YAML document; a configuration is one, without --- inside")
	return nil
}

// inConfigMap returns the top node of the configuration in a ConfigMap.
func (r *reader) inConfigMap(configMap *yaml.Node) *yaml.Node {
	var data, value *yaml.Node
	for _, e := range r.entries(configMap, "") {
		if e.name == "data" {
			data = e.value
		}
	}
	if data == nil || isNull(data) {
		r.add(configMap.Line, "data", "the ConfigMap has no data; put the configuration under data, key %s", configKey)
		return nil
	}
	var names []string
	for _, e := range r.entries(data, "data") {
		names = append(names, e.name)
		if e.name == configKey || value == nil {
			value = e.value
		}
	}
	switch {
	case len(r.problems) > 0:
		return nil
	case len(names) == 0:
		r.add(data.Line, "data", "the ConfigMap has no data; put the configuration under data, key %s", configKey)
		return nil
	case len(names) > 1 && !slices.Contains(names, configKey):
		r.add(data.Line, "data", "the ConfigMap has several keys (%s) and none is %s; name the one with the configuration so", quoted(strings.Join(names, ", ")), configKey)
		return nil
	case !r.plain(value, "data"):
		return nil
	case isNull(value):
		return nil
	case value.Kind != yaml.ScalarNode || value.Tag != "!!str":
		r.add(value.Line, "data", "the configuration in the ConfigMap must be text; write it as a block, after the key and |")
		return nil
	}
	if value.Style&yaml.LiteralStyle != 0 {
		r.place = func(line int) int { return value.Line + line }
	} else {
		r.place = func(int) int { return value.Line }
	}
	tops, ok := r.documents(value.Value)
	if !ok {
		return nil
	}
	return r.only(tops)
}

// isObject says whether a top node claims to be a Kubernetes object.
func isObject(top *yaml.Node) bool {
	if top.Kind != yaml.MappingNode {
		return false
	}
	for i := 0; i < len(top.Content); i += 2 {
		if name := top.Content[i].Value; name == "apiVersion" || name == "kind" {
			return true
		}
	}
	return false
}

// kindOf returns the kind of a Kubernetes object for messages.
func kindOf(top *yaml.Node) string {
	for i := 0; i+1 < len(top.Content); i += 2 {
		if top.Content[i].Value == "kind" && top.Content[i+1].Kind == yaml.ScalarNode {
			return top.Content[i+1].Value
		}
	}
	return "an object without kind"
}

func isNull(n *yaml.Node) bool { return n.Kind == yaml.ScalarNode && n.Tag == "!!null" }

// entry is a key of a mapping with its value.
type entry struct {
	name       string
	key, value *yaml.Node
}

// entries returns the keys of a mapping, each once, and records what else
// stands there.
func (r *reader) entries(n *yaml.Node, at string) []entry {
	if !r.plain(n, at) {
		return nil
	}
	if n.Kind != yaml.MappingNode {
		what := at
		if at == "" {
			what = "the configuration"
		}
		r.add(r.place(n.Line), at, "%s: must be a mapping of keys to values, is %s", what, describe(n))
		r.damaged[at] = true
		return nil
	}
	var entries []entry
	first := make(map[string]int)
	for i := 0; i < len(n.Content); i += 2 {
		key, value := n.Content[i], n.Content[i+1]
		path, line := join(at, key.Value), r.place(key.Line)
		switch earlier, again := first[key.Value]; {
		case key.Tag == "!!merge":
			r.add(line, path, "%s: YAML merge keys are not supported; write the keys out", path)
		case key.Kind != yaml.ScalarNode:
			r.add(line, at, "a key must be a word, is %s", describe(key))
		case again:
			r.add(line, path, "%s: key is given twice, first at line %d; keep one", path, earlier)
		case r.plain(key, path):
			first[key.Value] = line
			entries = append(entries, entry{key.Value, key, value})
		}
	}
	return entries
}

// plain refuses what YAML has beyond values: aliases, which can blow a small
// file up without bound, and explicit types.
func (r *reader) plain(n *yaml.Node, key string) bool {
	var what string
	switch {
	case n.Kind == yaml.AliasNode:
		what = "aliases (*) are"
	case n.Anchor != "":
		what = "anchors (&) are"
	case n.Style&yaml.TaggedStyle != 0:
		what = "tags (!) are"
	default:
		return true
	}
	where := ""
	if key != "" {
		where = key + ": "
	}
	r.add(r.place(n.Line), key, "%sYAML %s not supported; write the value out", where, what)
	r.damaged[key] = true
	return false
}

// describe names a value's type as people do.
func describe(n *yaml.Node) string {
	switch {
	case n.Kind == yaml.MappingNode:
		return "a mapping"
	case n.Kind == yaml.SequenceNode:
		return "a list"
	case n.Kind == yaml.AliasNode:
		return "an alias"
	case n.Tag == "!!null":
		return "empty"
	case n.Tag == "!!int" || n.Tag == "!!float":
		return "the number " + n.Value
	case n.Tag == "!!bool":
		return n.Value
	case n.Tag == "!!timestamp":
		return "the date " + n.Value
	}
	return "the text " + quoted(n.Value)
}

func join(at, name string) string {
	if len(name) > 100 { // no known key is nearly as long
		name = name[:100] + "..."
	}
	if at == "" {
		return name
	}
	return at + "." + name
}
