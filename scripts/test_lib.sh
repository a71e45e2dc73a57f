# Shared by the scripts that run pytest; to be sourced from the repository's root.
# shellcheck shell=bash

PY=${VENV:-$PWD/.venv}/bin/python

# keep_bytecode: keep compiled modules in a folder that git ignores. Collecting all tests takes half
# the time with them.
keep_bytecode() {
  unset PYTHONDONTWRITEBYTECODE
  export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-$PWD/.pycache}
  rm -rf "$PYTHONPYCACHEPREFIX${TMPDIR:-/tmp}"/pytest-of-* # of modules that tests have written
}

# prepare_pytest: start the fork server, whose copies pytest and its workers are, and set
#   PYTEST        the command
#   SIDE_BY_SIDE  arguments: whole files side by side, by more workers than there are cores, since
#                 much of a test is waiting
# shellcheck disable=SC2034  # for those who source this
prepare_pytest() {
  unset MAKE_TARGET MAKE_SETTINGS MAKE_GOALS # tests start things for no target, unless they say so
  local folder worker workers
  keep_bytecode
  # One thread each, and idle threads do not spin. The models of the tests are tiny, and several of
  # them train at once: four such runs side by side took seven times as long.
  export OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
  folder=$(mktemp -d "${TMPDIR:-/tmp}/fork.XXXXXXXX")
  export FORK_SERVER=$folder/socket # where tests/forked.py finds it
  # With the environment that the launcher gives a trainer: some of it is read only at start.
  "$PY" -m train.tune --cpu 1 tests.fork_server "$FORK_SERVER" $$ </dev/null >/dev/null &
  PYTEST=("$PY" tests/forked.py -m pytest)
  worker="popen//python=$(printf '%q %q' "$PY" "$PWD/tests/forked.py")"
  # A copy of a process that has looked for GPUs cannot use one.
  if nvidia-smi --list-gpus &>/dev/null; then
    PYTEST=("$PY" -m pytest)
    worker=popen
  fi
  workers=$(($(nproc 2>/dev/null || sysctl -n hw.ncpu) + 2))
  SIDE_BY_SIDE=(--tx "$workers*$worker" --dist loadfile --no-loadscope-reorder)
}
