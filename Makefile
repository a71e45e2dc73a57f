# The interface. Most targets are one line that starts a module or script; settings are given as make NAME=value, in the
# environment, in .env, or by a preset (make settings lists them). make itself never reads an env file.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory
.NOTPARALLEL: # each target uses all cores, and targets on one command line build on each other

# What is set for other programs of the user must not change what bash, grep, git and Python do here.
unexport BASH_ENV CDPATH GREP_OPTIONS GIT_DIR GIT_WORK_TREE GIT_INDEX_FILE
unexport $(filter-out PYTHON PYTHONDONTWRITEBYTECODE PYTHONPYCACHEPREFIX,$(filter PYTHON%,$(.VARIABLES)))

# Settings from the command line reach Python as they were typed, but for blanks at the start of a
# value, which make drops: $(value ...) does not expand a dollar, and := does not expand it later.
# Their names tell which they are.
export MAKE_SETTINGS := $(strip $(foreach _,$(.VARIABLES),$(if $(filter command line,$(origin $_)),$_)))
$(foreach _,$(MAKE_SETTINGS),$(eval override $_ := $$(value $_))$(eval export $_))
export MAKE_GOALS := $(or $(MAKECMDGOALS),help)
export MAKE_TARGET = $@
ifeq ($(VENV),)
export VENV := $(CURDIR)/.venv
endif
# bash expands it, so a path may hold blanks, quotes and dollars.
PY := "$$VENV/bin/python"

# The settings room needs no packages, so it also works before make setup.
REFUSE := if [ -x $(PY) ]; then $(PY) -m settings refuse; else python3 -m settings refuse; fi
# For targets that take no settings. A target that another one needs is not checked: its settings are the other's.
REFUSE_SETTINGS = $(if $(MAKE_SETTINGS),$(if $(filter $@,$(or $(MAKECMDGOALS),help)),@$(REFUSE)))
# Before setup-finetune installs anything. A Python that is too old to run the check is reported by setup.
TUNING = $(firstword $(filter finetune finetune-node,$(MAKE_GOALS)))
CHECK_FINETUNE = $(if $(TUNING),@if [ -x $(PY) ]; then python=$(PY); else python=python3; fi; \
	! "$$python" -c 'import tomllib' 2> /dev/null || MAKE_TARGET=$(TUNING) "$$python" -m settings refuse finetune)

.DEFAULT:
	@$(REFUSE)

# In the environment, so that bash prints it as it is.
define HELP
Pure Transformer: pretrain a transformer on whatever GPUs you have.

  make train             Train on this machine. Run the same command to resume.
  make train DATA=FILE   Train on your own text.
  make plan PRESET=NAME  Show what a run takes before you pay for it.
  make status            Show what a run is doing. make monitor follows it.
  make plots             Draw the loss curves of a run or of a trainer's log.
  make compare RUNS=a,b  Show which run is better, or that it is not decided.
  make sample            Generate text. make chat talks to the model.
  make eval              Score a run: bits per byte and CORE.
  make export            Convert to Hugging Face format. make upload publishes.
  make finetune          Fine-tune MODEL on DATA, all weights or LoRA.
  make train-8xa100      Train on a Kubernetes cluster.
  make doctor            Check this machine and the cluster.
  make certify           Prove that runs resume bit for bit on this machine.
  make test              Run the tests of this repository.

Set anything with make NAME=value, in the environment or in .env.
All settings: make settings. What one means: make settings NAME=BATCH_TOKENS
All targets: make help ALL=1. Documentation: docs/README.md
endef
export HELP

##@ Start
.PHONY: help
help: ## Show the everyday commands; ALL=1 lists every target
	$(REFUSE_SETTINGS)
ifeq ($(ALL),1)
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "%s%s\n", n++ ? "\n" : "", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' Makefile
else
	@echo "$$HELP"
endif

.PHONY: setup
setup: ## Install pinned packages and the torch build for this machine
	$(REFUSE_SETTINGS)
	@bash scripts/setup.sh

##@ Before a run
.PHONY: plan
plan: setup ## Compute time, memory, disk and cost of a run: docs/plans.md
	@$(PY) -m plan

.PHONY: doctor
doctor: setup ## Check this machine and the cluster (WHERE); PROBE=1 measures
	@$(PY) -m doctor

.PHONY: net-probe
net-probe: setup ## Measure the network between nodes (NODES, NODE_RANK, WHERE)
	@$(PY) -m doctor.net_probe

