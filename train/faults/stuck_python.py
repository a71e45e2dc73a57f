"""Ends a process whose Python is stuck, for example in a library that keeps the interpreter's lock.

    python stuck_python.py PID      started by watchdog.py, which writes to its standard input as long as Python runs

The numbers that it reads are the seconds without a further one after which the process is ended. It counts its own
seconds, and not those in which the process was stopped (SIGSTOP): a clock would go on meanwhile. Once the process goes
on it writes to its standard output for how long it was stopped, in seconds. It runs by itself, so that it needs no lock
of the process, and loads nothing, since every trainer has one.
"""

import contextlib
import os
import select
import signal
import sys
import time

TICK_S = 1.0
LATE_S = 1.0  # a tick that comes so much too late: this process was stopped too
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
    stopped_s = 0.0  # that the process does not know of
    while silent_s <= limit_s:
        began = time.monotonic()
        ready, _, _ = select.select([0], [], [], TICK_S)
        tick_s = time.monotonic() - began
        if tick_s > TICK_S + LATE_S or is_stopped(pid):
            stopped_s += tick_s
        elif not ready:
            silent_s += TICK_S
        if stopped_s and not is_stopped(pid):
            with contextlib.suppress(OSError):
                os.write(1, f"{stopped_s}\n".encode())
            stopped_s = 0.0
        if ready:
            words = os.read(0, 4096).split()
            if not words:
                return
            limit_s = float(words[-1])
            silent_s = 0.0
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGUSR2)  # faulthandler writes the stacks
        time.sleep(STACKS_S)
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # it ends with its process
    watch(int(sys.argv[1]))
