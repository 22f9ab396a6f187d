package deviceplugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

var update = flag.Bool("update", false, "write the golden files")

// machineOf makes a machine of n GPUs, GPU-a and on, in linked pairs on two
// sockets.
func machineOf(n int) *gpu.Machine {
	m := &gpu.Machine{Links: gpu.NewLinks(n)}
	for i := range n {
		m.GPUs = append(m.GPUs, gpu.GPU{Index: i, UUID: "GPU-" + string(rune('a'+i)), Minor: n - 1 - i, NUMA: 2 * i / n})
		for j := range i {
			link := gpu.Link{PCIe: gpu.PCIeSystem}
			if 2*i/n == 2*j/n {
				link.PCIe = gpu.PCIeNode
			}
			if i/2 == j/2 {
				link.NVLinks = 4
			}
			m.Links.Merge(i, j, link)
		}
	}
	return m
}

// cut gives a GPU so many MIG devices.
func cut(m *gpu.Machine, i, n int) {
	letter := strings.TrimPrefix(m.GPUs[i].UUID, "GPU-")
	m.GPUs[i].MIG = gpu.MIGState{Capable: true, Enabled: true}
	for j := range n {
		m.GPUs[i].MIG.Devices = append(m.GPUs[i].MIG.Devices, gpu.MIGDevice{
			Index: j, UUID: fmt.Sprintf("MIG-%s%d", letter, j), GI: j + 1, ProfileID: j % 2, Profile: migProfile(j % 2),
		})
	}
}

// migProfile names one of two kinds of MIG devices.
func migProfile(kind int) string { return fmt.Sprintf("%dg.test", kind+1) }

// resourceOf makes a resource of all GPUs or, where they are cut, of their MIG
// devices, in slots if replicas is above 1.
func resourceOf(m *gpu.Machine, name string, replicas int) *sharing.Resource {
	r := &sharing.Resource{Name: name, Strategy: sharing.None, Replicas: replicas}
	add := func(g *gpu.GPU, base, index string) {
		for slot := range replicas {
			d := sharing.Device{ID: gpu.DeviceID{Base: base, Slot: slot}, GPU: g.UUID, Index: index, NUMA: g.NUMA, Health: g.Health}
			if replicas == 1 {
				d.ID.Slot = gpu.NoSlot
			}
			r.Devices = append(r.Devices, d)
		}
	}
	for i := range m.GPUs {
		g := &m.GPUs[i]
		if !g.MIG.Enabled {
			add(g, g.UUID, strconv.Itoa(i))
		}
		for j, d := range g.MIG.Devices {
			add(g, d.UUID, fmt.Sprintf("%d:%d", i, j))
		}
	}
	if replicas > 1 {
		r.Strategy = sharing.TimeSlicing
	}
	return r
}

func idsOf(r *sharing.Resource) []string {
	var ids []string
	for _, d := range r.Devices {
		ids = append(ids, d.ID.String())
	}
	return ids
}

func configOf(m *gpu.Machine, r *sharing.Resource) Config {
	return Config{Machine: m, Resource: r, Flags: sharing.Default().Flags}
}

