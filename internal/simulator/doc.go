// Package simulator runs the placement engine over a workload and reports what
// came of it. It is pure: the same input gives the same report, byte for byte.
package simulator
