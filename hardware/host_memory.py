"""Memory of this machine and of its container, from /proc and the control groups (versions 1 and 2)."""

import contextlib
import os
from dataclasses import dataclass
from pathlib import Path

# Of each version of control groups: its folder, the files of the limit and of what is used, and the key of memory.stat
# for what the kernel can free at once.
VERSIONS = (
    ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    (
        "sys/fs/cgroup/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        "total_inactive_file",
    ),
)
NO_LIMIT = 2.0**60  # version 1 writes a larger number where there is none


@dataclass(frozen=True)
class Memory:
    """Memory in bytes.

    Attributes:
        total: of the machine.
        available: for new processes, without swapping.
        limit: of the container; None without one.
        limit_free: what is free of it.
    """

    total: float
    available: float
    limit: float | None = None
    limit_free: float | None = None

    @property
    def free(self) -> float:
        if self.limit_free is None:
            return self.available
        return min(self.available, self.limit_free)

    @property
    def most(self) -> float:
        """Return what could be free at all."""
        return min(self.total, self.limit or self.total)


def memory_here(root: Path = Path("/")) -> Memory:
    """Return the memory of this machine and of the strictest control group of this process."""
    total = float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    # macOS has no /proc.
    available = 1024 * read_table(root / "proc/meminfo").get("MemAvailable:", total / 1024)
    limits = list_limits(root)
    if not limits:
        return Memory(total, available)
    free, limit = min(limits)
    return Memory(total, available, limit, free)


def list_limits(root: Path) -> list[tuple[float, float]]:
    """Return what is free and the limit, of each group of this process and those above that have one.

    In a container, the paths in /proc/self/cgroup may be the host's, and its own group the root of what it sees.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    limits = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        for folder, *names in VERSIONS:
            base = root / folder
            group = base / path.strip("/")
            for parent in (group, *group.parents):
                if parent.is_relative_to(base):
                    limits += read_limit(parent, *names)
    return limits


def read_limit(
    folder: Path, limit_file: str, used_file: str, key: str
) -> list[tuple[float, float]]:
    """Return what is free of the limit of a control group, and the limit; [] without one."""
    try:
        limit = float((folder / limit_file).read_text())
        used = float((folder / used_file).read_text())
    except (OSError, ValueError):  # "max" is no number
        return []
    if limit >= NO_LIMIT:
        return []
    used -= read_table(folder / "memory.stat").get(key, 0.0)
    return [(limit - used, limit)]


def read_table(path: Path) -> dict[str, float]:
    """Return the numbers of a file of lines like "NAME 123 kB", or {} where it cannot be read."""
    table = {}
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in path.read_text().splitlines():
            words = line.split()
            table[words[0]] = float(words[1])
    return table
