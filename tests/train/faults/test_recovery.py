"""train/faults/recovery.py: what a run without a checkpoint is told."""

from types import SimpleNamespace
from typing import cast

import pytest

from record.locks import RunFolderError
from record.recorder import Recorder
from record.run_paths import RunPaths
from tests.train.making import ALONE
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
