"""The processes of all trackers, whose files are read back with the real packages; and RowSelector."""

import dataclasses
import importlib.util
import json
import math
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from record.trackers.follow import Row, RowSelector
from settings.config import Config
from tests.running import environment, losses, train, wait_until
from tests.trackers import python_with_trackers, read_values, start

TRACKERS = ("wandb", "tensorboard", "trackio")


@pytest.fixture(scope="module")
def python() -> str:
    return python_with_trackers()


def make_record(event: str, step: int, **values: Any) -> dict[str, Any]:
    return {"schema": 1, "event": event, "time": 100.5 + step, "step": step, **values}


def make_steps(first: int, last: int) -> list[dict[str, Any]]:
    return [
        make_record("step", step, loss=step / 64, lr=0.25, mfu=None)
        for step in range(first, last + 1)
    ]


def to_lines(records: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


def expect(steps: list[int], evaluations: dict[int, dict[str, float]]) -> list[Any]:
    """Return what a tracker must have; step / 64 is exact in float32 too."""
    values = []
    for step in steps:
        perplexity = pytest.approx(math.exp(step / 64), rel=1e-6)
        row = {"train/loss": step / 64, "train/lr": 0.25, "train/perplexity": perplexity}
        values += [(step, name, value, 100.5 + step) for name, value in row.items()]
    for step, row in evaluations.items():
        values += [(step, name, value, 100.5 + step) for name, value in row.items()]
    return sorted(values, key=lambda value: value[:2])


# ---- The processes


@pytest.mark.parametrize("name", TRACKERS)
def test_a_tracker_that_is_killed_and_resumed_has_each_row_once(
    tmp_path: Path, python: str, name: str
) -> None:
    run = tmp_path / "run"
    record = run / "metrics.jsonl"
    run.mkdir()
    validation = make_record("eval", 12, val_loss=0.5, val_bpb=None, val_loss_by_source={"a": 1.5})
    damage = '{"schema": 1}\nno JSON\n{"schema": 2, "event": "step"}\n'
    first = [make_record("start", 0), *make_steps(1, 12), validation]
    record.write_text(to_lines(first) + damage + '{"schema": 1, "event": "st')
    shown = expect([1, 5, 10], {12: {"val/loss": 0.5, "val/loss/a": 1.5}})
    process = start(python, name, run)
    wait_until(lambda: read_values(python, name, run) == shown, 60)
    process.kill()
    process.communicate()

    if name == "tensorboard":  # as a power failure leaves it
        (events,) = (run / name).iterdir()
        events.write_bytes(events.read_bytes() + b"\x18\x00\x00")
    core = make_record("eval", 12, core=0.25, core_centred={"b": 0.75})
    record.write_text(
        to_lines([*first, make_record("resume", 8), *make_steps(9, 12), validation, core])
    )
    shown = expect(
        [1, 5, 10], {12: {"val/loss": 0.5, "val/loss/a": 1.5, "core/core": 0.25, "core/b": 0.75}}
    )
    process = start(python, name, run)
    wait_until(lambda: read_values(python, name, run) == shown, 60)

    record.unlink()  # the trainer begins it anew
    end = [make_record("eval", 40, val_loss=0.25, full=True), make_record("end", 40, reason="done")]
    record.write_text(to_lines([*make_steps(13, 40), *end]))
    process.communicate(timeout=120)
    assert process.returncode == 0
    more = expect([15, 20, 25, 30, 35, 40], {40: {"val/loss": 0.25}})
    assert read_values(python, name, run) == shown + more


@pytest.mark.parametrize("name", ["tensorboard", "trackio"])
def test_a_full_disk_delays_rows_and_tears_none(tmp_path: Path, python: str, name: str) -> None:
    run = tmp_path / "run"
    run.mkdir()
    record = run / "metrics.jsonl"
    record.write_text(to_lines(make_steps(1, 20)))

    process = start(python, name, run, limit=300)
    assert process.stdout
    while "cannot be written" not in process.stdout.readline():
        assert process.poll() is None
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (10**7, resource.RLIM_INFINITY))
    with open(record, "a") as file:
        file.write(to_lines(make_steps(21, 40)))
    process.communicate(timeout=120)
    assert process.returncode == 0
    assert read_values(python, name, run) == expect(list(range(5, 41, 5)), {})


def test_a_run_has_the_same_losses_with_trackers_and_they_have_them(
    tmp_path: Path, data: dict[str, str], python: str
) -> None:
    (tmp_path / "without").mkdir()
    train(environment(tmp_path / "without", data))
    env = environment(tmp_path, data, TRACKERS="tensorboard,trackio")
    out = train(env, command=[python, "-m", "train.main"])
    run = tmp_path / "run"
    assert "TensorBoard: in " in out and "trackio: in " in out
    assert losses(run) == losses(tmp_path / "without" / "run")
    expected = [(step, pytest.approx(losses(run)[step][0])) for step in (1, *range(5, 41, 5))]
    for name in ("tensorboard", "trackio"):
        values = read_values(python, name, run)
        shown = [(step, value) for step, key, value, _ in values if key == "train/loss"]
        assert shown == expected


