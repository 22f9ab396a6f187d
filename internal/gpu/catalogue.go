package gpu

import "slices"

// Product is a model of GPU as data.
type Product struct {
	// Key is the short name of the catalogue, such as "A100-40".
	Key string
	// Names are the names that NVML reports for its boards, the commonest first.
	Names []string
	// MemoryMiB is the framebuffer as nvidia-smi reports it.
	MemoryMiB int
	Compute   ComputeCapability
	// PCIDeviceIDs are the known device ids, empty where none is recorded here.
	PCIDeviceIDs []uint16
	// NVLinks is the number of NVLinks of the commonest board, 0 for none.
	NVLinks int
	// MIG is nil for products that cannot be cut.
	MIG *MIGTable
	// Engines are the engines of the MIG profiles by their ID, nil where they are
	// not known.
	Engines map[int]Engines
}

// Engines are numbers of engines. No product in the catalogue gives its MIG
// devices an encoder.
type Engines struct{ Copy, Decoders, JPEG, OFA int }

// Attributes are the parts of a MIG device of the product that fills a GPU
// instance of the profile.
func (p *Product) Attributes(profile *MIGProfile) MIGAttributes {
	e := p.Engines[profile.ID]
	return MIGAttributes{
		SMs: profile.SMs, Slices: profile.Slices, ComputeSlices: profile.Slices,
		CopyEngines: e.Copy, Decoders: e.Decoders, JPEG: e.JPEG, OFA: e.OFA,
	}
}

// Family is the architecture name that GPU feature discovery puts in the label
// nvidia.com/gpu.family.
func (c ComputeCapability) Family() string {
	switch {
	case c.Major == 1:
		return "tesla"
	case c.Major == 2:
		return "fermi"
	case c.Major == 3:
		return "kepler"
	case c.Major == 5:
		return "maxwell"
	case c.Major == 6:
		return "pascal"
	case c.Major == 7 && c.Minor < 5:
		return "volta"
	case c.Major == 7:
		return "turing"
	case c.Major == 8 && c.Minor < 9:
		return "ampere"
	case c.Major == 8:
		return "ada-lovelace"
	case c.Major == 9:
		return "hopper"
	case c.Major == 10 || c.Major == 12:
		return "blackwell"
	case c.Major == 13:
		return "rubin"
	}
	return "undefined"
}

// Sources of the tables: MIG ids, constants, placements and memory of A100 and
// A30 are those of NVIDIA's MIG user guide and of go-nvml's recorded devices;
// H100-80 and H200 of published nvidia-smi listings and of NVIDIA's
// partitioning tools; those marked Unverified were inferred from the common
// 8-unit layout and the sizes that users reported. Framebuffer sizes are what
// nvidia-smi prints. Engines are those of the chapter "Supported MIG profiles" of
// NVIDIA's MIG user guide.

// NVML_GPU_INSTANCE_PROFILE_* constants.
const (
	profile1Slice    = 0
	profile2Slice    = 1
	profile3Slice    = 2
	profile4Slice    = 3
	profile7Slice    = 4
	profile1SliceMe  = 7
	profile2SliceMe  = 8
	profile1SliceMem = 9
	profile1Gfx      = 10
	profile2Gfx      = 11
	profile4Gfx      = 12
	profile1NoMe     = 13
	profile2NoMe     = 14
	profile1AllMe    = 15
	profile2AllMe    = 16
)

// at lists placements of one size at the given starts.
func at(size int, starts ...int) []Placement {
	ps := make([]Placement, len(starts))
	for i, s := range starts {
		ps[i] = Placement{Start: s, Size: size}
	}
	return ps
}

// size8 is what differs between the 8-unit products: display name, memory and
// multiprocessors of each shape.
type size8 struct {
	name      string
	memoryMiB int
	sms       int
}

// mig8 is the layout that A100, H100, H200 and B200 share. The order of sizes
// is 1g, 1g with double memory, 2g, 3g, 4g, 7g.
func mig8(reset, unverified bool, sizes [6]size8) *MIGTable {
	row := func(id, constant, n, most, i int, places []Placement) MIGProfile {
		return MIGProfile{
			ID: id, Constant: constant, Name: sizes[i].name, Slices: n, Max: most,
			MemoryMiB: sizes[i].memoryMiB, SMs: sizes[i].sms, Placements: places, Unverified: unverified,
		}
	}
	me := row(20, profile1SliceMe, 1, 1, 0, at(1, 0, 1, 2, 3, 4, 5, 6))
	me.Name += "+me"
	return &MIGTable{Units: 8, Slices: 7, ResetForMode: reset, Profiles: []MIGProfile{
		row(0, profile7Slice, 7, 1, 5, at(8, 0)),
		row(5, profile4Slice, 4, 1, 4, at(4, 0)),
		row(9, profile3Slice, 3, 2, 3, at(4, 0, 4)),
		row(14, profile2Slice, 2, 3, 2, at(2, 0, 2, 4)),
		row(15, profile1SliceMem, 1, 4, 1, at(2, 0, 2, 4, 6)),
		row(19, profile1Slice, 1, 7, 0, at(1, 0, 1, 2, 3, 4, 5, 6)),
		me,
	}}
}

