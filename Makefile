# The interface. Every target is one line that calls a script; settings are given as make NAME=value, in the
# environment, in .env, or by a preset (make settings lists them). make itself never reads an env file.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Names given on the command line, so that a misspelt one is refused; make exports their values by itself.
export MAKE_SETTINGS := $(foreach name,$(.VARIABLES),$(if $(filter command line,$(origin $(name))),$(name)))
export VENV ?= $(CURDIR)/.venv
PY := $(VENV)/bin/python

##@ Start
.PHONY: help
help: ## This list
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "%s%s\n", n++ ? "\n" : "", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' Makefile

.PHONY: setup
setup: ## .venv with pinned packages and the torch build that fits this machine
	@scripts/setup.sh

##@ Train
.PHONY: train
train: setup ## Train or resume RUN_NAME (PRESET=tiny), evaluate, sample, plot; DETACH=1 frees the terminal
	@scripts/train.sh

.PHONY: train-node
train-node: setup ## One node of a run on several machines (NODES, NODE_RANK, MASTER_ADDR); docs/two-nodes.md
	@scripts/train.sh node

.PHONY: data
data: setup ## The token shards of the preset's mixture, verified
	@"$(PY)" -m train.prepare data

.PHONY: data-verify
data-verify: setup ## Check every hash of those shards
	@"$(PY)" -m train.prepare verify

.PHONY: data-report
data-report: setup ## What is in them: lengths, duplicates, windows to read, overlaps with REPORT_TASKS
	@"$(PY)" -m train.report

##@ Watch
.PHONY: runs
runs: setup ## All runs: state, step, loss
	@"$(PY)" -m train.status runs

.PHONY: status
status: setup ## What RUN_NAME is doing now
	@"$(PY)" -m train.status status

.PHONY: attach
attach: setup ## Follow the log of RUN_NAME; Ctrl-C leaves it running
	@"$(PY)" -m train.status attach

.PHONY: stop
stop: setup ## Tell RUN_NAME to save and stop
	@"$(PY)" -m train.status stop

.PHONY: plots
plots: setup ## loss_curves.html, loss_curves.png and CSV of RUN_NAME
	@"$(PY)" -m analysis.plots

.PHONY: mirror
mirror: setup ## Upload RUN_NAME to Weights & Biases now; a run in training does so by itself
	@"$(PY)" -m train.mirror

##@ Measure
.PHONY: bench
bench: setup ## Speed of a training step as table and JSON (BENCH_SHAPES, BENCH_ROUNDS, PEERS_DIR)
	@scripts/bench.sh

.PHONY: gpu-check
gpu-check: setup-dev ## What only a GPU can show, and the benchmark, in under 9 minutes
	@scripts/gpu_check.sh

##@ Settings
.PHONY: check-env
check-env: setup ## Check the settings from every source, all problems at once
	@"$(PY)" -m train.config check

.PHONY: settings
settings: setup ## Every setting with its value, as the targets would see it
	@"$(PY)" -m train.config show

.PHONY: env-example
env-example: setup ## Write .env.example from train/config.py
	@"$(PY)" -m train.env_example > .env.example

##@ Develop
.PHONY: setup-dev
setup-dev: ## The same .venv with what tests and linters need
	@scripts/setup.sh --dev

.PHONY: test
test: setup-dev ## All tests but those that take long
	@scripts/test.sh

.PHONY: test-faults
test-faults: setup-dev ## Each fault of docs/faults.md, and CHAOS_MINUTES=10 of random kills; 20 minutes
	@scripts/test_faults.sh

.PHONY: lint
lint: setup-dev ## ruff, mypy, shellcheck; no secret in tree and history
	@scripts/lint.sh

.PHONY: lock
lock: setup-dev ## Pin the newest packages that the .in files allow, with hashes
	@scripts/lock.sh --upgrade
