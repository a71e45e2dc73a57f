"""scripts/image.py with stand-ins for docker, podman and buildah: what it builds, pushes, notes and refuses.

A stand-in writes down its calls, keeps the labels of what it built, and gives a digest when it
pushes. BROKEN names those that do not work, REFUSED makes a push fail.
"""

import os
import re
import shutil
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from settings import ROOT

DIGEST = "sha256:" + "0123456789abcdef" * 4
OTHER = "sha256:" + 64 * "f"
REPOSITORY = "registry.example.org/lab/name"
BUILDS = {
    "buildx": "docker buildx build --load ",
    "docker": "docker build ",
    "podman": "podman build ",
    "buildah": "buildah bud ",
}
STUB = f"""#!/usr/bin/env bash
name=${{0##*/}}
echo "$name $*" >>"$LOG"
[[ " ${{BROKEN-}} " != *" $name "* ]] || exit 1
case "$*" in
  "buildx version") [[ -n ${{BUILDX-}} ]] ;;
  *RepoDigests*) echo "{REPOSITORY}@${{PUSHED:-{DIGEST}}}" ;;
  *"inspect "*) # what is asked for is the text in quotes
    label=$(sed 's/.*"\\(.*\\)".*/\\1/' <<<"$*")
    sed -n "s|^$label=||p" "$STORE/labels" 2>/dev/null ;;
  *" --file docker/Dockerfile "*)
    grep -o 'REVISION=[^ ]*' <<<"$*" | sed 's/^REVISION/org.opencontainers.image.revision/' >"$STORE/labels"
    grep -o 'BUILT_WITH=.*flash-attn=[^ ]*' <<<"$*" | sed 's/^BUILT_WITH/pure-transformer.built-with/' >>"$STORE/labels" ;;
  "images "*) echo "1.2GB" ;;
  push*)
    [[ -z ${{REFUSED-}} ]] || exit 1
    while (($#)); do
      [[ $1 != --digestfile ]] || printf %s "${{PUSHED:-{DIGEST}}}" >"$2"
      shift
    done ;;
esac
"""


