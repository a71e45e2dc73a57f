"""A clone with make image's scripts in it, and stand-ins for docker, podman and buildah that write down their calls.

A stand-in keeps the labels of what it built in a file, answers questions about it from there, and tells a digest when
it pushes. BROKEN names the ones that do not work, REFUSED what a registry says to a push, FAILS makes builds fail.
"""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from settings.declare import ROOT

DIGEST = "sha256:" + "0123456789abcdef" * 4
TOOLS = (
    "bash",
    "sh",
    "cat",
    "cut",
    "dirname",
    "env",
    "git",
    "grep",
    "head",
    "tail",
    "ls",
    "mkdir",
    "mktemp",
    "mv",
    "rm",
    "sed",
    "sort",
    "tee",
    "tr",
    "uname",
    "wc",
    "awk",
    "id",
    "nproc",
)

STUB = f"""#!/usr/bin/env bash
name=${{0##*/}}
echo "$name $*" >> "$LOG"
[[ " ${{BROKEN-}} " != *" $name "* ]] || {{ echo "cannot connect to the daemon" >&2; exit 1; }}
case "$1 ${{2-}}" in
  "buildx version") [[ -n ${{BUILDX-}} ]] ;;
  "info "* | "version "*) ;;
  "image inspect" | "inspect --type")
    # what is asked for is the text in quotes, of the image named last
    label=$(sed 's/.*"\\(.*\\)".*/\\1/' <<< "$*")
    sed -n "s|^${{!#}} $label=||p" "$STORE/labels" 2>/dev/null ;;
  "buildx build" | "build "* | "bud "*)
    [[ -z ${{FAILS-}} ]] || {{ echo "no space left on device" >&2; exit 125; }}
    tag=$(sed 's/.* --tag \\([^ ]*\\) .*/\\1/' <<< "$*")
    while (($#)); do
      case "$1 ${{2-}}" in
        "--build-arg REVISION="*) echo "$tag org.opencontainers.image.revision=${{2#*=}}" >> "$STORE/labels" ;;
        "--build-arg BUILT_WITH="*) echo "$tag pure-transformer.built-with=${{2#*=}}" >> "$STORE/labels" ;;
      esac
      shift
    done ;;
  "images "*) echo "1.2GB" ;;
  "push "*)
    [[ -z ${{REFUSED-}} ]] || {{ echo "$REFUSED" >&2; exit 1; }}
    while (($#)); do
      [[ $1 != --digestfile ]] || printf %s "${{PUSHED:-{DIGEST}}}" > "$2"
      shift
    done
    [[ $name != docker ]] || echo "0123456789ab: digest: ${{PUSHED:-{DIGEST}}} size: 1234" ;;
  *) echo "the stand-in does not know: $*" >&2; exit 99 ;;
esac
"""


class Clone:
    """A repository of one commit, and a PATH with nothing but some tools and the builders that are asked for."""

    def __init__(self, folder: Path):
        self.root, self.bin, self.log = folder / "clone", folder / "bin", folder / "calls"
        for name in ("settings", "record", "hardware", "train", "presets"):
            shutil.copytree(
                ROOT / name, self.root / name, ignore=shutil.ignore_patterns("__pycache__", "*.pyc")
            )
        (self.root / "scripts").mkdir()
        for path in ("lib.sh", "image_lib.sh", "image.sh", "push.sh"):
            shutil.copy(ROOT / "scripts" / path, self.root / "scripts")
        (self.root / "docker").mkdir()
        shutil.copy(ROOT / "docker" / "Dockerfile", self.root / "docker")
        for path in (".gitignore", ".dockerignore"):
            shutil.copy(ROOT / path, self.root)
        shutil.copytree(ROOT / "requirements", self.root / "requirements")
        self.bin.mkdir()
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        python = folder / "venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
        python.chmod(0o755)
        self.env = {
            "PATH": str(self.bin),
            "HOME": str(folder),
            "LOG": str(self.log),
            "STORE": str(folder),
            "VENV": str(folder / "venv"),
            "PYTHONDONTWRITEBYTECODE": "1",
            "GIT_AUTHOR_NAME": "a",
            "GIT_AUTHOR_EMAIL": "a@example.org",
            "GIT_COMMITTER_NAME": "a",
            "GIT_COMMITTER_EMAIL": "a@example.org",
            "GIT_CONFIG_NOSYSTEM": "1",
        }
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments: str) -> str:
        return subprocess.run(
            ["git", *arguments],
            cwd=self.root,
            env=self.env,
            check=True,
            capture_output=True,
            text=True,
        ).stdout.strip()

    def commit(self) -> str:
        self.git("add", "--all")
        self.git("commit", "-q", "--allow-empty", "-m", "all of it")
        return self.git("rev-parse", "HEAD")

    def install(self, *builders: str) -> "Clone":
        """docker, podman or buildah; buildx is docker with a plugin."""
        for name in builders:
            if name == "buildx":
                self.env["BUILDX"] = "1"
            stub = self.bin / ("docker" if name == "buildx" else name)
            stub.write_text(STUB)
            stub.chmod(0o755)
        return self

    def run(self, script: str, *arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
        self.log.write_text("")
        return subprocess.run(
            [f"scripts/{script}.sh", *arguments],
            cwd=self.root,
            env=self.env | environ,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def calls(self, *words: str) -> list[str]:
        """The calls of builders in which all these words are."""
        return [
            call
            for call in self.log.read_text().splitlines()
            if all(word in f" {call} " for word in words)
        ]


@pytest.fixture
def clone(tmp_path: Path) -> Clone:
    return Clone(tmp_path)


def one_sentence(done: subprocess.CompletedProcess[str], code: int) -> str:
    """What was said on standard error where a script refused: a single line."""
    assert done.returncode == code, done.stdout + done.stderr
    lines = done.stderr.splitlines()
    assert len(lines) == 1, done.stderr
    return lines[0]
