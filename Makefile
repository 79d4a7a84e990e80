# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
T ?= tests

.PHONY: demo test unit one check bench clean

demo: $(READY)            ## set up, run the bundled tasks on Ray, print the reward table
	$(BIN)/python examples/demo.py

test: $(READY)            ## set up, run all tests (those without a component that this machine lacks are skipped)
	$(BIN)/pytest -q

unit: $(READY)            ## the tests that need neither Ray nor Docker
	$(BIN)/pytest -q -m "not ray and not docker"

one: $(READY)             ## one test: make one T=tests/test_scheduler.py::test_a_second_arrival_of_a_key_is_dropped
	$(BIN)/pytest -q $(T)

check: $(READY)           ## formatting, lint, types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(READY)           ## benchmarks of the spine, with peers in the same run
	$(BIN)/python -m benchmarks

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	touch $@

clean:
	rm -rf $(VENV) .cache .mypy_cache .ruff_cache .hypothesis