class Clone:
    """A repository of one commit, and a PATH with git and the builders that are asked for."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.log = folder / "clone", folder / "bin", folder / "calls"
        no_bytecode = shutil.ignore_patterns("__pycache__")
        for name in ("settings", "record", "presets", "requirements", "scripts", "docker"):
            shutil.copytree(ROOT / name, self.root / name, ignore=no_bytecode)
        (self.root / "train").mkdir()
        (self.root / "train" / "loss.py").touch()
        for name in (".gitignore", ".dockerignore"):
            shutil.copy(ROOT / name, self.root)
        self.bin.mkdir()
        for tool in ("bash", "git", "sed", "grep"):
            (self.bin / tool).symlink_to(str(shutil.which(tool)))
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "LOG": str(self.log),
            "STORE": str(folder),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        for role in ("AUTHOR", "COMMITTER"):
            self.env |= {f"GIT_{role}_NAME": "a", f"GIT_{role}_EMAIL": "a@example.org"}
        self.git("init", "-q")
        self.git("add", "--all")
        self.git("commit", "-q", "-m", "all of it")
        self.commit = self.git("rev-parse", "HEAD")

    def git(self, *words: str) -> str:
        done = subprocess.run(
            ["git", *words], cwd=self.root, env=self.env, check=True, capture_output=True, text=True
        )
        return done.stdout.strip()

    def install(self, *builders: str) -> "Clone":
        """docker, podman or buildah; buildx is docker with a plugin."""
        for name in builders:
            if name == "buildx":
                self.env["BUILDX"] = "1"
            stub = self.bin / ("docker" if name == "buildx" else name)
            stub.write_text(STUB)
            stub.chmod(0o755)
        return self

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        return subprocess.run(
            [sys.executable, "-m", "scripts.image", *words],
            cwd=self.root,
            env=self.env | environ,
            capture_output=True,
            text=True,
            check=False,
        )

    def calls(self, words: str) -> list[str]:
        """The calls of builders that have these words."""
        return [call for call in self.log.read_text().splitlines() if words in f" {call} "]

    def refusal(self, code: int, *words: str, **environ: str) -> str:
        """What is said, in a line, where nothing is built or noted."""
        done = self.run(*words, **environ)
        assert done.returncode == code, done.stdout + done.stderr
        [line] = done.stderr.splitlines()
        assert not self.calls(" --file ") and not (self.root / ".image").exists()
        return line


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def arguments(call: str) -> dict[str, str]:
    return dict(re.findall(r"--build-arg (\w+)=(.*?)(?= --)", call))


# ---- Building


@pytest.mark.parametrize("builder", BUILDS)
def test_each_builder_gets_the_same(clone: Clone, builder: str) -> None:
    image = "registry.example.org:5000/lab/name"
    options = ["--network", "host"]
    done = clone.install(builder).run("build", "--", *options, IMAGE_BUILDER=builder, IMAGE=image)
    assert done.returncode == 0, done.stderr
    assert (
        "torch 2.13.0 in its build cu126, which runs with NVIDIA drivers from 525 on" in done.stdout
    )
    [call] = clone.calls(f" {BUILDS[builder]}")
    assert f" --file docker/Dockerfile --tag {image}:{clone.commit[:12]} --network host ." in call
    assert " --platform linux/amd64 " in call
    given = arguments(call)
    seconds = int(clone.git("log", "-1", "--format=%ct"))
    assert datetime.fromisoformat(given.pop("CREATED")).timestamp() == seconds
    assert given == {
        "REVISION": clone.commit,
        "VERSION": clone.commit[:12],
        "SOURCE_DATE_EPOCH": str(seconds),
        "TORCH_BACKEND": "cu126",
        "BUILT_WITH": "torch=cu126 base=default flash-attn=none",
    }
    assert (f"--timestamp {seconds}" in call) == (builder in ("podman", "buildah"))
    assert done.stdout.splitlines()[-1] == "image: next: make push"


@pytest.mark.parametrize(
    ("there", "broken", "taken"),
    [
        (["buildx", "podman", "buildah"], "", "buildx"),
        (["docker", "podman", "buildah"], "", "docker"),
        (["docker", "buildah"], "docker", "buildah"),
        (["buildx", "podman", "buildah"], "docker podman", "buildah"),
    ],
)
def test_the_first_that_works_is_taken(
    clone: Clone, there: list[str], broken: str, taken: str
) -> None:
    done = clone.install(*there).run("build", BROKEN=broken)
    assert done.returncode == 0 and len(clone.calls(f" {BUILDS[taken]}")) == 1, done.stderr


def test_variables_of_the_build_reach_the_builder(clone: Clone) -> None:
    wheel = f"https://example.org/flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl#sha256={64 * 'a'}"
    options = {
        "BASE_IMAGE": "localhost/base:x",
        "FLASH_ATTN_WHEEL": wheel,
        "TORCH_BACKEND": "cu130",
    }
    clone.install("podman").run("build", "--", "--platform=linux/arm64", **options)
    [call] = clone.calls("podman build ")
    assert options.items() <= arguments(call).items() and "linux/amd64" not in call
    assert arguments(call)["BUILT_WITH"] == f"torch=cu130 base=localhost/base:x flash-attn={wheel}"


@pytest.mark.parametrize(
    ("image", "repository"),
    [
        ("", "localhost/pure-transformer"),
        ("registry.example.org:5000/a", "registry.example.org:5000/a"),
        (f"registry.example.org:5000/a:v1@{OTHER}", "registry.example.org:5000/a"),
        ("a/b:latest", "a/b"),
    ],
)
def test_the_tag_is_the_commit_in_the_repository_of_image(
    clone: Clone, image: str, repository: str
) -> None:
    clone.install("buildah").run("build", IMAGE=image)
    assert clone.calls(f" --tag {repository}:{clone.commit[:12]} ")


@pytest.mark.parametrize("how", ["changed", "new", "ignored", "hidden"])
def test_a_tree_that_differs_from_its_commit_is_marked_as_such(clone: Clone, how: str) -> None:
    if how == "ignored":  # by git, but it would enter the image
        (clone.root / ".git" / "info" / "exclude").write_text("mine.py\n")
    name = {"changed": "loss.py", "hidden": ".env"}.get(how, "mine.py")
    (clone.root / "train" / name).write_text("x = 1\n")
    done = clone.install("buildah").run("build")
    suffix = "" if how == "hidden" else "-dirty"
    given = arguments(clone.calls("bud ")[0])
    assert given["VERSION"] == clone.commit[:12] + suffix
    assert given["REVISION"] == clone.commit + suffix
    assert ("make push will refuse it" in done.stdout) == bool(suffix)


@pytest.mark.parametrize(
    ("variables", "code", "words"),
    [
        ({}, 78, "None of these works: buildx, docker, podman, buildah."),
        ({"IMAGE_BUILDER": "podman"}, 78, "None of these works: podman."),
        ({"IMAGE_BUILDER": "kaniko"}, 64, "IMAGE_BUILDER=kaniko: must be one of auto, buildx, doc"),
        ({"TORCH_BACKEND": "cu 1"}, 64, "TORCH_BACKEND=cu 1: must be a build of PyTorch"),
        (
            {"FLASH_ATTN_WHEEL": "https://a/b.whl"},
            64,
            "must be the address of a .whl with #sha256=",
        ),
        ({"FLASH_ATTN_WHEEL": f"https://a/b.tar.gz#sha256={64 * '0'}"}, 64, "must be the address"),
        ({"BASE_IMAGE": "a b"}, 64, "BASE_IMAGE=a b: must be an image"),
    ],
    ids=str,
)
def test_what_it_cannot_build_with_is_named(
    clone: Clone, variables: dict[str, str], code: int, words: str
) -> None:
    assert words in clone.refusal(code, "build", **variables)


# ---- Pushing


@pytest.mark.parametrize("builder", BUILDS)
def test_it_builds_pushes_and_notes_the_digest(clone: Clone, builder: str) -> None:
    others = [f"x.{REPOSITORY}@{OTHER}\n", f"{REPOSITORY}-2@{OTHER}\n"]
    (clone.root / ".image").write_text(others[0] + f"{REPOSITORY}@{OTHER}\n" + others[1])
    clone.install(builder)
    done = clone.run("push", "--", "--tls-verify=false", IMAGE=REPOSITORY)
    assert done.returncode == 0, done.stderr
    [call] = clone.calls(" push ")
    assert call.endswith(f" {REPOSITORY}:{clone.commit[:12]}") and "--tls-verify=false" in call
    [built] = clone.calls(f" --tag {REPOSITORY}:{clone.commit[:12]} ")
    assert "--tls-verify" not in built
    assert (clone.root / ".image").read_text() == "".join(others) + f"{REPOSITORY}@{DIGEST}\n"
    assert f"push: {REPOSITORY}@{DIGEST}\n" in done.stdout and "make train-8xa100" in done.stdout
    assert clone.git("status", "--porcelain") == ""
    assert clone.run("push", IMAGE=REPOSITORY).returncode == 0 and not clone.calls(" --file ")
    clone.run("push", IMAGE=REPOSITORY, TORCH_BACKEND="cpu")
    assert len(clone.calls(" --file ")) == 1  # with another torch it is another image


def test_if_image_names_another_one_it_says_what_pods_take(clone: Clone) -> None:
    done = clone.install("buildah").run("push", IMAGE=f"{REPOSITORY}:v1")
    assert (
        f"pods take IMAGE={REPOSITORY}:v1. To take this one, set IMAGE={REPOSITORY}" in done.stdout
    )


@pytest.mark.parametrize(
    ("image", "words"),
    [
        ("", "IMAGE is not set. Name the repository to push to, for example IMAGE=registry"),
        ("pure-transformer", "IMAGE=pure-transformer names no registry"),
        ("lab/pure-transformer:v1.0", "names no registry"),
    ],
)
def test_an_image_without_a_registry_is_refused(clone: Clone, image: str, words: str) -> None:
    assert words in clone.install("buildah").refusal(64, "push", IMAGE=image)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train/new.py", "Files differ from the commit (train/new.py)"),
        ("presets/mine.env", "git ignores presets/mine.env, which would enter the image"),
    ],
)
def test_what_is_no_commit_is_not_pushed(clone: Clone, name: str, words: str) -> None:
    (clone.root / ".git" / "info" / "exclude").write_text("mine*.env\n")
    (clone.root / "mine.env").touch()  # ignored by both
    (clone.root / name).touch()
    assert words in clone.install("buildah").refusal(78, "push", IMAGE=REPOSITORY)


@pytest.mark.parametrize("builder", ["docker", "buildah"])
@pytest.mark.parametrize(
    ("fault", "words"),
    [({"REFUSED": "1"}, "requires a login, run `"), ({"PUSHED": "sha256:12"}, "gave no digest")],
)
def test_a_push_that_fails_notes_nothing(
    clone: Clone, builder: str, fault: dict[str, str], words: str
) -> None:
    done = clone.install(builder).run("push", IMAGE=REPOSITORY, **fault)
    assert done.returncode == 1 and words in done.stderr and not (clone.root / ".image").exists()


# ---- What enters it


def pattern(text: str) -> re.Pattern[str]:
    """A line of .dockerignore: * is within a name, ** is any folders, and a folder is all in it."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    words = re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", text)
    return re.compile("".join(parts.get(word, re.escape(word)) for word in words) + "(?:/.*)?")