func TestPrefer(t *testing.T) {
	two := machineOf(2)
	four := machineOf(4)
	sick := machineOf(4)
	sick.GPUs[1].Health = gpu.Health{State: gpu.Lost, Reason: "XID 79"}
	mig := machineOf(2)
	cut(mig, 0, 3)
	cut(mig, 1, 3)
	packed := func(c Config) Config {
		c.Flags.Plugin.AllocationPolicy = sharing.Packed
		return c
	}
	for name, test := range map[string]struct {
		config    Config
		held      []Holder
		available []string // all of the resource if nil
		required  []string
		size      int
		want      []string
	}{
		"two slots are on two GPUs":          {config: configOf(two, resourceOf(two, "gpu", 2)), size: 2, want: []string{"GPU-a::0", "GPU-b::0"}},
		"two slots of one GPU if need be":    {config: configOf(two, resourceOf(two, "gpu", 2)), available: []string{"GPU-b::1", "GPU-b::0"}, size: 2, want: []string{"GPU-b::0", "GPU-b::1"}},
		"three slots on two GPUs":            {config: configOf(two, resourceOf(two, "gpu", 2)), size: 3, want: []string{"GPU-a::0", "GPU-a::1", "GPU-b::0"}},
		"distributed takes the least used":   {config: configOf(two, resourceOf(two, "gpu", 3)), available: []string{"GPU-a::2", "GPU-b::2", "GPU-b::1"}, size: 1, want: []string{"GPU-b::1"}},
		"packed takes the most used":         {config: packed(configOf(two, resourceOf(two, "gpu", 3))), available: []string{"GPU-a::2", "GPU-b::2", "GPU-b::1"}, size: 1, want: []string{"GPU-a::2"}},
		"a linked pair":                      {config: configOf(four, resourceOf(four, "gpu", 1)), available: []string{"GPU-b", "GPU-c", "GPU-d"}, size: 2, want: []string{"GPU-c", "GPU-d"}},
		"one that breaks no pair":            {config: configOf(four, resourceOf(four, "gpu", 1)), available: []string{"GPU-b", "GPU-c", "GPU-d"}, size: 1, want: []string{"GPU-b"}},
		"required come with it":              {config: configOf(four, resourceOf(four, "gpu", 1)), required: []string{"GPU-c"}, size: 2, want: []string{"GPU-c", "GPU-d"}},
		"required that is not available":     {config: configOf(four, resourceOf(four, "gpu", 1)), available: []string{"GPU-a", "GPU-d"}, required: []string{"GPU-c"}, size: 2, want: []string{"GPU-c", "GPU-d"}},
		"a lost GPU is passed over":          {config: configOf(sick, resourceOf(sick, "gpu", 1)), size: 3, want: []string{"GPU-a", "GPU-c", "GPU-d"}},
		"a lost GPU comes last":              {config: configOf(sick, resourceOf(sick, "gpu", 1)), size: 4, want: []string{"GPU-a", "GPU-c", "GPU-d", "GPU-b"}},
		"an unknown one comes last":          {config: configOf(two, resourceOf(two, "gpu", 1)), available: []string{"GPU-z", "GPU-b"}, size: 2, want: []string{"GPU-b", "GPU-z"}},
		"required unknown, first":            {config: configOf(two, resourceOf(two, "gpu", 1)), available: []string{"GPU-z", "GPU-b"}, required: []string{"GPU-z"}, size: 2, want: []string{"GPU-z", "GPU-b"}},
		"held by the other view, withheld":   {config: configOf(two, resourceOf(two, "gpu", 2)), held: []Holder{holder(t, "excl", "GPU-a")}, size: 2, want: []string{"GPU-b::0", "GPU-b::1"}},
		"withheld if nothing else is left":   {config: configOf(two, resourceOf(two, "gpu", 1)), held: []Holder{holder(t, "excl", "GPU-a")}, size: 2, want: []string{"GPU-b", "GPU-a"}},
		"fewer offered than asked":           {config: configOf(two, resourceOf(two, "gpu", 1)), available: []string{"GPU-b"}, size: 2, want: []string{"GPU-b"}},
		"more required than asked":           {config: configOf(two, resourceOf(two, "gpu", 1)), required: []string{"GPU-b", "GPU-a", "GPU-b"}, size: 1, want: []string{"GPU-b"}},
		"none asked":                         {config: configOf(two, resourceOf(two, "gpu", 1)), size: 0, want: nil},
		"less than none":                     {config: configOf(two, resourceOf(two, "gpu", 1)), size: -3, want: nil},
		"MIG: on the GPU that is used":       {config: configOf(mig, resourceOf(mig, "mig", 1)), available: []string{"MIG-a0", "MIG-a1", "MIG-a2", "MIG-b0", "MIG-b2"}, size: 1, want: []string{"MIG-b0"}},
		"MIG: two on two GPUs":               {config: configOf(mig, resourceOf(mig, "mig", 1)), size: 2, want: []string{"MIG-a0", "MIG-b0"}},
		"MIG slots: an idle device":          {config: configOf(mig, resourceOf(mig, "mig", 2)), available: []string{"MIG-b0::1", "MIG-b1::1", "MIG-b2::0", "MIG-b2::1"}, size: 1, want: []string{"MIG-b2::0"}},
		"MIG slots: packed":                  {config: packed(configOf(mig, resourceOf(mig, "mig", 2))), available: []string{"MIG-b0::0", "MIG-b0::1", "MIG-b2::1"}, size: 1, want: []string{"MIG-b2::1"}},
		"MIG slots: two devices of one GPU":  {config: configOf(mig, resourceOf(mig, "mig", 2)), available: []string{"MIG-b0::0", "MIG-b0::1", "MIG-b2::1"}, size: 2, want: []string{"MIG-b0::0", "MIG-b2::1"}},
		"MIG slots: another than required":   {config: configOf(mig, resourceOf(mig, "mig", 2)), available: []string{"MIG-b0::0", "MIG-b0::1", "MIG-b2::1"}, required: []string{"MIG-b0::1"}, size: 2, want: []string{"MIG-b0::1", "MIG-b2::1"}},
		"resource of a GPU that is not here": {config: configOf(two, resourceOf(machineOf(3), "gpu", 1)), size: 3, want: []string{"GPU-a", "GPU-b", "GPU-c"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := NewLedger()
			l.SetHolders(noon, test.held)
			a := NewAllocator(l, test.config)
			available := test.available
			if available == nil {
				available = idsOf(test.config.Resource)
			}
			for range 3 { // the kubelet sends sets, in any order
				if diff := cmp.Diff(test.want, a.Prefer(available, test.required, test.size)); diff != "" {
					t.Fatalf("Prefer (-want +got):\n%s", diff)
				}
				available = append(available[1:len(available):len(available)], available[0])
			}
		})
	}
}

