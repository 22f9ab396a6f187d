package sharing

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// The names of the keys of the two ways of sharing.
const (
	timeSlicingKey = "sharing.timeSlicing"
	mpsKey         = "sharing.mps"
)

const (
	// domain is put before resource names without one.
	domain = "nvidia.com/"
	// gpuName is the default name of whole GPUs.
	gpuName = domain + "gpu"
	// migPrefix begins the default names of MIG devices.
	migPrefix = domain + "mig-"
	// maxName is the largest length of a resource name with its domain, in bytes.
	// Kubernetes takes 63 for the part after the domain; NVIDIA's plugin counts
	// both.
	maxName = 63
)

var (
	subdomain = regexp.MustCompile(`^[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*$`) // RFC 1123, lower case

	ref = regexp.MustCompile(`^((0|[1-9][0-9]*)(:(0|[1-9][0-9]*))?|(GPU|MIG)-` + uuid + `|MIG-GPU-` + uuid + `/(0|[1-9][0-9]*)/(0|[1-9][0-9]*))$`)
)

const (
	uuid    = `[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`
	refForm = `a GPU index, a MIG index "i:j", or a UUID GPU-<uuid> or MIG-<uuid>`
)

// validate checks values and how they fit together. Parse adds the problems of
// reading.
func (c *Config) validate() Errors {
	v := validator{c: c}
	f, p := c.Flags, c.Flags.Plugin
	choice(&v, "flags.migStrategy", f.MIGStrategy, MIGNone, MIGSingle, MIGMixed)
	choice(&v, "flags.deviceDiscoveryStrategy", f.DeviceDiscovery, DiscoveryAuto, DiscoveryNVML, DiscoveryTegra)
	choice(&v, "flags.plugin.deviceIDStrategy", p.DeviceIDStrategy, IDByUUID, IDByIndex)
	choice(&v, "flags.plugin.sharedDevicesAllocationPolicy", p.AllocationPolicy, Distributed, Packed)
	v.listStrategies("flags.plugin.deviceListStrategy")
	v.patterns("resources.gpus", c.Resources.GPUs)
	v.patterns("resources.mig", c.Resources.MIG)
	v.sharing(timeSlicingKey, c.TimeSlicing)
	v.sharing(mpsKey, c.MPS)
	v.mps()
	v.renames(timeSlicingKey, c.TimeSlicing)
	v.renames(mpsKey, c.MPS)
	if ids := c.IMEX.ChannelIDs; len(ids) > 1 || len(ids) == 1 && ids[0] != 0 {
		v.add("imex.channelIDs", "must be [] or [0], other channels cannot be given out")
	}
	v.errs.byLine()
	return v.errs
}

type validator struct {
	c    *Config
	errs Errors
}

func (v *validator) add(key, format string, args ...any) {
	v.errs = append(v.errs, v.c.problem(key, format, args...))
}

// choice checks that a value is one of those allowed.
func choice[T ~string](v *validator, key string, value T, allowed ...T) {
	if slices.Contains(allowed, value) {
		return
	}
	words := make([]string, len(allowed))
	for i, a := range allowed {
		words[i] = string(a)
	}
	v.add(key, "%s", wrongChoice(string(value), words))
}

func (v *validator) listStrategies(key string) {
	list := v.c.Flags.Plugin.DeviceListStrategies
	if len(list) == 0 {
		v.add(key, "the list is empty; name a strategy, or leave the key out for %s", ListCDICRI)
	}
	for i, s := range list {
		at := fmt.Sprintf("%s[%d]", key, i)
		if !v.c.has(at) { // not written as a list
			at = key
		}
		choice(v, at, s, ListEnvvar, ListVolumeMounts, ListCDIAnnotations, ListCDICRI)
		if slices.Contains(list[:i], s) {
			v.add(at, "%s is listed twice; keep one", quoted(string(s)))
		}
		if (s == ListCDIAnnotations || s == ListCDICRI) && v.c.Flags.DeviceDiscovery == DiscoveryTegra {
			v.add("flags.deviceDiscoveryStrategy", "%s finds GPUs without NVML, which the device list strategy %s needs; use %s, or another flags.plugin.deviceListStrategy", DiscoveryTegra, s, DiscoveryNVML)
		}
	}
}

func (v *validator) patterns(key string, patterns []ResourcePattern) {
	for i, p := range patterns {
		at := fmt.Sprintf("%s[%d]", key, i)
		if p.Pattern == "" {
			v.add(at+".pattern", `is missing; give the name of the product or profile, "*" for any text`)
		}
		v.name(at+".name", p.Name)
	}
}