// The engines of A100, A30 and H100-80.
var (
	enginesA100 = map[int]Engines{0: {7, 5, 1, 1}, 5: {4, 2, 0, 0}, 9: {3, 2, 0, 0}, 14: {2, 1, 0, 0}, 15: {1, 1, 0, 0}, 19: {1, 0, 0, 0}, 20: {1, 1, 1, 1}}
	enginesA30  = map[int]Engines{0: {4, 4, 1, 1}, 5: {2, 2, 0, 0}, 6: {2, 2, 1, 1}, 14: {1, 0, 0, 0}, 21: {1, 1, 1, 1}}
	enginesH100 = map[int]Engines{0: {8, 7, 7, 1}, 5: {4, 4, 4, 0}, 9: {3, 3, 3, 0}, 14: {2, 2, 2, 0}, 15: {1, 1, 1, 0}, 19: {1, 1, 1, 0}, 20: {1, 1, 1, 1}}
)

var migA30 = &MIGTable{Units: 4, Slices: 4, ResetForMode: true, Profiles: []MIGProfile{
	{ID: 0, Constant: profile4Slice, Name: "4g.24gb", Slices: 4, Max: 1, MemoryMiB: 24064, SMs: 56, Placements: at(4, 0)},
	{ID: 5, Constant: profile2Slice, Name: "2g.12gb", Slices: 2, Max: 2, MemoryMiB: 11968, SMs: 28, Placements: at(2, 0, 2)},
	{ID: 6, Constant: profile2SliceMe, Name: "2g.12gb+me", Slices: 2, Max: 1, MemoryMiB: 11968, SMs: 28, Placements: at(2, 0, 2), Unverified: true},
	{ID: 14, Constant: profile1Slice, Name: "1g.6gb", Slices: 1, Max: 4, MemoryMiB: 5952, SMs: 14, Placements: at(1, 0, 1, 2, 3)},
	{ID: 21, Constant: profile1SliceMe, Name: "1g.6gb+me", Slices: 1, Max: 1, MemoryMiB: 5952, SMs: 14, Placements: at(1, 0, 1, 2, 3)},
}}

// The RTX PRO 6000 has 12 memory units and 4 compute slices; graphics (+gfx)
// and media-engine (+me, -me, +me.all) variants share the shapes.
var migRTXPro6000 = func() *MIGTable {
	const mem1, mem2, mem4 = 23936, 48128, 96256 // MiB; drivers report 1-2 % around these
	row := func(id, constant int, name string, n, most, mem, sms int, places []Placement) MIGProfile {
		return MIGProfile{ID: id, Constant: constant, Name: name, Slices: n, Max: most, MemoryMiB: mem, SMs: sms, Placements: places, Unverified: true}
	}
	one, two, four := at(3, 0, 3, 6, 9), at(6, 0, 6), at(12, 0)
	return &MIGTable{Units: 12, Slices: 4, Profiles: []MIGProfile{
		row(0, profile4Slice, "4g.96gb", 4, 1, mem4, 188, four),
		row(5, profile2Slice, "2g.48gb", 2, 2, mem2, 94, two),
		row(14, profile1Slice, "1g.24gb", 1, 4, mem1, 46, one),
		row(21, profile1SliceMe, "1g.24gb+me", 1, 1, mem1, 46, one),
		row(32, profile4Gfx, "4g.96gb+gfx", 4, 1, mem4, 188, four),
		row(35, profile2Gfx, "2g.48gb+gfx", 2, 2, mem2, 94, two),
		row(47, profile1Gfx, "1g.24gb+gfx", 1, 4, mem1, 46, one),
		row(64, profile2AllMe, "2g.48gb+me.all", 2, 1, mem2, 94, two),
		row(65, profile1AllMe, "1g.24gb+me.all", 1, 1, mem1, 46, one),
		row(66, profile2NoMe, "2g.48gb-me", 2, 2, mem2, 94, two),
		row(67, profile1NoMe, "1g.24gb-me", 1, 4, mem1, 46, one),
	}}
}()

