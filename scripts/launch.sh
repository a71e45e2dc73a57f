#!/usr/bin/env bash
# Start the trainer on this machine, and again when it fails: directly for one process, under torchrun for more, and
# behind a roll call of all nodes where there are several. On a laptop as in a container, whose entry it can be.
#
#   usage: scripts/launch.sh [MODULE]      (MODULE: what is started in place of the trainer, train.main)
#   reads: NPROC, DEVICE, NODES, NODE_RANK, MASTER_ADDR, MASTER_PORT, MAX_RESTARTS, START_TIMEOUT_S, SHUTDOWN_TIMEOUT_S,
#          PEER_STOP, RUNS_DIR, RUN_NAME (settings); POD_SITE and K8S_NODE, where a pod runs; what tune and guard set
#          stays as it is where it is set already
#   makes: hang/ and logs/ in the run's folder, where there are GPUs
#   exits: with the trainer's own code (train/main.py), which torchrun would turn into 1; and 69 nodes are missing,
#          70 no new checkpoint in spite of MAX_RESTARTS restarts, 143 told to stop where no trainer could save; why is
#          the last thing said
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

main() {
  local settings processes master_addr folder device nodes node_rank master_port max_restarts
  local start_timeout shutdown_timeout peer_stop gpus=0 trainer scratch met=0 peer=0 why="" code
  hand_on_signals
  settings=$("$PY" -m settings.config get NPROC MASTER_ADDR RUN_FOLDER DEVICE SITE_NODES RANK_IN_SITE MASTER_PORT \
    MAX_RESTARTS START_TIMEOUT_S SHUTDOWN_TIMEOUT_S PEER_STOP) || exit $?
  { read -r processes && read -r master_addr && read -r folder && read -r device &&
    read -r nodes && read -r node_rank && read -r master_port && read -r max_restarts && read -r start_timeout &&
    read -r shutdown_timeout && read -r peer_stop; } <<<"$settings"
  [[ $device == cpu ]] || gpus=$(visible_gpus)
  processes=${processes:-$((gpus > 0 ? gpus : 1))}
  tune "$processes" "$gpus"
  guard "$shutdown_timeout" "$gpus" "$folder" "$node_rank"

  trainer=("$PY" -m torch.distributed.run --standalone)
  if ((nodes > 1)); then
    trainer=("$PY" -m torch.distributed.run --nnodes="$nodes" --node-rank="$node_rank" --master-addr="$master_addr"
      --master-port="$master_port" --rdzv-conf="timeout=$start_timeout")
  fi
  [[ -z ${1-} || $1 == finetune.main ]] || max_restarts=0 # what measures begins anew only when it is called again
  trainer+=(--max-restarts=0 --nproc-per-node="$processes" -m "${1:-train.main}")
  ((nodes > 1 || processes > 1)) || trainer=("$PY" -m "${1:-train.main}")

  scratch=$(mktemp -d "${TMPDIR:-/tmp}/launch.XXXXXXXX") || die 78 "launch: set TMPDIR to a folder that can be written"
  trap 'rm -rf "$scratch"' EXIT
  export EXIT_CODE_FILE=$scratch/exit-code PROGRESS_FILE=$scratch/progress # the trainer writes them
  export LAUNCHER_PID=$$                                                   # it ends with its parent
  ((nodes > 1 || processes > 1)) || unset EXIT_CODE_FILE                   # a child's own code is seen
  supervise
  if ((met && code)) && ! { [[ $peer_stop == wait ]] && ((code == 75 || code == 143)); }; then
    "$PY" -m train.distributed.rendezvous over "$code" || true # the other nodes may be on their way to the roll call
  fi
  # torchrun says much behind the trainer's last words; of a pod the last line is what kubectl describe shows
  [[ -z $why || $code == @(0|75|143) ]] || printf 'launch: exit code %s: %s\n' "$code" "$why" >&2
  exit "$code"
}

# supervise: attempts, until one ends in a way that another cannot mend, or MAX_RESTARTS made no headway. Sets code.
supervise() {
  local attempts=0 failures=0 saved=0 step pause how said
  until attempt; do
    attempts=$((attempts + 1))
    step=$(grep -E '^[0-9]{1,15}$' "$PROGRESS_FILE" 2>/dev/null | tail -n 1) || step=0
    if ((10#$step > saved)); then
      saved=$((10#$step)) failures=0
    fi
    how="code $code"
    ((code <= 128)) || how="signal $(kill -l $((code - 128)) 2>/dev/null || echo $((code - 128)))"
    said="launch: attempt $attempts ended with $how; "
    ((saved)) && said+="last checkpoint: step $saved" || said+="no new checkpoint yet"
    pause=1
    if ((peer)); then # not a failure of this run
      echo "$said. Another node was told to stop; waiting for it to come back (PEER_STOP=wait)"
    elif ((max_restarts == 0)); then
      return
    elif ((failures == max_restarts)); then
      code=70
      said+=". That makes $((failures + 1)) attempts in a row without a new one, and MAX_RESTARTS=$max_restarts:"
      said+=" starting again does not help. Look at what the trainer said last, in $folder/logs/"
      echo "$said" >&2
      why=${why:+"the trainer said last: $why"}
      return
    else
      pause=$((failures < 5 ? 1 << failures : 30))
      failures=$((failures + 1))
      echo "$said; starting again in $pause s (restart $failures of $max_restarts without a new checkpoint)"
    fi
    run_child sleep "$pause" || true
    if ((ASKED)); then
      code=143
      return
    fi
    "$PY" -m record.status settle || true # the workers of a torchrun that was killed end a moment later
  done
}

# attempt: one start of the trainer, on all nodes together. Sets code, why where the trainer told, and peer where
# another node was told to stop; fails where another attempt may do better.
attempt() {
  local reported=""
  code=0 met=0 peer=0 why=""
  if ((nodes > 1)); then
    run_child "$PY" -m train.distributed.rendezvous meet "$processes" "${POD_SITE-}" "${K8S_NODE-}" && met=1 || code=$?
    ((ASKED == 0)) || code=143
    if ((code == 10)); then # the run is done; its other nodes have left
      code=0
      return 0
    fi
    ((code == 0)) || return 0 # all nodes have been told the same, or will be
  fi
  rm -f "${EXIT_CODE_FILE-}"
  run_child "${trainer[@]}" || code=$?
  if [[ -s ${EXIT_CODE_FILE-} ]]; then
    { IFS= read -r reported && why=$(cat); } <"$EXIT_CODE_FILE" || true
  fi
  case $reported in
    64 | 70 | 75 | 78) code=$reported ;;
    "75?") code=$((ASKED ? 75 : 1)) ;; # SIGTERM before training, which torchrun sends too when another process has died
    "75!") code=75 ASKED=1 ;;          # SIGINT, as make stop sends it to the trainer alone
    ?*) ((code > 128)) || code=$reported ;;
  esac
  if ((code == 75 && nodes > 1 && ASKED == 0)) && [[ $peer_stop == wait ]]; then
    peer=1
    return 1
  fi
  case $code in
    0 | 64 | 70 | 75 | 78) return 0 ;;
    130) ASKED=1 ;; # SIGINT, which none but a user sends
  esac
  ((ASKED)) && code=143
}

main "$@"
