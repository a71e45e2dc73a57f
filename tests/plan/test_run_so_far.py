"""plan/run_so_far.py: how far a run has come, from a folder as training leaves it."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from plan.run_so_far import TAIL_BYTES, Begun, begun, last_recorded
from record.locks import hold_run
from record.metrics import SCHEMA, to_json
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config


@pytest.fixture
def c(tmp_path: Path) -> Config:
    """1,000 steps."""
    return dataclasses.replace(
        Config(), runs_dir=str(tmp_path), run_name="run", max_steps=1000
    ).derived()


def folder(c: Config) -> RunPaths:
    return RunPaths.of(c.runs_dir, c.run_name, ROOT)


def record(event: str, step: int, **more: Any) -> str:
    return to_json({"schema": SCHEMA, "event": event, "time": 1.0, "step": step, **more}) + "\n"


def write(c: Config, text: str) -> Path:
    path = folder(c).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def checkpoint(c: Config, name: str, whole: bool = True) -> None:
    path = folder(c).checkpoints / name
    path.mkdir(parents=True)
    if whole:
        (path / "MANIFEST.json").write_text("{}")


def test_a_run_goes_on_from_its_newest_checkpoint_whatever_its_record_has(c: Config) -> None:
    write(c, "".join(record("step", step) for step in range(1, 641)))
    for name in ("step_0000300", "step_0000600"):
        checkpoint(c, name)
    checkpoint(c, "step_0000640.tmp-7")
    checkpoint(c, ".damaged-step_0000620-1")
    checkpoint(c, "step_0000630", whole=False)
    assert begun(c) == Begun(600, 640, running=False)


def test_while_it_is_trained_it_is_where_its_record_is(c: Config) -> None:
    checkpoint(c, "step_0000600")
    write(c, record("start", 0) + record("step", 601) + record("step", 602))
    with hold_run(folder(c)):
        assert begun(c) == Begun(602, 602, running=True)
    assert begun(c) == Begun(600, 602, running=False)


@pytest.mark.parametrize("made", [None, "record"])
def test_without_a_checkpoint_it_begins_anew(c: Config, made: str | None) -> None:
    if made:
        write(c, record("step", 5))
    assert begun(c) is None


def test_a_run_of_more_steps_than_are_asked_for_is_at_its_end(c: Config) -> None:
    checkpoint(c, "step_0001200")
    assert begun(c) == Begun(1000, None, running=False)


@pytest.mark.parametrize(
    ("lines", "step"),
    [
        ([record("step", 7), record("eval", 7, val_loss=3.0), record("checkpoint", 5, bytes=1)], 7),
        ([record("step", 7), record("step", 8)[:-9]], 7),
        ([record("step", 7), record("step", 8)[:-1]], 7),  # by a kill
        ([record("step", 7), record("rollback", 4, **{"from": 7})], 4),
        ([record("step", 7), record("resume", 6)], 6),
        ([record("step", 7), "\0\0\0\n", "[]\n"], 7),
        ([], None),
    ],
)
def test_the_end_of_the_record(c: Config, lines: list[str], step: int | None) -> None:
    assert last_recorded(write(c, "".join(lines))) == step


def test_of_a_long_record_the_end_alone_is_read_and_says_the_same(c: Config) -> None:
    lines = [record("step", step, loss=3.0 + 1 / step) for step in range(1, 3001)]
    path = write(c, "".join(lines))
    assert path.stat().st_size > 2 * TAIL_BYTES
    assert last_recorded(path) == 3000
    path.write_bytes(
        b"\xff" * 2 * TAIL_BYTES + b"\n" + path.read_bytes()[-TAIL_BYTES // 2 :]
    )  # what is before: unread
    assert last_recorded(path) == 3000
