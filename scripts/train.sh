#!/usr/bin/env bash
# The main job on this machine: data if absent, training, evaluation and sample, plots.
#
#   usage: scripts/train.sh [detached]     (detached: started by itself, with the job's lock open as 9)
#   reads: the settings (make settings)
#   makes: DATA_DIR/, RUNS_DIR/RUN_NAME/
#   exits: 0 done, 64 bad setting, 75 saved and stopped on request, 78 bad data or environment, or at work already
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

# detach FOLDER: this job again, apart from the terminal; the lock is handed on. macOS has no setsid, and does with
# nohup.
detach() {
  local apart
  apart=$(command -v setsid) || apart=""
  DETACH=0 ${apart:+setsid} nohup scripts/train.sh detached >>"$1/console.log" 2>&1 </dev/null &
}

# stage WORDS: what make status says as long as no trainer speaks for itself.
stage() {
  printf '%s: %s\n' "$holder" "$1" >"$folder/.job"
}

main() {
  local settings runs_dir run_name detach device attention folder holder
  settings=$("$PY" -m train.config get RUNS_DIR RUN_NAME DETACH DEVICE ATTENTION) || exit $?
  { read -r runs_dir && read -r run_name && read -r detach && read -r device && read -r attention; } <<<"$settings"
  if [[ $device == cuda && $(visible_gpus) == 0 ]]; then # said before hours of preparing data
    die 64 "DEVICE=cuda: there is no GPU here (nvidia-smi lists none); choose DEVICE=cpu, or another PRESET"
  fi
  if [[ $attention == @(fa3|flash-attn) && $(visible_gpus) == 0 ]]; then
    die 64 "ATTENTION=$attention runs on NVIDIA GPUs only, and there is none here; set ATTENTION=auto or sdpa"
  fi
  # A lock for as long as this script is at work, so that make status, attach and stop know of it before there is a
  # trainer. What it starts does not hold it, and may outlive it.
  folder=$runs_dir/$run_name
  if [[ ${1-} != detached ]]; then
    { mkdir -p "$folder" && exec 9>>"$folder/.job"; } 2>/dev/null ||
      die 78 "$folder: cannot be written; choose another place with RUNS_DIR, or mend its permissions"
  fi
  holder=$("$PY" -m train.status hold 9 $$) || exit $?
  if [[ $detach == 1 ]]; then
    detach "$folder"
    echo "training in the background: make status, make attach, make stop (RUN_NAME=$run_name)"
    return
  fi
  stage "preparing data"
  run_child "$PY" -m train.prepare 9>&- || exit $((ASKED ? 75 : $?)) # it goes on behind its last sealed shard
  stage "starting"
  run_child scripts/launch.sh 9>&- || exit $?
  stage "drawing plots"
  "$PY" -m analysis.plots 9>&-
}

main "$@"
