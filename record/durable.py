"""Files that are either complete or absent, whatever happens while they are written."""

import contextlib
import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def open_whole(path: Path, flush: bool = True) -> Iterator[BinaryIO]:
    """Open a file to write it so that a kill leaves what was there before, and with `flush` a power failure too.

    Raises OSError.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "xb") as file:
            yield file
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except Exception as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.filename == str(temporary):
            error.filename = str(path)  # nobody knows the other
        raise


def write_whole(path: Path, content: bytes, flush: bool = True) -> None:
    """Write a file as `open_whole` does. Raises OSError."""
    with open_whole(path, flush) as file:
        file.write(content)


def flush_file(path: Path) -> None:
    """Flush to disk what somebody else wrote to a file and closed. Raises OSError."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush renames in a folder to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def make_printable(text: object) -> str:
    """Return text that others wrote, with control characters and bytes that are not UTF-8 as escapes: a terminal obeys
    the one, and printing the other fails."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in str(text)
    )
