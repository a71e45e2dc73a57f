#!/usr/bin/env bash
# The main job on this machine: a look at it and the plan, data if absent, training, evaluation and sample, plots.
#
#   usage: scripts/train.sh [here | node | detached] [finetune]     (node: for one of several machines; detached:
#          started by itself, with the job's lock open as 9; finetune: MODEL on DATA, by scripts/finetune.sh)
#   reads: the settings (make settings). It is what a pod runs, of one node or of several alike: with PEER_STOP=wait
#          it waits for a run that another holds, since a machine that is gone may keep its locks for minutes. In a
#          pod (K8S_NODE) the GPU sampler is beside it, and what tells make monitor of the node
#   makes: DATA_DIR/, RUNS_DIR/RUN_NAME/
#   exits: 0 done, 64 bad setting, 69 nodes are missing, 70 no progress after repeated restarts, 75 saved and stopped
#          on request, 78 bad data or environment, or at work already, 143 told to stop
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

# detach CONSOLE [finetune]: this job again, apart from the terminal; the lock is handed on. macOS has no setsid, and
# does with nohup.
detach() {
  local apart
  apart=$(command -v setsid) || apart=""
  DETACH=0 ${apart:+setsid} nohup scripts/train.sh detached "${@:2}" >>"$1" 2>&1 </dev/null &
}

# stage WORDS: what make status says as long as no trainer speaks for itself. A full disk does not end the job here:
# who needs the room says it better.
stage() {
  { printf '%s: %s\n' "$holder" "$1" >"$job"; } 2>/dev/null || true
}

# take_job PATIENCE: hold the job's lock, open as 9, for as long as this script is at work; where another holds it wait
# so many seconds. Sets holder.
take_job() {
  local deadline=$((SECONDS + ${1:-0})) said=0 code
  until holder=$("$PY" -m record.status hold 9 $$ 2>&1); do
    code=$?
    [[ $code != 64 ]] || die 64 "$holder"
    if [[ $code != 78 ]]; then
      die 78 "$folder: cannot be written (${holder##*] }); make room, or choose another place with RUNS_DIR"
    fi
    ((SECONDS < deadline)) || die "$((${1:-0} ? 69 : code))" "$holder" # of pods: another try may do better
    if ((said++ == 0)); then
      echo "$holder; waiting for up to $1 s, since a machine that is gone may keep its lock for a while"
    fi
    sleep 2
  done
}

# prepare_data MODULE ARGUMENT..: it goes on behind its last sealed shard. Where it fails the other nodes are told,
# which would wait for this one as long as they may; those of pods end with their Job.
prepare_data() {
  local code=0 why="" report=${TMPDIR:-/tmp}/prepared.$$
  EXIT_CODE_FILE=$report run_child "$PY" -m "$@" 9>&- || code=$?
  { read -r && why=$(cat); } 2>/dev/null <"$report" || true
  rm -f "$report"
  ((code)) || return 0
  ((ASKED == 0)) || exit 75
  if ((site_nodes > 1)) && [[ $peer_stop == end ]]; then
    "$PY" -m train.distributed.rendezvous over "$code" "$why" 9>&- || true
  fi
  exit "$code"
}

# end_pod CODE: end what runs beside, and leave word of how this pod ended, where no other will take its place: for
# scripts/lighthouse.sh.
LAST_WORD=""
end_pod() {
  end_company
  [[ -n $LAST_WORD ]] || return 0
  case $1 in 0 | 64 | 78) { echo "$1" >"$LAST_WORD"; } 2>/dev/null || true ;; esac
}

main() {
  local settings folder run_name detach nodes site_nodes node_rank peer_stop start_timeout sync
  local job console holder why code prepare=(train.data.prepare) what=${2-}
  [[ -z $what ]] || prepare=(finetune.prepare_data before-training)
  settings=$("$PY" -m settings.config get RUN_FOLDER RUN_NAME DETACH NODES SITE_NODES RANK_IN_SITE PEER_STOP \
    START_TIMEOUT_S SYNC) || exit $?
  { read -r folder && read -r run_name && read -r detach && read -r nodes && read -r site_nodes &&
    read -r node_rank && read -r peer_stop && read -r start_timeout && read -r sync; } <<<"$settings"
  if [[ -n ${K8S_NODE-} ]]; then # a pod, by k8s/manifests/base/job.yaml
    [[ $sync != diloco ]] || LAST_WORD=$folder/.over
    trap 'end_pod $?' EXIT
  fi
  if [[ ${1-} == node && $nodes == 1 ]]; then
    die 64 "NODES=1: ${what:-train}-node is for one of several machines; set NODES to their number, NODE_RANK to" \
      "which this is, from 0, and MASTER_ADDR to the first one's address. On one machine it is make ${what:-train}"
  fi
  # said before hours of preparing data; where it is detached, by the one who started it
  [[ ${1-} == detached ]] || "$PY" -m doctor.before_run "${@:2}" || exit $?
  # A lock for as long as this script is at work, so that make status, attach and stop know of it before there is a
  # trainer. What it starts does not hold it, and may outlive it.
  job=$folder/.job console=$folder/console.log # as record/run_paths.py has them
  if ((node_rank)); then # a shared disk shows each node the others' locks
    job=$folder/.job_node_$node_rank console=$folder/console_node_$node_rank.log
  fi
  if [[ ${1-} != detached ]]; then
    if ! why=$({ mkdir -p "$folder" && : >>"$job"; } 2>&1); then
      die 78 "$folder: cannot be written (${why##*: }); choose another place with RUNS_DIR, make room, or mend its" \
        "permissions"
    fi
    exec 9>>"$job"
  fi
  take_job "$([[ $peer_stop != wait ]] || echo "$start_timeout")"
  if [[ $detach == 1 ]]; then
    detach "$console" "${@:2}"
    echo "training in the background: make status, make attach, make stop (RUN_NAME=$run_name)"
    return
  fi
  hand_on_signals
  if [[ -n ${K8S_NODE-} ]]; then
    sampler "$folder" "$node_rank"
    teller
  fi
  stage "preparing data"
  prepare_data "${prepare[@]}"
  if ((site_nodes == 1)); then stage "starting"; else stage "training as node $node_rank of $site_nodes"; fi
  run_child scripts/launch.sh ${what:+"$what.main"} 9>&- || exit $?
  ((node_rank == 0)) || return 0
  stage "drawing plots"
  run_child "$PY" -m analysis.plots 9>&- && return
  code=$?
  [[ $peer_stop == wait ]] || return "$code"
  echo "the run is done; its plots were not drawn (code $code), make plots draws them" >&2 # no pod for that alone
}

main "$@"
