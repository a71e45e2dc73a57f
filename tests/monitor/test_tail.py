"""monitor/tail.py: records by hand, and what they must come to; a record in slices against the same read at once."""

import json
import os
import random
from pathlib import Path
from statistics import mean, median
from typing import Any

import pytest

from monitor import tail as module
from monitor.tail import RECENT, Tail
from record import metrics
from record.goodput import Timeline

START = 1.7e9


class Record:
    """Writes metrics.jsonl as a run does; each record `after` seconds past the one before."""

    def __init__(self, path: Path):
        self.path, self.wall, self.mono, self.attempt = path, START, 50.0, 0

    def write(self, event: str, step: int, after: float = 0.0, **values: Any) -> None:
        self.wall, self.mono = self.wall + after, self.mono + after
        with open(self.path, "a") as file:
            file.write(
                metrics.to_json(
                    {
                        "schema": 1,
                        "event": event,
                        "time": self.wall,
                        "mono_s": self.mono,
                        "host": "h",
                        "attempt": self.attempt,
                        "step": step,
                        "tokens": 100 * step,
                        **values,
                    }
                )
                + "\n"
            )

    def step(self, step: int, seconds: float = 2.0, **values: Any) -> None:
        self.write(
            "step",
            step,
            seconds,
            **{
                "loss": 3.0,
                "step_ms": 1000 * seconds,
                "data_wait_s": 0.1 * seconds,
                "tokens_per_s": 100 / seconds,
                "mfu": 40.0,
                "mem_gib": 10.0,
            }
            | values,
        )


@pytest.fixture
def run(tmp_path: Path) -> Record:
    return Record(tmp_path / "metrics.jsonl")


def look(run: Record) -> Any:
    found = Tail(run.path).look()
    assert found
    return found


def test_what_is_not_there_is_none_and_what_is_not_known_too(run: Record) -> None:
    tail = Tail(run.path)
    assert tail.look() is None
    run.path.touch()
    assert tail.look() is None
    run.write("start", 0, 7.0, startup_s={"import": 3.0, "model": 4.0}, world_size=8)
    seen = tail.look()
    assert seen and (
        seen.step,
        seen.attempt,
        seen.started,
        seen.attempt_started,
        seen.ready,
        seen.processes,
    ) == (0, 0, START, START, START + 7, 8)
    assert [
        seen.loss,
        seen.step_s,
        seen.tokens_per_s,
        seen.mfu_percent,
        seen.step_time,
        seen.mem_gib,
        seen.val_loss,
        seen.checkpoint_time,
        seen.data_wait_fraction,
        seen.last_step,
    ] == 10 * [None]


def test_rates_are_of_the_steps_without_the_first(run: Record) -> None:
    run.write("start", 0)
    run.step(1, 60.0, loss=9.0)
    for step, seconds, mfu in ((2, 1.0, 50.0), (3, 2.0, 25.0), (4, 5.0, 10.0)):
        run.step(step, seconds, loss=5.0 - step, mfu=mfu)
    seen = look(run)
    assert (seen.step, seen.tokens, seen.loss, seen.median_loss) == (4, 400, 1.0, 2.0)
    assert (seen.step_s, seen.step_time) == (2.0, START + 68)
    assert seen.tokens_per_s == pytest.approx(300 / 8)
    assert seen.mfu_percent == pytest.approx((50 + 2 * 25 + 5 * 10) / 8)
    assert seen.data_wait_fraction == pytest.approx(0.1)


def test_only_the_recent_steps_count_and_unknown_values_are_left_out(run: Record) -> None:
    run.write("start", 0)
    for step in range(1, 51):
        run.step(step, 9.0)
    for step in range(51, 51 + RECENT):
        run.step(step, 2.0, mfu=None, loss=None if step % 2 else float(step))
    seen = look(run)
    assert (seen.step_s, seen.tokens_per_s, seen.mfu_percent) == (2.0, 50.0, None)
    even = range(52, 51 + RECENT, 2)
    assert (seen.median_loss, seen.loss) == (median(even), even[-1])


