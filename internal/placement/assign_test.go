package placement_test

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/placement"
)

// edge is a link of a machine built by hand.
type edge struct{ a, b, nvlinks int }

// build makes a machine of n GPUs with two sockets, the first firstSocket GPUs
// on one. GPUs of one socket meet at the level near.
func build(n, firstSocket int, near gpu.PCIeLevel, edges ...edge) *gpu.Machine {
	m := &gpu.Machine{GPUs: make([]gpu.GPU, n), Links: gpu.NewLinks(n)}
	for i := range n {
		m.GPUs[i] = gpu.GPU{Index: i, UUID: fmt.Sprintf("GPU-%d", i)}
		if i >= firstSocket {
			m.GPUs[i].NUMA = 1
		}
		for j := range i {
			level := gpu.PCIeSystem
			if (i < firstSocket) == (j < firstSocket) {
				level = near
			}
			m.Links.Merge(i, j, gpu.Link{PCIe: level})
		}
	}
	for _, e := range edges {
		m.Links.Merge(e.a, e.b, gpu.Link{NVLinks: e.nvlinks})
	}
	return m
}

// without returns the machine with the link of a and b unreadable.
func without(m *gpu.Machine, a, b int) *gpu.Machine {
	links := gpu.NewLinks(len(m.GPUs))
	for i := range m.GPUs {
		for j := range i {
			if i != max(a, b) || j != min(a, b) {
				links.Merge(i, j, m.Links.At(i, j))
			}
		}
	}
	lost := *m
	lost.Links = links
	return &lost
}

// pairs has two GPUs on each socket, bridged by NVLink.
func pairs() *gpu.Machine {
	return build(4, 2, gpu.PCIeHostBridge, edge{0, 1, 4}, edge{2, 3, 4})
}

// cubeMesh is the DGX-1 with V100: two fully linked quads, a link from each GPU
// to its like in the other quad, six NVLinks of each GPU in all. GPUs 2k and 2k+1
// share a PCIe switch.
func cubeMesh() *gpu.Machine {
	m := build(8, 4, gpu.PCIeHostBridge,
		edge{0, 1, 1}, edge{0, 2, 1}, edge{0, 3, 2}, edge{1, 2, 2}, edge{1, 3, 1}, edge{2, 3, 2},
		edge{4, 5, 1}, edge{4, 6, 1}, edge{4, 7, 2}, edge{5, 6, 2}, edge{5, 7, 1}, edge{6, 7, 2},
		edge{0, 4, 2}, edge{1, 5, 2}, edge{2, 6, 1}, edge{3, 7, 1})
	for i := 0; i < 8; i += 2 {
		m.Links.Merge(i, i+1, gpu.Link{PCIe: gpu.PCIeSingle})
	}
	return m
}

// nvswitch has n GPUs that reach each other over switches, half on each socket.
func nvswitch(n int) *gpu.Machine {
	m := build(n, n/2, gpu.PCIeNode)
	for i := range m.GPUs {
		m.GPUs[i].NVSwitch, m.GPUs[i].NVLinks = "switch", 18
	}
	return m
}

// blocks has n GPUs in groups of size, each fully linked by NVLink and on a
// socket of its own.
func blocks(n, size int) *gpu.Machine {
	m := &gpu.Machine{GPUs: make([]gpu.GPU, n), Links: gpu.NewLinks(n)}
	for i := range n {
		m.GPUs[i] = gpu.GPU{Index: i, UUID: fmt.Sprintf("GPU-%d", i)}
		for j := range i {
			link := gpu.Link{PCIe: gpu.PCIeSystem}
			if i/size == j/size {
				link = gpu.Link{PCIe: gpu.PCIeSingle, NVLinks: 2}
			}
			m.Links.Merge(i, j, link)
		}
	}
	return m
}

// unhealthy returns the machine with these GPUs in a state other than Healthy.
func unhealthy(m *gpu.Machine, state gpu.HealthState, gpus ...int) *gpu.Machine {
	for _, g := range gpus {
		m.GPUs[g].Health = gpu.Health{State: state, Reason: "test"}
	}
	return m
}

// whole offers the GPUs as they are, all of the machine if none are named.
func whole(m *gpu.Machine, gpus ...int) []placement.Device {
	if len(gpus) == 0 {
		for g := range m.GPUs {
			gpus = append(gpus, g)
		}
	}
	var ds []placement.Device
	for _, g := range gpus {
		ds = append(ds, placement.Device{ID: m.GPUs[g].UUID, GPU: g})
	}
	return ds
}

// slots offers counts[g] slots of each GPU g, "g::0" first.
func slots(counts ...int) []placement.Device {
	var ds []placement.Device
	for g, n := range counts {
		for s := range n {
			ds = append(ds, placement.Device{ID: fmt.Sprintf("%d::%d", g, s), GPU: g})
		}
	}
	return ds
}

