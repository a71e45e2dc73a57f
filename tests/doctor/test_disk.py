"""Disks: room, rights and speed, on made facts and in folders of this machine."""

import dataclasses
import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest

from doctor import disk
from doctor.disk import Folder
from plan.storage import Place
from settings import ROOT
from settings.config import Config
from settings.finding import FAIL, PASS, WARN


def config(**values: Any) -> Config:
    return dataclasses.replace(Config(), **values).derived()


def test_room_is_judged_with_its_parts() -> None:
    needs = {"checkpoints": 30e9, "shards": 50e9, "downloads": 0.0}
    (fits,) = disk.room([Place(("RUNS_DIR", "DATA_DIR"), Path("/"), needs, 80e9)])
    assert fits.level == PASS and fits.text == (
        "RUNS_DIR and DATA_DIR: 80 GB free, 30 GB of checkpoints, "
        "50 GB of shards needed at most (computed)"
    )
    runs, data = disk.room(
        [
            Place(("RUNS_DIR",), Path("/"), {"checkpoints": 30e9}, 29.9e9),
            Place(("DATA_DIR",), Path("/"), {"shards": 0.0}, 1.0),
        ]
    )
    assert (runs.level, runs.code) == (FAIL, 78)
    assert runs.text == (
        "Not enough disk space for RUNS_DIR: 29.9 GB free, 30 GB of checkpoints needed at most "
        "(computed)"
    )
    assert "set RUNS_DIR to a folder on a larger disk" in runs.fix
    assert data.level == PASS and "free, nothing needed at most (computed)" in data.text


def test_the_plan_that_is_proposed_keeps_what_was_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    typed = {"RUNS_DIR": "/my runs", "NODE_RANK": "1", "VENV": "/venv"}
    for name, text in {**typed, "MAKE_SETTINGS": " ".join(typed)}.items():
        monkeypatch.setenv(name, text)
    (found,) = disk.room([Place(("RUNS_DIR",), Path("/"), {"checkpoints": 30e9}, 29.9e9)])
    assert "`make plan RUNS_DIR='/my runs' VENV=/venv` suggests settings" in found.fix


def test_folders_that_are_not_there_are_judged_by_what_is_above(tmp_path: Path) -> None:
    c = config(runs_dir=str(tmp_path / "a" / "runs"), data_dir=str(tmp_path))
    assert disk.folders(c) == [
        Folder("RUNS_DIR", tmp_path / "a" / "runs", tmp_path),
        Folder("DATA_DIR", tmp_path, tmp_path),
    ]
    (there,) = disk.places(c, disk.folders(c))
    assert there.settings == ("RUNS_DIR", "DATA_DIR") and not (tmp_path / "a").exists()
    assert disk.places(dataclasses.replace(c, data_mix="no-such:1"), disk.folders(c)) == []


def test_a_file_where_a_folder_is_wanted(tmp_path: Path) -> None:
    (tmp_path / "runs").write_text("")
    c = config(runs_dir=str(tmp_path / "runs" / "deeper"), data_dir=str(tmp_path))
    found = disk.folders(c)
    (finding,) = disk.rights(found)
    assert (
        finding.level == FAIL
        and f"{tmp_path}/runs is no folder" in finding.text
        and disk.places(c, found) == []
    )


@pytest.mark.parametrize(("node", "code"), [("", 78), ("node-7", 71)])
def test_a_disk_that_does_not_answer(monkeypatch: pytest.MonkeyPatch, node: str, code: int) -> None:
    def stale(path: Path) -> None:
        raise OSError(errno.ESTALE, "Stale file handle", str(path))

    monkeypatch.setenv("K8S_NODE", node)
    with monkeypatch.context() as patched:  # all of os, so only as long as needed
        patched.setattr("doctor.disk.os.stat", stale)
        (finding,) = disk.rights([disk.folder("RUNS_DIR", Path("/"))])
    assert "nothing can be written there (Stale file handle)" in finding.text
    assert finding.code == code


