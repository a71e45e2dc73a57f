"""train/faults/recovery.py: what a run without a checkpoint is told."""

from types import SimpleNamespace
from typing import cast

import pytest

from record.locks import RunFolderError
from record.metrics import Recorder
from record.run_paths import RunPaths
from tests.train.making import ALONE
from train.faults import recovery
from train.job import Job

KILLED = [("start", 0), ("step", 1), ("step", 2)]
SAVED = [*KILLED, ("checkpoint", 2)]


def resume(folder, events):
    """Take up a run with this record and no checkpoint."""
    paths = RunPaths(folder / "mine")
    paths.folder.mkdir()
    recorder = Recorder(paths, True, 0, 20, 5)
    for event, step in events:
        recorder.event(event, step, 0)
    recorder.close()
    job = SimpleNamespace(paths=paths, world=ALONE, recorder=Recorder(paths, True, 1, 20, 5))
    recovery.resume(cast(Job, job), {})


@pytest.mark.parametrize(
    "events", [SAVED, [*SAVED, ("resume", 2), ("step", 3)], [*SAVED, ("rollback", 2)]]
)
def test_a_run_that_has_lost_its_checkpoints_is_refused(tmp_path, events):
    steps = max(step for _, step in events)
    with pytest.raises(RunFolderError) as refused:
        resume(tmp_path, events)
    assert str(refused.value) == (
        f"Run mine has recorded {steps} steps but has no checkpoint. "
        f"Restore {tmp_path / 'mine' / 'checkpoints'}, or choose another RUN_NAME."
    )


@pytest.mark.parametrize(
    ("events", "says"), [([], False), (KILLED, True), ([*SAVED, ("rollback", 0)], True)]
)
def test_a_run_that_has_kept_no_checkpoint_starts_again_and_says_so(tmp_path, events, says, caplog):
    caplog.set_level("INFO")
    resume(tmp_path, events)
    line = "run mine has recorded 2 steps and kept no checkpoint: it starts again from step 0"
    assert (line in caplog.text) == says
