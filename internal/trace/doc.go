// Package trace reads, writes and generates workloads: the nodes of a cluster
// and the jobs that come to it. A Source yields jobs one by one, so that the
// length of a trace costs no memory.
//
// There are three kinds of workload: the CSV files of the openb trace
// (ReadOpenbNodes, OpenbPods), files in the format of this package (NewReader,
// NewWriter), and generated ones (Scenarios).
//
// The package is pure: it reads and writes only what it is given, and the same
// input, or the same scenario and seed, gives the same jobs.
//
// # Format
//
// A trace is a text file of JSON objects, one a line: a header, then the nodes,
// then the jobs in the order of their arrival.
//
//	{"ashlar-trace":1,"nodes":1}
//	{"node":0,"cpu":96000,"mem":1179648,"pods":110,"gpus":8,"product":"A100-40","mig":true}
//	{"job":0,"at":0,"for":2400000,"cpu":2000,"mem":8192,"count":1,"milli":250,"gpu_mem":4096,"busy":230}
//	{"job":1,"at":61500,"cpu":64000,"mem":524288,"count":8,"milli":1000,"links":"nvlink","prio":10,"tenant":2}
//
// The header has the version of the format, which is 1, and the number of
// nodes. Numbers are whole; texts are printable ASCII of at most 100
// characters. A key that is left out stands for 0, "" or none; node, job and at
// are needed. A reader refuses keys that it does not know, keys that are there
// twice, and lines of 1 MiB or more.
//
//	node      number of the node: 0, 1, 2, ...
//	cpu, mem  what pods can have: thousandths of a core, MiB
//	pods      how many pods, 0 for no limit
//	gpus      number of GPUs
//	product   their model
//	gpu_mem   MiB of each; left out, that of the product in the catalogue of
//	          package gpu, or 0 (not known) for a product that is not there
//	slots     time-slicing slots of each
//	mig       true where they may be cut, by the MIG table of the catalogue
//
//	job       number of the job: 0, 1, 2, ...
//	at        arrival in milliseconds since the start of the trace
//	for       milliseconds of work; left out, the job never leaves
//	cpu, mem  MilliCPU and MemoryMiB of the request
//	count     Count of the request, the number of devices
//	milli, gpu_mem, slot, profile, products
//	          the fields of the request that are called so
//	links     Links of the request, "numa" or "nvlink"
//	busy      thousandths of each GPU that the job keeps busy when alone
//	prio      priority, higher goes first
//	tenant    number of a tenant
//	class     class of a generated job: lower-case letters, digits, hyphens
//
// A Writer writes keys in this order and leaves out what may be left out, so
// that a trace which was written, read and written again is the same to the
// byte.
//
// A trace can be shown to others: it has no place for names of pods, images,
// namespaces, tenants or nodes, nor for environment or labels. Nodes are read
// back as node-0000 and so on. The links and the health of a node's GPUs
// (NodeSpec.Machine) are not written either. Only class is free text; leave it
// out of what is recorded from a cluster.
package trace
