# Every target does its own set-up from a bare Python >= 3.11 (and a package index).
PYTHON ?= python3
# Apart from the .venv of who uses warmroute from this checkout.
VENV   := build/venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
DEMO   := $(VENV)/.installed-for-demo
# Byte-compiling all of transformers takes longer than a demo: what is imported compiles itself.
PIP    := $(BIN)/python -m pip install -q --disable-pip-version-check --no-compile

# Compiled code is kept, whatever the shell says: tests start a hundred processes of it.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo package test linted tested lint style types floors test-engines lower-bounds compose-real chaos fuzz prove compat bench docs pictures site lock audit sbom clean

demo: $(DEMO)             ## 24 agents, three simulated replicas, three policies: a verdict and a table
	$(BIN)/warmroute demo $(ARGS)

test: $(STAMP)            ## floors, style, types, beside them the tests; what fails is said at the end
	@mkdir -p build && rm -f build/lint
	@$(MAKE) --no-print-directory -j2 -k linted tested || { cat build/lint 2>/dev/null; false; }

# Where nothing is kept from last time, mypy takes half a minute, of one processor.
linted:
	@MAKEFLAGS= $(MAKE) --no-print-directory lint >build/lint 2>&1
	@cat build/lint && rm build/lint

# Real processes on a busy machine: what fails runs once more, almost alone, and both are shown.
# A test that passes only then is a bug, of the test or of ours; one that fails twice fails the run.
AGAIN = { [ $$? -eq 1 ] && echo "== once more, what failed above:" && $(1) --last-failed --last-failed-no-failures none; }

# A file goes to one worker, which makes what its tests share; conftest.py has the files' order.
BY_FILE := -n 4 --dist loadfile --no-loadscope-reorder

TESTED = $(BIN)/python -m pytest $(BY_FILE) $(ARGS)
tested:
	$(TESTED) || $(call AGAIN,$(TESTED))

lint: $(STAMP)            ## side by side: none of the three uses two cores
	@$(MAKE) --no-print-directory -j3 style types floors

style:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types:
	$(BIN)/mypy

floors:
	$(BIN)/lint-imports

WITH_ENGINES = $(BIN)/python -m pytest tests/engines -n 2 --dist loadfile --no-loadscope-reorder -o timeout=900 -o timeout_method=signal $(ARGS)
test-engines: $(STAMP)    ## real vLLM replicas (CPU build, installed into .engines on first use)
	bash tests/engines/install.sh
	bash tests/engines/install_clients.sh
	bash tests/engines/install_aiperf.sh
	$(WITH_ENGINES) || $(call AGAIN,$(WITH_ENGINES))

lower-bounds:             ## the oldest releases that pyproject.toml allows, in a venv of their own
	bash tests/lower_bounds.sh

package:                  ## wheel and sdist into build/dist; the wheel, used in a bare environment
	$(PYTHON) tests/package/check.py $(ARGS)

compose-real: $(STAMP)    ## the image and the compose files in containers; starts a Docker daemon if need be
	bash tests/containers/daemon.sh run $(BIN)/python -m pytest tests/containers -o timeout=300 $(ARGS)

chaos: $(STAMP)           ## everything breaks at once, under load; ARGS="--minutes 10 --seed 7"
	$(BIN)/python -m loadtest.dev.chaos $(ARGS)

SECONDS ?= 60
fuzz: export WARMROUTE_FUZZ_SECONDS = $(SECONDS)
fuzz: $(STAMP)            ## every fuzz target for SECONDS each; property tests with all their examples
	$(BIN)/python -m pytest tests/fuzz -o timeout=0 $(ARGS)
	$(BIN)/python -m pytest -m hypothesis --ignore tests/fuzz $(BY_FILE) -o timeout=0

prove: $(STAMP)           ## ids of 1,000 generated requests a model family, all APIs, against vLLM's own
	bash tests/engines/install.sh
	$(BIN)/python -m tests.tokens.prove_families prove --count 500 $(ARGS)
	$(BIN)/python -m tests.tokens.prove_families prove --count 500 --newest $(ARGS)

compat: $(STAMP)          ## what the newest vLLM changes of what warmroute assumes; a 340 MB download
	bash tests/engines/install.sh
	$(BIN)/python -m tests.engines.compat $(ARGS)

bench: $(STAMP)           ## every budget; writes docs/research/benchmarks.md
	$(BIN)/python -m loadtest.dev.bench $(ARGS)

docs: $(STAMP)            ## regenerate what is made from the code
	$(BIN)/python -m loadtest.dev.docs
	$(BIN)/python docker/grafana/dashboard.py
	$(BIN)/python docker/helm/generate.py

pictures: $(STAMP)        ## the pictures and the recorded output of the docs; four minutes
	$(BIN)/python -m tests.pictures

site: $(STAMP)            ## the documentation as a site, in build/site
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Developers' pins contain the demo's.
$(STAMP): REQUIREMENTS := requirements-dev.txt
$(DEMO): REQUIREMENTS := requirements-demo.txt
$(STAMP) $(DEMO): requirements-demo.txt requirements-dev.txt pyproject.toml
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) --require-hashes -r $(REQUIREMENTS)
	$(PIP) --no-deps --no-build-isolation -e .
	touch $@ $(DEMO)

PIN := uv pip compile -q --universal --no-strip-extras --no-header --no-annotate --generate-hashes -c constraints.txt
lock:                     ## pin anew, with hashes (uv writes no index address into its output)
	$(PIN) pyproject.toml -o requirements.txt
	$(PIN) -c requirements.txt --extra dev pyproject.toml -o requirements-dev.txt
	echo setuptools | $(PIN) -c requirements-dev.txt pyproject.toml - -o requirements-demo.txt
	$(PIN) -c requirements-dev.txt --extra experiments pyproject.toml -o docker/requirements-experiments.txt
	$(PIN) -c requirements-dev.txt --extra models pyproject.toml -o docker/requirements-models.txt
	$(PIN) -c requirements-dev.txt --extra otel pyproject.toml -o docker/requirements-otel.txt
	echo setuptools | $(PIN) -c requirements-dev.txt - -o docker/requirements-build.txt

AUDIT := build/audit
$(AUDIT)/bin/pip-audit:
	$(PYTHON) -m venv $(AUDIT)
	$(AUDIT)/bin/python -m pip install -q --disable-pip-version-check pip-audit cyclonedx-bom

audit: $(AUDIT)/bin/pip-audit  ## known vulnerabilities of what is pinned; asks a public database
	$(AUDIT)/bin/pip-audit --disable-pip --require-hashes -r requirements.txt

sbom: $(AUDIT)/bin/pip-audit   ## what the image has in it: build/sbom.cdx.json (CycloneDX)
	$(AUDIT)/bin/cyclonedx-py requirements requirements.txt --pyproject pyproject.toml \
	  --output-reproducible --of JSON -o build/sbom.cdx.json

clean:
	rm -rf $(VENV) .engines build *.egg-info demo-out
