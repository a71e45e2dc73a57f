"""record/metrics.py: what a run's record keeps, and what readers get from it, whatever happens to the file."""

import math
import os
import re
from typing import Any

import pytest

from record import metrics
from record.metrics import RecordReader, read_records, to_json

STEP: dict[str, Any] = {
    "schema": 1,
    "event": "step",
    "time": 1.5,
    "mono_s": 2.5,
    "host": "h",
    "attempt": 0,
    "step": 1200,
    "tokens": 629145600,
    "loss": 3.412711,
    "lr": 6e-4,
    "grad_norm": 0.41,
    "step_ms": 353.42,
    "tokens_per_s": 1483200.4,
    "mfu": 41.24,
    "mem_gib": 61.2,
}
DAMAGED = (
    "",
    "{",
    "[1]",
    "3",
    "null",
    '"text"',
    '{"event": "step"}',
    "step=1/2 loss=3",
    '{"schema": 1}',
    to_json(STEP | {"schema": 2}),
    to_json(STEP | {"event": 3}),
    to_json(STEP | {"time": None}),
    to_json(STEP | {"step": "1"}),
    to_json(STEP | {"time": 10**400}),
    to_json(STEP | {"time": 10**15}),  # which is no date
    to_json(STEP | {"time": -1}),
    to_json(STEP | {"loss": 10**4000}),
    to_json(STEP | {"tokens": 10**30}),
    to_json(STEP | {"tokens": "many"}),
    to_json(STEP | {"attempt": True}),
    to_json({"schema": 1, "event": "other", "time": 1, "step": "x"}),
    to_json({"schema": 1, "event": "start", "time": 1, "startup_s": [1]}),
    to_json(STEP | {"schema": "\033[31m" + "red" * 100}),
    "[" * 10_000 + "]" * 10_000,
    "\x00" * 40,
)


def lines_of(*steps):
    return "".join(to_json(STEP | {"step": step}) + "\n" for step in steps)


def steps_in(records):
    return [record["step"] for record in records]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_written_as_null(value):
    record = {"loss": value, "of": {"one": value, "other": 2.5}, "list": (value, 1)}
    assert to_json(record) == '{"loss": null, "of": {"one": null, "other": 2.5}, "list": [null, 1]}'


def test_the_console_line_has_the_keys_of_the_record_in_fewer_digits():
    assert metrics.to_console(STEP, 18865) == (
        "step=1200/18865 loss=3.4127 lr=6.000e-04 grad_norm=0.410 step_ms=353.4 "
        "tokens_per_s=1483200 mfu=41.2 mem_gib=61.20 tokens=629145600"
    )
    unknown = {"event": "step", "step": 1, "loss": 2.0, "mfu": None}
    assert metrics.to_console(unknown, 10) == "step=1/10 loss=2.0000 mfu=n/a"


def test_durations_have_hours_where_there_are_any():
    times = (0.0, 59.6, 3599.4, 3599.6, 3723.0, 90_000.0)
    expected = ["0:00", "1:00", "59:59", "1:00:00", "1:02:03", "25:00:00"]
    assert [metrics.duration(seconds) for seconds in times] == expected


def test_records_are_read_in_order_with_keys_that_this_version_does_not_know(tmp_path, monkeypatch):
    path = tmp_path / "metrics.jsonl"
    written = [STEP | {"step": step, "of_the_future": [1]} for step in range(20)]
    path.write_text("".join(to_json(record) + "\n" for record in written))
    for chunk in (100, 1000, 2**18):
        monkeypatch.setattr(metrics, "CHUNK_BYTES", chunk)
        assert list(read_records(path)) == written


def test_a_last_line_that_a_kill_cut_short_is_left_out(tmp_path):
    path = tmp_path / "metrics.jsonl"
    line = to_json(STEP)
    for length in (1, 10, len(line) - 1, len(line)):  # the last lacks only its end
        path.write_text(line + "\n" + line[:length])
        assert list(read_records(path)) == [STEP]