def test_skips_rollbacks_evaluations_and_checkpoints(run: Record) -> None:
    run.write("start", 0)
    for step in range(1, 11):
        run.step(step, loss=float(step))
    run.write("eval", 10, val_loss=4.0, eval_s=3.0)
    run.write("checkpoint", 5, 1.0, bytes=123, seconds=2.0)
    saved = run.wall
    run.write("eval", 10, val_loss=None, error="no text", eval_s=60.0)
    run.write("nonfinite", 11)
    run.write("skip", 11, reason="nonfinite", step_ms=2000)
    run.write("skip", 11, reason="loss", step_ms=2000)
    seen = look(run)
    assert (seen.step, seen.skipped_steps, seen.nonfinite_steps, seen.rollbacks) == (10, 2, 1, 0)
    assert (seen.val_loss, seen.val_step, seen.eval_s) == (4.0, 10, 60.0)
    assert (seen.checkpoint_step, seen.checkpoint_time, seen.checkpoint_bytes) == (5, saved, 123)
    run.write("rollback", 5, seconds=1.0)
    seen = look(run)
    assert (seen.step, seen.tokens, seen.rollbacks, seen.skipped_steps) == (5, 500, 1, 2)
    assert seen.median_loss == mean([3.0, 4.0]), (
        "of steps 2 to 5, and no longer of those that were gone back behind"
    )


def test_another_attempt_begins_anew_and_the_end_says_why(run: Record) -> None:
    run.write("start", 0, 5.0, startup_s={"import": 5.0})
    for step in range(1, 6):
        run.step(step, 4.0)
    run.write("end", 5, reason="crashed")
    assert look(run).end_reason == "crashed"
    run.attempt = 1
    run.write("resume", 3, 100.0, startup_s={"import": 6.0})
    seen = look(run)
    assert (seen.step, seen.attempt, seen.end_reason, seen.rollbacks) == (3, 1, "", 0)
    assert (seen.started, seen.attempt_started) == (START, START + 5 + 20 + 100 - 6)
    assert (seen.step_s, seen.mem_gib, seen.loss) == (None, None, 3.0)
    run.step(4, 50.0)
    assert look(run).step_s is None
    run.step(5, 1.0)
    assert look(run).step_s == 1.0
    spent = Timeline(metrics.read_records(run.path)).as_dict()
    assert look(run).goodput == spent and spent["lost_work"] == 8.0


def test_the_last_straggler_of_an_attempt_with_its_step(run: Record) -> None:
    slow = {"rank": 3, "host": "b", "times": 2.5, "own_s": 0.5}
    run.write("start", 0)
    run.step(1)
    assert look(run).straggler == {}
    run.step(2, straggler={**slow, "rank": 1})
    run.step(3, straggler=slow)
    for step in (4, 5):
        run.step(step, straggler=None if step == 4 else {"rank": "3"})
    assert look(run).straggler == {**slow, "step": 3}, "what is none is passed over"
    run.attempt = 1
    run.write("resume", 2)
    run.step(3)
    assert look(run).straggler == {}, "its ranks are others"


def test_the_time_after_a_stop_is_known_apart_from_that_after_a_crash(run: Record) -> None:
    """Stopped, 100 s later begun again, crashed, and 40 s later once more, with 7 s of start-up each time."""
    for attempt, (away, reason) in enumerate(((0, "stopped"), (100, "crashed"), (40, "stopped"))):
        run.attempt = attempt
        run.write(
            "resume" if attempt else "start", 3 * attempt, away + 7.0, startup_s={"import": 7.0}
        )
        run.step(3 * attempt + 1)
        run.write("end", 3 * attempt + 1, 1.0, reason=reason)
    seen = look(run)
    assert (seen.goodput["down"], seen.rested_s, seen.attempt) == (140, 100, 2)


# ---- Reading


