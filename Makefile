# Everything a developer or a newcomer needs; the first target that wants it builds .venv, later ones cost nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check

.PHONY: help demo test check bench stubs constraints clean

help:
	@echo "make demo    real flights through five processes, with moves and a crash; report in demo-out/"
	@echo "make test    all tests"
	@echo "make check   ruff, mypy, import layers, generated stubs"
	@echo "make bench   benchmarks, quick sizes; JSON in bench-out/"

demo: $(VENV)/.demo
	$(BIN)/stateflow demo

test: $(VENV)/.dev
	$(BIN)/python -m pytest

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/generate-stubs --check

bench: $(VENV)/.dev
	mkdir -p bench-out
	$(BIN)/python -m benchmarks spark --quick --json > bench-out/spark.json
	@echo "figures in bench-out/spark.json"

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
	$(PIP) install -q -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) install -q -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo
