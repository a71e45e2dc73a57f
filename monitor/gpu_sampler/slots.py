"""Absolute deadlines: sample k is due at began + k * interval, however long the samples before it took.

A loop that sleeps for an interval after each sample adds its own work to every one of them, and drifts. Here a late
sample delays no other; a slot in which nothing could be sampled is missed, and counted: taken + missed = slots.
"""

import dataclasses
import time
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class Clock:
    """Where time comes from: seconds since some moment, Unix seconds, and a sleep for seconds."""

    monotonic: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep


class Slots:
    """Slot k lasts from began + k * interval to the beginning of the next; each has one sample at most."""

    def __init__(self, interval_s: float, clock: Clock):
        self.interval_s, self.clock = interval_s, clock
        self.began = clock.monotonic()
        self.slot, self.missed = -1, 0

    @property
    def taken(self) -> int:
        return self.slot + 1 - self.missed

    def now(self) -> int:
        """The slot that lasts now."""
        return int((self.clock.monotonic() - self.began) / self.interval_s)

    def wait(self) -> int:
        """Until the next slot, or the present one where that has begun. Returns its number."""
        due = self.slot + 1
        left = self.began + due * self.interval_s - self.clock.monotonic()
        if left > 0:
            self.clock.sleep(left)
        self.slot = max(due, self.now())  # due: rounding may put its first instant before it
        self.missed += self.slot - due
        return self.slot