var products = []Product{
	{
		Key: "V100", Names: []string{"Tesla V100-SXM2-16GB", "Tesla V100-SXM2-32GB", "Tesla V100-PCIE-16GB"},
		MemoryMiB: 16384, Compute: ComputeCapability{7, 0}, NVLinks: 6,
	},
	{Key: "T4", Names: []string{"Tesla T4"}, MemoryMiB: 15360, Compute: ComputeCapability{7, 5}, PCIDeviceIDs: []uint16{0x1eb8}},
	{Key: "A10G", Names: []string{"NVIDIA A10G"}, MemoryMiB: 23028, Compute: ComputeCapability{8, 6}, PCIDeviceIDs: []uint16{0x2237}},
	{
		Key: "A100-40", Names: []string{"NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"},
		MemoryMiB: 40960, Compute: ComputeCapability{8, 0}, PCIDeviceIDs: []uint16{0x20b0, 0x20b1, 0x20f1, 0x20f6}, NVLinks: 12,
		MIG: mig8(true, false, [6]size8{
			{"1g.5gb", 4864, 14}, {"1g.10gb", 9856, 14}, {"2g.10gb", 9856, 28},
			{"3g.20gb", 19968, 42}, {"4g.20gb", 19968, 56}, {"7g.40gb", 40192, 98},
		}),
		Engines: enginesA100,
	},
	{
		Key: "A100-80", Names: []string{"NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"},
		MemoryMiB: 81920, Compute: ComputeCapability{8, 0}, PCIDeviceIDs: []uint16{0x20b2, 0x20b5, 0x20f3, 0x20f5}, NVLinks: 12,
		MIG: mig8(true, false, [6]size8{
			{"1g.10gb", 9856, 14}, {"1g.20gb", 19968, 14}, {"2g.20gb", 19968, 28},
			{"3g.40gb", 40192, 42}, {"4g.40gb", 40192, 56}, {"7g.80gb", 80384, 98},
		}),
		Engines: enginesA100,
	},
	{
		Key: "A30", Names: []string{"NVIDIA A30"}, MemoryMiB: 24576, Compute: ComputeCapability{8, 0},
		PCIDeviceIDs: []uint16{0x20b7}, NVLinks: 4, MIG: migA30, Engines: enginesA30,
	},
	{Key: "L40S", Names: []string{"NVIDIA L40S"}, MemoryMiB: 46068, Compute: ComputeCapability{8, 9}, PCIDeviceIDs: []uint16{0x26b9}},
	{
		Key: "H100-80", Names: []string{"NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe"},
		MemoryMiB: 81559, Compute: ComputeCapability{9, 0}, PCIDeviceIDs: []uint16{0x2330, 0x2331, 0x2322, 0x2324}, NVLinks: 18,
		MIG: mig8(false, false, [6]size8{
			{"1g.10gb", 9984, 16}, {"1g.20gb", 20096, 26}, {"2g.20gb", 20096, 32},
			{"3g.40gb", 40448, 60}, {"4g.40gb", 40448, 64}, {"7g.80gb", 80896, 132},
		}),
		Engines: enginesH100,
	},
	{
		Key: "H100-94", Names: []string{"NVIDIA H100 NVL"},
		MemoryMiB: 95830, Compute: ComputeCapability{9, 0}, PCIDeviceIDs: []uint16{0x2321, 0x233a}, NVLinks: 12,
		MIG: mig8(false, true, [6]size8{
			{"1g.12gb", 11008, 16}, {"1g.24gb", 22139, 26}, {"2g.24gb", 22139, 32},
			{"3g.47gb", 47616, 60}, {"4g.47gb", 47616, 64}, {"7g.94gb", 95232, 132},
		}),
	},
	{
		Key: "H200", Names: []string{"NVIDIA H200"},
		MemoryMiB: 143771, Compute: ComputeCapability{9, 0}, PCIDeviceIDs: []uint16{0x2335, 0x233b}, NVLinks: 18,
		MIG: mig8(false, false, [6]size8{
			{"1g.18gb", 16384, 16}, {"1g.35gb", 33024, 26}, {"2g.35gb", 33024, 32},
			{"3g.71gb", 71168, 60}, {"4g.71gb", 71168, 64}, {"7g.141gb", 143104, 132},
		}),
	},
	{
		Key: "B200", Names: []string{"NVIDIA B200"},
		MemoryMiB: 183359, Compute: ComputeCapability{10, 0}, PCIDeviceIDs: []uint16{0x2901}, NVLinks: 18,
		MIG: mig8(false, true, [6]size8{
			{"1g.23gb", 22016, 18}, {"1g.45gb", 45312, 30}, {"2g.45gb", 45312, 36},
			{"3g.90gb", 91136, 70}, {"4g.90gb", 91136, 72}, {"7g.180gb", 182784, 148},
		}),
	},
	{
		Key: "RTX-PRO-6000", Names: []string{"NVIDIA RTX PRO 6000 Blackwell Server Edition"},
		MemoryMiB: 97887, Compute: ComputeCapability{12, 0}, PCIDeviceIDs: []uint16{0x2bb5}, MIG: migRTXPro6000,
	},
}

// Products lists the catalogue. The tables inside are shared: do not change
// them.
func Products() []Product { return slices.Clone(products) }

// ProductByKey returns the product with the given Key, or nil.
func ProductByKey(key string) *Product {
	for i := range products {
		if products[i].Key == key {
			return &products[i]
		}
	}
	return nil
}

// ProductByName returns the product of the board that NVML names so, or nil
// where the catalogue does not know it.
func ProductByName(name string) *Product {
	for i := range products {
		if slices.Contains(products[i].Names, name) {
			return &products[i]
		}
	}
	return nil
}
