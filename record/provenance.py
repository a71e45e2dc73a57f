"""Where a run comes from: machine, versions, commit. Read once at a start, kept beside its results. Standard library
only: the rendezvous of nodes compares versions before any of them loads torch."""

import contextlib
import importlib.metadata
import platform
import re
import shlex
import subprocess
import time
from pathlib import Path
from typing import Any

from settings import ROOT
from settings.resolve import build_environment

BOOT = Path("/proc/sys/kernel/random/boot_id")
# Variables that name another repository, as they are set while a hook of one runs.
OTHER_REPOSITORY = {"GIT_DIR", "GIT_WORK_TREE", "GIT_INDEX_FILE"}


def provenance(host: str, world_size: int, device: str, threads: int) -> dict[str, Any]:
    """Where and with what an attempt runs."""
    return {
        "time": time.time(),
        "host": host,
        "world_size": world_size,
        "device": device,
        "threads": threads,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "numpy", "tokenizers")},
        **commit(),
        "boot_id": boot_id(),
    }


def boot_id() -> str | None:
    """Return the id of this boot. Monotonic clocks can be compared within a boot, also between pods of a machine."""
    try:
        return BOOT.read_text().strip() or None
    except OSError:
        return None


def version(package: str) -> str:
    """Return the version of an installed package without loading it."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def commit() -> dict[str, Any]:
    """The commit of this code, and whether anything differs from it; None where neither git nor an image tells."""
    if head := git("rev-parse", "HEAD"):
        return {"git": head, "git_dirty": bool(git("status", "--porcelain"))}
    # The build of an image noted its commit, with `-dirty` if files differed.
    with contextlib.suppress(OSError, UnicodeDecodeError):
        noted = (ROOT / "REVISION").read_text()
        if built := re.fullmatch(r"([0-9a-f]{40,64})(-dirty)?\n?", noted):
            return {"git": built[1], "git_dirty": built[2] is not None}
    return {"git": None, "git_dirty": False}


def git(*arguments: str) -> str:
    """What git says; nothing where there is no git, or no history, as in an image."""
    try:
        return run_git(*arguments, timeout=20).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


def run_git(*arguments: str, timeout: float | None = None) -> subprocess.CompletedProcess[str]:
    """Run git on this repository, and on no other that the environment names or that lies around it."""
    around = {"GIT_CEILING_DIRECTORIES": str(ROOT.parent)}
    return subprocess.run(
        ["git", *arguments],
        cwd=ROOT,
        env=build_environment(around, without=OTHER_REPOSITORY),
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout,
    )


def explain_missing_commit() -> str:
    """Say why git names no commit of this code, and what to do."""
    try:
        message = run_git("rev-parse", "--verify", "HEAD", timeout=20).stderr
    except FileNotFoundError:
        return "git is not installed. Install it"
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"git failed: {error}"
    if "safe.directory" in message:
        command = f"git config --global --add safe.directory {shlex.quote(str(ROOT))}"
        return f"git does not read a checkout that another user owns. Run `{command}`"
    return f"git says: {message.partition(chr(10))[0]}. Use a git clone"
