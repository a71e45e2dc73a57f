"""Which transport NCCL took, in one line before the first step, and a warning where a faster one is there.

    NCCL 2.27.5: within the node P2P/CUMEM; between nodes NET/Socket on eth0

What a step then sends, and how long that takes, is computed by `make plan`.
"""

import itertools
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from train.distributed import nccl_log
from train.distributed.nccl_log import NodeLog
from train.distributed.wan import may_be_at_sites
from train.distributed.world import World, from_all

if TYPE_CHECKING:
    from train.job import Job

INFINIBAND = Path("/sys/class/infiniband")

log = logging.getLogger(__name__)


def say(job: "Job") -> None:
    """Log the transport on the first process of each node. All processes call it, once gradients have been reduced."""
    world = job.world
    if world.size == 1 or world.device.type != "cuda":
        return
    members = from_all((world.node_rank, os.getpid()))
    if world.local_rank:
        return
    pids = [pid for node_rank, pid in members if node_rank == world.node_rank]
    folder = job.paths.node_log(0).parent
    # other ranks log only warnings: this goes into the log of their node
    level = logging.INFO if world.is_first else logging.WARNING
    try:
        node = nccl_log.parse(nccl_log.read(folder, world.node_rank, pids))
        log.log(level, "%s", node.line())
        for warning in warnings(node, world):
            log.warning("NCCL: %s", warning)
    except (OSError, RuntimeError) as error:  # of a disk or of CUDA: the run does not need this
        log.log(level, "NCCL's transport: n/a (%s)", error)


def warnings(node: NodeLog, world: World) -> list[str]:
    """Say where a faster transport is there. Raises RuntimeError."""
    found = []
    if "SHM" in node.within and gpus_reach_each_other(world.local_size):
        found.append(
            "the GPUs of this node exchange data through shared memory of the host, though they can reach each other "
            "directly (P2P), which is faster. Unset NCCL_P2P_DISABLE and NCCL_P2P_LEVEL if they are set; "
            "`nvidia-smi topo -p2p r` shows the connections."
        )
    devices = active_devices()
    if "NET/Socket" in node.between and devices and not may_be_at_sites():
        found.append(
            f"nodes exchange data over TCP sockets, though this machine has {', '.join(devices)} (InfiniBand or RoCE), "
            "which is faster inside a site. Unset NCCL_IB_DISABLE and NCCL_NET if they are set. A container needs "
            "/dev/infiniband, libibverbs and unlimited locked memory (`ulimit -l`); `ibv_devinfo` lists what it can use."
        )
    return found


def gpus_reach_each_other(gpus: int) -> bool:
    """Return whether all GPUs of this machine can read each other's memory."""
    return all(
        torch.cuda.can_device_access_peer(one, other)
        for one, other in itertools.permutations(range(gpus), 2)
    )


def active_devices() -> list[str]:
    """Return this machine's InfiniBand and RoCE devices with an active port."""
    states = sorted(INFINIBAND.glob("*/ports/*/state"))
    names = [state.parts[-4] for state in states if "ACTIVE" in state.read_text()]
    return list(dict.fromkeys(names))
