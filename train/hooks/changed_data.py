"""Ends the run where a process finds data that it must not train on, and loses nothing that was good.

    a shard was overwritten, cut short or deleted -> the process's loss is NaN -> all refuse the step
    -> the run is saved as it was before that step -> DataError on all ranks: exit code 78

A network disk may show a change late. Then the run goes back: checkpoints whose last step was read
after the file had changed are set aside, and the run is not saved.
"""

from typing import TYPE_CHECKING, Any

from torch import Tensor

from train.checkpoint import find
from train.data.batch import Batch
from train.data.manifest import DataError
from train.distributed.world import from_all, from_first
from train.hooks.hook import Hook
from train.when_to_save import save

if TYPE_CHECKING:
    from train.job import Job
    from train.step import StepNumbers


class ChangedData(Hook):
    """Knows which states of the run are from before a change.

    Attributes:
        read_s: step that was saved -> Unix time at which its batch had been read.
        last_s: that time of the last step.
    """

    def __init__(self) -> None:
        self.read_s: dict[int, float] = {}
        self.last_s = 0.0

    def at_start(self, job: "Job") -> None:
        self.read_s = {job.step: 0.0}

    def after_step(self, job: "Job", numbers: "StepNumbers") -> dict[str, Any]:
        self.last_s = job.loader.read_s
        return {}

    def before_save(self, job: "Job", manifest: dict[str, Any]) -> dict[str, Tensor] | None:
        self.read_s[job.step] = self.last_s
        return None

    def after_refusal(self, job: "Job", batch: Batch) -> None:
        problems = [problem for problem in from_all(batch.problem) if problem]
        if not problems:
            return
        good = min(from_all(self.find_good_step(job, batch)))
        job.saver.wait()
        if good < job.step:
            find.set_aside_later(job.paths.checkpoints, job.world, good, "changed-data")
        elif good not in from_first(find.committed(job.paths.checkpoints)):
            save(job, wait=True)
        saved = from_first(find.committed(job.paths.checkpoints))
        back = f"from step {saved[-1]}" if saved else "from the start"
        raise DataError(f"{problems[0]}. Then the same command continues {back}")

    def find_good_step(self, job: "Job", batch: Batch) -> int:
        """Return the last step up to which nothing was read from what has changed on this rank."""
        if batch.problem is None or self.last_s < batch.problem.changed_s:
            return job.step
        steps = [step for step, at_s in self.read_s.items() if at_s < batch.problem.changed_s]
        return min(job.step, max(steps))
