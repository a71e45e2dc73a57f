#!/usr/bin/env bash
# The depth-16 preset, or another, on 2 GPUs of this machine, with the GPU sampler beside it: a process of its own, that
# stays through restarts of the trainer, and ends by itself a minute after the run.
#
#   usage: scripts/train_2xh100.sh
#   reads: the settings; where nothing sets them PRESET is d16-2xh100 and NPROC 2
#   makes: RUNS_DIR/RUN_NAME/, in it gpu_metrics_*.csv, gpu_slow_*.csv and logs/gpu_sampler.log
#   exits: as scripts/train.sh does; 64 also for settings that are not of 2 GPUs, 78 where there are not as many
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

main() {
  local settings preset nproc device nodes runs_dir run_name gpus
  settings=$("$PY" -m settings.config get PRESET=d16-2xh100 NPROC=2 PRESET NPROC DEVICE NODES RUNS_DIR RUN_NAME) ||
    exit $?
  { read -r preset && read -r nproc && read -r device && read -r nodes && read -r runs_dir && read -r run_name; } \
    <<<"$settings"
  if [[ $nproc != 2 || $nodes != 1 || $device == cpu ]]; then
    die 64 "train-2xh100 trains on 2 GPUs of one machine, and NPROC=$nproc NODES=$nodes DEVICE=$device says" \
      "otherwise: leave those out, or use make train PRESET=$preset with them"
  fi
  gpus=$(visible_gpus)
  if ((gpus < 2)); then
    die 78 "train-2xh100 needs 2 GPUs, and ${gpus/#0/none} can be seen here (nvidia-smi, CUDA_VISIBLE_DEVICES);" \
      "make train PRESET=$preset takes those that there are, and make train needs none"
  fi
  export PRESET=$preset NPROC=$nproc
  sampler "$runs_dir/$run_name" 0
  exec scripts/train.sh
}

main "$@"
