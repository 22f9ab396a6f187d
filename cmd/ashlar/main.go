// Command ashlar is the command line of Ashlar.
package main

import (
	"os"

	"github.com/ashlar-gpu/ashlar/internal/cli"
)

func main() { os.Exit(cli.Run(os.Args[1:], os.Stdout, os.Stderr)) }
