// Package nvml reads and changes the GPUs of this host through NVIDIA's
// management library. It is the only importer of go-nvml.
//
// The library is loaded when Open is called, so a program that links this package
// runs on hosts without a driver. It needs Linux and cgo; without them the package
// compiles, and Open says what is missing.
//
// What can fail: Open, where there is no driver. Read, only where the driver as a
// whole does not answer. A GPU that does not answer, or of which something
// essential cannot be read, is in the machine as gpu.Lost, with what was known of
// it from the reading before; one that never answered has the placeholder UUID
// "GPU-unknown-<index>" until it does. A link that cannot be read is unknown.
// What the driver does not say of the board, the PCI class, the recovery action or
// the attributes of MIG devices is unknown and no fault. After Close everything
// fails with os.ErrClosed.
//
// What must never happen: one GPU or link in trouble hides the others; a MIG
// device or process in use is destroyed; a MIG call that fails leaves a GPU
// instance behind without saying so.
//
// Errors of single GPUs name the GPU and wrap the errors of package gpu.
package nvml
