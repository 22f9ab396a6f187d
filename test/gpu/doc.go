// Package gpu tests the agent's hardware layer on a host with an NVIDIA GPU: what the
// driver says is read whole, a capture of it can be replayed, and the checks of
// containers agree with it. It only reads; no GPU is changed.
//
//	go test -count=1 -v ./test/gpu
//
// It needs Linux, cgo, a GPU and its driver, and no privileges, and takes seconds. It
// runs in a container as well, if that is given GPUs. Where NVML cannot be opened each
// test is skipped and says why; ASHLAR_TEST_GPU=1 makes that a failure, for hosts that
// must have a GPU.
package gpu
