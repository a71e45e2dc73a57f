"""scripts/image.py with stand-ins for docker, podman and buildah: what it builds, pushes and refuses.

A stand-in keeps the labels of what it built, and gives a digest when it pushes. BROKEN names those
that do not work, REFUSED makes a push fail, PUSHED is the digest.
"""

import fnmatch
import os
import re
import subprocess
import sys
from datetime import datetime

import pytest

from settings import ROOT
from tests.scripts.throwaway import Checkout

DIGEST = "sha256:" + "0123456789abcdef" * 4
OTHER = "sha256:" + 64 * "f"
REPOSITORY = "registry.example.org/lab/name"
BUILDS = {
    "buildx": "docker buildx build --load ",
    "docker": "docker build ",
    "podman": "podman build ",
    "buildah": "buildah bud ",
}
STAND_IN = """
name=${0##*/}
echo "$name $*" >>"$CALLS"
[[ " ${BROKEN-} " != *" $name "* ]] || exit 1
case "$*" in
  "buildx version") [[ -n ${BUILDX-} ]] ;;
  *RepoDigests*) echo "$REPOSITORY@$PUSHED" ;;
  "image inspect --format {{index .Config.Labels "*|"inspect --type image --format {{index .OCIv1.Config.Labels "*)
    label=$(sed 's/.*"\\(.*\\)".*/\\1/' <<<"$*")
    sed -n "s|^$label=||p" "$HOME/labels" 2>/dev/null ;;
  *" --file docker/Dockerfile "*)
    sed 's/.*REVISION=\\([^ ]*\\).*/org.opencontainers.image.revision=\\1/' <<<"$*" >"$HOME/labels"
    sed 's/.*BUILT_WITH=\\(.*flash-attn=[^ ]*\\).*/pure-transformer.built-with=\\1/' <<<"$*" >>"$HOME/labels" ;;
  "images "*) echo "1.2GB" ;;
  push*)
    [[ -z ${REFUSED-} ]] || exit 1
    while (($#)); do
      [[ $1 != --digestfile ]] || printf %s "$PUSHED" >"$2"
      shift
    done ;;
esac
"""


class Clone(Checkout):
    """A repository of one commit, and the builders that are asked for."""

    def __init__(self, folder):
        folders = ("settings", "record", "presets", "requirements", "scripts", "docker")
        super().__init__(folder, *folders, ".gitignore", ".dockerignore")
        self.write("train/loss.py")
        self.link("bash", "git", "sed")
        self.env |= {"PUSHED": DIGEST, "REPOSITORY": REPOSITORY}
        self.head = self.commit("all of it")

    def install(self, *builders):
        """Install docker, podman or buildah; buildx is docker with a plugin."""
        for name in builders:
            if name == "buildx":
                self.env["BUILDX"] = "1"
                name = "docker"
            self.add(name, STAND_IN)

    def image(self, *words, code=0, **environ):
        """Return what it prints."""
        return self.run(sys.executable, "-m", "scripts.image", *words, code=code, **environ)

    def refuse(self, code, *words, **environ):
        """Return the line that it prints. Nothing is built, and no digest is noted."""
        [line] = self.image(*words, code=code, **environ).splitlines()
        assert not self.calls(" --file ") and not (self.root / ".image").exists()
        return line


@pytest.fixture
def clone(tmp_path):
    return Clone(tmp_path)


def arguments(call):
    return dict(re.findall(r"--build-arg (\w+)=(.*?)(?= --)", call))


# ---- Building


@pytest.mark.parametrize("builder", BUILDS)
def test_each_builder_gets_the_same(clone, builder):
    image = "registry.example.org:5000/lab/name"
    options = ["--network", "host"]
    clone.install(builder)
    text = clone.image("build", "--", *options, IMAGE_BUILDER=builder, IMAGE=image)
    assert "torch 2.13.0 in its build cu126, which runs with NVIDIA drivers from 525 on" in text
    [call] = clone.calls(f"^{BUILDS[builder]}")
    assert f" --file docker/Dockerfile --tag {image}:{clone.head[:12]} --network host ." in call
    assert " --platform linux/amd64 " in call
    given = arguments(call)
    seconds = int(clone.git("log", "-1", "--format=%ct"))
    assert datetime.fromisoformat(given.pop("CREATED")).timestamp() == seconds
    assert given == {
        "REVISION": clone.head,
        "VERSION": clone.head[:12],
        "SOURCE_DATE_EPOCH": str(seconds),
        "TORCH_BACKEND": "cu126",
        "BUILT_WITH": "torch=cu126 base=default flash-attn=none",
    }
    assert (f"--timestamp {seconds}" in call) == (builder in ("podman", "buildah"))
    assert text.splitlines()[-1] == "image: next: make push"


