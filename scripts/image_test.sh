#!/usr/bin/env bash
# Build the image on this machine without a registry, on a Debian made by debootstrap, with torch for the CPU; then run
# the main job in it as a pod would (scripts/image_pod.sh): it trains, is killed, goes on, is told to stop, goes on, and
# is done. All of it in name spaces of its own, so that no mount and no process outlives it, however it ends.
#
#   usage: scripts/image_test.sh
#   reads: TMPDIR; IMAGE_TEST_BASE, the folder that keeps the Debian base for the next time (default
#          TMPDIR/pure-transformer-base); pip's configuration, which serves the build and does not enter the image
#   exits: 78 not root or something is not installed, 143 told to stop, 1 a check failed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh

SUITE=bookworm # as the default base has it
BASE_PACKAGES=python3,python3-venv,python3-dev,gcc,g++,libc6-dev,tini,ca-certificates,libibverbs1,ibverbs-providers
STEPS=120 KILLED_AT=48 STOPPED_AT=80 SAVE_EVERY=20

say() { echo "image-test: $*"; }

# step WORDS COMMAND...: run it, say how long it took; where it fails, show the last lines of what it said.
step() {
  local start=$SECONDS code
  set +e
  (set -e; "${@:2}") >"$work/log" 2>&1 # not as a condition: in one, bash would pass over what fails inside
  code=$?
  set -e
  if ((code)); then
    tail -n 30 "$work/log" >&2
    say "$1: failed after $((SECONDS - start)) s, see above" >&2
    exit 1
  fi
  say "$1: $((SECONDS - start)) s"
}

# ---- What is built upon

