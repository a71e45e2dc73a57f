"""What may enter the image, by .dockerignore; what the Dockerfile says; and the wheel of flash-attn."""

import hashlib
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from settings.declare import ROOT

# What lies about in a clone that is used; none of it is anybody else's business.
SECRET_OR_USELESS = [
    ".env",
    ".env.local",
    "prod.env",
    ".netrc",
    ".gitconfig",
    "id_rsa",
    "id_ed25519",
    "key.pem",
    "train/id_rsa",
    "train/.env",
    "presets/.env",
    "sources/.env",
    ".git/config",
    ".git/objects/aa",
    ".github/a.py",
    ".venv/bin/python",
    ".venv/lib/a.py",
    ".image",
    ".ci/run",
    ".ssh/id_rsa",
    "runs/tiny/metrics.jsonl",
    "runs/tiny/checkpoints/a.bin",
    "data/a/train_00000.bin",
    "wandb/run-1/logs/debug.log",
    "runs/a.py",
    "train/__pycache__/loss.cpython-311.pyc",
    "train/loss.pyc",
    "train/.loss.py.swp",
    "train/model/loss.py~",
    "train/data/notes.txt",
    "bench/results/a.json",
    "tests/conftest.py",
    "tests/data/a",
    "k8s/launch.py",
    "k8s/manifests/base/job.yaml",
    "docker/Dockerfile",
    "Makefile",
    "kubeconfig",
    ".kube/config",
    "secrets.yaml",
    "sources/usmle.jsonl",
    "presets/mine.env.bak",
    "scripts/scan_secrets.py",
    "train/runs/a.py",
]


def pattern(text: str) -> re.Pattern[str]:
    """A line of .dockerignore: * is within a name, ** is any folders, and what matches a folder matches all in it."""
    parts = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    words = re.findall(r"\*\*/|\*\*|\*|\?|[^*?]+", text)
    return re.compile("".join(parts.get(word, re.escape(word)) for word in words) + "(?:/.*)?")


def enters(path: str) -> bool:
    """Whether a file comes through: the last line that matches decides."""
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    inside = True
    for line in lines:
        if pattern(line.removeprefix("!")).fullmatch(path):
            inside = line.startswith("!")
    return inside


@pytest.mark.parametrize("path", SECRET_OR_USELESS)
def test_what_is_nobodys_business_stays_out(path: str) -> None:
    assert not enters(path)


def test_all_that_a_job_runs_enters() -> None:
    rooms = (
        "settings",
        "record",
        "hardware",
        "train",
        "export",
        "finetune",
        "pipeline",
        "plan",
        "analysis",
        "doctor",
        "monitor",
    )
    code = [path for room in rooms for path in (ROOT / room).rglob("*.py")]
    needed = [path.relative_to(ROOT).as_posix() for path in code]
    needed += [
        f"presets/{path.name}" for path in (ROOT / "presets").iterdir() if path.suffix == ".env"
    ]
    needed += [
        f"sources/{path.name}" for path in (ROOT / "sources").iterdir() if path.suffix == ".toml"
    ]
    needed += [
        f"analysis/page/{path.name}"
        for path in (ROOT / "analysis/page").iterdir()
        if path.suffix in (".js", ".css")
    ]
    needed += [
        f"analysis/logs/dialects/{path.name}"
        for path in (ROOT / "analysis/logs/dialects").iterdir()
    ]
    needed += [
        "scripts/train.sh",
        "scripts/finetune.sh",
        "scripts/launch.sh",
        "scripts/lib.sh",
        "scripts/setup.sh",
        "scripts/setup_torch.sh",
        "docker/system.sh",
        "docker/flash_attn.sh",
        "docker/finish.sh",
        "docker/check.sh",
        "docker/check.py",
        "requirements/base.txt",
        "requirements/torch.txt",
        "requirements/finetune.txt",
        "LICENSE",
    ]
    assert len(needed) > 60
    assert [path for path in needed if not enters(path)] == []
    assert all((ROOT / path).is_file() for path in needed)


def test_the_list_is_one_of_what_is_allowed() -> None:
    """So that a file which nobody thought of stays out; and no pattern opens more than one folder."""
    lines = [
        line
        for line in (ROOT / ".dockerignore").read_text().splitlines()
        if line and not line.startswith("#")
    ]
    assert lines[0] == "*" and lines[-1] == "**/.*"
    assert all(line.startswith("!") and "**" not in line for line in lines[1:-1])


# ---- The Dockerfile

DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text()


