package sharing

import (
	"cmp"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/ashlar-gpu/ashlar/internal/nearest"
)

// field is a key that the format knows. Its value is read by read, or as an
// object of fields where read is nil. Fields also serve to find the place of a
// key that stands at a wrong one.
type field struct {
	name   string
	read   func(n *yaml.Node, key string)
	fields []field
}

// read fills the configuration from its top node.
func (r *reader) read(root *yaml.Node) {
	c := r.config
	f, p, g := &c.Flags, &c.Flags.Plugin, &c.Flags.GFD
	f.DevRoot = ""
	var timeSlicing Sharing
	mps := Sharing{FailRequestsGreaterThanOne: true}
	var migStrategy MIGStrategy // of sharing.mig

	resources := []field{
		{name: "gpus", read: r.patterns(&c.Resources.GPUs)},
		{name: "mig", read: r.patterns(&c.Resources.MIG)},
	}
	r.schema = []field{
		{name: "version", read: r.version},
		{name: "flags", fields: []field{
			{name: "migStrategy", read: word(r, &f.MIGStrategy)},
			{name: "failOnInitError", read: r.boolean(&f.FailOnInitError)},
			{name: "mpsRoot", read: word(r, &f.MPSRoot)},
			{name: "nvidiaDriverRoot", read: word(r, &f.DriverRoot)},
			{name: "nvidiaDevRoot", read: word(r, &f.DevRoot)},
			{name: "gdrcopyEnabled", read: r.boolean(&f.GDRCopyEnabled)},
			{name: "gdsEnabled", read: r.boolean(&f.GDSEnabled)},
			{name: "mofedEnabled", read: r.boolean(&f.MOFEDEnabled)},
			{name: "useNodeFeatureAPI", read: r.boolean(&f.UseNodeFeatureAPI)},
			{name: "deviceDiscoveryStrategy", read: word(r, &f.DeviceDiscovery)},
			{name: "plugin", fields: []field{
				{name: "passDeviceSpecs", read: r.boolean(&p.PassDeviceSpecs)},
				{name: "deviceListStrategy", read: r.listStrategies(&p.DeviceListStrategies)},
				{name: "deviceIDStrategy", read: word(r, &p.DeviceIDStrategy)},
				{name: "cdiAnnotationPrefix", read: word(r, &p.CDIAnnotationPrefix)},
				{name: "nvidiaCTKPath", read: word(r, &p.NVIDIACTKPath)},
				{name: "containerDriverRoot", read: word(r, &p.ContainerDriverRoot)},
				{name: "sharedDevicesAllocationPolicy", read: word(r, &p.AllocationPolicy)},
			}},
			{name: "gfd", fields: []field{
				{name: "oneshot", read: r.boolean(&g.Oneshot)},
				{name: "noTimestamp", read: r.boolean(&g.NoTimestamp)},
				{name: "sleepInterval", read: r.duration(&g.SleepInterval)},
				{name: "outputFile", read: word(r, &g.OutputFile)},
				{name: "machineTypeFile", read: word(r, &g.MachineTypeFile)},
			}},
		}},
		{name: "resources", fields: resources, read: func(n *yaml.Node, key string) {
			if n.Kind == yaml.SequenceNode {
				r.resourceList(n, key)
			} else {
				r.object(n, key, resources)
			}
		}},
		{name: "sharing", fields: []field{
			{name: "timeSlicing", fields: r.sharing(&timeSlicing)},
			{name: "mps", fields: r.sharing(&mps)},
			{name: "mig", read: func(n *yaml.Node, key string) {
				r.object(n, key, []field{{name: "strategy", read: word(r, &migStrategy)}})
			}},
		}},
		{name: "imex", fields: []field{
			{name: "channelIDs", read: r.list(func(n *yaml.Node, key string) {
				c.IMEX.ChannelIDs = append(c.IMEX.ChannelIDs, 0)
				r.integer(&c.IMEX.ChannelIDs[len(c.IMEX.ChannelIDs)-1])(n, key)
			})},
			{name: "required", read: r.boolean(&c.IMEX.Required)},
		}},
	}
	r.object(root, "", r.schema)

	if f.DevRoot == "" {
		f.DevRoot = f.DriverRoot
	}
	if c.has("sharing.timeSlicing") {
		c.TimeSlicing = &timeSlicing
	}
	if c.has("sharing.mps") {
		c.MPS = &mps
	}
	r.migSharing(migStrategy)
}

