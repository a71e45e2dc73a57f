#!/usr/bin/env bash
# From text to a chat model: targets of make, one after another. Each is an ordinary run that resumes by itself, so the
# same command continues. finetune/pipeline/stages.py decides which settings each stage has. docs/pipeline.md explains
# them.
#
#   usage: make pipeline [NAME=VALUE...]      (DRY_RUN=1 prints the commands of the stages)
# Exit codes: 64 a setting, 78 data or this machine, before the first stage; 75 stopped, the same command resumes;
# otherwise the one of make for the stage that failed.
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${VENV:-.venv}/bin/python

run="" untrained="" command="" dry_run="" failed=0 inputs=() base=() base_eval=() mid=() sft=() sft_chat=() prompts=()
stages=$("$python" -m finetune.pipeline.stages)
eval "$stages"  # sets these, and mid_eval, sft_eval and sft_benchmarks if they are wanted
unset MAKEFLAGS MFLAGS MAKEOVERRIDES MAKELEVEL MAKE_SETTINGS MAKE_TARGET MAKE_GOALS

bound=(env)
if command -v setpriv > /dev/null; then bound=(setpriv --pdeathsig TERM --); fi  # a stage ends with this process
child="" stopped=""
stop() {
  [[ -n $stopped ]] || kill -TERM "$child" 2> /dev/null || true
  stopped=yes
}
trap stop INT TERM HUP

start() {  # COMMAND...: pass a signal on to it, and wait until it has ended
  local code=0
  "${bound[@]}" "$@" &
  child=$!
  wait "$child" || code=$?
  while kill -0 "$child" 2> /dev/null; do code=0; wait "$child" || code=$?; done
  [[ -z $stopped ]] || give_up 75 "Stopped. To resume"
  return "$code"
}
give_up() {  # CODE SENTENCE
  printf '\n%s: %s\n' "$2" "$command" >&2
  exit "$1"
}

check() {  # NAME=VALUE... MODULE...: go on if it fails
  local code=0
  start env "$@" || code=$?
  (( failed )) || failed=$code
}
check_tuning() {  # NAME=VALUE...: what `make finetune` does before it trains, of a model that has no weights yet
  local settings=("$@" RUN_NAME=of-checks MODEL="$untrained" MAKE_TARGET=finetune)
  check "${settings[@]}" "$python" -m doctor.before_run finetune
  check "${settings[@]}" "$python" -m finetune.prepare_data before-training
}

stage() {  # TITLE TARGET NAME=VALUE...
  local code=0
  printf '\n==== %s\nmake%s\n' "$1" "$(printf ' %q' "${@:2}")"
  [[ -z $dry_run ]] || return 0
  start make "${@:2}" || code=$?
  (( code == 0 )) || give_up "$code" "The stage $1 failed, see above. To resume"
}
measure() {  # TITLE KEY NAME=VALUE...: unless that was measured since the last checkpoint of the run
  local stamp=$run-$2/eval/.${1// /-}
  if [[ $stamp -nt $run-$2/checkpoints && $(< "$stamp") == "${*:3}" ]]; then return; fi
  stage "$1" eval "${@:3}"
  [[ -n $dry_run ]] || echo "${*:3}" > "$stamp"
}

# ---- All that is wrong is reported before the first stage

if [[ -z $dry_run ]]; then
  printf '==== checks\n'
  check "${base[@]}" MAKE_TARGET=train "$python" -m doctor.before_run
  check "${inputs[@]}" "$python" -m finetune.pipeline.stages inputs
  if [[ -e $untrained/tokenizer.json ]]; then
    check_tuning "${mid[@]}"
    check_tuning "${sft[@]}"
  fi
fi
(( failed == 0 )) || give_up "$failed" "Nothing was trained. Fix the problems above, and run it again"

# ---- The stages

stage "base" train "${base[@]}"
measure "evaluation of the base" base "${base_eval[@]}"
stage "mid-training" finetune "${mid[@]}"
[[ -z ${mid_eval-} ]] || measure "questions after mid-training" mid "${mid_eval[@]}"
stage "SFT" finetune "${sft[@]}"
[[ -z ${sft_eval-} ]] || measure "questions after SFT" sft "${sft_eval[@]}"
[[ -z ${sft_benchmarks-} ]] || measure "benchmarks" sft "${sft_benchmarks[@]}"
for prompt in "${prompts[@]}"; do stage "sample" chat "${sft_chat[@]}" PROMPT="$prompt"; done
if [[ -z $dry_run ]]; then printf '\n' && "$python" -m finetune.pipeline.summary "$run-base" "$run-mid" "$run-sft"; fi
