"""record/metrics.py: what a run's record keeps when the disk does not take it."""

import errno
from pathlib import Path

import pytest

from record import reader
from record.metrics import Recorder
from record.run_paths import RunPaths


class Disk:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file, room: int):
        self.file, self.room = file, room

    def write(self, content: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return taken

    def fileno(self) -> int:
        return self.file.fileno()

    def close(self) -> None:
        self.file.close()


def test_a_full_disk_loses_and_tears_no_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = RunPaths(tmp_path)
    caplog.set_level("INFO")
    recorder = Recorder(paths, True, 0, 10, 5)
    recorder.file = disk = Disk(recorder.file, room=250)  # a line and a half
    for step in (1, 2, 3, 4):
        recorder.event("step", step, 0, loss=1.0)
    recorder.sync()
    assert paths.metrics.stat().st_size == 250
    assert [r["step"] for r in reader.read(paths.metrics)] == [1]
    assert caplog.text.count("metrics.jsonl: cannot be written (No space left on device)") == 1
    disk.room = 10**6
    recorder.event("step", 5, 0, loss=1.0)
    assert [r["step"] for r in reader.read(paths.metrics)] == [1, 2, 3, 4, 5]
    disk.room = 0
    recorder.event("step", 6, 0, loss=1.0)
    disk.room = 10**6
    recorder.close()
    assert [r["step"] for r in reader.read(paths.metrics)] == [1, 2, 3, 4, 5, 6]
    recorder.event("end", 6, 0)  # of a closed record: nothing


def test_a_disk_that_stays_full_ends_no_run(tmp_path: Path) -> None:
    recorder = Recorder(RunPaths(tmp_path), True, 0, 10, 5)
    recorder.file = Disk(recorder.file, room=0)
    recorder.event("start", 0, 0)
    recorder.close()