# make_base: a Debian with all that docker/system.sh looks for, as an archive that is kept.
make_base() {
  rm -f "$kept".*
  debootstrap --variant=minbase --include="$BASE_PACKAGES" "$SUITE" "$work/debian"
  rm -rf "$work"/debian/var/{cache/apt,lib/apt/lists}/* "$work"/debian/{usr/share/{doc,man,locale},dev,tmp}/*
  tar --one-file-system -C "$work/debian" -cf "$kept.$$" .
  mv "$kept.$$" "$kept"
  rm -rf "$work/debian"
}

import_base() {
  local container
  container=$(buildah from scratch)
  tar -C "$(buildah mount "$container")" -xf "$kept"
  buildah commit --quiet --rm "$container" localhost/base:test
}

# ---- The image

# entering: what .dockerignore lets in of a folder full of what must stay out, by the builder's own reading of it.
entering() {
  local tree=$work/tree name container
  mkdir -p "$tree"
  for name in .env .env.production id_rsa key.pem .git/config .netrc runs/tiny/metrics.jsonl data/a.bin wandb/run.log \
    .venv/bin/python train/.env train/id_rsa train/a.pem train/notes.txt train/__pycache__/a.pyc presets/.env \
    scripts/a.py sources/a.json tests/test_a.py k8s/a.yaml .image docker/Dockerfile \
    train/a.py train/data/a.py presets/a.env scripts/a.sh sources/a.toml requirements/a.txt LICENSE; do
    mkdir -p "$(dirname "$tree/$name")"
    echo "$name" >"$tree/$name"
  done
  printf 'FROM scratch\nCOPY . /\n' >"$work/Dockerfile"
  buildah bud --quiet --isolation chroot --ignorefile .dockerignore --file "$work/Dockerfile" --tag localhost/entering \
    "$tree"
  container=$(buildah from --pull-never localhost/entering)
  (cd "$(buildah mount "$container")" && find . -type f | sort >"$work/entered")
  buildah rm "$container"
  diff - "$work/entered" <<<"./LICENSE
./presets/a.env
./requirements/a.txt
./scripts/a.sh
./sources/a.toml
./train/a.py
./train/data/a.py"
}

# build_image: as make image does it. Folders that pip is told to take packages from are lent to the build at /mnt.
build_image() {
  local machine
  machine=$(uname -m) # that of the Debian
  machine=${machine/x86_64/amd64}
  mkdir -p "$work/lent"
  "$PY" scripts/image_pip.py "$work/lent"
  while read -r here there; do
    if [[ -d $here ]]; then mkdir "$there"; else : >"$there"; fi
    mount --bind "$here" "$there"
  done <"$work/lent/mounts"
  BASE_IMAGE=localhost/base:test scripts/image.sh -- --platform "linux/${machine/aarch64/arm64}" --layers=false \
    --isolation chroot --pull-never --volume "$work/lent:/mnt:ro,rbind" --build-arg PIP_CONFIG_FILE=/mnt/pip.conf
}

# look_inside: what the image declares, and that nothing else than this commit's files is in it.
look_inside() {
  local name container
  buildah inspect --type image "$TAG" >"$work/image.json"
  "$PY" scripts/image_checks.py declared "$work/image.json" "$COMMIT${VERSION:12}" "$VERSION" >"$work/declared"
  container=$(buildah from --pull-never "$TAG")
  buildah mount "$container" >"$work/root"
  root=$(<"$work/root")
  [[ $(<"$root/app/REVISION") == "$COMMIT${VERSION:12}" ]]
  (cd "$root/app" && find . -type f ! -name '*.pyc' ! -name REVISION -printf '%P\n' | sort) >"$work/inside"
  git ls-files --cached --others --exclude-standard | sort >"$work/tracked"
  [[ -s $work/inside && -z $(comm -23 "$work/inside" "$work/tracked") ]] || {
    echo "git does not know these:"; comm -23 "$work/inside" "$work/tracked"; return 1
  }
  grep -E '^(settings|record|hardware|train|finetune|analysis)/.*\.py$' "$work/tracked" | comm -13 "$work/inside" - >"$work/left-out"
  [[ ! -s $work/left-out ]] || { echo "left out by .dockerignore:"; cat "$work/left-out"; return 1; }
  name=$(find "$root" -xdev \( -name .env -o -name .git -o -name .netrc -o -name 'id_rsa*' -o -name pip.conf -o \
    -name runs -path '*/app/*' \) -print -quit)
  [[ -z $name ]] || { echo "$name is in the image"; return 1; }
  [[ -z $(find "$root/mnt" "$root/tmp" -mindepth 1) ]] || { echo "the image has files in /mnt or /tmp"; return 1; }
}

# ---- The job

# pod COMMAND...: what the image declares and the settings of a pod, with a command behind its entry point; in the
# background. Sets pod, to be waited for, and what $work/pid will hold: the number of its first process. It has one
# thread: several may add up in another order on some processors, and what is asked here is what a checkpoint holds.
pod() {
  local environment entry
  { read -r workdir; mapfile -t environment; } < <(sed '/^$/,$d' "$work/declared")
  mapfile -t entry < <(sed '1,/^$/d' "$work/declared")
  rm -f "$work/pid"
  unshare --mount --pid --net --ipc --fork --kill-child scripts/image_pod.sh "$root" "$work/volume" "$work/pid" \
    "$workdir" "${environment[@]}" PRESET=tiny RUNS_DIR=/volume/runs DATA_DIR=/volume/data MAX_STEPS=$STEPS \
    SAVE_EVERY=$SAVE_EVERY EVAL_EVERY=0 EVAL_TOKENS=1024 LOG_EVERY=10 OMP_NUM_THREADS=1 \
    "${@:-${entry[@]}}" >>"$work/console" 2>&1 &
  pod=$!
}

# rights: what a process of the image may do, by trying it.
rights() {
  local code=0
  : >"$work/console"
  # shellcheck disable=SC2016  # the shell in the pod expands it
  pod tini -- bash -c 'id -u; id -g; grep -E "^(CapEff|CapBnd|NoNewPrivs)" /proc/self/status
    for folder in / /app /app/train /opt/venv /etc /usr /root /var/tmp; do
      touch "$folder/probe" 2>/dev/null && echo "can write to $folder"
    done
    touch /tmp/probe /dev/shm/probe /volume/probe && rm /volume/probe && echo "can write to its own"'
  wait "$pod" || code=$?
  cat "$work/console"
  [[ $code == 0 ]] && diff <(tr -s '\t' ' ' <"$work/console") - <<<"1000
1000
CapEff: 0000000000000000
CapBnd: 0000000000000000
NoNewPrivs: 1
can write to its own"
}

# until_step N: as long as the job lives, until its record has that step.
until_step() {
  local pattern="\"event\": \"step\".*\"step\": $1,"
  until grep -q "$pattern" "$work/volume/runs/tiny/metrics.jsonl" 2>/dev/null; do
    kill -0 "$pod" 2>/dev/null || { cat "$work/console"; echo "the job ended before step $1"; return 1; }
    sleep 0.1
  done
}

# ends CODE...: wait for the job's end, which must be one of these.
ends() {
  local code=0
  wait "$pod" || code=$?
  [[ " $* " == *" $code "* ]] || { cat "$work/console"; echo "the job ended with $code, not with $*"; return 1; }
}

train_and_kill() {
  : >"$work/console"
  pod
  until_step $KILLED_AT
  grep -q "^Uid:.1000.1000.1000.1000$" "/proc/$(<"$work/pid")/status"
  kill -KILL "$(<"$work/pid")"
  ends 137 1 # unshare of Debian 12 fails to end by the signal itself
}

train_and_stop() {
  pod
  until_step $STOPPED_AT
  kill -TERM "$(<"$work/pid")"
  ends 75
}

train_to_the_end() {
  pod
  ends 0
  "$PY" scripts/image_checks.py trained "$work/volume/runs/tiny" $STEPS $KILLED_AT $SAVE_EVERY "$COMMIT" \
    "${VERSION:12}" "$work/console"
}

# ---- From outside to inside

# inside WORK: the test itself, as the first process of its name spaces.
inside() {
  work=$1
  export CONTAINERS_STORAGE_CONF=$work/storage.conf BUILDAH_ISOLATION=chroot TMPDIR=$work/tmp
  printf '[storage]\ndriver = "vfs"\ngraphroot = "%s"\nrunroot = "%s"\n' "$work/graph" "$work/run" >"$work/storage.conf"
  mkdir "$work/tmp"
  # the test's own settings, whatever those of this machine's user are
  : >"$work/empty.env"
  export ENV_FILE=$work/empty.env IMAGE=localhost/pure-transformer IMAGE_BUILDER=buildah TORCH_BACKEND=cpu
  unset FLASH_ATTN_WHEEL MAKE_SETTINGS
  ME=image-test
  source scripts/image_lib.sh
  image_settings
  git_facts
  kept=${IMAGE_TEST_BASE:-$work/../pure-transformer-base}
  kept+=/$SUITE-$(uname -m)-$(cksum <<<"$BASE_PACKAGES" | cut -d ' ' -f 1).tar
  mkdir -p "$(dirname "$kept")"
  [[ -f $kept ]] || step "a Debian to build upon, by debootstrap" make_base
  step "the same as an image" import_base
  step "what .dockerignore lets through" entering
  step "make image" build_image
  grep -E '^image: [a-z]+  ' "$work/log" # what it says of itself
  step "labels, user, files" look_inside
  root=$(<"$work/root")
  say "size: $(du -sm --apparent-size "$root" | cut -f 1) MiB unpacked, without CUDA"
  install -d -o 1000 -g 1000 "$work/volume"
  step "rights of a process" rights
  step "trains, killed at step $KILLED_AT" train_and_kill
  step "goes on, told to stop at step $STOPPED_AT, saves" train_and_stop
  step "goes on to step $STEPS" train_to_the_end
  cat "$work/log"
}

# leftovers: folders of tests that were killed; who is at work holds the lock of its own.
leftovers() {
  local folder
  for folder in "${TMPDIR:-/tmp}"/pure-transformer-test.*/; do
    [[ -d $folder ]] || continue
    (exec 8>"$folder/lock" && flock -n 8 && rm -rf "$folder") || true
  done
}

