"""A process that makes no progress says where it stands, and ends, so that the launcher can start the job again.

    hang/rank_N.txt   the Python stacks of each process, written when the time for what it was doing was over

Whoever makes progress calls `expect` again. A thread watches that, and says in the log which rank hangs at which line;
behind it a process of its own watches the thread (stuck_python.py), for a call that never gives the interpreter's
lock back. It also says for how long this process was stopped, by SIGSTOP or with the machine: that time does not count.
A hang that ends while it is being reported is none. All ranks wait for the one that hangs, so that all write their stacks,
at about the same time. Standard library only.
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import re
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from train.faults import stuck_python

log = logging.getLogger(__name__)

HUNG = 1  # exit code: the launcher starts the job again
BEHIND_S = 5.0  # a process whose Python is stuck has so many seconds more
GATHER_S = 3.0  # the first rank waits so long for the others' stacks
LOOK_S = 0.25  # how often the thread looks
SIGN_S = 1.0  # how often it tells stuck_python.py that it does
LATE_S = 2.0  # a look that comes so much too late: perhaps the process was stopped
KEEPER_S = 3.0  # for stuck_python.py to say for how long, and to end
THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')


class Watchdog:
    """Watches this process from its creation on; `release` ends that.

    folder: where the stacks go. at_end: called before the process ends, for what must be said.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        host: str,
        at_end: Callable[[], Any] = lambda: None,
    ):
        self.folder, self.rank, self.host = folder, rank, host
        self.at_end = at_end
        self.doing, self.setting = "starting", ""
        self.limit_s = float("inf")
        self.since = time.monotonic()
        self.over = threading.Event()
        self.file: TextIO | None = None
        with contextlib.suppress(OSError):  # without a place for stacks all else works
            folder.mkdir(exist_ok=True)
            self.file = open(folder / f"rank_{rank}.txt", "w", encoding="utf-8")  # noqa: SIM115
            faulthandler.register(signal.SIGUSR2, file=self.file, all_threads=True)
        self.keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", stuck_python.__file__, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        assert self.keeper.stdin and self.keeper.stdout
        self.signs = self.keeper.stdin  # that Python runs
        self.stops = self.keeper.stdout  # seconds for which this process was stopped
        os.set_blocking(self.signs.fileno(), False)
        atexit.register(self.release)
        threading.Thread(target=self.watch, name="watchdog", daemon=True).start()

    def expect(self, doing: str, limit_s: float, setting: str = "START_TIMEOUT_S") -> None:
        """There was progress; the next is due within so many seconds. Cheap enough for every step.

        setting: the one that decides how many, if one does.
        """
        self.doing, self.setting = doing, setting
        has_changed = limit_s != self.limit_s
        self.limit_s = limit_s
        self.since = time.monotonic()
        if has_changed:
            self.sign()

    def release(self) -> None:
        """Watch no longer, and leave no empty file behind."""
        self.over.set()
        self.signs.close()
        try:
            self.keeper.wait(KEEPER_S)
        except subprocess.TimeoutExpired:  # somebody has stopped it
            self.keeper.kill()
            self.keeper.wait()
        if self.file:
            faulthandler.unregister(signal.SIGUSR2)
            self.file.close()
            path, self.file = Path(self.file.name), None
            with contextlib.suppress(OSError):
                if path.stat().st_size == 0:
                    path.unlink()
                    self.folder.rmdir()  # only if it is empty

    def watch(self) -> None:
        """The thread."""
        looked = signed = time.monotonic()
        while not self.over.wait(LOOK_S):
            now = time.monotonic()
            late_s = now - looked - LOOK_S
            looked = now
            if late_s > LATE_S:
                self.since += self.ask_stopped()
                looked = now = time.monotonic()
            if now - signed >= SIGN_S:
                signed = now
                self.sign()
            self.look(now)

    def ask_stopped(self) -> float:
        """Return the seconds for which this process was stopped: a thread alone cannot tell that from a busy lock."""
        ready, _, _ = select.select([self.stops], [], [], KEEPER_S)
        if not ready:
            return 0.0
        return sum(map(float, os.read(self.stops.fileno(), 4096).split()))

    def sign(self) -> None:
        """Tell stuck_python.py that Python runs, and how long it may be silent."""
        with contextlib.suppress(OSError, ValueError):  # it is gone, or this is being released
            self.signs.write(f"{self.limit_s + BEHIND_S}\n".encode())

    def look(self, now: float) -> None:
        silent_s = now - self.since
        if silent_s > self.limit_s:
            hint = f" (see {self.setting})" if self.setting else ""
            self.bark(f"no progress in {self.doing} for {silent_s:.0f} s{hint}")

    def bark(self, why: str) -> None:
        """Write the stacks, say where this process stands, and end it, unless it makes progress meanwhile."""
        since = self.since
        if self.file:
            self.file.write(f"rank {self.rank} on {self.host}: {why}\n")
            self.file.flush()
            faulthandler.dump_traceback(self.file, all_threads=True)
            self.file.flush()
        log.error(
            "rank=%d host=%s: %s; %s",
            self.rank,
            self.host,
            why,
            place(main_stack(self.folder / f"rank_{self.rank}.txt")),
        )
        # Whoever ends breaks the others' connections.
        time.sleep(GATHER_S if self.rank == 0 else 2 * GATHER_S)
        if self.since != since:
            log.error("rank=%d host=%s: it goes on", self.rank, self.host)
            return
        if self.rank == 0:
            for line in report(self.folder):
                log.error("%s", line)
        with contextlib.suppress(Exception):
            self.at_end()
        os._exit(HUNG)


