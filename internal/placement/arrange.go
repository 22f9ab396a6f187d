package placement

import (
	"fmt"
	"slices"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
)

// ArrangeMIG places more MIG devices on a GPU that has the geometry have, one of
// each profile id in add, which may repeat. Of all legal ways it returns the one
// that leaves the most room: each placement that is still legal afterwards counts
// its compute slices squared, so that a large profile outweighs the small ones in
// its place. Of equal ways it is the one whose starts are the lowest, the profiles
// taken from the largest to the smallest and in the order of their ids. That is
// also the order of the answer; devices can be created in it.
//
// It fails with ErrInvalid for a profile that the table does not have, and with
// ErrUnavailable where the devices do not fit together.
func ArrangeMIG(t *gpu.MIGTable, have []gpu.MIGInstance, add []int) ([]gpu.MIGInstance, error) {
	ids := slices.Clone(add)
	for _, id := range ids {
		if t.ByID(id) == nil {
			return nil, fmt.Errorf("%w: no MIG profile with id %d", ErrInvalid, id)
		}
	}
	slices.SortFunc(ids, func(a, b int) int {
		p, q := t.ByID(a), t.ByID(b)
		if d := q.Placements[0].Size - p.Placements[0].Size; d != 0 {
			return d
		}
		if d := q.Slices - p.Slices; d != 0 {
			return d
		}
		return a - b
	})
	s := arranger{table: t, ids: ids, geometry: slices.Clone(have), best: -1}
	s.place(0)
	if s.best < 0 {
		return nil, fmt.Errorf("%w: %s do not fit beside %s", ErrUnavailable, names(t, ids), geometryText(t, have))
	}
	return s.answer, nil
}

// arranger searches all ways. A GPU has 12 memory units at most, and devices of one
// profile are placed in ascending order, so there are few.
type arranger struct {
	table    *gpu.MIGTable
	ids      []int
	geometry []gpu.MIGInstance
	best     int
	answer   []gpu.MIGInstance
}

func (s *arranger) place(i int) {
	if i == len(s.ids) {
		if room := s.room(); room > s.best {
			s.best = room
			s.answer = slices.Clone(s.geometry[len(s.geometry)-i:])
		}
		return
	}
	for _, at := range s.table.Free(s.geometry, s.ids[i]) {
		if i > 0 && s.ids[i-1] == s.ids[i] && at.Start < s.geometry[len(s.geometry)-1].Placement.Start {
			continue // the same way in another order
		}
		s.geometry = append(s.geometry, gpu.MIGInstance{ProfileID: s.ids[i], Placement: at})
		s.place(i + 1)
		s.geometry = s.geometry[:len(s.geometry)-1]
	}
}

// room weighs what can still be made.
func (s *arranger) room() int {
	sum := 0
	for i := range s.table.Profiles {
		p := &s.table.Profiles[i]
		sum += p.Slices * p.Slices * len(s.table.Free(s.geometry, p.ID))
	}
	return sum
}

func names(t *gpu.MIGTable, ids []int) string {
	text := ""
	for i, id := range ids {
		if i > 0 {
			text += ", "
		}
		text += t.ByID(id).Name
	}
	return text
}

func geometryText(t *gpu.MIGTable, geometry []gpu.MIGInstance) string {
	if len(geometry) == 0 {
		return "nothing"
	}
	ids := make([]int, 0, len(geometry))
	for _, in := range geometry {
		if t.ByID(in.ProfileID) == nil {
			return fmt.Sprintf("a MIG device of the unknown profile %d", in.ProfileID)
		}
		ids = append(ids, in.ProfileID)
	}
	return names(t, ids)
}
