# make install | install-dev | demo | test | test-fast | lint | format | clean
# ARGS go to the command behind a target: `make demo ARGS=--quick`, `make test-fast ARGS="-k taps"`.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.NOTPARALLEL:

PYTHON ?= python3
ARGS ?=
BIN := .venv/bin
UV_VERSION := 0.13.9

# A stamp carries the digest of what it was made from: an unchanged checkout installs nothing, whatever its file times.
digest = $(shell cat $(1) | sha256sum | cut -c1-16)
RUN_FILES := requirements/torch-cpu.txt requirements/cpu.txt pyproject.toml
RUN_STAMP := .venv/.installed-$(call digest,$(RUN_FILES))
DEV_STAMP := .venv/.installed-dev-$(call digest,$(RUN_FILES) requirements/dev.txt)

export PIP_DISABLE_PIP_VERSION_CHECK := 1
export UV_HTTP_TIMEOUT ?= 180
PIP := $(BIN)/pip install --quiet --quiet
# Source packages are built with the pinned setuptools, not with whatever is newest that day.
UV := $(BIN)/uv pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation

# install_pinned FLAGS: uv takes seconds where pip takes a minute; pip is the way out where uv cannot reach a package.
define install_pinned
	@$(UV) $(1) || { echo "uv could not install this; trying pip (about a minute)"; \
		$(PIP) --no-deps --no-build-isolation $(1); } || { echo "Installation failed." \
		"If pycosat is named above, install a C compiler (Debian: gcc and libc6-dev) and run this again." >&2; exit 1; }
endef

.PHONY: help install install-dev demo test test-fast lint format clean

help:
	@echo "make install      .venv with the pinned packages and this project; does nothing when up to date"
	@echo "make demo         install, then train SmolLM2-135M and its draft together (ARGS=--quick, --lora, --compare)"
	@echo "make test         lint, then every test that runs without a GPU"
	@echo "make test-fast    lint, then the tests that are not marked slow"
	@echo "make lint         ruff, mypy, import-linter"
	@echo "make format       let ruff rewrite what it can"
	@echo "make clean        remove caches and build output; .venv and runs/ stay"

install: $(RUN_STAMP)
	@:

install-dev: $(DEV_STAMP)
	@:

$(BIN)/pip:
	@echo "Making .venv with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed (make PYTHON=python3.11)")'
	@$(PYTHON) -m venv .venv

$(RUN_STAMP): | $(BIN)/pip
	@rm -f .venv/.installed-*
	@echo "Installing torch"
	@$(PIP) -r requirements/torch-cpu.txt -c requirements/cpu.txt uv==$(UV_VERSION)
	@echo "Installing vLLM, TRL and the other pinned packages"
	$(call install_pinned,-r requirements/cpu.txt)
	@echo "Installing hf-codraft, editable"
	$(call install_pinned,-e .)
	@touch $@
	@echo "Installed. Next: make demo"

$(DEV_STAMP): $(RUN_STAMP)
	@rm -f .venv/.installed-dev-*
	@echo "Installing the packages of tests and lint"
	$(call install_pinned,-r requirements/dev.txt)
	@touch $@

demo: install
	@$(BIN)/hf-codraft demo $(ARGS)

lint: install-dev
	@echo "Lint: ruff, mypy, import-linter"
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

format: install-dev
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

# Tests make or ship what they need: a look at the Hub could only slow them down.
test test-fast: export HF_HUB_OFFLINE := 1
test test-fast: export DO_NOT_TRACK := 1
# Tiny models are quickest on one thread, and engines of several tests do not fight for cores.
test test-fast: export OMP_NUM_THREADS := 1

test: lint
	@$(BIN)/pytest -m "not gpu" $(ARGS)

test-fast: lint
	@$(BIN)/pytest -m "not gpu and not slow" $(ARGS)

clean:
	@rm -rf build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache
	@find . -name __pycache__ -not -path "./.venv/*" -prune -exec rm -rf {} +
