"""train/loop.py and train/when_to_save.py: what happens after a step, and what reaches the disk first."""

import dataclasses
import math
import os
import threading
import time

import pytest
import torch

from record import status
from record.metrics import read_records
from settings import ROOT
from tests.train.making import Samples, make_job
from train import loop, when_to_save
from train.checkpoint import checkpoint, find
from train.checkpoint.manifest import CheckpointError, load_manifest
from train.checkpoint.saver import Saved
from train.data.manifest import DataError
from train.hooks.hook import SAVE, STOP, Hook
from train.hooks.save_reports import SaveReports
from train.schedule import lr_at


@pytest.fixture
def make(tiny, tmp_path):
    """A job of 6 steps that saves every 2, unless `changes` say otherwise."""
    base = {"max_steps": 6, "save_every": 2, "keep_last": 9, "warmup_tokens": 0}

    def make(*hooks, step=0, loader=None, **changes):
        config = dataclasses.replace(tiny, **base | changes)
        return make_job(config, tmp_path, *hooks, step=step, loader=loader or Samples(config))

    return make


def events(job, name=None):
    """The names of all records, or the records of this name."""
    records = list(read_records(job.paths.metrics))
    if name is None:
        return [record["event"] for record in records]
    return [record for record in records if record["event"] == name]


def saved(job):
    return find.committed(job.paths.checkpoints)


class Calls(Hook):
    """Notes what the loop calls, and where the run stands then."""

    def __init__(self, stop_at=()):
        self.calls = []
        self.stop_at = stop_at

    def note(self, job, name):
        self.calls.append((name, job.step))
        return STOP if (name, job.step) == self.stop_at else None

    def at_start(self, job):
        return self.note(job, "at_start")

    def before_step(self, job):
        job.waited_s += 100.0
        return self.note(job, "before_step")

    def after_step(self, job, numbers):
        self.note(job, "after_step")
        return {"waits": 1}

    def between_steps(self, job, requests):
        stop = self.note(job, "between_steps")
        return SAVE if job.step == 3 and not stop else stop

    def before_save(self, job, manifest):
        self.note(job, "before_save")
        manifest["mine"] = job.step

    def at_end(self, job):
        return self.note(job, "at_end")


def test_hooks_are_called_around_each_step(make):
    job = make(Calls(), max_steps=5)
    assert loop.train(job) and job.step == 5
    expected = [("at_start", 0)]
    for step in range(1, 6):
        expected += [("before_step", step - 1), ("after_step", step), ("between_steps", step)]
        if step in (2, 3, 4, 5):  # SAVE_EVERY, the hook's wish, the end
            expected.append(("before_save", step))
    assert job.hooks[0].calls == [*expected, ("at_end", 5)]
    assert saved(job) == [2, 3, 4, 5]
    manifest = load_manifest(find.folder_of(job.paths.checkpoints, 3))
    assert manifest["mine"] == manifest["data"]["step"] == 3
    first, *others = events(job, "step")
    rates = [record["lr"] for record in (first, *others)]
    assert rates == [lr_at(step, job.config) for step in range(1, 6)]
    # What before_step waited counts as the step's time, and as waiting for data.
    assert first["waits"] == 1 and 100 < first["data_wait_s"] < 101 < 100_101
    assert 100_000 < first["step_ms"] < 200_000
    assert job.status.facts["phase"] == "training" and job.interrupt.training


@pytest.mark.parametrize(
    ("where", "step"), [("at_start", 0), ("before_step", 1), ("between_steps", 3), ("at_end", 6)]
)
def test_a_hook_stops_the_run_after_a_step_which_is_saved(make, where, step):
    job = make(Calls((where, step)))
    assert not loop.train(job)
    assert job.step == step and saved(job)[-1:] == ([step] if step else [])
    assert events(job)[-1] == "signal"


def test_a_signal_stops_the_run_after_the_step_that_is_being_made(make):
    class Signal(Hook):
        def before_step(self, job):
            job.interrupt.asked = "SIGTERM" if job.step == 2 else None

    job = make(Signal())
    assert not loop.train(job)
    assert job.step == 3 and saved(job) == [2, 3]
    (signal,) = events(job, "signal")
    assert signal["name"] == "SIGTERM"


@pytest.mark.parametrize(("is_whole", "reason"), [(True, "loss"), (False, None)])
def test_a_batch_with_few_samples_is_not_compared_with_others(make, is_whole, reason, monkeypatch):
    class Asked(Exception):
        """Carries what was judged."""

    def train_step(*_, check_step, **__):
        raise Asked(check_step(9.0, 1.0), check_step(math.nan, 1.0))

    class Few(Samples):
        def batch(self, step, gaps):
            return dataclasses.replace(super().batch(step, gaps), whole=is_whole)

    monkeypatch.setattr(loop, "train_step", train_step)
    job = make(loader=Few(make().config))
    for _ in range(60):
        job.guard.applied(1, 2.0, 1.0)
    with pytest.raises(Asked) as asked:
        loop.train(job)
    assert asked.value.args == (reason, "nonfinite")


def test_the_status_is_not_written_at_every_step_nor_a_checkpoint_without_save_every(
    make, monkeypatch
):
    job = make(save_every=0)
    writes = []
    monkeypatch.setattr(status, "BEAT_S", 3600)
    monkeypatch.setattr(status, "write_whole", lambda *_, **__: writes.append(job.step))
    job.status.last_beat = time.monotonic()
    loop.train(job)
    assert writes == [0, 1]  # "first step", "training"
    when_to_save.save(make(step=0), wait=True)
    assert not job.paths.checkpoints.exists()


