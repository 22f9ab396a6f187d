package mig

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"slices"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/machine"
)

// fuse counts the calls to hardware and disk, those that change something before
// and after they take effect. It fails those that it is told to, or all from one on,
// as where the process has died.
type fuse struct {
	calls int
	fail  []int
	die   int // negative for never
}

var (
	errDied    = errors.New("the process has died")
	errRefused = errors.New("refused")
)

func never() *fuse           { return &fuse{die: -1} }
func dies(at int) *fuse      { return &fuse{die: at} }
func fails(at ...int) *fuse  { return &fuse{die: -1, fail: at} }
func (f *fuse) died() bool   { return f.die >= 0 && f.calls > f.die }
func (f *fuse) happen() bool { return slices.Contains(f.fail, f.calls-1) }

func (f *fuse) burn() error {
	f.calls++
	switch {
	case f.died():
		return errDied
	case f.happen():
		return errRefused
	}
	return nil
}

// around makes a change of which the caller may not hear.
func (f *fuse) around(change func() error) error {
	if err := f.burn(); err != nil {
		return err
	}
	if err := change(); err != nil {
		return err
	}
	return f.burn()
}

// drivenBy is hardware behind a fuse. Nothing may be changed of a GPU whose change
// would be forgotten if the host lost its power now.
type drivenBy struct {
	*world
	*fuse
}

func (h drivenBy) write(uuid string, change func() error) error {
	if _, ok := h.disk.durable[uuid+recordSuffix]; !ok {
		h.t.Fatalf("GPU %s is changed without a journal", uuid)
	}
	return h.around(change)
}

func (h drivenBy) Read() (gpu.Machine, error) {
	if err := h.burn(); err != nil {
		return gpu.Machine{}, err
	}
	m, err := h.machine.Read()
	if h.hidden {
		m.GPUs = m.GPUs[1:]
	}
	return m, err
}

func (h drivenBy) SetMIGMode(uuid string, on bool) error {
	return h.write(uuid, func() error { return h.machine.SetMIGMode(uuid, on) })
}

func (h drivenBy) Reset(uuid string) error {
	return h.write(uuid, func() error { return h.machine.Reset(uuid) })
}

func (h drivenBy) DestroyMIG(uuid string) error {
	return h.write(h.gpu, func() error { return h.machine.DestroyMIG(uuid) })
}

func (h drivenBy) CreateMIG(uuid string, in gpu.MIGInstance) (gpu.MIGDevice, error) {
	var made gpu.MIGDevice
	err := h.write(uuid, func() (err error) {
		made, err = h.machine.CreateMIG(uuid, in)
		return err
	})
	return made, err
}

// memoryDisk is a folder of which a loss of power leaves what is durable.
type memoryDisk struct{ files, durable map[string]string }

// diskBehind is a disk behind a fuse.
type diskBehind struct {
	*memoryDisk
	*fuse
}

func (d diskBehind) write(name string, data []byte) error {
	if err := d.burn(); err != nil {
		return err
	}
	d.files[name] = string(data[:len(data)/2])
	if err := d.burn(); err != nil {
		return err
	}
	d.files[name] = string(data)
	return d.burn()
}

func (d diskBehind) rename(from, to string) error {
	return d.around(func() error {
		data, ok := d.files[from]
		if !ok {
			return fs.ErrNotExist
		}
		delete(d.files, from)
		d.files[to] = data
		return nil
	})
}

func (d diskBehind) remove(name string) error {
	return d.around(func() error {
		if _, ok := d.files[name]; !ok {
			return fs.ErrNotExist
		}
		delete(d.files, name)
		return nil
	})
}

func (d diskBehind) sync() error {
	return d.around(func() error { d.durable = maps.Clone(d.files); return nil })
}

func (d diskBehind) list() ([]string, error) { return slices.Sorted(maps.Keys(d.files)), d.burn() }

func (d diskBehind) read(name string) ([]byte, error) {
	if err := d.burn(); err != nil {
		return nil, err
	}
	data, ok := d.files[name]
	if !ok {
		return nil, fs.ErrNotExist
	}
	return []byte(data), nil
}