func ids(gpus ...int) []string {
	s := make([]string, len(gpus))
	for i, g := range gpus {
		s[i] = fmt.Sprintf("GPU-%d", g)
	}
	return s
}

func TestAssignWholeGPUs(t *testing.T) {
	islands := func(nvlinks int, near gpu.PCIeLevel) *gpu.Machine {
		return build(5, 2, near, edge{0, 1, nvlinks})
	}
	for _, tt := range []struct {
		name     string
		machine  *gpu.Machine
		free     []int // none: all
		required []int
		size     int
		want     []int
	}{
		{name: "nothing", machine: pairs(), size: 0, want: nil},
		{name: "pairs: one of all", machine: pairs(), size: 1, want: []int{0}},
		{name: "pairs: one, a pair is broken already", machine: pairs(), free: []int{1, 2, 3}, size: 1, want: []int{1}},
		{name: "pairs: one, the other pair is broken already", machine: pairs(), free: []int{0, 1, 3}, size: 1, want: []int{3}},
		{name: "pairs: two", machine: pairs(), size: 2, want: []int{0, 1}},
		{name: "pairs: two, only one pair is whole", machine: pairs(), free: []int{1, 2, 3}, size: 2, want: []int{2, 3}},
		{name: "pairs: two, none is whole", machine: pairs(), free: []int{1, 2}, size: 2, want: []int{1, 2}},
		{name: "pairs: the partner of a required GPU", machine: pairs(), required: []int{3}, size: 2, want: []int{2, 3}},
		{name: "pairs: three are a pair and one", machine: pairs(), size: 3, want: []int{0, 1, 2}},
		{name: "pairs: three with one required", machine: pairs(), required: []int{3}, size: 3, want: []int{0, 1, 3}},
		{name: "pairs: all", machine: pairs(), size: 4, want: []int{0, 1, 2, 3}},
		{name: "pairs: an unhealthy GPU breaks its pair", machine: unhealthy(pairs(), gpu.Lost, 0), size: 2, want: []int{2, 3}},
		{name: "pairs: one of the pair that a lost GPU broke", machine: unhealthy(pairs(), gpu.Unhealthy, 2), size: 1, want: []int{3}},
		{name: "pairs: unreadable bridge", machine: without(pairs(), 0, 1), size: 2, want: []int{2, 3}},

		{name: "one bridge of two: the request gets it", machine: build(4, 4, gpu.PCIeHostBridge, edge{2, 3, 4}), size: 2, want: []int{2, 3}},
		{name: "more NVLinks of two pairs", machine: build(4, 4, gpu.PCIeHostBridge, edge{0, 1, 2}, edge{2, 3, 4}, edge{0, 2, 1}, edge{0, 3, 1}, edge{1, 2, 1}, edge{1, 3, 1}), size: 2, want: []int{2, 3}},
		{name: "one bridge of two: a single GPU spares it", machine: build(4, 4, gpu.PCIeHostBridge, edge{0, 1, 4}), size: 1, want: []int{2}},

		{name: "islands: three, PCIe alone", machine: islands(0, gpu.PCIeHostBridge), size: 3, want: []int{2, 3, 4}},
		{name: "islands: three, one NVLink", machine: islands(1, gpu.PCIeNode), size: 3, want: []int{2, 3, 4}},
		{name: "islands: three, 12 NVLinks", machine: islands(12, gpu.PCIeHostBridge), size: 3, want: []int{2, 3, 4}},
		{name: "islands: three, 18 NVLinks", machine: islands(18, gpu.PCIeSingle), size: 3, want: []int{2, 3, 4}},
		{name: "islands: two", machine: islands(2, gpu.PCIeSingle), size: 2, want: []int{0, 1}},

		{name: "mesh: two have a double link", machine: cubeMesh(), size: 2, want: []int{2, 3}},
		{name: "mesh: two of a broken quad", machine: cubeMesh(), free: []int{1, 2, 3, 4, 5, 6, 7}, size: 2, want: []int{2, 3}},
		{name: "mesh: three are fully linked", machine: cubeMesh(), free: []int{0, 1, 4, 5, 6}, size: 3, want: []int{4, 5, 6}},
		{name: "mesh: four are a quad", machine: cubeMesh(), size: 4, want: []int{0, 1, 2, 3}},
		{name: "mesh: four are the whole quad", machine: cubeMesh(), free: []int{1, 2, 3, 4, 5, 6, 7}, size: 4, want: []int{4, 5, 6, 7}},
		{name: "mesh: four around a required GPU", machine: cubeMesh(), required: []int{6}, size: 4, want: []int{4, 5, 6, 7}},
		{name: "mesh: four with a link lost", machine: without(cubeMesh(), 0, 3), size: 4, want: []int{4, 5, 6, 7}},
		{name: "mesh: one from the broken quad", machine: cubeMesh(), free: []int{0, 1, 2, 3, 6}, size: 1, want: []int{6}},
		{name: "mesh: six leave a double link", machine: cubeMesh(), size: 6, want: []int{0, 1, 2, 3, 4, 5}},

		{name: "switch: two of one socket", machine: nvswitch(8), free: []int{3, 4, 5}, size: 2, want: []int{4, 5}},
		{name: "switch: two spare the larger socket", machine: nvswitch(8), free: []int{0, 1, 2, 4, 5}, size: 2, want: []int{4, 5}},
		{name: "switch: four of one socket", machine: nvswitch(8), free: []int{0, 1, 2, 4, 5, 6, 7}, size: 4, want: []int{4, 5, 6, 7}},
		{name: "switch: one spares the larger socket", machine: nvswitch(8), free: []int{0, 1, 2, 3, 5, 6}, size: 1, want: []int{5}},
		{name: "switch: GPU that lost its switch", machine: func() *gpu.Machine {
			m := nvswitch(4)
			m.GPUs[0].NVSwitch = ""
			return m
		}(), size: 3, want: []int{1, 2, 3}},

		{name: "PCIe: two of a switch", machine: func() *gpu.Machine {
			m := build(4, 4, gpu.PCIeHostBridge)
			m.Links.Merge(1, 2, gpu.Link{PCIe: gpu.PCIeSingle})
			return m
		}(), size: 2, want: []int{1, 2}},
		{name: "PCIe: two of one socket", machine: build(4, 1, gpu.PCIeNode), size: 2, want: []int{1, 2}},
		{name: "PCIe: three of one socket", machine: build(8, 4, gpu.PCIeNode), free: []int{0, 1, 4, 5, 6}, size: 3, want: []int{4, 5, 6}},
		{name: "PCIe: no link is known", machine: &gpu.Machine{GPUs: pairs().GPUs, Links: gpu.NewLinks(4)}, size: 2, want: []int{0, 1}},

		{name: "many: a block", machine: blocks(24, 4), size: 4, want: []int{0, 1, 2, 3}},
		{name: "many: the only whole block", machine: blocks(32, 4), free: []int{
			0, 1, 2, 4, 5, 6, 9, 10, 11, 12, 13, 15, 16, 17, 18, 20, 21, 22, 23, 24, 25, 26, 29, 30, 31,
		}, size: 4, want: []int{20, 21, 22, 23}},
		{name: "many: two of a broken block spare the whole ones", machine: blocks(20, 4), free: []int{
			0, 1, 2, 3, 4, 5, 6, 7, 9, 11, 12, 13, 14, 15, 16, 17, 18, 19,
		}, size: 2, want: []int{9, 11}},
		{name: "many: two blocks around required GPUs", machine: blocks(24, 4), required: []int{6, 17}, size: 8, want: []int{4, 5, 6, 7, 16, 17, 18, 19}},
		{name: "many: switch", machine: nvswitch(18), size: 9, want: []int{0, 1, 2, 3, 4, 5, 6, 7, 8}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := placement.Assign(tt.machine, placement.AssignRequest{
				Size: tt.size, Available: whole(tt.machine, tt.free...), Required: ids(tt.required...),
			})
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(ids(tt.want...), got); diff != "" {
				t.Errorf("ids (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAssignShared(t *testing.T) {
	for _, tt := range []struct {
		name    string
		machine *gpu.Machine // nil: pairs
		request placement.AssignRequest
		want    []string
	}{
		{
			name:    "two slots are two GPUs",
			request: placement.AssignRequest{Size: 2, Available: slots(4, 4)},
			want:    []string{"0::0", "1::0"},
		},
		{
			name:    "two slots of the one GPU that has them",
			request: placement.AssignRequest{Size: 2, Available: slots(0, 4)},
			want:    []string{"1::0", "1::1"},
		},
		{
			name:    "two slots are two GPUs even when packed",
			request: placement.AssignRequest{Size: 2, Available: slots(4, 4), Taken: []int{0, 3, 0, 0}, Spread: placement.PackTight},
			want:    []string{"0::0", "1::0"},
		},
		{
			name:    "a required slot counts as its GPU's",
			request: placement.AssignRequest{Size: 2, Available: slots(4, 4), Required: []string{"1::2"}},
			want:    []string{"0::0", "1::2"},
		},
		{
			name:    "required slots of one GPU",
			request: placement.AssignRequest{Size: 3, Available: slots(4, 4), Required: []string{"1::2", "1::3"}},
			want:    []string{"0::0", "1::2", "1::3"},
		},
		{
			name:    "rounds after required slots of one GPU",
			request: placement.AssignRequest{Size: 5, Available: slots(4, 4), Required: []string{"1::2", "1::3"}},
			want:    []string{"0::0", "0::1", "0::2", "1::2", "1::3"},
		},
		{
			name:    "required slots are deduplicated",
			request: placement.AssignRequest{Size: 2, Available: slots(4), Required: []string{"0::3", "0::3", "0::3"}},
			want:    []string{"0::0", "0::3"},
		},
		{
			name:    "rounds are even",
			request: placement.AssignRequest{Size: 7, Available: slots(4, 4, 4)},
			want:    []string{"0::0", "0::1", "0::2", "1::0", "1::1", "2::0", "2::1"},
		},
		{
			name:    "rounds pass over exhausted GPUs",
			request: placement.AssignRequest{Size: 6, Available: slots(4, 1, 4)},
			want:    []string{"0::0", "0::1", "0::2", "1::0", "2::0", "2::1"},
		},
		{
			name:    "everything",
			request: placement.AssignRequest{Size: 6, Available: slots(4, 0, 2)},
			want:    []string{"0::0", "0::1", "0::2", "0::3", "2::0", "2::1"},
		},
		{
			name:    "spread out",
			request: placement.AssignRequest{Size: 1, Available: slots(2, 3, 4, 3), Taken: []int{2, 1, 0, 1}},
			want:    []string{"2::0"},
		},
		{
			name:    "packed",
			request: placement.AssignRequest{Size: 1, Available: slots(2, 3, 1, 3), Taken: []int{2, 1, 3, 1}, Spread: placement.PackTight},
			want:    []string{"2::0"},
		},
		{
			name:    "packed passes over full GPUs",
			request: placement.AssignRequest{Size: 1, Available: slots(2, 3, 0, 3), Taken: []int{2, 1, 4, 1}, Spread: placement.PackTight},
			want:    []string{"0::0"},
		},
		{
			name:    "spread decides before links",
			request: placement.AssignRequest{Size: 2, Available: slots(2, 2, 2, 2), Taken: []int{0, 1, 0, 1}},
			want:    []string{"0::0", "2::0"},
		},
		{
			name:    "links decide where the spread does not",
			request: placement.AssignRequest{Size: 2, Available: slots(2, 2, 2, 2), Taken: []int{1, 0, 0, 0}},
			want:    []string{"2::0", "3::0"},
		},
		{
			name:    "links decide among the last that the spread leaves",
			request: placement.AssignRequest{Size: 2, Available: slots(2, 2, 2, 2), Taken: []int{1, 1, 1, 0}},
			want:    []string{"2::0", "3::0"},
		},
		{
			name:    "links decide among the last that packing leaves",
			request: placement.AssignRequest{Size: 2, Available: slots(2, 2, 2, 2), Taken: []int{1, 1, 1, 2}, Spread: placement.PackTight},
			want:    []string{"2::0", "3::0"},
		},
		{
			name:    "one slot spares a whole pair",
			request: placement.AssignRequest{Size: 1, Available: slots(0, 2, 2, 2), Taken: []int{2, 0, 0, 0}},
			want:    []string{"1::0"},
		},
		{
			name:    "the spread decides who gives a second",
			request: placement.AssignRequest{Size: 5, Available: slots(2, 2, 2, 2), Taken: []int{2, 1, 0, 2}},
			want:    []string{"0::0", "1::0", "2::0", "2::1", "3::0"},
		},
		{
			name:    "MIG devices: one each on GPUs that are taken differently",
			request: placement.AssignRequest{Size: 1, Available: slots(1, 1, 1, 1), Taken: []int{6, 6, 3, 6}},
			want:    []string{"2::0"},
		},
		{
			name:    "slots of unhealthy GPUs are passed over",
			machine: unhealthy(pairs(), gpu.Unhealthy, 2, 3),
			request: placement.AssignRequest{Size: 3, Available: slots(2, 2, 2, 2), Taken: []int{1, 1, 0, 0}},
			want:    []string{"0::0", "0::1", "1::0"},
		},
		{
			name: "the order of Available decides on one GPU",
			request: placement.AssignRequest{Size: 3, Available: []placement.Device{
				{ID: "d", GPU: 1}, {ID: "c", GPU: 0}, {ID: "b", GPU: 1}, {ID: "a", GPU: 0}, {ID: "e", GPU: 0},
			}, Required: []string{"a"}},
			want: []string{"c", "a", "d"},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			m := tt.machine
			if m == nil {
				m = pairs()
			}
			got, err := placement.Assign(m, tt.request)
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("ids (-want +got):\n%s", diff)
			}
		})
	}
}

func TestAssignErrors(t *testing.T) {
	for _, tt := range []struct {
		name    string
		machine *gpu.Machine
		request placement.AssignRequest
		want    error
		text    string
	}{
		{
			name: "no machine", request: placement.AssignRequest{Size: 1},
			want: placement.ErrInvalid, text: "there is no machine",
		},
		{
			name: "negative size", machine: pairs(), request: placement.AssignRequest{Size: -1},
			want: placement.ErrInvalid, text: "Size is -1: ask for 0 or more",
		},
		{
			name: "unknown spread", machine: pairs(), request: placement.AssignRequest{Spread: 2},
			want: placement.ErrInvalid, text: "Spread is 2: use SpreadOut (0) or PackTight (1)",
		},
		{
			name: "taken of another machine", machine: pairs(), request: placement.AssignRequest{Taken: []int{1}},
			want: placement.ErrInvalid, text: "Taken has 1 entries for 4 GPUs",
		},
		{
			name: "negative taken", machine: pairs(), request: placement.AssignRequest{Taken: []int{0, 0, -3, 0}},
			want: placement.ErrInvalid, text: "Taken[2] is -3: give 0 or more",
		},
		{
			name: "index too large", machine: pairs(),
			request: placement.AssignRequest{Size: 1, Available: []placement.Device{{ID: "a"}, {ID: "b", GPU: 4}}},
			want:    placement.ErrInvalid, text: `Available[1]: device "b" is on GPU 4, but the machine has 4 GPUs`,
		},
		{
			name: "negative index", machine: pairs(),
			request: placement.AssignRequest{Size: 1, Available: []placement.Device{{ID: "b", GPU: -1}}},
			want:    placement.ErrInvalid, text: `Available[0]: device "b" is on GPU -1`,
		},
		{
			name: "offered twice", machine: pairs(),
			request: placement.AssignRequest{Size: 1, Available: []placement.Device{{ID: "a"}, {ID: "b"}, {ID: "a", GPU: 1}}},
			want:    placement.ErrInvalid, text: `Available[2]: device "a" is offered already as Available[0]`,
		},
		{
			name: "more required than wanted", machine: pairs(),
			request: placement.AssignRequest{Size: 1, Available: slots(3), Required: []string{"0::1", "0::0", "0::1"}},
			want:    placement.ErrInvalid, text: "Required names 2 devices, but Size is 1",
		},
		{
			name: "required but not offered", machine: pairs(),
			request: placement.AssignRequest{Size: 2, Available: slots(3), Required: []string{"0::1", "1::0"}},
			want:    placement.ErrUnavailable, text: `Required[1]: device "1::0" is not in Available`,
		},
		{
			name: "required but unhealthy", machine: unhealthy(pairs(), gpu.Lost, 1),
			request: placement.AssignRequest{Size: 2, Available: slots(3, 3), Required: []string{"1::0"}},
			want:    placement.ErrUnavailable, text: `Required[0]: device "1::0" is on GPU 1, which is Lost`,
		},
		{
			name: "too few", machine: unhealthy(pairs(), gpu.Unhealthy, 1),
			request: placement.AssignRequest{Size: 4, Available: slots(3, 3)},
			want:    placement.ErrUnavailable, text: "Size is 4, but of 6 devices in Available 3 are on healthy GPUs",
		},
		{
			name: "no GPUs", machine: &gpu.Machine{}, request: placement.AssignRequest{Size: 1},
			want: placement.ErrUnavailable, text: "Size is 1, but of 0 devices",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := placement.Assign(tt.machine, tt.request)
			if !errors.Is(err, tt.want) || !strings.Contains(err.Error(), tt.text) || got != nil {
				t.Errorf("got %q, error %v; want error %v with %q", got, err, tt.want, tt.text)
			}
		})
	}
}

// drawMachine makes a machine of at most most GPUs with any links at all.
func drawMachine(t *rapid.T, most int) *gpu.Machine {
	n := rapid.IntRange(0, most).Draw(t, "gpus")
	m := &gpu.Machine{GPUs: make([]gpu.GPU, n), Links: gpu.NewLinks(n)}
	// Few values, so that ties are common.
	nvlinks := rapid.SampledFrom([]int{0, 0, 1, 2})
	level := rapid.SampledFrom([]gpu.PCIeLevel{gpu.PCIeUnknown, gpu.PCIeSystem, gpu.PCIeNode, gpu.PCIeSingle})
	if rapid.Bool().Draw(t, "linked") {
		nvlinks = rapid.SampledFrom([]int{1, 2, 18})
	}
	state := rapid.SampledFrom([]gpu.HealthState{gpu.Healthy, gpu.Healthy, gpu.Healthy, gpu.Healthy, gpu.Unhealthy, gpu.Lost})
	domain := rapid.SampledFrom([]string{"", "", "", "a", "b"})
	for i := range n {
		m.GPUs[i] = gpu.GPU{Index: i, UUID: fmt.Sprintf("GPU-%d", i), NVLinks: 3}
		m.GPUs[i].Health.State = state.Draw(t, "health")
		m.GPUs[i].NVSwitch = domain.Draw(t, "switch")
		for j := range i {
			m.Links.Merge(i, j, gpu.Link{NVLinks: nvlinks.Draw(t, "nvlinks"), PCIe: level.Draw(t, "pcie")})
		}
	}
	return m
}

// drawRequest makes a request that the machine can meet.
func drawRequest(t *rapid.T, m *gpu.Machine, perGPU int) placement.AssignRequest {
	var r placement.AssignRequest
	for g, n := range rapid.SliceOfN(rapid.IntRange(0, perGPU), len(m.GPUs), len(m.GPUs)).Draw(t, "offered") {
		for s := range n {
			r.Available = append(r.Available, placement.Device{ID: fmt.Sprintf("%d::%d", g, s), GPU: g})
		}
	}
	if len(r.Available) > 0 {
		r.Available = rapid.Permutation(r.Available).Draw(t, "available")
	}
	usable := 0
	chance := rapid.SampledFrom([]int{0, 10, 50}).Draw(t, "required, percent")
	for _, d := range r.Available {
		if !m.GPUs[d.GPU].Health.OK() {
			continue
		}
		usable++
		if rapid.IntRange(0, 99).Draw(t, "die") < chance {
			r.Required = append(r.Required, d.ID)
		}
	}
	r.Size = rapid.IntRange(len(r.Required), usable).Draw(t, "size")
	if len(r.Required) > 0 && rapid.Bool().Draw(t, "repeat") {
		r.Required = append(r.Required, r.Required[0])
	}
	if rapid.Bool().Draw(t, "in use") {
		r.Taken = rapid.SliceOfN(rapid.IntRange(0, 2), len(m.GPUs), len(m.GPUs)).Draw(t, "taken")
	}
	r.Spread = rapid.SampledFrom([]placement.Spread{placement.SpreadOut, placement.PackTight}).Draw(t, "spread")
	return r
}

// counts says how many devices of each GPU are in the answer.
func counts(m *gpu.Machine, r placement.AssignRequest, answer []string) []int {
	n := make([]int, len(m.GPUs))
	for _, d := range r.Available {
		if slices.Contains(answer, d.ID) {
			n[d.GPU]++
		}
	}
	return n
}

// checkAnswer asserts what holds of every answer, on any machine.
func checkAnswer(t *rapid.T, m *gpu.Machine, r placement.AssignRequest, got []string) {
	if len(got) != r.Size {
		t.Fatalf("got %d ids, want %d", len(got), r.Size)
	}
	place := make(map[string]int)
	for i, d := range r.Available {
		place[d.ID] = i
	}
	seen := make(map[string]bool)
	for i, id := range got {
		at, ok := place[id]
		if !ok {
			t.Fatalf("%q was not offered", id)
		}
		if seen[id] {
			t.Fatalf("%q is given twice", id)
		}
		seen[id] = true
		if !m.GPUs[r.Available[at].GPU].Health.OK() {
			t.Fatalf("%q is not healthy", id)
		}
		if i > 0 {
			before := place[got[i-1]]
			a, b := r.Available[before].GPU, r.Available[at].GPU
			if a > b || a == b && before > at {
				t.Fatalf("%q comes after %q", id, got[i-1])
			}
		}
	}
	for _, id := range r.Required {
		if !seen[id] {
			t.Fatalf("%q is required and not in %q", id, got)
		}
	}

	// No device can move to a GPU that gives at least two fewer, so the answer is
	// as even as it can be, and so on as many GPUs as it can be.
	given := counts(m, r, got)
	for _, free := range r.Available {
		if seen[free.ID] || !m.GPUs[free.GPU].Health.OK() {
			continue
		}
		for _, id := range got {
			if from := r.Available[place[id]].GPU; !slices.Contains(r.Required, id) && given[from] >= given[free.GPU]+2 {
				t.Fatalf("GPU %d gives %d devices although GPU %d with a free one gives %d", from, given[from], free.GPU, given[free.GPU])
			}
		}
	}
	// On one GPU, nothing is passed over for a later device that is not required.
	for i, d := range r.Available {
		for _, later := range r.Available[i+1:] {
			if d.GPU == later.GPU && !seen[d.ID] && seen[later.ID] && !slices.Contains(r.Required, later.ID) {
				t.Fatalf("%q is given before %q", later.ID, d.ID)
			}
		}
	}
}

func TestAssignInvariants(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawMachine(t, 20)
		r := drawRequest(t, m, rapid.SampledFrom([]int{1, 4}).Draw(t, "per GPU"))
		got, err := placement.Assign(m, r)
		if err != nil {
			t.Fatal(err)
		}
		checkAnswer(t, m, r, got)

		again := r
		if len(r.Available) > 0 {
			again.Available = rapid.Permutation(r.Available).Draw(t, "again")
		}
		other, err := placement.Assign(m, again)
		if err != nil {
			t.Fatal(err)
		}
		if diff := cmp.Diff(counts(m, r, got), counts(m, again, other)); diff != "" {
			t.Fatalf("devices per GPU depend on the order of Available (-first +second):\n%s", diff)
		}
	})
}

