# Everything runs in .venv, which the first call makes (scripts/bootstrap.py).
PYTHON ?= python3
RUN := .venv/bin/python

.PHONY: help setup demo loadtest-demo observe prometheus node chart chart-tools test test-gpu lint image clean

help: ## What can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

setup:  ## Make .venv (quick when it is up to date)
	@$(PYTHON) scripts/bootstrap.py

demo: setup ## The real server on the reference models: plain decoding, then each method
	@$(RUN) -m sglang_ext.demo

loadtest-demo: setup ## A load test of plain decoding, DSPARK, CARRYOVER_DSPARK with its report, build/loadtest/index.html
	@$(RUN) -m sglang_ext_loadtest.demo

observe: setup prometheus ## A server with prompts trickling in, and Prometheus with the rules, until Ctrl-C
	@$(RUN) -m dashboards.observe

prometheus: setup
	@$(RUN) -m dashboards.tools > /dev/null

# First, since no package of Python's brings it.
node:
	@command -v node > /dev/null && command -v npm > /dev/null || { echo "make: the chart is validated with schemas from \
	npm, and node or npm is not on PATH; install Node.js 18 or newer (nodejs.org; Debian: apt-get install npm)." >&2; \
	exit 2; }

chart: node setup prometheus chart-tools ## Lint, render and validate the Helm chart with helm 3 and 4
	@$(RUN) helm/sync.py --check
	@$(RUN) -m pytest tests/chart

chart-tools: setup
	@$(RUN) helm/tools.py > /dev/null

test: node setup prometheus chart-tools ## All tests (about 25 minutes on two cores)
	@$(RUN) -m pytest

# On a GPU machine with SGLang, pytest and pytest-timeout in PYTHON's own environment: .venv holds a CPU build of torch.
test-gpu: ## Tests that need a GPU, with PYTHON's own SGLang; record in build/gpu-tests/tests.json, ARGS= for pytest
	@$(PYTHON) -m pytest tests/gpu --junitxml build/gpu-tests/junit.xml $(ARGS)

lint: setup ## ruff and mypy
	@$(RUN) -m ruff check .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy

image: ## The container images, with docker, podman or buildah; SGLANG_IMAGE=, PYTHON_IMAGE=, TARGETS=
	@$(PYTHON) scripts/image.py

clean: ## Remove build results (not .venv)
	rm -rf build .pytest_cache .mypy_cache .ruff_cache .hypothesis
