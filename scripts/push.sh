#!/usr/bin/env bash
# Push the image of this commit, built first if it is not here, and note its digest for the manifests.
#
#   usage: scripts/push.sh [-- OPTIONS...]     (options for the push, such as --tls-verify=false of podman and buildah)
#   reads: IMAGE, IMAGE_BUILDER, BASE_IMAGE, FLASH_ATTN_WHEEL, TORCH_BACKEND (settings), git; the builder's own logins
#   makes: REPOSITORY:COMMIT in the registry; in .image the line REPOSITORY@sha256:..., which k8s/cluster/image_ref.py reads
#   exits: 64 bad setting, 78 no builder, no git, uncommitted changes or no login, 1 build or push failed
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/lib.sh
ME=push
source scripts/image_lib.sh

# A registry is told from a folder of the builder's default registry by a dot or a port, as builders do.
check_image() {
  local like="like IMAGE=registry.example.org/lab/pure-transformer" registry=${IMAGE%%/*}
  [[ -n $IMAGE ]] || die 64 "push: IMAGE is not set; name the repository that the image is to go to, $like"
  [[ $IMAGE == */* && ($registry == *[.:]* || $registry == localhost) ]] ||
    die 64 "push: IMAGE=$IMAGE names no registry; write its host in front, $like"
}

check_clean() {
  local first
  first=$(head -n 1 <<<"${CHANGED:3}")
  [[ -z $CHANGED ]] || die 78 "push: files differ from the commit ($first$(more "$CHANGED")), and an image that is" \
    "pushed must be some commit; commit or stash them (git status lists them), then make push"
  first=$(head -n 1 <<<"$UNKNOWN")
  [[ -z $UNKNOWN ]] || die 78 "push: git ignores $first$(more "$UNKNOWN"), which would enter the image; commit or" \
    "remove it, then make push"
}
more() {  # LINES: how many there are beside the first
  local count
  count=$(wc -l <<<"$1")
  ((count == 1)) || echo " and $((count - 1)) more"
}

# push_tag OPTIONS...: sets DIGEST.
push_tag() {
  local code=0
  if [[ $TOOL == docker ]]; then
    docker push "$@" "$TAG" 2>&1 | tee "$scratch/said" || code=$?
    DIGEST=$(sed -n 's/.* digest: \(sha256:[0-9a-f]\{64\}\) .*/\1/p' "$scratch/said" | tail -n 1)
  else
    "$TOOL" push --digestfile "$scratch/digest" "$@" "$TAG" 2>&1 | tee "$scratch/said" || code=$?
    DIGEST=$(cat "$scratch/digest" 2>/dev/null) || true
  fi
  if ((code)) && grep -qiE 'unauthorized|authentication|denied|no basic auth|forbidden' "$scratch/said"; then
    die 78 "push: ${REPOSITORY%%/*} does not let you in: type \`$TOOL login ${REPOSITORY%%/*}\`, with a token that" \
      "may write to ${REPOSITORY#*/}, then make push"
  fi
  ((code == 0)) ||
    die 1 "push: $TOOL could not push $TAG, see its last lines above; it stays here, and make push tries again"
  [[ $DIGEST =~ ^sha256:[0-9a-f]{64}$ ]] ||
    die 1 "push: $TOOL pushed $TAG, but did not tell its digest; make push tries again"
}

# note_digest: the line of this repository in .image, in the place of an earlier one; others stay.
note_digest() {
  {
    [[ ! -f .image ]] || awk -v own="$REPOSITORY@" 'index($0, own) != 1' .image
    echo "$REPOSITORY@$DIGEST"
  } >"$scratch/image"
  cat "$scratch/image" >.image # git ignores this name only
}

main() {
  [[ $# == 0 || $1 == -- ]] || die 64 "usage: scripts/push.sh [-- OPTIONS...]"
  image_settings
  check_image
  git_facts
  check_clean
  find_builder
  # shellcheck disable=SC2119  # the options are for the push
  if is_built; then echo "push: $TAG is here already"; else build; fi
  scratch=$(mktemp -d)
  trap 'rm -rf "$scratch"' EXIT
  push_tag "${@:2}"
  note_digest
  echo "push: $REPOSITORY@$DIGEST"
  if [[ $IMAGE == "$REPOSITORY" ]]; then
    echo "push: noted in .image, where the manifests find it; next: make train-8xa100 (DRY_RUN=1 shows them)"
  else
    echo "push: noted in .image, but IMAGE=$IMAGE is what pods take; set IMAGE=$REPOSITORY for them to take this one"
  fi
}

main "$@"
