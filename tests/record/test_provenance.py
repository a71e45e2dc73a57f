"""Where a run comes from, told as it is."""

import shutil
import subprocess
from pathlib import Path

import numpy
import pytest
import torch

from record import provenance


def test_a_commit_is_told_with_whether_files_differ_from_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert provenance.commit() == {"git": None, "git_dirty": False}
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    head = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True
    ).stdout.strip()
    assert provenance.commit() == {"git": head, "git_dirty": False}
    (tmp_path / "new").touch()
    assert provenance.commit() == {"git": head, "git_dirty": True}


def test_a_machine_without_git_is_no_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert shutil.which("git") is None
    assert provenance.commit() == {"git": None, "git_dirty": False}


@pytest.mark.parametrize(
    ("noted", "told"),
    [
        ("0123456789" * 4 + "\n", {"git": "0123456789" * 4, "git_dirty": False}),
        ("0123456789" * 4 + "-dirty\n", {"git": "0123456789" * 4, "git_dirty": True}),
        ("unknown\n", {"git": None, "git_dirty": False}),
        ("", {"git": None, "git_dirty": False}),
    ],
)
def test_an_image_has_no_git_and_tells_what_it_was_built_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noted: str, told: dict[str, object]
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "REVISION").write_text(noted)
    assert provenance.commit() == told


def test_where_there_is_a_repository_it_is_believed_rather_than_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(provenance, "ROOT", tmp_path)
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    for command in (["init", "-q"], ["commit", "-q", "--allow-empty", "-m", "one"]):
        subprocess.run([*git, *command], check=True)
    (tmp_path / "REVISION").write_text("0123456789" * 4)
    found = provenance.commit()
    assert found["git_dirty"] and found["git"] not in (None, "0123456789" * 4)


def test_an_attempt_has_the_keys_of_config_json() -> None:
    found = provenance.provenance("here", 4, "CPU", 2)
    assert list(found) == [
        "time",
        "host",
        "world_size",
        "device",
        "threads",
        "python",
        "torch",
        "numpy",
        "tokenizers",
        "git",
        "git_dirty",
        "boot_id",
    ]
    assert found["boot_id"] == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert (found["host"], found["world_size"], found["device"], found["threads"]) == (
        "here",
        4,
        "CPU",
        2,
    )
    assert found["torch"] == torch.__version__ and found["numpy"] == numpy.__version__


@pytest.mark.parametrize("text", [None, "\n"])
def test_a_system_without_the_name_of_its_boot_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None
) -> None:
    if text is not None:
        (tmp_path / "boot").write_text(text)
    monkeypatch.setattr(provenance, "BOOT", tmp_path / "boot")
    assert provenance.boot_id() is None
