"""A file system with little room, for tests of full disks."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

needs_mount = pytest.mark.skipif(
    os.getuid() != 0 or shutil.which("mount") is None, reason="needs root to mount a small disk"
)


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a tmpfs of this size in a new folder. Skips the test where nobody may mount."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("root may not mount here, as in most containers")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)
