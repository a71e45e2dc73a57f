"""record/recorder.py: what a run writes into its record, whatever happens to the disk and the file."""

import errno
import json
import os
from pathlib import Path

import pytest

from record import metrics
from record.metrics import read_records, to_json
from record.recorder import Recorder
from record.run_paths import RunPaths
from tests.record.test_metrics import STEP, lines_of, replace_by_another, steps_in


class Disk:
    """A file on a disk with room for so many bytes."""

    def __init__(self, file, room):
        self.file, self.room = file, room

    def write(self, content):
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = self.file.write(content[: self.room])
        self.room -= taken
        return taken

    def fileno(self):
        return self.file.fileno()

    def truncate(self, size):
        self.file.truncate(size)

    def close(self):
        self.file.close()


def test_a_full_disk_loses_and_tears_no_line(tmp_path, caplog):
    paths = RunPaths(tmp_path)
    caplog.set_level("INFO")
    recorder = Recorder(paths, True, 0, 10, 5)
    recorder.file = disk = Disk(recorder.file, room=250)  # a line and a half
    for step in (1, 2, 3, 4):
        recorder.event("step", step, 0, loss=1.0)
    recorder.sync()
    assert steps_in(list(read_records(paths.metrics))) == [1]
    assert caplog.text.count("metrics.jsonl: cannot be written (No space left on device)") == 1
    disk.room = 10**6
    recorder.event("step", 5, 0, loss=1.0)
    assert steps_in(list(read_records(paths.metrics))) == [1, 2, 3, 4, 5]
    disk.room = 0
    recorder.event("step", 6, 0, loss=1.0)
    recorder.close()  # the disk stays full, which ends no run
    assert caplog.text.count("cannot be written") == 2
    assert steps_in(list(read_records(paths.metrics))) == [1, 2, 3, 4, 5]
    recorder.event("end", 6, 0)  # of a closed record: nothing


@pytest.mark.parametrize(
    ("last_step", "step_s", "shown"),
    [
        (1000, 0.6, ["about 10 minutes left"]),
        (1000, 60.0, ["about 16.6 hours left"]),
        (100, 0.6, []),
    ],
)
def test_the_second_step_tells_once_how_long_a_run_takes(
    tmp_path, monkeypatch, caplog, last_step, step_s, shown
):
    caplog.set_level("INFO")
    recorder = Recorder(RunPaths(tmp_path), True, 0, last_step, 50)
    now = 0.0
    monkeypatch.setattr("record.recorder.time.monotonic", lambda: now)
    for step in range(1, 10):
        now += step_s
        recorder.step(step, step, loss=1.0)
        if step == 2:
            assert caplog.messages[1:] == shown
    recorder.close()
    assert caplog.messages[1:] == shown


def test_the_time_left_follows_the_pace_of_the_last_hundred_steps(tmp_path, monkeypatch, caplog):
    caplog.set_level("INFO")
    recorder = Recorder(RunPaths(tmp_path), True, 0, 1000, 100)
    now = 0.0
    monkeypatch.setattr("record.recorder.time.monotonic", lambda: now)
    for step in range(1, 401):
        now += 0.1 if step <= 200 else 3.0  # another program takes the machine
        recorder.step(step, step, loss=1.0)
    recorder.close()
    lines = [line for line in caplog.messages if line.startswith("step=")]
    assert [line.partition(" left=")[2] for line in lines] == ["", "1:30", "1:20", "35:00", "30:00"]


def cut(path):
    os.truncate(path, 0)


def cut_within_the_last_line(path):
    os.truncate(path, path.stat().st_size - 10)


def move_away(path):
    path.rename(path.with_name("metrics.jsonl.1"))


def replace_by_a_copy(path):
    replace_by_another(path, "")


@pytest.mark.parametrize(
    "harm", [Path.unlink, move_away, replace_by_a_copy, cut, cut_within_the_last_line]
)
def test_a_record_that_is_removed_begins_anew_and_has_a_gap(tmp_path, harm, caplog):
    paths = RunPaths(tmp_path)
    caplog.set_level("INFO")
    paths.metrics.write_text(lines_of(1, 2, 3))
    recorder = Recorder(paths, True, 0, 10, 5)
    for step in (1, 2):
        recorder.event("step", step, 0, loss=1.0)
    harm(paths.metrics)
    for step in (3, 4):
        recorder.event("step", step, 0, loss=1.0)
    recorder.close()
    *_, gap, third, fourth = read_records(paths.metrics)
    assert (gap["event"], gap["reason"], gap["step"]) == ("gap", "record removed", 3)
    assert steps_in([third, fourth]) == [3, 4]
    assert caplog.text.count("continues at step 3") == 1


def test_a_record_that_cannot_be_begun_anew_waits_in_memory(tmp_path, caplog):
    paths = RunPaths(tmp_path)
    caplog.set_level("INFO")
    recorder = Recorder(paths, True, 0, 10, 5)
    recorder.event("step", 1, 0, loss=1.0)
    paths.metrics.unlink()
    paths.metrics.mkdir()
    for step in (2, 3):
        recorder.event("step", step, 0, loss=1.0)
    assert caplog.text.count("metrics.jsonl: cannot be written (is not a regular file)") == 1
    paths.metrics.rmdir()
    recorder.event("step", 4, 0, loss=1.0)
    recorder.close()
    gap, *steps = read_records(paths.metrics)
    assert (gap["event"], gap["step"]) == ("gap", 2)
    assert steps_in(steps) == [2, 3, 4]


@pytest.mark.parametrize(("recorded", "last"), [([], 0), ([1, 2], 2), ([1, 3, 2], 3)])
def test_a_recorder_knows_how_far_the_record_comes(tmp_path, recorded, last):
    paths = RunPaths(tmp_path)
    paths.metrics.write_text(
        to_json(STEP | {"event": "signal", "step": None}) + "\n" + lines_of(*recorded)
    )
    recorder = Recorder(paths, True, 1, 10, 5)
    assert (recorder.recorded_step, recorder.saved_step) == (last, 0)
    recorder.close()


@pytest.mark.parametrize("partial", ['{"schema": 1, "ev', "x" * 3 * metrics.CHUNK_BYTES])
def test_a_record_of_a_run_resumed_after_a_kill_starts_on_its_own_line(tmp_path, partial):
    paths = RunPaths(tmp_path)
    paths.metrics.write_text(lines_of(1) + partial)
    recorder = Recorder(paths, True, 1, 10, 5)
    recorder.event("resume", 1, 0)
    recorder.close()
    lines = paths.metrics.read_text().splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["step", "resume"]
