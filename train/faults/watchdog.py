"""A process that makes no progress says where it stands, and ends, so that the launcher can start the job again.

    hang/rank_N.txt   the Python stacks of each process, written when the time for what it was doing was over

Whoever makes progress calls `expect` again. A thread watches that, and says in the log which rank hangs at which line;
behind it a process of its own watches the thread (stuck_python.py), for a call that never gives the interpreter's
lock back. It also says for how long this process was stopped, by SIGSTOP or with the machine: that time does not count.
A hang that ends while it is being reported is none. All ranks wait for the one that hangs, so that all write their stacks,
at about the same time. Loads nothing but the standard library.
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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TextIO

from record.regular_file import only_regular
from train.faults import stuck_python

log = logging.getLogger(__name__)

HUNG = 1  # exit code: the launcher starts the job again
BEHIND_S = 5.0  # a process whose Python is stuck has so many seconds more
GATHER_S = 3.0  # the first rank waits so long for the others' stacks
LOOK_S = 0.25  # how often the thread looks
SIGN_S = 1.0  # how often it tells stuck_python.py that it does
LATE_S = 2.0  # a look that comes so much too late: perhaps the process was stopped
KEEPER_S = 3.0  # for stuck_python.py to say for how long, and to end
STACKS = re.compile(r"rank_([0-9]+)\.txt")
THREAD = re.compile(r"^(?:Current thread|Thread) .*$", re.MULTILINE)
FRAME = re.compile(r'  File "(.+)", line (\d+) in (.+)')
WAITING = ("_engine_run_backward", "read_numbers", "sum_over_ranks")  # for other ranks


class Watchdog:
    """Watches this process from its creation on; `release` ends that.

    folder: where the stacks go. hosts: of all ranks. at_end: called before the process ends, for what must be said.
    """

    def __init__(
        self,
        folder: Path,
        rank: int,
        hosts: Sequence[str],
        at_end: Callable[[], Any] = lambda: None,
    ):
        self.folder = folder
        self.rank = rank
        self.hosts = hosts
        self.host = hosts[rank]
        self.at_end = at_end
        self.doing, self.setting = "starting", ""
        self.limit_s = float("inf")
        self.since = time.monotonic()
        self.over = threading.Event()
        self.file: TextIO | None = None
        with contextlib.suppress(OSError):  # without a place for stacks all else works
            folder.mkdir(exist_ok=True)
            self.file = open(  # noqa: SIM115
                stacks_of(folder, rank), "w", encoding="utf-8", opener=only_regular
            )
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
                if stopped_s := self.ask_stopped():
                    self.since += stopped_s
                    log.warning(
                        "rank=%d host=%s: this process was stopped for %.0f s (by SIGSTOP, or with its machine)",
                        self.rank,
                        self.host,
                        stopped_s,
                    )
                looked = now = time.monotonic()
            if now - signed >= SIGN_S:
                signed = now
                self.sign()
            silent_s = now - self.since
            if silent_s > self.limit_s:
                hint = f" (see {self.setting})" if self.setting else ""
                self.report_hang(f"no progress in {self.doing} for {silent_s:.0f} s{hint}")

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

    def report_hang(self, why: str) -> None:
        """Write the stacks, say where this process stands, and end it, unless it makes progress meanwhile."""
        since = self.since
        if self.file:
            self.file.write(f"rank {self.rank} on {self.host}: {why}\n")
            self.file.flush()
            faulthandler.dump_traceback(self.file, all_threads=True)
            self.file.flush()
        frames = []
        with contextlib.suppress(OSError):  # the folder may be gone
            if self.file:
                frames = read_frames(Path(self.file.name))
        log.error("rank=%d host=%s: %s; %s", self.rank, self.host, why, locate(frames))
        # Whoever ends breaks the others' connections.
        time.sleep(GATHER_S if self.rank == 0 else 2 * GATHER_S)
        if self.since != since:
            log.error("rank=%d host=%s: it continues", self.rank, self.host)
            return
        if self.rank == 0:
            with contextlib.suppress(OSError):
                for line in report(self.folder, self.hosts):
                    log.error("%s", line)
        with contextlib.suppress(Exception):
            self.at_end()
        os._exit(HUNG)


def read_frames(path: Path) -> list[tuple[str, str, str]]:
    """Return (file, line, function) of the main thread in a file of stacks, innermost first."""
    text = path.read_text(encoding="utf-8", errors="replace")
    return FRAME.findall(THREAD.split(text)[-1])  # the oldest thread is listed last


def locate(frames: list[tuple[str, str, str]]) -> str:
    """Say where a process stands: at the innermost line of ours, if there is one."""
    own = [frame for frame in frames if "/train/" in frame[0] and "site-packages" not in frame[0]]
    if not frames:
        return "where it stands is not known"
    path, line, function = (own or frames)[0]
    return f"it is at {path}:{line} in {function}"


def describe_stacks(path: Path) -> str:
    """Say of a rank that left its stacks whether it HANGS or waits for others, and where."""
    frames = read_frames(path)
    what = "HANGS"
    if frames and ("torch/distributed" in frames[0][0] or frames[0][2] in WAITING):
        what = "waits for others"
    cause = path.read_text(encoding="utf-8", errors="replace").split("\n", 1)[0]
    rank = path.stem.replace("_", " ")
    if not cause.startswith(rank):  # stuck_python.py had the stacks written
        cause = f"{rank}: Python itself is stuck, in C code that keeps its lock"
    return f"{what}: {cause}; {locate(frames)} ({path})"


def report(folder: Path, hosts: Sequence[str] = ()) -> list[str]:
    """Return a line for each rank that left its stacks, those first that did not merely wait for others.

    hosts: of all ranks, which should all have left theirs: one that could not is the one that hangs.
    """
    lines = []
    for rank, path in list_stacks(folder):
        if path.stat().st_size:
            lines.append(describe_stacks(path))
        elif rank < len(hosts):
            lines.append(
                f"HANGS: rank {rank} on {hosts[rank]} left no stack trace: it is stopped, or its machine "
                "does not respond"
            )
    elsewhere = {host for rank, host in enumerate(hosts) if not stacks_of(folder, rank).exists()}
    if elsewhere and not any(line.startswith("HANGS") for line in lines):
        lines.append(
            f"HANGS: a rank on {', '.join(sorted(elsewhere))}, since all ranks here wait for others. Look "
            "at the log and the hang/ folder of the run there"
        )
    return sorted(lines, key=lambda line: not line.startswith("HANGS"))


def stacks_of(folder: Path, rank: int) -> Path:
    return folder / f"rank_{rank}.txt"


def list_stacks(folder: Path) -> list[tuple[int, Path]]:
    """Return each rank that has a file in the folder, and that file. Other files are left alone."""
    stacks = []
    for path in folder.glob("rank_*.txt"):
        match = STACKS.fullmatch(path.name)
        if match and path.is_file() and not path.is_symlink():
            stacks.append((int(match[1]), path))
    return sorted(stacks)


def quarantine_stacks(folder: Path) -> list[str]:
    """What the last attempt's stacks say, for this one to repeat; they are kept as hang/attempt_TIME/."""
    lines = report(folder)
    aside = folder / time.strftime("attempt_%Y%m%d_%H%M%S")
    for _, path in list_stacks(folder):
        if path.stat().st_size == 0:
            path.unlink()
            continue
        aside.mkdir(exist_ok=True)
        path.rename(aside / path.name)
    return [line.replace(str(folder), str(aside)) for line in lines]
