"""Files that are either whole or absent, whatever happens while they are written."""

import json
import math
import os
import uuid
from pathlib import Path
from typing import Any


def write_whole(path: Path, content: bytes) -> None:
    """Write a file so that a kill leaves what was there before, and a power failure too. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, facts: Any) -> None:
    """The same of an object. JSON has no NaN: what is not finite is null. Raises OSError."""
    write_whole(path, (json.dumps(finite(facts), indent=1, allow_nan=False) + "\n").encode())


def finite(value: Any) -> Any:
    """The same with None for each number that is not finite."""
    if isinstance(value, dict):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def flush_folder(folder: Path) -> None:
    """Have what was renamed in a folder survive a power failure. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    os.fsync(descriptor)
    os.close(descriptor)
