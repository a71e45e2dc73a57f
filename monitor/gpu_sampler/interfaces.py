"""Bytes that each network interface has received and sent: /proc/net/dev, and InfiniBand's ports, which are not in it.

Without a driver for IP over it, what NCCL sends by RDMA goes past the kernel; an adapter counts it in
/sys/class/infiniband/NAME/ports/N/counters, in words of 4 bytes.
"""

from pathlib import Path

# The loopback, and the ends of containers' links, which come and go and count the same bytes again.
LEFT_OUT = ("lo", "veth")
WORD_BYTES = 4


class Network:
    """Bytes per second since the last look. The interfaces are those that there were at first."""

    def __init__(
        self, proc: Path = Path("/proc/net/dev"), infiniband: Path = Path("/sys/class/infiniband")
    ):
        self.proc, self.infiniband = proc, infiniband
        self.last: dict[str, tuple[int, int]] = {}
        self.looked = 0.0
        self.names = sorted(self.totals())

    @property
    def columns(self) -> list[str]:
        return [f"net_{name}_{way}_bytes_per_s" for name in self.names for way in ("in", "out")]

    def totals(self) -> dict[str, tuple[int, int]]:
        """Interface -> bytes in and out since it came up. {} where the system does not say."""
        found: dict[str, tuple[int, int]] = {}
        try:
            lines = self.proc.read_text().splitlines()[2:]
        except OSError:
            lines = []
        for line in lines:
            name, _, numbers = line.partition(":")
            fields = (
                numbers.split()
            )  # bytes packets errs drop fifo frame compressed multicast, and the same sent
            if not name.strip().startswith(LEFT_OUT) and len(fields) >= 9:
                found[name.strip()] = (int(fields[0]), int(fields[8]))
        for port in sorted(self.infiniband.glob("*/ports/*/counters")):
            try:
                received, sent = (
                    WORD_BYTES * int((port / name).read_text())
                    for name in ("port_rcv_data", "port_xmit_data")
                )
            except (OSError, ValueError):
                continue
            found[f"{port.parent.parent.parent.name}:{port.parent.name}"] = (received, sent)
        return found

    def cells(self, now: float) -> list[str]:
        """Two for each interface; empty at the first look, and where a counter is gone or began anew."""
        totals, seconds, cells = self.totals(), now - self.looked, []
        for name in self.names:
            before, after = self.last.get(name), totals.get(name)
            for way in (0, 1):
                moved = after[way] - before[way] if before and after else -1
                cells.append(f"{moved / seconds:.0f}" if moved >= 0 and seconds > 0 else "")
        self.last, self.looked = totals, now
        return cells
