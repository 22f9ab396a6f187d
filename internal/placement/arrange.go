package placement

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// ArrangeMIG places more MIG devices on a GPU that has the geometry have, one of
// each profile id in add, which may repeat. Of all legal ways it returns the one
// that leaves the most room, see MIGRoom. Of equal ways it is the one whose starts
// are the lowest, the profiles taken from the largest to the smallest and in the
// order of their ids. That is also the order of the answer; devices can be created
// in it.
//
// It fails with ErrInvalid for a profile that the table does not have, and with
// ErrUnavailable, naming the profile for which there is no place, where the devices
// do not fit together.
func ArrangeMIG(t *gpu.MIGTable, have []gpu.MIGInstance, add []int) ([]gpu.MIGInstance, error) {
	s := newMIGSearch(t, len(have)+len(add))
	for _, in := range have {
		p := t.ByID(in.ProfileID)
		if p == nil {
			return nil, fmt.Errorf("%w: no MIG profile with id %d", ErrInvalid, in.ProfileID)
		}
		s.put(p, in.Placement)
	}
	for _, id := range add {
		p := t.ByID(id)
		if p == nil {
			return nil, fmt.Errorf("%w: no MIG profile with id %d", ErrInvalid, id)
		}
		s.add = append(s.add, p)
	}
	slices.SortFunc(s.add, func(p, q *gpu.MIGProfile) int {
		return cmp.Or(q.Placements[0].Size-p.Placements[0].Size, q.Slices-p.Slices, p.ID-q.ID)
	})
	if s.enough() {
		s.place(0)
	}
	if s.best < 0 {
		return nil, fmt.Errorf("%w: no place for a MIG device %s beside %s", ErrUnavailable, s.add[s.deepest].Name, s.names(have, s.add[:s.deepest]))
	}
	return s.answer, nil
}

// MIGRoom weighs what can still be made on a GPU that has a geometry: each legal
// placement counts its compute slices squared, so that a large profile outweighs
// the small ones in its place. A geometry with a profile that the table does not
// have leaves none.
func MIGRoom(t *gpu.MIGTable, geometry []gpu.MIGInstance) int {
	s := newMIGSearch(t, len(geometry))
	for _, in := range geometry {
		p := t.ByID(in.ProfileID)
		if p == nil {
			return 0
		}
		s.put(p, in.Placement)
	}
	return s.room()
}

// migSearch tries all ways to place devices. A GPU has 12 memory units and 7
// compute slices at most, and devices of one profile are placed in ascending order,
// so there are few.
type migSearch struct {
	table *gpu.MIGTable
	add   []*gpu.MIGProfile
	// placed are the devices that are there now, with those that are tried; slices
	// is what they take together.
	placed []gpu.MIGInstance
	slices int
	// deepest is the largest number of add for which there were places.
	deepest int
	best    int
	answer  []gpu.MIGInstance
}

func newMIGSearch(t *gpu.MIGTable, most int) *migSearch {
	return &migSearch{table: t, placed: make([]gpu.MIGInstance, 0, most), best: -1}
}

func (s *migSearch) put(p *gpu.MIGProfile, at gpu.Placement) {
	s.placed = append(s.placed, gpu.MIGInstance{ProfileID: p.ID, Placement: at})
	s.slices += p.Slices
}

func (s *migSearch) take(p *gpu.MIGProfile) {
	s.placed = s.placed[:len(s.placed)-1]
	s.slices -= p.Slices
}

// count is the number of devices of a profile.
func (s *migSearch) count(p *gpu.MIGProfile) int {
	n := 0
	for _, in := range s.placed {
		if in.ProfileID == p.ID {
			n++
		}
	}
	return n
}

// allows says whether one more device of the profile breaks no limit on numbers.
// With free it is the check of gpu.MIGTable.
func (s *migSearch) allows(p *gpu.MIGProfile) bool {
	return s.slices+p.Slices <= s.table.Slices && s.count(p) < p.Max
}

func (s *migSearch) free(at gpu.Placement) bool {
	for _, in := range s.placed {
		if in.Placement.Overlaps(at) {
			return false
		}
	}
	return true
}

// enough says whether the numbers alone allow the devices. It bounds the search for
// any number of devices.
func (s *migSearch) enough() bool {
	total, counts := s.slices, make(map[int]int)
	for i, p := range s.add {
		total += p.Slices
		counts[p.ID]++
		if total > s.table.Slices || s.count(p)+counts[p.ID] > p.Max {
			s.deepest = i
			return false
		}
	}
	return true
}

// place tries all places for the devices from add[i] on.
func (s *migSearch) place(i int) {
	if i == len(s.add) {
		if room := s.room(); room > s.best {
			s.best = room
			s.answer = slices.Clone(s.placed[len(s.placed)-i:])
		}
		return
	}
	s.deepest = max(s.deepest, i)
	p := s.add[i]
	for _, at := range p.Placements {
		if i > 0 && s.add[i-1] == p && at.Start < s.placed[len(s.placed)-1].Placement.Start {
			continue // the same way in another order
		}
		if s.allows(p) && s.free(at) {
			s.put(p, at)
			s.place(i + 1)
			s.take(p)
		}
	}
}

func (s *migSearch) room() int {
	sum := 0
	for i := range s.table.Profiles {
		p := &s.table.Profiles[i]
		if !s.allows(p) {
			continue
		}
		for _, at := range p.Placements {
			if s.free(at) {
				sum += p.Slices * p.Slices
			}
		}
	}
	return sum
}

// names lists devices for a message.
func (s *migSearch) names(have []gpu.MIGInstance, more []*gpu.MIGProfile) string {
	var list []string
	for _, in := range have {
		list = append(list, s.table.ByID(in.ProfileID).Name)
	}
	for _, p := range more {
		list = append(list, p.Name)
	}
	if len(list) == 0 {
		return "nothing"
	}
	return strings.Join(list, ", ")
}