// rank lists what the rules at Assign compare of an answer with these counts of
// devices per GPU, the most important first; less is better. The GPU indices
// come last.
func rank(m *gpu.Machine, r placement.AssignRequest, offered, given []int) []int {
	// The most even split has the least of the largest counts.
	key := slices.Sorted(slices.Values(given))
	slices.Reverse(key)
	taken, weakest, score := 0, 0, 0
	var indices []int
	for g := range given {
		for range given[g] {
			indices = append(indices, g)
			if r.Taken != nil && r.Spread == placement.PackTight {
				taken -= r.Taken[g]
			} else if r.Taken != nil {
				taken += r.Taken[g]
			}
		}
		for h := range g {
			link := m.LinkScore(g, h)
			switch {
			case given[g] > 0 && given[h] > 0:
				score += link
				switch {
				case link < 20:
					weakest = max(weakest, 2)
				case link < 100:
					weakest = max(weakest, 1)
				}
			case given[g] > 0 && offered[h] > 0, given[h] > 0 && offered[g] > 0:
				score -= link
			}
		}
	}
	return slices.Concat(key, []int{taken, weakest, -score}, indices)
}

// brute tries every way to give counts of devices per GPU and returns the rank
// of the best and of the answer got.
func brute(m *gpu.Machine, r placement.AssignRequest, got []string) (best, answer []int) {
	offered, required := make([]int, len(m.GPUs)), make([]int, len(m.GPUs))
	for _, d := range r.Available {
		if m.GPUs[d.GPU].Health.OK() {
			offered[d.GPU]++
			if slices.Contains(r.Required, d.ID) {
				required[d.GPU]++
			}
		}
	}
	given := make([]int, len(m.GPUs))
	var try func(g, left int)
	try = func(g, left int) {
		if g == len(given) {
			if left > 0 {
				return
			}
			if k := rank(m, r, offered, given); best == nil || slices.Compare(k, best) < 0 {
				best = k
			}
			return
		}
		for k := required[g]; k <= min(offered[g], left); k++ {
			given[g] = k
			try(g+1, left-k)
		}
		given[g] = 0
	}
	try(0, r.Size)
	return best, rank(m, r, offered, counts(m, r, got))
}

