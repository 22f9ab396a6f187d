package placement

import (
	"errors"
	"fmt"
	"slices"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// Why there is no answer. Test for them with errors.Is; the texts around them
// name the field and what to change.
var (
	// ErrInvalid: the request contradicts itself or the machine, whatever is free.
	ErrInvalid = errors.New("invalid request")
	// ErrUnavailable: fewer devices than Size can be chosen, or a required one
	// cannot.
	ErrUnavailable = errors.New("devices not available")
)

// Device is a device offered to Assign.
type Device struct {
	// ID is the name of the device, unique among the devices offered.
	ID string
	// GPU is the index of its GPU in Machine.GPUs.
	GPU int
}

// Spread says which GPUs come first where some of them are partly in use.
type Spread int

// The orders.
const (
	// SpreadOut takes the GPUs with the fewest taken devices first, which the
	// configuration file calls "distributed".
	SpreadOut Spread = iota
	// PackTight takes the GPUs with the most taken devices first, "packed".
	PackTight
)

// AssignRequest asks for devices of one machine.
type AssignRequest struct {
	// Size is the number of devices wanted, 0 or more.
	Size int
	// Available are the devices to choose from, Required included. Those of GPUs
	// that are not healthy are passed over.
	Available []Device
	// Required are ids that must be in the answer. Repeats do not matter.
	Required []string
	// Taken is the number of devices of each GPU that others hold already: slots
	// or MIG devices, by index in Machine.GPUs. Empty means none anywhere.
	Taken []int
	// Spread applies where Taken differs.
	Spread Spread
}

// Assign returns the ids of Size devices, in the order of their GPUs and, on
// one GPU, of Available. Among all answers that contain Required it takes, each
// rule deciding where those before leave a choice:
//
//  1. the one that is spread most evenly over the GPUs. Devices are views of
//     GPUs, so two of them are worth more than one only on two GPUs. A second
//     device of a GPU is given when every GPU with a free device has given one,
//     and so on in rounds; the required devices count.
//  2. the one whose GPUs have the fewest (SpreadOut) or most (PackTight) taken
//     devices in sum, a GPU counting once for each device that it gives.
//  3. the one with the best links: see below.
//  4. the one with the lowest GPU indices.
//
// On one GPU the required devices are taken, then the first in Available.
// Which GPUs are chosen does not depend on the order of Available.
//
// The links of an answer are judged by its GPUs S and the other available GPUs
// R. First by the class of the weakest link inside S: NVLink, else PCIe below
// one CPU, else across CPUs or unknown. A collective operation runs at the pace
// of its weakest link, so one fast pair cannot make up for a third GPU on the
// other socket, however many NVLinks the pair has. Then by
//
//	W(S) - cross(S, R)
//
// in points of Machine.LinkScore, where W sums the links inside S and cross
// those between S and R. The links of all available GPUs together are given, so
// with a weight of w for cross this is to maximise W(S) + w/(1+w)*W(R): a link
// that stays free counts w/(1+w) of one that is used now. With w near 0 a request
// breaks up a well linked group to gain a few points. With w very large it gets
// no more regard than what it leaves behind: of two pairs, the one with fewer
// NVLinks would do as well as the one with more. A weight of 1 counts a free link
// for half, as it may or may not be used as a whole before the GPUs of the
// request come back.
//
// If no more than 16 GPUs compete, rules 3 and 4 are exact. Above, a set is grown
// greedily from each GPU and improved by a bounded number of exchanges, and the
// best of these sets is the answer: for n GPUs that takes in the order of
// n²·Size² steps, and rules 3 and 4 hold nearly.
//
// The machine must have passed Machine.Validate. Assign does not change its
// arguments.
func Assign(m *gpu.Machine, r AssignRequest) ([]string, error) {
	if err := r.check(m); err != nil {
		return nil, err
	}
	picked, err := r.required(m)
	if err != nil {
		return nil, err
	}

	offered, take := make([]int, len(m.GPUs)), make([]int, len(m.GPUs))
	total, left := 0, r.Size
	for i, d := range r.Available {
		if !m.GPUs[d.GPU].Health.OK() {
			continue
		}
		offered[d.GPU]++
		total++
		if picked[i] {
			take[d.GPU]++
			left--
		}
	}
	if total < r.Size {
		return nil, fmt.Errorf("%w: Size is %d, but of %d devices in Available %d are on healthy GPUs: ask for fewer or offer more",
			ErrUnavailable, r.Size, len(r.Available), total)
	}
	r.fill(m, offered, take, left)

	// The required devices are in take already; the rest of it goes to the first
	// others.
	for i, d := range r.Available {
		if picked[i] {
			take[d.GPU]--
		}
	}
	for i, d := range r.Available {
		if !picked[i] && take[d.GPU] > 0 {
			picked[i] = true
			take[d.GPU]--
		}
	}
	answer := make([]Device, 0, r.Size)
	for i, d := range r.Available {
		if picked[i] {
			answer = append(answer, d)
		}
	}
	slices.SortStableFunc(answer, func(a, b Device) int { return a.GPU - b.GPU })
	ids := make([]string, len(answer))
	for i, d := range answer {
		ids[i] = d.ID
	}
	return ids, nil
}

// check finds what is wrong with the request apart from its ids.
func (r *AssignRequest) check(m *gpu.Machine) error {
	switch {
	case m == nil:
		return fmt.Errorf("%w: there is no machine", ErrInvalid)
	case r.Size < 0:
		return fmt.Errorf("%w: Size is %d: ask for 0 or more", ErrInvalid, r.Size)
	case r.Spread != SpreadOut && r.Spread != PackTight:
		return fmt.Errorf("%w: Spread is %d: use SpreadOut (%d) or PackTight (%d)", ErrInvalid, r.Spread, SpreadOut, PackTight)
	case len(r.Taken) != 0 && len(r.Taken) != len(m.GPUs):
		return fmt.Errorf("%w: Taken has %d entries for %d GPUs: give one for each or none", ErrInvalid, len(r.Taken), len(m.GPUs))
	}
	for i, n := range r.Taken {
		if n < 0 {
			return fmt.Errorf("%w: Taken[%d] is %d: give 0 or more", ErrInvalid, i, n)
		}
	}
	for i, d := range r.Available {
		if d.GPU < 0 || d.GPU >= len(m.GPUs) {
			return fmt.Errorf("%w: Available[%d]: device %q is on GPU %d, but the machine has %d GPUs, counted from 0",
				ErrInvalid, i, d.ID, d.GPU, len(m.GPUs))
		}
	}
	return nil
}

// required marks the devices of Available that must be in the answer.
func (r *AssignRequest) required(m *gpu.Machine) ([]bool, error) {
	place := make(map[string]int, len(r.Available))
	for i, d := range r.Available {
		if first, again := place[d.ID]; again {
			return nil, fmt.Errorf("%w: Available[%d]: device %q is offered already as Available[%d]: offer each once",
				ErrInvalid, i, d.ID, first)
		}
		place[d.ID] = i
	}
	marks, distinct := make([]bool, len(r.Available)), 0
	for i, id := range r.Required {
		at, ok := place[id]
		if !ok {
			return nil, fmt.Errorf("%w: Required[%d]: device %q is not in Available", ErrUnavailable, i, id)
		}
		if g := &m.GPUs[r.Available[at].GPU]; !g.Health.OK() {
			return nil, fmt.Errorf("%w: Required[%d]: device %q is on GPU %d, which is %s: require one of a healthy GPU",
				ErrUnavailable, i, id, r.Available[at].GPU, g.Health.State)
		}
		if !marks[at] {
			marks[at] = true
			distinct++
		}
	}
	if distinct > r.Size {
		return nil, fmt.Errorf("%w: Required names %d devices, but Size is %d: ask for %d or more", ErrInvalid, distinct, r.Size, distinct)
	}
	return marks, nil
}

// fill decides how many devices each GPU gives: it adds left devices to take,
// which holds the required ones, without exceeding offered.
func (r *AssignRequest) fill(m *gpu.Machine, offered, take []int, left int) {
	// A round raises the GPUs that give the fewest by one. Only the last round
	// can have more GPUs than devices, so the rules 2 to 4 choose there alone.
	for level := 0; left > 0; level++ {
		var round []int
		for g := range take {
			if take[g] == level && offered[g] > level {
				round = append(round, g)
			}
		}
		if left < len(round) {
			sure, open := r.byTaken(round, left)
			for _, g := range sure {
				take[g]++
			}
			left -= len(sure)
			if level == 0 {
				round = bestLinked(m, offered, take, open, left)
			} else {
				round = open[:left] // every GPU is in the answer already: all are linked alike
			}
		}
		for _, g := range round {
			take[g]++
		}
		left -= len(round)
	}
}

// byTaken splits a round for n of its GPUs: those that Spread puts first beyond
// doubt, and those that tie for what then remains, which is at least one.
func (r *AssignRequest) byTaken(round []int, n int) (sure, open []int) {
	if len(r.Taken) == 0 {
		return nil, round
	}
	worse := func(a, b int) int { return r.Taken[a] - r.Taken[b] }
	if r.Spread == PackTight {
		worse = func(a, b int) int { return r.Taken[b] - r.Taken[a] }
	}
	last := slices.SortedStableFunc(slices.Values(round), worse)[n-1]
	for _, g := range round {
		switch c := worse(g, last); {
		case c < 0:
			sure = append(sure, g)
		case c == 0:
			open = append(open, g)
		}
	}
	return sure, open
}
