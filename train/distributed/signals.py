"""SIGTERM, SIGINT and a closed terminal's SIGHUP: remembered, and acted on where nothing is lost.

While weights are being trained a signal only sets a flag, which travels with the step's numbers, so that
all ranks stop behind the same step and save. Before that there is nothing to save: the process leaves.
"""

import ctypes
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType

PATIENCE_S = 3.0  # one Ctrl-C arrives several times, from the terminal and from the launcher
IN_DOUBT = "?"  # SIGTERM: torchrun sends it too, when another process has died
BY_USER = "!"  # SIGINT and SIGHUP, which nothing else sends
DEAF_S = 10.0  # before training: a main thread that has not heard of a signal by then waits outside of Python


def end_with_parent(number: int) -> None:
    """Have the system send this process a signal when the one that started it has died, however it died.

    Linux only; elsewhere a launcher that is killed leaves its processes behind.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig, parent = 1, os.getppid()
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
        if os.getppid() != parent:  # it died just now
            os.kill(os.getpid(), number)


def mark_of(asked: str | None) -> str:
    """What the launcher is told beside the exit code of a process that a signal ended before training."""
    return {"SIGTERM": IN_DOUBT, None: ""}.get(asked, BY_USER)


class Stopped(BaseException):
    """Told to stop while there was nothing to save. Not an Exception, so that nothing swallows it."""


class Interrupt:
    """Handles the signals of this process from its creation on."""

    def __init__(self) -> None:
        self.asked: str | None = None  # name of the first signal
        self.asked_at = 0.0
        self.training = False  # whether a checkpoint will follow
        self.at_force: Callable[..., None] = lambda *_: (
            None
        )  # what is done with a code before ending with it at once
        self.numbers = [signal.SIGTERM, signal.SIGINT]
        if (
            signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN
        ):  # a detached run is to outlive its terminal
            self.numbers.append(signal.SIGHUP)
        for number in self.numbers:
            signal.signal(number, self.handle)
        heard, self.wake = socket.socketpair()
        os.register_at_fork(
            after_in_child=lambda: signal.set_wakeup_fd(-1)
        )  # a child's signals are not ours
        self.wake.setblocking(False)
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self.watch, args=(heard,), name="signals", daemon=True).start()

    @property
    def told_at(self) -> float | None:
        """When training was told to stop, in monotonic seconds; None if it was not."""
        return self.asked_at if self.asked else None

    def release(self) -> None:
        """Give the signals back: nothing is left to save, and a process that hangs at its end must be stoppable."""
        for number in self.numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        self.wake.close()

    def handle(self, number: int, frame: FrameType | None) -> None:
        if self.asked is None:
            self.asked, self.asked_at = signal.Signals(number).name, time.monotonic()
            if (
                not self.training and sys.exc_info()[0] is None
            ):  # else an error is being told of already
                raise Stopped(self.asked)

    def watch(self, heard: socket.socket) -> None:
        """End the process where its main thread will not, since that comes to `handle` only between two lines of
        Python, and not while it waits for ranks that are gone: at a second signal, and before training when the first
        was not heard of."""
        first, told_at = 0, 0.0
        while True:
            unheard = first and not self.training and self.asked is None
            heard.settimeout(max(0.01, told_at + DEAF_S - time.monotonic()) if unheard else None)
            try:
                number = int.from_bytes(heard.recv(1))
            except TimeoutError:
                if not self.training and self.asked is None:
                    self.end(75, mark_of(signal.Signals(first).name))
                continue
            if not number:  # released
                return heard.close()
            if number in self.numbers and not first:
                first, told_at = number, time.monotonic()
            elif number in self.numbers and time.monotonic() - told_at > PATIENCE_S:
                self.end(128 + number)

    def end(self, code: int, mark: str = "") -> None:
        self.at_force(code, mark)
        os._exit(code)
