# Everything a developer or a newcomer needs; the first target that wants it builds .venv, later ones cost nothing.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/pip --disable-pip-version-check
# Modules are compiled at their first import, unless Python may write none then: most are never imported, and to compile
# all of them takes 50 s.
INSTALL := install $(if $(PYTHONDONTWRITEBYTECODE),,--no-compile) --progress-bar off
# A pipe fails where any of it does.
SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
# Installing takes minutes where nothing is cached: what arrives is named, and that it goes on is said.
TELLING := $(PYTHON) .ci/telling.py

# Of PySpark, beside the newest that pyproject.toml admits, which is in .venv: each has an environment of its own.
VERSIONS := 4.1 4.2
# Whatever starts Spark, and what has a part of it alone.
OF_SPARK = $$(grep -rl --include='test_*.py' 'pytest\.mark\.spark' tests) tests/unit/spark

# Its theme would tell of its successor at each build.
SITE := NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

.PHONY: help demo follow quick test test-all hunt durations versions $(VERSIONS:%=pyspark-%) simulate kills crash-matrix chaos fuzz walks check audit docs bench bench-full dist stubs reference constraints clean

help:
	@echo "make demo    real flights through five processes, with moves and a crash; report in demo-out/"
	@echo "make follow  vehicles drive between three sites, and their state follows them; report in demo-out/"
	@echo "make quick   ruff, mypy, import layers, and the unit tests of what changed; a minute and a half"
	@echo "make test    the gate: what must pass before a change lands, in ten minutes"
	@echo "make test-all  every test, in an hour or so; a quarter of them: make test-all SHARD=2/4"
	@echo "make hunt    looks for what no test has found, until it is stopped; findings in hunt-out/"
	@echo "make durations  the gate, and what its tests took is kept in tests/durations.json"
	@echo "make versions  the tests of Spark on PySpark $(VERSIONS), each in an environment of its own; one alone: make pyspark-4.1"
	@echo "make simulate  100,000 seeds of a simulated cluster; every state of one move, and of two"
	@echo "make kills   Spark pipelines, classic, over Connect, in real time and standalone: each killed twenty times while partitions move"
	@echo "make crash-matrix  every step x participant x fault on real processes; writes docs/crash-matrix.md"
	@echo "make chaos   faults on real processes, each with its verdict; writes docs/chaos.md"
	@echo "make fuzz    a million hostile inputs to every decoder and RPC"
	@echo "make walks   counts the product's files that a row, a checkpoint, a move and an append enter; fails over a limit"
	@echo "make check   ruff with its security rules, mypy, import layers, plain English, what is generated, the site, dependencies that fit together, and known vulnerabilities of them"
	@echo "make docs    the documentation as a site in site/; open site/index.html"
	@echo "make audit   known vulnerabilities of what is pinned, as published today; needs the network, and fails without it"
	@echo "make dist    a wheel and a source distribution, in dist/"
	@echo "make bench   benchmarks, quick sizes; report in bench-out/ (make bench-full: all of it, many hours)"

demo: $(VENV)/.demo
	$(BIN)/stateflow demo

follow: $(VENV)/.demo
	$(BIN)/stateflow demo --follow

test: $(VENV)/.dev
	$(BIN)/python -m tests.gate

test-all: $(VENV)/.dev
	$(BIN)/python -m tests.gate --tier all $(if $(SHARD),--shard $(SHARD))

quick: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python -m tests.quick

hunt: $(VENV)/.dev
	$(BIN)/python -m tests.hunt

durations: $(VENV)/.dev
	$(BIN)/python -m tests.gate --write-durations

versions: $(VERSIONS:%=pyspark-%)

# All of them, as each finds something of its own: what a version lacks is skipped there, and said.
$(VERSIONS:%=pyspark-%): pyspark-%: $(VENV)/.pyspark-%
	$(VENV)/pyspark-$*/bin/python -m pytest -n 2 --dist loadscope --no-loadscope-reorder -rs \
	  -m 'spark or not processes' $(OF_SPARK)

