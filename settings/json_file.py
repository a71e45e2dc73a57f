"""Read a JSON object that somebody else may have written, or damaged."""

import errno
import json
from pathlib import Path
from typing import Any

from settings.regular_file import open_regular


def read_object(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        FileNotFoundError: there is nothing at that path.
        ValueError: it is anything else. The message says what, to follow the path.
    """
    try:
        with open_regular(path) as file:
            content = file.read()
    except (FileNotFoundError, NotADirectoryError):
        raise FileNotFoundError from None
    except OSError as error:
        if error.errno == errno.EINVAL:
            raise ValueError("is not a file") from None
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
