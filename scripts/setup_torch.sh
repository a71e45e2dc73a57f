#!/usr/bin/env bash
# Install the pinned torch in $VENV, in the build that fits this machine. A part of scripts/setup.sh.
#
#   usage: VENV=.venv scripts/setup_torch.sh
#   reads: requirements/torch.txt, TORCH_BACKEND (auto, cpu, cu126, cu130 ...), UV_CUDA_DRIVER_VERSION (a driver
#          to assume, for an environment that another machine will use), pip's and uv's configuration
#   needs: relay and hold of scripts/setup.sh
#   makes: torch in $VENV; says first which build and how much it is; prints "BUILD what torch sees" on stdout, or why
#          pip or uv failed
set -euo pipefail
shopt -s lastpipe 2> /dev/null || true  # SAID outlives its loop
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."

SAID=""
BACKEND=${TORCH_BACKEND:-auto}
PINNED=$(sed -n 's/^torch==//p' requirements/torch.txt)
CHECK='import platform, torch
build, gpus = torch.__version__.partition("+")[2] or "cpu", torch.cuda.device_count()
seen = "1 GPU" if gpus == 1 else f"{gpus} GPUs"
print(build, f"Python {platform.python_version()}, torch {torch.__version__} ({build} build), {seen} seen")'

say() { echo "setup: $*" >&2; }

driver_version() {  # of the NVIDIA driver; empty where there is none
  local found=${UV_CUDA_DRIVER_VERSION:-}
  [[ -n $found ]] || found=$(nvidia-smi --query-gpu=driver_version --format=csv,noheader 2> /dev/null) || found=""
  [[ $found =~ ^([0-9]+[0-9.]*) ]] && echo "${BASH_REMATCH[1]}"  # the first line: there is one a GPU
}

installed() {  # the version of torch in $VENV; empty where there is none
  "$VENV/bin/python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2> /dev/null || true
}

local_wheel() {  # the version of a wheel in a folder that pip is told to look in; empty where there is none
  # --no-index: asking an index could download gigabytes, only to find out
  "$VENV/bin/python" -m pip install --quiet --dry-run --ignore-installed --no-deps --no-index --report - \
    "torch==$PINNED" 2> /dev/null | hold "looking for a wheel of torch" | sed -n 's/%2B/+/; s|.*"url": "file:.*/torch-\([^-]*\)-.*|\1|p'
}

wanted() {  # VERSION: whether it is the pinned one, in a build that will do
  # macOS has one build, without a name
  [[ ${1%%+*} == "$PINNED" && ( $BACKEND == auto || $1 == *+"$BACKEND" || "$1+$BACKEND" == "$PINNED+cpu" ) ]]
}

announce() {  # VERSION DRIVER WHENCE: which build, for what, and how much
  local why="no NVIDIA driver found"
  [[ -z $2 ]] || why="NVIDIA driver $2"
  say "torch $1 ($why), $3"
  if [[ -n $2 && $1 == *+cpu ]]; then
    say "this build leaves the GPUs unused; TORCH_BACKEND=cu126 takes one that uses them, with driver 525 or later"
  fi
}

explain() { echo "$SAID"; exit 1; }  # what pip or uv said, from which setup.sh derives its advice

main() {
  local driver version size plan uv
  driver=$(driver_version) || driver=""
  if wanted "$(installed)"; then
    :  # kept
  elif version=$(local_wheel) && wanted "$version"; then
    announce "$version" "$driver" "from a wheel on this machine"
    "$VENV/bin/python" -m pip install --quiet --disable-pip-version-check --no-compile --no-index "torch==$version" 2>&1 |
      relay "installing torch" || explain
  else
    # uv's auto would take the build for a laptop's Intel GPU, and cannot read what nvidia-smi says of several GPUs
    [[ $BACKEND != auto || -n $driver ]] || BACKEND=cpu
    [[ -z $driver ]] || export UV_CUDA_DRIVER_VERSION=$driver
    uv=("$VENV/bin/uv" pip install --python "$VENV/bin/python" --reinstall-package torch
      "--torch-backend=$BACKEND" "torch==$PINNED")
    plan=$("${uv[@]}" --dry-run 2>&1 | hold "choosing a build of torch") || { echo "$plan" >&2; echo "$plan"; exit 1; }
    version=$(sed -n 's/^ *[+~] torch==//p' <<< "$plan")
    case $version in
      "") version=$PINNED size="an amount that uv did not tell" ;;
      "$PINNED" | *+cpu) size="about 0.2 GB" ;;
      *) size="about 3 GB with the CUDA libraries" ;;
    esac
    announce "$version" "$driver" "$size to download"
    if [[ -t 2 ]]; then  # it shows how far it is
      "${uv[@]}" >&2
    else
      "${uv[@]}" --quiet 2>&1 | relay "installing torch" || explain
    fi
  fi
  "$VENV/bin/python" -c "$CHECK" | hold "loading torch for the first time"
}

main "$@"
