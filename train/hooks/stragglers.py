"""Names a process that is slower than the others, which all wait for it.

Each says at every step how long it worked before it first had to wait (step.HostClock). Loads no torch: the monitor has
its limits from here.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from train.hooks.hook import Hook

if TYPE_CHECKING:
    from train.job import Job
    from train.step import StepNumbers

STEPS = 20  # a rank's time is its median over so many steps
TIMES = 1.5  # slow is who takes so many times the median of the others,
LEAST_S = 0.02  # and so many seconds longer
AGAIN = 200  # steps until the same rank is named again


class Stragglers(Hook):
    """Fed with the seconds of each rank at every step."""

    def __init__(self, hosts: Sequence[str]):
        self.hosts = hosts
        self.times: list[deque[float]] = [deque(maxlen=STEPS) for _ in hosts]
        self.named: dict[int, int] = {}  # rank -> step

    def after_step(self, job: "Job", numbers: "StepNumbers") -> dict[str, Any]:
        slow = self.find(job.step, numbers.compute_s)
        if slow is None:
            return {}
        job.recorder.say(
            f"straggler: rank {slow['rank']} on {slow['host']} takes {slow['times']:.1f} times as "
            "long as the others, who wait for it"
        )
        return {"straggler": slow}

    def find(self, step: int, compute_s: Sequence[float]) -> dict[str, Any] | None:
        """Return the slowest rank, as {rank, host, times, compute_s}, if it is slow and was not named lately."""
        for times, seconds in zip(self.times, compute_s, strict=True):
            times.append(seconds)
        if len(self.times) < 2 or len(self.times[0]) < STEPS:
            return None
        usual = [median(times) for times in self.times]
        rank = max(range(len(usual)), key=usual.__getitem__)
        # Of the others: with two ranks the slow one is half of all.
        others = median(seconds for other, seconds in enumerate(usual) if other != rank)
        if usual[rank] < TIMES * others or usual[rank] - others < LEAST_S:
            return None
        if step - self.named.get(rank, -AGAIN) < AGAIN:
            return None
        self.named[rank] = step
        return {
            "rank": rank,
            "host": self.hosts[rank],
            "times": round(usual[rank] / max(others, 1e-9), 2),
            "compute_s": usual[rank],
        }
