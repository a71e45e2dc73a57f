# Shared by the scripts; to be sourced from the repository's root.
# shellcheck shell=bash

# shellcheck disable=SC2034  # for those who source this
PY=${VENV:-$PWD/.venv}/bin/python

# die CODE MESSAGE: one line on standard error, then exit.
die() {
  printf "%s\n" "${*:2}" >&2
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
# has set stays. Without GPUs MKL is asked to multiply on several threads in the same order each time: it is free to
# choose otherwise, and a run that goes on may differ in the last bits. MKL_CBWR only on Intel's processors, where it
# was seen to cost no time. And large blocks are kept for the next step, which otherwise gets each page anew from the
# system, zeroed, at the cost of page faults; glibc (2.35 and later) asks for large pages in its heap. Torch's own
# THP_MEM_ALLOC_ENABLE does so block by block, which takes a tenth more memory and no less time.
tune() {
  local cores said
  cores=$(nproc 2>/dev/null || sysctl -n hw.physicalcpu)
  export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((cores > $1 ? cores / $1 : 1))}
  said="launch: processes=$1 threads=$OMP_NUM_THREADS"
  if [[ $2 == 0 ]]; then
    export MKL_DYNAMIC=${MKL_DYNAMIC:-FALSE}
    said+=" MKL_DYNAMIC=$MKL_DYNAMIC"
    if [[ -z ${MKL_CBWR-} ]] && grep -q GenuineIntel /proc/cpuinfo 2>/dev/null; then export MKL_CBWR=AUTO; fi
    [[ -z ${MKL_CBWR-} ]] || said+=" MKL_CBWR=$MKL_CBWR"
  fi
  if [[ $2 == 0 && $(uname) == Linux ]]; then
    export MALLOC_MMAP_THRESHOLD_=${MALLOC_MMAP_THRESHOLD_:-1073741824}
    export MALLOC_TRIM_THRESHOLD_=${MALLOC_TRIM_THRESHOLD_:-4294967296}
    [[ ${GLIBC_TUNABLES-} == *glibc.malloc.hugetlb=* ]] ||
      export GLIBC_TUNABLES=${GLIBC_TUNABLES:+$GLIBC_TUNABLES:}glibc.malloc.hugetlb=1
    said+=" allocator=keeps-large-blocks (MALLOC_MMAP_THRESHOLD_=$MALLOC_MMAP_THRESHOLD_"
    said+=" MALLOC_TRIM_THRESHOLD_=$MALLOC_TRIM_THRESHOLD_ GLIBC_TUNABLES=$GLIBC_TUNABLES)"
  fi
  echo "$said"
}

# guard SECONDS GPUS RUN_FOLDER NODE: how long workers have to save after SIGTERM, for which torchrun's own default is
# 30 s; and with GPUs that NCCL notes its last operations, writes them to hang/ when one of them hangs, and tells in
# logs/ which ways it takes (train/distributed/nccl_log.py reads it). What the user has set stays.
guard() {
  export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-$1}
  [[ $2 != 0 ]] || return 0
  mkdir -p "$3/hang" "$3/logs" 2>/dev/null || true # the trainer says it better
  export TORCH_NCCL_DUMP_ON_TIMEOUT=${TORCH_NCCL_DUMP_ON_TIMEOUT:-1}
  export TORCH_FR_BUFFER_SIZE=${TORCH_FR_BUFFER_SIZE:-${TORCH_NCCL_TRACE_BUFFER_SIZE:-2000}}
  export TORCH_FR_DUMP_TEMP_FILE=${TORCH_FR_DUMP_TEMP_FILE:-${TORCH_NCCL_DEBUG_INFO_TEMP_FILE:-$3/hang/nccl_rank_}}
  if [[ -z ${NCCL_DEBUG-} ]]; then
    export NCCL_DEBUG=INFO NCCL_DEBUG_SUBSYS=${NCCL_DEBUG_SUBSYS:-INIT,ENV,NET,GRAPH}
    export NCCL_DEBUG_FILE=${NCCL_DEBUG_FILE:-$3/logs/nccl_node_$4.%h.%p} # NCCL puts in host and process
  fi
}

# hand_on_signals: from here on SIGTERM, SIGINT and SIGHUP end this script no more. They are handed on to the child that
# runs, as SIGTERM; ASKED says whether any came. What comes to a whole group of processes comes to a child several
# times: it is handed on once in 3 s, since a second SIGTERM has torchrun leave its workers behind.
ASKED=0 CHILD="" HANDED_ON=-9
hand_on_signals() {
  trap 'ASKED=1 SIGNALLED=1; hand_on' TERM INT HUP
}
hand_on() {
  [[ -n $CHILD ]] && ((SECONDS - HANDED_ON > 3)) || return 0
  HANDED_ON=$SECONDS
  kill -TERM "$CHILD" 2>/dev/null || true
}

# run_child COMMAND...: run it and return its exit code.
# A shell that waits for a child in the foreground does not see signals before the child ends, and `wait` loses the exit
# code of a child that ends while a trapped signal comes, or waits for it for good where there are others (bash 5.2). So
# it looks every tenth of a second, later twice a second, and waits for what has ended only.
run_child() {
  local code looks=0
  "$@" &
  CHILD=$! HANDED_ON=-9
  [[ $ASKED == 0 ]] || hand_on # told to stop before there was a child to tell
  while kill -0 "$CHILD" 2>/dev/null; do
    if ((++looks < 100)); then sleep 0.1; else sleep 0.5; fi || true
  done
  SIGNALLED=1
  while [[ $SIGNALLED == 1 ]]; do # else a signal only interrupted the wait
    SIGNALLED=0
    wait "$CHILD" && code=0 || code=$?
  done
  CHILD=""
  return "$code"
}

# sampler FOLDER NODE: start the GPU sampler beside training: a process apart from the terminal, that stays through
# restarts of the trainer; macOS has no setsid, and does with nohup. A folder that cannot be written is for the training
# to complain of.
COMPANY=()
sampler() {
  local apart log=$1/logs/gpu_sampler.log
  (($2 == 0)) || log=$1/logs/gpu_sampler_node_$2.log # as record/run_paths.py has them
  apart=$(command -v setsid) || apart=""
  { mkdir -p "$1/logs" && : >>"$log"; } 2>/dev/null || return 0
  ${apart:+setsid} nohup "$PY" -m monitor.gpu_sampler --follow >>"$log" 2>&1 </dev/null 9>&- &
  COMPANY+=("$!")
  echo "GPU sampler: process $!, into $1/gpu_metrics_*.csv; what it says is in $log"
}

# teller: start what tells of this node in the log of its pod.
teller() {
  "$PY" -m monitor.pod_agent </dev/null 9>&- &
  COMPANY+=("$!")
}

# end_company: have both end, so that their files are whole; what takes longer than 3 s is left behind.
end_company() {
  local pid deadline=$((SECONDS + 3))
  kill -TERM "${COMPANY[@]}" 2>/dev/null || true
  for pid in "${COMPANY[@]}"; do
    while ((SECONDS < deadline)) && kill -0 "$pid" 2>/dev/null; do sleep 0.05; done
  done
}
