#!/usr/bin/env bash
# Start the trainer on this machine, and again when it fails: train/launcher.py, which starts torchrun.
#
#   usage: scripts/launch.sh [MODULE]      (MODULE runs instead of the trainer, train.main)
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
exec "${VENV:-.venv}/bin/python" -m train.launcher "$@"
