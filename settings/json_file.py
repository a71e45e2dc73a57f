"""Read a JSON object, or another small file, that somebody else may have written, or damaged."""

import errno
import json
import os
import stat
from io import BufferedReader
from pathlib import Path
from typing import Any

MOST_DIGITS = 100  # of an integer: a float can hold it, and transformers writes some of 31
MOST_BYTES = 2**28  # of a file that is read at once; the largest, a tokenizer.json, has some 30 MB


def read_whole(file: BufferedReader) -> bytes:
    """Return what an open file holds.

    Raises OSError, also if it is not a regular file, or so large that it must be damaged.
    """
    facts = os.fstat(file.fileno())
    if not stat.S_ISREG(facts.st_mode):
        raise OSError(errno.EINVAL, "is not a file")
    if facts.st_size > MOST_BYTES:
        raise OSError(errno.EFBIG, f"is larger than {MOST_BYTES >> 20} MiB, so it is damaged")
    return file.read()


def read_small(path: Path) -> bytes:
    """Return what a file holds. Raises OSError, as read_whole does."""
    with open(path, "rb", opener=without_waiting) as file:
        return read_whole(file)


def without_waiting(path: str, flags: int) -> int:
    """Open a pipe without waiting for its writer: the `opener` of `open`."""
    return os.open(path, flags | os.O_NONBLOCK)


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        FileNotFoundError: there is nothing at that path.
        ValueError: it is anything else. The message says what, to follow the path.
    """
    try:
        path.stat()
        if not path.is_file():
            raise ValueError("is not a file")
        content = read_small(path)
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError from None
    except OSError as error:
        raise ValueError(f"cannot be read ({error.strerror})") from None
    return parse_object(content)


def parse_object(content: bytes) -> dict[str, Any]:
    """Return the JSON object that this is. Raises ValueError: the message says what it is instead, as in "is empty"."""
    if not content.strip(b"\0\n "):
        raise ValueError("is empty")
    try:
        value = json.loads(content, parse_int=parse_int)
    except TooLong as error:
        raise ValueError(f"is damaged: it has {error}") from None
    except (ValueError, RecursionError):
        raise ValueError("is damaged: it is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("is damaged: it is not a JSON object")
    return value


class TooLong(ValueError):
    """An integer that nobody can compute with."""


def parse_int(text: str) -> int:
    """Return an integer of JSON. Raises TooLong."""
    if len(text) > MOST_DIGITS:
        raise TooLong(f"an integer of {len(text)} digits")
    return int(text)
