"""train/loop.py: what is due, and in which order it is made durable."""

import dataclasses
import math
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from record import metrics as record_reader
from record.metrics import Recorder
from record.run_paths import RunPaths
from record.status import Status
from settings.config import Config
from train import loop
from train.checkpoint import checkpoint
from train.checkpoint.saver import Saved, Saver, best
from train.data.batch import Batch
from train.distributed.world import World
from train.evaluate.validation import EvaluationFailed
from train.faults.guard import Guard
from train.job import Job, Pace
from train.model.model import build
from train.optim import build_optimizer

ALONE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")


def job(c: Config, folder: Path, **facts: object) -> Job:
    """As much of a job as there is in a save."""
    paths = RunPaths(folder)
    model = build(c, ALONE.device)
    common = {
        "config": c,
        "paths": paths,
        "world": ALONE,
        "model": model,
        "optimizer": build_optimizer(model, c),
        "gaps": (),
        "tokens": 0,
        "data_fingerprint": "",
        "recorder": Recorder(paths, True, 0, 20, 5),
        "status": Status(paths.status, True),
        "save_soon": False,
        "saver": Saver(paths.checkpoints, c, ALONE, 2**20),
        "watch": SimpleNamespace(expect=lambda *_, **__: None, patience_s=0.0),
        "guard": Guard(8),
        "last_stall_s": 0.0,
        "feed": None,
        "starved": False,
        "shares": {},
        "vocabulary": SimpleNamespace(sha256=""),
        "loader": SimpleNamespace(opened=lambda step, gaps: {}),
        "site": None,
        "outer": None,
        "evaluated_at": 0,
        "validated": None,
        "core": None,
        "core_at": 0,
        "shares_said": set(),
    }
    found = SimpleNamespace(**(common | facts))
    found.pace = Pace(c, model, found.watch)
    return cast(Job, found)


def test_an_evaluation_is_due_once_at_its_step_and_not_at_the_last(
    tiny: Config, tmp_path: Path
) -> None:
    c = dataclasses.replace(tiny, eval_every=4, max_steps=12)
    due = [
        (step, at)
        for step in range(13)
        for at in (0, 4, 8)
        if loop.evaluation_due(job(c, tmp_path, step=step, evaluated_at=at))
    ]
    assert due == [(4, 0), (4, 8), (8, 0), (8, 4)]
    assert not loop.evaluation_due(
        job(dataclasses.replace(c, eval_every=0), tmp_path, step=4, evaluated_at=0)
    )
    best = dataclasses.replace(
        c, keep_best=True
    )  # the last checkpoint is compared with the others by the same text
    assert [
        loop.evaluation_due(job(best, tmp_path, step=12, evaluated_at=at)) for at in (8, 12)
    ] == [True, False]


