# Everything a developer or a newcomer needs; the first target that wants it builds .venv, later ones cost nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# Installing takes minutes where nothing is cached: what arrives is named, in place of all that pip says.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
NAMED := | awk '$$1 == "Downloading" || ($$1 == "Using" && $$2 == "cached") { print "  " ($$1 == "Using" ? $$3 : $$2); fflush() } /^Installing collected/ { print "  installing what arrived …"; fflush() }'

.PHONY: help demo test simulate kills crash-matrix check bench bench-full stubs constraints clean

help:
	@echo "make demo    real flights through five processes, with moves and a crash; report in demo-out/"
	@echo "make test    all tests"
	@echo "make simulate  100,000 seeds of a simulated cluster; every state of one move, and of two"
	@echo "make kills   a Spark pipeline whose processes are killed twenty times while partitions move"
	@echo "make crash-matrix  every step x participant x fault on real processes; writes docs/crash-matrix.md"
	@echo "make check   ruff, mypy, import layers, generated stubs"
	@echo "make bench   benchmarks, quick sizes; report in bench-out/ (make bench-full: all of it, many hours)"

demo: $(VENV)/.demo
	$(BIN)/stateflow demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist loadscope --no-loadscope-reorder  # small ones last

simulate: $(VENV)/.dev
	$(BIN)/python -m tests.simulation.sim --seeds 100000
	$(BIN)/python -m tests.simulation

kills: $(VENV)/.dev
	STATEFLOW_TEST_KILL_ROUNDS=4 $(BIN)/python -m pytest -s tests/integration/test_spark_kills.py

crash-matrix: $(VENV)/.dev
	$(BIN)/python -m tests.crash_matrix

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/generate-stubs --check

bench: $(VENV)/.dev $(VENV)/.quix
	$(BIN)/python -m benchmarks suite --quick

bench-full: $(VENV)/.dev $(VENV)/.quix
	$(BIN)/python -m benchmarks suite

stubs: $(VENV)/.dev
	.ci/generate-stubs

constraints: $(VENV)/.dev
	$(PIP) freeze --exclude-editable | grep -v '@' > constraints.txt

clean:
	rm -rf $(VENV) demo-out bench-out build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "python_too_old: stateflow needs Python 3.11 or newer: run 'make PYTHON=/path/to/python3.11'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "venv_missing: this Python cannot make virtual environments: install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what the demonstration needs into $(VENV), once"
	@$(PIP) install --progress-bar off -c constraints.txt -e '.[demo]' $(NAMED)
	@touch $@

# A rival whose requirements are not ours.
$(VENV)/.quix: | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/quix
	$(VENV)/quix/bin/pip --disable-pip-version-check install -q 'quixstreams==3.28.1' 'numpy>=2,<3'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@echo "installing what developing needs into $(VENV), once"
	@$(PIP) install --progress-bar off -c constraints.txt -e '.[dev]' $(NAMED)
	@touch $@ $(VENV)/.demo
