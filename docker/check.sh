#!/usr/bin/env bash
# The image, run by itself at the end of its build, as the user that pods run as: what is in it, and whether it works.
#
#   usage: docker/check.sh TORCH_BACKEND [FLASH_ATTN_WHEEL]
#   exits: 1 where something does not
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

main() {
  PYTHONPATH=. python docker/check.py "$1" "${2:+flash-attn}"
  find /tmp -mindepth 1 -delete
}

main "$@"
