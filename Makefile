# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
T ?= tests
UNIT := $(addprefix tests/test_,$(addsuffix .py,scheduler suspects leases permits exchange estimators intervals rewards \
    match options tasks pickle single_turn taskcheck imports peers_report))

.PHONY: demo test test-all test-slow unit one check bench bench-peers chaos clean

demo: $(READY)            ## set up, run the bundled tasks on Ray, print the reward table
	$(BIN)/python examples/demo.py

test: $(READY)            ## set up, run the tests (those without a component that this machine lacks are skipped)
	$(BIN)/pytest -q -m "not slow"

test-slow: $(READY)       ## attacks, kills, leftovers, whole clusters, real agent programs: some fifteen minutes
	$(BIN)/pytest -q -m slow

test-all: $(READY)        ## both: some twenty minutes
	$(BIN)/pytest -q

unit: $(READY)            ## decisions, formulas and parsers: no sandbox, no server, no Ray
	$(BIN)/pytest -q $(UNIT)

one: $(READY)             ## one test: make one T=tests/test_scheduler.py::test_a_second_arrival_of_a_key_is_dropped
	$(BIN)/pytest -q $(T)

check: $(READY)           ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)           ## benchmarks of the spine, with peers in the same run
	$(BIN)/python -m benchmarks

bench-peers: $(READY)     ## the peers at the same work in the same run; with Docker where a daemon answers: some 12 minutes
	$(BIN)/python -m benchmarks.peers --write-readme

chaos: $(READY)           ## 200 kills at random moments: no row lost or doubled, nothing left (an hour; root); SEED=1 KILLS=200
	$(BIN)/python -m tests.chaos --seed $(or $(SEED),1) --kills $(or $(KILLS),200)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .hypothesis
