"""What a benchmark's process tells the one that started it: JSON objects, a line each. Standard library only."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from settings import ROOT


def say(**values: object) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def said(*arguments: str) -> Iterator[dict[str, Any]]:
    """What `python -m ARGUMENTS` says, in a process of its own. Raises CalledProcessError where that fails."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, check=True
    )
    yield from map(json.loads, done.stdout.splitlines())
