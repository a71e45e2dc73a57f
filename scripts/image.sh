#!/usr/bin/env bash
# Build the image that pods run, with docker, podman or buildah; the last step of docker/Dockerfile runs it.
#
#   usage: scripts/image.sh [-- OPTIONS...]     (options for the builder, such as --no-cache or --network host)
#   reads: IMAGE, IMAGE_BUILDER, BASE_IMAGE, FLASH_ATTN_WHEEL, TORCH_BACKEND (settings), git
#   makes: REPOSITORY:COMMIT in the builder's store, -dirty behind it where files differ from the commit; REPOSITORY is
#          IMAGE's, or localhost/pure-transformer
#   exits: 64 bad setting, 78 no builder or no git, 1 the build failed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh
ME=image
source scripts/image_lib.sh

main() {
  [[ $# == 0 || $1 == -- ]] || die 64 "usage: scripts/image.sh [-- OPTIONS...]"
  image_settings
  git_facts
  find_builder
  build "${@:2}"
  if [[ $VERSION == *-dirty ]]; then
    echo "image: files differ from the commit (git status), so make push will refuse it; to try it: make image-test"
  else
    echo "image: next: make push$([[ -n $IMAGE ]] || echo ' IMAGE=registry.example.org/lab/pure-transformer')"
  fi
}

main "$@"
