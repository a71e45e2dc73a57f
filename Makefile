# The interface. Every target is one line that calls a script; settings are given as make NAME=value, in the
# environment, in .env, or by a preset (make settings lists them). make itself never reads an env file.
SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

# Settings from the command line reach Python as they were typed: $(value ...) does not expand a
# dollar, and := does not expand it later. Their names tell which they are.
export MAKE_SETTINGS := $(strip $(foreach name,$(.VARIABLES),$(if $(filter command line,$(origin $(name))),$(name))))
$(foreach name,$(MAKE_SETTINGS),$(eval override $(name) := $$(value $(name)))$(eval export $(name)))
export MAKE_TARGET = $@
export VENV ?= $(CURDIR)/.venv
PY := $(VENV)/bin/python

# The settings room needs no packages, so it also works before make setup.
ANY_PYTHON = $(shell [ -x "$(PY)" ] && echo "$(PY)" || echo python3)
# In targets that take no settings, if they are what was typed and not what another target needs.
REFUSE_SETTINGS = $(if $(MAKE_SETTINGS),$(if $(filter $@,$(or $(MAKECMDGOALS),help)),@"$(ANY_PYTHON)" -m settings refuse))

.DEFAULT:
	@"$(ANY_PYTHON)" -m settings suggest "$@"

##@ Start
.PHONY: help
help: ## This list
	$(REFUSE_SETTINGS)
	@awk 'BEGIN {FS = ":.*## "} /^##@ / {printf "%s%s\n", n++ ? "\n" : "", substr($$0, 5)} \
		/^[a-z0-9-]+:.*## / {printf "  %-14s %s\n", $$1, $$2}' Makefile

.PHONY: setup
setup: ## .venv with pinned packages and the torch build that fits this machine
	$(REFUSE_SETTINGS)
	@scripts/setup.sh

##@ Before a run
.PHONY: plan
plan: setup ## What a run will take, and whether it can be (CARDS, TARGET_HOURS, SWEEP=1); docs/plans.md
	@"$(PY)" -m plan

.PHONY: doctor
doctor: setup ## Looks at this machine and the cluster (WHERE), PASS or FAIL and the fix; PROBE=1 measures a minute
	@"$(PY)" -m doctor

.PHONY: net-probe
net-probe: setup ## Bandwidth and latency between the nodes of a job (NODES, NODE_RANK, MASTER_ADDR; WHERE), for make plan
	@"$(PY)" -m doctor.net_probe

##@ Train
.PHONY: train
train: setup ## Train or resume RUN_NAME (PRESET=tiny), evaluate, sample, plot; DETACH=1 frees the terminal
	@"$(PY)" -m scripts.train

.PHONY: train-node
train-node: setup ## One node of a run on several machines (NODES, NODE_RANK, MASTER_ADDR); docs/two-nodes.md
	@"$(PY)" -m scripts.train node

.PHONY: train-2xh100
train-2xh100: setup ## The d16-2xh100 preset on 2 GPUs of this machine, the GPU sampler beside it
	@"$(PY)" -m scripts.train 2xh100

.PHONY: train-8xa100
train-8xa100: setup ## The xlarge preset on a cluster: 4 pods x 2 GPUs (NODES, GPUS_PER_NODE); docs/kubernetes.md
	@"$(PY)" -m k8s.launch

.PHONY: lighthouse
lighthouse: setup ## What tells the sites of a SYNC=diloco run of each other (LIGHTHOUSE); docs/four-sites.md
	@"$(PY)" -m train.diloco.lighthouse

.PHONY: finetune
finetune: setup-finetune ## Fine-tune MODEL on DATA: conversations, all weights or LORA_RANK; docs/finetune.md
	@"$(PY)" -m scripts.train finetune

.PHONY: finetune-node
finetune-node: setup-finetune ## One node of that on several machines (NODES, NODE_RANK, MASTER_ADDR)
	@"$(PY)" -m scripts.train finetune node

.PHONY: finetune-k8s
finetune-k8s: setup ## That on a cluster, MODEL and DATA on the volume or the hub (NODES, GPUS_PER_NODE, GPU_PRODUCTS)
	@"$(PY)" -m k8s.launch finetune

.PHONY: pipeline
pipeline: setup-finetune ## Base, evaluation, mid-training, SFT, chat evaluation, in one go (MID_DATA ..); docs/pipeline.md
	@"$(PY)" -m pipeline

.PHONY: data
data: setup ## The token shards of the preset's mixture, verified; WHERE=cluster makes them there
	@"$(PY)" -m k8s.launch data

.PHONY: data-verify
data-verify: setup ## Check every hash of those shards
	@"$(PY)" -m train.data.prepare verify

.PHONY: data-report
data-report: setup ## What is in them: lengths, duplicates, windows to read, overlaps with CORE_BUNDLE
	@"$(PY)" -m train.data.audit.report

##@ Watch, here or in the cluster (WHERE)
.PHONY: runs
runs: setup ## All runs here: state, step, loss
	@"$(PY)" -m record.status runs

.PHONY: status
status: setup ## What RUN_NAME is doing now
	@"$(PY)" -m k8s.jobs status

.PHONY: monitor
monitor: setup ## One live screen of RUN_NAME: pace, GPUs, pods, and what is wrong; ONCE=1 as text; docs/monitor.md
	@"$(PY)" -m monitor

.PHONY: attach
attach: setup ## Follow the log of RUN_NAME; Ctrl-C leaves it running
	@"$(PY)" -m k8s.jobs attach

.PHONY: logs
logs: setup ## Its log, of NODE_RANK=0; ONLY=metrics or errors
	@"$(PY)" -m k8s.jobs logs

