# Everything here needs only Python 3.11 or later with pip; `make help` lists the targets.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
BENCHMARKS := keyed_count epoch_overhead first_epoch state_growth windows aggregates skew ttl flink nexmark rescale async_base incremental recovery external failover alignment chaining sinks latency query read_state metrics scale autoscale

.DEFAULT_GOAL := help
.PHONY: help venv check test soak spark-versions bench demo docs clean

help: ## This list
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "  make %-8s %s\n", $$1, $$2}' Makefile

demo: $(READY) ## Kill a slot and two drivers, count every event; about a minute
	@$(BIN)/python -m cairn.demo --folder demo

test: $(READY) ## All tests, the fast ones first
	@PYTHON=$(BIN)/python ./.ci/test

soak: $(READY) ## Tests that take long, then ten minutes of kills, outages and rescales; SECONDS=600, SEED=
	@CAIRN_SOAK=1 $(BIN)/python -m pytest -q -m soak --basetemp=$$(mktemp -d /tmp/ct.XXXXXX) tests
	@CAIRN_EXAMPLES=100 $(BIN)/python -m pytest -q --basetemp=$$(mktemp -d /tmp/ct.XXXXXX) tests/property tests/unit/operators tests/unit/web/test_description.py
	@$(BIN)/python -m tests.soak --seconds $(or $(SECONDS),600) $(if $(SEED),--seed $(SEED))

spark-versions: $(READY) ## Tests over the oldest Spark that works, or those of VERSIONS="4.1.0 4.2.1"
	@PYTHON=$(BIN)/python ./.ci/spark-versions $(VERSIONS)

check: $(READY) ## Lint, formatting, types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

docs: $(READY) ## The documentation as a site, in build/docs
	$(BIN)/python -m sphinx -E -b html -W --keep-going -q -d build/doctrees docs build/docs
	@echo "open build/docs/index.html"

bench: $(READY) ## The benchmarks, one after the other
	@set -e; for name in $(BENCHMARKS); do echo "== $$name"; $(BIN)/python bench/$$name.py; done
	@set -e; for options in "--backend rocksdb" "--api aggregate" "--api process_batch"; do \
	  echo "== keyed_count $$options"; $(BIN)/python bench/keyed_count.py $$options; done
	@echo "== scale --largest"; $(BIN)/python bench/scale.py --largest
	@echo "== ttl --backend rocksdb"; $(BIN)/python bench/ttl.py --backend rocksdb
	@echo "== nexmark --backend rocksdb"; $(BIN)/python bench/nexmark.py --backend rocksdb

venv: $(READY) ## .venv with cairn, the tools, and a Java if the machine has none

clean: ## Remove what make and the tools have made, .venv included
	rm -rf $(VENV) demo build dist .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find src tests bench examples -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "cairn needs Python 3.11 or later; $(PYTHON) is $$($(PYTHON) --version 2>&1)"; \
	  echo "  next: make PYTHON=/path/to/python3.11"; exit 1; }
	@# Some distributions ship venv without the pip that goes into it; the machine's pip will do.
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || { \
	  $(PYTHON) -m venv --clear --without-pip $(VENV) && \
	  $(PYTHON) -m pip --python $(BIN)/python install --quiet pip; }
	@echo "installing cairn and its tools into $(VENV) ..."
	@$(BIN)/python -m pip install --quiet --upgrade 'pip>=25.3'
	@$(BIN)/python -m pip install --quiet --editable . --group dev
	@# The question `cairn.session` asks when it starts Spark: is there a Java it can run on?
	@$(BIN)/python -c 'from cairn.java import find_java; find_java()' 2>/dev/null || { \
	  echo "no Java 17 or later found: installing one into $(VENV) ..."; \
	  $(BIN)/python -m pip install --quiet --editable '.[java]'; }
	@touch $@