// world is a machine with a GPU that is to be changed, one that is not, and a disk.
type world struct {
	t       fataler
	story   *story
	machine *machine.Machine
	disk    *memoryDisk
	gpu     string
	change  *Change
	// bystander is the MIG device of the other GPU.
	bystander string
	// hidden says that the machine does not list the GPU.
	hidden bool
}

// story is how a world begins, and what is wanted of it. Worlds of one story are
// the same.
type story struct {
	desc    *machine.Description
	table   *gpu.MIGTable
	before  Geometry
	pending bool // a change of the mode waits for a reset
	target  Target
	busy    func(kept []string) string // the device in use, by those that are kept
}

func newStory(t fataler, product string, before Geometry, target Target) *story {
	key := gpu.ProductByKey(product)
	text := fmt.Sprintf("name: m\ncpus: 8\nmemory: 64Gi\ngpus:\n- {product: %q, count: 2}\n", key.Names[0])
	desc, err := machine.ParseDescription("m.yaml", []byte(text))
	if err != nil {
		t.Fatal(err)
	}
	return &story{desc: desc, table: key.MIG, before: before, target: target}
}

// begin makes the world and plans the change, which is nil where nothing is to be
// done.
func (s *story) begin(t fataler) *world {
	w := &world{t: t, story: s, machine: machine.New(s.desc, "seed"), disk: &memoryDisk{map[string]string{}, map[string]string{}}}
	m := w.read()
	w.gpu = m.GPUs[0].UUID
	w.cut(m.GPUs[1].UUID, Geometry{Enabled: true, Instances: []gpu.MIGInstance{{ProfileID: s.table.Profiles[0].ID, Placement: s.table.Profiles[0].Placements[0]}}})
	w.cut(w.gpu, s.before)
	if s.pending {
		w.must(w.machine.SetMIGMode(w.gpu, !s.before.Enabled))
	}
	m = w.read()
	w.bystander = m.GPUs[1].MIG.Devices[0].UUID
	change, err := PlanGPU(&m.GPUs[0], s.table, s.target, nil)
	w.must(err)
	w.change = change
	if change != nil && s.busy != nil {
		if uuid := s.busy(change.Kept); uuid != "" {
			for _, d := range m.GPUs[0].MIG.Devices {
				if d.UUID == uuid {
					w.must(w.machine.SetProcesses(w.gpu, []gpu.Process{{PID: 1, GI: d.GI, CI: d.CI}}))
				}
			}
		}
	}
	return w
}

func (w *world) must(err error) {
	if err != nil {
		w.t.Fatal(err)
	}
}

func (w *world) read() *gpu.Machine {
	m, err := w.machine.Read()
	w.must(err)
	return &m
}

func (w *world) cut(uuid string, g Geometry) {
	if !g.Enabled {
		return
	}
	w.must(w.machine.SetMIGMode(uuid, true))
	w.must(w.machine.Reset(uuid))
	for _, in := range g.Instances {
		_, err := w.machine.CreateMIG(uuid, in)
		w.must(err)
	}
}

// executor is that of a new process.
func (w *world) executor(f *fuse) *Executor {
	return newExecutor(drivenBy{w, f}, diskBehind{w.disk, f})
}

func (w *world) has(g Geometry) bool {
	return sameGeometry(GeometryOf(&w.read().GPUs[0].MIG), g)
}

func (w *world) recorded() bool { return w.disk.files[w.gpu+recordSuffix] != "" }

// reboot lets the host start again. MIG devices never outlive that, and the mode
// does on products that need a reset for it. With power lost names of files that
// were not synced are as they were.
func (w *world) reboot(powerLost bool) {
	m := w.read()
	for _, g := range m.GPUs {
		w.must(w.machine.SetProcesses(g.UUID, nil))
		w.must(w.machine.Reset(g.UUID))
		if !w.story.table.ResetForMode {
			w.must(w.machine.SetMIGMode(g.UUID, false))
		}
	}
	if powerLost {
		w.disk.files = maps.Clone(w.disk.durable)
	}
}

