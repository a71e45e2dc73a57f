"""Packages that only some tests need: installed apart from .venv, once for all tests of this machine."""

import fcntl
import hashlib
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path

import pytest


def install_apart(name: str, pins: Collection[str], prepare: Callable[[Path], list]) -> Path:
    """Return a folder in the system's temporary folder that has these packages, without what they depend on.

    Skips the test where there is no package index.

    Args:
        prepare: makes what must be there first, and returns the options of `uv pip install` that say where to.
    """
    pins = sorted(pins)
    key = repr((pins, sysconfig.get_path("purelib"), sys.version))
    digest = hashlib.sha256(key.encode()).hexdigest()[:12]
    folder = Path(tempfile.gettempdir()) / f"{name}-{digest}"
    with open(f"{folder}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "complete").exists():
            uv = Path(sys.executable).with_name("uv")
            command = [uv, "pip", "install", "--quiet", "--no-deps", *prepare(folder), *pins]
            if subprocess.run(command, check=False).returncode:
                pytest.skip(f"no package index: {', '.join(pins)} cannot be installed")
            (folder / "complete").touch()
    return folder
