#!/usr/bin/env bash
# Make the virtual environment: the pinned packages, and the build of torch that fits this machine's driver.
#
#   usage: scripts/setup.sh [--dev | --finetune]      (--finetune: also what fine-tuning needs; --dev: everything, tests
#          and linters included)
#   reads: VENV (default .venv), PYTHON (a Python >= 3.11), TORCH_BACKEND (auto, cpu, cu126, cu130 ...)
#   makes: $VENV; its stamps .ready, .ready-dev and .ready-finetune come last, so a setup that was cut short runs again
# An environment that pip install -e . or uv sync made is used as it is.
# Prints nothing if nothing is missing. Exit codes: 64 usage, 78 nothing to build on, 1 an install failed, 143 Ctrl-C.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
export VENV=${VENV:-.venv}
BASE=(requirements/base.txt requirements/torch.txt)

say() { echo "setup: $*" >&2; }
die() { say "${@:2}"; exit "$1"; }
break_off() {  # the next setup repairs an environment that was complete before, and rebuilds any other
  [[ -z ${update:-} ]] || echo "unfinished none" > "$VENV/.ready"
  die "$@"
}
failed() {
  break_off 1 "$1 failed, see above. Check network and proxy (HTTPS_PROXY) and try again;" \
    "TORCH_BACKEND=cpu takes a small torch"
}
relay() {  # WHAT: pass lines on to standard error, and say every 15 s that WHAT takes time
  local line
  while true; do
    if IFS= read -rt "${SETUP_QUIET_S:-15}" line; then
      [[ $line == *"is ignored: it is neither"* ]] || echo "$line" >&2
    elif (( $? > 128 )); then
      say "still $1, $SECONDS s so far"
    else
      break
    fi
  done
}
export -f say relay  # for setup_torch.sh
digest() { cat "$@" | { sha256sum 2> /dev/null || shasum -a 256; } | cut -d ' ' -f 1; }

base_is_ready() {
  local sum build
  [[ -x $VENV/bin/python && -f $VENV/.ready ]] && read -r sum build < "$VENV/.ready" &&
    [[ $sum == "$(digest "${BASE[@]}")" && ( ${TORCH_BACKEND:-auto} == auto || $TORCH_BACKEND == "$build" ) ]]
}
has() { [[ -f $VENV/.ready-$1 && $(cat "$VENV/.ready-$1") == "$(digest "requirements/$1.txt")" ]]; }
more_is_ready() { [[ -z $1 ]] || has "$1" || { [[ $1 == finetune ]] && has dev; }; }  # dev has all

# made_by_others EXTRA: whether pip install -e . or uv sync made this environment. It is used as it is, and what an extra
# needs must be installed in the same way.
made_by_others() {
  local packages=(torch)
  [[ -x $VENV/bin/python && ! -e $VENV/.setup.lock ]] && has_packages pure-transformer || return 1
  case $1 in
    finetune) packages+=(transformers peft) ;;
    dev) packages+=(transformers peft pytest pytest-timeout ruff mypy import-linter) ;;
  esac
  has_packages "${packages[@]}" ||
    die 78 "$VENV was made by pip or uv and lacks some of: ${packages[*]}. Add them with" \
      "pip install -e '.${1:+[$1]}' or uv sync${1:+ --extra $1}, or set VENV to another folder"
}
has_packages() {
  "$VENV/bin/python" -I -c 'import importlib.metadata, sys
for name in sys.argv[1:]: importlib.metadata.version(name)' "$@" 2> /dev/null
}

choose_python() {
  local names=(python3 python3.13 python3.12 python3.11)
  [[ -z ${PYTHON:-} ]] || names=("$PYTHON")
  for python in "${names[@]}"; do
    "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2> /dev/null || continue
    "$python" -c 'import ensurepip, venv' 2> /dev/null && return
    die 78 "$python lacks the venv module: apt-get install ${python##*/}-venv, or set PYTHON to another one"
  done
  die 78 "no Python >= 3.11 (tried: ${names[*]}): install one (Debian 12, Ubuntu 24.04:" \
    "apt-get install python3 python3-venv; macOS: brew install python@3.13), or set PYTHON to the path of one"
}

take_lock() {  # until this process and all it started are gone; by Python, since macOS has no flock command
  [[ -e $VENV/.setup.lock || -z $(ls -A "$VENV" 2> /dev/null) ]] ||
    die 78 "$VENV was not made by this script and is left as it is: remove it, or set VENV to another folder"
  { mkdir -p "$VENV" && : >> "$VENV/.setup.lock"; } 2> /dev/null ||
    die 78 "cannot write to $VENV: set VENV to a folder that you may write to, or to an environment that is complete"
  exec 9>> "$VENV/.setup.lock"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2> /dev/null && return
  say "waiting for another setup of $VENV to end"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

pip_install() {  # what a lock file pins; the filter is for pip's remarks on folders in its configuration
  say "installing $1 in $VENV"
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --only-binary :all: \
    --require-hashes --no-deps -r "$1" 2>&1 | relay "installing $1" || failed pip
}

install_base() {
  local sum found update
  sum=$(digest "${BASE[@]}")  # now: the files may change meanwhile
  if [[ -x $VENV/bin/python && -f $VENV/.ready ]]; then
    update=yes
    rm -f "$VENV/.ready" "$VENV"/.ready-*
  else
    find -H "$VENV" -mindepth 1 -maxdepth 1 ! -name .setup.lock -exec rm -rf {} +
    "$python" -m venv "$VENV" || die 78 "$python -m venv failed, see above"
  fi
  pip_install requirements/base.txt
  found=$(scripts/setup_torch.sh) || failed "installing torch"
  echo "$sum ${found%% *}" > "$VENV/.ready"
  say "ready in $SECONDS s: ${found#* }"
}

main() {
  local more=${1-}
  [[ $# -le 1 && $more == @(|--dev|--finetune) ]] || die 64 "usage: scripts/setup.sh [--dev | --finetune]"
  more=${more#--}
  [[ ${TORCH_BACKEND:-auto} =~ ^[a-z0-9.]+$ ]] ||
    die 64 "TORCH_BACKEND=$TORCH_BACKEND: must be a build of PyTorch, for example cpu or cu126"
  if base_is_ready && more_is_ready "$more"; then return; fi
  if made_by_others "$more"; then return; fi
  choose_python
  take_lock
  # pip ends a Ctrl-C as an ordinary failure, which is not the network's
  trap 'say() { echo "$*" >&2; }; break_off 143 "Setup interrupted. Run the same command to continue."' INT
  base_is_ready || install_base
  more_is_ready "$more" || {
    pip_install "requirements/$more.txt"
    digest "requirements/$more.txt" > "$VENV/.ready-$more"
  }
}

main "$@"