// TestPreferAnything: whatever the kubelet says and whatever is wished, the answer
// has all that is required and is as long as possible.
func TestPreferAnything(t *testing.T) {
	m := machineOf(4)
	m.GPUs[2].Health = gpu.Health{State: gpu.Unhealthy}
	cut(m, 3, 2)
	all := idsOf(resourceOf(m, "gpu", 2))
	all = append(all, "GPU-a", "GPU-b", "GPU-elsewhere::0", "", "::", "GPU-a::9")
	rapid.Check(t, func(t *rapid.T) {
		l := NewLedger()
		if rapid.Bool().Draw(t, "held") {
			l.SetHolders(noon, []Holder{{Resource: "excl", Device: gpu.DeviceID{Base: "GPU-a", Slot: gpu.NoSlot}, GPU: "GPU-a"}})
		}
		a := NewAllocator(l, configOf(m, resourceOf(m, "gpu", rapid.IntRange(1, 2).Draw(t, "replicas"))))
		ids := rapid.SliceOf(rapid.SampledFrom(all))
		available, required := ids.Draw(t, "available"), ids.Draw(t, "required")
		size := rapid.IntRange(-2, 20).Draw(t, "size")
		got := a.PreferWith(ids.Draw(t, "wish"), available, required, size)

		distinct := func(ids []string) []string { return slices.Compact(slices.Sorted(slices.Values(ids))) }
		offered, must := distinct(slices.Concat(available, required)), distinct(required)
		if want := max(min(size, len(offered)), 0); len(got) != want {
			t.Fatalf("got %d of %d: %q", len(got), want, got)
		}
		if len(distinct(got)) != len(got) {
			t.Fatalf("one is given twice: %q", got)
		}
		for _, id := range got {
			if !slices.Contains(offered, id) {
				t.Fatalf("%q was not offered", id)
			}
		}
		for _, id := range must {
			if len(must) <= size && !slices.Contains(got, id) {
				t.Fatalf("%q is required and not in %q", id, got)
			}
		}
	})
}

