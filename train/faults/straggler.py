"""A process that is slower than the others, which all wait for it: found by what each says of its own work.

Standard library only.
"""

from collections import deque
from collections.abc import Sequence
from statistics import median
from typing import Any

STEPS = 20  # a rank's time is its median over so many steps
TIMES = 1.5  # slow is who takes so many times the median of all ranks,
LEAST_S = 0.02  # and so many seconds longer
AGAIN = 200  # steps until the same rank is named again


class Stragglers:
    """Fed with the seconds of each rank at every step."""

    def __init__(self, hosts: Sequence[str]):
        self.hosts = hosts
        self.times: list[deque[float]] = [deque(maxlen=STEPS) for _ in hosts]
        self.named: dict[int, int] = {}  # rank -> step

    def find(self, step: int, own_s: Sequence[float]) -> dict[str, Any] | None:
        """The slowest rank if it is slow, and was not named lately: {rank, host, times, own_s}."""
        for times, seconds in zip(self.times, own_s, strict=True):
            times.append(seconds)
        if len(self.times) < 2 or len(self.times[0]) < STEPS:
            return None
        usual = [median(times) for times in self.times]
        rank = max(range(len(usual)), key=usual.__getitem__)
        # of the others: with two ranks the slow one is half of all
        middle = median(seconds for other, seconds in enumerate(usual) if other != rank)
        if usual[rank] < TIMES * middle or usual[rank] - middle < LEAST_S:
            return None
        if step - self.named.get(rank, -AGAIN) < AGAIN:
            return None
        self.named[rank] = step
        return {
            "rank": rank,
            "host": self.hosts[rank],
            "times": round(usual[rank] / max(middle, 1e-9), 2),
            "own_s": usual[rank],
        }
