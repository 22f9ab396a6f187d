package main

import (
	"os"
	"strings"
	"testing"

	"github.com/rogpeppe/go-internal/testscript"
	"github.com/spf13/pflag"

	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

func TestMain(m *testing.M) {
	testscript.Main(m, map[string]func(){"ashlar-agent": main})
}

func TestScripts(t *testing.T) {
	testscript.Run(t, testscript.Params{Dir: "testdata", RequireExplicitExec: true, UpdateScripts: os.Getenv("UPDATE") != ""})
}

// TestOverrides: a flag beats the environment, which beats the file.
func TestOverrides(t *testing.T) {
	for _, c := range []struct {
		name string
		args []string
		env  map[string]string
		want func(*sharing.Flags) bool
	}{
		{"nothing", nil, nil, func(f *sharing.Flags) bool { return f.MIGStrategy == "single" && f.DriverRoot == "/file" }},
		{"environment", nil, map[string]string{"MIG_STRATEGY": "mixed", "NVIDIA_DRIVER_ROOT": "/env"}, func(f *sharing.Flags) bool {
			return f.MIGStrategy == "mixed" && f.DriverRoot == "/env"
		}},
		{"flag", []string{"--mig-strategy=none", "--driver-root=/flag"}, map[string]string{"MIG_STRATEGY": "mixed"}, func(f *sharing.Flags) bool {
			return f.MIGStrategy == "none" && f.DriverRoot == "/flag"
		}},
		{"list", []string{"--device-list-strategy=envvar,volume-mounts"}, nil, func(f *sharing.Flags) bool {
			l := f.Plugin.DeviceListStrategies
			return len(l) == 2 && l[0] == sharing.ListEnvvar && l[1] == sharing.ListVolumeMounts
		}},
		{"switches", []string{"--pass-device-specs", "--fail-on-init-error=false"}, nil, func(f *sharing.Flags) bool {
			return f.Plugin.PassDeviceSpecs && !f.FailOnInitError
		}},
		{"driver root", []string{"--nvidia-driver-root=/run/nvidia/driver"}, nil, func(f *sharing.Flags) bool {
			return f.DriverRoot == "/run/nvidia/driver" && f.DevRoot == "/run/nvidia/driver"
		}},
		{"second variable", nil, map[string]string{"NVIDIA_CTK_PATH": "/ctk"}, func(f *sharing.Flags) bool { return f.Plugin.NVIDIACTKPath == "/ctk" }},
	} {
		t.Run(c.name, func(t *testing.T) {
			for k, v := range c.env {
				t.Setenv(k, v)
			}
			flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
			addOverrides(flags)
			if err := flags.Parse(c.args); err != nil {
				t.Fatal(err)
			}
			set, err := chosenOverrides(flags)
			if err != nil {
				t.Fatal(err)
			}
			config, _, err := sharing.Parse("f", []byte("flags: {migStrategy: single, nvidiaDriverRoot: /file}"))
			if err != nil {
				t.Fatal(err)
			}
			set(config)
			if !c.want(&config.Flags) {
				t.Errorf("flags are %+v", config.Flags)
			}
		})
	}
	flags := pflag.NewFlagSet("test", pflag.ContinueOnError)
	addOverrides(flags)
	if err := flags.Parse([]string{"--gds-enabled=perhaps"}); err != nil {
		t.Fatal(err)
	}
	if _, err := chosenOverrides(flags); err == nil {
		t.Error("--gds-enabled=perhaps is taken")
	}
	if err := flags.Parse([]string{"--gds-enabled=true", "--mig-strategy=Single"}); err != nil {
		t.Fatal(err)
	}
	if _, err := chosenOverrides(flags); err == nil || !strings.Contains(err.Error(), "migStrategy") {
		t.Errorf("--mig-strategy=Single: got %v", err)
	}
}