def test_lite_checkpoints_save_all_at_each_keep_every(make):
    job = make(checkpoint_mode="lite", save_every=4, keep_every=6, max_steps=13)
    due = []
    for job.step in range(1, 14):
        if when_to_save.is_save_due(job, set()):
            due.append(job.step)
    assert due == [4, 6, 8, 12]
    job.step = 5
    wishes = {"save"}, {"save", "stop"}
    assert [when_to_save.is_save_due(job, wish) for wish in wishes] == [True, False]


def test_the_hook_that_contributing_shows_ends_a_run(make):
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("## How to write a hook")[2]
    names: dict = {}
    exec(section.partition("```python\n")[2].partition("```")[0], names)
    job = make(names["LossGoal"](goal=99.0))
    assert not loop.train(job) and saved(job) == [1]
    assert events(job, "step")[0]["loss_goal"] == 99.0
    job = make(names["LossGoal"](goal=0.0))
    assert loop.train(job) and job.step == 6


def test_a_shard_that_changed_on_another_rank_ends_the_attempt_with_its_host(make, monkeypatch):
    job = make(step=3)
    job.world = dataclasses.replace(job.world, hosts=("here", "there"))
    monkeypatch.setattr(loop, "all_gather_object", lambda own: [own, "web: has changed"])
    with pytest.raises(DataError, match="there, rank 1: web: has changed"):
        loop.refuse_bad_data(job, job.loader.batch(3, ()))
    assert saved(job) == [3]


# ---- A save


def test_the_record_is_durable_before_a_checkpoint_is(make, monkeypatch):
    order, fsync, write = [], os.fsync, checkpoint.write
    job = make(step=3)
    job.recorder.event("step", 3, 0)

    def sync(descriptor):
        size = os.fstat(descriptor).st_size
        order.append(("record", size == job.paths.metrics.stat().st_size > 0))
        monkeypatch.setattr(os, "fsync", fsync)
        fsync(descriptor)

    def written(*args):
        order.append(("checkpoint", True))
        return write(*args)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(checkpoint, "write", written)
    when_to_save.save(job, wait=True)
    assert order == [("record", True), ("checkpoint", True)]
    assert job.saver.verified == {3} and job.saver.stall_s > 0
    assert events(job) == ["step", "checkpoint"]


def test_training_goes_on_while_a_checkpoint_is_written(make, monkeypatch):
    """And what it changes meanwhile is not in it."""
    go, write = threading.Event(), checkpoint.write
    monkeypatch.setattr(checkpoint, "write", lambda *args: (go.wait(30), write(*args))[1])
    job = make(step=3)
    before = {name: weight.detach().clone() for name, weight in job.model.named_parameters()}
    when_to_save.save(job)
    assert job.saver.busy and job.saver.poll() is None
    with torch.no_grad():
        for weight in job.model.parameters():
            weight.add_(1.0)
    go.set()
    job.saver.wait()
    ended = job.saver.poll()
    assert ended.problem is None and ended.step == 3 and job.saver.poll() is None
    checkpoint.load_into(find.folder_of(job.paths.checkpoints, 3), job.model)
    assert all(torch.equal(weight, before[name]) for name, weight in job.model.named_parameters())


@pytest.mark.fault(7, 35)
def test_a_save_that_fails_is_said_and_tried_once_more(make, monkeypatch, caplog):
    """It ends the run only where nothing could be saved later."""

    def fail(*_):
        raise CheckpointError("no room")

    caplog.set_level("INFO")
    monkeypatch.setattr(checkpoint, "write", fail)
    job, reports = make(step=3), SaveReports()
    for is_tried_again in (True, False, False):
        when_to_save.save(job)
        job.saver.wait()
        assert not reports.before_step(job)
        assert ("save" in job.requests) is is_tried_again
    assert job.saver.verified == set()
    none = "checkpoint failed: no room. Training continues. No checkpoint of this run exists yet; "
    assert none + "saving is tried again now" in caplog.text
    assert none + "3 in a row" in caplog.text
    job.saver.verified = {2}
    when_to_save.report(job, Saved(3, 0, 0.0, "no room"))
    assert "no room. Training continues, the last good one is untouched; 3 in" in caplog.text
    caplog.clear()
    stopped = "no room. Training stopped at step 3, and the steps after 2 are lost. Fix that. Run"
    with pytest.raises(CheckpointError, match=stopped):
        when_to_save.save(job, wait=True)
    assert "Training continues" not in caplog.text
    job.saver.failures = 5
    with pytest.raises(CheckpointError, match="5 checkpoints in a row"):
        when_to_save.save(job)


@pytest.mark.parametrize(("age_s", "rank", "asked"), [(0, 0, None), (121, 0, SAVE), (121, 1, None)])
def test_save_minutes_ask_for_a_checkpoint_by_the_first_rank(make, age_s, rank, asked):
    job = make(step=1, save_minutes=2)
    job.saver.began -= age_s
    job.world = dataclasses.replace(job.world, rank=rank)
    assert SaveReports().before_step(job) == asked


def test_the_wait_for_a_save_is_recorded_once(make):
    job, reports = make(step=1), SaveReports()
    job.saver.stall_s = 0.25
    assert reports.after_step(job, None) == {"checkpoint_stall_s": 0.25}
    assert reports.after_step(job, None) == {}
    job.saver.wait()
