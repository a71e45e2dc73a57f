#!/usr/bin/env bash
# Validation loss, bits per byte and the CORE metric of a run's checkpoint, or the answers of a fine-tuned run to the
# questions of EVAL_DATA, on as many processes as training uses.
#
#   usage: scripts/eval.sh
#   reads: the settings (make settings); RUN_NAME and STEP or INIT_FROM say of what, NPROC on how many processes
#   makes: RUNS_DIR/RUN_NAME/eval/step_N.json, or init_NAME.json of INIT_FROM; chat_step_N.json of a fine-tuned run
#   exits: 0 all was measured, 64 bad setting, 78 weights, data or bundle are not to be had
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec scripts/launch.sh finetune.evaluate