// name checks a full resource name and says whether it is right.
func (v *validator) name(key, name string) bool {
	if name == "" {
		v.add(key, "is missing; give a resource name such as %s", gpuName)
		return false
	}
	prefix, base, _ := strings.Cut(name, "/")
	switch {
	case len(name) > maxName:
		v.add(key, "%s is %d characters long with its domain, at most %d are allowed; shorten it", quoted(name), len(name), maxName)
	case !subdomain.MatchString(prefix) || !subdomain.MatchString(base):
		v.add(key, "%s is no resource name; use lower-case letters, digits, - and ., with a letter or digit at both ends, after an optional domain and /", quoted(name))
	case prefix == "kubernetes.io" || strings.HasSuffix(prefix, ".kubernetes.io") || strings.HasPrefix(name, "requests."):
		v.add(key, "%s is reserved by Kubernetes; use another domain, such as %s", quoted(name), domain)
	default:
		return true
	}
	return false
}

// sharing checks one way of sharing.
func (v *validator) sharing(key string, s *Sharing) {
	if s == nil {
		return
	}
	if len(s.Resources) == 0 {
		v.add(key+".resources", "is missing or empty; list the resources to share, each with name and replicas, or remove %s", key)
	}
	for i := range s.Resources {
		e, at := &s.Resources[i], entryKey(key, i)
		if v.name(at+".name", e.Name) && e.Rename == "" {
			if shared := s.sharedName(e); len(shared) > maxName {
				v.add(at+".name", "with renameByDefault the name becomes %s, %d characters long, at most %d are allowed; give a rename", quoted(shared), len(shared), maxName)
			}
		}
		if e.Rename != "" {
			v.name(at+".rename", e.Rename)
		}
		v.replicas(key, s, i)
		v.refs(at+".devices", e.Devices)
		for j := range s.Resources[:i] {
			if e.Name != "" && s.Resources[j].Name == e.Name {
				v.add(at+".name", "%s is listed twice, first at %s; keep one", quoted(e.Name), v.where(entryKey(key, j)+".name"))
				break
			}
		}
	}
}

func (v *validator) replicas(key string, s *Sharing, i int) {
	e, at := &s.Resources[i], entryKey(key, i)+".replicas"
	switch {
	case e.Replicas == 0 && !v.c.has(at):
		v.add(at, "is missing; give the number of slots per device, at least 2")
	case e.Replicas > MaxReplicas:
		v.add(at, "must be at most %d, is %d; the kubelet takes no longer list of devices", MaxReplicas, e.Replicas)
	case e.Replicas > 1:
	case e.Replicas < 1 || key == mpsKey:
		v.add(at, "must be at least 2, is %d; for no sharing leave the entry out", e.Replicas)
	case v.c.isBase(e.Name):
		v.add(at, "must be at least 2, is 1, which shares nothing; leave the entry out and %s stays unshared", e.Name)
	case !slices.ContainsFunc(s.Resources, func(o SharedResource) bool { return o.Replicas > 1 }):
		v.add(at, "is 1, an exclusive view of shared GPUs, but no entry shares any; leave the entry out, or add one with replicas of at least 2 for %s", gpuName)
	default:
		if e.Rename != "" {
			v.add(entryKey(key, i)+".rename", "an exclusive view (replicas: 1) has no second name; put it into name")
		}
		for j := range s.Resources[:i] {
			if o := &s.Resources[j]; o.exclusive() && o.Name != e.Name && o.Devices.overlaps(e.Devices) {
				v.add(at, "is 1, a second exclusive view of the same GPUs, after %s; keep one, or set devices of both apart", v.where(entryKey(key, j)+".replicas"))
			}
		}
	}
}

// isBase says whether devices can have the name without sharing.
func (c *Config) isBase(name string) bool {
	named := func(p ResourcePattern) bool { return p.Name == name }
	return name == gpuName || strings.HasPrefix(name, migPrefix) ||
		slices.ContainsFunc(c.Resources.GPUs, named) || slices.ContainsFunc(c.Resources.MIG, named)
}

// refs checks the names of devices.
func (v *validator) refs(key string, d Devices) {
	first := make(map[string]int)
	for i, name := range d.List {
		at := fmt.Sprintf("%s[%d]", key, i)
		if !ref.MatchString(name) {
			v.add(at, "%s names no device; write %s", quoted(name), refForm)
		}
		if j, again := first[name]; again {
			v.add(at, "device %s is listed twice, first as %s[%d]; keep one", quoted(name), key, j)
			continue
		}
		first[name] = i
	}
}

// overlaps says whether both surely select one device of a resource. Where only
// a machine can tell, as with a count and a list, it says no.
func (d Devices) overlaps(o Devices) bool {
	switch listed, other := len(d.List) > 0, len(o.List) > 0; {
	case listed && other:
		return slices.ContainsFunc(d.List, func(name string) bool { return slices.Contains(o.List, name) })
	case listed:
		return o.Count == 0
	case other:
		return d.Count == 0
	}
	return true // each is all, or the first ones
}