def main_stack(path: Path) -> list[tuple[str, str, str]]:
    """(file, line, function) of the main thread in a file of stacks, innermost first; [] if there is none."""
    with contextlib.suppress(OSError):
        text = path.read_text(encoding="utf-8", errors="replace")
        _, *blocks = THREAD.split(text)
        if blocks:
            return FRAME.findall(blocks[-1])  # the main thread is the oldest, and listed last
    return []


def place(stack: list[tuple[str, str, str]]) -> str:
    """Where a process stands, in words: the innermost line of ours, and what it called there."""
    if not stack:
        return "where it stands is not known"
    ours = stack[0]
    for frame in reversed(stack):
        if "/train/" in frame[0] and "site-packages" not in frame[0]:
            ours = frame
    text = "it is at {}:{} in {}".format(*ours)
    if ours != stack[0]:
        text += ", inside {2} ({0}:{1})".format(*stack[0])
    return text


def waits(stack: list[tuple[str, str, str]]) -> bool:
    """Whether a process only waits for others, as far as its innermost line shows."""
    if not stack:
        return False
    file, _, function = stack[0]
    calls = ("_engine_run_backward", "read_numbers", "sum_over_ranks")
    return "torch/distributed" in file or function in calls


def report(folder: Path) -> list[str]:
    """A line for each rank that left its stacks, those first that did not merely wait for others."""
    lines = []
    paths = [path for path in folder.glob("rank_*.txt") if path.stat().st_size]
    for path in sorted(paths, key=lambda path: int(path.stem.removeprefix("rank_"))):
        head = path.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0]
        rank = path.stem.replace("_", " ")
        who = head if head.startswith(rank) else f"{rank}: stuck, and with it Python itself"
        stack = main_stack(path)
        what = "waits for others" if waits(stack) else "HANGS"
        lines.append(f"{what}: {who}; {place(stack)} ({path})")
    return sorted(lines, key=lambda line: not line.startswith("HANGS"))


def put_away(folder: Path) -> list[str]:
    """What the last attempt's stacks say, for this one to repeat; they are kept as hang/attempt_TIME/."""
    if not folder.is_dir():
        return []
    lines = report(folder)
    kept = folder / time.strftime("attempt_%Y%m%d_%H%M%S")
    for path in folder.glob("rank_*.txt"):
        if path.stat().st_size == 0:
            path.unlink()
            continue
        kept.mkdir(exist_ok=True)
        path.rename(kept / path.name)
    return [line.replace(str(folder), str(kept)) for line in lines]