func TestAssignEqualsBruteForce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := drawMachine(t, 6)
		r := drawRequest(t, m, rapid.SampledFrom([]int{1, 1, 3}).Draw(t, "per GPU"))
		got, err := placement.Assign(m, r)
		if err != nil {
			t.Fatal(err)
		}
		best, answer := brute(m, r, got)
		if diff := cmp.Diff(best, answer); diff != "" {
			t.Fatalf("rank of %q (-best +got):\n%s", got, diff)
		}
	})
}

// On machines of well-linked groups, whichever GPUs are free, the answer above
// 16 GPUs is the best one although not all are tried.
func TestAssignManyGPUs(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := blocks(20, rapid.SampledFrom([]int{2, 4, 5, 10}).Draw(t, "block"))
		free := rapid.Permutation(whole(m)).Draw(t, "free")
		r := placement.AssignRequest{
			Available: free[:rapid.IntRange(17, 20).Draw(t, "available")],
			Size:      rapid.IntRange(1, 4).Draw(t, "size"),
		}
		got, err := placement.Assign(m, r)
		if err != nil {
			t.Fatal(err)
		}
		best, answer := brute(m, r, got)
		if diff := cmp.Diff(best[:len(best)-r.Size], answer[:len(answer)-r.Size]); diff != "" {
			t.Fatalf("rank of %q without indices (-best +got):\n%s", got, diff)
		}
	})
}

