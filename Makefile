# Everything a newcomer or CI runs. `make setup` builds .venv once and again when requirements change.
PYTHON ?= python3
OLDEST_PYTHON ?= $(PYTHON)
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1
# Else each process that imports torch compiles it again.
unexport PYTHONDONTWRITEBYTECODE
# Files of tests over processes; what a file's tests share is made once. More than cores, as they wait for each other.
WORKERS ?= 4
SPREAD := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
# Slow tests have little to share; more at once than this, and they wait for each other in vain.
SLOW_WORKERS ?= 3
SLURM_TESTS ?= slurm

.DEFAULT_GOAL := help
PAGE := scheduler/dashboard/page
.PHONY: help setup page demo test test-slow test-sweeps test-browser test-gpu test-cluster test-slurm test-oldest explore coverage check docs dist bench bench-gpu clean

help:
	@echo "make demo      set up and run the main job: an Optuna sweep of elastic trials"
	@echo "make test      set up and run the tests, in four processes (WORKERS=n for others)"
	@echo "make test-slow run the slow tests: whole sweeps that are killed and resumed"
	@echo "make test-gpu  run the tests that need an NVIDIA GPU; some need two"
	@echo "make test-cluster  run the tests on the Kubernetes cluster that KUBECONFIG names"
	@echo "make test-slurm  run the tests on the Slurm that SLURM_CONF names: one of your own, where you are root"
	@echo "make test-oldest  a part of the training core's tests with the oldest torch, and with OLDEST_PYTHON=python3.10"
	@echo "make explore   the property tests with other examples than make test's"
	@echo "make coverage  which lines make test runs, in every process that it starts"
	@echo "make check     ruff, mypy, the import contracts, spelling and prose"
	@echo "make page      the web page that a scheduler serves; needs Node.js 20 or newer"
	@echo "make docs      the documentation as a site, in docs/_build/html; fails on what is stale"
	@echo "make dist      wheel and sdist, in dist"
	@echo "make bench     benchmarks against named peers; JSON in benchmarks/results"
	@echo "make bench-gpu steps, checkpoints and measured times on a GPU"
	@echo "make clean     remove the environment and everything the demo wrote"

setup: $(VENV)/.ready

$(VENV)/.ready: scripts/setup.sh requirements/locked.txt pyproject.toml
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh

$(VENV)/.demo: scripts/setup.sh requirements/locked.txt pyproject.toml
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh demo

page: $(PAGE)/built/index.html

$(PAGE)/built/index.html: $(PAGE)/package-lock.json $(PAGE)/index.html $(wildcard $(PAGE)/*.ts $(PAGE)/*.json $(PAGE)/src/* $(PAGE)/src/views/*)
	@command -v npm >/dev/null || { echo "npm is missing; on Debian and Ubuntu: apt install nodejs npm (20 or newer)" >&2; exit 1; }
	cd $(PAGE) && npm ci --no-audit --no-fund --silent && npm run build --silent
	@touch $@

demo: $(VENV)/.demo
	@rm -rf elastune-demo
	@$(BIN)/python examples/digits.py
	@$(BIN)/elastune simulate --recorded elastune-demo/state

test: setup
	$(BIN)/python -m pytest $(SPREAD)

test-slow: test-sweeps test-browser

test-sweeps: setup page
	$(BIN)/python -m pytest -n $(SLOW_WORKERS) --dist worksteal -m "slow and not browser and not gpu and not cluster and not slurm"

test-browser: setup page
	$(BIN)/python -m pytest -m "browser and not gpu and not cluster"

test-gpu: setup
	$(BIN)/python -m pytest -m gpu

test-cluster: setup
	$(BIN)/python -m pytest -m "cluster and not gpu"

test-slurm: setup
	$(BIN)/python -m pytest -m "$(SLURM_TESTS)"

$(VENV)-oldest/.ready: scripts/setup.sh requirements/locked.txt pyproject.toml
	@PYTHON="$(OLDEST_PYTHON)" VENV="$(VENV)-oldest" bash scripts/setup.sh oldest

test-oldest: $(VENV)-oldest/.ready
	$(VENV)-oldest/bin/python -m pytest -p no:cacheprovider $(addprefix tests/dist_core/test_,$(addsuffix .py,\
		training training_loops reductions checkpoint synchronized_batch_norm old_torch))

explore: setup
	$(BIN)/python -m pytest $(SPREAD) --hypothesis-profile=explore --timeout=1800 $$(grep -rlE "^from hypothesis" tests --include="test_*.py")

coverage: setup
	rm -rf .coverage-data && mkdir .coverage-data
	$(BIN)/python -m coverage run -m pytest $(SPREAD)
	$(BIN)/python -m coverage combine -q
	$(BIN)/python -m coverage report --skip-covered

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell
	$(BIN)/python -m scripts.check_prose

docs: setup
	$(BIN)/python -m scripts.check_docs
	$(BIN)/sphinx-build -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

dist: setup page
	rm -rf dist
	$(BIN)/python -m build --no-isolation

bench: setup
	$(BIN)/python -m benchmarks.run

bench-gpu: setup
	$(BIN)/python -m benchmarks.run gpu

clean:
	rm -rf $(VENV) $(VENV)-oldest elastune-demo .elastune docs/_build dist .coverage-data $(PAGE)/built $(PAGE)/node_modules