.PHONY: describe
describe: setup ## Its shape, settings, pods and events
	@"$(PY)" -m k8s.jobs describe

.PHONY: checkpoints
checkpoints: setup ## Its checkpoints, and which are whole
	@"$(PY)" -m k8s.jobs checkpoints

.PHONY: gpu-sampler
gpu-sampler: setup ## Power and temperature of this machine's GPUs into RUN_NAME, 100 times a second, until Ctrl-C
	@"$(PY)" -m monitor.gpu_sampler

.PHONY: stop
stop: setup ## Tell RUN_NAME to save and stop; nothing is deleted but the job
	@"$(PY)" -m k8s.jobs stop

.PHONY: restart
restart: setup ## Stop it and start it again, with the settings as they are now
	@"$(PY)" -m k8s.jobs restart

.PHONY: fetch-run
fetch-run: setup ## Bring a run from the cluster: record, logs, plots, a checkpoint (STEP), verified
	@"$(PY)" -m k8s.jobs fetch-run

.PHONY: sites
sites: setup ## The cluster's GPUs by site and product
	@"$(PY)" -m k8s.cluster.nodes

.PHONY: plots
plots: setup ## loss_curves.html, .png and CSV of RUN_NAME, here or in the cluster, or of logs in LOG_DIR; docs/plots.md
	@"$(PY)" -m k8s.jobs plots

.PHONY: energy
energy: setup ## kWh and cost of RUN_NAME by cause, joules by step and token, from its GPU samples (PRICE_KWH)
	@"$(PY)" -m analysis.energy.energy

.PHONY: mirror
mirror: setup ## Send RUN_NAME to its trackers now (W&B, TRACKERS); a run does so by itself; docs/trackers.md
	@"$(PY)" -m record.trackers.mirror

##@ Use
.PHONY: eval
eval: setup ## Bits per byte and CORE of RUN_NAME (STEP, INIT_FROM); of a fine-tuned run, answers to EVAL_DATA
	@"$(PY)" -m train.launcher finetune.evaluate

.PHONY: sample
sample: setup ## Text from RUN_NAME (STEP) or INIT_FROM: PROMPT or standard input, SAMPLES, SAMPLE_TOKENS
	@"$(PY)" -m train.generate.sample

.PHONY: chat
chat: setup ## Talk to RUN_NAME (STEP) or INIT_FROM: one message after the other, or PROMPT as one message
	@"$(PY)" -m train.generate.sample chat

.PHONY: export
export: setup ## RUN_NAME's newest checkpoint (STEP) for transformers and its like: runs/RUN_NAME/export; docs/export.md
	@"$(PY)" -m export

##@ Image
.PHONY: image
image: setup ## Build the image of this commit (docker, podman or buildah); docs/image.md
	@"$(PY)" -m scripts.image build

.PHONY: push
push: setup ## Push it to IMAGE and note its digest, which pods then take
	@"$(PY)" -m scripts.image push

.PHONY: image-test
image-test: setup-dev ## Build it without a registry and run the main job in it: trained, killed, resumed
	$(REFUSE_SETTINGS)
	@scripts/image_test.sh

##@ Measure
.PHONY: bench
bench: setup ## Speed of a training step as table and JSON (BENCH_SHAPES), next to the checkouts in peers/
	@"$(PY)" -m train.tune 1 bench.run

.PHONY: bench-quality
bench-quality: setup ## Bits per byte next to nanoGPT's recipe, equal tokens or time (peers/nanoGPT)
	@"$(PY)" -m train.tune 1 bench.quality

.PHONY: wan-lab
wan-lab: setup ## Four sites and a WAN on this machine, as root: DDP beside DiLoCo, sites killed and cut off (WAN_LAB)
	@"$(PY)" -m train.tune --cpu 4 bench.wan_lab

.PHONY: gpu-check
gpu-check: setup-dev ## What only a GPU can show, and the benchmark, in parts (GPU_CHECK)
	@scripts/gpu_check.sh

##@ Settings
.PHONY: check-env
check-env: setup ## Check the settings from every source, all problems at once
	@"$(PY)" -m settings check

.PHONY: settings
settings: setup ## Every setting with its value and origin; NAME=BATCH_TOKENS explains one
	@"$(PY)" -m settings show

.PHONY: env-example
env-example: setup ## Write .env.example from settings/
	$(REFUSE_SETTINGS)
	@"$(PY)" -m settings env-example > .env.example

##@ Develop
.PHONY: setup-dev
setup-dev: ## The same .venv with what tests and linters need
	$(REFUSE_SETTINGS)
	@scripts/setup.sh --dev

.PHONY: setup-finetune
setup-finetune: ## The same .venv with what fine-tuning needs: transformers and peft
	$(REFUSE_SETTINGS)
	@scripts/setup.sh --finetune

.PHONY: test
test: setup-dev ## All tests but those that take long
	$(REFUSE_SETTINGS)
	@scripts/test.sh

.PHONY: test-faults
test-faults: setup-dev ## Each fault of docs/faults.md, and CHAOS_MINUTES=10 of random kills; 20 minutes
	$(REFUSE_SETTINGS)
	@scripts/test_faults.sh

.PHONY: lint
lint: setup-dev ## ruff, mypy, shellcheck; no secret in tree and history
	$(REFUSE_SETTINGS)
	@scripts/lint.sh

.PHONY: lock
lock: setup-dev ## Pin the newest packages that the .in files allow, with hashes
	$(REFUSE_SETTINGS)
	@scripts/lock.sh --upgrade
