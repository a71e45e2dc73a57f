"""Read a JSON object that somebody else may have written, or damaged."""

import json
from pathlib import Path
from typing import Any


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
        value = json.loads(content)
    except (ValueError, RecursionError):
        raise ValueError("is damaged: it is not JSON") from None
    if not isinstance(value, dict):
        raise ValueError("is damaged: it is not a JSON object")
    return value
