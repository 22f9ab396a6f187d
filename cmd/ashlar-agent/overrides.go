package main

import (
	"fmt"
	"os"
	"strconv"
	"strings"

	"github.com/spf13/pflag"

	"github.com/ashlar-gpu/ashlar/internal/gpu"
	"github.com/ashlar-gpu/ashlar/internal/sharing"
)

// override is a setting of the config file that a flag or an environment
// variable can set as well, under the names of NVIDIA's device plugin. A flag
// beats the environment, which beats the file.
type override struct {
	// flags are the names of the flag; envs those of the variable. The first
	// variable that is set counts.
	flags, envs []string
	help        string
	boolean     bool
	set         func(c *sharing.Config, value string) error
}

// overrides are the settings that take effect here.
var overrides = []override{
	text("mig-strategy", "MIG_STRATEGY", "how MIG devices are offered: none, single or mixed",
		func(c *sharing.Config, v string) { c.Flags.MIGStrategy = sharing.MIGStrategy(v) }),
	boolean("fail-on-init-error", "FAIL_ON_INIT_ERROR", "end where the driver does not answer at the start",
		func(c *sharing.Config, v bool) { c.Flags.FailOnInitError = v }),
	{
		flags: []string{"nvidia-driver-root", "driver-root"}, envs: []string{"NVIDIA_DRIVER_ROOT"},
		help: "root of the driver's files on the host",
		set: func(c *sharing.Config, v string) error {
			// A device root that was not set is that of the driver.
			if c.Flags.DevRoot == c.Flags.DriverRoot {
				c.Flags.DevRoot = v
			}
			c.Flags.DriverRoot = v
			return nil
		},
	},
	{
		flags: []string{"dev-root", "nvidia-dev-root"}, envs: []string{"NVIDIA_DEV_ROOT"},
		help: "root of the device nodes on the host",
		set:  func(c *sharing.Config, v string) error { c.Flags.DevRoot = v; return nil },
	},
	boolean("pass-device-specs", "PASS_DEVICE_SPECS", "name device nodes to the kubelet as well",
		func(c *sharing.Config, v bool) { c.Flags.Plugin.PassDeviceSpecs = v }),
	{
		flags: []string{"device-list-strategy"}, envs: []string{"DEVICE_LIST_STRATEGY"},
		help: "how containers are told their devices, comma-separated: envvar, volume-mounts, cdi-annotations, cdi-cri",
		set: func(c *sharing.Config, v string) error {
			c.Flags.Plugin.DeviceListStrategies = nil
			for s := range strings.SplitSeq(v, ",") {
				c.Flags.Plugin.DeviceListStrategies = append(c.Flags.Plugin.DeviceListStrategies, sharing.DeviceListStrategy(s))
			}
			return nil
		},
	},
	text("device-id-strategy", "DEVICE_ID_STRATEGY", "what devices are called in containers: uuid or index",
		func(c *sharing.Config, v string) { c.Flags.Plugin.DeviceIDStrategy = sharing.DeviceIDStrategy(v) }),
	boolean("gdrcopy-enabled", "GDRCOPY_ENABLED", "give containers the device nodes of GDRCopy",
		func(c *sharing.Config, v bool) { c.Flags.GDRCopyEnabled = v }),
	boolean("gds-enabled", "GDS_ENABLED", "give containers the device nodes of GPUDirect Storage",
		func(c *sharing.Config, v bool) { c.Flags.GDSEnabled = v }),
	boolean("mofed-enabled", "MOFED_ENABLED", "give containers the device nodes of Mellanox OFED",
		func(c *sharing.Config, v bool) { c.Flags.MOFEDEnabled = v }),
	text("cdi-annotation-prefix", "CDI_ANNOTATION_PREFIX", "prefix of CDI annotations",
		func(c *sharing.Config, v string) { c.Flags.Plugin.CDIAnnotationPrefix = v }),
	{
		flags: []string{"nvidia-cdi-hook-path", "nvidia-ctk-path"}, envs: []string{"NVIDIA_CDI_HOOK_PATH", "NVIDIA_CTK_PATH"},
		help: "path of the CDI hook program on the host",
		set:  func(c *sharing.Config, v string) error { c.Flags.Plugin.NVIDIACTKPath = v; return nil },
	},
	text("shared-devices-allocation-policy", "SHARED_DEVICES_ALLOCATION_POLICY", "which slots are taken first: distributed or packed",
		func(c *sharing.Config, v string) { c.Flags.Plugin.AllocationPolicy = sharing.AllocationPolicy(v) }),
}

func text(flag, env, help string, set func(*sharing.Config, string)) override {
	return override{flags: []string{flag}, envs: []string{env}, help: help, set: func(c *sharing.Config, v string) error {
		set(c, v)
		return nil
	}}
}

func boolean(flag, env, help string, set func(*sharing.Config, bool)) override {
	return override{flags: []string{flag}, envs: []string{env}, help: help, boolean: true, set: func(c *sharing.Config, v string) error {
		b, err := strconv.ParseBool(v)
		if err != nil {
			return fmt.Errorf("%q is neither true nor false", v)
		}
		set(c, b)
		return nil
	}}
}

// addOverrides adds the flags.
func addOverrides(flags *pflag.FlagSet) {
	for _, o := range overrides {
		for i, name := range o.flags {
			help := o.help + " (also $" + strings.Join(o.envs, ", $") + ")"
			if i > 0 {
				help = "the same as --" + o.flags[0]
			}
			flags.String(name, "", help)
			if o.boolean {
				flags.Lookup(name).NoOptDefVal = "true"
			}
		}
	}
}

// chosenOverrides returns a function that sets in a config what flags and
// environment say. They are checked here by themselves, and again with each
// config.
func chosenOverrides(flags *pflag.FlagSet) (func(*sharing.Config), error) {
	var chosen []func(*sharing.Config)
	for _, o := range overrides {
		value, source := "", ""
		for _, env := range o.envs {
			if v := os.Getenv(env); v != "" && source == "" {
				value, source = v, "$"+env
			}
		}
		for _, name := range o.flags {
			if flags.Changed(name) {
				value, source = flags.Lookup(name).Value.String(), "--"+name
			}
		}
		if source == "" {
			continue
		}
		if err := o.set(sharing.Default(), value); err != nil {
			return nil, usageError{fmt.Errorf("%s: %w", source, err)}
		}
		chosen = append(chosen, func(c *sharing.Config) { _ = o.set(c, value) })
	}
	override := func(c *sharing.Config) {
		for _, set := range chosen {
			set(c)
		}
	}
	c := sharing.Default()
	override(c)
	if _, _, err := c.Plan(&gpu.Machine{}); err != nil {
		return nil, usageError{fmt.Errorf("flags and environment: %w", err)}
	}
	return override, nil
}
