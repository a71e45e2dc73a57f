"""How busy other processes kept this machine while ours were measured. From /proc; None where there is none."""

import os
from pathlib import Path
from typing import Any

TICKS = os.sysconf("SC_CLK_TCK")


def busy_s() -> float | None:
    """Processor seconds that all processes took since the machine started."""
    try:
        fields = [int(word) for word in Path("/proc/stat").read_text().split("\n")[0].split()[1:9]]
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = (
        fields  # a steal is a neighbour on the same host
    )
    return (user + nice + system + irq + softirq + steal) / TICKS


def used_s(pid: int) -> float:
    """Processor seconds of one process and of those of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(word) for word in fields[11:15]) / TICKS


class Foreign:
    """Share of this machine's processors that went to others than `pids` and this process, since it was made."""

    def __init__(self, pids: list[int], wall_s: float):
        self.pids, self.began = [*pids, os.getpid()], wall_s
        self.busy = busy_s()
        self.own = self.used() if self.busy is not None else 0.0

    def used(self) -> float:
        return sum(used_s(pid) for pid in self.pids)

    def percent(self, wall_s: float) -> float | None:
        now = busy_s()
        if now is None or self.busy is None:
            return None
        others = (now - self.busy) - (self.used() - self.own)
        return max(0.0, 100.0 * others / ((wall_s - self.began) * (os.cpu_count() or 1)))


def worst(rounds: list[dict[str, Any]]) -> str:
    """The most of the foreign_percent of these rounds, as a cell of a table."""
    known = [taken["foreign_percent"] for taken in rounds if taken["foreign_percent"] is not None]
    return f"{max(known):.0f}" if known else "n/a"
