"""Open files that somebody else may have put there, such as those of a run that was copied.

Opening a pipe waits for its writer, a device may do anything, and a link may lead to another file.
"""

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, to read it, without waiting. Raises OSError."""
    return open(open_descriptor(path), "rb")


def open_descriptor(path: Path, follow: bool = True) -> int:
    """Open a regular file to read it, without waiting. Raises OSError, also if it is anything else.

    follow: whether the path itself may be a symbolic link.
    """
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC
    if not follow:
        flags |= os.O_NOFOLLOW
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        if error.errno in (errno.ENXIO, errno.ENODEV) or (
            not follow and error.errno == errno.ELOOP
        ):
            raise not_regular(path) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise not_regular(path)
    return descriptor


def open_inside(folder: Path, name: str) -> BinaryIO:
    """Open the regular file of this name in a folder, and no link to another place. Raises OSError."""
    if not is_file_name(name):
        raise OSError(errno.EINVAL, "is not the name of a file in its folder", name)
    return open(open_descriptor(folder / name, follow=False), "rb")


def is_file_name(name: str) -> bool:
    """Return whether this names a file in a folder itself: no path, and no way out of it."""
    return name not in ("", ".", "..") and "/" not in name and "\0" not in name


def not_regular(path: Path) -> OSError:
    return OSError(errno.EINVAL, "is not a regular file", str(path))