// has says whether the file gives the key a value.
func (c *Config) has(key string) bool {
	_, ok := c.lines[key]
	return ok
}

// migSharing takes sharing.mig.strategy as flags.migStrategy.
func (r *reader) migSharing(strategy MIGStrategy) {
	const key, standard = "sharing.mig.strategy", "flags.migStrategy"
	c := r.config
	if !c.has(key) || r.silent(key) {
		return
	}
	if c.has(standard) && !r.silent(standard) && strategy != c.Flags.MIGStrategy {
		r.fail(key, "is %s and %s at line %d is %s; keep %s alone", quoted(string(strategy)), standard, c.lines[standard], quoted(string(c.Flags.MIGStrategy)), standard)
		return
	}
	if !c.has(standard) {
		c.Flags.MIGStrategy = strategy
		c.lines[standard] = c.lines[key] // where a wrong value is reported
	}
	r.warnings = append(r.warnings, c.warning(key, "is not in the format, and NVIDIA's plugin ignores it; taken as %s: %s, which is the standard form", standard, strategy))
}

// object reads a mapping whose keys are the given fields. A key without a value
// is left at its default.
func (r *reader) object(n *yaml.Node, at string, fields []field) {
	for _, e := range r.entries(n, at) {
		key, line := join(at, e.name), r.place(e.key.Line)
		i := slices.IndexFunc(fields, func(f field) bool { return f.name == e.name })
		switch {
		case i < 0:
			r.unknown(line, at, e.name, fields)
		case isNull(e.value) || !r.plain(e.value, key):
		default:
			r.config.lines[key] = line
			if f := fields[i]; f.read != nil {
				f.read(e.value, key)
			} else {
				r.object(e.value, key, f.fields)
			}
		}
	}
}

// unknown records a key that is not among the fields of its place.
func (r *reader) unknown(line int, at, name string, fields []field) {
	known := make([]string, len(fields))
	for i, f := range fields {
		known[i] = f.name
	}
	key := join(at, name)
	message := fmt.Sprintf("unknown key %q", key)
	// The value meant for another key is not read: nothing more is said of it.
	if home := cmp.Or(below(name, fields, at), below(name, r.schema, "")); home != "" {
		message += fmt.Sprintf("; its place is %q", home)
		r.damaged[home] = true
	} else if near := nearest.Word(name, known); near != "" {
		message += fmt.Sprintf("; did you mean %q?", near)
		r.damaged[join(at, near)] = true
	} else {
		message += "; no known key is near, known are: " + strings.Join(known, ", ")
	}
	r.add(line, key, "%s", message)
}

// below returns the path of the first key of that name among the fields and
// all below them, "" where there is none.
func below(name string, fields []field, at string) string {
	for _, f := range fields {
		key := join(at, f.name)
		if f.name == name {
			return key
		}
		if found := below(name, f.fields, key); found != "" {
			return found
		}
	}
	return ""
}

// list reads a list.
func (r *reader) list(item func(n *yaml.Node, key string)) func(*yaml.Node, string) {
	return func(n *yaml.Node, key string) {
		if n.Kind != yaml.SequenceNode {
			r.fail(key, "must be a list, is %s", describe(n))
			return
		}
		for i, e := range n.Content {
			at := fmt.Sprintf("%s[%d]", key, i)
			r.config.lines[at] = r.place(e.Line)
			if r.plain(e, at) {
				item(e, at)
			}
		}
	}
}