// settled fails unless the GPU is cut as before or as is wanted, devices that are in
// both are the same as ever, the other GPU is as it was, and no journal is left.
func (w *world) settled(when string) {
	m := w.read()
	g := &m.GPUs[0]
	if !w.has(w.change.Before) && !w.has(w.change.Wanted) {
		w.t.Fatalf("%s: between %s and %s: %s", when, w.change.Before, w.change.Wanted, GeometryOf(&g.MIG))
	}
	if w.recorded() {
		w.t.Fatalf("%s: the journal is left", when)
	}
	for _, uuid := range append(slices.Clone(w.change.Kept), w.bystander) {
		if m.Parent(uuid) == nil {
			w.t.Fatalf("%s: device %s is gone, and nobody wanted that", when, uuid)
		}
	}
}

// recover ends what is left, as a process does that lives.
func (w *world) recover(when string) []Outcome {
	outcomes, err := w.executor(never()).Recover()
	if err != nil {
		w.t.Fatalf("%s: recovery: %v", when, err)
	}
	return outcomes
}

// drawStory draws a product, a geometry and a target.
func drawStory(t *rapid.T) *story {
	product := rapid.SampledFrom([]string{"A100-40", "A30", "H100-80", "RTX-PRO-6000"}).Draw(t, "product")
	table := gpu.ProductByKey(product).MIG
	draw := func(label string) Geometry {
		g := Geometry{Enabled: rapid.IntRange(0, 3).Draw(t, label+" enabled") > 0}
		for range rapid.IntRange(0, 6).Draw(t, label+" devices") {
			p := rapid.SampledFrom(table.Profiles).Draw(t, label+" profile")
			if free := table.Free(g.Instances, p.ID); g.Enabled && len(free) > 0 {
				g.Instances = append(g.Instances, gpu.MIGInstance{ProfileID: p.ID, Placement: rapid.SampledFrom(free).Draw(t, label+" place")})
			}
		}
		return g
	}
	before, wanted := draw("before"), draw("wanted")
	target := Target{Enabled: wanted.Enabled, Instances: wanted.Instances}
	if rapid.Bool().Draw(t, "places are free") {
		for _, in := range target.Instances {
			target.Profiles = append(target.Profiles, in.ProfileID)
		}
		target.Instances = nil
	}
	s := newStory(t, product, before, target)
	s.pending = table.ResetForMode && len(before.Instances) == 0 && rapid.Bool().Draw(t, "pending")
	return s
}

// stories are changes of every kind.
func stories(t fataler) map[string]*story {
	in := func(id, start, size int) gpu.MIGInstance {
		return gpu.MIGInstance{ProfileID: id, Placement: gpu.Placement{Start: start, Size: size}}
	}
	off := Geometry{}
	on := func(list ...gpu.MIGInstance) Geometry { return Geometry{Enabled: true, Instances: list} }
	profiles := func(ids ...int) Target { return Target{Enabled: true, Profiles: ids} }
	pending := newStory(t, "A100-40", off, profiles(9))
	pending.pending = true
	back := newStory(t, "A100-40", on(), Target{Enabled: true, Instances: []gpu.MIGInstance{in(14, 0, 2)}})
	back.pending = true
	return map[string]*story{
		"mode with a reset":             newStory(t, "A100-40", off, profiles(9, 9)),
		"mode without":                  newStory(t, "H100-80", off, profiles(9, 14)),
		"mode that waits for a reset":   pending,
		"mode that was to be left":      back,
		"off with a reset":              newStory(t, "A30", on(in(14, 0, 1), in(5, 2, 2)), Target{}),
		"off without":                   newStory(t, "RTX-PRO-6000", on(in(14, 0, 3), in(5, 6, 6)), Target{}),
		"some stay":                     newStory(t, "A100-40", on(in(19, 0, 1), in(19, 1, 1), in(9, 4, 4)), profiles(9, 14, 15)),
		"one takes the place of many":   newStory(t, "H100-80", on(in(19, 0, 1), in(19, 2, 1), in(19, 4, 1)), profiles(0)),
		"many take the place of one":    newStory(t, "A30", on(in(0, 0, 4)), profiles(14, 14, 21, 14)),
		"one moves":                     newStory(t, "A100-40", on(in(19, 0, 1), in(9, 4, 4)), Target{Enabled: true, Instances: []gpu.MIGInstance{in(19, 1, 1), in(9, 4, 4)}}),
		"all go":                        newStory(t, "RTX-PRO-6000", on(in(47, 0, 3), in(67, 9, 3)), profiles()),
		"more beside what is in use":    busyOnKept(newStory(t, "A100-40", on(in(9, 4, 4)), profiles(9, 19, 19, 19))),
		"others go, what is used stays": busyOnKept(newStory(t, "H100-80", on(in(9, 4, 4), in(14, 0, 2), in(19, 2, 1)), profiles(9, 9))),
	}
}

