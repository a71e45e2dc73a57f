"""SIGTERM, SIGINT and a closed terminal's SIGHUP: remembered, and acted on where nothing is lost.

While weights are being trained a signal only sets a flag, which travels with the step's numbers, so that
all ranks stop after the same step and save. Before that there is nothing to save: the process ends at once.
"""

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from typing import Any

from record.exit_codes import INTERRUPTED

PATIENCE_S = 3.0  # one request may arrive several times, from a process group and from the launcher


class Stopped(BaseException):
    """Told to stop while there is nothing to save. Not an Exception, so that nothing swallows it."""


class Interrupt:
    """Hears the signals of this process from its creation on, in a thread.

    The main thread comes to a signal only between two lines of Python, and not while it waits for ranks that
    are gone. So the thread acts: before training it ends the process, and at a second signal always.

    Attributes:
        asked: name of the first signal.
        training: whether a checkpoint will follow.
    """

    def __init__(self, before_end: Callable[[], None]) -> None:
        """before_end: called before a signal ends the process because it does not train yet."""
        self.before_end = before_end
        self.asked: str | None = None
        self.training = False
        self.is_heard = threading.Event()
        self.is_waiting = False
        self.numbers = []
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # The launcher ignores for its child what it passes on as SIGTERM. A detached run outlives its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.numbers.append(number)
                signal.signal(number, self.wait_for_thread)
        heard, self.wake = socket.socketpair()
        os.register_at_fork(after_in_child=self.release)  # a child's signals are not ours
        self.wake.setblocking(False)
        signal.set_wakeup_fd(self.wake.fileno(), warn_on_full_buffer=False)
        threading.Thread(target=self.watch, args=(heard,), name="signals", daemon=True).start()

    def release(self) -> None:
        """Give the signals back: nothing is left to save, and a process that hangs at its end must be stoppable."""
        for number in self.numbers:
            signal.signal(number, signal.SIG_DFL)
        signal.set_wakeup_fd(-1)
        self.wake.close()

    def wait_for_thread(self, number: int, frame: Any) -> None:
        """The handler, in the main thread: before training it does not return."""
        if self.is_waiting:  # a second signal came while the first held the event's lock
            return
        self.is_waiting = True
        self.is_heard.wait(PATIENCE_S)

    def watch(self, heard: socket.socket) -> None:
        """The thread."""
        asked_at = 0.0
        while number := int.from_bytes(heard.recv(1)):  # 0: released
            if number not in self.numbers:
                continue
            now = time.monotonic()
            if self.asked is None:
                asked_at = now
                self.asked = signal.Signals(number).name
                if not self.training:
                    with contextlib.suppress(Exception):
                        self.before_end()
                    os._exit(INTERRUPTED)
                self.is_heard.set()
            elif now - asked_at > PATIENCE_S:
                os._exit(128 + number)
        heard.close()
