# Shared by the scripts; to be sourced from the repository's root.
# shellcheck shell=bash

# shellcheck disable=SC2034  # for those who source this
PY=${VENV:-$PWD/.venv}/bin/python

# die CODE MESSAGE: one line on standard error, then exit.
die() {
  printf '%s\n' "$2" >&2
  exit "$1"
}

# run_child COMMAND...: run it and return its exit code; SIGTERM and SIGINT are handed on to it.
# A shell waiting for a foreground child would not see them before the child ends.
run_child() {
  local child code signalled
  "$@" &
  child=$!
  trap 'signalled=1; kill -TERM "$child" 2>/dev/null || true' TERM INT
  while :; do
    signalled=0
    wait "$child" && code=0 || code=$?
    [[ $signalled == 0 ]] && break # else a signal only interrupted the wait
  done
  trap - TERM INT
  return "$code"
}
