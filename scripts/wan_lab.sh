#!/usr/bin/env bash
# Sites with a WAN in between, on this machine: what it gives, what crosses it, what training makes of it.
#
#   usage: scripts/wan_lab.sh
#   reads: WAN_LAB, WAN_GBIT, WAN_RTT_MS, RUNS_DIR (settings)
#   makes: RUNS_DIR/wan-lab/DATE_TIME/: results.json, and the runs; network namespaces, for as long as it works
#   exits: 78 where it cannot run; it says what is missing
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

tune 4 0
exec "$PY" -m bench.wan_lab
