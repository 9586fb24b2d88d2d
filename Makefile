# Each target sets up the virtual environment .venv that it needs, on first use.

PYTHON ?= python3
# For example https://download.pytorch.org/whl/cpu, which has torch without CUDA: 0.2 GB instead of 3 GB.
TORCH_INDEX ?=
# Each of these has ranks of its own, and while those of one wait for one another, those of the other compute.
TESTS_AT_ONCE ?= 2

# Run once more as if each rank had a host of its own: what they exchange goes through the network then.
BETWEEN_HOSTS := tests/comm tests/test_schemes_agree.py tests/test_equals_single_process.py \
	tests/test_splits_equal_single_process.py tests/test_a_rank_that_falls.py tests/pipeline/test_pipeline_schedules.py \
	tests/pipeline/test_pipeline_mishaps.py

BIN := .venv/bin
# pip reads constraints for what it installs from the first variable, and, from 25.3 on, for builds from the second.
INSTALL := PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt PIP_NO_INPUT=1 \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check \
	$(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) --editable
FILES := $(wildcard src tests examples benchmarks)

.DEFAULT_GOAL := help
.NOTPARALLEL:
.DELETE_ON_ERROR:
.PHONY: help demo test check format clean

help:  ## List the targets.
	@sed -n 's/^\([a-z]*\):.*##\(.*\)/make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 18

# The first steps on one process too: the report lays its loss under that of the four, which should be the same.
demo: .venv/installed-demo  ## Train a translator on four processes, and see runs/demo/report.html.
	$(BIN)/tulle run --processes 4 --run-dir runs/demo examples/01_translate.py
	@echo; echo "The same global batches on one process, for comparison:"
	$(BIN)/tulle run --processes 1 --run-dir runs/demo/one-process examples/01_translate.py --stop-at 600
	$(BIN)/tulle report runs/demo --compare runs/demo/one-process

test: .venv/installed-dev  ## Run the tests that need no GPU and are quick.
	$(BIN)/python -m pytest -m "not gpu and not slow" --numprocesses $(TESTS_AT_ONCE) --dist worksteal
	TULLE_SHARED_MEMORY=0 $(BIN)/python -m pytest -m "not gpu and not slow" --numprocesses $(TESTS_AT_ONCE) \
		--dist worksteal $(BETWEEN_HOSTS)

check: .venv/installed-dev  ## Check format, lint, types, floors and the examples in docstrings.
	$(BIN)/ruff format --check $(FILES)
	$(BIN)/ruff check $(FILES)
	$(BIN)/basedpyright
	$(BIN)/lint-imports
	$(BIN)/python -m pytest --override-ini addopts=--quiet --doctest-modules src/tulle

format: .venv/installed-dev  ## Format the sources and mend what ruff can mend.
	$(BIN)/ruff check --fix-only $(FILES)
	$(BIN)/ruff format $(FILES)

clean:  ## Remove the virtual environment, the caches and the demo's run.
	rm -rf .venv .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist runs/demo
	find $(FILES) -name __pycache__ -prune -exec rm -rf {} +

.venv/made:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and \
		"tulle needs Python 3.11 or newer, this is %d.%d: try make PYTHON=python3.11" % sys.version_info[:2])'
	$(PYTHON) -m venv .venv
	@touch $@

.venv/installed-demo: .venv/made pyproject.toml constraints.txt
	$(INSTALL) '.[demo]'
	@touch $@

# All that `demo` needs is part of `dev`.
.venv/installed-dev: .venv/made pyproject.toml constraints.txt
	$(INSTALL) '.[dev]'
	@touch .venv/installed-demo $@
