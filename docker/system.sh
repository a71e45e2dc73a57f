#!/usr/bin/env bash
# In the image that is being built: the system packages that its base lacks, and the user of the processes.
#
#   usage: docker/system.sh          (by docker/Dockerfile, as root)
#   makes: packages; the user trainer and its group, both 1000, where the base has none of that number
#   exits: 78 where the base is neither Debian nor Ubuntu, and lacks something
set -euo pipefail

missing_packages() {
  python3 -c 'import ensurepip, venv' 2>/dev/null || echo python3 python3-venv
  # torch.compile calls a compiler: gcc for what Triton writes, g++ for what is left to the CPU; both want Python.h
  command -v gcc >/dev/null || echo gcc libc6-dev
  command -v g++ >/dev/null || echo g++
  python3 -c 'import os, sysconfig; os.stat(sysconfig.get_path("include") + "/Python.h")' 2>/dev/null ||
    echo python3-dev
  command -v tini >/dev/null || echo tini
  # without it NCCL passes over InfiniBand and RoCE, and takes TCP
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
  # torch asks for the name of its user; written as a line, since useradd would add dates
  getent group 1000 >/dev/null || echo "trainer:x:1000:" >>/etc/group
  getent passwd 1000 >/dev/null || echo "trainer:x:1000:1000::/tmp:/bin/bash" >>/etc/passwd
  mkdir -p /volume # runs and data; a fresh volume of docker or podman takes over whose it is
  chown 1000:1000 /volume
}

main "$@"
