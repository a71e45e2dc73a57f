"""How much memory a process may still take. Linux says it; None elsewhere."""

import resource
from pathlib import Path

GROUPS = (
    ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
    ("/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes"),
)
SPARE = 0.9  # for others, which go on


def free_bytes() -> int | None:
    """What all processes together may still take: of the machine, and of the control group that a pod is."""
    found = [line_of("/proc/meminfo", "MemAvailable:")]
    for most, used in GROUPS:
        try:
            found.append(int(Path(most).read_text()) - int(Path(used).read_text()))
        except (OSError, ValueError):  # "max": no limit
            continue
    known = [size for size in found if size is not None]
    return max(0, min(known)) if known else None


def line_of(path: str, name: str) -> int | None:
    """Bytes of a line such as 'MemAvailable:  1024 kB'."""
    try:
        lines = Path(path).read_text().splitlines()
        return next(1024 * int(line.split()[1]) for line in lines if line.startswith(name))
    except (OSError, StopIteration, ValueError):
        return None


def keep_within(share: float) -> None:
    """Have allocations fail that need more than a share of what is free, before the system ends processes for it."""
    free, held = free_bytes(), line_of("/proc/self/status", "VmData:")
    if free is not None and held is not None:
        most, hard = held + int(SPARE * share * free), resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(
            resource.RLIMIT_DATA,
            (most if hard == resource.RLIM_INFINITY else min(most, hard), hard),
        )
