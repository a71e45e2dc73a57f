# What make image and make push have in common; to be sourced behind lib.sh. ME is who speaks.
# shellcheck shell=bash

# image_settings: those that both need, from all their sources.
image_settings() {
  local settings
  settings=$("$PY" -m settings.config get IMAGE IMAGE_BUILDER BASE_IMAGE FLASH_ATTN_WHEEL TORCH_BACKEND) || exit $?
  { read -r IMAGE && read -r IMAGE_BUILDER && read -r BASE_IMAGE && read -r FLASH_ATTN_WHEEL &&
    read -r TORCH_BACKEND; } <<<"$settings"
  # an image cannot ask a driver; this build runs with the oldest ones
  [[ $TORCH_BACKEND != auto ]] || TORCH_BACKEND=cu126 BACKEND_WHY=", which runs with NVIDIA drivers from 525 on"
  BUILT_WITH="torch=$TORCH_BACKEND base=${BASE_IMAGE:-$(sed -n 's/^ARG BASE_IMAGE=//p' docker/Dockerfile)}"
  BUILT_WITH+=" flash-attn=${FLASH_ATTN_WHEEL:-none}"
}

# git_facts: COMMIT, its time COMMITTED in Unix seconds, CHANGED (files that differ from it, a line each) and UNKNOWN
# (files that git does not track and that would enter the image, ignored ones too). Then IMAGE's REPOSITORY and the TAG.
git_facts() {
  local line enter=()
  command -v git >/dev/null ||
    die 78 "$ME: git is not installed, and an image carries the commit it was built from; apt-get install git"
  COMMIT=$(git rev-parse --verify HEAD 2>&1) ||
    die 78 "$ME: git tells no commit to build from (${COMMIT%%$'\n'*}); make $ME works in a clone (git clone)"
  [[ -z $(git rev-parse --show-prefix) ]] ||
    die 78 "$ME: this folder lies in another repository, $(git rev-parse --show-toplevel); make $ME works in a clone" \
      "of its own (git clone)"
  COMMITTED=$(git log -1 --format=%ct)
  CHANGED=$(git status --porcelain --untracked-files=normal)
  while read -r line; do enter+=("$line"); done < <(sed -n 's/^!/:(glob)/p' .dockerignore)
  UNKNOWN=$(git ls-files --others -- "${enter[@]}" ':(exclude,glob)**/.*')
  REPOSITORY=${IMAGE%%@*}
  [[ ${REPOSITORY##*/} != *:* ]] || REPOSITORY=${REPOSITORY%:*} # a colon further left is a port's
  REPOSITORY=${REPOSITORY:-localhost/pure-transformer}
  VERSION=${COMMIT:0:12}
  [[ -z $CHANGED$UNKNOWN ]] || VERSION+=-dirty
  TAG=$REPOSITORY:$VERSION
}

# installed BUILDER, answers BUILDER: whether there is one; whether it works. docker and podman may be clients of a
# machine that is off.
installed() {
  if [[ $1 == buildx ]]; then docker buildx version; else command -v "$1"; fi &>/dev/null
}
answers() {
  case $1 in
    buildx | docker) docker info ;;
    podman) podman info ;;
    buildah) buildah version ;;
  esac &>/dev/null
}

# find_builder: sets BUILDER, by IMAGE_BUILDER, and TOOL, its command.
find_builder() {
  local candidates=(buildx docker podman buildah) silent=""
  [[ $IMAGE_BUILDER == auto ]] || candidates=("$IMAGE_BUILDER")
  for BUILDER in "${candidates[@]}"; do
    installed "$BUILDER" || continue
    TOOL=${BUILDER/buildx/docker}
    if answers "$BUILDER"; then return; fi
    silent=$TOOL
  done
  [[ -z $silent ]] ||
    die 78 "$ME: $silent is installed but does not work (\`$silent info\` says why): start its daemon, or install" \
      "podman or buildah and set IMAGE_BUILDER"
  [[ $IMAGE_BUILDER == auto ]] ||
    die 78 "$ME: IMAGE_BUILDER=$IMAGE_BUILDER is not installed; install it, or set IMAGE_BUILDER=auto to take what" \
      "there is"
  die 78 "$ME: there is nothing to build an image with; install docker, podman or buildah (Debian, Ubuntu: apt-get" \
    "install buildah)"
}

