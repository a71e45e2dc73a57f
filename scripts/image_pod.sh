#!/usr/bin/env bash
# A stand-in for a pod: run a command in an image that is unpacked in a folder. The command runs as uid 1000 without any
# capabilities and without a network, and can write to /tmp, /dev/shm and /volume only. A part of scripts/image_test.sh.
#
#   usage: unshare --mount --pid --net --ipc --fork --kill-child scripts/image_pod.sh ROOT VOLUME PIDFILE WORKDIR
#          [NAME=VALUE...] COMMAND...
#   makes: PIDFILE, with the command's process id as seen from outside. All mounts belong to its own name space, and end
#          with it, however it ends
set -euo pipefail

main() {
  local root=$1 volume=$2 pidfile=$3 workdir=$4 pid device
  read -r pid _ </proc/self/stat # this /proc is still that of outside
  echo "$pid" >"$pidfile"
  mount --make-rprivate /
  mount --bind "$root" "$root"
  mount -o remount,bind,ro "$root"
  mount -t tmpfs -o mode=1777,size=4g tmpfs "$root/tmp"
  mount --bind "$volume" "$root/volume"
  mount -t proc proc "$root/proc"
  mount -t tmpfs -o mode=755,size=1m tmpfs "$root/dev"
  for device in null zero full random urandom tty; do
    : >"$root/dev/$device"
    mount --bind "/dev/$device" "$root/dev/$device"
  done
  mkdir "$root/dev/shm"
  mount -t tmpfs -o mode=1777,size=1g tmpfs "$root/dev/shm"
  ln -s /proc/self/fd "$root/dev/fd"
  exec env -i "PATH=$PATH" chroot "$root" /usr/bin/setpriv --reuid=1000 --regid=1000 --clear-groups --no-new-privs \
    --bounding-set=-all --inh-caps=-all /usr/bin/env -i --chdir="$workdir" "${@:5}"
}

main "$@"