def test_the_record_is_durable_before_a_checkpoint_is(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    order, fsync, write = [], os.fsync, checkpoint.write
    this = job(tiny, tmp_path, step=3, evaluated_at=0)
    this.recorder.event("step", 3, 0)

    def sync(descriptor: int) -> None:
        order.append(
            (
                "record",
                os.fstat(descriptor).st_size == (tmp_path / "metrics.jsonl").stat().st_size > 0,
            )
        )
        monkeypatch.setattr(os, "fsync", fsync)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(
        checkpoint, "write", lambda *args: (order.append(("checkpoint", True)), write(*args))[1]
    )
    loop.save(this, must=True)
    assert order == [("record", True), ("checkpoint", True)]
    assert this.saver.sound == {3} and this.last_stall_s > 0
    assert [r["event"] for r in record_reader.read_records(tmp_path / "metrics.jsonl")] == [
        "step",
        "checkpoint",
    ]


def test_training_goes_on_while_a_checkpoint_is_written_and_what_it_changes_is_not_in_it(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    this, go, write = (
        job(tiny, tmp_path, step=3, evaluated_at=0),
        threading.Event(),
        checkpoint.write,
    )
    monkeypatch.setattr(checkpoint, "write", lambda *args: (go.wait(30), write(*args))[1])
    before = {name: weight.detach().clone() for name, weight in this.model.named_parameters()}
    loop.save(this, must=False)
    assert this.saver.busy and this.saver.poll() is None
    with torch.no_grad():
        for weight in this.model.parameters():
            weight.add_(1.0)
    go.set()
    this.saver.wait()
    ended = this.saver.poll()
    assert ended.problem is None and ended.step == 3 and this.saver.poll() is None
    checkpoint.load_into(ended.folder, this.model, this.optimizer)
    assert all(torch.equal(weight, before[name]) for name, weight in this.model.named_parameters())


@pytest.mark.fault(7, 35)
def test_a_save_that_fails_is_said_tried_once_more_and_ends_the_run_only_if_it_must_be(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise checkpoint.CheckpointError("no room")

    caplog.set_level("INFO")
    monkeypatch.setattr(checkpoint, "write", fail)
    this = job(tiny, tmp_path, step=3, evaluated_at=0)
    for soon in (True, False, False):
        loop.save(this, must=False)
        this.saver.wait()
        loop.note(this, this.saver.poll())
        assert this.save_soon is soon
    assert this.status.facts["phase"] == "training" and this.saver.sound == set()
    none = "checkpoint failed: no room. Training goes on. No checkpoint of this run exists yet; "
    assert none + "saving is tried again now" in caplog.text
    assert none + "3 in a row" in caplog.text
    this.saver.sound = {2}
    loop.note(this, Saved(3, tmp_path, 0, 0.0, "no room"))
    assert "no room. Training goes on, the last good one is untouched; 3 in" in caplog.text
    with pytest.raises(checkpoint.CheckpointError, match="no room"):
        loop.save(this, must=True)
    this.saver.misses = 5
    with pytest.raises(checkpoint.CheckpointError, match="5 checkpoints in a row"):
        loop.save(this, must=False)


class Asked(Exception):
    """What judges a step."""


@pytest.mark.parametrize(("whole", "said"), [(True, "loss"), (False, None)])
def test_a_batch_with_few_samples_is_not_compared_with_others(
    tiny: Config, tmp_path: Path, whole: bool, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def train_step(*_: object, judge: Callable[[float, float], str | None], **__: object) -> None:
        raise Asked(judge(9.0, 1.0), judge(math.nan, 1.0))

    monkeypatch.setattr(loop, "train_step", train_step)
    batch = Batch([], 1, range(1), whole)
    this = job(
        tiny,
        tmp_path,
        step=3,
        loader=SimpleNamespace(batch=lambda step, gaps: batch),
        flops=(1.0, 1.0),
        interrupt=SimpleNamespace(asked=None),
        late=False,
        saved_at=0.0,
    )
    for _ in range(60):
        this.guard.taken(1, 2.0, 1.0)
    with pytest.raises(Asked) as found:
        loop.train(this)
    assert found.value.args == (said, "nonfinite")


@pytest.mark.fault(37)
def test_an_evaluation_that_fails_costs_its_number_and_is_not_tried_again(
    tiny: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise EvaluationFailed("rank 1: no such file")

    caplog.set_level("INFO")
    c = dataclasses.replace(tiny, eval_every=4, max_steps=12)
    this = job(c, tmp_path, step=4, evaluated_at=0, evaluator=fail)
    assert loop.evaluate(this, full=False) == (False, None)
    assert not loop.evaluation_due(this) and this.status.facts["phase"] == "training"
    (entry,) = record_reader.read_records(tmp_path / "metrics.jsonl")
    assert (
        entry["val_loss"] is None
        and entry["error"] == "rank 1: no such file"
        and entry["eval_s"] >= 0
    )
    assert "the evaluation at step 4 failed, and training goes on" in caplog.text


def test_core_is_due_at_its_steps_and_once_at_the_end(tiny: Config, tmp_path: Path) -> None:
    c = dataclasses.replace(tiny, core_every=5, max_steps=12)
    due = [
        (step, at)
        for step in (0, 4, 5, 10, 12)
        for at in (0, 5, 12)
        if loop.core_due(job(c, tmp_path, step=step, core=object(), core_at=at))
    ]
    assert due == [(5, 0), (5, 12), (10, 0), (10, 5), (10, 12), (12, 0), (12, 5)]
    assert not loop.core_due(job(c, tmp_path, step=5))  # nobody asked for it


def test_the_best_checkpoint_outlives_those_that_come_behind_it(
    tiny: Config, tmp_path: Path
) -> None:
    """By the loss of its own step; of equal ones the earlier; and a run that is taken up again still knows it."""
    c, root = dataclasses.replace(tiny, keep_best=True, keep_last=2), RunPaths(tmp_path).checkpoints
    this = job(c, tmp_path, step=0)
    kept = []
    for step, loss in enumerate([5.0, 3.0, None, 3.0, 4.0, 6.0], 1):
        this.step, this.evaluated_at = step, step
        this.validated = None if loss is None else (step, loss)
        loop.save(this, must=True)
        kept.append(checkpoint.committed(root))
    assert kept == [[1], [1, 2], [2, 3], [2, 3, 4], [2, 4, 5], [2, 5, 6]]
    again = job(
        c, tmp_path, step=7, evaluated_at=6, validated=(6, 1.0)
    )  # of another step than this
    assert best(root) == (3.0, 2)
    loop.save(again, must=True)
    assert checkpoint.committed(root) == [2, 6, 7] and best(root) == (3.0, 2)
    job_without = job(dataclasses.replace(c, keep_best=False), tmp_path, step=8)
    loop.save(job_without, must=True)
    assert checkpoint.committed(root) == [7, 8] and best(root) is None


def test_a_checkpoint_that_was_evaluated_since_knows_its_loss(tiny: Config, tmp_path: Path) -> None:
    """One was told to stop before it evaluated, and saved; taken up again it evaluates first."""
    this = job(dataclasses.replace(tiny, keep_best=True), tmp_path, step=4)
    loop.save(this, must=True)
    this.evaluated_at, this.validated = 4, (4, 2.5)
    loop.save(this, must=True)
    assert best(RunPaths(tmp_path).checkpoints) == (2.5, 4)
    assert (
        checkpoint.read_manifest(checkpoint.folder_of(RunPaths(tmp_path).checkpoints, 4))[
            "val_loss"
        ]
        == 2.5
    )


def test_only_an_evaluation_that_beats_all_checkpoints_asks_for_one(
    tiny: Config, tmp_path: Path
) -> None:
    this = job(dataclasses.replace(tiny, keep_best=True), tmp_path, step=2, validated=(2, 3.0))
    assert loop.is_best(this)
    loop.save(this, must=True)
    this.step, asked = 4, []
    for validated in [(3, 1.0), (4, 3.0), (4, float("nan")), (4, 2.0), (4, 2.0), None]:
        this.validated = validated
        asked.append(loop.is_best(this))
    assert asked == [
        False,
        False,
        False,
        True,
        True,
        False,
    ]  # no checkpoint of 2.0 was written: it may have failed
    this.validated = (4, 2.0)
    loop.save(this, must=True)
    this.step = 6
    for loss, better in ((2.0, False), (1.5, True)):
        this.validated = (6, loss)
        assert loop.is_best(this) == better
    checkpoint.set_aside(this.paths.checkpoints, 2, "rolled-back")  # the run went back
    this.validated = (6, 2.5)
    assert loop.is_best(this)
    assert not loop.is_best(job(tiny, tmp_path, step=4, validated=(4, 0.1)))


def test_evaluations_that_take_much_of_the_time_are_said_once(
    tiny: Config, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    this = job(tiny, tmp_path, step=4)
    loop.say_share(this, "EVAL_EVERY", 100, 9.0)  # nothing is known of steps yet
    this.pace.times.extend([0.1] * 5)
    loop.say_share(this, "EVAL_EVERY", 100, 0.2)  # 0.2 of 10.2 s
    assert not caplog.messages
    loop.say_share(this, "EVAL_EVERY", 100, 1.0)
    loop.say_share(this, "EVAL_EVERY", 100, 1.0)
    loop.say_share(this, "CORE_EVERY", 0, 1.0)
    assert caplog.messages == [
        "an evaluation took 1.0 s, which at EVAL_EVERY=100 is 9.1% of the time: EVAL_EVERY=500 "
        "or less to score would make it less than 2%"
    ]
    loop.say_share(this, "CORE_EVERY", 100, 10.0)  # 10 of 4900 * 0.1 + 10 s are 2%
    assert "50.0% of the time: CORE_EVERY=4900 or" in caplog.messages[-1]


def test_what_is_slow_by_nature_does_not_hang(
    tiny: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple] = []
    times: list[float] = []
    monkeypatch.setattr("train.job.set_timeout", lambda seconds, groups: times.append(seconds))
    this = job(
        dataclasses.replace(tiny, start_timeout_s=300, train_timeout_s=120),
        tmp_path,
        step=0,
        evaluated_at=0,
        watch=SimpleNamespace(expect=lambda *args, **_: told.append(args), patience_s=0.0),
    )
    pace = this.pace
    pace.begin(1)
    assert told[-1] == (
        "step 1",
        300,
        "TRAIN_TIMEOUT_S",
    )  # the first may load, compile and wait for others
    for seconds in (1.0, 1.2, 0.9):
        pace.end(seconds)
    pace.begin(1)
    assert told[-1] == ("step 1", 60, "TRAIN_TIMEOUT_S")  # half of what a collective has
    assert times == [120] and this.watch.patience_s == pytest.approx(20 + 3.6)
    for _ in range(9):
        pace.end(50.0)
    pace.begin(1)
    assert told[-1] == ("step 1", 500, "TRAIN_TIMEOUT_S") and times[-1] == 1000
    pace.allow("evaluation", 700, "EVAL_MINUTES")
    assert told[-1] == ("evaluation", 700, "EVAL_MINUTES") and times[-1] == 1400
    pace.restore()
    assert times[-1] == 1000
