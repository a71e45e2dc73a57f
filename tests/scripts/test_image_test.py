"""What make image-test is made of, as far as it runs without building: its refusals, pip's settings, its checks."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from settings.declare import ROOT

PYTHON = sys.executable


# ---- What it refuses


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A PATH of root's on a machine with buildah and debootstrap, both of which would do harm."""
    for tool in ("bash", "dirname", "nproc", "git", "mktemp", "rm", "uname", "flock", "cat"):
        (tmp_path / tool).symlink_to(str(shutil.which(tool)))
    for name, text in (
        ("id", "echo 0"),
        ("buildah", "exit 99"),
        ("debootstrap", "exit 99"),
        ("unshare", "exit 0"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n")
        (tmp_path / name).chmod(0o755)
    return tmp_path


def refusal(path: Path) -> str:
    done = subprocess.run(
        [ROOT / "scripts" / "image_test.sh"],
        env={"PATH": str(path), "TMPDIR": str(path)},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 78 and done.stdout == ""
    [line] = done.stderr.splitlines()
    return line


def test_without_root_it_says_what_to_type(path: Path) -> None:
    (path / "id").write_text("#!/bin/sh\necho 1000\n")
    assert refusal(path).endswith("root alone may; type sudo make image-test")


@pytest.mark.parametrize("missing", [["buildah"], ["debootstrap"], ["buildah", "debootstrap"]])
def test_without_its_tools_it_says_how_to_install_them(path: Path, missing: list[str]) -> None:
    for name in missing:
        (path / name).unlink()
    names = " ".join(missing)
    assert refusal(path) == f"image-test: {names} must be installed: apt-get install {names}"


def test_where_there_are_no_name_spaces_it_says_so(path: Path) -> None:
    (path / "unshare").write_text("#!/bin/sh\nexit 1\n")
    assert "this machine allows no name spaces" in refusal(path)


# ---- pip's settings, lent to the build


def test_what_pip_is_told_here_reaches_the_build_by_other_names(tmp_path: Path) -> None:
    index, wheels, lent = tmp_path / "index" / "simple", tmp_path / "wheels", tmp_path / "lent"
    for folder in (index, wheels, lent):
        folder.mkdir(parents=True)
    bundle = tmp_path / "ca.pem"
    bundle.touch()
    (tmp_path / "pip.conf").write_text(
        f"[global]\nextra-index-url = file://{index} https://example.org/simple\n"
        f"find-links = /elsewhere\ncache-dir = /root/cache\ncert = {bundle}\n"
    )
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "PIP_CONFIG_FILE": str(tmp_path / "pip.conf"),
        "PIP_FIND_LINKS": str(wheels),
        "PIP_TIMEOUT": "7",
    }
    subprocess.run([PYTHON, ROOT / "scripts" / "image_pip.py", lent], env=env, check=True)
    mounts = dict(line.split() for line in (lent / "mounts").read_text().splitlines())
    assert mounts.keys() == {
        str(index.parent),
        str(wheels),
        str(bundle),
    }  # an index's pages point beside it
    inside = {here: f"/mnt/{Path(there).name}" for here, there in mounts.items()}
    assert (
        all(Path(there).parent == lent for there in mounts.values())
        and len(set(inside.values())) == 3
    )
    written = (lent / "pip.conf").read_text().splitlines()
    assert written[0] == "[global]"
    assert dict(line.split(" = ") for line in written[1:]) == {
        "extra-index-url": f"file://{inside[str(index.parent)]}/simple https://example.org/simple",
        "find-links": inside[str(wheels)],
        "cert": inside[str(bundle)],
        "timeout": "7",
    }
    assert (lent / "pip.conf").stat().st_mode & 0o077 == 0  # an index's address may hold a password


# ---- What it holds an image and a run against

IMAGE: dict[str, Any] = {
    "User": "1000:1000",
    "WorkingDir": "/app",
    "Entrypoint": ["tini", "--"],
    "Cmd": ["scripts/train.sh"],
    "Env": [
        "PATH=/opt/venv/bin:/usr/bin",
        "VENV=/opt/venv",
        "HOME=/tmp",
        "HF_HOME=/tmp/a",
        "XDG_CACHE_HOME=/tmp/b",
        "MPLCONFIGDIR=/tmp/c",
        "NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    ],
    "Labels": {
        "org.opencontainers.image.title": "pure-transformer",
        "org.opencontainers.image.licenses": "MIT",
        "org.opencontainers.image.revision": "abc-dirty",
        "org.opencontainers.image.version": "a",
        "org.opencontainers.image.created": "2026-01-02T03:04:05Z",
        "org.opencontainers.image.description": "d",
        "pure-transformer.built-with": "torch=cpu base=x",
    },
}


def declared(folder: Path, **changes: Any) -> subprocess.CompletedProcess[str]:
    (folder / "image.json").write_text(json.dumps({"OCIv1": {"config": IMAGE | changes}}))
    return subprocess.run(
        [
            PYTHON,
            ROOT / "scripts" / "image_checks.py",
            "declared",
            folder / "image.json",
            "abc-dirty",
            "a",
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def test_an_image_is_run_by_what_it_declares(tmp_path: Path) -> None:
    lines = declared(tmp_path).stdout.splitlines()
    assert lines == ["/app", *IMAGE["Env"], "", "tini", "--", "scripts/train.sh"]


@pytest.mark.parametrize(
    "changes",
    [
        {"User": ""},
        {"User": "0:0"},
        {"Entrypoint": ["scripts/train.sh"]},
        {"Cmd": None},
        {"WorkingDir": "/"},
        {"Env": [*IMAGE["Env"], "NVIDIA_VISIBLE_DEVICES=all"]},
        {"Env": [*IMAGE["Env"], "PIP_CONFIG_FILE=/mnt/pip.conf"]},
        {"Env": [*IMAGE["Env"], "HF_TOKEN="]},
        {"Labels": IMAGE["Labels"] | {"org.opencontainers.image.revision": "abd"}},
    ],
    ids=str,
)
def test_an_image_that_declares_something_else_fails(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    done = declared(tmp_path, **changes)
    assert done.returncode == 1 and "AssertionError" in done.stderr and done.stdout == ""


def run_folder(
    folder: Path, again: float = 5.0, ends: tuple[str, ...] = ("stopped", "done")
) -> Path:
    """A record of 12 steps: killed at 6 with a checkpoint at 4, stopped at 8, done at 12."""
    records: list[dict[str, Any]] = []
    for attempt, (first, last) in enumerate(((0, 6), (4, 8), (8, 12))):
        records.append(
            {"event": "resume" if attempt else "start", "step": first, "attempt": attempt}
        )
        records += [
            {
                "event": "step",
                "step": step,
                "attempt": attempt,
                "loss": again if attempt == 1 and step == 5 else 10.0 - step,
            }
            for step in range(first + 1, last + 1)
        ]
        records += [
            {"event": "end", "reason": reason, "step": last, "attempt": attempt}
            for reason in ends[attempt - 1 : attempt]
            if attempt
        ]
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        "".join(json.dumps({"schema": 1} | r) + "\n" for r in records)
    )
    (folder / "config.json").write_text(
        json.dumps({"attempts": 3 * [{"git": "abc", "git_dirty": False}]})
    )
    (folder / "checkpoints" / "step_0000012").mkdir(parents=True)
    (folder / "plots").mkdir()
    (folder / "plots" / "loss_curves.html").touch()
    (folder / "console").write_text("data: 3 M tokens in /volume/data\nstep=1 loss=9.0\n")
    return folder


def trained(run: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [
            PYTHON,
            ROOT / "scripts" / "image_checks.py",
            "trained",
            run,
            "12",
            "6",
            "4",
            "abc",
            "",
            run / "console",
        ],
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_run_that_went_on_to_the_bit_passes(tmp_path: Path) -> None:
    done = trained(run_folder(tmp_path / "run"))
    assert done.returncode == 0, done.stderr
    assert re.search(
        r"resumed behind steps 4 and 8, and steps 5 to 6 came out the same to the bit$", done.stdout
    )


def test_a_run_whose_loss_came_out_otherwise_fails(tmp_path: Path) -> None:
    assert trained(run_folder(tmp_path / "run", again=5.0000001)).returncode == 1


def test_a_run_that_was_not_stopped_or_not_done_fails(tmp_path: Path) -> None:
    for number, ends in enumerate((("done", "done"), ("stopped",))):
        assert trained(run_folder(tmp_path / str(number), ends=ends)).returncode == 1


def test_a_run_that_installs_something_fails(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    (run / "console").write_text("setup: installing requirements/base.txt in /opt/venv\n")
    assert trained(run).returncode == 1


def test_a_run_that_names_another_commit_fails(tmp_path: Path) -> None:
    run = run_folder(tmp_path / "run")
    (run / "config.json").write_text(
        json.dumps({"attempts": 3 * [{"git": None, "git_dirty": False}]})
    )
    assert trained(run).returncode == 1
