"""What it costs to keep nodes at several sites in step, computed before the first one. Standard library only.

    every step    compute, then all-reduce the gradients between the sites: 2 (S - 1) / S of their bytes leave each
                  of S sites in a ring, over a link that is slow beside a node's own

Nothing overlaps here and links are as fast as they say, so the truth is somewhere between this and, on a link that
loses packets, much worse. What is said is marked as computed.
"""

import importlib.util
import logging
import os
from typing import Any

from hardware.flops import peak_tflops
from hardware.model_size import flops_of, parameters
from settings.config import Config
from train.distributed.registry import named, settings_of

ROUND_TRIP_S = 0.03  # between universities of one continent: 10 to 50 ms
SPEEDS = (1.0, 10.0)  # Gbit/s between two sites: what is got as a rule, and what is hoped for
MFU = 0.5  # what a tuned step reaches inside one node


def sync_s(
    gradient_bytes: float, sites: int, gbit_per_s: float, round_trip_s: float = ROUND_TRIP_S
) -> float:
    """Seconds that a ring all-reduce between sites takes: 2 (S - 1) hops, each of 1/S of the bytes."""
    hops = 2 * (sites - 1)
    return hops * (gradient_bytes / sites * 8 / (gbit_per_s * 1e9) + round_trip_s / 2)


def sync_efficiency(
    step_s: float,
    gradient_bytes: float,
    sites: int,
    gbit_per_s: float,
    round_trip_s: float = ROUND_TRIP_S,
) -> float:
    """The share of time spent computing, 0 to 1, when every step of step_s is followed by such an all-reduce."""
    return step_s / (step_s + sync_s(gradient_bytes, sites, gbit_per_s, round_trip_s))


def gradient_bytes(c: Config) -> float:
    """Of a step: they are float32, whatever DTYPE is."""
    return 4.0 * parameters(c).total


def compute_s(c: Config, devices: int, device_name: str) -> float | None:
    """Seconds that a step computes on so many devices, computed, or None where their peak is not known."""
    peak = peak_tflops(device_name, c.dtype)
    if peak is None:
        return None
    flops = flops_of(c)
    return c.batch_tokens * flops / (devices * peak * 1e12 * MFU)


def sentence(c: Config, sites: int, devices: int, device_name: str) -> str:
    """What nodes at so many sites are in for, with all their devices together, and what to do about it."""
    size, step_s = gradient_bytes(c), compute_s(c, devices, device_name)
    waits = [sync_s(size, sites, speed) for speed in SPEEDS]
    slow, fast = (f"{speed:g} Gbit/s" for speed in SPEEDS)
    said = (
        f"in every step {amount(2 * (sites - 1) / sites * size)} of gradients leave each of {sites} sites; "
        f"computed, that takes {seconds(waits[0])} at {slow} and {seconds(waits[1])} at {fast}"
    )
    if step_s is None:
        said += f", beside computing, whose time is not known for {device_name or 'these devices'}"
    else:
        shares = [f"{100 * sync_efficiency(step_s, size, sites, speed):.0f}%" for speed in SPEEDS]
        said += (
            f", beside {seconds(step_s)} of computing ({devices} {device_name.removeprefix('NVIDIA ')} at "
            f"{100 * MFU:.0f}% MFU): {shares[0]} or {shares[1]} of the time is spent computing, "
            "the rest waiting, while the GPUs show 100% utilisation"
        )
    return (
        said
        + ". make restart SITE=ZONE keeps all pods at one site (make sites lists them); SYNC=diloco "
        "synchronizes them every SYNC_EVERY steps only: make plan says what that takes, and costs in loss"
    )


def amount(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def may_be_at_sites() -> bool:
    """Return whether this is a pod of several that nothing keeps at one site: they may talk over a WAN."""
    return os.environ.get("POD_NETWORK") == "wan"  # k8s/cluster/job_spec.py sets it


def whereabouts(c: Config, members: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """(level of logging, line): which node is where, and a warning where that is at several sites.

    members: the facts of each node, as rendezvous.py gathers them.
    """
    lines = [
        (
            logging.INFO,
            f"{named(node)}: site={node.get('site') or 'unknown'} "
            f"machine={node.get('machine') or 'unknown'} processes={settings_of(node).get('NPROC', 'n/a')} "
            f"device={node.get('device') or 'n/a'}",
        )
        for node in members
    ]
    sites = sorted({str(node.get("site") or "") for node in members} - {""})
    unknown = [str(node["node_rank"]) for node in members if not node.get("site")]
    devices = sum(int(settings_of(node).get("NPROC", 1)) for node in members)
    device = str(members[0].get("device") or "")
    if len(sites) > 1:
        others = f" (that of node {', '.join(unknown)} is not known)" if unknown else ""
        cost = sentence(c, len(sites), devices, device)
        return [
            *lines,
            (
                logging.WARNING,
                f"the nodes are at {len(sites)} sites: {', '.join(sites)}{others}; {cost}",
            ),
        ]
    if (
        unknown and may_be_at_sites()
    ):  # pods that nothing keeps together, of a cluster that does not tell them
        return [
            *lines,
            (
                logging.WARNING,
                "the nodes do not know their sites (make status does); if each is at one of "
                f"its own: {sentence(c, len(members), devices, device)}",
            ),
        ]
    return [*lines, (logging.INFO, "sites: unknown" if unknown else f"one site: {sites[0]}")]


def find_site_problem(c: Config) -> str | None:
    """Say what this machine lacks to train with SYNC=diloco, or return None."""
    if c.sync == "ddp":
        return None
    if importlib.util.find_spec("torchft") is None:
        return (
            "SYNC=diloco: The package torchft is not installed. It has wheels for Linux on x86_64 only: run "
            "make setup there, or set SYNC=ddp."
        )
    if not c.lighthouse:
        return (
            "SYNC=diloco: LIGHTHOUSE is not set. Start make lighthouse on a machine that all sites can reach, "
            "and set its address, for example LIGHTHOUSE=10.0.0.5:29510."
        )
    return None
