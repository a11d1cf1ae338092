# Every target does its own set-up from a bare Python >= 3.11 (and a package index).
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test lint test-engines compose-check chaos fuzz bench docs lock clean

demo: $(STAMP)            ## three emulated replicas, 32 agents, three policies; table and picture
	$(BIN)/warmroute demo $(ARGS)

test: $(STAMP) lint       ## floors, style, types, tests
	$(BIN)/python -m pytest -n 4 --dist loadgroup $(ARGS)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test-engines: $(STAMP)    ## real vLLM replicas (CPU build, installed into .engines on first use)
	bash tests/engines/install.sh
	$(BIN)/python -m pytest tests/engines -o timeout=900 -o timeout_method=signal $(ARGS)

compose-check: $(STAMP)   ## the compose stack as processes; what each query of the dashboard returns
	$(BIN)/python -m tests.compose.queries

chaos: $(STAMP)           ## everything breaks at once, under load; ARGS="--minutes 10 --seed 7"
	$(BIN)/python -m loadtest.chaos $(ARGS)

SECONDS ?= 60
fuzz: $(STAMP)            ## every fuzz target for SECONDS each
	WARMROUTE_FUZZ_SECONDS=$(SECONDS) $(BIN)/python -m pytest tests/fuzz -o timeout=0 $(ARGS)

bench: $(STAMP)           ## every budget; writes docs/benchmarks.md
	$(BIN)/python -m loadtest.bench $(ARGS)

docs: $(STAMP)            ## regenerate what is made from the code
	$(BIN)/python -m loadtest.docs
	$(BIN)/python docker/grafana/dashboard.py

$(STAMP): requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check -r requirements-dev.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check --no-deps -e .
	touch $@

lock:                     ## pin anew (uv writes no index address into its output)
	uv pip compile -q --no-header --no-annotate -c constraints.txt pyproject.toml -o requirements.txt
	uv pip compile -q --no-header --no-annotate -c constraints.txt -c requirements.txt --extra dev pyproject.toml -o requirements-dev.txt

clean:
	rm -rf $(VENV) .engines build *.egg-info demo-out
