"""Run one child process at a time, and stop it when this process is asked to stop."""

import contextlib
import functools
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from types import FrameType

from record.exit_codes import INTERRUPTED
from record.wait import wait
from settings import ROOT
from settings.terminal import wrap
from train.end_with_parent import end_with_parent

# One request may arrive several times, at most this far apart in seconds: `timeout` sends a signal to the process
# and to its group, make passes SIGTERM on, and a terminal that closes sends SIGHUP at any time. Each press of Ctrl-C
# is one SIGINT.
ECHO_S = {signal.SIGINT: 0.1, signal.SIGTERM: 3.0, signal.SIGHUP: math.inf}
PAUSE_TICK_S = 0.1
STDOUT = 1
STDERR = 2


class Children:
    """Runs children. SIGTERM, SIGINT and SIGHUP no longer end this process but stop the child.

    Attributes:
        stop_requested: whether any of these signals came.
        describe_stop: says what a stop does at this moment; "" if the child says it.
    """

    def __init__(self, describe_stop: Callable[[], str] = lambda: "") -> None:
        self.stop_requested = False
        self.describe_stop = describe_stop
        self.child: subprocess.Popen[bytes] | None = None
        self.child_is_told = False
        self.asked_at = 0.0
        for number in ECHO_S:
            # A detached run, which ignores SIGHUP, must outlive its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Answer at once. A second press of Ctrl-C quits, whatever the child is doing."""
        now = time.monotonic()
        if self.stop_requested and now - self.asked_at <= ECHO_S[signal.Signals(number)]:
            return
        self.asked_at = now
        if not self.stop_requested:
            self.stop_requested = True
            answer = self.describe_stop()
            if answer:
                is_after_key = os.isatty(STDOUT)  # the terminal shows ^C in front of it
                say(f"\n{answer}" if is_after_key else answer)
            self.stop_child()
        elif number == signal.SIGINT:
            say("Quitting.")  # there may be nothing to save any more
            if self.child is None:
                os._exit(INTERRUPTED)
            self.child.kill()  # its own children end with it
        elif self.child:
            self.child.terminate()

    def stop_child(self) -> None:
        """Send SIGTERM to the child, but not twice: torchrun would leave its workers behind."""
        if self.child and not self.child_is_told:
            self.child_is_told = True
            self.child.terminate()

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], quiet: bool = False
    ) -> int:
        """Run a command to its end. Returns its exit code, 128 + N if signal N ended it.

        Args:
            quiet: show only what it complains about.
        """
        self.child_is_told = False
        # Ctrl-C and a closed terminal reach the child as SIGTERM, once, from here.
        self.child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            preexec_fn=functools.partial(prepare_child, os.getpid()),
        )
        if self.stop_requested:  # before there was a child to stop
            self.stop_child()
        code = self.child.wait()
        self.child = None
        return code_of_shell(code)

    def pause(self, seconds: float) -> None:
        """Sleep, but not past a request to stop."""
        wait(lambda: self.stop_requested, seconds, PAUSE_TICK_S)


def prepare_child(parent: int) -> None:
    """In the child, before its program starts: ignore what a terminal sends to all, and end with this process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    end_with_parent(signal.SIGTERM, parent)


def code_of_shell(code: int) -> int:
    """Convert the exit code of subprocess, which is -N for signal N, to a shell's 128 + N."""
    if code < 0:
        return 128 - code
    return code


def say(message: str, descriptor: int = STDOUT) -> None:
    """Print a line. A terminal that was closed, or a full disk, must not end a run."""
    if os.isatty(descriptor):
        message = wrap(message)
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{message}\n".encode(errors="replace"))


def complain(message: str) -> None:
    say(message, STDERR)
