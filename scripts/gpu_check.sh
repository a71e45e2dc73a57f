#!/usr/bin/env bash
# What only a GPU can show, in parts. Each should take less than 9 minutes on one GPU (BENCHMARKS.md):
#
#   tests                   bfloat16, compiled code, each attention kernel against float32, Muon, resuming, memory,
#                           PROFILE=1
#   machine                 memory as planned, PROBE=1, the GPU sampler
#   gpt2, d16, d24, xlarge  a step of that shape, next to the matmul ceiling and to peers
#   runs                    whole runs of these shapes by the launcher, next to their bare step, profiled
#   rest                    what make plan predicts, what the sampler costs; evaluation, checkpoints, log, Muon
#
#   usage: scripts/gpu_check.sh
#   reads: GPU_CHECK (settings; all parts by default), BENCH_SHAPES (in place of what rest runs); the peers' checkouts
#          in peers/
#   makes: bench/results/bench_DATE_TIME.json, one of each part but tests
#   exits: 78 without a GPU; the first part that fails ends it
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/test_lib.sh

MACHINE=(tests/gpu/test_planned.py tests/gpu/test_probe.py tests/gpu/test_sampler.py)
# A test may take as long as a part.
REPORT=(-v -rs --durations=0 --durations-min=1 --timeout=540 -o faulthandler_timeout=560)

bench() {
  BENCH_SHAPES=$1 "$PY" -m train.tune 1 bench.run "$2"
}

main() {
  local parts part began
  "$PY" -m settings check > /dev/null || exit $?
  parts=$("$PY" -c "from settings import load_config; print(load_config().gpu_check)") || exit $?
  if ! command -v nvidia-smi > /dev/null ||
    ! nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader; then
    echo "gpu-check: there is no GPU here (nvidia-smi)" >&2
    exit 78
  fi
  keep_bytecode
  for part in ${parts//,/ }; do
    began=$SECONDS
    case $part in
      tests) "$PY" -m pytest tests/gpu "${MACHINE[@]/#/--ignore=}" "${REPORT[@]}" ;;
      machine) "$PY" -m pytest "${MACHINE[@]}" "${REPORT[@]}" ;;
      runs) bench run-gpt2,run-d16,run-d24,run-xlarge 1 ;;
      rest) bench "${BENCH_SHAPES:-plan,sampler,waste}" 2 ;;
      *) bench "$part" 2 ;;
    esac
    echo "gpu-check: $part passed in $((SECONDS - began)) s"
  done
}

main "$@"
