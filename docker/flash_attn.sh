#!/usr/bin/env bash
# In the image that is being built: a wheel of flash-attn, whose hash must be the one that was given. Never from source,
# which takes hours, and never with what it would bring along.
#
#   usage: docker/flash_attn.sh ADDRESS.whl#sha256=HASH     (nothing, or "": there is none to install)
#   reads: VENV
#   exits: 64 no such form, 1 it cannot be had, has another hash, or is for another Python or machine
set -euo pipefail

main() {
  local wheel=${1-} line
  [[ -n $wheel ]] || return 0
  [[ $wheel =~ ^(https?|file)://[^\#]+\.whl\#sha256=[0-9a-f]{64}$ ]] || {
    echo "image: FLASH_ATTN_WHEEL=$wheel must be an address of a .whl with #sha256= and 64 hexadecimal digits" >&2
    exit 64
  }
  line=$(mktemp)
  echo "${wheel%\#*} --hash=sha256:${wheel##*=}" >"$line"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-cache-dir --no-index --no-deps \
    --no-compile --require-hashes -r "$line" || {
    echo "image: the wheel of FLASH_ATTN_WHEEL cannot be installed, see above; is it for this Python, and the hash" \
      "its own (sha256sum FILE)?" >&2
    exit 1
  }
  rm -f "$line"
  "$VENV/bin/python" -m compileall -qq --invalidation-mode unchecked-hash "$VENV"/lib/python3*/site-packages/flash_attn*
}

main "$@"
