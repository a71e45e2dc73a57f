#!/usr/bin/env bash
# From text to a chat on this machine: base, evaluation, mid-training, SFT, chat evaluation, a sample; docs/pipeline.md.
#
#   usage: scripts/pipeline.sh
#   reads: the settings (make settings), those of the section Pipeline above all
#   makes: RUNS_DIR/RUN_NAME-base, -mid, -sft, by the stages; RUNS_DIR/RUN_NAME-pipeline, what is known of all
#   exits: 0 done, 64 bad setting, 75 stopped on request, the same command goes on; 78 bad data or environment; else as
#          the stage that failed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

exec "$PY" -m pipeline
