#!/usr/bin/env bash
# Benchmarks, with the threads and the allocator that training has; peers also without the latter (bench/peers.py).
#
#   usage: scripts/bench.sh [MODULE [ROUNDS]]     (bench.quality: what is learned in the same time, in place of how fast)
#   reads: BENCH_SHAPES, TOKENIZER; of quality PRESET, DATA_MIX (settings); the peers' checkouts in peers/
#   makes: bench/results/bench_DATE_TIME.json, or quality_DATE_TIME.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

tune 1 "$(visible_gpus)"
exec "$PY" -m "${1:-bench.run}" "${@:2}"