@pytest.mark.parametrize("line", DAMAGED)
def test_damaged_lines_are_left_out_and_the_first_is_named_once(tmp_path, line, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of(1) + line + "\n" + lines_of(2) + "{\n" + lines_of(3))
    assert steps_in(list(read_records(path))) == [1, 2, 3]
    (message,) = caplog.messages
    assert re.fullmatch(rf"{path} line 2 (is|has) .*\. Damaged lines that are left out: 2", message)
    assert message.isprintable() and len(message) < len(str(path)) + 140


def test_a_reader_follows_a_file_that_grows_and_waits_for_the_end_of_a_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    reader = RecordReader(path)
    assert reader.read_new() == []
    with open(path, "a") as file:
        for piece, expected in ((lines_of(1, 2), [1, 2]), ('{"sch', []), ("", [])):
            file.write(piece)
            file.flush()
            assert steps_in(reader.read_new()) == expected
        file.write(lines_of(3)[5:] + lines_of(4))
    assert steps_in(reader.read_new()) == [3, 4]
    assert reader.position == reader.size == path.stat().st_size
    assert not reader.restarted


def test_a_line_of_terabytes_is_damage_and_takes_neither_memory_nor_time(tmp_path, caplog):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of(1))
    with open(path, "r+b") as file:
        file.truncate(3 * 10**12)
    reader = RecordReader(path)
    assert steps_in(list(reader.read_all())) == [1]
    assert reader.position == len(lines_of(1))  # the recorder cuts off what has no end
    assert steps_in(RecordReader(path, 2**20).read_new()) == []
    with open(path, "ab") as file:
        file.write(b"\n" + lines_of(2).encode())
    assert steps_in(list(reader.read_all())) == [2]
    assert caplog.messages == [
        f"{path} line 2 is longer than 4194304 bytes. Damaged lines that are left out: 1"
    ]


def remove_and_write(path, text):
    path.unlink()
    path.write_text(text)


def replace_by_another(path, text):
    path.with_name("other").write_text(text)
    os.replace(path.with_name("other"), path)


def write_over(path, text):
    path.write_text(text)


@pytest.mark.parametrize("change", [remove_and_write, replace_by_another, write_over])
@pytest.mark.parametrize("steps", [(5,), (1, 2, 3, 4, 5, 6), (5, 6, 7, 8, 9)])
def test_a_reader_begins_anew_where_the_file_is_another_one(tmp_path, change, steps):
    """Another file may be shorter or longer, and may get the inode of the old one."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("damaged\n" + lines_of(1, 2, 3))
    reader = RecordReader(path)
    reader.read_new()
    change(path, lines_of(*steps))
    assert steps_in(reader.read_new()) == list(steps)
    assert reader.restarted and reader.damaged_lines == 0
    assert reader.read_new() == [] and not reader.restarted


def test_a_reader_reports_once_that_the_file_was_removed_or_cut(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of(1))
    reader = RecordReader(path)
    reader.read_new()
    path.unlink()
    assert reader.read_new() == [] and reader.restarted
    assert reader.read_new() == [] and not reader.restarted
    path.write_text(lines_of(1, 2))
    assert steps_in(reader.read_new()) == [1, 2] and not reader.restarted
    os.truncate(path, len(lines_of(1)))
    assert steps_in(reader.read_new()) == [1] and reader.restarted


def test_a_reader_may_take_a_part_at_a_time_or_only_the_end(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(lines_of(*range(1, 101)))
    length = len(lines_of(50))
    reader = RecordReader(path)
    steps = []
    while part := reader.read_new(most_bytes=10 * length - 1):
        assert len(part) <= 11
        steps += steps_in(part)
    assert steps == [*range(1, 101)]
    assert len(RecordReader(path).read_new(most_bytes=1)) == 1  # never less than a line
    two_lines = len(lines_of(99, 100))
    for last_bytes, expected in ((two_lines, 2), (two_lines - 1, 1), (10**9, 100)):
        reader = RecordReader(path, last_bytes)
        assert (len(reader.read_new()), reader.damaged_lines) == (expected, 0)
