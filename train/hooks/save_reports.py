"""SAVE_MINUTES, and a report of each checkpoint once it is written, which happens while training goes on."""

import time
from typing import TYPE_CHECKING, Any

from train.hooks.hook import SAVE, Hook, Requests
from train.step import StepNumbers
from train.when_to_save import report

if TYPE_CHECKING:
    from train.job import Job


class SaveReports(Hook):
    """Reports each save once it has ended."""

    def __init__(self) -> None:
        self.is_warm = False

    def before_step(self, job: "Job") -> Requests | None:
        report(job, job.saver.poll())
        age_s = time.perf_counter() - job.saver.began
        if job.world.is_first and age_s > 60 * job.config.save_minutes:
            return SAVE
        return None

    def after_step(self, job: "Job", numbers: StepNumbers) -> dict[str, Any]:
        if not self.is_warm and job.config.save_every != 0:
            job.saver.warm_up(job.model, job.optimizer)
        self.is_warm = True
        stall_s = job.saver.stall_s
        job.saver.stall_s = 0.0
        return {"checkpoint_stall_s": stall_s} if stall_s else {}