func busyOnKept(s *story) *story {
	s.busy = func(kept []string) string { return kept[0] }
	return s
}

func TestAProcessThatDiesAnywhereIsRecoveredFrom(t *testing.T) {
	for name, s := range stories(t) {
		t.Run(name, func(t *testing.T) {
			for at := 0; ; at++ {
				w := s.begin(t)
				f := dies(at)
				err := w.executor(f).Apply(w.change)
				if !f.died() {
					if err != nil || !w.has(w.change.Wanted) {
						t.Fatalf("without a fault: %v", err)
					}
					w.settled("without a fault")
					return
				}
				// The process that recovers dies, too, at each of its calls in turn, and
				// so does the one after it.
				for second := 0; ; second++ {
					f := dies(second)
					_, err := w.executor(f).Recover()
					if !f.died() {
						if err != nil {
							t.Fatalf("death at call %d, then at all of recovery: %v", at, err)
						}
						break
					}
				}
				w.settled(fmt.Sprintf("death at call %d, and at each of recovery", at))
			}
		})
	}
}

func TestEveryDeathOfEveryRecoveryIsRecoveredFrom(t *testing.T) {
	for name, s := range stories(t) {
		t.Run(name, func(t *testing.T) {
			for at := 0; ; at++ {
				for second := 0; ; second++ {
					w := s.begin(t)
					f := dies(at)
					_ = w.executor(f).Apply(w.change)
					if !f.died() {
						return
					}
					again := dies(second)
					_, _ = w.executor(again).Recover()
					when := fmt.Sprintf("death at calls %d and %d", at, second)
					w.recover(when)
					w.settled(when)
					if !again.died() {
						break
					}
				}
			}
		})
	}
}

// TestAHostThatDiesAnywhereIsRecoveredFrom: where no journal has outlived the host
// the GPU must not have been between.
func TestAHostThatDiesAnywhereIsRecoveredFrom(t *testing.T) {
	for name, s := range stories(t) {
		t.Run(name, func(t *testing.T) {
			for _, powerLost := range []bool{false, true} {
				for at := 0; ; at++ {
					w := s.begin(t)
					f := dies(at)
					_ = w.executor(f).Apply(w.change)
					if !f.died() {
						break
					}
					when := fmt.Sprintf("death at call %d (power lost: %t)", at, powerLost)
					between := !w.has(w.change.Before) && !w.has(w.change.Wanted)
					w.reboot(powerLost)
					left := w.recorded()
					if between && !left {
						t.Fatalf("%s: nothing is known of the change", when)
					}
					w.recover(when)
					if w.recorded() || left && !w.has(w.change.Before) && !w.has(w.change.Wanted) {
						t.Fatalf("%s: %s", when, GeometryOf(&w.read().GPUs[0].MIG))
					}
				}
			}
		})
	}
}

func TestOneFaultAnywherePutsTheGPUBack(t *testing.T) {
	for name, s := range stories(t) {
		t.Run(name, func(t *testing.T) {
			for at := 0; ; at++ {
				w := s.begin(t)
				f := fails(at)
				err := w.executor(f).Apply(w.change)
				if f.calls <= at {
					if err != nil {
						t.Fatalf("without a fault: %v", err)
					}
					return
				}
				when := fmt.Sprintf("fault at call %d", at)
				if !errors.Is(err, errRefused) {
					t.Fatalf("%s: the error is %v", when, err)
				}
				if w.recorded() {
					// The journal itself was not to be removed.
					if pending, err := w.executor(never()).Pending(); err != nil || !slices.Equal(pending, []string{w.gpu}) {
						t.Fatalf("%s: pending is %v (%v)", when, pending, err)
					}
					w.recover(when)
				} else if !w.has(w.change.Before) && !w.has(w.change.Wanted) {
					t.Fatalf("%s: not as before: %s", when, GeometryOf(&w.read().GPUs[0].MIG))
				}
				w.settled(when)
			}
		})
	}
}

