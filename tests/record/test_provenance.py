"""record/provenance.py: where a run comes from."""

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
