"""Ends a process whose Python is stuck, for example in a library that keeps the interpreter's lock.

    python stuck_python.py PID      started by watchdog.py, which writes to its standard input as long as Python runs

The numbers that it reads are the seconds without a further one after which the process is ended. It counts its own
seconds, and not those in which the process was stopped (SIGSTOP): a clock would go on meanwhile. It runs by itself,
so that it needs no lock of the process, and loads nothing, since every trainer has one.
"""

import contextlib
import os
import select
import signal
import sys
import time

TICK_S = 1.0
STACKS_S = 1.0  # for the process to write its stacks


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped. False where the system does not say."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] in ("T", "t")
    except OSError:
        return False


def watch(pid: int) -> None:
    """Return once the process has ended, or after ending it."""
    limit_s = float("inf")
    silent_s = 0.0
    while silent_s <= limit_s:
        ready, _, _ = select.select([0], [], [], TICK_S)
        if ready:
            words = os.read(0, 4096).split()
            if not words:
                return
            limit_s = float(words[-1])
            silent_s = 0.0
        elif not is_stopped(pid):
            silent_s += TICK_S
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)  # faulthandler writes the stacks
        time.sleep(STACKS_S)
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its process
    watch(int(sys.argv[1]))
