#!/usr/bin/env bash
# Pin every package and its hashes, for Python 3.11 and later on Linux and macOS.
#
#   usage: scripts/lock.sh [--upgrade]      (--upgrade: the newest versions; else only what the .in files changed)
#   reads: requirements.in, requirements-dev.in, VENV; uv's own variables say which index to ask
#   makes: requirements.txt, requirements-finetune.txt, requirements-dev.txt
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}

OPTIONS=(
  --universal --python-version 3.11  # one file for all platforms, with markers where versions differ
  --generate-hashes --no-build       # wheels only: a package that must be compiled is found here, not at setup
  --no-emit-index-url --quiet
  --custom-compile-command scripts/lock.sh  # the header names this script, not a machine's paths
)

main() {
  local uv=$VENV/bin/uv name
  [[ -x $uv ]] || uv=$(command -v uv) || { echo "lock: no uv; run scripts/setup.sh first" >&2; exit 78; }
  WITHOUT=$(mktemp) # what asks for torch shall not bring it in, with gigabytes of CUDA and no hash that fits all
  trap 'rm -f "$WITHOUT"' EXIT
  echo torch >"$WITHOUT"
  for name in requirements requirements-finetune requirements-dev; do
    "$uv" pip compile "${OPTIONS[@]}" --excludes "$WITHOUT" "$@" "$name.in" --output-file "$name.txt" > /dev/null
    echo "lock: $name.txt has $(grep -c '^[a-z0-9]' "$name.txt") pins"
  done
}

main "$@"