##@ Train
.PHONY: train
train: setup ## Train or resume a run on DATA (DETACH=1: in the background)
	@$(PY) -m scripts.train

.PHONY: train-node
train-node: setup ## Train one node of several machines: docs/two-nodes.md
	@$(PY) -m scripts.train node

.PHONY: train-2xh100
train-2xh100: setup ## Train PRESET=d16-2xh100 on 2 GPUs here and sample their power
	@$(PY) -m scripts.train 2xh100

.PHONY: train-8xa100
train-8xa100: setup ## Train PRESET=xlarge-8xa100 on a cluster: docs/kubernetes.md
	@$(PY) -m k8s.launch

.PHONY: lighthouse
lighthouse: setup ## Serve SYNC=diloco sites until Ctrl-C: docs/four-sites.md
	@$(PY) -m train.diloco.lighthouse

.PHONY: finetune
finetune: setup-finetune ## Fine-tune MODEL on DATA, all weights or LoRA: docs/finetune.md
	@$(PY) -m scripts.train finetune

.PHONY: finetune-node
finetune-node: setup-finetune ## Fine-tune one node of several (NODES, NODE_RANK, MASTER_ADDR)
	@$(PY) -m scripts.train finetune node

.PHONY: finetune-k8s
finetune-k8s: setup ## Fine-tune MODEL on DATA on a cluster: docs/finetune.md
	@$(PY) -m k8s.launch finetune

.PHONY: pipeline
pipeline: setup-finetune ## Pretrain, mid-train, fine-tune and evaluate: docs/pipeline.md
	@bash scripts/pipeline.sh

.PHONY: data
data: setup ## Prepare the token shards of DATA_MIX, here or WHERE=cluster
	@$(PY) -m k8s.launch data

.PHONY: data-verify
data-verify: setup ## Check every hash of the token shards
	@$(PY) -m train.data.prepare verify

.PHONY: data-report
data-report: setup ## Report lengths, duplicates and overlaps with CORE tasks
	@$(PY) -m train.data.audit.report

##@ Watch, here or in the cluster (WHERE)
.PHONY: runs
runs: setup ## List all runs on this machine: state, step, loss, size
	@$(PY) -m record.status runs

.PHONY: status
status: setup ## Show what RUN_NAME is doing
	@$(PY) -m k8s.jobs status

.PHONY: monitor
monitor: setup ## Watch RUN_NAME live; ONCE=1 prints once: docs/monitor.md
	@$(PY) -m monitor

.PHONY: attach
attach: setup ## Follow the log of RUN_NAME; Ctrl-C leaves it running
	@$(PY) -m k8s.jobs attach

.PHONY: logs
logs: setup ## Print the log of node NODE_RANK; ONLY=metrics or ONLY=errors
	@$(PY) -m k8s.jobs logs

.PHONY: describe
describe: setup ## Show the shape, settings, pods and events of RUN_NAME
	@$(PY) -m k8s.jobs describe

.PHONY: checkpoints
checkpoints: setup ## List the checkpoints of RUN_NAME and verify their hashes
	@$(PY) -m k8s.jobs checkpoints

.PHONY: gpu-sampler
gpu-sampler: setup ## Sample the power of the GPUs here until Ctrl-C
	@$(PY) -m monitor.gpu_sampler

.PHONY: stop
stop: setup ## Save a checkpoint and stop RUN_NAME
	@$(PY) -m k8s.jobs stop

.PHONY: restart
restart: setup ## Stop RUN_NAME and start it again with the present settings
	@$(PY) -m k8s.jobs restart

.PHONY: fetch-run
fetch-run: setup ## Copy a run from the cluster: record, logs, checkpoint (STEP)
	@$(PY) -m k8s.jobs fetch-run

.PHONY: sites
sites: setup ## List the cluster's GPUs by site and product
	@$(PY) -m k8s.cluster.nodes

.PHONY: bad-nodes
bad-nodes: setup ## List the nodes that pods refuse: docs/kubernetes.md
	@$(PY) -m k8s.jobs bad-nodes

.PHONY: clear-bad-nodes
clear-bad-nodes: setup ## Let pods run on the nodes of `make bad-nodes` again
	@$(PY) -m k8s.jobs clear-bad-nodes

.PHONY: plots
plots: setup ## Draw loss curves of RUN_NAME, or of LOG_DIR: docs/plots.md
	@$(PY) -m k8s.jobs plots

.PHONY: compare
compare: setup ## Compare RUNS over seeds; FIGURE=loss.pdf: docs/compare.md
	@$(PY) -m analysis.compare

