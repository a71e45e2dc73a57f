#!/usr/bin/env bash
# The main job on this machine: data if absent, training, evaluation and sample, plots.
#
#   usage: scripts/train.sh
#   reads: the settings (make settings)
#   makes: DATA_DIR/, RUNS_DIR/RUN_NAME/
#   exits: 0 done, 64 bad setting, 75 saved and stopped on request, 78 bad data or environment
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

# detach FOLDER: this job again, apart from the terminal. It holds a lock on its log, from the first stage to the last;
# by Python, since macOS has no flock command. It has no setsid either, and does with nohup.
detach() {
  local apart
  mkdir -p "$1"
  exec 8>>"$1/console.log"
  "$PY" -c 'import fcntl; fcntl.flock(8, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2>/dev/null ||
    die 78 "$1 is being trained in the background already: make status, make attach, make stop"
  : >"$1/console.log"
  apart=$(command -v setsid) || apart=""
  DETACH=0 ${apart:+setsid} nohup scripts/train.sh >&8 2>&1 8>&- </dev/null &
}

main() {
  local settings runs_dir run_name detach device attention
  settings=$("$PY" -m train.config get RUNS_DIR RUN_NAME DETACH DEVICE ATTENTION) || exit $?
  { read -r runs_dir && read -r run_name && read -r detach && read -r device && read -r attention; } <<<"$settings"
  if [[ $device == cuda && $(visible_gpus) == 0 ]]; then # said before hours of preparing data
    die 64 "DEVICE=cuda: there is no GPU here (nvidia-smi lists none); choose DEVICE=cpu, or another PRESET"
  fi
  if [[ $attention == @(fa3|flash-attn) && $(visible_gpus) == 0 ]]; then
    die 64 "ATTENTION=$attention runs on NVIDIA GPUs only, and there is none here; set ATTENTION=auto or sdpa"
  fi
  if [[ $detach == 1 ]]; then
    detach "$runs_dir/$run_name"
    echo "training in the background: make status, make attach, make stop (RUN_NAME=$run_name)"
    return
  fi
  run_child "$PY" -m train.prepare || exit $?
  run_child scripts/launch.sh || exit $?
  "$PY" -m analysis.plots
}

main "$@"