func TestTwoFaultsAnywhereLeaveAJournalOrOneOfTheGeometries(t *testing.T) {
	for name, s := range stories(t) {
		t.Run(name, func(t *testing.T) {
			for first := 0; ; first++ {
				for second := first + 1; ; second++ {
					w := s.begin(t)
					f := fails(first, second)
					err := w.executor(f).Apply(w.change)
					if f.calls <= first {
						return
					}
					when := fmt.Sprintf("faults at calls %d and %d", first, second)
					if !errors.Is(err, errRefused) {
						t.Fatalf("%s: the error is %v", when, err)
					}
					// The next attempts meet faults as well.
					for third := range 3 {
						_, _ = w.executor(fails(2+3*third, 3+3*third)).Recover()
					}
					w.recover(when)
					w.settled(when)
					if f.calls <= second {
						break
					}
				}
			}
		})
	}
}

func TestRandomChangesSurviveRandomDeathsAndFaults(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		s := drawStory(t)
		w := s.begin(t)
		if w.change == nil {
			return
		}
		f := never()
		if err := w.executor(f).Apply(w.change); err != nil || !w.has(w.change.Wanted) {
			t.Fatalf("without a fault: %v; %s, want %s", err, GeometryOf(&w.read().GPUs[0].MIG), w.change.Wanted)
		}
		w.settled("without a fault")
		if again, err := PlanGPU(&w.read().GPUs[0], s.table, s.target, nil); again != nil || err != nil {
			t.Fatalf("done, and there is more to do: %+v, %v", again, err)
		}
		calls := f.calls
		point := rapid.IntRange(0, 2*calls)
		for range 8 {
			w := s.begin(t)
			_ = w.executor(&fuse{die: point.Draw(t, "death"), fail: rapid.SliceOfN(point, 0, 3).Draw(t, "faults")}).Apply(w.change)
			for range rapid.IntRange(0, 3).Draw(t, "recoveries") {
				_, _ = w.executor(&fuse{die: point.Draw(t, "death"), fail: rapid.SliceOfN(point, 0, 3).Draw(t, "faults")}).Recover()
			}
			w.recover("at last")
			w.settled("at last")
		}
	})
}

func TestAChangeThatIsNotThatOfTheGPUIsRefused(t *testing.T) {
	for name, meanwhile := range map[string]func(w *world) error{
		"a device is new": func(w *world) error {
			_, err := w.machine.CreateMIG(w.gpu, gpu.MIGInstance{ProfileID: 19, Placement: gpu.Placement{Start: 2, Size: 1}})
			return err
		},
		"a device is gone": func(w *world) error { return w.machine.DestroyMIG(w.change.Destroyed[0]) },
		"a device was made again": func(w *world) error {
			err := w.machine.DestroyMIG(w.change.Destroyed[0])
			_, again := w.machine.CreateMIG(w.gpu, w.change.Before.Instances[0])
			return errors.Join(err, again)
		},
		"all is gone": func(w *world) error { return w.machine.Reset(w.gpu) },
	} {
		t.Run(name, func(t *testing.T) {
			in := gpu.MIGInstance{ProfileID: 19, Placement: gpu.Placement{Start: 0, Size: 1}}
			w := newStory(t, "A100-40", Geometry{Enabled: true, Instances: []gpu.MIGInstance{in}}, Target{Enabled: true, Profiles: []int{9, 9}}).begin(t)
			if err := meanwhile(w); err != nil {
				t.Fatal(err)
			}
			before := GeometryOf(&w.read().GPUs[0].MIG)
			if err := w.executor(never()).Apply(w.change); err == nil || !strings.Contains(err.Error(), "no more those for which the change was planned") {
				t.Errorf("error is %v", err)
			}
			if w.recorded() || !w.has(before) {
				t.Errorf("it was changed to %s", GeometryOf(&w.read().GPUs[0].MIG))
			}
		})
	}
}

