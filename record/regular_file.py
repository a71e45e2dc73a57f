"""Open files that somebody else may have put there, such as those of a run that was copied.

Opening a pipe waits for its writer, a device may do anything, and a link may lead to another file.
"""

import contextlib
import errno
import io
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from record.exit_codes import MACHINE_FAULT
from settings.terminal import complain

LOOK_S = 1.0  # how often it is looked whether a read has ended

last_read_s = 0.0  # when anything was last opened or read here, by time.monotonic()


class Noted(io.FileIO):
    """A file whose reads are noted as progress."""

    def readinto(self, buffer: Any) -> int | None:
        count = super().readinto(buffer)
        note_read()
        return count


def note_read() -> None:
    global last_read_s
    last_read_s = time.monotonic()


@contextlib.contextmanager
def limit_silence(
    where: Path, limit_s: float, report: Callable[[int, str], None] = lambda code, reason: None
) -> Iterator[None]:
    """End this process, and say so, if nothing is read for `limit_s`: a dead network disk never answers.

    report: called before with the exit code and the reason.
    """
    over = threading.Event()
    note_read()

    def watch() -> None:
        while not over.wait(LOOK_S):
            if time.monotonic() - last_read_s > limit_s:
                reason = (
                    f"{where}: reading it has made no progress for {limit_s:.0f} s (START_TIMEOUT_S). "
                    "Its disk does not answer: look at the network and the mount."
                )
                complain(reason)
                sys.stderr.flush()
                report(MACHINE_FAULT, reason)
                os._exit(MACHINE_FAULT)

    threading.Thread(target=watch, name="reading", daemon=True).start()
    try:
        yield
    finally:
        over.set()


def open_regular(path: Path) -> io.BufferedReader:
    """Open a regular file, or a link to one, to read it, without waiting. Raises OSError."""
    return io.BufferedReader(Noted(open_descriptor(path)))


def open_descriptor(path: Path, follow: bool = True) -> int:
    """Open a regular file to read it, without waiting. Raises OSError, also if it is anything else.

    follow: whether the path itself may be a symbolic link.
    """
    flags = os.O_RDONLY
    if not follow:
        flags |= os.O_NOFOLLOW
    descriptor = only_regular(path, flags)
    note_read()
    return descriptor


def only_regular(path: str | Path, flags: int) -> int:
    """Open a regular file without waiting: the `opener` of `open`. Raises OSError, also if it is anything else."""
    try:
        descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        is_refused_link = flags & os.O_NOFOLLOW and error.errno == errno.ELOOP
        if is_refused_link or error.errno in (errno.ENXIO, errno.ENODEV):
            raise not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular(path)
    return descriptor


def open_inside(folder: Path, name: str) -> io.BufferedReader:
    """Open the regular file of this name in a folder, and no link to another place. Raises OSError."""
    if not is_file_name(name):
        raise OSError(errno.EINVAL, "is not the name of a file in its folder", name)
    return io.BufferedReader(Noted(open_descriptor(folder / name, follow=False)))


def is_file_name(name: str) -> bool:
    """Return whether this names a file in a folder itself: no path, and no way out of it."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def not_regular(path: str | Path) -> OSError:
    return OSError(errno.EINVAL, "is not a regular file", str(path))
