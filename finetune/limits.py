"""Try work that may never end, such as a program that came with a model, in a process of its own."""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType

CPU_S = 5
CALL_CPU_S = 20.0  # for work that has ended within the limits once
WALL_S = 300  # for a copy of a process with threads that waits for a lock of theirs
MEMORY = 2**30


def ends_within_limits(work: Callable[[], object]) -> bool:
    """Return whether work ends after at most CPU_S seconds of a core, with MEMORY more bytes than now.

    What it returns and what it raises, but for MemoryError, is lost. The system ends the process: this
    one could not interrupt `9 ** (9**9)`. Time of a core is counted, so a busy machine changes nothing.
    """
    child = os.fork()
    if child == 0:
        status = 0
        try:
            limit(resource.RLIMIT_CPU, CPU_S)
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(WALL_S)
            with contextlib.suppress(OSError):  # only Linux says what is in use
                pages = int(Path("/proc/self/statm").read_text().split()[0])
                limit(resource.RLIMIT_AS, pages * resource.getpagesize() + MEMORY)
            work()
        except MemoryError:
            status = 1
        finally:
            os._exit(status)
    _, status = os.waitpid(child, 0)
    return status == 0


def limit(what: int, most: int) -> None:
    _, hard = resource.getrlimit(what)
    resource.setrlimit(what, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@contextlib.contextmanager
def limited_time() -> Iterator[None]:
    """Raise TimeoutError in Python code that takes more than CALL_CPU_S seconds of a core.

    In the main thread only. A call of C code ends first.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"it takes more than {CALL_CPU_S:g} s")

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, CALL_CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
