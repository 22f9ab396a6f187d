// Package localcluster runs a whole Kubernetes cluster with GPU nodes on one
// Linux host: etcd, kube-apiserver, kube-controller-manager, kube-scheduler,
// and for each node a real kubelet, a container runtime without containers
// (package fakecri) and a real ashlar-agent on a simulated machine.
//
// # Contract
//
// Up returns when every node is Ready and every agent has registered, or with
// an error that names the part that failed and the end of its log. One state
// folder holds one cluster; a second Up of the same folder is refused while the
// first lives. Whatever dies is started again, with growing pauses. Down, and
// the end of Up's context, leave no process, mount or socket behind.
//
// # What can fail
//
//   - A part is killed: the supervisor restarts it on the same ports.
//   - The supervisor is killed: the kernel kills its children (parent-death
//     signal); their mounts lived in their own mount namespaces and go with
//     them. The next Up or Down removes the files.
//   - A child outlives even that: Sweep finds it by the mark in its environment.
//
// # What must never happen
//
//   - A mount, file or process outside the state folder is touched, or a file in
//     it that is not the cluster's.
//   - A process is signalled that this package did not start.
//
// Everything listens on 127.0.0.1 or on unix sockets in the state folder, and
// asks for certificates of the cluster's own authority.
package localcluster