# label_of TAG NAME: a label of an image that is here; empty where it is not.
label_of() {
  local where=.Config.Labels kind=(image inspect)
  [[ $TOOL != buildah ]] || where=.OCIv1.Config.Labels kind=(inspect --type image)
  "$TOOL" "${kind[@]}" --format "{{index $where \"$2\"}}" "$1" 2>/dev/null || true
}

# is_built: whether TAG is here, from this commit and with these settings.
is_built() {
  [[ $VERSION != *-dirty && $(label_of "$TAG" org.opencontainers.image.revision) == "$COMMIT" &&
    $(label_of "$TAG" pure-transformer.built-with) == "$BUILT_WITH" ]]
}

# build OPTIONS...: make TAG; the options are for the builder.
build() {
  local start=$SECONDS source created argument command=() arguments=() size="about 3 GB"
  [[ $TORCH_BACKEND != cpu ]] || size="about 0.4 GB"
  echo "$ME: building $TAG with $BUILDER: torch $(sed -n 's/^torch==//p' requirements/torch.txt) in its build" \
    "$TORCH_BACKEND${BACKEND_WHY-} (TORCH_BACKEND, docs/image.md), $size to download where nothing is cached"
  case $BUILDER in
    buildx) command=(docker buildx build --load) ;;
    docker) command=(docker build) ;;
    podman) command=(podman build --format oci --timestamp "$COMMITTED" --ignorefile .dockerignore) ;;
    buildah) command=(buildah bud --format oci --layers --timestamp "$COMMITTED" --ignorefile .dockerignore) ;;
  esac
  created=$(TZ=UTC git log -1 --date=format-local:%Y-%m-%dT%H:%M:%SZ --format=%cd)
  arguments=("REVISION=$COMMIT${VERSION:12}" "VERSION=$VERSION" "CREATED=$created" "SOURCE_DATE_EPOCH=$COMMITTED"
    "TORCH_BACKEND=$TORCH_BACKEND" "BUILT_WITH=$BUILT_WITH")
  [[ -z $BASE_IMAGE ]] || arguments+=("BASE_IMAGE=$BASE_IMAGE")
  [[ -z $FLASH_ATTN_WHEEL ]] || arguments+=("FLASH_ATTN_WHEEL=$FLASH_ATTN_WHEEL")
  for argument in "${arguments[@]}"; do command+=(--build-arg "$argument"); done
  source=$(source_address "$(git remote get-url origin 2>/dev/null || true)")
  [[ -z $source ]] || command+=(--label "org.opencontainers.image.source=$source")
  # pods run on PCs' processors, also where this machine has an Arm one: they would say "exec format error"
  [[ " $*" == *" --platform"[=\ ]* ]] || command+=(--platform linux/amd64)
  # without these the digest would hang on the time of the build, and a push would be of several manifests
  BUILDX_NO_DEFAULT_ATTESTATIONS=1 "${command[@]}" --file docker/Dockerfile --tag "$TAG" "$@" . ||
    die 1 "$ME: $BUILDER could not build the image, see its last lines above; where it could not download something," \
      "look at docs/image.md, \"Networks with a proxy or an index of their own\""
  echo "$ME: $TAG, $("$TOOL" images --format '{{.Size}}' "$TAG" | head -n 1), built in $((SECONDS - start)) s"
}

# source_address REMOTE: where others find the repository, without the name and password that an address may hold;
# nothing for a folder.
source_address() {
  case $1 in
    http://* | https://*) sed -E 's|^(https?://)([^/@]*@)?|\1|; s|\.git$||' <<<"$1" ;;
    ssh://*) sed -E 's|^ssh://([^/@]*@)?([^/:]*)(:[0-9]+)?/|https://\2/|; s|\.git$||' <<<"$1" ;;
    *@*:*) sed -E 's|^[^@]*@([^:]*):/?|https://\1/|; s|\.git$||' <<<"$1" ;;
  esac
}
