"""Locks on files in a run's folder. A lock goes with the process that took it, however it ends."""

import fcntl
import os
import re
import socket
from collections.abc import Iterable
from io import BufferedWriter
from pathlib import Path
from typing import TextIO

from record.durable import make_printable
from record.regular_file import only_regular, open_regular
from record.run_paths import RunPaths
from record.wait import wait
from settings import ExpectedError

RELEASE_S = 10.0  # a trainer whose torchrun was killed holds its run this much longer, at most
RETRY_S = 0.1
LONGEST_HOLDER = 1000  # bytes of a lock that are read
HOLDER = re.compile(r"pid (\d+) on ([^\s:]+)")


class RunFolderError(ExpectedError):
    """The run folder cannot be used; the message says why and what to do."""


def open_console(path: Path) -> BufferedWriter:
    """Open the console log of a detached run to append to it. Raises RunFolderError if it is no regular file."""
    try:
        return open(path, "ab", opener=only_regular)
    except OSError as error:
        raise RunFolderError(
            f"{path}: {error.strerror}. Move it away and run the same command, or leave DETACH out."
        ) from None


class RunIsHeld(RunFolderError):
    """Another process works on it."""


def take_lock(lock: TextIO, patience_s: float = 1.0) -> bool:
    """Lock an open file. Returns False if another process keeps the lock.

    A second is enough for `make status`, which locks for an instant to see whether a lock is free.
    """

    def take() -> bool:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False

    return wait(take, patience_s, RETRY_S)


def is_locked(path: Path) -> bool:
    """Return whether a process holds a lock. One that is missing or cannot be opened counts as free."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def write_holder(lock: TextIO, stage: str = "", pid: int = 0) -> None:
    """Write into a lock who holds it, and what a job is doing: `pid 1 on HOST: STAGE`.

    pid: of the process to stop, if it is another one.
    """
    text = f"pid {pid or os.getpid()} on {socket.gethostname()}"
    if stage:
        text += f": {stage}"
    lock.seek(0)
    lock.truncate()
    lock.write(text)
    lock.flush()


def read_holder(path: Path) -> str:
    """Return what the holder of a lock wrote into it, fit for a terminal; "" if it cannot be read."""
    try:
        with open_regular(path) as file:
            return make_printable(file.read(LONGEST_HOLDER).decode(errors="replace").strip())
    except OSError:
        return ""


def read_stage(paths: RunPaths) -> str:
    """Return what train/start_node.py is doing while no trainer has the run; "" at any other time."""
    if is_held(paths) or not has_job(paths):
        return ""
    return read_holder(paths.job).partition(": ")[2] or "starting"


def is_at_work(paths: RunPaths) -> bool:
    """Return whether anything on this machine works on the run now."""
    return is_held(paths) or has_job(paths)


def is_held(paths: RunPaths) -> bool:
    """Return whether a process of node 0 trains the run now on this machine."""
    return paths.node == 0 and is_locked(paths.lock)


def has_job(paths: RunPaths) -> bool:
    """Return whether train/start_node.py works on the run: prepares data, trains, draws plots."""
    return is_locked(paths.job)


def hold(
    path: Path,
    work: str,
    stage: str = "",
    patience_s: float = 1.0,
    folders: Iterable[Path] = (),
    pid: int = 0,
) -> TextIO:
    """Lock a file in a run's folder for as long as what this returns is open, and write into it who holds it.

    Creates the folder, and these `folders` in it. Raises RunFolderError if that fails, and RunIsHeld if another process
    does this `work`.
    """
    try:
        for folder in (path.parent, *folders):
            folder.mkdir(parents=True, exist_ok=True)
        lock = open(path, "a+", encoding="utf-8", opener=only_regular)  # noqa: SIM115 (held until it is closed)
        if not take_lock(lock, patience_s):
            raise RunIsHeld(
                f"{path.parent}: another process {work} ({read_holder(path)}). Wait for it, stop it, "
                "or choose another RUN_NAME"
            )
        write_holder(lock, stage, pid)
    except OSError as error:
        raise RunFolderError(
            f"{error.filename or path.parent}: cannot be written ({error.strerror}). Choose another "
            "place with RUNS_DIR, free some space, or fix its permissions"
        ) from error
    return lock


def hold_run(paths: RunPaths, patience_s: float = 1.0, pid: int = 0) -> TextIO:
    """Create the run's folder, and hold the run against a second trainer. pid: as write_holder has it."""
    folders = (paths.checkpoints, paths.plots)
    return hold(paths.lock, "trains this run", patience_s=patience_s, folders=folders, pid=pid)


def wait_until_free(paths: RunPaths, patience_s: float = RELEASE_S) -> None:
    """Wait until no process trains the run, for as long as one may take that dies with its parent."""
    wait(lambda: not is_held(paths), patience_s, RETRY_S)
