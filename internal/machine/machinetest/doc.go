// Package machinetest makes simulated machines for the tests of other packages. Only
// tests import it. Equal arguments give machines of equal UUIDs.
package machinetest
