#!/usr/bin/env bash
# Validation loss, bits per byte and the CORE metric of a run's checkpoint, or with CHAT=1 what it answers right of
# CHAT_EVAL_DATA, on as many processes as training takes.
#
#   usage: scripts/eval.sh
#   reads: the settings (make settings); RUN_NAME and STEP or INIT_FROM say of what, NPROC on how many processes
#   makes: RUNS_DIR/RUN_NAME/eval/step_N.json, or init_NAME.json of INIT_FROM; chat_step_N.json and so on with CHAT=1
#   exits: 0 all was measured, 64 bad setting, 78 weights, data or bundle are not to be had
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

main() {
  local chat
  chat=$("$PY" -m settings.config get CHAT) || exit $?
  if [[ $chat == 1 ]]; then exec scripts/launch.sh finetune.chat_eval; fi
  exec scripts/launch.sh train.generate.eval_run
}

main "$@"
