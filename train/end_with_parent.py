"""End a process together with the one that started it, however that one ended.

    python -m train.end_with_parent PID MODULE [ARGUMENT...]    become MODULE, which ends with process PID

torchrun starts each rank of a node so: a torchrun that was killed leaves nothing behind. Loads nothing, since
until it has asked the system for this, its parent can die unnoticed.
"""

import ctypes
import os
import signal
import sys
from types import FrameType


def end_with_parent(number: int, parent: int) -> None:
    """Have the system send this process a signal when the one that started it has died.

    Linux only; elsewhere a launcher that is killed leaves its processes behind.

    Args:
        parent: pid of the process that started this one. If it has died by now, the signal comes at once.
    """
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, number)
    if os.getppid() != parent:
        os.kill(os.getpid(), number)


def end_with_launcher() -> None:
    """End this process by SIGTERM when the one that started it has died, also while this one is stopped (SIGSTOP).

    SIGTERM alone would wait for ever: only SIGCONT reaches a stopped process. So the system sends SIGCONT.
    """
    launcher = os.getppid()

    def handle(number: int, frame: FrameType | None) -> None:
        if os.getppid() != launcher:
            os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGCONT, handle)
    end_with_parent(signal.SIGCONT, launcher)


def main(words: list[str]) -> None:
    parent, *module = words
    end_with_parent(signal.SIGKILL, int(parent))
    os.execv(sys.executable, [sys.executable, "-u", "-m", *module])  # the system's promise stays


if __name__ == "__main__":
    main(sys.argv[1:])
