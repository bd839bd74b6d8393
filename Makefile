# Everything runs in a virtual environment of the project's own; `make help` lists the targets.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.stillstate-ready
TEST_PROCESSES ?= 2

.DEFAULT_GOAL := help

##@ Start here

.PHONY: help
help: ## Show this help
	@awk 'BEGIN {FS = ":.*##"; printf "Usage: make \033[36m<target>\033[0m\n"} \
	  /^[a-zA-Z_-]+:.*?##/ { printf "  \033[36m%-14s\033[0m %s\n", $$1, $$2 } \
	  /^##@/ { printf "\n\033[1m%s\033[0m\n", substr($$0, 5) }' $(MAKEFILE_LIST)

$(SETUP): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed; set PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[spark,s3,demo,dev]'
	@touch $(SETUP)

.PHONY: setup
setup: $(SETUP) java ## Make the virtual environment and install everything into it

.PHONY: java
java: $(SETUP)
	@$(BIN)/python -m state_runtime.spark.java

.PHONY: demo
demo: setup ## A year of real flights, live: starts Dagster and the job, prints the address to open
	$(BIN)/python -m examples.flights.demo --work .demo

.PHONY: demo-check
demo-check: setup ## The same demo without a person: kills the driver three times and proves the result
	$(BIN)/python -m examples.flights.demo_check --work .demo-check $(DEMO_ARGS)

##@ Check

.PHONY: test
test: setup ## All tests but the kinds below, which take longer (needs no network and no running service)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m 'not long and not parity and not kill and not cluster'

.PHONY: test-long
test-long: setup ## Whole jobs in all their settings: round trips, conversions, imports, savepoints, intervals, secrets (CI runs them too)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m 'long and not parity and not kill and not cluster'

.PHONY: test-parity
test-parity: setup ## Each operator and processor beside Spark's own, row by row (CI runs them too)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m parity

.PHONY: test-kill
test-kill: setup ## Drivers that are killed at every point and started again
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m kill

.PHONY: test-cluster
test-cluster: setup ## Tests on Spark clusters of several processes, started on loopback
	$(BIN)/python -m pytest -m cluster

.PHONY: test-quick
test-quick: setup ## Tests that start no Spark
	$(BIN)/python -m pytest -m 'not spark and not long and not kill and not cluster'

SOAK ?= 20
SOAK_SEEDS ?= 20000
.PHONY: soak
soak: setup ## SOAK_SEEDS (20,000) of the system simulation, the fault suite with SOAK (20) times as many; failures name their seed
	$(BIN)/python -m tests.simulation.soak --seeds $(SOAK_SEEDS)
	STILLSTATE_SOAK=$(SOAK) $(BIN)/python -m pytest tests/faults tests/state_runtime/snapshot/test_commit_schedule.py tests/state_runtime/driver/test_driver_schedule.py -m 'not spark and not kill and not cluster'

CYCLES ?= 1000
.PHONY: soak-kill
soak-kill: setup ## A job that is killed CYCLES (1000) times at random moments, with other settings each time; writes tests/soak/reports/kill.json
	$(BIN)/python -m tests.soak.kill --cycles $(CYCLES)

TARGET ?= roots
FUZZ_S ?= 300
.PHONY: fuzz
fuzz: setup ## Damaged bytes for every reader: SOAK (20) times as many as in `make test`; with the package atheris also FUZZ_S seconds of TARGET, led by coverage
	STILLSTATE_SOAK=$(SOAK) $(BIN)/python -m pytest tests/fuzz
	@if $(BIN)/python -c 'import atheris' 2>/dev/null; then \
	  $(BIN)/python -m tests.fuzz.atheris_main $(TARGET) -max_total_time=$(FUZZ_S) -rss_limit_mb=2048 -timeout=30; \
	else echo "the package atheris is not installed: only hypothesis has run"; fi

.PHONY: lint
lint: setup ## ruff and its formatter
	$(BIN)/ruff check --no-cache .
	$(BIN)/ruff format --check --no-cache .

.PHONY: typecheck
typecheck: setup ## mypy --strict on our three packages
	$(BIN)/python -m mypy

.PHONY: map
map: setup ## Draw which folder imports which; fails if one imports a folder above it
	$(BIN)/python -m tests.import_map

.PHONY: format
format: setup ## Format the code
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: lock
lock: ## Write the installed versions to constraints.txt (after changing dependencies in setup.cfg)
	@echo '# Versions that the tests ran with; `make setup` installs exactly these. Made by `make lock`.' > constraints.txt
	@$(BIN)/python -m pip freeze --exclude-editable | grep -viE '^(stillstate|pip|setuptools)\b' >> constraints.txt

##@ Measure

.PHONY: bench
bench: setup ## First table: Stillstate against Spark 4.3 on this machine (about 15 minutes)
	$(BIN)/python -m benchmarks.main

.PHONY: bench-engine
bench-engine: setup ## Second table: every kind of state and operator against Spark 4.3, growth, tail, memory (about 25 minutes)
	$(BIN)/python -m benchmarks.engine

.PHONY: bench-checkpoint
bench-checkpoint: setup ## Third table: what a checkpoint costs, changelog on and off, both backends, and Spark (about 45 minutes)
	$(BIN)/python -m benchmarks.checkpoint

.PHONY: bench-recovery
bench-recovery: setup ## Fourth table: restarts from the primary store, from local copies, with twice the shards (about 12 minutes)
	$(BIN)/python -m benchmarks.recovery

##@ Tidy up

.PHONY: clean
clean: ## Remove what tests and the demo left (not the virtual environment)
	rm -rf .demo .demo-check .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info spark-warehouse
