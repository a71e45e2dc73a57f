"""Which way the processes talk, said once before the first step, and what a step then waits for.

    NCCL 2.27.5: within the node P2P/CUMEM; between nodes NET/Socket on eth0 (10 Gbit/s); network Socket
    between nodes: each sends 177 MB of gradients (adapters) a step; 0.14 s at 10 Gbit/s (computed)

NCCL has said it in logs/nccl_node_N.* (nccl_log.py), gloo takes one interface. What a step sends follows from how the
weights lie: of an all-reduce between n copies 2 (n - 1) / n of the gradients leave each node, and of weights that are
split over n nodes (n - 1) / n come to each whenever they are gathered: a block's twice a micro-batch, forward and
backward. Nothing is taken to overlap and a link to be as fast as it says, so it is an order of magnitude. Whatever is
wrong in here, the run is whole without it.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from record.run_paths import RunPaths
from settings.config import Config
from train.distributed import nccl_log, parallel
from train.distributed.nccl_log import Node
from train.distributed.wan import amount, may_be_at_sites, seconds
from train.distributed.world import World, from_all, gloo_interface

if TYPE_CHECKING:
    from train.job import Job

NET = Path("/sys/class/net")
SUPPOSED = (10.0, 100.0)  # Gbit/s, where a link does not say what it has
LONG_S = 1.0  # of gathering weights a step: then it is said how to do without

log = logging.getLogger(__name__)


class Traffic(NamedTuple):
    """Bytes that each node sends to others in a step, and receives. gathered: weights; gradients: all the rest."""

    gathered: float
    gradients: float

    def seconds(self, gbit: float) -> float:
        return sum(self) * 8 / (gbit * 1e9)


def say(job: "Job") -> None:
    """Say on the first process of each node which way it takes, and where it is a slow one; on the first of all what a
    step sends, too. All processes call it, when gradients have met for the first time."""
    c, world = job.config, job.world
    if world.size == 1:
        return
    members = from_all((world.node_rank, os.getpid()))
    if world.local_rank:
        return
    level = (
        logging.INFO if world.is_first else logging.WARNING
    )  # other ranks' words are for their node's log
    name = "NCCL" if world.device.type == "cuda" else "gloo"
    try:
        pids = [pid for node, pid in members if node == world.node_rank]
        gbit = (
            of_nccl(job.paths, world, pids, level, wan=may_be_at_sites())
            if name == "NCCL"
            else of_gloo(world, level)
        )
        if world.is_first and world.nodes > 1:
            expect(
                c, world, traffic(c, world, parallel.bare(job.model), job.loader.micro_batch), gbit
            )
    except Exception as error:  # the run is whole without it
        log.log(level, "%s's transport: n/a (%s: %s)", name, type(error).__name__, error)


def of_nccl(paths: RunPaths, world: World, pids: list[int], level: int, wan: bool) -> float | None:
    """Returns Gbit/s to other nodes, None where that is not known. wan: nodes are meant to talk over a WAN."""
    logs = nccl_log.read(paths.node_log(0).parent, world.node_rank, pids)
    if not logs:
        log.log(
            level, "NCCL's transport: n/a, it has written nothing to %s", paths.node_log(0).parent
        )
        return None
    node = Node(logs, world.local_size, world.nodes)
    log.log(level, "%s", node.line())
    for warning in node.warnings(peer_access(world), nccl_log.ib_devices(nccl_log.FOLDER), wan):
        log.warning("NCCL: %s", warning)
    return node.gbit


def of_gloo(world: World, level: int) -> float | None:
    """The same of gloo, which has one interface and within a node goes over TCP too."""
    if world.nodes == 1:
        return None
    name, address = gloo_interface()
    gbit = speed_of(name)
    log.log(
        level,
        "gloo: TCP on %s (%s, %s); GLOO_SOCKET_IFNAME names another",
        name,
        address,
        f"{gbit:g} Gbit/s" if gbit else "speed n/a",
    )
    return gbit


def speed_of(interface: str) -> float | None:
    """Gbit/s, None where the system does not say it, as of loopback and of most virtual ones."""
    try:
        megabits = int((NET / interface / "speed").read_text())
    except (OSError, ValueError):
        return None
    return megabits / 1000 if megabits > 0 else None


def peer_access(world: World) -> bool | None:
    """Whether all GPUs of this node reach each other's memory; None where that is not known."""
    try:
        return all(
            torch.cuda.can_device_access_peer(one, other)
            for one in range(world.local_size)
            for other in range(world.local_size)
            if one != other
        )
    except (RuntimeError, AssertionError):
        return None


def traffic(c: Config, world: World, model: Any, micro_batch: int) -> Traffic:
    """Of a model without DDP's wrapper; micro_batch: windows of a process in one pass."""
    ranks = parallel.shard_ranks(c, world)
    span = max(1, ranks // world.local_size)  # nodes that one copy of the weights lies on
    copies = world.nodes // span
    passes = -(-c.batch_windows // (world.size * c.replicas * micro_batch))
    gradients = 4.0 * sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    blocks, everything = (
        float(sum(weight.numel() for weight in part.parameters())) for part in (model.layers, model)
    )
    apart = (span - 1) / span  # of what is split over nodes, that which another has
    gathered = (
        passes * (blocks + everything) * getattr(torch, c.dtype).itemsize * apart
    )  # what is round blocks: once
    scattered = gradients * apart * (passes if c.grad_sync == "micro-batch" else 1)
    return Traffic(gathered, scattered + 2 * (copies - 1) / copies * gradients / span)


def expect(c: Config, world: World, sent: Traffic, gbit: float | None) -> None:
    """Say what a step sends, how long that takes, and what would be less."""
    gradients = f"{told(sent.gradients)} of gradients" + (" (adapters)" if c.lora_rank else "")
    gathered = f" and gathers {told(sent.gathered)} of weights" if sent.gathered else ""
    takes = (
        f"{seconds(sent.seconds(gbit))} at {gbit:g} Gbit/s"
        if gbit
        else "the link's speed is n/a; "
        + ", ".join(f"{seconds(sent.seconds(speed))} at {speed:g} Gbit/s" for speed in SUPPOSED)
    )
    log.info("between nodes: each sends %s%s a step; %s (computed)", gradients, gathered, takes)
    if sent.gathered * 8 / ((gbit or SUPPOSED[-1]) * 1e9) > LONG_S:
        log.warning(
            "PARALLEL=%s gathers the weights of each block from %d nodes; PARALLEL=hsdp%s keeps a copy in each "
            "node, where its memory suffices, and only gradients travel",
            c.parallel,
            world.nodes,
            f" with SHARD_RANKS={world.local_size}" if c.shard_ranks else "",
        )


def told(size: float) -> str:
    """'177.1 MB'"""
    return amount(size) if size >= 1e5 else f"{size / 1e3:.1f} kB"
