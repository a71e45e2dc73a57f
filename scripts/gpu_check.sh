#!/usr/bin/env bash
# What only a GPU can show, in under 9 minutes on one: bfloat16, compiled code, each attention kernel against float32,
# Muon, resuming, memory, the GPU sampler; then the benchmark.
#
#   usage: scripts/gpu_check.sh
#   reads: BENCH_SHAPES (default here gpt2,d16,plan,sampler), BENCH_ROUNDS (3), PEER_NANOGPT, PEER_NANOCHAT,
#          PEER_TORCHTITAN
#   makes: bench/results/bench_DATE_TIME.json
#   exits: 78 without a GPU
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

main() {
  [[ $(visible_gpus) != 0 ]] || die 78 "gpu-check: there is no GPU here (nvidia-smi lists none)"
  nvidia-smi --query-gpu=name,driver_version,memory.total,power.limit --format=csv,noheader
  "$PY" -m pytest tests/gpu -v -rs --durations=0 --durations-min=1
  BENCH_SHAPES=${BENCH_SHAPES:-gpt2,d16,plan,sampler} BENCH_ROUNDS=${BENCH_ROUNDS:-3} scripts/bench.sh
  echo "gpu-check: all passed in $SECONDS s"
}

main "$@"
