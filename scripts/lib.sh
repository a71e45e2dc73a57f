# Shared by the scripts; to be sourced from the repository's root.
# shellcheck shell=bash

# shellcheck disable=SC2034  # for those who source this
PY=${VENV:-$PWD/.venv}/bin/python

# die CODE MESSAGE: one line on standard error, then exit.
die() {
  printf '%s\n' "$2" >&2
  exit "$1"
}

# visible_gpus: how many GPUs a process started here would see, without asking torch, which takes seconds.
visible_gpus() {
  if [[ -n ${CUDA_VISIBLE_DEVICES-} ]]; then
    # CUDA takes those before the first negative one: -1 hides all. Slurm says NoDevFiles where it gave none.
    tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | sed '/^ *-/,$d; /^NoDevFiles$/d' | grep -c . || true
  elif [[ -z ${CUDA_VISIBLE_DEVICES+set} ]] && command -v nvidia-smi >/dev/null; then
    nvidia-smi --list-gpus 2>/dev/null | grep -c '^GPU' || true
  else
    echo 0
  fi
}

# tune PROCESSES GPUS: threads and memory for that many trainers on this machine; says what it chose. What the user
# has set stays. Without GPUs large blocks are kept for the next step, which otherwise gets each page anew from the
# system (a fifth of a step's time); glibc reads MALLOC_*, torch THP_MEM_ALLOC_ENABLE.
tune() {
  local cores said
  cores=$(nproc 2>/dev/null || sysctl -n hw.physicalcpu)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))}
  said="launch: processes=$1 threads=$OMP_NUM_THREADS"
  if [[ $2 == 0 && $(uname) == Linux ]]; then
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-4294967296}
    export THP_MEM_ALLOC_ENABLE=${THP_MEM_ALLOC_ENABLE:-1}
    said+=" allocator=keeps-large-blocks (MALLOC_MMAP_THRESHOLD_=$MALLOC_MMAP_THRESHOLD_"
    said+=" MALLOC_TRIM_THRESHOLD_=$MALLOC_TRIM_THRESHOLD_ THP_MEM_ALLOC_ENABLE=$THP_MEM_ALLOC_ENABLE)"
  fi
  echo "$said"
}

# run_child COMMAND...: run it and return its exit code; SIGTERM, SIGINT and SIGHUP are handed on to it. ASKED: whether
# any came.
# A shell waiting for a foreground child would not see them before the child ends.
run_child() {
  local child code signalled
  ASKED=0
  "$@" &
  child=$!
  trap 'signalled=1 ASKED=1; kill -TERM "$child" 2>/dev/null || true' TERM INT HUP
  while :; do
    signalled=0
    wait "$child" && code=0 || code=$?
    [[ $signalled == 0 ]] && break # else a signal only interrupted the wait
  done
  trap - TERM INT HUP
  return "$code"
}
