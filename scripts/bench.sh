#!/usr/bin/env bash
# Benchmarks, with the threads and the allocator that training has; peers also without the latter (bench/peers.py).
#
#   usage: scripts/bench.sh [MODULE]      (bench.quality: what is learned in the same time, in place of how fast)
#   reads: BENCH_SHAPES, BENCH_ROUNDS, PEER_NANOGPT, PEER_NANOCHAT, PEER_TORCHTITAN, TOKENIZER; of quality PRESET,
#          PEER_NANOGPT, QUALITY_TOKENS, QUALITY_SEEDS, QUALITY_PROSE (settings)
#   makes: bench/results/bench_DATE_TIME.json, or quality_DATE_TIME.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

tune 1 "$(visible_gpus)"
exec "$PY" -m "${1:-bench.run}"