@pytest.mark.fault(21)
@pytest.mark.parametrize("module", ["train.main", "doctor.before_run", "record.trackers.mirror"])
def test_nothing_begins_with_a_tracker_that_cannot_work(
    tmp_path: Path, data: dict[str, str], module: str
) -> None:
    env = environment(tmp_path, data, TRACKERS="trackio", WANDB_MODE="online", HOME=tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", module], env=env, check=False, text=True, capture_output=True
    )
    out = done.stdout + done.stderr
    assert done.returncode == 64 and not (tmp_path / "run").exists()
    assert "WANDB_MODE=online: there is no key" in out
    if importlib.util.find_spec("trackio") is None:
        assert "TRACKERS=trackio: the package trackio is not installed" in out
        assert "pip install --no-deps -r requirements/trackers.txt" in out


# ---- Which rows


def select(records: list[dict[str, Any]], last_sent: int = -1, **settings: Any) -> list[Row]:
    c = dataclasses.replace(Config(), **{"log_every": 5, "max_steps": 22} | settings)
    selector = RowSelector(c, last_sent)
    rows = [row for record in records for row in selector.select([record])]
    positions = [row.position for row in rows]
    assert positions == sorted(set(positions))
    return rows


def test_rows_are_every_nth_step_the_first_and_last_of_an_attempt_and_all_evaluations() -> None:
    rows = select(
        [
            make_record("start", 0),
            make_record("eval", 0, val_loss=9.0),
            *make_steps(1, 12),
            make_record("eval", 12, val_loss=2.0, val_bpb=1.0),
            make_record("skip", 13, loss=7.0),
            *make_steps(13, 22),
            make_record("eval", 22, val_loss=1.5, val_bpb=None, val_ppl=4.5),
            make_record("eval", 22, val_loss=1.25, full=True),
            make_record("eval", 22, core=None, core_partial=0.5, core_centred={"a": 1.0}),
            make_record("end", 22, reason="done"),
        ]
    )
    assert [(row.step, len(row.values)) for row in rows if "train/loss" in row.values] == [
        (step, 3) for step in (1, 5, 10, 15, 20, 22)
    ]
    assert [(row.step, row.time, row.values) for row in rows if "train/loss" not in row.values] == [
        (0, 100.5, {"val/loss": 9.0}),
        (12, 112.5, {"val/loss": 2.0, "val/bpb": 1.0}),
        (22, 122.5, {"val/loss": 1.5, "val/perplexity": 4.5}),
        (22, 122.5, {"val/loss": 1.25}),
        (22, 122.5, {"core/partial": 0.5, "core/a": 1.0}),
    ]
    assert [row.step for row in select([make_record("resume", 7), *make_steps(8, 11)])] == [8, 10]


def test_what_is_not_known_or_no_number_is_left_out() -> None:
    records = [
        make_record("step", 5, loss=1e4),  # exp() has no such number
        make_record("step", 10, loss=None, lr="x", grad_norm=2),
        make_record("eval", 10, val_loss=None, error="HTTP 403"),
        make_record("eval", 15, val_loss_by_source={"a": None, "b": 2.0}),
    ]
    assert [(row.step, row.values) for row in select(records)] == [
        (5, {"train/loss": 1e4}),
        (10, {"train/grad_norm": 2}),
        (15, {"val/loss/b": 2.0}),
    ]


@pytest.mark.parametrize("killed", range(1, 22))
@pytest.mark.parametrize("back_to", [0, 4, 10])
def test_each_row_is_sent_once_whenever_the_trainer_was_killed(killed: int, back_to: int) -> None:
    def attempt(first: int, last: int) -> list[dict[str, Any]]:
        records = []
        for record in make_steps(first, last):
            records.append(record)
            if record["step"] in (10, 20, 22):
                records.append(make_record("eval", record["step"], val_loss=0.5))
        return records

    back_to = min(back_to, killed)
    whole = select([make_record("start", 0), *attempt(1, 22)])
    before = [make_record("start", 0), *attempt(1, killed)]
    if killed in (10, 20):
        before.pop()  # in the evaluation
    again = [make_record("resume", back_to), *attempt(back_to + 1, 22)]
    if killed == back_to == 10:
        again.insert(1, make_record("eval", 10, val_loss=0.5))  # a resumed run makes up for it
    sent = select(before)
    sent += select([*before, *again], last_sent=sent[-1].position)
    # Besides, the first step of the second attempt.
    assert [row for row in sent if row in whole or row.step != back_to + 1] == whole
