// Package e2e holds the tests on real kubelets: each brings up a cluster with
// package localcluster and asserts what a user of it sees. They need Linux,
// root and the programs that `make tools` builds, and are skipped elsewhere.
package e2e
