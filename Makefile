# Everything that a developer or a newcomer runs. `make help` lists it.
SHELL := /bin/bash
BIN := bin
GO ?= go
LINT := $(GO) tool -modfile=tools/lint/go.mod golangci-lint
CODEGEN := $(GO) tool -modfile=tools/codegen/go.mod controller-gen
# Real kubelets need root; sudo is used where make is not run as root. What it
# runs finds the caller's cache and builds nothing, so that no file there becomes
# root's.
CACHE := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)
SUDO := $(shell [ "$$(id -u)" = 0 ] || echo sudo) env "XDG_CACHE_HOME=$(CACHE)"
FUZZTIME ?= 30s
# go-nvml's header marks old calls, and a build would print hundreds of lines.
export CGO_CFLAGS ?= -O2 -g -Wno-deprecated-declarations

.PHONY: help
help: ## Show this list
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

.PHONY: build
build: ## Build ashlar, ashlar-agent and ashlar-controller into bin/
	@mkdir -p $(BIN)
	CGO_ENABLED=0 $(GO) build -trimpath -o $(BIN)/ashlar ./cmd/ashlar
	CGO_ENABLED=0 $(GO) build -trimpath -o $(BIN)/ashlar-controller ./cmd/ashlar-controller
	CGO_ENABLED=1 $(GO) build -trimpath -o $(BIN)/ashlar-agent ./cmd/ashlar-agent

.PHONY: tools
tools: build ## Build etcd, kube-apiserver, kubelet, ... once into the user's cache
	@$(BIN)/ashlar tools

.PHONY: demo
demo: tools ## Run a cluster of three GPU machines and the examples; KEEP=1 keeps it
	@$(SUDO) $(BIN)/ashlar demo --examples examples $(if $(KEEP),--keep)

.PHONY: test
test: vet lint unit e2e ## Everything that must pass: vet, lint, unit tests, e2e on real kubelets

.PHONY: generate
generate: ## Generate the deep copies and manifests of the API from its types
	$(CODEGEN) object crd paths=./api/... output:crd:dir=api/v1alpha1/crds

.PHONY: vet
vet: ## Run go vet
	$(GO) vet ./...
	cd tools/kubernetes && CGO_ENABLED=0 $(GO) vet -trimpath ./sim-kubelet

.PHONY: lint
lint: ## Run golangci-lint (built from source the first time)
	$(LINT) run ./...

.PHONY: unit
unit: ## Run the tests that need neither root nor a cluster
	$(GO) test -race -shuffle=on -timeout 15m $$($(GO) list ./... | grep -v /test/e2e)

.PHONY: e2e
e2e: tools ## Run the tests on real kubelets (Linux, root)
	$(GO) test -c -o $(BIN)/e2e.test ./test/e2e
	cd test/e2e && $(SUDO) "ASHLAR_BIN=$(CURDIR)/$(BIN)" ../../$(BIN)/e2e.test -test.shuffle=on -test.timeout=20m -test.v

SOAK ?= 30m
.PHONY: soak
soak: tools ## Start pods without end while parts are killed, for SOAK (30m)
	$(GO) test -c -o $(BIN)/e2e.test ./test/e2e
	cd test/e2e && $(SUDO) "ASHLAR_BIN=$(CURDIR)/$(BIN)" "ASHLAR_SOAK=$(SOAK)" ../../$(BIN)/e2e.test -test.run Soak -test.timeout=0 -test.v

.PHONY: bench
bench: ## Run the benchmarks, and the whole openb evaluation where the trace is there
	$(GO) test -run '^$$' -bench . -benchmem ./internal/placement ./internal/simulator ./internal/deviceplugin ./internal/sharing
	ASHLAR_OPENB=full $(GO) test -run 'Published|Beats' -count=1 -timeout 60m -v ./internal/simulator

.PHONY: fuzz
fuzz: ## Run each fuzz target for FUZZTIME (30s)
	@set -e; for pkg in $$(grep -rlE '^func Fuzz' --include=*_test.go internal | xargs -n1 dirname | sort -u); do \
	  for target in $$(grep -hoE '^func Fuzz[A-Za-z0-9_]*' $$pkg/*_test.go | cut -d' ' -f2); do \
	    echo "$$pkg $$target"; $(GO) test -run '^$$' -fuzz "^$$target$$" -fuzztime $(FUZZTIME) ./$$pkg; done; done

.PHONY: verify
verify: ## Check that go.mod files are tidy and the code is formatted
	$(GO) mod tidy -diff
	cd tools/kubernetes && $(GO) mod tidy -diff
	cd tools/codegen && $(GO) mod tidy -diff
	@out=$$(mktemp -d) && $(CODEGEN) object crd paths=./api/... output:object:dir=$$out output:crd:dir=$$out/crds && \
	  diff -r $$out/crds api/v1alpha1/crds && diff $$out/zz_generated.deepcopy.go api/v1alpha1/zz_generated.deepcopy.go || \
	  { echo "the API's generated files are not what its types say: run make generate"; exit 1; }
	@test -z "$$(gofmt -l api cmd internal test tools)" || { gofmt -l api cmd internal test tools; exit 1; }

.PHONY: clean
clean: ## Remove bin/ (the user's cache of Kubernetes programs stays)
	rm -rf $(BIN)
