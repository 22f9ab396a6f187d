// Package fakecri is a container runtime without containers, for real kubelets
// on simulated machines.
//
// It speaks the CRI on a unix socket, on top of Kubernetes' own fake, and adds
// what that one lacks: it records what the kubelet asked a container to be
// given (environment, CDI devices, mounts, device nodes, annotations), writes
// that into the container's log so that `kubectl logs` shows it, and lets
// containers end.
//
// Three pod annotations steer it and are ignored by every real runtime:
//
//	ashlar.dev/sim-duration: "30s"            each container ends after 30 s
//	ashlar.dev/sim-duration: "init=1s,main=5m"  named containers end
//	ashlar.dev/sim-exit-code: "1"             with this code (default 0)
//	ashlar.dev/sim-stop-delay: "3s"           StopContainer takes so long
//
// A container without a duration runs until it is stopped. One that is stopped
// exits with 143, as a program that dies of SIGTERM does.
//
// The runtime lives in the process that calls Start, not in the kubelet, so
// containers survive the death of a kubelet as they do on a real node.
package fakecri
