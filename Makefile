# The front door: make bench, make test. Each target says in one line what it does; `make help` prints them.
# CUDA=OFF builds without the CUDA backend, CUDA=ON insists on it.
CUDA ?= AUTO
BUILD := build/release
JOBS ?= $(shell nproc)

ifeq ($(filter $(CUDA),AUTO ON OFF),)
$(error CUDA is "$(CUDA)", expected AUTO, ON or OFF)
endif

# `make help` prints the comments behind the targets' names.
help: ## print this list
	@sed -n 's/^\([a-z]*\):.*## \(.*\)/make \1|\2/p' Makefile | awk -F'|' '{printf "%-12s %s\n", $$1, $$2}'

build: ## install what is missing, build build/release/eaves
	@CUDA=$(CUDA) tools/setup build
	@tools/build release $(JOBS) -DEAVES_CUDA=$(CUDA)

bench: build ## build, then print the tables of every operator for the device found
	@$(BUILD)/eaves bench

wheel: ## install what is missing, build the Python package into dist/ and install it into .venv
	@CUDA=$(CUDA) tools/setup
	@tools/wheel $(JOBS) -DEAVES_CUDA=$(CUDA)

test: ## install what is missing, build, run every test, count them
	@CUDA=$(CUDA) tools/setup
	@tools/build release $(JOBS) -DEAVES_CUDA=$(CUDA)
	@tools/wheel $(JOBS) -DEAVES_CUDA=$(CUDA)
	@tools/run_tests $(BUILD)

format: ## bring the C++ and Python sources into the project's format
	@tools/setup
	@tools/format

clean: ## remove everything that was built; what was installed stays
	@rm -rf build dist

.PHONY: help build bench wheel test format clean
