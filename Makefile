# Everything happens in .venv; `make` lists what there is.
SHELL := /bin/bash
PY ?= python3
VENV := .venv
BIN := $(VENV)/bin
RUNFILE ?= deploy/examples/quickstart.toml
export OMP_NUM_THREADS ?= 1
export NUMBA_NUM_THREADS ?= 1
export TOKENIZERS_PARALLELISM ?= false
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup run drill smollm2 test test-faults test-postgresql check format bench sim clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 18

setup: $(VENV)/.ready ## make .venv with pinned packages, and install etcd where that is possible
	@deploy/setup/etcd.sh

$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "== setting up $(VENV) (a few minutes the first time)"
	@$(PY) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "error: Python 3.11 or newer is needed; set PY=python3.11"; exit 1; }
	@test -x $(BIN)/python || $(PY) -m venv $(VENV)
	@deploy/setup/packages.sh $(BIN)/python
	@touch $@

run: setup ## train a small model with RL on this machine and watch its reward rise
	@$(BIN)/whimbrel up $(RUNFILE) $(ARGS)

drill: setup ## the same while a rollout, the trainer, the controller and etcd are killed in turn
	@$(BIN)/whimbrel drill $(RUNFILE) $(ARGS)

smollm2: setup ## fetch SmolLM2-135M-Instruct for deploy/examples/smollm2.toml
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[gguf]'
	@mkdir -p .whimbrel/models
	@$(BIN)/python deploy/setup/smollm2.py .whimbrel/models/smollm2-135m-instruct

test: setup ## the fast rings: unit, contract, API, processes, browser where Chromium is installed
	@$(BIN)/python -m pytest -n 2 --dist loadfile -m "not faults" $(ARGS)

test-faults: setup ## real processes under real faults (slow)
	@$(BIN)/python -m pytest -m faults $(ARGS)

check: setup ## format, lint, types, imports
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/pyright
	@$(BIN)/lint-imports

format: setup ## format and fix what can be fixed
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench: setup ## run all benchmarks, or BENCH=name
	@$(BIN)/python -m benchmarks $(or $(BENCH),all) --json $(ARGS)

sim: setup ## run the simulated fleet with SEED=n
	@$(BIN)/python -m tests.core.simulate --seed $(or $(SEED),0) $(ARGS)

clean: ## remove .venv and local state
	rm -rf $(VENV) .whimbrel
