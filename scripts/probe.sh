#!/usr/bin/env bash
# A part of what make doctor PROBE=1 measures, with the processes, the threads and the allocator that training has.
#
#   usage: scripts/probe.sh DEVICE NPROC PORT PART SETTINGS UNTIL LIMIT
#          (NPROC may be empty: all visible GPUs, or one process; the others as doctor/gpu_probe/probe.py has them)
#   prints: what tune says, the JSON lines of doctor/gpu_probe/probe.py, and {"ended": CODE} for each process
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

main() {
  local device=$1 processes=$2 port=$3 part=$4 settings=$5 until=$6 limit=$7 gpus=0 rank code
  [[ $device == cpu ]] || gpus=$(visible_gpus)
  processes=${processes:-$((gpus > 0 ? gpus : 1))}
  tune "$processes" "$gpus"
  export WORLD_SIZE=$processes LOCAL_WORLD_SIZE=$processes GROUP_RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=$port
  for ((rank = 0; rank < processes; rank++)); do
    { # bash would tell of each that a signal ended
      code=0
      RANK=$rank LOCAL_RANK=$rank "$PY" -m doctor.gpu_probe.probe "$part" "$settings" "$processes" "$until" "$limit" 2>&3 ||
        code=$?
      echo "{\"ended\": $code}"
    } 3>&2 2>/dev/null &
  done
  wait
}

main "$@"
