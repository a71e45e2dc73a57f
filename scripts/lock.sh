#!/usr/bin/env bash
# Pin every package and its hashes, for Python 3.11 and later on Linux and macOS.
#
#   usage: scripts/lock.sh [--upgrade]      (--upgrade: the newest versions; else only what pyproject.toml changed)
#   reads: [project] and its extras in pyproject.toml, VENV; uv's own variables say which index to ask
#   makes: requirements/base.txt, torch.txt, finetune.txt, trackers.txt and dev.txt; each but torch.txt holds all of base.txt
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."

VENV=${VENV:-.venv}

OPTIONS=(
  --universal --python-version 3.11  # one file for all platforms, with markers where versions differ
  --generate-hashes --no-build       # wheels only: a package that must be compiled is found here, not at setup
  --no-emit-index-url --quiet
  --custom-compile-command scripts/lock.sh  # the header names this script, not a machine's paths
)

pin() {  # NAME OPTION..: requirements/NAME.txt
  "$uv" pip compile "${OPTIONS[@]}" --excludes "$WITHOUT" "${@:2}" pyproject.toml --output-file "requirements/$1.txt" \
    >/dev/null
  echo "lock: requirements/$1.txt has $(grep -c '^[a-z0-9]' "requirements/$1.txt") pins"
}

main() {
  local uv=$VENV/bin/uv name
  [[ -x $uv ]] || uv=$(command -v uv) || { echo "lock: no uv; run scripts/setup.sh first" >&2; exit 78; }
  WITHOUT=$(mktemp) # what asks for torch shall not bring it in, with gigabytes of CUDA and no hash that fits all
  trap 'rm -f "$WITHOUT"' EXIT
  echo torch >"$WITHOUT"
  sed -n 's/^ *"\(torch==[0-9.]*\)".*/\1/p' pyproject.toml >requirements/torch.txt
  pin base "$@"
  for name in finetune dev; do
    pin "$name" --extra "$name" --constraint requirements/base.txt "$@"
  done
  pin trackers --extra trackers --constraint requirements/base.txt --overrides requirements/overrides.txt "$@"
}

main "$@"