def enters(path: str) -> bool:
    """Whether a file comes through: the last line that matches decides."""
    inside = True
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and line[0] != "#" and pattern(line.removeprefix("!")).fullmatch(path):
            inside = line.startswith("!")
    return inside


PRIVATE = """
.env prod.env .netrc id_rsa key.pem train/id_rsa train/.env
presets/.env .git/config .image .venv/lib/a.py runs/tiny/metrics.jsonl data/a/train_00000.bin runs/a.py
train/loss.pyc train/__pycache__/loss.cpython-311.pyc train/data/notes.txt tests/conftest.py k8s/launch.py docker/Dockerfile secrets.yaml
presets/mine.env.bak scripts/scan_secrets.py
"""


@pytest.mark.parametrize("path", PRIVATE.split())
def test_what_is_nobodys_business_stays_out(path: str) -> None:
    assert not enters(path)


def test_all_that_a_job_runs_enters() -> None:
    listing = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listing.returncode:
        pytest.skip("not a git clone")
    rooms = "settings|record|hardware|train|export|finetune|pipeline|plan|analysis|doctor|monitor"
    needed = re.findall(
        rf"^(?:(?:{rooms})/.*\.(?:py|js|css|toml)|presets/.*\.env)$", listing.stdout, re.M
    )
    needed += ["scripts/train.py", "scripts/launch.sh", "scripts/setup.sh"]
    needed += ["docker/system.sh", "docker/check.py", "requirements/finetune.txt", "LICENSE"]
    assert len(needed) > 60 and [path for path in needed if not enters(path)] == []