// word reads text.
func word[T ~string](r *reader, to *T) func(*yaml.Node, string) {
	return func(n *yaml.Node, key string) {
		switch {
		case n.Kind == yaml.ScalarNode && n.Tag == "!!str":
			*to = T(n.Value)
		case n.Kind == yaml.ScalarNode && n.Tag != "!!null":
			r.fail(key, "must be text, is %s; if it is meant, write it in quotes", describe(n))
		default:
			r.fail(key, "must be text, is %s", describe(n))
		}
	}
}

// boolean reads true or false.
func (r *reader) boolean(to *bool) func(*yaml.Node, string) {
	return func(n *yaml.Node, key string) {
		switch {
		case n.Tag == "!!bool":
			*to = strings.EqualFold(n.Value, "true")
		case n.Tag == "!!str" && (n.Value == "true" || n.Value == "false"):
			r.fail(key, "must be true or false, is the text %q; write it without quotes", n.Value)
		default:
			r.fail(key, "must be true or false, is %s", describe(n))
		}
	}
}

// integer reads a whole decimal number.
func (r *reader) integer(to *int) func(*yaml.Node, string) {
	return func(n *yaml.Node, key string) {
		v, err := strconv.Atoi(n.Value)
		switch {
		case n.Tag == "!!int" && err == nil:
			*to = v
		case n.Tag == "!!str" && err == nil:
			r.fail(key, "must be a number, is the text %q; write it without quotes", n.Value)
		default:
			r.fail(key, "must be a whole decimal number, is %s", describe(n))
		}
	}
}

// duration reads nanoseconds, a Go duration or "infinite".
func (r *reader) duration(to *time.Duration) func(*yaml.Node, string) {
	return func(n *yaml.Node, key string) {
		ns, intErr := strconv.ParseInt(n.Value, 10, 64)
		d, err := time.ParseDuration(n.Value)
		switch {
		case n.Tag == "!!int" && intErr == nil:
			*to = time.Duration(ns)
		case n.Tag == "!!str" && n.Value == "infinite":
			*to = Infinite
		case n.Tag == "!!str" && err == nil:
			*to = d
		default:
			r.fail(key, `must be a duration such as 60s, a number of nanoseconds, or "infinite", is %s`, describe(n))
		}
	}
}

// version reads the version of the format, which has no other use.
func (r *reader) version(n *yaml.Node, key string) {
	if n.Kind != yaml.ScalarNode {
		r.fail(key, "must be v1, is %s", describe(n))
	} else if n.Value != "" && n.Value != "v1" {
		r.fail(key, "unknown version %s; write v1, the only one", quoted(n.Value))
	}
}

// listStrategies reads one device list strategy or a list of them.
func (r *reader) listStrategies(to *[]DeviceListStrategy) func(*yaml.Node, string) {
	return func(n *yaml.Node, key string) {
		*to = nil
		item := func(n *yaml.Node, key string) {
			var s DeviceListStrategy
			word(r, &s)(n, key)
			*to = append(*to, s)
		}
		if n.Kind == yaml.SequenceNode {
			r.list(item)(n, key)
		} else {
			item(n, key)
		}
	}
}

// resourceName reads a resource name and completes it.
func (r *reader) resourceName(to *string) func(*yaml.Node, string) {
	return func(n *yaml.Node, key string) {
		word(r, to)(n, key)
		if *to != "" && !strings.Contains(*to, "/") {
			*to = domain + *to
		}
	}
}

// patterns reads resources.gpus or resources.mig.
func (r *reader) patterns(to *[]ResourcePattern) func(*yaml.Node, string) {
	return r.list(func(n *yaml.Node, key string) {
		var p ResourcePattern
		r.object(n, key, []field{
			{name: "pattern", read: word(r, &p.Pattern)},
			{name: "name", read: r.resourceName(&p.Name)},
		})
		*to = append(*to, p)
	})
}

