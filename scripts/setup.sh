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
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
shopt -s lastpipe 2> /dev/null || true  # SAID outlives its loop; bash of macOS cannot do so, and gives less advice
export VENV=${VENV:-.venv}
BASE=(requirements/base.txt requirements/torch.txt)

say() { echo "setup: $*" >&2; }
die() { say "${@:2}"; exit "$1"; }
break_off() {  # the next setup repairs an environment that was complete before, and rebuilds any other
  [[ -z ${update:-} ]] || echo "unfinished none" > "$VENV/.ready"
  die "$@"
}

# ignore_other_environments: what is set for other environments must not decide what is installed in this one. Of the
# settings of pip and uv those remain that say where packages come from, and how to reach it.
ignore_other_environments() {
  local name
  for name in "${!PYTHON@}" "${!PIP_@}" "${!UV_@}"; do
    case $name in
      PYTHON | PYTHONDONTWRITEBYTECODE | PYTHONPYCACHEPREFIX) ;;
      *INDEX* | *_LINK* | *CERT* | *TLS* | *HOST* | *PROXY* | *CACHE* | *TIMEOUT* | *RETRIES | *KEYRING* | \
        *CONFIG_FILE | *OFFLINE | PIP_USE_* | UV_CUDA_DRIVER_VERSION) ;;
      *) unset "$name" ;;
    esac
  done
  unset GREP_OPTIONS
  export PIP_USER=0 PIP_DRY_RUN=0 PIP_REQUIRE_HASHES=0  # these are stronger than pip.conf
}

said() { [[ $SAID =~ $1 ]]; }
failed() {  # WHAT: what to do follows from what pip or uv printed, in $SAID
  local advice="Read the last lines above, then run the same command again"
  if said "No space left|Disk quota exceeded"; then
    advice="There is no space left. Free some, set VENV and TMPDIR to folders on another disk, or take a small torch:"
    advice+=" TORCH_BACKEND=cpu"
  elif said "DO NOT MATCH THE HASHES"; then
    advice="A download differs from what requirements/ pins: run again with PIP_NO_CACHE_DIR=1, or ask who runs the index"
  elif said "Permission denied|Operation not permitted|Read-only file system|failed to map segment"; then
    advice="Set VENV to a folder on a disk where you may write files and execute them"
  elif said "Retrying|[Tt]imed out|[Cc]onnect|resolv|SSLError|ProxyError|dns error|error sending request"; then
    advice="The package index could not be reached. Check network and proxy (HTTPS_PROXY), then run the same command again"
  elif said "No matching distribution|no matching distribution|No solution found|not found in the package"; then
    advice="The package index has no such version for this Python and machine. See which index is asked: pip config list"
  fi
  break_off 1 "$1 failed, see above. $advice"
}
relay() {  # WHAT [hold]: add lines to SAID, pass them on to standard error, and say every 15 s that WHAT takes time
  local line
  while true; do
    if IFS= read -rt "${SETUP_QUIET_S:-15}" line; then
      [[ $line != *"is ignored: it is neither"* ]] || continue
      [[ -n ${2-} ]] || echo "$line" >&2
      SAID+=$line$'\n'
    elif (( $? > 128 )); then
      say "still $1, $SECONDS s so far"
    else
      break
    fi
  done
}
hold() { SAID=""; relay "$1" hold; echo "$SAID"; }  # WHAT: as relay, but print the lines at the end, on standard output
export -f say relay hold  # for setup_torch.sh
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

real_path() { "$python" -c 'import os, sys; print(os.path.realpath(sys.argv[1]))' "$1" 2> /dev/null || echo "$1"; }

refuse_venv() {  # this user may not write to $VENV
  local way_out="set VENV to a folder that you may write to, or to an environment that is complete"
  if [[ -d $VENV && ! -x $VENV || -L $VENV/bin/python && ! -x $VENV/bin/python ]]; then
    die 78 "$VENV was made by another user, and $(id -un) may not start its Python, $(real_path "$VENV/bin/python")." \
      "Its owner can make it again with one that all users may start: rm -r $VENV && PYTHON=/usr/bin/python3 make setup." \
      "Or $way_out"
  fi
  die 78 "cannot write to $VENV: $way_out"
}

take_lock() {  # until this process and all it started are gone; by Python, since macOS has no flock command
  [[ -e $VENV/.setup.lock || -z $(ls -A "$VENV" 2> /dev/null) ]] ||
    die 78 "$VENV was not made by this script and is left as it is: remove it, or set VENV to another folder"
  { mkdir -p "$VENV" && : >> "$VENV/.setup.lock"; } 2> /dev/null || refuse_venv
  exec 9>> "$VENV/.setup.lock"
  "$python" -c 'import os, sys; sys.exit(bool(os.statvfs(sys.argv[1]).f_flag & getattr(os, "ST_NOEXEC", 0)))' "$VENV" ||
    die 78 "$VENV is on a disk where no file may be executed (mounted noexec): set VENV to a folder on another disk"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)' 2> /dev/null && return
  say "waiting for another setup of $VENV to end"
  "$python" -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)'
}

# ignore_targets_of_pip: pip.conf may say where other environments get their packages, and which. The file in $VENV is
# stronger, and an empty value is none.
ignore_targets_of_pip() {
  local section name
  for section in global install; do
    echo "[$section]"
    for name in target prefix root python constraint requirement editable; do echo "$name ="; done
  done > "$VENV/pip.conf"
}

pip_install() {  # what a lock file pins; without pip's remarks on folders in its configuration
  ignore_targets_of_pip
  say "installing $1 in $VENV"
  SAID=""
  "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --only-binary :all: \
    --require-hashes --no-deps -r "$1" 2>&1 | relay "installing $1" || failed pip
}

make_venv() {
  find -H "$VENV" -mindepth 1 -maxdepth 1 ! -name .setup.lock -exec rm -rf {} +
  "$python" -m venv "$VENV"
}

install_base() {
  local sum found update words
  sum=$(digest "${BASE[@]}")  # now: the files may change meanwhile
  if [[ -x $VENV/bin/python && -f $VENV/.ready ]]; then
    update=yes
    rm -f "$VENV/.ready" "$VENV"/.ready-*
  else
    # Its words are held back: at Ctrl-C they are a traceback.
    words=$(make_venv 2>&1 | hold "creating $VENV") || die 78 "$python -m venv failed: $words." \
      "If it could not make a link, set VENV to a folder on another disk"
  fi
  pip_install requirements/base.txt
  found=$(bash scripts/setup_torch.sh) || { SAID=$found; failed "installing torch"; }
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
  ignore_other_environments
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
