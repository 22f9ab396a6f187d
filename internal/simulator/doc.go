// Package simulator runs the placement engine over a workload and reports what
// came of it. It is pure: the same input gives the same report, byte for byte.
//
// Fill is for comparing placement alone: jobs come one by one and never leave, as
// in the evaluation of the FGD paper. Timed has time: jobs arrive, wait in a
// Queue, work for their duration, slow each other down by Interference, and leave;
// nodes may fail. Sharing says what a job gets that needs a part of a GPU, so that
// the same jobs can run on GPUs of their own, on slots, on MIG devices or on
// shares.
package simulator
