# Everything a newcomer or CI runs. `make setup` builds .venv once and again when requirements change.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup demo test test-slow test-cluster check bench clean

help:
	@echo "make demo      set up and run the main job: an Optuna sweep of elastic trials (under 3 minutes)"
	@echo "make test      set up and run the tests"
	@echo "make test-slow run the slow tests: whole sweeps that are killed and resumed"
	@echo "make test-cluster  run the tests on the Kubernetes cluster that KUBECONFIG names"
	@echo "make check     ruff, mypy and the import contracts"
	@echo "make bench     benchmarks against named peers; JSON in benchmarks/results"
	@echo "make clean     remove the environment and everything the demo wrote"

setup: $(VENV)/.ready

$(VENV)/.ready: scripts/setup.sh requirements/locked.txt pyproject.toml
	@PYTHON="$(PYTHON)" VENV="$(VENV)" bash scripts/setup.sh

demo: setup
	@$(BIN)/python examples/digits.py

test: setup
	$(BIN)/python -m pytest

test-slow: setup
	$(BIN)/python -m pytest -m "slow and not gpu and not cluster"

test-cluster: setup
	$(BIN)/python -m pytest -m "cluster and not gpu"

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python -m benchmarks.run

clean:
	rm -rf $(VENV) elastune-demo .elastune
