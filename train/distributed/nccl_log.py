"""What NCCL logs about itself: which transports carry traffic within a node and between nodes. Standard library only.

    logs/nccl_node_N.HOST.PID   NCCL's own words (INIT, ENV, NET and GRAPH), one file per process (train/tune.py)

The lines look like this in NCCL 2.18 to 2.31. Lines that are not understood are passed over.

    pod-1:57:130 [0] NCCL INFO NET/Socket : Using [0]eth0:10.1.2.3<0>
    pod-1:57:130 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[1] via P2P/CUMEM             the sender says it
    pod-1:57:130 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [receive] via NET/Socket/0

What NCCL calls NET crosses the network; all else stays within a node.
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

VERSION = re.compile(r"NCCL version (\d[\w.]*)")
USING = re.compile(r"NCCL INFO NET/(IB|Socket) ?: Using ([^;]*)")
DEVICE = re.compile(r"\[\d+\]([^\s<:]+)")
CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : .+ via (.+?)(?: comm 0x.*)?$")


@dataclass
class NodeLog:
    """What the processes of one node say. A transport is P2P/CUMEM, SHM, NET/Socket, NET/IB with GPUDirect RDMA ..."""

    version: str = "n/a"
    devices: dict[str, list[str]] = field(default_factory=dict)  # "IB" or "Socket" -> names
    within: Counter[str] = field(default_factory=Counter)  # transport -> connections
    between: Counter[str] = field(default_factory=Counter)

    def line(self) -> str:
        """Return 'NCCL 2.27.5: within the node P2P/CUMEM; between nodes NET/Socket on eth0'."""
        parts = []
        if self.within:
            parts.append(f"within the node {name_all(self.within)}")
        if self.between:
            kind = "Socket" if "NET/Socket" in self.between else "IB"
            names = ", ".join(self.devices.get(kind, ())) or "n/a"
            parts.append(f"between nodes {name_all(self.between)} on {names}")
        return f"NCCL {self.version}: {'; '.join(parts) or 'transport n/a'}"


def parse(logs: Iterable[str]) -> NodeLog:
    """Read the logs of all processes of a node. Whatever is in them, nothing is raised."""
    node = NodeLog()
    for log in logs:
        for line in log.splitlines():
            if match := VERSION.search(line):
                node.version = match[1]
            elif match := USING.search(line):
                node.devices[match[1]] = DEVICE.findall(match[2])
            elif match := CHANNEL.search(line):
                transport = transport_of(match[1])
                side = node.between if transport.startswith("NET") else node.within
                side[transport] += 1
    return node


def transport_of(via: str) -> str:
    """Return the transport without the device's number and the like."""
    if via.startswith("SHM"):
        return "SHM"
    suffix = " with GPUDirect RDMA" if "GDRDMA" in via else ""
    return "/".join(via.split("/")[:2]) + suffix


def name_all(transports: Counter[str]) -> str:
    """Return the transports, the most used first."""
    return " and ".join(name for name, _ in transports.most_common())


def read(folder: Path, node_rank: int, pids: Iterable[int]) -> list[str]:
    """Return the logs of these processes of a node, of those that wrote one. Raises OSError."""
    paths = [path for pid in pids for path in folder.glob(f"nccl_node_{node_rank}.*.{pid}")]
    return [path.read_text(encoding="utf-8", errors="replace") for path in paths]
