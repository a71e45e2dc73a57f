"""What it costs to keep sites in step where every step ends with an all-reduce of the gradients between them.

In a ring of S sites 2 (S - 1) / S of the gradients' bytes leave each of them, over a link that is slow beside a node's
own. Nothing overlaps here and links are as fast as they say, so the truth is somewhere between this and, on a link
that loses packets, much worse. What is said is marked as computed.
"""

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
