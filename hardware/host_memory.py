"""Memory of this machine and of the container, as the kernel tells it: control groups of version 1 and 2."""

import dataclasses
import os
from pathlib import Path


@dataclasses.dataclass(frozen=True)
class Memory:
    """In bytes. total: of the machine; available: for new processes, without swapping; limit: of the container, None
    where there is none, and what of it is free."""

    total: float
    available: float
    limit: float | None = None
    limit_free: float | None = None

    @property
    def free(self) -> float:
        return self.available if self.limit_free is None else min(self.available, self.limit_free)

    @property
    def most(self) -> float:
        """What could be free at all."""
        return self.total if self.limit is None else min(self.total, self.limit)


def memory_here(root: Path = Path("/")) -> Memory:
    """By /proc and the control groups that this process is in. root: where to look, for tests."""
    total = available = float(
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    )  # on macOS all there is
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        sizes_kb = {
            line.split(":")[0]: float(line.split()[1]) for line in lines if len(line.split()) > 1
        }
        available = 1024 * sizes_kb["MemAvailable"]
    except (OSError, KeyError, ValueError):
        pass
    limits = [found for folder, names in groups(root) if (found := group_limit(folder, names))]
    limit, free = min(limits, key=lambda found: found[1], default=(None, None))
    return Memory(total, available, limit, free)


# Of a version of control groups: the files of its limit and use, and in memory.stat what can be given back at once.
GROUPS_V2 = ("memory.max", "memory.current", "inactive_file")
GROUPS_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def groups(root: Path) -> list[tuple[Path, tuple[str, str, str]]]:
    """The folders of the groups that this process is in, and of those above them. Within a container the paths of
    /proc/self/cgroup may be the host's, and its own group be the root of what it sees."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root / "sys/fs/cgroup", GROUPS_V2
        elif "memory" in controllers.split(","):
            base, names = root / "sys/fs/cgroup/memory", GROUPS_V1
        else:
            continue
        here = base / path.strip("/")
        found += [
            (folder, names) for folder in (here, *here.parents) if folder.is_relative_to(base)
        ]
    return found


def group_limit(folder: Path, names: tuple[str, str, str]) -> tuple[float, float] | None:
    """(limit, what of it is free) of a control group; None where it has no limit."""
    limit_file, used_file, given_back = names
    try:
        limit, used = (
            float((folder / limit_file).read_text()),
            float((folder / used_file).read_text()),
        )
    except (OSError, ValueError):  # "max" is no number
        return None
    if limit >= 2.0**60:  # version 1 says so that there is none
        return None
    try:
        stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        used -= float(stat.get(given_back, 0))
    except (OSError, ValueError):
        pass
    return limit, limit - used
