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
	@echo 'Making $(VENV) and installing PySpark (450 MB), Dagster and the rest into it: two to five minutes, once.'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --progress-bar on -c constraints.txt -e '.[spark,dagster,s3,demo,dev]'
	@touch $(SETUP)

PREPARED := $(VENV)/.stillstate-prepared
.PHONY: setup
setup: $(SETUP) java $(PREPARED) ## Make the virtual environment, install everything into it, and make drivers of this host start faster

.PHONY: java
java: $(SETUP)
	@$(BIN)/python -m state_runtime.spark.java

# Only a gain of time: a machine that cannot keep it goes on without.
$(PREPARED): $(SETUP) | java
	@echo 'Keeping the classes that Java loads, so that drivers start faster: about a minute, once.'
	@$(BIN)/stillstate prepare || echo 'Not kept: drivers start as without it.'
	@touch $(PREPARED)

.PHONY: demo
demo: setup ## A year of real flights, live: starts Dagster and the job, prints the address to open
	$(BIN)/python -m examples.flights.demo --work .demo

.PHONY: demo-check
demo-check: setup ## The same demo without a person: kills the driver three times and proves the result
	$(BIN)/python -m examples.flights.demo_check --work .demo-check $(DEMO_ARGS)

.PHONY: demo-kafka
demo-kafka: setup kafka ## A small shop: Kafka in; Delta, PostgreSQL and Kafka out, while driver, broker and database are killed (about 6 minutes)
	$(BIN)/python -m examples.shop.demo --work .demo-kafka $(DEMO_ARGS)

##@ Check

.PHONY: test
test: setup ## All tests but the kinds below, which take longer (needs no network and no running service)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m 'not long and not parity and not spark_suite and not kill and not cluster and not browser and not servers'

.PHONY: test-long
test-long: setup ## Whole jobs in all their settings: round trips, conversions, imports, savepoints, intervals, secrets (CI runs them too)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m 'long and not parity and not kill and not cluster and not browser and not servers'

.PHONY: test-parity
test-parity: setup ## Each operator and processor beside Spark's own, row by row (CI runs them too)
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m parity

.PHONY: test-spark-suite
test-spark-suite: setup ## Spark's own suites through our jobs: transformWithState in Python, unmodified, and the cases of the Scala suites
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m spark_suite tests/spark_suite

CORE := tests/spark/test_job.py tests/spark/test_round_trip.py tests/spark/test_windows.py tests/spark/test_rescale.py tests/spark/test_event_time.py
.PHONY: test-public
test-public: setup ## The core suite by Spark's public API alone: what it keeps to itself is refused (docs/spark-internals.md)
	STILLSTATE_TEST_SPARK=public $(BIN)/python -m pytest -n $(TEST_PROCESSES) -m 'not kill and not cluster' $(CORE) tests/spark/test_refused.py

# Of a job, of plans and of what is read of Spark's files; `all` is what `make test` and the kinds beside it run.
VERSIONS ?= 4.1 4.2
SUITES ?= core
QUICK := -m 'not long and not parity and not spark_suite and not kill and not cluster and not browser and not servers'
SUITES_core := $(QUICK) $(CORE) tests/spark/test_refused.py tests/spark/test_rebound.py tests/spark/test_frames.py \
  tests/spark/test_queries.py tests/state_runtime/spark tests/state_runtime/pipeline tests/test_spark_internals.py
SUITES_oldest := $(QUICK) tests/spark/test_frames.py tests/spark/test_job.py tests/state_runtime/spark tests/test_spark_internals.py
SUITES_all := -m 'not kill and not cluster and not browser and not servers' tests
.venvs/%/.stillstate-ready: setup.cfg pyproject.toml constraints.txt
	@echo 'Making .venvs/$* and installing PySpark $* (450 MB) and the rest into it: two to five minutes, once.'
	$(PYTHON) -m venv .venvs/$*
	grep -v '^pyspark==' constraints.txt > .venvs/$*/constraints.txt
	.venvs/$*/bin/python -m pip install --quiet --progress-bar on -c .venvs/$*/constraints.txt 'pyspark==$*.*' -e '.[spark,dagster,s3,demo,dev]'
	@touch $@

.PHONY: on-versions
on-versions: setup $(VERSIONS:%=.venvs/%/.stillstate-ready)
	$(BIN)/python -m tests.versions $(VERSIONS) -- -n $(TEST_PROCESSES) $(SUITES_$(SUITES))

.PHONY: test-versions
test-versions: on-versions ## Suites on the other VERSIONS of Spark (4.1 4.2), each in an environment of its own; SUITES=all for every suite (hours)
	$(BIN)/python -m pytest tests/spark/test_across_versions.py

