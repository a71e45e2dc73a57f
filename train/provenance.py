"""Where a run comes from: machine, versions, commit. Read once at a start, kept beside its results. Standard library
only: the roll call of nodes compares versions before any of them loads torch."""

import importlib.metadata
import platform
import subprocess
import time
from typing import Any

from train.settings import ROOT


def provenance(host: str, world_size: int, device: str, threads: int) -> dict[str, Any]:
    """Where and with what an attempt runs."""
    return {"time": time.time(), "host": host, "world_size": world_size, "device": device, "threads": threads,
            "python": platform.python_version(), **{name: version(name) for name in ("torch", "numpy", "tokenizers")},
            **commit()}


def version(package: str) -> str:
    """Of an installed package, without loading it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def commit() -> dict[str, Any]:
    """The commit of this code, None where there is no git or no repository, and whether anything differs from it."""
    return {"git": git("rev-parse", "HEAD") or None, "git_dirty": bool(git("status", "--porcelain"))}


def git(*arguments: str) -> str:
    """What git says; nothing where there is no git, or no history, as in an image."""
    try:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False,
                              timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""
