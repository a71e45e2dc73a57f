"""train/hooks/changed_data.py: up to which step nothing was read from a file that has changed."""

from types import SimpleNamespace
from typing import Any

import pytest

from train.hooks.changed_data import ChangedData


@pytest.mark.parametrize(
    ("changed_s", "good"),
    [
        (99.0, 4),  # before all that this attempt has read: where it started is all there is
        (105.5, 4),
        (106.5, 6),  # the batch of the checkpoint of step 6 was read at 106
        (108.5, 8),
        (109.5, 9),  # after the last read: nothing is lost
        (None, 9),  # another rank's problem
    ],
)
def test_the_last_good_step_is_that_of_the_newest_checkpoint_read_before_the_change(
    changed_s, good
):
    job: Any = SimpleNamespace(step=4, loader=SimpleNamespace(read_s=0.0))
    hook = ChangedData()
    hook.at_start(job)
    for step in range(5, 10):
        job.step = step
        job.loader.read_s = 100.0 + step
        hook.after_step(job, SimpleNamespace())  # type: ignore[arg-type]
        if step in (6, 8):
            hook.before_save(job, {})
    problem = None if changed_s is None else SimpleNamespace(changed_s=changed_s)
    batch: Any = SimpleNamespace(problem=problem)
    assert hook.find_good_step(job, batch) == good