.PHONY: energy
energy: setup ## Compute kWh and cost of RUN_NAME from its GPU samples
	@$(PY) -m analysis.energy

.PHONY: mirror
mirror: setup ## Send RUN_NAME to W&B and TRACKERS now: docs/trackers.md
	@$(PY) -m train.hooks.trackers

##@ Use
.PHONY: eval
eval: setup ## Score bits per byte and CORE of RUN_NAME: docs/evaluation.md
	@$(PY) -m train.launcher finetune.evaluate

.PHONY: sample
sample: setup ## Generate text from RUN_NAME or INIT_FROM (PROMPT, SAMPLES)
	@$(PY) -m finetune.chat sample

.PHONY: chat
chat: setup-finetune ## Talk to RUN_NAME or INIT_FROM; PROMPT sends one message
	@$(PY) -m finetune.chat

.PHONY: export
export: setup ## Convert RUN_NAME to Hugging Face format: docs/export.md
	@$(PY) -m export

.PHONY: upload
upload: setup ## Publish an export on the Hub (HUB_REPO); DRY_RUN=1 lists it
	@$(PY) -m export.upload

##@ Image
.PHONY: image
image: setup ## Build the container image of this commit: docs/image.md
	@$(PY) -m scripts.image build

.PHONY: push
push: setup ## Push the image to IMAGE and record its digest for the pods
	@$(PY) -m scripts.image push

.PHONY: image-test
image-test: setup-dev ## Build the image, then train, kill and resume in it
	$(REFUSE_SETTINGS)
	@bash scripts/image_test.sh

##@ Measure
.PHONY: bench
bench: setup ## Measure the speed of a training step (BENCH_SHAPES, peers/)
	@$(PY) -m train.tune 1 bench.run

.PHONY: bench-quality
bench-quality: setup ## Compare bits per byte with nanoGPT's recipe (peers/nanoGPT)
	@$(PY) -m train.tune 1 bench.quality

.PHONY: wan-lab
wan-lab: setup ## Emulate four sites on a WAN here, DDP and DiLoCo; needs root
	@$(PY) -m train.tune --cpu 4 bench.wan_lab

.PHONY: gpu-check
gpu-check: setup-dev ## Run the GPU tests and benchmarks, or parts of them (GPU_CHECK)
	@bash scripts/gpu_check.sh

.PHONY: gpu-rehearsal
gpu-rehearsal: setup-finetune ## Run the CUDA path without a GPU (CASE="h100 fsdp", ALL=1)
	$(REFUSE_SETTINGS)
	@$(PY) -W ignore -m bench.gpu_rehearsal $(if $(filter 1,$(ALL)),--all) $${CASE-}

.PHONY: certify
certify: setup ## Prove exact resumes here; CHECK=FILE checks: docs/certify.md
	@$(PY) -W ignore -m bench.certify

##@ Settings
.PHONY: check-env
check-env: setup ## Check the settings of every source and report all problems
	@$(PY) -m settings check

.PHONY: settings
settings: setup ## List every setting; NAME=BATCH_TOKENS explains one
	@$(PY) -m settings show

.PHONY: env-example
env-example: setup ## Write .env.example from settings/
	$(REFUSE_SETTINGS)
	@$(PY) -m settings env-example > .env.example

##@ Develop
.PHONY: setup-dev
setup-dev: ## Install what tests and linters need as well
	$(REFUSE_SETTINGS)
	@bash scripts/setup.sh --dev

.PHONY: setup-finetune
setup-finetune: ## Install what fine-tuning needs as well: transformers, peft
	$(REFUSE_SETTINGS)
	$(CHECK_FINETUNE)
	@bash scripts/setup.sh --finetune

.PHONY: test
test: setup-dev ## Run all tests but the slow ones
	$(REFUSE_SETTINGS)
	@bash scripts/test.sh

.PHONY: test-faults
test-faults: setup-dev ## Inject every fault (CHAOS_MINUTES: random kills)
	$(REFUSE_SETTINGS)
	@bash scripts/test_faults.sh

.PHONY: lint
lint: setup-dev ## Run ruff, mypy, shellcheck and the scan for secrets
	$(REFUSE_SETTINGS)
	@bash scripts/lint.sh

.PHONY: lock
lock: setup-dev ## Pin the newest versions of all packages, with hashes
	$(REFUSE_SETTINGS)
	@bash scripts/lock.sh --upgrade
