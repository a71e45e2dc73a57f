#!/usr/bin/env bash
# Install the system packages that the base of the image lacks, and add the user that its processes run as.
#
#   usage: docker/system.sh          (by docker/Dockerfile, as root)
#   makes: packages; the user trainer and its group, both 1000, if the base has none of that number
#   exits: 78 if the base lacks something and has no apt-get
set -euo pipefail

missing_packages() {
  python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3 python3-venv
  # torch.compile needs gcc for Triton, g++ for the CPU, and Python.h for both.
  command -v gcc >/dev/null || echo gcc libc6-dev
  command -v g++ >/dev/null || echo g++
  python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    echo python3-dev
  command -v tini >/dev/null || echo tini
  # Without it NCCL silently uses TCP instead of InfiniBand and RoCE.
  [[ $(ldconfig -p) == *libibverbs.so.1* ]] || echo libibverbs1 ibverbs-providers
  [[ -s /etc/ssl/certs/ca-certificates.crt ]] || echo ca-certificates
}

main() {
  local packages
  read -ra packages <<<"$(missing_packages | tr '\n' ' ')"
  if ((${#packages[@]})); then
    command -v apt-get >/dev/null || {
      echo "image: BASE_IMAGE lacks ${packages[*]}, and has no apt-get to install them; choose one on Debian" >&2
      exit 78
    }
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${packages[@]}"
    rm -rf /var/lib/apt/lists/* /var/cache/apt/* /var/log/apt /var/log/dpkg.log
  fi
  # torch asks for the name of its user. Written as a line, since useradd would add dates.
  getent group 1000 >/dev/null || echo "trainer:x:1000:" >>/etc/group
  getent passwd 1000 >/dev/null || echo "trainer:x:1000:1000::/tmp:/bin/bash" >>/etc/passwd
  mkdir -p /volume # runs and data; a new volume of docker or podman gets the same owner
  chown 1000:1000 /volume
}

main "$@"
