# Everything runs in .venv, made here; nothing is installed outside of it, save Debian's python3-venv where
# Python comes without ensurepip and there is the right to install it.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-builtin-rules --no-print-directory
# Tests start hundreds of interpreters: without kept bytecode each of them compiles the package anew.
unexport PYTHONDONTWRITEBYTECODE

VENV := .venv
PYTHON := $(VENV)/bin/python
INSTALLED := $(VENV)/installed
QUEUES := $(VENV)/queues
REGISTRY ?= sqlite
SIMULATOR ?= group
SEEDS ?= 10000
PROFILE ?= all
STATES ?= 1000000
SIZES ?= 1,5,20
WAITING ?= 10,1000
DRAINED ?= 20000,130000
NODES ?= 1000
RESOURCES ?= 100000
FAILOVERS ?= 20

.PHONY: help
help: ## Show the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

$(PYTHON):
	@for candidate in $(or $(PYTHON_COMMAND),python3.14 python3.13 python3.12 python3.11 python3); do \
	  if "$$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	    found=$$candidate; break; \
	  fi; \
	done; \
	if [ -z "$${found:-}" ]; then echo "Python 3.11 or later is needed and none was found" >&2; exit 1; fi; \
	if ! "$$found" -c 'import ensurepip' 2>/dev/null; then \
	  if [ "$$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then \
	    echo "$$found has no ensurepip: install its venv package (Debian: apt-get install python3-venv)" >&2; \
	    exit 1; \
	  fi; \
	  package=$$("$$found" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])'); \
	  apt-get install -y -q "$$package" || { apt-get update -q && apt-get install -y -q "$$package"; }; \
	fi; \
	"$$found" -m venv $(VENV)
	@echo '*' > $(VENV)/.gitignore

# pip supports dependency groups since 25.1.
$(INSTALLED): pyproject.toml | $(PYTHON)
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[all]' --group dev
	@touch $@

# The package with the extra of one registry is enough for the demo; a complete .venv has it already.
$(VENV)/sqlite: pyproject.toml | $(PYTHON)
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable .
	@touch $@

$(VENV)/etcd $(VENV)/kafka: $(VENV)/%: pyproject.toml | $(PYTHON)
	@$(PYTHON) -m pip install --quiet --disable-pip-version-check --editable '.[$*]'
	@touch $@

package = $(if $(wildcard $(INSTALLED)),$(INSTALLED),$(VENV)/$(1))

.PHONY: setup
setup: $(INSTALLED) ## Install everything that work on the project needs into .venv

.PHONY: servers
servers: $(INSTALLED) ## Get etcd, Kafka and a browser for tests, demo and benchmarks (kept in the user's cache)
	@$(MAKE) --keep-going etcd kafka browser

.PHONY: etcd kafka
etcd: $(call package,etcd)
kafka: $(call package,kafka)
etcd kafka:
	@$(PYTHON) -m rebalanser.testing.$@_server

.PHONY: browser
browser: $(INSTALLED)
	@PYTHONPATH=tests $(PYTHON) -m support.browser

.PHONY: demo
demo: $(call package,$(or $(filter etcd kafka,$(REGISTRY)),sqlite)) $(filter etcd kafka,$(REGISTRY)) ## See a group work: REGISTRY=sqlite, etcd or kafka
	@$(PYTHON) examples/demo.py --registry $(REGISTRY)

.PHONY: audit-demo
audit-demo: $(INSTALLED) $(filter etcd kafka,$(REGISTRY)) ## Run the demo, audit its history, draw the report
	@$(PYTHON) examples/audit_demo.py --registry $(REGISTRY)

# Three loops, each a part of the next; pyproject.toml explains the marks.
PYTEST := $(PYTHON) -m pytest --durations=20
QUICK := not (browser or etcd or full_size or kafka or slow or spark)
QUICK_EXAMPLES := --hypothesis-profile=quick
# A glob is the shell's to expand; the id of a test is quoted, with its spaces if it is the only path.
QUOTED = $(if $(and $(findstring ::,$(T)),$(filter 1,$(words $(filter tests/%,$(T))))),'$(T)',$(foreach path,$(T),$(if \
	$(findstring ::,$(path)),'$(path)',$(path))))
# The tests of real parts mostly wait, so more of them than there are cores run at once.
WORKERS ?= 3

.PHONY: quick
quick: $(INSTALLED) ## A minute, no server: unit tests, a few seeds. T='PATH[::TEST] …' runs these, M='etcd and not slow' these marks
	$(if $(T),$(if $(wildcard $(firstword $(subst ::, ,$(T)))),,$(error no such test file or folder: $(T))))
	@$(PYTEST) -q $(if $(T),$(QUOTED),-n auto $(if $(M),,$(QUICK_EXAMPLES))) -m '$(or $(M),$(if $(T),,$(QUICK)))'

.PHONY: lint
lint: $(INSTALLED) ## Style, types, and whether the generated documentation is current
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy
	@$(PYTHON) docs/generate.py --check

# Without an etcd, a Kafka, a Java or a browser the tests that need one say so: skipped on a laptop, failed in CI.
.PHONY: test
test: lint ## About ten minutes: lint, units and seeds at full size, conformance, a Spark session, the demos
	@$(MAKE) servers || true
	@$(PYTEST) -n $(WORKERS) -m 'not slow'

