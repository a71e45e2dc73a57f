"""W&B, TensorBoard and trackio: processes that follow the record of a run (record/trackers/)."""

from typing import TYPE_CHECKING

from hardware.nvml import visible_indices
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
        if not job.world.is_first:
            return
        gpus = visible_indices(job.config.nproc) if job.world.device.type == "cuda" else []
        self.processes = start_trackers(job.config, job.paths, job.recorder.say, gpus)

    def close(self, job: "Job", code: int, is_hurried: bool) -> None:
        close_trackers(self.processes, STOPPED_S if is_hurried else DONE_S)