check_machine() {
  local tool missing=()
  [[ $(uname -s) == Linux ]] || die 78 "image-test: works on Linux only; elsewhere make image ends by trying the image"
  [[ $(id -u) == 0 ]] || die 78 "image-test: mounts file systems, which root alone may; type sudo make image-test"
  for tool in buildah debootstrap git; do command -v "$tool" >/dev/null || missing+=("$tool"); done
  ((${#missing[@]} == 0)) || die 78 "image-test: ${missing[*]} must be installed: apt-get install ${missing[*]}"
  unshare --mount --pid --net --ipc --fork true 2>/dev/null ||
    die 78 "image-test: this machine allows no name spaces (unshare), as in a container without rights; use another one"
}

main() {
  local code=0
  if [[ ${1-} == inside ]]; then
    inside "$2"
    return
  fi
  check_machine
  leftovers
  work=$(mktemp -d "${TMPDIR:-/tmp}/pure-transformer-test.XXXXXXXX")
  exec 9>"$work/lock" # held by all that is started here, for as long as it lives
  flock 9
  trap 'exec 9>&-; flock --wait 60 "$work/lock" true; rm -rf "$work"' EXIT
  trap 'kill -KILL "$child"; wait "$child" 2>/dev/null || true; die 143 "image-test: told to stop"' TERM INT HUP
  setpriv --pdeathsig KILL unshare --mount --pid --ipc --fork --kill-child --mount-proc "$0" inside "$work" &
  child=$!
  wait "$child" || code=$?
  ((code)) || say "passed in $SECONDS s"
  return "$code"
}

main "$@"
