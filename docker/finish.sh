#!/usr/bin/env bash
# In the image that is being built: what is left to do to the code in the current folder.
#
#   usage: docker/finish.sh REVISION          (by docker/Dockerfile, as root)
#   makes: REVISION; bytecode; rights that do not hang on the umask of who cloned
set -euo pipefail

main() {
  echo "$1" >REVISION
  # compared with its source, unlike that of packages: a file that somebody mounts over another counts
  "$VENV/bin/python" -m compileall -q --invalidation-mode checked-hash settings record hardware train export \
    finetune pipeline plan analysis doctor monitor
  chmod -R a+rX,u+w,go-w .
  find /tmp -mindepth 1 -delete
}

main "$@"
