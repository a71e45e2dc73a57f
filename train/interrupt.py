"""SIGTERM, SIGINT and a closed terminal's SIGHUP: remembered, and acted on where nothing is lost.

While weights are being trained a signal only sets a flag, which travels with the step's numbers, so that
all ranks stop behind the same step and save. Before that there is nothing to save: the process leaves.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

PATIENCE_S = 3.0  # one Ctrl-C arrives several times, from the terminal and from the launcher


def end_with_parent(number: int) -> None:
    """Have the system send this process a signal when the one that started it has died, however it died.

    Linux only; elsewhere a launcher that is killed leaves its processes behind.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig, parent = 1, os.getppid()
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:  # it died just now
            os.kill(os.getpid(), number)


class Stopped(BaseException):
    """Told to stop while there was nothing to save. Not an Exception, so that nothing swallows it."""


class Interrupt:
    """Handles the signals of this process from its creation on."""

    def __init__(self) -> None:
        self.asked: str | None = None  # name of the first signal
        self.asked_at = 0.0
        self.training = False          # whether a checkpoint will follow
        self.at_force: Callable[[int], None] = lambda code: None  # what is done before ending with it at once
        self.numbers = [signal.SIGTERM, signal.SIGINT]
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # a detached run is to outlive its terminal
            self.numbers.append(signal.SIGHUP)
        for number in self.numbers:
            signal.signal(number, self.handle)

    @property
    def told_at(self) -> float | None:
        """When training was told to stop, in monotonic seconds; None if it was not."""
        return self.asked_at if self.asked else None

    def release(self) -> None:
        """Give the signals back: nothing is left to save, and a process that hangs at its end must be stoppable."""
        for number in self.numbers:
            signal.signal(number, signal.SIG_DFL)

    def handle(self, number: int, frame: FrameType | None) -> None:
        now = time.monotonic()
        if self.asked is None:
            self.asked, self.asked_at = signal.Signals(number).name, now
            if not self.training and sys.exc_info()[0] is None:  # else an error is being told of already
                raise Stopped(self.asked)
        elif now - self.asked_at > PATIENCE_S:  # asked again: a rank may hang and never reach the next step
            self.at_force(128 + number)
            os._exit(128 + number)
