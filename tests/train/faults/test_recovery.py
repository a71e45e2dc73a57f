"""train/faults/recovery.py: what a run without a checkpoint is told, and to which one a run goes back."""

import dataclasses
from types import SimpleNamespace
from typing import cast

import pytest

from record.locks import RunFolderError
from record.metrics import Recorder
from record.run_paths import RunPaths
from tests.train.making import ALONE, make_job
from train import loop
from train.checkpoint import find
from train.data.mixture import Gap
from train.faults import recovery
from train.job import Job

KILLED = [("start", 0), ("step", 1), ("step", 2)]
SAVED = [*KILLED, ("checkpoint", 2)]


@pytest.mark.parametrize(
    ("events", "words"),
    [
        ([], ""),
        (KILLED, "has recorded 2 steps and kept no checkpoint: it starts again from step 0"),
        ([*SAVED, ("rollback", 0)], "has recorded 2 steps and kept no checkpoint"),
        (SAVED, "has recorded 2 steps but has no checkpoint. Restore {}, or choose another RUN_N"),
        ([*SAVED, ("resume", 2), ("step", 3)], "has recorded 3 steps but has no checkpoint."),
        ([*SAVED, ("rollback", 2)], "has recorded 2 steps but has no checkpoint."),
    ],
)
def test_a_run_without_a_checkpoint_starts_again_unless_it_has_lost_one(
    tmp_path, events, words, caplog
):
    caplog.set_level("INFO")
    paths = RunPaths(tmp_path / "mine")
    paths.folder.mkdir()
    recorder = Recorder(paths, True, 0, 20, 5)
    for event, step in events:
        recorder.event(event, step, 0)
    recorder.close()
    job = SimpleNamespace(paths=paths, world=ALONE, recorder=Recorder(paths, True, 1, 20, 5))
    refusal = ""
    try:
        recovery.resume(cast(Job, job), {})
    except RunFolderError as error:
        refusal = str(error)
    assert bool(refusal) == ("but" in words)
    assert words.format(paths.checkpoints) in (refusal or caplog.text)
    assert bool(refusal or caplog.text) == bool(words)


def test_a_run_that_goes_back_again_takes_an_earlier_checkpoint_and_saves_its_gap(tiny, tmp_path):
    job = make_job(dataclasses.replace(tiny, max_steps=3, save_every=1), tmp_path)
    assert loop.train(job)
    windows = job.config.batch_windows
    job.step = 5
    recovery.go_back(job)
    assert job.step == 3 and job.requests == {"save"}
    assert job.gaps == (Gap(3, 2 * windows),)
    job.step = 4
    recovery.go_back(job)
    assert job.step == 2 and job.guard.rollbacks == 2
    assert job.gaps == (Gap(2, 4 * windows),)
    assert find.committed(job.paths.checkpoints) == [1, 2]