// Whatever it is asked, Assign answers by its rules or with one of its errors.
func TestAssignNonsense(t *testing.T) {
	number := rapid.OneOf(rapid.IntRange(-2, 4), rapid.Int())
	id := rapid.SampledFrom([]string{"", "a", "b", "c", "d", "e", "f"})
	rapid.Check(t, func(t *rapid.T) {
		m := drawMachine(t, 4)
		switch rapid.IntRange(0, 9).Draw(t, "machine") {
		case 0:
			m = nil
		case 1:
			m.Links = gpu.NewLinks(rapid.IntRange(0, 6).Draw(t, "links"))
		case 2:
			for i := range m.GPUs {
				m.GPUs[i].NVLinks = rapid.Int().Draw(t, "nvlinks")
				m.GPUs[i].Health.State = gpu.HealthState(rapid.IntRange(-1, 3).Draw(t, "health"))
			}
		}
		device := rapid.Custom(func(t *rapid.T) placement.Device {
			return placement.Device{
				ID:  id.Draw(t, "id"),
				GPU: rapid.OneOf(rapid.IntRange(0, 3), rapid.IntRange(0, 3), number).Draw(t, "gpu"),
			}
		})
		r := placement.AssignRequest{
			Size:      number.Draw(t, "size"),
			Available: rapid.SliceOfN(device, 0, 7).Draw(t, "available"),
			Required:  rapid.SliceOfN(id, 0, 3).Draw(t, "required"),
			Taken:     rapid.SampledFrom([][]int{nil, {}, {1}, {0, 1, 2, 3}, {-1, 0, 0, 0}, {1 << 62, 0, 0, 1}}).Draw(t, "taken"),
			Spread:    placement.Spread(rapid.IntRange(-1, 2).Draw(t, "spread")),
		}
		got, err := placement.Assign(m, r)
		if err == nil {
			checkAnswer(t, m, r, got)
		} else if got != nil || !errors.Is(err, placement.ErrInvalid) && !errors.Is(err, placement.ErrUnavailable) {
			t.Fatalf("got %q with error %v", got, err)
		}
	})
}

