"""Disks: whether the run may write to its folders, finds room there, and how fast they take what is written.

What it will write is plan/storage.py's. A file that is measured with has no name from the start, so that nothing is
left whatever happens.
"""

import dataclasses
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from plan import storage
from record.exit_codes import BAD_DATA, BAD_SETTING
from record.number_formats import size as amount
from settings import ROOT
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding
from settings.resolve import repeat_typed, show_path
from train.data.sources.source import CorpusError
from train.distributed.pod import exit_code_of, exit_code_of_fault

MEASURED_BYTES, PIECE_BYTES = 256e6, 16 * 2**20
MEASURED_S = 3.0  # at most, of a slow disk
SLOW_MB_S = 100.0  # a single hard disk does that


@dataclasses.dataclass(frozen=True)
class Folder:
    """That the run writes to. name: its setting; there: it, or the nearest one above that can be seen. problem: why
    nothing can be written, and its exit code."""

    name: str
    folder: Path
    there: Path
    problem: str = ""
    code: int = BAD_DATA


# ---------------------------------------------------------------------------------------------------
# Gathered
# ---------------------------------------------------------------------------------------------------


def folders(c: Config) -> list[Folder]:
    """RUNS_DIR and DATA_DIR. Nothing is made."""
    return [
        folder(name, (ROOT / path).absolute())
        for name, path in (("RUNS_DIR", c.runs_dir), ("DATA_DIR", c.data_dir))
    ]


def folder(name: str, path: Path) -> Folder:
    there = next(above for above in (path, *path.parents) if os.path.lexists(above))
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        pass  # it is not there yet
    except OSError as error:  # something above it is closed, or its disk does not answer
        code = exit_code_of(error, BAD_DATA)
        return Folder(name, path, there, str(error.strerror), code)
    if not there.is_dir():
        return Folder(name, path, there, f"{there} is no folder")
    if not os.access(there, os.W_OK | os.X_OK):
        if os.statvfs(there).f_flag & os.ST_RDONLY:
            return Folder(name, path, there, "Read-only file system", exit_code_of_fault("volume"))
        return Folder(name, path, there, "Permission denied")
    return Folder(name, path, there)


def places(c: Config, found: Sequence[Folder]) -> list[storage.Place]:
    """The disks under these folders, with what they will take; none where a folder cannot be looked into, or a source
    is not known: others say that."""
    if any(one.problem for one in found):
        return []
    try:
        return storage.places(c)
    except (CorpusError, storage.FolderError):
        return []


def write_mb_s(path: Path) -> tuple[float | None, str]:
    """(MB/s of data that are on the disk, "") or (None, why not). Takes MEASURED_S at most, if the disk answers."""
    piece = os.urandom(PIECE_BYTES)  # nothing that a file system could compress
    try:
        if shutil.disk_usage(path).free < 2 * MEASURED_BYTES:
            return None, "there is too little room"
        written, began = 0, time.perf_counter()
        with tempfile.TemporaryFile(dir=path, buffering=0) as file:
            while not written or (
                written < MEASURED_BYTES and time.perf_counter() - began < MEASURED_S
            ):
                written += file.write(piece)
                os.fsync(file.fileno())
            return written / (time.perf_counter() - began) / 1e6, ""
    except OSError as error:
        return None, f"{error.strerror}"


# ---------------------------------------------------------------------------------------------------
# Judged
# ---------------------------------------------------------------------------------------------------


def rights(found: Sequence[Folder]) -> list[Finding]:
    """Of folders that nothing can be written to."""
    return [
        Finding(
            "disk",
            FAIL,
            f"{one.name}={show_path(one.folder)}: nothing can be written there ({one.problem})",
            f"choose another {one.name}, or mend its permissions",
            one.code,
        )
        for one in found
        if one.problem
    ]


def room(disks: Sequence[storage.Place]) -> list[Finding]:
    """Whether there is room for what the plan will put there."""
    return [room_at(disk) for disk in disks]


def room_at(disk: storage.Place) -> Finding:
    names = " and ".join(disk.settings)
    parts = (
        ", ".join(f"{amount(size)} of {part}" for part, size in disk.needs.items() if size)
        or "nothing"
    )
    said = f"{names}: {amount(disk.free)} free, {parts} needed at most (computed)"
    if not disk.missing:
        return Finding("disk", PASS, said)
    return Finding(
        "disk",
        FAIL,
        f"Not enough disk space for {said}",
        f"Free some space, or set {disk.settings[0]} to a folder on a larger disk. "
        f"`make plan{repeat_typed('plan')}` suggests settings that need less",
    )


def speed(c: Config, mb_s: float | None, why: str) -> Finding:
    """Whether a checkpoint is through soon enough: between two, and between a signal and the end."""
    where = f"RUNS_DIR={c.runs_dir}"
    if mb_s is None:
        return Finding(
            "disk-speed",
            WARN,
            f"{where}: not measured, {why}",
            "make room, or mend what is wrong there",
        )
    save_s = 0.0
    said = f"{where} takes {mb_s:,.0f} MB/s"
    if c.save_every != 0:
        save_s = storage.save_s(c, mb_s)
        said += f": {save_s:,.1f} s for a checkpoint of {amount(storage.checkpoint_bytes(c))}"
    level = WARN
    faster = "a faster disk for RUNS_DIR, or a larger"
    if save_s > 60 * c.save_minutes:
        level = FAIL
        said += f", and one is due every SAVE_MINUTES={c.save_minutes:g}"
        fix = f"{faster} SAVE_MINUTES"
    elif save_s > c.shutdown_timeout_s:
        said += (
            f"; with GRACE_PERIOD_S={c.grace_period_s}, a run that is asked to stop has "
            f"{c.shutdown_timeout_s} s to save"
        )
        fix = f"{faster} GRACE_PERIOD_S"
    elif mb_s < SLOW_MB_S:
        said += f"; a disk of its own does {SLOW_MB_S:.0f} MB/s and more"
        fix = "a local disk for RUNS_DIR"
    else:
        level = PASS
        fix = ""
    return Finding("disk-speed", level, said, fix, BAD_SETTING)
