"""Open files that somebody else may have put there, such as those of a run that was copied.

Opening a pipe waits for its writer, a device may do anything, and a link may lead to another file.
"""

import contextlib
import errno
import fcntl
import io
import os
import shutil
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from record.durable import open_whole
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
    """Open a regular file without waiting: the `opener` of `open`. Raises OSError, also if it is anything else.

    A file that is to be written may not be a link: somebody else's run folder could have one to a file of
    the user's. If it has another name too (a hard link, as of `cp -al`), a copy takes its place first.
    """
    is_written = flags & (os.O_WRONLY | os.O_RDWR)
    if is_written:
        flags |= os.O_NOFOLLOW
    try:
        # What is to be emptied is looked at first.
        descriptor = os.open(path, (flags & ~os.O_TRUNC) | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)
    except OSError as error:
        is_refused_link = flags & os.O_NOFOLLOW and error.errno == errno.ELOOP
        if is_refused_link or error.errno in (errno.ENXIO, errno.ENODEV):
            raise not_regular(path) from None
        raise
    facts = os.fstat(descriptor)
    if stat.S_ISREG(facts.st_mode) and not (is_written and facts.st_nlink > 1):
        if flags & os.O_TRUNC:
            os.ftruncate(descriptor, 0)
        return descriptor
    try:
        if not stat.S_ISREG(facts.st_mode):
            raise not_regular(path)
        # A lock that is held is not replaced.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with open_whole(Path(path)) as copy, open_regular(Path(path)) as file:
            shutil.copyfileobj(file, copy)
            os.fchmod(copy.fileno(), stat.S_IMODE(facts.st_mode))
    except BlockingIOError:
        raise OSError(errno.EBUSY, "is locked by another process", str(path)) from None
    finally:
        os.close(descriptor)
    return only_regular(path, flags)


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