.PHONY: test-oldest
test-oldest: ## A part of it on the oldest version alone, which CI has the time for
	$(MAKE) on-versions VERSIONS=4.1 SUITES=oldest

.PHONY: test-postgres
test-postgres: setup ## The laws of sensors, checks and jobs with Dagster's storage in a real PostgreSQL
	STILLSTATE_TEST_STORAGE=postgres $(BIN)/python -m pytest -n $(TEST_PROCESSES) -m 'not long' tests/orchestration

.PHONY: test-kill
test-kill: setup ## Drivers that are killed at every point and started again
	$(BIN)/python -m pytest -n $(TEST_PROCESSES) -m kill

.PHONY: test-cluster
test-cluster: setup ## Tests on Spark clusters of several processes, started on loopback
	$(BIN)/python -m pytest -m cluster

BROKER := .kafka/.stillstate-ready
$(BROKER): examples/servers/kafka-pom.xml
	@command -v mvn >/dev/null || { echo 'Maven is needed for the broker of Kafka, and not on the path. On Debian: apt-get install maven'; exit 1; }
	@echo 'Getting a Kafka broker (43 MB) into .kafka: half a minute, once.'
	mvn -q -B -f examples/servers/kafka-pom.xml dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/.kafka/lib
	@touch $(BROKER)

.PHONY: kafka
kafka: $(BROKER) ## Get a Kafka broker, for the demo and tests

.PHONY: test-servers
test-servers: setup kafka ## Kafka and PostgreSQL, real ones: sources and sinks, servers that are killed (needs PostgreSQL and Maven; CI runs them if it has the time)
	$(BIN)/python -m pytest -m 'servers and not kill and not long'

