#!/usr/bin/env bash
# Start the trainer on this machine: directly for one process, under torchrun for more.
#
#   usage: scripts/launch.sh
#   reads: NPROC, DEVICE (settings); OMP_NUM_THREADS, MALLOC_* and THP_MEM_ALLOC_ENABLE if they are set
#   exits: with the trainer's own code (train/main.py), which torchrun would turn into 1
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

main() {
  local settings processes device gpus code=0
  settings=$("$PY" -m train.config get NPROC DEVICE) || exit $?
  { read -r processes && read -r device; } <<<"$settings"
  gpus=0
  [[ $device == cpu ]] || gpus=$(visible_gpus)
  processes=${processes:-$((gpus > 0 ? gpus : 1))}
  tune "$processes" "$gpus"
  if ((processes == 1)); then
    exec "$PY" -m train.main
  fi

  # Workers get this long after SIGTERM to save; torchrun's own default is 30 s.
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-120}
  EXIT_CODE_FILE=$(mktemp -u "${TMPDIR:-/tmp}/exit-code.XXXXXXXX")
  export EXIT_CODE_FILE
  run_child "$PY" -m torch.distributed.run --standalone --nproc-per-node="$processes" -m train.main || code=$?
  if [[ -s $EXIT_CODE_FILE ]]; then
    code=$(<"$EXIT_CODE_FILE")
    rm -f "$EXIT_CODE_FILE"
  fi
  if [[ $code == "75?" ]]; then # SIGTERM before training, which torchrun sends too when another process has died
    code=$((ASKED ? 75 : 1))
  fi
  exit "$code"
}

main "$@"
