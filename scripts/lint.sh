#!/usr/bin/env bash
# Linters over Python and bash; the first to complain ends it.
#
#   usage: scripts/lint.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

bin=$(dirname "$PY")
"$bin/ruff" check .
"$bin/mypy" train analysis
"$(command -v "$bin/shellcheck" || command -v shellcheck)" --external-sources scripts/*.sh .ci/run
echo "lint: no complaint"
