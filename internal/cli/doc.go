// Package cli is the command line of ashlar.
//
// Exit codes: 0 all is well, 1 the command found problems or failed, 2 the
// command line was wrong, 3 the cluster cannot be reached. Results go to
// standard output, progress and warnings to standard error.
package cli
