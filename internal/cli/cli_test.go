package cli

import (
	"os"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){
		"ashlar": func() { os.Exit(Run(os.Args[1:], os.Stdout, os.Stderr)) },
	})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{
		Dir: "testdata", RequireExplicitExec: true, UpdateScripts: os.Getenv("UPDATE") != "",
		Setup: func(env *testscript.Env) error {
			env.Setenv("ASHLAR_STATE_DIR", env.WorkDir+"/state")
			return nil
		},
	})
}

func TestProfiles(t *testing.T) {
	for want, list := range map[string][]string{
		"":                        nil,
		"1g.5gb":                  {"1g.5gb"},
		"1g.5gb x2, 3g.20gb":      {"1g.5gb", "1g.5gb", "3g.20gb"},
		"3g.20gb, 1g.5gb x3":      {"3g.20gb", "1g.5gb", "1g.5gb", "1g.5gb"},
		"1g.5gb, 2g.10gb, 1g.5gb": {"1g.5gb", "2g.10gb", "1g.5gb"},
	} {
		if got := profiles(list); got != want {
			t.Errorf("profiles(%v) = %q, want %q", list, got, want)
		}
	}
}

func TestFew(t *testing.T) {
	for want, names := range map[string][]string{
		"":                nil,
		"a, b, c":         {"a", "b", "c"},
		"a, b and 2 more": {"a", "b", "c", "d"},
	} {
		if got := few(names); got != want {
			t.Errorf("few(%v) = %q, want %q", names, got, want)
		}
	}
}
