package localcluster

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
)

func TestParseNodeSpec(t *testing.T) {
	got, err := ParseNodeSpec("g5.12xlarge=2,config=a/b.yaml,name=g5,label=team=vision,label=nvidia.com/x=,taint=nvidia.com/gpu=present:NoSchedule")
	if err != nil {
		t.Fatal(err)
	}
	want := NodeSpec{
		Machine: "g5.12xlarge", Count: 2, Config: "a/b.yaml", Name: "g5",
		Labels: map[string]string{"team": "vision", "nvidia.com/x": ""},
		Taints: []corev1.Taint{{Key: "nvidia.com/gpu", Value: "present", Effect: corev1.TaintEffectNoSchedule}},
	}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
}

func TestParseNodeSpecErrors(t *testing.T) {
	for text, want := range map[string]string{
		"":                           "no machine",
		"=2":                         "no machine",
		"p4d=":                       `count "" is not a number from 1 to 64`,
		"p4d=0":                      `count "0"`,
		"p4d=65":                     `count "65"`,
		"p4d,":                       "",
		"p4d,config=":                `option "config=" has no value`,
		"p4d,color=red":              `unknown option "color"`,
		"p4d,name=A":                 `name "A"`,
		"p4d,label=a b=c":            `label "a b=c"`,
		"p4d,taint=k=v":              "want KEY=VALUE:EFFECT",
		"p4d,taint=k=v:Never":        `effect "Never"`,
		"p4d,taint=:NoSchedule":      "want KEY=VALUE:EFFECT",
		"p4d,config=a,config=b,x=yy": `unknown option "x"`,
	} {
		_, err := ParseNodeSpec(text)
		if want == "" {
			if err != nil {
				t.Errorf("%q: %v", text, err)
			}
			continue
		}
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: got %v, want %q", text, err, want)
		}
	}
}

func FuzzParseNodeSpec(f *testing.F) {
	f.Add("g5.12xlarge=2,config=a,name=g5,label=a=b,taint=k=v:NoSchedule")
	f.Fuzz(func(t *testing.T, text string) {
		spec, err := ParseNodeSpec(text)
		if err == nil && (spec.Machine == "" || spec.Count < 1 || spec.Count > maxNodes) {
			t.Errorf("%q gives %+v", text, spec)
		}
	})
}

func TestNodeNames(t *testing.T) {
	got, err := nodeNames([]NodeSpec{
		{Machine: "p4d.24xlarge", Count: 1}, {Machine: "g5.12xlarge", Count: 2}, {Machine: "p4d.24xlarge", Count: 1},
		{Machine: "dir/My_Box.yaml", Count: 1}, {Machine: "t4", Name: "one", Count: 1}, {Machine: "t4", Name: "many", Count: 2},
	})
	if err != nil {
		t.Fatal(err)
	}
	want := [][]string{{"p4d-24xlarge-1"}, {"g5-12xlarge-1", "g5-12xlarge-2"}, {"p4d-24xlarge-2"}, {"my-box-1"}, {"one"}, {"many-1", "many-2"}}
	if diff := cmp.Diff(want, got); diff != "" {
		t.Errorf("(-want +got):\n%s", diff)
	}
	for name, specs := range map[string][]NodeSpec{
		"none":     nil,
		"twice":    {{Machine: "a", Name: "x", Count: 1}, {Machine: "b", Name: "x", Count: 1}},
		"too many": {{Machine: "a", Count: 64}, {Machine: "b", Count: 1}},
	} {
		if names, err := nodeNames(specs); err == nil {
			t.Errorf("%s: got %v, want an error", name, names)
		}
	}
}
