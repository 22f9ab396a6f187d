// Package proptest has what property tests with rapid share. Only tests import it.
package proptest
