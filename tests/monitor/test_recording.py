"""monitor/gpu_sampler/recording.py: files that are whole lines, on disks that are full, slow or gone."""

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from monitor.gpu_sampler import recording
from monitor.gpu_sampler.recording import Recording
from record.run_paths import RunPaths

FAST, SLOW = ["timestamp", "a"], ["timestamp", "b"]


class Disk:
    """os.write, with so much room; then full, as a disk is: what fits is taken, and then nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int):
        self.room, self.real = room, os.write
        monkeypatch.setattr(recording.os, "write", self.write)

    def write(self, file: int, data: bytes) -> int:
        if self.room <= 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.real(file, data[: self.room])
        self.room -= written
        return written


def start(folder: Path, said: list[str]) -> Recording:
    return Recording(RunPaths(folder), FAST, SLOW, said.append)


def lines(folder: Path, pattern: str = "gpu_metrics_*.csv") -> list[str]:
    return [line for path in sorted(folder.glob(pattern)) for line in path.read_text().splitlines()]


def about(folder: Path) -> dict[str, Any]:
    return json.loads(next(folder.glob("gpu_metrics_*.json")).read_text())


def test_what_is_added_is_there_in_order_with_what_is_known_of_it(tmp_path: Path) -> None:
    said = list[str]()
    files = start(tmp_path, said)
    for k in range(100):
        files.add([f"{k},1", f"{k},2"], [f"{k},s"] * (k % 10 == 0))
    files.close({"hz": 100})
    assert lines(tmp_path) == ["timestamp,a", *(f"{k},{n}" for k in range(100) for n in (1, 2))]
    assert lines(tmp_path, "gpu_slow_*.csv") == [
        "timestamp,b",
        *(f"{k},s" for k in range(0, 100, 10)),
    ]
    names = sorted(path.name for path in tmp_path.iterdir())
    stamp = names[0].removeprefix("gpu_metrics_").removesuffix(".csv")
    assert names == [
        f"gpu_metrics_{stamp}.csv",
        f"gpu_metrics_{stamp}.json",
        f"gpu_slow_{stamp}.csv",
    ]
    assert about(tmp_path) == {
        "hz": 100,
        "rows": 200,
        "slow_rows": 10,
        "waiting_rows": 0,
        "lost_rows": 0,
        "files": [names[0], names[2]],
    }
    assert said == []


def test_two_that_begin_in_one_second_have_files_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording.time, "time", lambda: 1.7e9)
    both = [start(tmp_path, []), start(tmp_path, [])]
    for k, files in enumerate(both):
        files.add([f"{k},0"], [])
        files.close({})
    assert [path.read_text() for path in sorted(tmp_path.glob("gpu_metrics_*.csv"))] == [
        "timestamp,a\n0,0\n",
        "timestamp,a\n1,0\n",
    ]


def test_rows_wait_for_a_full_disk_and_none_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = list[str]()
    files = start(tmp_path, said)
    disk = Disk(monkeypatch, room=13)  # in the middle of a row
    for k in range(50):
        files.write([f"{k:04d},0"], [])
    assert lines(tmp_path)[1:] == ["0000,0", "0001,0"]  # 7 bytes each; the second lacks its end
    assert (
        len(said) == 1 and "No space left on device" in said[0] and "rows wait in memory" in said[0]
    )
    disk.room = 10**9
    files.add(["0050,0"], ["s"])
    files.close({})
    assert lines(tmp_path)[1:] == [f"{k:04d},0" for k in range(51)] and len(said) == 1
    assert about(tmp_path)["lost_rows"] == 0 and lines(tmp_path, "gpu_slow_*.csv")[1:] == ["s"]


def test_a_disk_that_stays_full_to_the_end_has_only_what_it_took(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = start(tmp_path, [])
    disk = Disk(monkeypatch, room=20)
    files.add([f"{k:04d},0" for k in range(5)], [])
    files.close({})
    assert lines(tmp_path)[1:] == ["0000,0", "0001,0", "0002,0"[:6]] and disk.room == 0
    assert (
        about(tmp_path)["rows"],
        about(tmp_path)["waiting_rows"],
        about(tmp_path)["lost_rows"],
    ) == (2, 3, 0)


def test_what_does_not_fit_in_memory_either_is_lost_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "BACKLOG_BYTES", 70)
    files = start(tmp_path, [])
    disk = Disk(monkeypatch, room=0)
    for k in range(50):
        files.write([f"{k:04d},0"], [])
    disk.room = 10**9
    files.add(["0050,0"], [])
    files.add(["0051,0"], [])
    files.close({})
    # ten rows waited; the row after them found no room, since those were not written yet
    assert lines(tmp_path)[1:] == [*(f"{k:04d},0" for k in range(10)), "0051,0"]
    assert (about(tmp_path)["rows"], about(tmp_path)["lost_rows"]) == (11, 41)


def test_a_disk_that_hangs_keeps_nobody_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recording, "WAITING", 5)
    files, hangs, real = start(tmp_path, []), threading.Event(), os.write

    def write(file: int, data: bytes) -> int:
        hangs.wait()
        return real(file, data)

    monkeypatch.setattr(recording.os, "write", write)
    for k in range(100):
        files.add([f"{k},0"], [f"{k},s"])  # returns
    hangs.set()
    files.close({})
    kept = len(lines(tmp_path)) - 1
    assert kept in (6, 7) and about(tmp_path)["lost_rows"] == 2 * (100 - kept)
    assert lines(tmp_path)[1:] == [f"{k},0" for k in range(kept)]


def test_where_no_new_file_can_be_made_the_old_one_grows_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said, real = list[str](), recording.Growing
    files = start(tmp_path, said)

    def full(path: Path, header: list[str]) -> Any:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    files.add(["1,0"], [])
    monkeypatch.setattr(recording, "Growing", full)
    files.rotate({})
    files.add(["2,0"], [])
    files.close({})
    assert lines(tmp_path) == ["timestamp,a", "1,0", "2,0"] and "Disk quota exceeded" in said[0]
    monkeypatch.setattr(
        recording,
        "Growing",
        lambda path, header: real(path, header) if "metrics" in path.name else full(path, header),
    )
    with pytest.raises(OSError, match="quota"):
        start(tmp_path, said)
    assert len(list(tmp_path.glob("*.csv"))) == 2  # nothing half is left behind