.PHONY: test-all
test-all: test test-rest ## About half an hour: everything, also faults, clusters, other Pythons, browser and wheel

.PHONY: test-rest
test-rest: $(INSTALLED) pythons ## What `make test` leaves out
	@$(PYTEST) -n $(WORKERS) -m slow

# The quick loop on each other Python here; CANDIDATES names programs, those that do not run are passed over.
CANDIDATES = $(foreach minor,11 12 13 14,python3.$(minor) $(wildcard $(HOME)/.pyenv/versions/3.$(minor).*/bin/python))
.PHONY: pythons
pythons: $(INSTALLED)
	@tested=" $$($(PYTHON) -c 'import sys; print(*sys.version_info[:2], sep=".")') "; \
	for candidate in $(CANDIDATES); do \
	  version=$$("$$candidate" -c 'import sys; print(*sys.version_info[:2], sep=".")' 2>/dev/null) || continue; \
	  case "$$tested" in *" $$version "*) continue;; esac; \
	  tested="$$tested$$version "; \
	  echo "== quick on Python $$version"; \
	  $(MAKE) quick VENV=$(VENV)/$$version PYTHON_COMMAND="$$candidate"; \
	done

.PHONY: coverage
coverage: $(INSTALLED) ## Branch coverage of `make test`
	@$(MAKE) servers || true
	@$(PYTEST) -n $(WORKERS) -m 'not slow' --cov --cov-report=term:skip-covered

.PHONY: simulate
simulate: $(INSTALLED) ## A soak of a simulator on all cores: SIMULATOR=group, neli, shiva or tasks, SEEDS=100000 PROFILE=anything
	@$(PYTHON) tests/simulation $(SIMULATOR) --profile $(PROFILE) --seeds $(SEEDS)

.PHONY: explore
explore: $(INSTALLED) ## Every order of events of two nodes and two resources: STATES=1000000
	@PYTHONPATH=tests $(PYTHON) -m simulation.exploration --states $(STATES)

.PHONY: mutants
mutants: $(INSTALLED) ## Break each rule on purpose and print what notices, after how many seeds
	@$(PYTHON) -m pytest -q -s tests/simulation/test_mutants.py tests/unit/test_runtime_mutants.py

.PHONY: bench
bench: etcd ## The benchmark tables; those of Kafka where one can be had
	@$(PYTHON) benchmarks/run.py
	@if $(MAKE) kafka; then $(MAKE) bench-kafka; else echo "the benchmarks on Kafka were left out" >&2; fi

.PHONY: bench-scale
bench-scale: etcd ## Groups of 4 and of 1,000 nodes with 100,000 resources: NODES=1000 RESOURCES=100000
	@$(PYTHON) benchmarks/scale.py --nodes $(NODES) --resources $(RESOURCES)

.PHONY: bench-allocation
bench-allocation: $(INSTALLED) ## Processor time of allocations: NODES=1000 RESOURCES=100000
	@$(PYTHON) benchmarks/allocation.py --nodes $(NODES) --resources $(RESOURCES)

.PHONY: bench-kafka
bench-kafka: kafka bench-failover
	@$(PYTHON) benchmarks/shiva.py

.PHONY: bench-failover
bench-failover: kafka ## Fail-overs of Shiva, kafka:// groups and NELI beside plain consumer groups: FAILOVERS=20
	@$(PYTHON) benchmarks/failover.py --count $(FAILOVERS)

.PHONY: bench-audit
bench-audit: $(INSTALLED) ## How fast the audit is: SIZES=1,5,20 millions of records (kept in the user's cache)
	@$(PYTHON) benchmarks/audit.py --sizes $(SIZES)

.PHONY: queues
queues: $(QUEUES)/installed

# Other task queues, for comparison: their requirements are not those of the project, so they live apart.
$(QUEUES)/installed: pyproject.toml | $(INSTALLED)
	@$(PYTHON) -m venv $(QUEUES)
	@$(QUEUES)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade 'pip>=25.1'
	@$(QUEUES)/bin/python -m pip install --quiet --disable-pip-version-check --group queues
	@touch $@

.PHONY: bench-tasks
bench-tasks: etcd queues ## Tasks beside other queues, deep queues: WAITING=10,1000,1000000 DRAINED=20000,130000,1000000
	@QUEUES_PYTHON=$(QUEUES)/bin/python $(PYTHON) benchmarks/tasks.py --waiting $(WAITING) --drained $(DRAINED)

.PHONY: bench-crash
bench-crash: etcd queues ## What Skuld and other queues make of workers that are killed or paused
	@QUEUES_PYTHON=$(QUEUES)/bin/python $(PYTHON) benchmarks/crash_matrix.py

.PHONY: docs
docs: $(INSTALLED) ## Write the generated parts of the documentation
	@$(PYTHON) docs/generate.py

.PHONY: wheel
wheel: $(INSTALLED) ## Build the wheel and try it in a clean environment
	@$(PYTHON) -m pytest tests/e2e/test_wheel.py

.PHONY: clean
clean: ## Remove what the other targets made
	@rm -rf $(VENV) .hypothesis .mypy_cache .pytest_cache .ruff_cache dist build
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
