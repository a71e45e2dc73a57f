#!/usr/bin/env bash
# Build the image on this machine without a registry, on a Debian made by debootstrap, with torch for the CPU. Then run
# the main job in it as a pod does: tests/image_job.py. All of it runs in name spaces of its own, so no mount and no
# process outlives it, however it ends.
#
#   usage: scripts/image_test.sh
#   reads: TMPDIR; IMAGE_TEST_BASE, the folder that keeps the Debian base for the next time (default
#          TMPDIR/pure-transformer-base); pip's configuration, for the build only
#   exits: 78 not root or something is not installed, 143 told to stop, 1 a check failed
set -euo pipefail
CDPATH="" cd "$(dirname "${BASH_SOURCE[0]}")/.."
PY=${VENV:-$PWD/.venv}/bin/python

SUITE=bookworm # as the default base has it
PACKAGES=python3,python3-venv,python3-dev,gcc,g++,libc6-dev,tini,ca-certificates,libibverbs1,ibverbs-providers

die() {
  echo "image-test: $*" >&2
  exit 78
}

# make_base KEPT: a Debian with all that docker/system.sh looks for, as an archive.
make_base() {
  echo "image-test: a Debian to build upon, by debootstrap"
  debootstrap --variant=minbase --include="$PACKAGES" "$SUITE" "$work/debian" >"$work/log" || { cat "$work/log"; exit 1; }
  rm -rf "$work"/debian/{dev,tmp,var/cache/apt,var/lib/apt/lists}/*
  tar --one-file-system -C "$work/debian" -cf "$1.part" .
  mv "$1.part" "$1"
  rm -rf "$work/debian"
}

import_base() {
  local container
  container=$(buildah from scratch)
  tar -C "$(buildah mount "$container")" -xf "$1"
  buildah commit --quiet --rm "$container" localhost/base:test >/dev/null
}

# lend_pip: set LENT, the builder's options that give the build this machine's pip settings. Folders and files that they
# name are mounted under their own names, since the pages of an index point to files next to it.
lend_pip() {
  local word
  LENT=(--volume "$work/pip:/mnt:ro" --build-arg PIP_CONFIG_FILE=/mnt/pip.conf)
  mkdir -m 700 "$work/pip"
  "$PY" -m pip config list | sed -n "s/^.*\.\(extra-index-url\|index-url\|find-links\|cert\|proxy\)='\(.*\)'$/\1 = \2/p" |
    sed 's/\\n/ /g' | awk -F ' = ' '!seen[$1]++' | { echo "[global]" && cat; } >"$work/pip/pip.conf"
  # shellcheck disable=SC2013  # of several words on a line each is one
  for word in $(sed -n 's/.* = //p' "$work/pip/pip.conf"); do
    word=${word#file://}
    word=${word%/simple}
    [[ $word != /* || ! -e $word ]] || LENT+=(--volume "$word:$word:ro")
  done
}

# inside WORK: the test itself, as the first process of its name spaces.
inside() {
  local kept container
  work=$1
  export CONTAINERS_STORAGE_CONF=$work/storage.conf BUILDAH_ISOLATION=chroot TMPDIR=$work
  printf '[storage]\ndriver = "vfs"\ngraphroot = "%s"\nrunroot = "%s"\n' "$work/graph" "$work/run" >"$work/storage.conf"
  # the test's own settings, whatever those of this machine's user are
  : >"$work/empty.env"
  export ENV_FILE=$work/empty.env IMAGE=localhost/pure-transformer IMAGE_BUILDER=buildah TORCH_BACKEND=cpu
  unset FLASH_ATTN_WHEEL MAKE_SETTINGS
  kept=${IMAGE_TEST_BASE:-$work/../pure-transformer-base}
  mkdir -p "$kept"
  kept+=/$SUITE-$(uname -m)-$(cksum <<<"$PACKAGES" | cut -d ' ' -f 1).tar
  [[ -f $kept ]] || make_base "$kept"
  import_base "$kept"
  lend_pip
  read -r TAG REVISION VERSION < <("$PY" -m scripts.image facts) # now: a commit may come meanwhile
  BASE_IMAGE=localhost/base:test "$PY" -m scripts.image build -- --platform "linux/$(dpkg --print-architecture)" \
    --layers=false --pull-never "${LENT[@]}" >"$work/log" 2>&1 || { tail -n 30 "$work/log" >&2; exit 1; }
  grep '^image: ' "$work/log" # what it says of itself
  buildah inspect --type image "$TAG" >"$work/image.json"
  container=$(buildah from --pull-never "$TAG")
  "$PY" -m tests.image_job "$(buildah mount "$container")" "$work" "$REVISION" "$VERSION"
}

main() {
  local tool code=0
  if [[ ${1-} == inside ]]; then
    inside "$2"
    return
  fi
  [[ $(id -u) == 0 ]] || die "mounts file systems, which root alone may; type sudo make image-test"
  for tool in buildah debootstrap git; do
    command -v "$tool" >/dev/null || die "$tool must be installed: apt-get install $tool"
  done
  unshare --mount --pid --net --ipc --fork true 2>/dev/null ||
    die "this machine allows no name spaces (unshare): it is not Linux, or a container; make image tries the image too"
  work=$(mktemp -d "${TMPDIR:-/tmp}/pure-transformer-test.XXXXXXXX")
  trap 'rm -rf "$work"' EXIT
  trap 'kill -KILL "$child"; wait "$child" 2>/dev/null || true; exit 143' TERM INT HUP
  setpriv --pdeathsig KILL unshare --mount --pid --ipc --fork --kill-child --mount-proc bash scripts/image_test.sh inside "$work" &
  child=$!
  wait "$child" || code=$?
  ((code)) || echo "image-test: passed in $SECONDS s"
  return "$code"
}

main "$@"