AS_NOBODY = """
import os, sys
from doctor import disk
from pathlib import Path
os.setgroups([]); os.setgid(65534); os.setuid(65534)
for folder in sys.argv[1:]:
    print(disk.folder("RUNS_DIR", Path(folder)).problem)
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_folders_that_may_not_be_written_to() -> None:
    with tempfile.TemporaryDirectory() as folder:  # pytest's own folders are closed to other users
        os.chmod(folder, 0o755)
        for name, mode in (("open", 0o777), ("closed", 0o755), ("hidden", 0o700)):
            (Path(folder) / name).mkdir()
            os.chmod(Path(folder) / name, mode)
        folders = [f"{folder}/{name}" for name in ("open/new/runs", "closed", "hidden/runs/more")]
        done = subprocess.run(
            [sys.executable, "-c", AS_NOBODY, *folders],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=True,
        )
    assert done.stdout.splitlines() == ["", "Permission denied", "Permission denied"]


@pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a small disk"
)
def test_a_disk_that_may_only_be_read_or_is_too_small(tmp_path: Path) -> None:
    small = tmp_path / "small"
    small.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "none", small], check=False
    ).returncode:
        pytest.skip("this machine lets nobody mount")
    try:
        c = config(
            runs_dir=str(small), data_dir=str(tmp_path)
        )  # 3.3 M parameters: 40 MB a checkpoint
        first, second = disk.room(disk.places(c, disk.folders(c)))
        assert (
            first.level == FAIL
            and first.text.startswith("Not enough disk space for RUNS_DIR: 1.05 MB free")
            and second.level == PASS
        )
        assert disk.write_mb_s(small) == (None, "there is too little room")
        subprocess.run(["mount", "-o", "remount,ro", small], check=True)
        assert disk.folders(c)[0].problem == "Read-only file system"
    finally:
        subprocess.run(["umount", small], check=True)


# ---- Speed


def test_what_is_measured_with_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "MEASURED_BYTES", 2e6)
    monkeypatch.setattr(disk, "MEASURED_S", 120)
    monkeypatch.setattr(disk, "PIECE_BYTES", 2**20)
    flushed, flush = [], os.fsync

    def slow(descriptor: int) -> None:
        flushed.append(os.fstat(descriptor).st_size)
        assert list(tmp_path.iterdir()) == []
        time.sleep(0.1)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", slow)
    began = time.perf_counter()
    mb_s, why = disk.write_mb_s(tmp_path)
    took = time.perf_counter() - began
    assert flushed == [2**20, 2**21] and why == "" and list(tmp_path.iterdir()) == []
    assert mb_s and 2.097152 / took <= mb_s <= 2.097152 / 0.2


def test_a_slow_disk_is_not_waited_for_and_one_that_fails_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[int] = []
    monkeypatch.setattr(disk, "MEASURED_S", 0.1)
    monkeypatch.setattr(
        os, "fsync", lambda descriptor: (flushed.append(descriptor), time.sleep(0.2))
    )
    mb_s, _ = disk.write_mb_s(tmp_path)
    assert len(flushed) == 1 and mb_s and mb_s <= disk.PIECE_BYTES / 1e6 / 0.2
    monkeypatch.setattr(
        os, "fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error"))
    )
    assert disk.write_mb_s(tmp_path) == (None, "Input/output error")


def test_speed_is_judged_by_what_a_checkpoint_takes() -> None:
    small = config()  # 3.3 M parameters: 12 bytes of each are 40 MB
    assert (
        disk.speed(small, 400.0, "").level == PASS
        and " s for a checkpoint of " in disk.speed(small, 400.0, "").text
    )
    assert (
        disk.speed(small, 99.0, "").level == WARN
        and disk.speed(small, None, "too full").level == WARN
    )
    # 12 bytes of about 1.21 billion: 14.5 GB
    large = config(vocab_size=50304, n_layer=22, n_head=16, n_embd=2048, mlp_dim=5632)
    assert disk.speed(large, 200.0, "").level == PASS  # 73 s
    late = disk.speed(large, 110.0, "")  # 132 s
    assert (
        late.level == WARN
        and "GRACE_PERIOD_S=180, a run that is asked to stop has 120 s" in late.text
    )
    over = disk.speed(dataclasses.replace(large, save_minutes=1), 200.0, "")
    assert over.level == FAIL and over.code == 64 and "SAVE_MINUTES=1" in over.text
    assert (
        disk.speed(dataclasses.replace(large, save_every=0), 110.0, "").text
        == "RUNS_DIR=runs takes 110 MB/s"
    )
