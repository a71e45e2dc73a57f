"""record/durable.py: a file is whole or absent."""

import os

import pytest

from record import run_paths
from record.durable import write_whole


def test_a_file_is_written_whole_or_not_at_all(tmp_path, monkeypatch):
    path = tmp_path / "new" / "file"
    write_whole(path, b"first")
    assert path.read_bytes() == b"first"

    def full(_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_whole(path, b"second")
    assert path.read_bytes() == b"first"
    assert [p.name for p in path.parent.iterdir()] == ["file"]


def test_a_checkpoint_is_a_folder_under_its_final_name(tmp_path):
    names = ("step_0000012", "step_0000003", "step_12345678", "step_0000640.tmp-7")
    for name in (*names, ".trash-step_0000001", "step_12", "step_0000009x"):
        (tmp_path / name).mkdir()
    assert run_paths.list_checkpoints(tmp_path) == [3, 12, 12345678]
    assert run_paths.list_checkpoints(tmp_path / "absent") == []
    assert run_paths.name_checkpoint(12) == "step_0000012"
