"""W&B, TensorBoard and trackio: processes that follow the record of a run (record/trackers/)."""

from typing import TYPE_CHECKING

from record.trackers.processes import (
    DONE_S,
    STOPPED_S,
    TrackerProcess,
    close_trackers,
    start_trackers,
)
from train.hooks.hook import Hook

if TYPE_CHECKING:
    from train.job import Job


class Trackers(Hook):
    """Runs them beside training, from the first rank."""

    def __init__(self) -> None:
        self.processes: list[TrackerProcess] = []

    def at_start(self, job: "Job") -> None:
        if job.world.is_first:
            self.processes = start_trackers(job.config, job.paths, job.recorder.say)

    def close(self, job: "Job", code: int, is_hurried: bool) -> None:
        close_trackers(self.processes, STOPPED_S if is_hurried else DONE_S)