// resourceList reads `resources` as a list of {pattern, devices: all, name}. An
// entry without a name asks for what holds anyway.
func (r *reader) resourceList(n *yaml.Node, key string) {
	c := r.config
	if len(n.Content) == 0 {
		r.fail(key, "must be a mapping with gpus and mig, is an empty list; leave it out")
		return
	}
	r.list(func(n *yaml.Node, key string) {
		var p ResourcePattern
		var devices string
		r.object(n, key, []field{
			{name: "pattern", read: word(r, &p.Pattern)},
			{name: "name", read: r.resourceName(&p.Name)},
			{name: "devices", read: word(r, &devices)},
		})
		if devices != "all" && !r.silent(key+".devices") {
			r.fail(key+".devices", "must be all in this form; limit devices under sharing.timeSlicing.resources")
		}
		switch {
		case p.Name != "":
			at := fmt.Sprintf("resources.gpus[%d]", len(c.Resources.GPUs))
			for _, part := range []string{"", ".pattern", ".name"} {
				if c.has(key + part) {
					c.lines[at+part] = c.lines[key+part]
				}
				r.damaged[at+part] = r.damaged[key+part]
			}
			c.Resources.GPUs = append(c.Resources.GPUs, p)
		case p.Pattern != "*" && !r.silent(key+".pattern") && !r.silent(key+".name"):
			r.fail(key, `pattern %s without a name selects nothing; add a name, or write the pattern "*"`, quoted(p.Pattern))
		}
	})(n, key)
	r.warnings = append(r.warnings, c.warning(key, "a list is not in the format, and NVIDIA's plugin refuses it; taken as all devices under their default names, and entries with a name as resources.gpus; the standard form is resources.gpus with pattern and name, and for default names no resources at all"))
}

// sharing are the fields of sharing.timeSlicing and sharing.mps.
func (r *reader) sharing(s *Sharing) []field {
	return []field{
		{name: "renameByDefault", read: r.boolean(&s.RenameByDefault)},
		{name: "failRequestsGreaterThanOne", read: r.boolean(&s.FailRequestsGreaterThanOne)},
		{name: "resources", read: r.list(func(n *yaml.Node, key string) {
			var e SharedResource
			r.object(n, key, []field{
				{name: "name", read: r.resourceName(&e.Name)},
				{name: "rename", read: r.resourceName(&e.Rename)},
				{name: "devices", read: r.devices(&e.Devices)},
				{name: "replicas", read: r.integer(&e.Replicas)},
			})
			s.Resources = append(s.Resources, e)
		})},
	}
}

// devices reads "all", a count, or a list of names.
func (r *reader) devices(to *Devices) func(*yaml.Node, string) {
	return func(n *yaml.Node, key string) {
		switch {
		case n.Kind == yaml.SequenceNode && len(n.Content) == 0:
			r.fail(key, "the list is empty; name a device, or write all")
		case n.Kind == yaml.SequenceNode:
			r.list(func(n *yaml.Node, key string) {
				if n.Tag != "!!int" && n.Tag != "!!str" {
					r.fail(key, "must be %s, is %s", refForm, describe(n))
				}
				to.List = append(to.List, n.Value)
			})(n, key)
		case n.Tag == "!!int":
			r.integer(&to.Count)(n, key)
			if to.Count < 1 && !r.silent(key) {
				r.fail(key, "must be at least 1, is %s; to share nothing, leave the entry out", n.Value)
			}
		case n.Tag == "!!str" && n.Value == "all":
		case n.Tag == "!!str" && ref.MatchString(n.Value):
			r.fail(key, "must be all, a count or a list, is the text %s; for a count write it without quotes, for one device as a list: [%s]", quoted(n.Value), quoted(n.Value))
		default:
			r.fail(key, "must be all, a count, or a list of devices, each %s; is %s", refForm, describe(n))
		}
	}
}