@pytest.mark.parametrize(
    ("installed", "broken", "chosen"),
    [
        (["buildx", "podman", "buildah"], "", "buildx"),
        (["docker", "podman", "buildah"], "", "docker"),
        (["docker", "buildah"], "docker", "buildah"),
        (["buildx", "podman", "buildah"], "docker podman", "buildah"),
    ],
)
def test_the_first_builder_that_works_builds(clone, installed, broken, chosen):
    clone.install(*installed)
    clone.image("build", BROKEN=broken)
    assert len(clone.calls(f"^{BUILDS[chosen]}")) == 1


def test_variables_of_the_build_reach_the_builder(clone):
    wheel = f"https://example.org/flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl#sha256={64 * 'a'}"
    options = {
        "BASE_IMAGE": "localhost/base:x",
        "FLASH_ATTN_WHEEL": wheel,
        "TORCH_BACKEND": "cu130",
    }
    clone.install("podman")
    clone.image("build", "--", "--platform=linux/arm64", **options)
    [call] = clone.calls("^podman build ")
    assert options.items() <= arguments(call).items() and "linux/amd64" not in call
    assert arguments(call)["BUILT_WITH"] == f"torch=cu130 base=localhost/base:x flash-attn={wheel}"


@pytest.mark.parametrize(
    ("image", "repository"),
    [
        ("", "localhost/pure-transformer"),
        (f"registry.example.org:5000/a:v1@{OTHER}", "registry.example.org:5000/a"),
        ("a/b:latest", "a/b"),
    ],
)
def test_the_tag_is_the_commit_in_the_repository_of_image(clone, image, repository):
    clone.install("buildah")
    clone.image("build", IMAGE=image)
    assert clone.calls(f" --tag {repository}:{clone.head[:12]} ")


@pytest.mark.parametrize("name", ["loss.py", "new.py", "mine.py", ".mine.py"])
def test_a_tree_that_differs_from_its_commit_is_marked_as_such(clone, name):
    # git ignores these two, but one of them would enter the image.
    clone.write(".git/info/exclude", "mine.py\n.mine.py\n")
    clone.write(f"train/{name}", "x = 1\n")
    clone.install("buildah")
    text = clone.image("build")
    suffix = "" if name == ".mine.py" else "-dirty"
    given = arguments(clone.calls("bud ")[0])
    assert given["VERSION"] == clone.head[:12] + suffix
    assert given["REVISION"] == clone.head + suffix
    assert ("make push will refuse it" in text) == bool(suffix)


WHEEL = "must be the address of a .whl with #sha256="


@pytest.mark.parametrize(
    ("name", "value", "code", "words"),
    [
        ("IMAGE_BUILDER", "auto", 78, "None of these works: buildx, docker, podman, buildah."),
        ("IMAGE_BUILDER", "podman", 78, "None of these works: podman."),
        ("IMAGE_BUILDER", "kaniko", 64, "IMAGE_BUILDER=kaniko: must be one of auto, buildx, doc"),
        ("TORCH_BACKEND", "cu 1", 64, "TORCH_BACKEND=cu 1: must be a build of PyTorch"),
        ("FLASH_ATTN_WHEEL", "https://a/b.whl", 64, WHEEL),
        ("FLASH_ATTN_WHEEL", f"https://a/b.tar.gz#sha256={64 * '0'}", 64, WHEEL),
        ("BASE_IMAGE", "a b", 64, "BASE_IMAGE=a b: must be an image"),
    ],
)
def test_what_it_cannot_build_with_is_named(clone, name, value, code, words):
    assert words in clone.refuse(code, "build", **{name: value})


# ---- Pushing


@pytest.mark.parametrize("builder", BUILDS)
def test_it_builds_pushes_and_notes_the_digest(clone, builder):
    others = f"x.{REPOSITORY}@{OTHER}\n{REPOSITORY}-2@{OTHER}\n"
    image_file = clone.write(".image", f"{REPOSITORY}@{OTHER}\n{others}")
    clone.install(builder)
    text = clone.image("push", "--", "--tls-verify=false", IMAGE=REPOSITORY)
    assert f"push: {REPOSITORY}@{DIGEST}\n" in text and "make train-8xa100" in text
    tag = f"{REPOSITORY}:{clone.head[:12]}"
    [call] = clone.calls(" push ")
    assert call.endswith(f" {tag}") and "--tls-verify=false" in call
    [built] = clone.calls(f" --tag {tag} ")
    assert "--tls-verify" not in built
    assert image_file.read_text() == f"{others}{REPOSITORY}@{DIGEST}\n"
    assert clone.git("status", "--porcelain") == ""
    clone.image("push", IMAGE=REPOSITORY)
    assert not clone.calls(" --file ")
    clone.image("push", IMAGE=REPOSITORY, TORCH_BACKEND="cpu")
    assert clone.calls(" --file ")  # with another torch it is another image