// mps checks what holds for MPS alone.
func (v *validator) mps() {
	c := v.c
	if c.MPS == nil {
		return
	}
	if c.Flags.MPSRoot == "" {
		v.add(mpsKey, "needs flags.mpsRoot, which is missing; name the folder of the MPS daemons there, or share by %s", timeSlicingKey)
	}
	if c.Flags.MIGStrategy == MIGMixed {
		v.add(mpsKey, "cannot be used with flags.migStrategy mixed; use %s", timeSlicingKey)
	}
	if c.TimeSlicing == nil {
		return
	}
	for i, e := range c.MPS.Resources {
		for j, o := range c.TimeSlicing.Resources {
			if e.Name != "" && e.Name == o.Name && e.Devices.overlaps(o.Devices) {
				v.add(entryKey(mpsKey, i), "shares devices of %s that time-slicing shares too, at %s; remove one, or set devices of both apart", e.Name, v.where(entryKey(timeSlicingKey, j)))
			}
		}
	}
}

// renames checks that no two entries end at one name. Names that only a machine
// gives are checked by Plan.
func (v *validator) renames(key string, s *Sharing) {
	if s == nil {
		return
	}
	for i := range s.Resources {
		e, at := &s.Resources[i], entryKey(key, i)
		shared := s.sharedName(e)
		if shared == e.Name {
			continue
		}
		if v.c.has(at + ".rename") {
			at += ".rename"
		}
		for j := range s.Resources {
			o := &s.Resources[j]
			if j != i && o.Name == shared || j < i && s.sharedName(o) == shared {
				v.add(at, "%s is also the name of the resource at %s; choose another", quoted(shared), v.where(entryKey(key, j)))
				break
			}
		}
		v.renamesPattern(at, shared, "resources.gpus", v.c.Resources.GPUs)
		v.renamesPattern(at, shared, "resources.mig", v.c.Resources.MIG)
	}
}

func (v *validator) renamesPattern(at, shared, key string, patterns []ResourcePattern) {
	i := slices.IndexFunc(patterns, func(p ResourcePattern) bool { return p.Name == shared })
	if i >= 0 {
		v.add(at, "%s is also the name at %s; choose another", quoted(shared), v.where(fmt.Sprintf("%s[%d].name", key, i)))
	}
}

// where names a key for a message, with its line where there is one.
func (v *validator) where(key string) string {
	if line := v.c.line(key); line > 0 {
		return fmt.Sprintf("%s (line %d)", key, line)
	}
	return key
}

func entryKey(key string, i int) string { return fmt.Sprintf("%s.resources[%d]", key, i) }

// remarks are the warnings about a valid configuration.
func (c *Config) remarks() []Warning {
	var ws []Warning
	d := Default()
	if c.TimeSlicing != nil {
		for i := range c.TimeSlicing.Resources {
			if e := &c.TimeSlicing.Resources[i]; e.exclusive() {
				ws = append(ws, c.warning(entryKey(timeSlicingKey, i)+".replicas", "1 makes %s an exclusive view of the shared GPUs; this is not in the format, and NVIDIA's plugin refuses replicas below 2; the standard form is a configuration without sharing for some nodes, chosen by the node label nvidia.com/device-plugin.config", e.Name))
			}
		}
	}
	noEffect := func(key string, set bool, reason string) {
		if set {
			ws = append(ws, c.warning(key, "has no effect: %s", reason))
		}
	}
	const labels = "the agent sets the node's labels itself"
	f, p, g := c.Flags, c.Flags.Plugin, c.Flags.GFD
	noEffect("flags.mpsRoot", f.MPSRoot != d.Flags.MPSRoot, "MPS is not served")
	noEffect("flags.useNodeFeatureAPI", f.UseNodeFeatureAPI != d.Flags.UseNodeFeatureAPI, labels)
	noEffect("flags.deviceDiscoveryStrategy", f.DeviceDiscovery == DiscoveryTegra, "the agent finds GPUs by NVML only")
	noEffect("flags.plugin.containerDriverRoot", p.ContainerDriverRoot != d.Flags.Plugin.ContainerDriverRoot, "the agent does not use it")
	noEffect("flags.gfd.oneshot", g.Oneshot, labels)
	noEffect("flags.gfd.noTimestamp", g.NoTimestamp, labels)
	noEffect("flags.gfd.sleepInterval", g.SleepInterval != d.Flags.GFD.SleepInterval, labels)
	noEffect("flags.gfd.outputFile", g.OutputFile != d.Flags.GFD.OutputFile, labels)
	noEffect("flags.gfd.machineTypeFile", g.MachineTypeFile != d.Flags.GFD.MachineTypeFile, labels)
	noEffect("imex.channelIDs", len(c.IMEX.ChannelIDs) > 0, "the agent gives out no IMEX channels")
	noEffect("imex.required", c.IMEX.Required, "the agent gives out no IMEX channels")
	noEffect("resources.mig", len(c.Resources.MIG) > 0 && f.MIGStrategy == MIGNone, "flags.migStrategy is none")
	return ws
}
