"""record/provenance.py: where a run comes from."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

from record import provenance

COMMIT = "0123456789" * 4
UNKNOWN = {"git": None, "git_dirty": False}


def test_a_commit_comes_from_the_repository_with_whether_files_differ(tmp_path, monkeypatch):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() == UNKNOWN
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    head = subprocess.check_output([*git, "rev-parse", "HEAD"], text=True).strip()
    assert provenance.commit() == {"git": head, "git_dirty": False}
    (tmp_path / "REVISION").write_text(COMMIT)  # which only counts where there is no repository
    assert provenance.commit() == {"git": head, "git_dirty": True}


def test_neither_another_repository_nor_one_around_it_is_taken_for_this_one(tmp_path, monkeypatch):
    root = tmp_path / "unpacked"
    root.mkdir()
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run([*git, "init", "-q"], check=True)
    subprocess.run([*git, "commit", "-q", "--allow-empty", "-m", "one"], check=True)
    monkeypatch.setattr(provenance, "ROOT", root)
    assert provenance.commit() == UNKNOWN
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    monkeypatch.setenv("GIT_WORK_TREE", str(tmp_path))
    assert provenance.commit() == UNKNOWN
    assert "Use a git clone" in provenance.explain_missing_commit()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_checkout_of_another_user_is_named_with_the_command_that_allows_it(tmp_path, monkeypatch):
    root = tmp_path / "it's a"
    subprocess.run(["git", "init", "-q", root], check=True)
    for path in (root, root / ".git"):
        os.chown(path, 1000, 1000)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SUDO_UID", "0")
    monkeypatch.setattr(provenance, "ROOT", root)
    assert provenance.commit() == UNKNOWN
    why = provenance.explain_missing_commit()
    command = re.search("`git (.*)`", why)
    assert command and "config --global --add safe.directory" in why
    subprocess.run(["git", *shlex.split(command[1])], check=True)
    assert "safe.directory" not in provenance.explain_missing_commit()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (COMMIT + "\n", {"git": COMMIT, "git_dirty": False}),
        (COMMIT + "-dirty\n", {"git": COMMIT, "git_dirty": True}),
        ("unknown\n", UNKNOWN),
    ],
)
def test_an_image_without_git_has_the_commit_that_it_was_built_from(
    tmp_path, monkeypatch, text, expected
):
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert provenance.commit() == UNKNOWN
    (tmp_path / "REVISION").write_text(text)
    assert provenance.commit() == expected


def test_an_attempt_has_the_keys_of_config_json():
    entry = provenance.provenance("here", 4, "CPU", 2)
    expected = {
        "host": "here",
        "world_size": 4,
        "device": "CPU",
        "threads": 2,
        "torch": torch.__version__,
        "numpy": numpy.__version__,
        "boot_id": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
    }
    assert expected.items() <= entry.items()
    others = {"time", "python", "tokenizers", "git", "git_dirty"}
    assert entry.keys() == expected.keys() | others


@pytest.mark.parametrize("text", [None, "\n"])
def test_a_system_without_the_name_of_its_boot_has_none(monkeypatch, tmp_path, text):
    if text is not None:
        (tmp_path / "boot").write_text(text)
    monkeypatch.setattr(provenance, "BOOT", tmp_path / "boot")
    assert provenance.boot_id() is None
