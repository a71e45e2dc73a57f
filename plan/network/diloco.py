"""SYNC=diloco in numbers: what sites exchange, how long that takes, and what training waits for. Computed.

    every SYNC_EVERY steps    2 (S - 1) / S of all pseudo-gradients leave each of S sites, in SYNC_DTYPE. Each site
                              sends straight to each other and back (train/diloco/allreduce.py): one round trip
    SYNC_FRAGMENTS=F          F times as often a fragment of the blocks; embedding and head go with the smallest
    SYNC_DELAY=D              training continues for D steps meanwhile, and waits for the rest

Within a site processes synchronize in every step, as PARALLEL says (traffic.py). The outer step's own computation is
left out: it is small beside an inner step. Each site trains on an equal part of the batch. A synchronization waits
SITE_WAIT_S for a slower site, then continues without it.
"""

import dataclasses
import math
from typing import Any

from plan.fragments import fragment_shares
from plan.network.evidence import LEAST_BATCH
from plan.run import Run
from plan.speed import step_s_of_all
from train.timeouts import SITE_WAIT_S

PUBLISHED_EVERY = (30, 100, 500)  # H of published runs
LONGEST_DELAY = 5  # steps that are advised at most (arXiv 2501.18512)
MOST_FRAGMENTS = 6  # that are proposed: each needs blocks of its own
ITEM_BYTES = {"bfloat16": 2, "float32": 4}


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When sites synchronize: SYNC_EVERY, SYNC_FRAGMENTS and SYNC_DELAY."""

    every: int
    fragments: int = 1
    delay: int = 0

    @property
    def is_streaming(self) -> bool:
        return self.fragments > 1 or self.delay > 0

    @property
    def interval(self) -> int:
        """Steps between two synchronizations."""
        return self.every // self.fragments

    @property
    def name(self) -> str:
        return f"DiLoCo, H={self.every}" + (", streaming" if self.is_streaming else "")

    def settings(self, run: Run) -> dict[str, Any]:
        """Return the settings of this schedule, with sharded weights where a site has several processes, and a batch
        that is large enough."""
        changes: dict[str, Any] = {
            "sync": "diloco",
            "sync_every": self.every,
            "sync_fragments": self.fragments,
            "sync_delay": self.delay,
            "batch_tokens": large_batch(run),
        }
        return changes | sharded_in_site(run, run.fleet.processes // run.fleet.sites)


def large_batch(run: Run) -> int:
    """Return BATCH_TOKENS, or the smallest of at least LEAST_BATCH that the processes can share."""
    config = run.config
    if config.batch_tokens >= LEAST_BATCH:
        return config.batch_tokens
    unit = config.seq_len * run.fleet.processes
    if unit * config.micro_batch_size < LEAST_BATCH:
        unit *= config.micro_batch_size
    return math.ceil(LEAST_BATCH / unit) * unit


def sharded_in_site(run: Run, site_processes: int) -> dict[str, Any]:
    """Return the settings with which each process of a site sends its own part of the weights only."""
    config = run.config
    changes: dict[str, Any] = {}
    if site_processes == 1 or config.parallel == "fsdp":
        return changes
    changes["parallel"] = "fsdp"
    if config.shard_ranks:
        changes["shard_ranks"] = None
    if config.optimizer == "muon":
        changes["optimizer"] = "adamw"
    return changes


def longest_interval(run: Run) -> float:
    """Return the most steps between two synchronizations with which the slowest site still takes part in them."""
    if len(run.fleet.cards) < 2:
        return math.inf
    steps_s = [step_s_of_all(run, card) for _, card in run.fleet.cards]
    known = [step_s for step_s in steps_s if step_s]
    late_s = max(known, default=0.0) - min(known, default=0.0)
    return SITE_WAIT_S // late_s if late_s else math.inf


def schedules(run: Run, step_s: float | None) -> list[Schedule]:
    """Return the published intervals, shortened for the slowest site; the one that is set; and streaming."""
    config, own = run.config, schedule_of(run)
    longest = longest_interval(run)
    plain = {Schedule(int(min(every, longest))) for every in PUBLISHED_EVERY} - {Schedule(0)}
    if config.sync == "diloco" and not own.is_streaming:
        plain.add(own)
    by_interval = sorted(plain, key=lambda schedule: schedule.every)
    streaming = streaming_schedule(run, step_s)
    if streaming.interval <= longest or streaming == own:
        by_interval.append(streaming)
    return by_interval


def schedule_of(run: Run) -> Schedule:
    config = run.config
    return Schedule(config.sync_every, config.sync_fragments, config.sync_delay)


def pseudo_gradient_bytes(run: Run) -> float:
    return float(ITEM_BYTES[run.config.sync_dtype] * run.model.shape.total)


def transfer_s(run: Run, size: float) -> float:
    """Return the seconds in which all sites have added up so many bytes of each of them."""
    config, sites = run.config, run.fleet.sites
    sent = 2 * (sites - 1) / sites * size
    return 8 * sent / (config.wan_gbit * 1e9) + config.wan_rtt_ms / 1000


def synchronization_s(run: Run, schedule: Schedule) -> float:
    """Return the seconds of one synchronization: of its largest fragment."""
    return transfer_s(
        run, max(fragment_shares(run.config, schedule.fragments)) * pseudo_gradient_bytes(run)
    )


def wait_s(run: Run, schedule: Schedule, step_s: float | None) -> float:
    """Return the seconds that training waits in SYNC_EVERY steps; without step_s nothing hides."""
    hidden = schedule.delay * (step_s or 0.0)
    total = 0.0
    for share in fragment_shares(run.config, schedule.fragments):
        total += max(0.0, transfer_s(run, share * pseudo_gradient_bytes(run)) - hidden)
    return total


def streaming_schedule(run: Run, step_s: float | None) -> Schedule:
    """Return the schedule that is set if it streams; else the fragments that divide the interval, with the shortest
    delay that hides the transfer."""
    own = schedule_of(run)
    is_diloco = run.config.sync == "diloco"
    if is_diloco and own.is_streaming:
        return own
    every = max(2, own.every) if is_diloco else PUBLISHED_EVERY[0]
    most = min(MOST_FRAGMENTS, run.model.shape.layers, max(1, every // 2))
    fragments = max(count for count in range(1, most + 1) if every % count == 0)
    longest = max(1, min(LONGEST_DELAY, every // fragments - 1))
    for delay in range(1, longest):
        schedule = Schedule(every, fragments, delay)
        if step_s and not wait_s(run, schedule, step_s):
            return schedule
    return Schedule(every, fragments, longest)
