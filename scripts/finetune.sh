#!/usr/bin/env bash
# Fine-tune MODEL on DATA on this machine: as scripts/train.sh trains, with finetune/ in the place of pretraining.
#
#   usage: scripts/finetune.sh [node]        (node: for one of several machines)
#   reads: the settings; where nothing sets it PRESET is finetune
#   makes: DATA_DIR/finetune, DATA_DIR/models where MODEL is on the hub; RUNS_DIR/RUN_NAME/
#   exits: as scripts/train.sh does
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

main() {
  PRESET=$("$PY" -m settings.config get PRESET=finetune PRESET) || exit $?
  export PRESET
  exec scripts/train.sh "${1:-here}" finetune
}

main "$@"
