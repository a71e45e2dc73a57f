#!/usr/bin/env bash
# Benchmarks, with the threads and the allocator that training has; peers also without the latter (bench/peers.py).
#
#   usage: scripts/bench.sh
#   reads: BENCH_SHAPES, BENCH_ROUNDS, PEER_NANOGPT, PEER_NANOCHAT, PEER_TORCHTITAN, TOKENIZER (settings)
#   makes: bench/results/bench_DATE_TIME.json
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

tune 1 "$(visible_gpus)"
exec "$PY" -m bench.run
