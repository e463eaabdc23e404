# Every target may be run first: each prepares what it needs.
.DEFAULT_GOAL := help
# What needs more of a machine: an image, containerd, a browser, helm, minutes of crashes, a virtual machine.
SYSTEM := tests/containerd tests/browser tests/daemonset tests/hack tests/soak
.PHONY: help setup shim demo test test-system check bench bench-alignment bench-dra bench-fleet soak vm lock clean
NATIVE := hack/build-shim native

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## /{printf "make %-16s %s\n", $$1, $$2}' Makefile

setup: ## Debian packages that are missing, and .venv with everything pinned
	@hack/setup

shim: setup ## the static CNI relay for amd64 and arm64, in build/shim
	@hack/build-shim

demo: setup ## a simulated node with GPUs and VFs, the agent, and pods that come and go
	@$(NATIVE)
	@.venv/bin/python -m hack.sim.demo

test: check ## every check, and all tests that need no more than this machine: minutes
	@hack/setup --tests
	@$(NATIVE)
	@hack/fetch-promtool >/dev/null
	hack/run-tests tests --ignore tests/vm $(SYSTEM:%=--ignore %)

test-system: setup ## tests with the image, containerd, a browser, helm, crashes and the virtual machine
	@hack/setup --system
	@$(NATIVE)
	@hack/fetch-containerd
	@hack/fetch-kube >/dev/null
	@hack/fetch-promtool >/dev/null
	@hack/fetch-registry >/dev/null
	@hack/build-image amd64 arm64
	@hack/build-image --twice
	hack/run-tests system $(SYSTEM)
	hack/vm/run-tests

check: setup ## format, lint, types, import contracts, generated code
	@hack/check

bench: setup ## measurements, into build/reports/bench.json
	@$(NATIVE)
	hack/bench/run

bench-alignment: setup ## how near GPUs and NICs of one pod stand, into build/reports/alignment.json (NODES=folder)
	@$(NATIVE)
	hack/bench/alignment $(NODES)

bench-dra: setup ## claims: how near NICs stand to GPUs, how long kubelet waits, what is written, into build/reports/dra.json
	@$(NATIVE)
	hack/bench/dra

bench-fleet: setup ## what many agents ask of the API server, into build/reports/fleet.json
	@$(NATIVE)
	hack/bench/fleet

soak: setup ## kill, churn and fuzz for an hour, into build/reports/soak.json
	@$(NATIVE)
	hack/soak

vm: setup ## the tests against a real kernel with SR-IOV adapters, in QEMU
	@hack/setup --vm
	@$(NATIVE)
	@hack/fetch-containerd
	hack/vm/run-tests

lock: ## requirements/*.txt anew from pyproject.toml
	hack/lock

clean: ## without what was built; .venv stays
	rm -rf build .mypy_cache .pytest_cache .ruff_cache .import_linter_cache .hypothesis
