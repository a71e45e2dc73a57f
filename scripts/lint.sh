#!/usr/bin/env bash
# Linters over Python, bash, the Dockerfile and the manifests, and a scan of the tree and the history for secrets.
# It stops at the first complaint.
#
#   usage: scripts/lint.sh
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."

PATH=${VENV:-$PWD/.venv}/bin:$PATH
ruff check .
ruff format --check --quiet .
lint-imports --no-cache
mypy
shellcheck --external-sources scripts/*.sh docker/*.sh .ci/run
if command -v hadolint >/dev/null; then
  hadolint docker/Dockerfile
else
  echo "lint: docker/Dockerfile was not checked: hadolint has no wheel for this machine ($(uname -sm))"
fi
yamllint --strict --config-file k8s/.yamllint k8s
python -m scripts.scan_secrets
echo "lint: no complaint"
