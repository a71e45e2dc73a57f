#!/usr/bin/env bash
# The lighthouse of a job in the cluster, by which its sites find each other (SYNC=diloco); it ends when the run has.
# make lighthouse is the same by hand, without an end.
#
#   usage: scripts/lighthouse.sh
#   reads: RUN_FOLDER, SITES (settings) and .over in each site's folder, with which scripts/train.sh says in each pod
#          how that ended. What is older than this pod is of an earlier job
#   makes: TMPDIR/lighthouse.begun
#   exits: 0 the run is over, 143 told to stop, else with the lighthouse's own code
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

LOOK_S=${LOOK_S:-2}

# is_over FOLDER SITES BEGUN: whether no site will come back: all are done, or one has ended the Job by its exit code.
is_over() {
  local site word done=0
  for ((site = 0; site < $2; site++)); do
    word=$1/.over
    ((site == 0)) || word=$1/site_$site/.over # as record/run_paths.py has it
    [[ $word -nt $3 ]] || continue
    case $(<"$word") in
      0) done=$((done + 1)) ;;
      64 | 78) return 0 ;;
    esac
  done
  ((done == $2))
}

# look FOLDER SITES BEGUN: end the lighthouse, CHILD of the one who calls, when the run is over.
look() {
  until is_over "$@" 2>/dev/null; do sleep "$LOOK_S"; done
  echo "lighthouse: the run is over"
  kill -TERM "$$"
}

main() {
  local settings sites folder begun looker code=0
  hand_on_signals
  settings=$("$PY" -m settings.config get RUN_FOLDER SITES) || exit $?
  { read -r folder && read -r sites; } <<<"$settings"
  begun=${TMPDIR:-/tmp}/lighthouse.begun
  [[ -e $begun ]] || : >"$begun" # it stays where this was started again in the same pod
  look "$folder" "$sites" "$begun" &
  looker=$!
  run_child "$PY" -m train.diloco.lighthouse || code=$?
  kill "$looker" 2>/dev/null || true
  ! is_over "$folder" "$sites" "$begun" 2>/dev/null || exit 0
  ((ASKED == 0)) || exit 143
  exit "$code"
}

main "$@"