simulate: $(VENV)/.dev
	$(BIN)/python -m tests.simulation.sim --seeds 100000
	$(BIN)/python -m tests.simulation

kills: $(VENV)/.dev
	STATEFLOW_TEST_KILL_ROUNDS=4 $(BIN)/python -m pytest -s tests/integration/test_spark_kills.py

crash-matrix: $(VENV)/.dev
	$(BIN)/python -m tests.crash_matrix

chaos: $(VENV)/.dev
	$(BIN)/python -m tests.chaos

fuzz: $(VENV)/.dev
	$(BIN)/python -m tests.fuzz

walks: $(VENV)/.dev
	$(BIN)/python -m tests.walks

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	.ci/plain-english
	.ci/generate-stubs --check
	.ci/generate-settings --check
	made=$$(mktemp -d) && trap 'rm -rf "$$made"' EXIT && $(SITE) --strict --quiet --site-dir "$$made"
	$(PIP) check
	$(BIN)/python .ci/audit

audit: $(VENV)/.audit $(VENV)/.dev
	$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off -r constraints.txt
	known=$$(mktemp -d) && trap 'rm -rf "$$known"' EXIT && \
	  git clone -q --depth 1 https://github.com/pypa/advisory-database "$$known" && \
	  $(BIN)/python .ci/audit --update "$$known"

bench: $(VENV)/.dev $(VENV)/.quix
	$(BIN)/python -m benchmarks suite --quick

bench-full: $(VENV)/.dev $(VENV)/.quix
	$(BIN)/python -m benchmarks suite

docs: $(VENV)/.dev
	$(SITE)
	@echo "open site/index.html"

# What an earlier build listed is forgotten: it would come along, wanted or not.
dist: $(VENV)/.dev
	rm -rf dist build *.egg-info
	$(BIN)/python -m build

stubs: $(VENV)/.dev
	.ci/generate-stubs

reference: $(VENV)/.dev
	.ci/generate-settings

constraints: $(VENV)/.dev
	$(PIP) freeze --exclude-editable | grep -v '@' > constraints.txt

$(VENV)/.audit: | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/audit
	$(VENV)/audit/bin/pip --disable-pip-version-check install -q 'pip-audit>=2.7,<3'
	@touch $@

clean:
	rm -rf $(VENV) demo-out bench-out hunt-out build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache .fuzz

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "python_too_old: stateflow needs Python 3.11 or newer: run 'make PYTHON=/path/to/python3.11'" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || \
	  { echo "venv_missing: this Python cannot make virtual environments: install python3-venv" >&2; exit 1; }
	@$(TELLING) "making $(VENV)" $(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	@$(TELLING) "installing what the demonstration needs into $(VENV), once" \
	  $(PIP) $(INSTALL) -c constraints.txt -e '.[demo]'
	@touch $@

# A rival whose requirements are not ours.
$(VENV)/.quix: | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/quix
	$(VENV)/quix/bin/pip --disable-pip-version-check install -q 'quixstreams==3.28.1' 'numpy>=2,<3'
	@touch $@

$(VERSIONS:%=$(VENV)/.pyspark-%): $(VENV)/.pyspark-%: pyproject.toml constraints.txt | $(BIN)/python
	$(PYTHON) -m venv $(VENV)/pyspark-$*
	grep -v '^pyspark==' constraints.txt > $(VENV)/pyspark-$*/constraints.txt
	@$(TELLING) "installing what tests of Spark need, with PySpark $*, into $(VENV)/pyspark-$*, once" \
	  $(VENV)/pyspark-$*/bin/pip --disable-pip-version-check $(INSTALL) \
	  -c $(VENV)/pyspark-$*/constraints.txt -e '.[connect,demo,test,traces]' 'pyspark==$*.*'
	@touch $@

$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	@$(TELLING) "installing what developing needs into $(VENV), once" \
	  $(PIP) $(INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo
