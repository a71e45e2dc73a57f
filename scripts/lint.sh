#!/usr/bin/env bash
# Linters over Python, bash, the Dockerfile and the manifests, and a scan of the tree and the history for secrets; the
# first to complain ends it.
#
#   usage: scripts/lint.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

bin=${VENV:-.venv}/bin
"$bin/ruff" check .
"$bin/ruff" format --check --quiet .
"$bin/lint-imports" --no-cache
"$bin/mypy" settings record hardware train export finetune pipeline plan analysis k8s doctor monitor bench docker/check.py scripts/*.py
"$(command -v "$bin/shellcheck" || command -v shellcheck)" --external-sources scripts/*.sh docker/*.sh .ci/run
if hadolint=$(command -v "$bin/hadolint" || command -v hadolint); then
  "$hadolint" docker/Dockerfile
else
  echo "lint: docker/Dockerfile was not looked at: hadolint has no wheel for this machine ($(uname -sm))"
fi
"$bin/yamllint" --strict k8s
"$bin/python" -m scripts.scan_secrets
echo "lint: no complaint"