func TestPreferWith(t *testing.T) {
	four := machineOf(4)
	sick := machineOf(4)
	sick.GPUs[3].Health = gpu.Health{State: gpu.Unhealthy, Reason: "XID 79"}
	engine := []string{"GPU-a", "GPU-b"}
	for name, test := range map[string]struct {
		machine                   *gpu.Machine
		wish, available, required []string
		held, want                []string
	}{
		"a wish":                    {wish: []string{"GPU-d", "GPU-b"}, want: []string{"GPU-d", "GPU-b"}},
		"a wish with what must be":  {wish: []string{"GPU-d", "GPU-b"}, required: []string{"GPU-b"}, want: []string{"GPU-d", "GPU-b"}},
		"none":                      {want: engine},
		"too few":                   {wish: []string{"GPU-d"}, want: engine},
		"too many":                  {wish: []string{"GPU-d", "GPU-b", "GPU-c"}, want: engine},
		"one twice":                 {wish: []string{"GPU-d", "GPU-d"}, want: engine},
		"not available":             {wish: []string{"GPU-c", "GPU-d"}, available: []string{"GPU-a", "GPU-b", "GPU-c"}, want: engine},
		"without what must be":      {wish: []string{"GPU-c", "GPU-d"}, required: []string{"GPU-a"}, want: engine},
		"unknown, though available": {wish: []string{"GPU-a", "GPU-z"}, available: []string{"GPU-a", "GPU-b", "GPU-z"}, want: engine},
		"unhealthy":                 {machine: sick, wish: []string{"GPU-c", "GPU-d"}, want: engine},
		"withheld":                  {wish: []string{"GPU-b", "GPU-d"}, held: []string{"GPU-d"}, want: engine},
	} {
		t.Run(name, func(t *testing.T) {
			if test.machine == nil {
				test.machine = four
			}
			l := NewLedger()
			for _, id := range test.held {
				l.SetHolders(noon, []Holder{holder(t, "excl", id)})
			}
			c := configOf(test.machine, resourceOf(test.machine, "gpu", 1))
			if test.available == nil {
				test.available = idsOf(c.Resource)
			}
			got := NewAllocator(l, c).PreferWith(test.wish, test.available, test.required, 2)
			if diff := cmp.Diff(test.want, got); diff != "" {
				t.Errorf("PreferWith (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAllocateErrors(t *testing.T) {
	m := machineOf(3)
	m.GPUs[1].Health = gpu.Health{State: gpu.Unhealthy, Reason: "XID 79"}
	slots := resourceOf(m, "nvidia.com/gpu.shared", 2)
	slots.FailRequestsGreaterThanOne = true
	for name, test := range map[string]struct {
		ids  []string
		want []string
	}{
		"unknown":       {[]string{"GPU-x::0"}, []string{"nvidia.com/gpu.shared has no device GPU-x::0"}},
		"unknown slot":  {[]string{"GPU-a::2"}, []string{"no device GPU-a::2"}},
		"not a slot":    {[]string{"GPU-a"}, []string{"no device GPU-a"}},
		"empty name":    {[]string{""}, []string{"no device"}},
		"unhealthy":     {[]string{"GPU-b::1"}, []string{"GPU-b::1", "GPU GPU-b is Unhealthy: XID 79"}},
		"two slots":     {[]string{"GPU-a::0", "GPU-a::1"}, []string{"asks for 2 of nvidia.com/gpu.shared", "failRequestsGreaterThanOne allows 1"}},
		"one twice":     {[]string{"GPU-a::0", "GPU-a::0"}, []string{"GPU-a::0", "twice"}},
		"withheld":      {[]string{"GPU-c::0"}, []string{"GPU-c::0", "GPU GPU-c is in use as nvidia.com/gpu-exclusive"}},
		"no strategies": {[]string{"GPU-a::0"}, []string{"flags.plugin.deviceListStrategy is empty"}},
	} {
		t.Run(name, func(t *testing.T) {
			l := NewLedger()
			l.SetHolders(noon, []Holder{holder(t, "nvidia.com/gpu-exclusive", "GPU-c")})
			c := configOf(m, slots)
			if name == "no strategies" {
				c.Flags.Plugin.DeviceListStrategies = nil
			}
			a := NewAllocator(l, c)
			response, err := a.Allocate(t.Context(), test.ids)
			if err == nil {
				t.Fatalf("response %v; want an error", response)
			}
			for _, want := range test.want {
				if !strings.Contains(err.Error(), want) {
					t.Errorf("error %q does not say %q", err, want)
				}
			}
			// A refusal leaves no reservation.
			if ids := withheldIDs(l, res(t, "nvidia.com/gpu-exclusive", "GPU-a", "GPU-b")); len(ids) != 0 {
				t.Errorf("%v are withheld after the refusal", ids)
			}
		})
	}
}

func TestAllocateReserves(t *testing.T) {
	m := machineOf(2)
	l := NewLedger()
	shared := NewAllocator(l, configOf(m, resourceOf(m, "gpu", 2)))
	exclusive := NewAllocator(l, configOf(m, resourceOf(m, "excl", 1)))
	if _, err := shared.Allocate(t.Context(), []string{"GPU-a::1"}); err != nil {
		t.Fatal(err)
	}
	if _, err := exclusive.Allocate(t.Context(), []string{"GPU-a"}); err == nil {
		t.Error("GPU-a was given as a whole while a slot is in use")
	}
	if _, err := exclusive.Allocate(t.Context(), []string{"GPU-b"}); err != nil {
		t.Error(err)
	}
	if _, err := shared.Allocate(t.Context(), []string{"GPU-a::1"}); err != nil {
		t.Errorf("the device of an init container: %v", err)
	}
	if got := shared.Prefer(idsOf(shared.c.Resource), nil, 1); !cmp.Equal(got, []string{"GPU-a::0"}) {
		t.Errorf("Prefer = %v; want the GPU that is not exclusive, before any list was sent", got)
	}
}

func TestADeviceInUseIsGivenOnlyWithLeave(t *testing.T) {
	m := machineOf(1)
	l := NewLedger()
	c := configOf(m, resourceOf(m, "gpu", 3))
	var asked []string
	var refusal error
	c.Reuse = func(_ context.Context, resource string, ids []gpu.DeviceID) error {
		for _, id := range ids {
			asked = append(asked, resource+" "+id.String())
		}
		return refusal
	}
	a := NewAllocator(l, c)
	now := time.Now()
	a.now = func() time.Time { return now }
	give := func(ids ...string) error {
		asked = nil
		_, err := a.Allocate(t.Context(), ids)
		return err
	}
	if err := give("GPU-a::0"); err != nil || asked != nil {
		t.Fatalf("a free device: %v, asked about %q", err, asked)
	}
	refusal = errors.New("it runs")
	if err := give("GPU-a::0", "GPU-a::1"); !errors.Is(err, refusal) || !cmp.Equal(asked, []string{"gpu GPU-a::0"}) {
		t.Errorf("reserved a moment ago: %v, asked about %q", err, asked)
	}
	if err := give("GPU-a::1"); err != nil || asked != nil {
		t.Errorf("what was refused is still free, but: %v, asked about %q", err, asked)
	}
	slot := func(i int) Holder {
		return Holder{Resource: "gpu", Device: gpu.DeviceID{Base: "GPU-a", Slot: i}, GPU: "GPU-a"}
	}
	l.SetHolders(now.Add(10*time.Second), []Holder{slot(2)})
	if err := give("GPU-a::2"); !errors.Is(err, refusal) || !cmp.Equal(asked, []string{"gpu GPU-a::2"}) {
		t.Errorf("held: %v, asked about %q", err, asked)
	}
	if err := give("GPU-a::0"); err != nil || asked != nil {
		t.Errorf("reserved once, and the kubelet had time to say by whom: %v, asked about %q", err, asked)
	}
	refusal = nil
	if err := give("GPU-a::2"); err != nil || !cmp.Equal(asked, []string{"gpu GPU-a::2"}) {
		t.Errorf("held, with leave: %v, asked about %q", err, asked)
	}
}

func TestPreferPutsWhatIsInUseLast(t *testing.T) {
	m := machineOf(2)
	l := NewLedger()
	a := NewAllocator(l, configOf(m, resourceOf(m, "gpu", 1)))
	l.SetHolders(time.Now(), []Holder{{Resource: "gpu", Device: gpu.DeviceID{Base: "GPU-a", Slot: gpu.NoSlot}, GPU: "GPU-a"}})
	available := []string{"GPU-a", "GPU-b"}
	for _, test := range []struct {
		wish, required []string
		size           int
		want           []string
	}{
		{nil, nil, 1, []string{"GPU-b"}},
		{[]string{"GPU-a"}, nil, 1, []string{"GPU-b"}},
		{nil, nil, 2, []string{"GPU-b", "GPU-a"}},
		{nil, []string{"GPU-a"}, 1, []string{"GPU-a"}},
	} {
		if got := a.PreferWith(test.wish, available, test.required, test.size); !cmp.Equal(got, test.want) {
			t.Errorf("PreferWith(%v, %v, %v, %d) = %v, want %v", test.wish, available, test.required, test.size, got, test.want)
		}
	}
}

// TestSet: a running Allocator follows its configuration.
func TestSet(t *testing.T) {
	m := machineOf(2)
	a := NewAllocator(NewLedger(), configOf(m, resourceOf(m, "gpu", 2)))
	a.Set(configOf(m, resourceOf(m, "gpu", 1)))
	if _, err := a.Allocate(t.Context(), []string{"GPU-a::0"}); err == nil {
		t.Error("a slot that is no more was given")
	}
	if _, err := a.Allocate(t.Context(), []string{"GPU-a"}); err != nil {
		t.Error(err)
	}
	smaller := machineOf(1)
	a.Set(configOf(smaller, resourceOf(smaller, "gpu", 1)))
	if got := a.Prefer([]string{"GPU-b", "GPU-a"}, nil, 1); !cmp.Equal(got, []string{"GPU-a"}) {
		t.Errorf("Prefer = %v", got)
	}
}

var uniqueKey = regexp.MustCompile(`(nvidia-device-plugin_)[A-Z2-7]{26}"`)

func TestResponse(t *testing.T) {
	proc := t.TempDir()
	caps := filepath.Join(proc, "driver/nvidia-caps/mig-minors")
	if err := os.MkdirAll(filepath.Dir(caps), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(caps, []byte("config 1\nmonitor 2\ngpu0/gi1/access 30\ngpu0/gi1/ci0/access 31\ngpu0/gi2/access 39\ngpu0/gi2/ci0/access 40\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	type lists = []sharing.DeviceListStrategy
	m := machineOf(2)
	mig := machineOf(2)
	cut(mig, 1, 2)
	slots, migs := resourceOf(m, "nvidia.com/gpu", 2), resourceOf(mig, "nvidia.com/mig-1g.5gb", 1)
	both := []string{"GPU-b::1", "GPU-a::0", "GPU-b::0"}
	for name, test := range map[string]struct {
		lists lists
		edit  func(*Config)
		mig   bool
	}{
		"envvar":               {lists: lists{sharing.ListEnvvar}},
		"envvar-index":         {lists: lists{sharing.ListEnvvar}, edit: func(c *Config) { c.Flags.Plugin.DeviceIDStrategy = sharing.IDByIndex }},
		"volume-mounts":        {lists: lists{sharing.ListVolumeMounts}},
		"cdi-annotations":      {lists: lists{sharing.ListCDIAnnotations}, edit: func(c *Config) { c.Flags.Plugin.CDIAnnotationPrefix = "example.com/" }},
		"cdi-cri":              {lists: lists{sharing.ListCDICRI}},
		"cdi-cri-index":        {lists: lists{sharing.ListCDICRI}, edit: func(c *Config) { c.Flags.Plugin.DeviceIDStrategy = sharing.IDByIndex }, mig: true},
		"cdi-cri-features":     {lists: lists{sharing.ListCDICRI}, edit: features},
		"envvar-features":      {lists: lists{sharing.ListEnvvar}, edit: features},
		"cdi-alone-no-nodes":   {lists: lists{sharing.ListCDICRI}, edit: nodes("/")},
		"envvar-nodes":         {lists: lists{sharing.ListEnvvar}, edit: nodes("/")},
		"envvar-nodes-root":    {lists: lists{sharing.ListEnvvar}, edit: nodes("/run/nvidia/driver")},
		"envvar-nodes-mig":     {lists: lists{sharing.ListEnvvar}, edit: func(c *Config) { nodes("/")(c); c.ProcRoot = proc }, mig: true},
		"nodes-mig-simulated":  {lists: lists{sharing.ListVolumeMounts}, edit: nodes("/"), mig: true},
		"all-four":             {lists: lists{sharing.ListCDICRI, sharing.ListVolumeMounts, sharing.ListEnvvar, sharing.ListCDIAnnotations}, edit: nodes("/")},
		"annotations-and-envs": {lists: lists{sharing.ListEnvvar, sharing.ListCDIAnnotations}},
	} {
		t.Run(name, func(t *testing.T) {
			c, ids := configOf(m, slots), both
			if test.mig {
				c, ids = configOf(mig, migs), []string{"MIG-b1", "GPU-a", "MIG-b0"}
			}
			c.Flags.Plugin.DeviceListStrategies = test.lists
			if test.edit != nil {
				test.edit(&c)
			}
			a := NewAllocator(NewLedger(), c)
			a.exists = func(path string) bool { return path != "/dev/nvidia-modeset" }
			response, err := a.Allocate(t.Context(), ids)
			if err != nil {
				t.Fatal(err)
			}
			got, err := json.MarshalIndent(response, "", "  ")
			if err != nil {
				t.Fatal(err)
			}
			got = append(uniqueKey.ReplaceAll(got, []byte(`$1<unique>"`)), '\n')
			golden := filepath.Join("testdata", "response", name+".json")
			if *update {
				if err := os.WriteFile(golden, got, 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(golden)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(string(want), string(got)); diff != "" {
				t.Errorf("response (-want +got), run with -update if it is right:\n%s", diff)
			}
		})
	}
}

func features(c *Config) {
	c.Flags.GDSEnabled, c.Flags.MOFEDEnabled, c.Flags.GDRCopyEnabled = true, true, true
}

func nodes(devRoot string) func(*Config) {
	return func(c *Config) { c.Flags.Plugin.PassDeviceSpecs, c.Flags.DevRoot = true, devRoot }
}

// TestAnnotationKeysDiffer: a kubelet that merges two responses keeps one value
// per key.
func TestAnnotationKeysDiffer(t *testing.T) {
	m := machineOf(2)
	c := configOf(m, resourceOf(m, "gpu", 1))
	c.Flags.Plugin.DeviceListStrategies = []sharing.DeviceListStrategy{sharing.ListCDIAnnotations}
	a := NewAllocator(NewLedger(), c)
	seen := make(map[string]bool)
	for range 50 {
		for _, id := range []string{"GPU-a", "GPU-b"} {
			response, err := a.Allocate(t.Context(), []string{id})
			if err != nil {
				t.Fatal(err)
			}
			for key := range response.GetAnnotations() {
				if _, name, _ := strings.Cut(key, "/"); seen[key] || len(name) > 63 {
					t.Fatalf("key %s", key)
				}
				seen[key] = true
			}
		}
	}
}

func TestMIGNodesThatTheDriverDoesNotList(t *testing.T) {
	m := machineOf(1)
	cut(m, 0, 1)
	for name, test := range map[string]struct{ file, want string }{
		"no file":   {"", "mig-minors"},
		"not there": {"gpu0/gi1/access 3\n", "lists no gpu0/gi1/ci0/access"},
		"bad":       {"gpu0/gi1/access three\n", `line 1: "three" is not a minor number`},
	} {
		t.Run(name, func(t *testing.T) {
			proc := t.TempDir()
			if test.file != "" {
				dir := filepath.Join(proc, "driver/nvidia-caps")
				if err := os.MkdirAll(dir, 0o755); err != nil {
					t.Fatal(err)
				}
				if err := os.WriteFile(filepath.Join(dir, "mig-minors"), []byte(test.file), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			c := configOf(m, resourceOf(m, "mig", 1))
			nodes("/")(&c)
			c.ProcRoot = proc
			c.Flags.Plugin.DeviceListStrategies = []sharing.DeviceListStrategy{sharing.ListEnvvar}
			_, err := NewAllocator(NewLedger(), c).Allocate(t.Context(), []string{"MIG-a0"})
			if err == nil || !strings.Contains(err.Error(), test.want) || !strings.Contains(err.Error(), "MIG-a0") {
				t.Errorf("error is %v; want one with %q", err, test.want)
			}
		})
	}
}

func FuzzParseMIGMinors(f *testing.F) {
	f.Add([]byte("config 1\nmonitor 2\ngpu0/gi1/access 30\n\n"))
	f.Add([]byte("gpu0 -1"))
	f.Add([]byte("a b c"))
	f.Fuzz(func(t *testing.T, data []byte) {
		minors, err := parseMIGMinors(data)
		if err != nil {
			if minors != nil {
				t.Error("both a result and an error")
			}
			return
		}
		for name, minor := range minors {
			if minor < 0 || !bytes.Contains(data, []byte(name)) {
				t.Errorf("%q: %d", name, minor)
			}
		}
	})
}