def test_a_torn_line_waits_and_a_bad_one_is_counted(run: Record) -> None:
    run.write("start", 0)
    run.step(1)
    tail = Tail(run.path)
    whole = run.path.read_bytes()
    run.step(2)
    line = run.path.read_bytes()[len(whole) :]
    for cut in (1, len(line) // 2, len(line) - 1):
        run.path.write_bytes(whole + line[:cut])
        assert tail.look().step == 1  # type: ignore[union-attr]
    run.path.write_bytes(whole + line)
    assert tail.look().step == 2 and tail.bad == 0  # type: ignore[union-attr]
    with open(run.path, "ab") as file:
        file.write(
            b'no record\n\xff\xfe\n[1, 2]\n{"schema": 1}\n{"schema": 2, "event": "step", "time": 1, "step": 9}\n'
            b'{"schema": 1, "event": "step", "time": 1}\n'
            b'{"schema": 1, "event": "step", "time": NaN, "step": 9}\n'
            b'{"a": [1\n2]}\n\n'
        )
    run.step(3)
    assert tail.look().step == 3 and tail.bad == tail.look().damaged_lines == 10  # type: ignore[union-attr]


def test_a_torn_end_that_a_resume_cuts_off(run: Record) -> None:
    run.write("start", 0)
    run.step(1)
    size, tail = run.path.stat().st_size, Tail(run.path)
    with open(run.path, "a") as file:
        file.write('{"schema": 1, "event": "st')
    assert tail.look()
    os.truncate(run.path, size)
    run.attempt = 1
    run.write("resume", 0)
    seen = tail.look()
    assert seen and (seen.attempt, tail.bad, seen.damaged_lines) == (1, 0, None)


def test_a_file_that_shrank_or_is_another_begins_anew(run: Record, tmp_path: Path) -> None:
    for step in range(1, 9):
        run.step(step)
    tail = Tail(run.path)
    assert tail.look()
    first = run.path.read_text().splitlines(keepends=True)[0]
    run.path.write_text(first)
    assert tail.look().step == 1  # type: ignore[union-attr]
    other = Record(tmp_path / "other")
    for step in range(20, 40):
        other.step(step)
    os.replace(other.path, run.path)
    seen = tail.look()
    assert (
        seen
        and seen.step == 39
        and seen.goodput == Timeline(metrics.read_records(run.path)).as_dict()
    )
    run.path.unlink()
    assert tail.look() is None


def test_looks_in_between_change_nothing(run: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of all kinds of records, looked at here and there, in small slices, and once at its end."""
    chance, tail, step = random.Random(3), Tail(run.path), 0
    run.write("start", 0, 3.0, startup_s={"import": 3.0})
    for _ in range(2000):
        event = chance.choices(
            ["step", "skip", "eval", "checkpoint", "rollback", "resume"], [90, 3, 2, 2, 1, 1]
        )[0]
        if event == "step":
            step += 1
            run.step(step, chance.uniform(0.5, 2.0), mem_gib=chance.uniform(5, 6))
        elif event in ("rollback", "resume"):
            step, run.attempt = (
                max(0, step - chance.randrange(20)),
                run.attempt + (event == "resume"),
            )
            run.write(event, step, 9.0, seconds=2.0)
        else:
            run.write(event, step, 1.0, reason="loss", val_loss=2.0, eval_s=0.5, bytes=5)
        if chance.random() < 0.05:
            tail.look()
    once = look(run)
    assert (
        tail.look() == once and once.goodput == Timeline(metrics.read_records(run.path)).as_dict()
    )

    monkeypatch.setattr(module, "SLICE_BYTES", 50_000)
    monkeypatch.setattr(module, "LAST_BYTES", 100_000)
    monkeypatch.setattr(metrics, "CHUNK_BYTES", 10_000)
    slow = Tail(run.path)
    seen = slow.look()
    assert seen and slow.behind and seen.goodput == {}
    near = (
        "step",
        "tokens",
        "step_time",
        "loss",
        "median_loss",
        "step_s",
        "tokens_per_s",
        "started",
        "attempt_started",
        "checkpoint_time",
        "skipped_steps",
        "mem_gib",
    )
    assert [getattr(seen, name) for name in near] == [getattr(once, name) for name in near]
    looks = 1
    while slow.behind:
        slow.look()
        looks += 1
    assert slow.look() == once
    assert looks == pytest.approx((run.path.stat().st_size - 100_000) / 50_000, abs=2)


@pytest.mark.timeout(60)
def test_a_record_of_bytes_that_were_never_written_is_no_progress(tmp_path: Path) -> None:
    with open(tmp_path / "metrics.jsonl", "wb") as file:
        file.truncate(2**40)
    tail = Tail(tmp_path / "metrics.jsonl")
    assert tail.look() is None
    assert tail.look() is None


def test_a_line_of_the_recorder_itself_is_read(tmp_path: Path) -> None:
    from record.recorder import Recorder
    from record.run_paths import RunPaths

    recorder = Recorder(RunPaths(tmp_path), True, 0, 10, 1)
    recorder.event("start", 0, 0, startup_s={})
    recorder.step(1, 64, loss=2.5, step_ms=100.0)
    recorder.step(2, 128, loss=float("nan"), step_ms=50.0)
    recorder.close()
    seen = Tail(RunPaths(tmp_path).metrics).look()
    assert seen and (seen.step, seen.loss, seen.step_s, seen.tokens) == (2, 2.5, 0.05, 128)
    assert json.loads(RunPaths(tmp_path).metrics.read_text().splitlines()[-1])["loss"] is None
