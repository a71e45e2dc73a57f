"""train/loop.py: what is due, and in which order it is made durable."""

import dataclasses
import os
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
import torch

from train import checkpoint, loop
from train.config import Config
from train.distributed import World
from train.loop import Job
from train.metrics import Recorder
from train.runs import RunPaths
from train.status import Status

ALONE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")


def job(c: Config, folder: Path, **facts: object) -> Job:
    """As much of a job as there is in a save."""
    paths = RunPaths(folder)
    common = {"config": c, "paths": paths, "world": ALONE, "model": None, "optimizer": None, "gaps": (), "sound": set(),
              "tokens": 0, "data_fingerprint": "", "recorder": Recorder(paths, True, 0, 20, 5),
              "status": Status(paths.status, True)}
    return cast(Job, SimpleNamespace(**(common | facts)))


def test_an_evaluation_is_due_once_at_its_step_and_not_at_the_last(tiny: Config, tmp_path: Path) -> None:
    c = dataclasses.replace(tiny, eval_every=4, max_steps=12)
    due = [(step, at) for step in range(13) for at in (0, 4, 8)
           if loop.evaluation_due(job(c, tmp_path, step=step, evaluated_at=at))]
    assert due == [(4, 0), (4, 8), (8, 0), (8, 4)]
    assert not loop.evaluation_due(job(dataclasses.replace(c, eval_every=0), tmp_path, step=4, evaluated_at=0))


def test_the_record_is_durable_before_a_checkpoint_is(tiny: Config, tmp_path: Path,
                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    order, fsync = [], os.fsync
    this = job(tiny, tmp_path, step=3, evaluated_at=0)
    this.recorder.event("step", 3, 0)

    def sync(descriptor: int) -> None:
        order.append(("record", os.fstat(descriptor).st_size == (tmp_path / "metrics.jsonl").stat().st_size > 0))
        fsync(descriptor)

    def save(*_: object) -> tuple[Path, int, float]:
        order.append(("checkpoint", True))
        return tmp_path / "step_0000003", 1, 0.1

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(checkpoint, "save", save)
    loop.save(this, must=False)
    assert order == [("record", True), ("checkpoint", True)]
    assert this.sound == {3}


def test_a_save_that_fails_is_no_longer_what_the_run_does(tiny: Config, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    def save(*_: object) -> None:
        raise checkpoint.CheckpointError("no room")

    monkeypatch.setattr(checkpoint, "save", save)
    this = job(tiny, tmp_path, step=3, evaluated_at=0)
    assert "checkpoint_stall_s" in loop.save(this, must=False)
    assert this.status.facts["phase"] == "training" and this.sound == set()
    with pytest.raises(checkpoint.CheckpointError):
        loop.save(this, must=True)
