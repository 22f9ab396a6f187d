package simulator_test

import "testing"

// BenchmarkFill runs one experiment of the FGD paper for each policy: about
// 10,800 pods on 1,213 nodes with 6,212 GPUs.
func BenchmarkFill(b *testing.B) {
	for _, policy := range []string{"first-fit", "best-fit", "fgd", "ashlar"} {
		b.Run(policy, func(b *testing.B) {
			fill := experiment(b, "default", policy, 42)
			b.ReportAllocs()
			for b.Loop() {
				report, err := fill.Run(nil)
				if err != nil {
					b.Fatal(err)
				}
				b.ReportMetric(report.At(130).Allocated, "%allocated")
			}
		})
	}
}