def test_the_default_base_is_pinned_and_the_process_is_not_root() -> None:
    assert re.search(r"^ARG BASE_IMAGE=\S+@sha256:[0-9a-f]{64}$", DOCKERFILE, re.M)
    assert re.findall(r"^USER (.*)$", DOCKERFILE, re.M) == ["1000:1000"]
    assert (
        DOCKERFILE.index("USER 1000:1000")
        < DOCKERFILE.index("RUN docker/check.sh")
        < DOCKERFILE.index("ENTRYPOINT")
    )


def test_what_fine_tuning_needs_is_locked_and_a_layer_behind_what_all_need() -> None:
    """By the script that make setup runs: with hashes, without what they would bring along."""
    base, more = (
        DOCKERFILE.index("scripts/setup.sh \\"),
        DOCKERFILE.index("scripts/setup.sh --finetune"),
    )
    assert (
        base
        < DOCKERFILE.index("COPY requirements/finetune.txt")
        < more
        < DOCKERFILE.index("COPY . ./")
    )
    assert (
        DOCKERFILE[:more].count("requirements/finetune.txt") == 1
    )  # a change of it leaves torch's layer as it is


def test_nothing_that_some_builder_does_not_know() -> None:
    """The builder that docker falls back to has neither --mount nor heredocs; the OCI format has no SHELL."""
    assert not re.search(r"^RUN .*--mount|<<|^SHELL|^# *syntax=|--chmod|--link", DOCKERFILE, re.M)


# ---- flash-attn


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A wheel of that name which needs something that is not there."""
    path = tmp_path / "flash_attn-2.8.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("flash_attn/__init__.py", "__version__ = '2.8.3'\n")
        info = "flash_attn-2.8.3.dist-info"
        archive.writestr(
            f"{info}/METADATA",
            "Metadata-Version: 2.1\nName: flash-attn\nVersion: 2.8.3\n"
            "Requires-Dist: not-to-be-had\n",
        )
        archive.writestr(
            f"{info}/WHEEL",
            "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        )
        archive.writestr(
            f"{info}/RECORD",
            f"flash_attn/__init__.py,,\n{info}/METADATA,,\n{info}/WHEEL,,\n{info}/RECORD,,\n",
        )
    return path


def install(folder: Path, address: str) -> subprocess.CompletedProcess[str]:
    """docker/flash_attn.sh with this interpreter's pip, into folder/venv."""
    python = folder / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    env = {
        "PATH": os.environ["PATH"],
        "VENV": str(folder / "venv"),
        "PIP_TARGET": str(site(folder)),
    }
    return subprocess.run(
        [ROOT / "docker" / "flash_attn.sh", address],
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def site(folder: Path) -> Path:
    return folder / "venv" / "lib" / "python3.11" / "site-packages"


def test_a_wheel_with_its_hash_is_installed_and_nothing_else(tmp_path: Path, wheel: Path) -> None:
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    done = install(tmp_path, f"file://{wheel}#sha256={digest}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert (site(tmp_path) / "flash_attn" / "__init__.py").read_text() == "__version__ = '2.8.3'\n"
    assert list((site(tmp_path) / "flash_attn" / "__pycache__").iterdir())
    assert {path.name.split("-")[0] for path in site(tmp_path).iterdir()} == {"flash_attn"}


def test_a_wheel_with_another_hash_is_refused(tmp_path: Path, wheel: Path) -> None:
    done = install(tmp_path, f"file://{wheel}#sha256={64 * '0'}")
    assert done.returncode == 1
    assert (
        "THESE PACKAGES DO NOT MATCH THE HASHES" in done.stderr
        and "FLASH_ATTN_WHEEL cannot be" in done.stderr
    )
    assert not list((tmp_path / "venv").rglob("flash_attn*"))


@pytest.mark.parametrize(
    ("address", "code"),
    [
        ("", 0),
        ("flash-attn", 64),
        ("https://example.org/flash_attn-2.8.3.tar.gz#sha256=" + 64 * "0", 64),
        ("https://example.org/flash_attn-2.8.3-cp311-cp311-linux_x86_64.whl", 64),
    ],
)
def test_no_wheel_is_none_to_install_and_anything_else_is_refused(
    tmp_path: Path, address: str, code: int
) -> None:
    done = subprocess.run(
        [ROOT / "docker" / "flash_attn.sh", address],
        capture_output=True,
        text=True,
        check=False,
        env={"PATH": os.environ["PATH"], "VENV": str(tmp_path)},
    )
    assert done.returncode == code
    assert ("FLASH_ATTN_WHEEL=" in done.stderr) == bool(code)
