# The usual commands: make bench, make test. Each target has its description behind `##`; `make help` prints them.
# CUDA=OFF builds without the CUDA backend, CUDA=ON insists on it. The default compiles for this machine's GPUs, or for
# the H100 and H200 if it has none. CUDA_TARGETS=all compiles for every GPU: for a wheel that goes to other machines.
CUDA ?= AUTO
CUDA_TARGETS ?= $(or $(EAVES_CUDA_TARGETS),native)
BUILD := build/release
JOBS ?= $(shell nproc)

ifeq ($(filter $(CUDA),AUTO ON OFF),)
$(error CUDA is "$(CUDA)", expected AUTO, ON or OFF)
endif
OPTIONS := -DEAVES_CUDA=$(CUDA) "-DEAVES_CUDA_TARGETS=$(CUDA_TARGETS)"
# Builds within the tests compile for the same GPUs.
export EAVES_CUDA_TARGETS := $(CUDA_TARGETS)

# `make help` prints the comments behind the targets' names.
help: ## print this list
	@sed -n 's/^\([a-z0-9]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{printf "%-14s %s\n", $$1, $$2}'

build: ## install missing packages, build the program build/release/eaves
	@CUDA=$(CUDA) tools/setup build
	@tools/build release $(JOBS) $(OPTIONS)

bench: build ## build, then measure every operator on this machine and print the tables
	@$(BUILD)/eaves bench

published: wheel ## build the Python package, then measure the tables that xopes published (docs/published.md)
	@.venv/bin/python benchmarks published

wheel: ## install missing packages, build the Python package into dist/, install it into .venv
	@CUDA=$(CUDA) tools/setup
	@tools/wheel $(JOBS) $(OPTIONS)

test: ## install missing packages, build, run every test and count the results
	@CUDA=$(CUDA) tools/setup
	@tools/build release $(JOBS) $(OPTIONS) all eaves_tests
	@tools/wheel $(JOBS) $(OPTIONS)
	@tools/run_tests $(BUILD)

# qemu finds the C library of libc6:arm64, which libhwy-dev:arm64 requires, in its usual place. With -L and the cross
# compiler's C library the program would load parts of both, and its first thread would hang.
aarch64: ## install a cross compiler (Debian, x86-64), build build/aarch64/eaves for 64-bit Arm, emulate its self-test
	@tools/setup aarch64
	@tools/build aarch64 $(JOBS)
	@qemu-aarch64 build/aarch64/eaves info --self-test

docs: ## install mkdocs in build/site_venv, build the documentation's site in build/site and check its links
	@tools/site

format: ## format the C++ and Python sources
	@tools/setup
	@tools/format

clean: ## remove all build outputs; installed packages stay
	@rm -rf build dist

.PHONY: help build bench published wheel test aarch64 docs format clean
