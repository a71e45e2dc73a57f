"""What it costs to keep nodes at several sites in step, computed before the first one. Standard library only.

    every step    compute, then all-reduce the gradients between the sites: 2 (S - 1) / S of their bytes leave each
                  of S sites in a ring, over a link that is slow beside a node's own

Nothing overlaps here and links are as fast as they say, so the truth is somewhere between this and, on a link that
loses packets, much worse. What is said is marked as computed.
"""

import importlib.util
import os

from hardware.model_size import parameters
from settings.config import Config

ROUND_TRIP_S = 0.03  # between universities of one continent: 10 to 50 ms
SPEEDS = (1.0, 10.0)  # Gbit/s between two sites: what is got as a rule, and what is hoped for


def sync_s(
    gradient_bytes: float, sites: int, gbit_per_s: float, round_trip_s: float = ROUND_TRIP_S
) -> float:
    """Seconds that a ring all-reduce between sites takes: 2 (S - 1) hops, each of 1/S of the bytes."""
    hops = 2 * (sites - 1)
    return hops * (gradient_bytes / sites * 8 / (gbit_per_s * 1e9) + round_trip_s / 2)


def sync_efficiency(step_s: float, gradient_bytes: float, sites: int, gbit_per_s: float) -> float:
    """The share of time spent computing, 0 to 1, when every step of step_s is followed by such an all-reduce."""
    return step_s / (step_s + sync_s(gradient_bytes, sites, gbit_per_s))


def gradient_bytes(c: Config) -> float:
    """Of a step: they are float32, whatever DTYPE is."""
    return 4.0 * parameters(c).total


def amount(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def seconds(value: float) -> str:
    return f"{value:.0f} s" if value >= 10 else f"{value:.2g} s"


def may_be_at_sites() -> bool:
    """Return whether this is a pod of several that nothing keeps at one site: they may talk over a WAN."""
    return os.environ.get("POD_NETWORK") == "wan"  # k8s/cluster/job_spec.py sets it


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