def test_the_base_is_pinned_and_nothing_is_used_that_some_builder_does_not_know() -> None:
    """The builder that docker falls back to has neither --mount nor heredocs; OCI has no SHELL."""
    text = (ROOT / "docker" / "Dockerfile").read_text()
    assert re.search(r"^ARG BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", text, re.M)
    assert re.findall(r"^USER (.*)$", text, re.M) == ["1000:1000"]
    assert not re.search(r"^RUN .*--mount|<<|^SHELL|^# *syntax=|--chmod|--link", text, re.M)


# ---- make image-test


@pytest.mark.parametrize(
    ("stub", "words"),
    [
        ("id", "root alone may; type sudo make image-test"),
        ("unshare", "this machine allows no name spaces"),
        ("", "buildah must be installed: apt-get install buildah"),
    ],
)
def test_where_it_cannot_run_it_says_so(tmp_path: Path, stub: str, words: str) -> None:
    for tool in ("bash", "dirname", "git"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    scripts = {"id": "echo 0", "unshare": "exit 0", "buildah": "", "debootstrap": ""}
    if stub:
        scripts[stub] = "echo 1000; exit 1"
    else:
        del scripts["buildah"]
    for name, text in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    done = subprocess.run(
        [ROOT / "scripts" / "image_test.sh"],
        env={"PATH": str(tmp_path), "TMPDIR": os.devnull},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 78 and words in done.stderr
