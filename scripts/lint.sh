#!/usr/bin/env bash
# Linters over Python and bash, and a scan of the tree and the history for secrets; the first to complain ends it.
#
#   usage: scripts/lint.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

bin=$(dirname "$PY")
"$bin/ruff" check .
"$bin/mypy" train analysis bench scripts/scan_secrets.py
"$(command -v "$bin/shellcheck" || command -v shellcheck)" --external-sources scripts/*.sh .ci/run
"$PY" scripts/scan_secrets.py
echo "lint: no complaint"
