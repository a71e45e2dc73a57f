"""SYNC=diloco in figures: what sites exchange, how long that takes, and what of it training waits for. Computed.

    every SYNC_EVERY steps       2 (S - 1) / S of all pseudo-gradients leave each of S sites, in SYNC_DTYPE: what a ring
                                 sends, but straight from each site to each other and back (train/diloco/allreduce.py),
                                 which takes a round trip; a process holds its part and sends no other
    with SYNC_FRAGMENTS=F        F times as often one of as many fragments, of blocks by turns; what is in no block goes
                                 with the smallest
    with SYNC_DELAY=D            training goes on for D steps meanwhile, and waits for what is left then

Inside a site processes stay together in every step, with PARALLEL as it is set; one process of a site sends nothing
there (traffic.py). What an outer step computes is small beside an inner one and is left out.
"""

import dataclasses
from typing import Any

from hardware.model_size import parameters
from settings.config import Config

OUTER_STEPS = (30, 100, 500)  # H, as published runs have it
MOST_DELAY = 5  # steps: what was published of overlapping (arXiv 2501.18512) advises no more
GOOD = 0.75  # of the time computing, from which on no longer interval is looked for
FRAGMENTS = 6  # at most, where nobody set them: each needs layers of its own
WIDTH = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Outer:
    """How often sites exchange, and in which pieces: SYNC_EVERY, SYNC_FRAGMENTS, SYNC_DELAY."""

    every: int
    fragments: int = 1
    delay: int = 0

    @property
    def streaming(self) -> bool:
        return self.fragments > 1 or self.delay > 0

    @property
    def name(self) -> str:
        """'DiLoCo, H=30', 'DiLoCo, H=30, streaming'"""
        return f"DiLoCo, H={self.every}" + (", streaming" if self.streaming else "")

    @property
    def settings(self) -> dict[str, Any]:
        """Field -> value, for Config."""
        return {
            "sync": "diloco",
            "sync_every": self.every,
            "sync_fragments": self.fragments,
            "sync_delay": self.delay,
        }


def outer_of(c: Config) -> Outer:
    """As it is set."""
    return Outer(c.sync_every, c.sync_fragments, c.sync_delay)


def of_a_site(c: Config, processes: int) -> int:
    """Of so many those that PARALLEL is about: under SYNC=diloco those of one site, else all."""
    return processes // c.replicas


def inner(c: Config, processes_of_a_site: int) -> dict[str, Any]:
    """What is changed so that each process of a site sends its part only: weights split over them, without Muon, which
    needs them whole. Nothing where a site has one process, or has them split already."""
    if processes_of_a_site == 1 or c.parallel == "fsdp":
        return {}
    return (
        {"parallel": "fsdp"}
        | ({"shard_ranks": None} if c.shard_ranks else {})
        | ({"optimizer": "adamw"} if c.optimizer == "muon" else {})
    )


def exchanged_bytes(c: Config) -> float:
    """Of all pseudo-gradients, in SYNC_DTYPE."""
    return WIDTH[c.sync_dtype] * float(parameters(c).total)


def fragments(c: Config, count: int) -> list[float]:
    """The share of all weights in each of so many, as train/diloco/outer_step.py makes them."""
    p = parameters(c)
    rest = p.embedding + p.head
    blocks = [
        len(range(at, c.n_layer, count)) * (p.total - rest) / c.n_layer for at in range(count)
    ]
    blocks[blocks.index(min(blocks))] += rest
    return [block / p.total for block in blocks]


def sent_s(c: Config, size: float, sites: int) -> float:
    """Seconds in which so many bytes of each site are added up over all: there, and the sums back."""
    return 2 * (sites - 1) / sites * size * 8 / (c.wan_gbit * 1e9) + c.wan_rtt_ms / 1000


def exchange_s(c: Config, outer: Outer, sites: int) -> float:
    """Seconds of one exchange between so many sites: of the largest fragment."""
    return sent_s(c, max(fragments(c, outer.fragments)) * exchanged_bytes(c), sites)


def stall_s(c: Config, outer: Outer, sites: int, step_s: float | None) -> float:
    """Seconds that training waits for exchanges in SYNC_EVERY steps; with no step's time known nothing hides."""
    hidden = outer.delay * (step_s or 0.0)
    return sum(
        max(0.0, sent_s(c, share * exchanged_bytes(c), sites) - hidden)
        for share in fragments(c, outer.fragments)
    )


def streaming_of(c: Config, sites: int, step_s: float | None) -> Outer:
    """As it is set, where that streams; else the pieces that OUTER_STEPS[0], or what is set, divides into, with as
    little overlap as hides one, of what is advised."""
    own = outer_of(c)
    if c.sync == "diloco" and own.streaming:
        return own
    every = max(2, own.every) if c.sync == "diloco" else OUTER_STEPS[0]
    most = min(FRAGMENTS, c.n_layer, max(1, every // 2))
    fragments = max(n for n in range(1, most + 1) if every % n == 0)
    longest = max(1, min(MOST_DELAY, every // fragments - 1))
    tried = (Outer(every, fragments, delay) for delay in range(1, longest + 1))
    return next(
        (one for one in tried if step_s and not stall_s(c, one, sites, step_s)),
        Outer(every, fragments, longest),
    )
