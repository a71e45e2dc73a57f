"""analysis/record_blocks.py: a record that is read in blocks gives what its records give one by one."""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from analysis import record_blocks
from analysis.load import Run, load
from analysis.record_blocks import Block, parts_of
from record import goodput
from record.metrics import to_json


def record(event: str, step: int, now: float, attempt: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "event": event,
        "time": 1e9 + now,
        "mono_s": now,
        "host": "here",
        "attempt": attempt,
        "step": step,
        "tokens": 512 * step,
        **more,
    }


def life(seed: int) -> list[dict[str, Any]]:
    """A run of some hundred steps: evaluations, saves, skips, rollbacks, restarts, silence, claims beyond the time."""
    r, records, now, step, attempt = random.Random(seed), [], 5.0, 0, 0
    records.append(record("start", 0, now, startup_s={"import": 3.0}))
    while len(records) < 900:
        step += 1
        took = r.uniform(0.05, 0.15)
        now += (
            took + r.choice([0.0, 0.01, 0.02]) - r.choice([0.0] * 30 + [0.01])
        )  # sometimes less than it says
        more = {
            "loss": r.choice([r.gauss(3, 1)] * 20 + [None]),
            "lr": 1e-3,
            "step_ms": r.choice([1000 * took] * 40 + [None]),
            "grad_norm": r.random(),
            "mfu": None,
            "data_wait_s": r.choice([0.0, 0.03, 0.2]),
            "tokens_per_s": 5e3,
        }
        if r.random() < 0.02:
            more["checkpoint_stall_s"] = 0.005
        if r.random() < 0.05:
            more |= {"straggler": {"rank": 3, "host": "b", "times": 2.0}, "own": step}
        records.append(record("step", step, now, attempt, **more))
        chance = r.random()
        if chance < 0.004:
            now += 1.0
            records.append(record("eval", step, now, attempt, val_loss=3.0, eval_s=0.9))
        elif chance < 0.006:
            step = max(0, step - r.randrange(60))
            records.append(record("rollback", step, now, attempt, seconds=0.1))
        elif chance < 0.009:
            step, attempt, now = max(0, step - r.randrange(60)), attempt + 1, now + 9.0
            records.append(record("resume", step, now, attempt, startup_s={"import": 2.0}))
    return records


def write(folder: Path, records: list[dict[str, Any]]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "metrics.jsonl").write_text("".join(to_json(each) + "\n" for each in records))
    return folder


def both(folder: Path, monkeypatch: pytest.MonkeyPatch, fewest: int) -> tuple[Run, Run]:
    """Read with blocks of so many steps and more, and without any."""
    monkeypatch.setattr(record_blocks, "FEWEST", fewest)
    fast = load(folder)
    monkeypatch.setattr(record_blocks, "FEWEST", 10**9)
    return fast, load(folder)


@pytest.mark.parametrize("seed", range(6))
def test_blocks_give_what_records_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(record_blocks, "READ_BYTES", 40_000)  # blocks end anywhere
    folder = write(tmp_path / "run", life(seed))
    monkeypatch.setattr(record_blocks, "FEWEST", 8)
    assert sum(isinstance(part, Block) for part in parts_of(folder / "metrics.jsonl")) > 3
    fast, slow = both(folder, monkeypatch, 8)
    assert fast.columns.keys() == slow.columns.keys() and "own" in fast.columns
    for key, column in slow.columns.items():
        assert np.array_equal(fast.columns[key], column, equal_nan=True), key
    assert (fast.events, fast.evals, fast.lost_steps) == (slow.events, slow.evals, slow.lost_steps)
    assert fast.goodput and slow.goodput and fast.goodput.attempts == slow.goodput.attempts
    assert fast.goodput.lost_steps == slow.goodput.lost_steps
    assert fast.goodput.seconds == pytest.approx(slow.goodput.seconds, abs=1e-6)


def test_most_of_a_calm_run_is_booked_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken = []
    entered = goodput.Timeline.add
    monkeypatch.setattr(
        goodput.Timeline, "add", lambda books, each: (taken.append(each), entered(books, each))
    )
    records = [
        record("start", 0, 1.0),
        *(
            record("step", n, 1.0 + n, loss=2.5, step_ms=900.0, data_wait_s=0.25)
            for n in range(1, 1001)
        ),
    ]
    run = load(write(tmp_path / "run", records))
    assert len(taken) == 1 and run.columns["loss"].tolist() == [2.5] * 1000
    assert (
        run.goodput
        and run.goodput.seconds["training"] == pytest.approx(650)
        and run.lost_steps == 0
    )
    assert run.goodput.seconds["data_wait"] == pytest.approx(250) and run.goodput.seconds[
        "other"
    ] == pytest.approx(100)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"schema": 1, "event": "step", "time": 5', "line 302 is damaged: it is not JSON"),
        (
            '{"schema": 9, "event": "step", "time": 5.0, "step": 301, "attempt": 0}',
            "line 302 has schema 9",
        ),
        ('{"schema": 1, "event": "step", "time": 5.0, "attempt": 0}', "without a valid 'step'"),
    ],
)
def test_what_is_no_record_is_said_with_its_line(tmp_path: Path, line: str, said: str) -> None:
    folder = write(
        tmp_path / "run",
        [record("start", 0, 1.0), *(record("step", n, 1.0 + n) for n in range(1, 301))],
    )
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(line + "\n" + to_json(record("step", 302, 400.0)) + "\n")
    with pytest.raises(Exception, match=said):
        load(folder)


def test_a_last_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "run",
        [record("start", 0, 1.0), *(record("step", n, 1.0 + n) for n in range(1, 301))],
    )
    with open(folder / "metrics.jsonl", "a") as file:
        file.write(json.dumps(record("step", 301, 302.0))[:-1])
    assert load(folder).columns["step"][-1] == 300