// Assign must leave what it is given as it was.
func TestAssignKeepsArguments(t *testing.T) {
	m := unhealthy(cubeMesh(), gpu.Unhealthy, 3)
	request := func() placement.AssignRequest {
		return placement.AssignRequest{
			Size: 5, Available: slots(1, 2, 3, 1, 2, 3, 1, 2), Required: []string{"6::0", "2::1"}, Taken: []int{0, 1, 2, 3, 0, 1, 2, 3},
		}
	}
	r := request()
	if _, err := placement.Assign(m, r); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(request(), r); diff != "" {
		t.Errorf("request (-before +after):\n%s", diff)
	}
	if diff := cmp.Diff(unhealthy(cubeMesh(), gpu.Unhealthy, 3).GPUs, m.GPUs); diff != "" {
		t.Errorf("machine (-before +after):\n%s", diff)
	}
}

func BenchmarkAssign(b *testing.B) {
	mesh16 := func() *gpu.Machine {
		m := build(16, 8, gpu.PCIeHostBridge)
		half := cubeMesh()
		for i := range 16 {
			for j := range i {
				if i/8 == j/8 {
					m.Links.Merge(i, j, half.Links.At(i%8, j%8))
				}
			}
			if i >= 8 {
				m.Links.Merge(i, i-8, gpu.Link{NVLinks: 1})
			}
		}
		return m
	}
	for _, machine := range []struct {
		name string
		m    *gpu.Machine
	}{
		{"linked8", nvswitch(8)},
		{"hybrid8", cubeMesh()},
		{"pcie8", build(8, 4, gpu.PCIeHostBridge)},
		{"linked16", nvswitch(16)},
		{"hybrid16", mesh16()},
		{"pcie16", build(16, 8, gpu.PCIeHostBridge)},
	} {
		for size := 1; size <= len(machine.m.GPUs); size++ {
			b.Run(fmt.Sprintf("%s/size%d", machine.name, size), func(b *testing.B) {
				benchmark(b, machine.m, placement.AssignRequest{Size: size, Available: whole(machine.m)})
			})
		}
	}
	for _, size := range []int{1, 4, 8, 20, 80} {
		b.Run(fmt.Sprintf("slots8x10/size%d", size), func(b *testing.B) {
			benchmark(b, cubeMesh(), placement.AssignRequest{Size: size, Available: slots(10, 10, 10, 10, 10, 10, 10, 10)})
		})
	}
	for _, n := range []int{32, 64} {
		m := blocks(n, 8)
		b.Run(fmt.Sprintf("blocks%d/size%d", n, n/2), func(b *testing.B) {
			benchmark(b, m, placement.AssignRequest{Size: n / 2, Available: whole(m)})
		})
	}
}

func benchmark(b *testing.B, m *gpu.Machine, r placement.AssignRequest) {
	b.ReportAllocs()
	for b.Loop() {
		if _, err := placement.Assign(m, r); err != nil {
			b.Fatal(err)
		}
	}
}
