# Shared by the scripts that run pytest; to be sourced after lib.sh, from the repository's root.
# shellcheck shell=bash

# keep_bytecode: keep compiled modules in a folder that git ignores. Collecting all tests takes half
# the time with them.
keep_bytecode() {
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$PWD/.pycache}
  rm -rf "$PYTHONPYCACHEPREFIX${TMPDIR:-/tmp}"/pytest-of-* # of modules that tests have written
}

# one_thread: each process has one, and idle threads do not spin. The models of the tests are tiny,
# and several of them train at once: four such runs side by side took seven times as long.
one_thread() {
  export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
}

# serve_forks SOCKET OWNER: be the fork server (tests/fork_server.py), with the environment that the
# launcher gives a trainer on a CPU: some of it is read only when a process starts.
serve_forks() {
  one_thread
  tune 1 0 >/dev/null
  exec "$PY" -m tests.fork_server "$1" "$2"
}

# prepare_pytest: start the fork server, whose copies pytest and its workers are, and set
#   PYTEST        the command
#   SIDE_BY_SIDE  arguments: whole files side by side, by more workers than there are cores, since
#                 much of a test is waiting
# shellcheck disable=SC2034  # for those who source this
prepare_pytest() {
  local folder worker workers
  keep_bytecode
  one_thread
  folder=$(mktemp -d "${TMPDIR:-/tmp}/fork.XXXXXXXX")
  export FORK_SERVER=$folder/socket # where tests/forked.py finds it
  (serve_forks "$FORK_SERVER" $$) </dev/null &
  PYTEST=("$PY" tests/forked.py -m pytest)
  worker="popen//python=$(printf '%q %q' "$PY" "$PWD/tests/forked.py")"
  if [[ $(visible_gpus) != 0 ]]; then # a copy of a process that has looked for GPUs cannot use one
    PYTEST=("$PY" -m pytest)
    worker=popen
  fi
  workers=$(($(nproc 2>/dev/null || sysctl -n hw.ncpu) + 2))
  SIDE_BY_SIDE=(--tx "$workers*$worker" --dist loadfile --no-loadscope-reorder)
}