def test_if_image_names_another_one_it_says_what_pods_take(clone):
    clone.install("buildah")
    text = clone.image("push", IMAGE=f"{REPOSITORY}:v1")
    assert f"pods take IMAGE={REPOSITORY}:v1. To take this one, set IMAGE={REPOSITORY}" in text


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("", "IMAGE is not set. Name the repository to push to, for example IMAGE=registry"),
        ("pure-transformer", "IMAGE=pure-transformer names no registry"),
        ("lab/pure-transformer:v1.0", "names no registry"),
    ],
)
def test_an_image_without_a_registry_is_refused(clone, image, words):
    clone.install("buildah")
    assert words in clone.refuse(64, "push", IMAGE=image)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train/new.py", "Files differ from the commit (train/new.py)"),
        ("presets/mine.env", "git ignores presets/mine.env, which would enter the image"),
    ],
)
def test_what_is_no_commit_is_not_pushed(clone, name, words):
    clone.write(".git/info/exclude", "mine*.env\n")
    clone.write("mine.env")  # enters no image
    clone.write(name)
    clone.install("buildah")
    assert words in clone.refuse(78, "push", IMAGE=REPOSITORY)


@pytest.mark.parametrize("builder", ["docker", "buildah"])
@pytest.mark.parametrize(
    ("name", "value", "words"),
    [("REFUSED", "1", "requires a login, run `"), ("PUSHED", "sha256:12", "gave no digest")],
)
def test_a_push_that_fails_notes_nothing(clone, builder, name, value, words):
    clone.install(builder)
    assert words in clone.image("push", code=1, IMAGE=REPOSITORY, **{name: value})
    assert not (clone.root / ".image").exists()


# ---- What enters it

ENTRIES = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if line[:1] != "#"]


def enters(path):
    """Whether a file enters the image: it fits an entry with !, folder by folder, and is not hidden."""
    parts = path.split("/")
    for entry in ENTRIES[1:-1]:
        patterns = entry.removeprefix("!").split("/")
        if len(parts) == len(patterns) and all(map(fnmatch.fnmatchcase, parts, patterns)):
            return not any(part.startswith(".") for part in parts)
    return False


def test_the_list_names_kinds_of_files_and_no_hidden_ones():
    assert (ENTRIES[0], ENTRIES[-1]) == ("*", "**/.*")
    for entry in ENTRIES[1:-1]:
        assert re.fullmatch(r"!(LICENSE|(\w+/)+[\w*]+\.\w+)", entry)


def test_every_entry_is_the_name_of_something():
    assert [entry for entry in ENTRIES[1:-1] if not any(ROOT.glob(entry.removeprefix("!")))] == []


PRIVATE = """
.env prod.env .netrc id_rsa key.pem train/id_rsa train/.env presets/.env presets/.mine.env .image
.git/config .venv/lib/a.py runs/tiny/metrics.jsonl data/a/train_00000.bin runs/a.py train/loss.pyc
train/__pycache__/loss.cpython-311.pyc train/data/notes.txt tests/conftest.py k8s/launch.py
docker/Dockerfile secrets.yaml presets/mine.env.bak scripts/scan_secrets.py
"""


def test_what_is_nobodys_business_stays_out():
    assert [path for path in PRIVATE.split() if enters(path)] == []


def test_all_that_a_job_runs_enters():
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git clone")
    rooms = "settings|record|hardware|train|export|finetune|plan|analysis|doctor|monitor"
    needed = re.findall(
        rf"^(?:(?:{rooms})/.*\.(?:py|js|css|toml)|k8s/cluster/log_.*|presets/.*\.env)$",
        listing.stdout,
        re.M,
    )
    needed += ["scripts/train.py", "scripts/launch.sh", "scripts/setup.sh"]
    needed += ["docker/system.sh", "docker/check.py", "requirements/finetune.txt", "LICENSE"]
    assert len(needed) > 60 and [path for path in needed if not enters(path)] == []


def test_the_base_is_pinned_and_every_builder_knows_the_instructions():
    """The builder that docker falls back to has neither --mount nor heredocs; OCI has no SHELL."""
    text = (ROOT / "docker/Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", text, re.M)
    assert re.findall(r"^USER (.*)$", text, re.M) == ["1000:1000"]
    assert not re.search(r"^RUN .*--mount|<<|^SHELL|^# *syntax=|--chmod|--link", text, re.M)


# ---- make image-test


@pytest.mark.parametrize(
    ("missing", "words"),
    [
        ("id", "root alone may"),
        ("unshare", "this machine allows no name spaces"),
        ("buildah", "buildah must be installed: apt-get install buildah"),
    ],
)
def test_where_image_test_cannot_run_it_says_so(tmp_path, missing, words):
    checkout = Checkout(tmp_path, "scripts/image_test.sh")
    checkout.link("bash", "dirname", "git")
    for tool in ("buildah", "debootstrap", "unshare"):
        checkout.add(tool)
    checkout.add("id", "echo 0")
    if missing == "buildah":
        (checkout.bin / missing).unlink()
    else:
        checkout.add(missing, "echo 1000; exit 1")
    assert words in checkout.run("scripts/image_test.sh", code=78, TMPDIR=os.devnull)
