"""Run one child process at a time and pass signals on to it."""

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from types import FrameType

from record.wait import wait
from settings import ROOT
from train.distributed.signals import end_with_parent

ECHO_S = 3.0  # signals to a whole process group arrive several times, at most this far apart
PAUSE_TICK_S = 0.1
STDOUT = 1
STDERR = 2


class Children:
    """Runs children. SIGTERM, SIGINT and SIGHUP no longer end this process but stop the child.

    Attributes:
        stop_requested: whether any of these signals came.
    """

    def __init__(self) -> None:
        self.stop_requested = False
        self.child: subprocess.Popen[bytes] | None = None
        self.stopped_at: float | None = None
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            # A detached run, which ignores SIGHUP, must outlive its terminal.
            if signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.handle)

    def handle(self, number: int, frame: FrameType | None) -> None:
        self.stop_requested = True
        self.stop_child()

    def stop_child(self) -> None:
        """Send SIGTERM to the child, but not twice for one request.

        A second SIGTERM makes torchrun leave its workers behind.
        """
        if self.child is None:
            return
        now = time.monotonic()
        if self.stopped_at is None or now - self.stopped_at > ECHO_S:
            self.stopped_at = now
            self.child.terminate()

    def run(
        self, command: Sequence[str], environment: Mapping[str, str], quiet: bool = False
    ) -> int:
        """Run a command to its end. Returns its exit code, 128 + N if signal N ended it.

        Args:
            quiet: show only what it complains about.
        """
        self.stopped_at = None
        # Ctrl-C reaches the child as SIGTERM, from here. Python would answer SIGINT with a traceback
        # until the child installs a handler.
        self.child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL if quiet else None,
            preexec_fn=prepare_child,
        )
        if self.stop_requested:  # before there was a child to stop
            self.stop_child()
        code = self.child.wait()
        self.child = None
        return code_of_shell(code)

    def pause(self, seconds: float) -> None:
        """Sleep, but not past a request to stop."""
        wait(lambda: self.stop_requested, seconds, PAUSE_TICK_S)


def prepare_child() -> None:
    """In the child, before its program starts: leave Ctrl-C to this process, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent(signal.SIGTERM)


def code_of_shell(code: int) -> int:
    """Convert the exit code of subprocess, which is -N for signal N, to a shell's 128 + N."""
    if code < 0:
        return 128 - code
    return code


def say(message: str, descriptor: int = STDOUT) -> None:
    """Print a line. A terminal that was closed, or a full disk, must not end a run."""
    with contextlib.suppress(OSError):
        os.write(descriptor, f"{message}\n".encode(errors="replace"))


def complain(message: str) -> None:
    say(message, STDERR)
