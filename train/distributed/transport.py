"""Which transport NCCL took, in one line before the first step, and a warning where a faster one is there.

    NCCL 2.27.5: within the node P2P/CUMEM; between nodes NET/Socket on eth0

What a step then sends, and how long that takes, is computed by `make plan`. NCCL itself says what it
does (INIT, ENV, NET and GRAPH), each process in a file of its own (train/tune.py):

    logs/nccl_node_N.HOST.PID
    pod-1:57:130 [0] NCCL INFO NET/Socket : Using [0]eth0:10.1.2.3<0>
    pod-1:57:130 [0] NCCL INFO Channel 00/0 : 2[0] -> 3[1] via P2P/CUMEM             the sender says it
    pod-1:57:130 [0] NCCL INFO Channel 00/0 : 1[1] -> 2[0] [receive] via NET/Socket/0

The lines look like this in NCCL 2.18 to 2.31. Lines that are not understood are passed over. What
NCCL calls NET crosses the network; all else stays within a node.
"""

import itertools
import logging
import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from train.distributed.world import World, all_gather_object

if TYPE_CHECKING:
    from train.job import Job

INFINIBAND = Path("/sys/class/infiniband")
VERSION = re.compile(r"NCCL version (\d[\w.]*)")
USING = re.compile(r"NCCL INFO NET/(IB|Socket) ?: Using ([^;]*)")
DEVICE = re.compile(r"\[\d+\]([^\s<:]+)")
CHANNEL = re.compile(r"Channel \d+(?:/\d+)? : .+ via (\w+)(/[^/]+?)?(/.*?)?(?: comm 0x.*)?$")

log = logging.getLogger(__name__)


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


def parse(lines: Iterable[str]) -> NodeLog:
    """Read what all processes of a node say. Whatever it is, nothing is raised."""
    node = NodeLog()
    for line in lines:
        if match := VERSION.search(line):
            node.version = match[1]
        elif match := USING.search(line):
            node.devices[match[1]] = DEVICE.findall(match[2])
        elif match := CHANNEL.search(line):
            transport = match[1]
            if transport != "SHM":
                transport += match[2] or ""
            if "GDRDMA" in (match[3] or ""):
                transport += " with GPUDirect RDMA"
            side = node.between if transport.startswith("NET") else node.within
            side[transport] += 1
    return node


def name_all(transports: Counter[str]) -> str:
    """Return the transports, the most used first."""
    return " and ".join(name for name, _ in transports.most_common())


def log_transport(job: "Job") -> None:
    """Log the transport on the first process of each node. All processes call it, once gradients have been reduced."""
    world = job.world
    if world.size == 1 or world.device.type != "cuda":
        return
    members = all_gather_object((world.node_rank, os.getpid()))
    if world.local_rank:
        return
    # other ranks log only warnings: this goes into the log of their node
    level = logging.INFO if world.is_first else logging.WARNING
    folder = job.paths.node_log(0).parent
    lines: list[str] = []
    try:
        for node_rank, pid in members:
            if node_rank == world.node_rank:
                for path in folder.glob(f"nccl_node_{node_rank}.*.{pid}"):
                    lines += path.read_text(errors="replace").splitlines()
        node = parse(lines)
        log.log(level, "%s", node.line())
        for warning in list_warnings(node, world):
            log.warning("NCCL: %s", warning)
    except (OSError, RuntimeError) as error:  # of a disk or of CUDA: the run does not need this
        log.log(level, "NCCL's transport: n/a (%s)", error)


def list_warnings(node: NodeLog, world: World) -> list[str]:
    """Say where a faster transport is there. Raises RuntimeError."""
    warnings = []
    gpus = itertools.permutations(range(world.local_size), 2)
    if "SHM" in node.within and all(itertools.starmap(torch.cuda.can_device_access_peer, gpus)):
        warnings.append(
            "the GPUs of this node exchange data through shared memory of the host, though they can reach each other "
            "directly (P2P), which is faster. Unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL if they are set; "
            "`nvidia-smi topo -p2p r` shows the connections."
        )
    devices = list_active_devices()
    # A pod of several that nothing keeps at one site may talk over a WAN (k8s/cluster/job_spec.py).
    is_at_sites = os.environ.get("POD_NETWORK") == "wan"
    if "NET/Socket" in node.between and devices and not is_at_sites:
        warnings.append(
            f"nodes exchange data over TCP sockets, though this machine has {', '.join(devices)} (InfiniBand or RoCE), "
            "which is faster inside a site. Unset NCCL_IB_DISABLE and NCCL_NET if they are set. A container needs "
            "/dev/infiniband, libibverbs and unlimited locked memory (`ulimit -l`); `ibv_devinfo` lists what it can use."
        )
    return warnings


def list_active_devices() -> list[str]:
    """Return this machine's InfiniBand and RoCE devices with an active port."""
    states = sorted(INFINIBAND.glob("*/ports/*/state"))
    names = [state.parts[-4] for state in states if "ACTIVE" in state.read_text()]
    return list(dict.fromkeys(names))