BROWSER_READY := $(VENV)/.stillstate-browser-ready
$(BROWSER_READY): $(SETUP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[browser]'
	@touch $(BROWSER_READY)

.PHONY: chromium
chromium:
	@for name in chromium chromium-browser google-chrome google-chrome-stable; do \
	  command -v $$name >/dev/null && exit 0; done; \
	echo 'Chromium is needed and not on the path. On Debian: apt-get install chromium'; exit 1

.PHONY: test-browser
test-browser: chromium $(BROWSER_READY) ## Dagster's real pages over thirty jobs, looked at with Chromium; pictures go to .browser (about 5 minutes)
	$(BIN)/python -m pytest -m browser tests/browser

.PHONY: pictures
pictures: chromium $(BROWSER_READY) ## The same, and the pictures of docs/images anew, those of the demo too (about 10 minutes); look at them before a commit
	STILLSTATE_PICTURES=docs/images $(BIN)/python -m pytest -m browser tests/browser --basetemp /tmp/stillstate-pictures
	$(BIN)/python -m examples.flights.demo_check --work .demo-check --screenshots .browser $(DEMO_ARGS)
	cp .browser/asset-graph.png .browser/checkpoint-plots.png docs/images/

SAMPLE := tests/spark/test_kill.py::test_a_frozen_driver_that_wakes_up_is_fenced_and_publishes_nothing \
  tests/faults/test_kill_uploads.py tests/state_runtime/maintenance/test_kill_moves.py \
  tests/cluster/test_cluster.py::test_a_killed_executor_moves_only_its_own_shards_and_they_come_back
.PHONY: test-sample
test-sample: setup ## A sample of test-kill and test-cluster, which CI has the time for
	$(BIN)/python -m pytest $(SAMPLE)

.PHONY: test-quick
test-quick: setup ## Tests that start no Spark
	$(BIN)/python -m pytest -m 'not spark and not long and not kill and not cluster and not browser and not servers'

.PHONY: test-of
test-of: setup ## The tests nearest to FILE=path: named after it, or with it in their imports (twenty files of tests at most)
	$(BIN)/python -m tests.nearest "$(FILE)"

SOAK ?= 20
SOAK_SEEDS ?= 20000
.PHONY: soak
soak: setup ## SOAK_SEEDS (20,000) of the system simulation, the fault suite with SOAK (20) times as many; failures name their seed
	$(BIN)/python -m tests.simulation.soak --seeds $(SOAK_SEEDS)
	STILLSTATE_SOAK=$(SOAK) $(BIN)/python -m pytest tests/faults tests/state_runtime/snapshot/test_commit_schedule.py tests/state_runtime/driver/test_driver_schedule.py tests/state_runtime/driver/test_inflight_schedule.py -m 'not spark and not kill and not cluster'

.PHONY: guards
guards: setup ## Guards of the runtime taken out one by one: each by the law that must fail without it; red if one is not noticed (about 5 minutes)
	$(BIN)/python -m tests.soak.guards

CYCLES ?= 1000
.PHONY: soak-kill
soak-kill: setup ## A job that is killed CYCLES (1000) times at random moments, with other settings each time; writes tests/soak/reports/kill.json
	$(BIN)/python -m tests.soak.kill --cycles $(CYCLES)

LIVES ?= 1000
.PHONY: soak-inflight
soak-inflight: setup ## LIVES (1000) chains of stops, kills and re-scales with rows in flight, of each law, over new seeds; writes tests/soak/reports/inflight.json
	$(BIN)/python -m tests.soak.inflight --lives $(LIVES)

JOBS ?= 200
.PHONY: soak-house
soak-house: setup ## JOBS (200) jobs under a real Dagster daemon, twenty on a store that hangs and twenty on one that refuses; writes tests/soak/reports/house.json
	$(BIN)/python -m tests.soak.house --jobs $(JOBS)

EPOCHS ?= 100000
.PHONY: soak-long
soak-long: setup ## One driver over EPOCHS (100,000) small epochs: memory, files, maps, threads, heap, red if one keeps growing (hours); writes tests/soak/reports/long.json
	$(BIN)/python -m tests.soak.long --epochs $(EPOCHS)

EDGE_KILLS ?= 200
EDGE_JOBS ?= 2
.PHONY: soak-edges
soak-edges: setup kafka ## EDGE_KILLS (200) kills of drivers, broker and database at each step of each sink, then EDGE_JOBS (2) whole jobs; writes tests/soak/reports/edges.json
	$(BIN)/python -m tests.soak.edges --kills $(EDGE_KILLS) --jobs $(EDGE_JOBS) $(if $(SEED),--seed $(SEED))

MUTANTS_READY := $(VENV)/.stillstate-mutants
$(MUTANTS_READY): $(SETUP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[mutants]'
	@touch $(MUTANTS_READY)

MUTANTS ?= 200
.PHONY: mutants
mutants: $(MUTANTS_READY) ## MUTANTS (200) small changes of the runtime, drawn by SEED, each against the tests that reach it (hours); writes tests/soak/reports/mutants.json
	$(BIN)/python -m tests.soak.mutants --sample $(MUTANTS) $(if $(SEED),--seed $(SEED))

PLANS ?= 100
.PHONY: soak-queries
soak-queries: setup ## PLANS (100) plain queries that are drawn by SEED, on Spark's own streaming and on ours, batch by batch (about 15 s each)
	$(BIN)/python -m tests.soak.queries --plans $(PLANS) $(if $(SEED),--seed $(SEED))

MINUTES ?= 30
SEED ?=
.PHONY: soak-dagster
soak-dagster: setup ## MINUTES (30) of jobs on real flights under Dagster, disturbed in turn by SEED; writes tests/soak/reports/dagster.json
	$(BIN)/python -m tests.soak.under_dagster --minutes $(MINUTES) $(if $(SEED),--seed $(SEED))

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
	$(BIN)/python -m tests.literals
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

.PHONY: reference
reference: setup ## Write docs/settings.md and docs/errors.md anew (after changing a setting or an error)
	$(BIN)/python -m stillstate.orchestration.config.reference

DOCS_VENV := .venv-docs
DOCS_READY := $(DOCS_VENV)/.ready
# The site is made from the text of documents and docstrings: neither PySpark nor Dagster is installed for it.
$(DOCS_READY): setup.cfg constraints.txt
	$(PYTHON) -m venv $(DOCS_VENV)
	$(PYTHON) -c 'import configparser; c = configparser.ConfigParser(); c.read("setup.cfg"); print(c["options.extras_require"]["docs"])' > $(DOCS_VENV)/docs.txt
	$(DOCS_VENV)/bin/python -m pip install --quiet -c constraints.txt -r $(DOCS_VENV)/docs.txt
	@touch $(DOCS_READY)

MKDOCS := NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/mkdocs
.PHONY: docs
docs: $(DOCS_READY) ## Build the documentation into .site/; fails on a link, an anchor or a page of the navigation that is not there
	$(MKDOCS) build --strict

.PHONY: docs-serve
docs-serve: $(DOCS_READY) ## Show the documentation on loopback while you write it
	$(MKDOCS) serve

.PHONY: lock
lock: ## Write the installed versions to constraints.txt (after changing dependencies in setup.cfg)
	@echo '# Versions that the tests ran with; `make setup` installs exactly these. Made by `make lock`.' > constraints.txt
	@$(BIN)/python -m pip freeze --exclude-editable | grep -viE '^(stillstate|pip|setuptools)\b' >> constraints.txt

##@ Measure

.PHONY: bench
bench: setup ## First table: Stillstate against Spark 4.3 on this machine (about 15 minutes)
	$(BIN)/python -m benchmarks.main

.PHONY: bench-engine
bench-engine: setup ## Second table: every kind of state and operator against Spark 4.3, growth, tail, memory (about 35 minutes)
	$(BIN)/python -m benchmarks.engine

.PHONY: bench-versions
bench-versions: setup ## This version beside an older one, BEFORE=<its checkout>, over the second table's workloads, in turns (about 15 minutes)
	$(BIN)/python -m benchmarks.versions $(BEFORE)

.PHONY: bench-nexmark
bench-nexmark: setup ## NEXMark's queries, answers compared first, each against Spark's own streaming query (about 15 minutes)
	$(BIN)/python -m benchmarks.nexmark

.PHONY: bench-checkpoint
bench-checkpoint: setup ## Third table: what a checkpoint costs, changelog on and off, both backends, and Spark (about 45 minutes)
	$(BIN)/python -m benchmarks.checkpoint

.PHONY: bench-recovery
bench-recovery: setup ## Fourth table: restarts from the primary store, from local copies, with twice the shards (about 12 minutes)
	$(BIN)/python -m benchmarks.recovery

.PHONY: bench-load
bench-load: setup ## How long Dagster needs to load 1, 50 and 200 jobs (a minute; needs no Java)
	$(BIN)/python -m benchmarks.load

KILLS ?= 20
.PHONY: bench-restart
bench-restart: setup ## Kill -9 of a driver to its first checkpoint, KILLS (20) times by its supervisor and by Dagster alone (about 20 minutes)
	$(BIN)/python -m benchmarks.restart --times $(KILLS)

.PHONY: bench-branches
bench-branches: setup ## What a branch costs beside an operator of its own job (about 4 minutes)
	$(BIN)/python -m benchmarks.branches

.PHONY: bench-sources
bench-sources: setup ## What named sources and joins anywhere cost beside streams that are united in read() (about 6 minutes)
	$(BIN)/python -m benchmarks.sources

.PHONY: bench-queries
bench-queries: setup ## What a plain query costs beside the same pipeline written in steps (about 6 minutes)
	$(BIN)/python -m benchmarks.queries

CONNECTOR := .kafka/spark/.stillstate-ready
$(CONNECTOR): benchmarks/edges_pom.xml
	mvn -q -B -f benchmarks/edges_pom.xml dependency:copy-dependencies -DoutputDirectory=$(CURDIR)/.kafka/spark
	@touch $@

.PHONY: bench-edges
bench-edges: setup kafka $(CONNECTOR) ## Sinks beside Parquet files, and Kafka on either side beside Spark's connector (about 15 minutes; needs PostgreSQL)
	$(BIN)/python -m benchmarks.edges $(EDGES_ARGS)

.PHONY: bench-inflight
bench-inflight: setup ## Rows in flight: checkpoint times under skew and backlog, restarts, kills, throughput, memory (about 40 minutes)
	$(BIN)/python -m benchmarks.inflight

FLINK := 2.3.0
FLINK_VENV := .venv-flink
FLINK_READY := $(FLINK_VENV)/.ready-$(FLINK)
# The package has Flink's jars and not what reads Parquet and takes SQL over HTTP; those two come from where Maven is set up to look.
$(FLINK_READY): $(SETUP)
	@command -v mvn >/dev/null || { echo 'Maven is needed and not on the path. On Debian: apt-get install maven'; exit 1; }
	$(PYTHON) -m venv $(FLINK_VENV)
	$(FLINK_VENV)/bin/python -m pip install --quiet --progress-bar on --no-deps apache-flink-libraries==$(FLINK)
	for jar in flink-sql-parquet flink-sql-gateway; do \
	  mvn -q -B dependency:copy -Dartifact=org.apache.flink:$$jar:$(FLINK) -DoutputDirectory=$(abspath $(FLINK_VENV))/jars || exit 1; \
	done
	@touch $(FLINK_READY)

.PHONY: bench-flink
bench-flink: setup $(FLINK_READY) ## Five NEXMark queries beside Flink's SQL (an environment of its own, 330 MB), and kills of Flink (about 25 minutes)
	$(BIN)/python -m benchmarks.flink $(FLINK_ARGS)

##@ Tidy up

.PHONY: clean
clean: ## Remove what tests and the demo left (not the virtual environment)
	rm -rf .demo .demo-check .browser .site .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info spark-warehouse
