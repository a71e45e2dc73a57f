"""Memory of this machine and of its container, from /proc and the control groups, version 2."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Memory:
    """Memory in bytes.

    Attributes:
        total: of the machine.
        available: for new processes, without swapping.
        limit: of the container; without one, the total.
        limit_free: how much of the limit is free.
    """

    total: float
    available: float
    limit: float
    limit_free: float

    @property
    def free(self) -> float:
        return min(self.available, self.limit_free)

    @property
    def most(self) -> float:
        """Return what could be free at all."""
        return min(self.total, self.limit)


def read_memory(root: Path = Path("/")) -> Memory:
    """Return the memory of this machine and of the strictest control group of this process."""
    page = os.sysconf("SC_PAGE_SIZE")
    total = float(page * os.sysconf("SC_PHYS_PAGES"))
    # macOS has no /proc.
    available = 1024 * read_table(root / "proc/meminfo").get("MemAvailable:", total / 1024)
    free, limit = min(list_limits(root), default=(available, total))
    return Memory(total, available, limit, free)


def list_limits(root: Path) -> list[tuple[float, float]]:
    """Return (free, limit) of each group of this process, and of those above, that has a limit.

    In a container, /proc/self/cgroup may name the host's path, while the container's own group is the root of what it
    sees.
    """
    base = root / "sys/fs/cgroup"
    try:
        text = (root / "proc/self/cgroup").read_text()
    except OSError:
        return []
    path = text.rpartition("0::/")[2].strip()
    group = base / path
    limits = []
    for folder in (group, *group.parents):
        if folder.is_relative_to(base):
            limits += read_limit(folder)
    return limits


def read_limit(folder: Path) -> list[tuple[float, float]]:
    """Return [(free, limit)] of a control group, or [] without a limit."""
    try:
        limit = float((folder / "memory.max").read_text())
        used = float((folder / "memory.current").read_text())
    except (OSError, ValueError):  # "max" is no number
        return []
    table = read_table(folder / "memory.stat")
    used -= table.get("inactive_file", 0.0)  # freed at once
    return [(limit - used, limit)]


def read_table(path: Path) -> dict[str, float]:
    """Return the numbers of a file of lines such as "NAME 123 kB"; {} if it cannot be read."""
    table = {}
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text().splitlines():
            name, number, *_ = line.split()
            table[name] = float(number)
    return table