// TestWhatCannotBeEndedWaits: a GPU of which nothing can be changed stays in the
// journal, with both errors told, while another one's change is ended.
func TestWhatCannotBeEndedWaits(t *testing.T) {
	w := stories(t)["some stay"].begin(t)
	// The third device is in use, and one was destroyed by then.
	busy := w.read().GPUs[0].MIG.Devices[1]
	w.must(w.machine.SetProcesses(w.gpu, []gpu.Process{{PID: 1, GI: busy.GI, CI: busy.CI}}))
	f := never()
	x := w.executor(f)
	err := x.Apply(w.change)
	if !errors.Is(err, gpu.ErrInUse) || !strings.HasSuffix(err.Error(), "; the GPU is cut as before") {
		t.Errorf("error is %v", err)
	}
	w.settled("a device in use")

	// Nothing can be made any more, on the way there and back.
	w = stories(t)["one moves"].begin(t)
	_ = w.executor(dies(14)).Apply(w.change)
	w.must(w.machine.SetLost(w.gpu, true))
	w.disk.files["GPU-other.json"] = `{"version":1,"gpu":"GPU-other","before":{"enabled":false},"wanted":{"enabled":true}}`
	w.disk.files["GPU-broken.json"] = `{"version":1,`
	w.disk.files["GPU-new.json"] = `{"version":2,"gpu":"GPU-new"}`
	w.disk.files["GPU-wrong.json"] = `{"version":1,"gpu":"GPU-right"}`
	x = w.executor(never())
	outcomes, err := x.Recover()
	if !errors.Is(err, gpu.ErrLost) {
		t.Errorf("error is %v", err)
	}
	for _, part := range []string{"GPU-broken.json: ", "GPU-new.json: is of version 2", `GPU-wrong.json: is about GPU "GPU-right"`} {
		if !strings.Contains(fmt.Sprint(err), part) {
			t.Errorf("error is %v, want %q in it", err, part)
		}
	}
	if len(outcomes) != 1 || !outcomes[0].Gone || outcomes[0].GPU != "GPU-other" {
		t.Errorf("outcomes are %v", outcomes)
	}
	w.must(w.machine.SetLost(w.gpu, false))
	outcomes, err = x.Recover()
	if len(outcomes) != 1 || !outcomes[0].Done || outcomes[0].GPU != w.gpu || err == nil {
		t.Errorf("outcomes are %v, error is %v", outcomes, err)
	}
	w.settled("the GPU is back")
}

func TestTheChangeOfAGPUThatIsGoneWaitsForIt(t *testing.T) {
	w := stories(t)["one moves"].begin(t)
	// Death after the first device was destroyed.
	for at := 0; w.has(w.change.Before); at++ {
		w = w.story.begin(t)
		_ = w.executor(dies(at)).Apply(w.change)
	}
	w.hidden = true
	x := w.executor(never())
	for i, want := range []int{1, 0} {
		outcomes, err := x.Recover()
		if err != nil || len(outcomes) != want || len(outcomes) == 1 && !outcomes[0].Gone {
			t.Errorf("recovery %d: %v, %v", i, outcomes, err)
		}
	}
	if !w.recorded() {
		t.Fatal("the change is forgotten")
	}
	w.hidden = false
	if outcomes := w.recover("it is back"); len(outcomes) != 1 || !outcomes[0].Done {
		t.Errorf("outcomes are %v", outcomes)
	}
	w.settled("it is back")
}

func TestAnOutcomeSaysWhyTheGPUIsAsBefore(t *testing.T) {
	w := stories(t)["one takes the place of many"].begin(t)
	for at := 0; w.has(w.change.Before); at++ {
		w = w.story.begin(t)
		_ = w.executor(dies(at)).Apply(w.change)
	}
	busy := w.read().GPUs[0].MIG.Devices[0]
	w.must(w.machine.SetProcesses(w.gpu, []gpu.Process{{PID: 1, GI: busy.GI, CI: busy.CI}}))
	outcomes := w.recover("a device in use")
	if len(outcomes) != 1 || outcomes[0].Done || !errors.Is(outcomes[0].Err, gpu.ErrInUse) || !strings.Contains(outcomes[0].String(), "is cut as before: destroy ") {
		t.Errorf("outcomes are %v", outcomes)
	}
	w.settled("a device in use")
}
