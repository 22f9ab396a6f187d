// Package machine simulates the GPUs of a node: it has the methods of package
// nvml, without a driver and without silicon.
//
// A machine is described in YAML. The description is strict: an unknown key, a
// product that the catalogue does not know or an illegal MIG placement is
// refused with file, line and field. All keys, with their defaults:
//
//	name: example            # for messages
//	instanceType: example    # node label; default: name
//	board: example           # name in the host's firmware; default: instanceType
//	cpus: 64                 # logical CPUs
//	memory: 512Gi            # as a Kubernetes quantity
//	numaNodes: 2             # default 1
//	driver: 580.95.05        # the default
//	cuda: "13.0"             # highest CUDA version of the driver; the default
//	gpus:                    # indices are given in this order, from 0
//	- product: A100-40       # catalogue key, or the name of a board as NVML reports it
//	  count: 2               # default 1
//	  numa: 0                # NUMA node, -1 for not known; default 0
//	  pcieRoot: pci0000:10   # root complex; default: one of its own for each GPU
//	  pcie: PIX              # level inside this group; default: see below
//	  nvswitch: fabric0      # NVSwitch domain; default none
//	  nvlinks: 12            # to the switches, from each GPU; default: all of the product
//	- product: NVIDIA A100-PCIE-40GB
//	  count: 2
//	  numa: 1
//	  migEnabled: true       # default: true where mig is not empty
//	  mig:                   # geometry of each GPU of the group, created in this order
//	  - {profile: 3g.20gb, start: 4}
//	  - {profile: 1g.5gb, count: 2}   # without a start: the lowest free places
//	links:                   # pairs of GPUs that differ from the rule
//	- {a: 2, b: 3, nvlinks: 12, pcie: PXB}
//
// Further keys of a group are for what was seen on a real machine; see Capture. Text
// is "" where it is not known.
//
//	gpus:
//	- name: NVIDIA Z1             # what NVML calls the GPU; default: as the product
//	  memoryMiB: 8192             # without a product these two and the name are needed
//	  compute: 12.0
//	  count: 2
//	  minor: [4, 3]               # /dev/nvidia<minor> of each; default: the index
//	  pciBusID: ["0000:17:00.0", "0000:3d:00.0"]
//	  pciDeviceID: 0x1234         # default: that of the product
//	  pciClass: 0x0300            # default 0x0302, a 3D controller
//	  pcieRoot: ["pci0000:16", "pci0000:3c"]
//	  nvswitch: ""                # with nvlinks: they lead to no GPU that is known
//	  nvlinks: 2
//	  unhealthy: row remap failed # or lost; the reason
//	  recovery: reset the GPU     # what the driver says must be done; default: none
//	  migCapable: true            # default: as the product
//	  migEnabled: true
//	  migPending: false           # the mode after a reset; default: migEnabled
//	  mig:
//	  - profile: 1c.2g.2gb        # with an id, an instance is as the driver reports it,
//	    id: 14                    # also where the catalogue would not allow it; what is
//	    start: 0                  # left out is the catalogue's
//	    size: 2
//	    gi: 5                     # default: the lowest free one from 1
//	    ci: 1                     # default 0; those of one gi share its place
//	    memoryMiB: 1984
//	    attributes: {sms: 8, slices: 2, computeSlices: 1, copyEngines: 2, decoders: 1, encoders: 0, jpeg: 0, ofa: 0}
//
// A lost GPU needs neither product nor name. On GPUs that the catalogue does not know
// MIG devices can be destroyed, and none be created.
//
// PCIe levels are those of `nvidia-smi topo -m`: SYS, NODE, PHB, PXB, PIX,
// INTERNAL; and unknown. Where nothing is said of a pair, GPUs on one root complex are at
// PHB, others on one NUMA node at NODE, GPUs on two NUMA nodes at SYS; where a
// NUMA node is not known, neither is the level. A group whose pcie is PHB or
// nearer and that names no pcieRoot shares one.
//
// New holds the state of the machine in memory. Open keeps it in a folder that
// Init has made, so that the hardware outlives the process that drives it and
// several processes see the same hardware: each change is made under a lock on
// the folder and replaces the state in one step. A process that is killed at any
// moment leaves the state from before or after its change, never one in between.
// (The host losing power is another matter: simulated hardware need not outlive
// its host.)
//
// What can fail: every method does after Close, with os.ErrClosed, and where the
// folder cannot be read or written. Methods of the driver fail while DriverDown
// is set; on a lost GPU all but Read fail with gpu.ErrLost. Methods that inject
// faults work always.
//
// What never happens: two MIG devices of a GPU overlap or take more slices than
// it has; a UUID is used for two things, also after a restart; a fault of one GPU
// or link shows in another; a failed call changes anything.
package machine
