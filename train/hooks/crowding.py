"""Notice on a CPU that other processes use its cores, so that somebody who waits knows why."""

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from train.hooks.hook import Hook
from train.step import StepNumbers

if TYPE_CHECKING:
    from train.job import Job

CHECK_STEPS = 50
ENOUGH = 0.6  # of the cores: a run that has them to itself gets 0.8 and more


class Crowding(Hook):
    """Compares the time on the cores that this process gets with what its threads could use.

    Args:
        threads: of this process; by default as many as torch uses.
        wall, used: clocks of the time that passes and of that on the cores, seconds.
    """

    def __init__(
        self,
        threads: int | None = None,
        wall: Callable[[], float] = time.perf_counter,
        used: Callable[[], float] = time.process_time,
    ):
        self.threads = threads or torch.get_num_threads()
        self.wall = wall
        self.used = used
        self.steps = 0
        self.is_reported = False
        self.begin()

    def begin(self) -> None:
        self.since = (self.wall(), self.used())

    def at_start(self, job: "Job") -> None:
        self.begin()

    def after_step(self, job: "Job", numbers: StepNumbers) -> dict[str, Any]:
        if sentence := self.count_step():
            job.recorder.say(sentence)
        return {}

    def count_step(self) -> str:
        """Return a sentence once, when the last steps got too little of the cores; else nothing."""
        self.steps += 1
        if self.is_reported or self.steps % CHECK_STEPS:
            return ""
        wall, used = self.since
        self.begin()
        share = (self.since[1] - used) / ((self.since[0] - wall) * self.threads)
        if share >= ENOUGH:
            return ""
        self.is_reported = True
        cores = "core" if self.threads == 1 else f"{self.threads} cores"
        return (
            f"This run got {100 * share:.0f}% of its {cores} in the last {CHECK_STEPS} steps: other "
            "processes use them. Training goes on, more slowly."
        )
