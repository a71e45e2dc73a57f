"""Files that are either complete or absent, whatever happens while they are written; and reading those of others."""

import json
import os
import uuid
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes, flush: bool = True) -> None:
    """Write a file so that a kill leaves what was there before, and with `flush` a power failure too. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            if flush:
                file.flush()
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def flush_file(path: Path) -> None:
    """Flush to disk what somebody else wrote to a file and closed. Raises OSError."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush renames in a folder to disk. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        FileNotFoundError: there is nothing at that path.
        ValueError: it is anything else. The message says what, to follow the path.
    """
    try:
        path.stat()
        if not path.is_file():  # opening a pipe would wait for a writer
            raise ValueError("is not a file")
        content = path.read_bytes()
    except FileNotFoundError:
        raise
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    return parse_object(content)


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object that this is. Raises ValueError: the message says what it is instead, as in "is empty"."""
    if not content.strip(b"\0\n "):
        raise ValueError("is empty")
    try:
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("is damaged: it is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("is damaged: it is not a JSON object")
    return value


def make_printable(text: object) -> str:
    """Return text that others wrote, with control characters and bytes that are not UTF-8 as escapes: a terminal obeys
    the one, and printing the other fails."""
    return "".join(
        character if character.isprintable() else ascii(character)[1:-1] for character in str(text)
    )
