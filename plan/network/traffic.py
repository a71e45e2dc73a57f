"""What it costs to keep processes in step, for each way to do so, over the fleet's own links. Computed.

    processes of a node    the GPU's own links (hardware/gpus.toml), or what make doctor PROBE=1 measured
    nodes of a site        LAN_GBIT
    sites                  WAN_GBIT, WAN_RTT_MS

A collective goes level by level: a node adds up its own gradients first, then a site, and one copy of the sum crosses
the WAN. At each level it is a ring of n members: an all-reduce of B bytes is 2 (n - 1) hops of B / n, a gather or a
reduce-scatter half of that. A flat ring over all P processes, as NCCL may choose, sends 2 (P - 1) / P of B out of each
site instead: a sixth more with 8 processes at 4 sites, up to twice as much at 2. Rates are of payload, as iperf3
reports them: a link sold as 1 Gbit/s gives 0.94. Round trips count between sites only.

What may hide: FSDP gathers weights during the passes; gradients travel during a backward pass, with GRAD_SYNC=step
during the last of the step only. `efficiency` hides nothing and `overlapped` all that may hide; the truth lies between.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence

from plan.network import diloco
from plan.network.diloco import Schedule
from plan.run import Run
from settings.checks import count_shard_ranks

BACKWARD = 2 / 3  # of a step's computing: twice the forward pass
TYPICAL_GBIT = (1.0, 10.0)  # between two universities: what is usual, and what one hopes for


@dataclasses.dataclass(frozen=True)
class Traffic:
    """A way to keep processes in step, and what it takes. None: a link's speed or a step's time is not known.

    Attributes:
        bytes_per_step: that leave each site; each node at one site, each process on one node.
        seconds_per_step: if nothing hides.
        wait_s: the part of it between nodes. An MFU that was reached on one node includes the rest.
        efficiency: the share of the time that the devices compute, 0 to 1, if nothing hides.
        overlapped: the same if everything hides that may.
        is_offered: whether the optimizer can do it: Muon needs whole matrices.
        is_chosen: by the settings.
        wan_bytes: that cross the WAN in the passes of a step, each of which waits for them.
        schedule: of DiLoCo, None where all synchronize in every step.
    """

    name: str
    bytes_per_step: float
    seconds_per_step: float | None
    wait_s: float
    efficiency: float | None
    overlapped: float | None
    is_offered: bool
    is_chosen: bool
    wan_bytes: float = 0.0
    schedule: Schedule | None = None


@dataclasses.dataclass(frozen=True)
class Level:
    """How many members a level has, and the links between them; gbit_per_s is nan if it is not known."""

    members: int
    gbit_per_s: float
    round_trip_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Transfer:
    """By level: the bytes that leave a member and the seconds that takes, nan on an unknown link."""

    sizes: tuple[float, ...] = (0.0, 0.0, 0.0)
    seconds: tuple[float, ...] = (0.0, 0.0, 0.0)

    @property
    def total_s(self) -> float:
        return sum(self.seconds)

    def __add__(self, other: "Transfer") -> "Transfer":
        sizes = tuple(a + b for a, b in zip(self.sizes, other.sizes, strict=True))
        seconds = tuple(a + b for a, b in zip(self.seconds, other.seconds, strict=True))
        return Transfer(sizes, seconds)

    def __mul__(self, factor: float) -> "Transfer":
        return Transfer(
            tuple(factor * size for size in self.sizes),
            tuple(factor * second for second in self.seconds),
        )


@dataclasses.dataclass(frozen=True)
class Pattern:
    """What one optimizer step sends: during each forward pass, during each backward pass, in addition during the
    first forward and the last backward pass, and while nothing is computed."""

    micro_batches: int
    forward: Transfer = Transfer()
    backward: Transfer = Transfer()
    first: Transfer = Transfer()
    last: Transfer = Transfer()
    alone: Transfer = Transfer()

    @property
    def total(self) -> Transfer:
        return (
            (self.forward + self.backward) * self.micro_batches
            + self.first
            + self.last
            + self.alone
        )

    def overlapped_s(self, step_s: float) -> float:
        """Return the seconds of a step if everything hides that may."""
        forward_s = step_s / self.micro_batches * (1 - BACKWARD)
        backward_s = step_s / self.micro_batches * BACKWARD
        first_s = max(forward_s, self.forward.total_s + self.first.total_s)
        last_s = max(backward_s, self.backward.total_s + self.last.total_s)
        return (
            first_s
            + (self.micro_batches - 1) * max(forward_s, self.forward.total_s)
            + (self.micro_batches - 1) * max(backward_s, self.backward.total_s)
            + last_s
            + self.alone.total_s
        )


def traffic_of(run: Run, step_s: float | None, link_gb_s: float | None = None) -> list[Traffic]:
    """Return each way for this fleet, none for one process.

    Args:
        step_s: that a step computes.
        link_gb_s: between two processes of a node, if it was measured.

    Raises:
        SettingsError: SHARD_RANKS cannot be.
    """
    config, fleet = run.config, run.fleet
    if fleet.processes == 1:
        return []
    levels = levels_of(run, link_gb_s)
    ranks = count_shard_ranks(config, fleet.processes, fleet.processes_of_a_node)
    can_shard = config.optimizer != "muon"
    # With SYNC=diloco none of the first three is what the run does.
    chosen = config.parallel if config.sync == "ddp" or fleet.sites == 1 else ""
    reduced = ring(run.model.sent.gradients, levels)
    patterns = [
        ("ddp", "DDP", Pattern(micro_batches(run), last=reduced), True),
        ("fsdp", "FSDP2 over all", shard_pattern(run, levels, fleet.processes), can_shard),
    ]
    if chosen == "hsdp" or 1 < ranks < fleet.processes:
        name = f"HSDP, {ranks} a copy"
        patterns.append(("hsdp", name, shard_pattern(run, levels, ranks), can_shard))
    ways = []
    for parallel, name, pattern, is_offered in patterns:
        way = measure(name, pattern, levels, step_s, is_offered, parallel == chosen)
        in_passes = (pattern.forward + pattern.backward) * pattern.micro_batches + pattern.first
        ways.append(dataclasses.replace(way, wan_bytes=in_passes.sizes[-1]))
    if fleet.sites > 1 and fleet.has_sites_of_one_kind and not run.is_finetuning:
        ways += diloco_ways(run, levels, step_s)
    return ways


def diloco_ways(run: Run, levels: Sequence[Level], step_s: float | None) -> list[Traffic]:
    """Return SYNC=diloco with each schedule."""
    config = run.config
    own = diloco.schedule_of(run)
    site_processes = run.fleet.processes // run.fleet.sites
    is_offered = config.optimizer != "muon" or site_processes == 1
    ways = []
    for schedule in diloco.schedules(run, step_s):
        pattern = diloco_pattern(run, levels, schedule, step_s)
        is_chosen = config.sync == "diloco" and schedule == own
        way = measure(schedule.name, pattern, levels, step_s, is_offered, is_chosen)
        ways.append(dataclasses.replace(way, schedule=schedule))
    return ways


def measure(
    name: str,
    pattern: Pattern,
    levels: Sequence[Level],
    step_s: float | None,
    is_offered: bool,
    is_chosen: bool,
) -> Traffic:
    total = pattern.total
    widest = max(i for i, level in enumerate(levels) if level.members > 1)
    seconds: float | None = total.total_s
    efficiency, overlapped = None, None
    if math.isnan(total.total_s):
        seconds = None
    elif step_s is not None:
        efficiency = step_s / (step_s + total.total_s)
        overlapped = step_s / pattern.overlapped_s(step_s)
    wait_s = sum(total.seconds[1:])
    return Traffic(
        name, total.sizes[widest], seconds, wait_s, efficiency, overlapped, is_offered, is_chosen
    )


def chosen_of(ways: Sequence[Traffic]) -> Traffic | None:
    """Return the way that the settings choose; None for one process."""
    if not ways:
        return None
    chosen = [way for way in ways if way.is_chosen]
    if len(chosen) != 1:
        raise ValueError(f"{len(chosen)} of {', '.join(way.name for way in ways)} are chosen")
    return chosen[0]


def wait_of(ways: Sequence[Traffic]) -> float:
    """Return the seconds that each step of the chosen way waits for other nodes."""
    chosen = chosen_of(ways)
    return chosen.wait_s if chosen else 0.0


# ---------------------------------------------------------------------------------------------------
# The fleet as levels
# ---------------------------------------------------------------------------------------------------


def levels_of(run: Run, link_gb_s: float | None = None) -> list[Level]:
    """Return processes of a node, nodes of a site, sites; between unlike GPUs the slowest link counts."""
    config, fleet = run.config, run.fleet
    link = link_gb_s or min((card.link_gb_s for _, card in fleet.cards), default=math.nan)
    return [
        Level(fleet.processes_of_a_node, 8 * link),
        Level(fleet.nodes // fleet.sites, config.lan_gbit),
        Level(fleet.sites, config.wan_gbit, config.wan_rtt_ms / 1000),
    ]


def micro_batches(run: Run) -> int:
    """Return the forward passes of a process in one step."""
    windows = run.config.batch_windows / run.fleet.processes
    return max(1, math.ceil(windows / max(1, run.micro_batch)))


def group_of(levels: Sequence[Level], ranks: int) -> Iterator[tuple[Level, Level]]:
    """Yield at each level the members that share a copy, and those that hold the same part of theirs.

    The `ranks` neighbors of a copy fill a node first, then a site.
    """
    for level in levels:
        members = math.gcd(level.members, ranks)
        ranks //= members
        yield (
            dataclasses.replace(level, members=members),
            dataclasses.replace(level, members=level.members // members),
        )


# ---------------------------------------------------------------------------------------------------
# What each way sends
# ---------------------------------------------------------------------------------------------------


def ring(size: float | Sequence[float], levels: Sequence[Level], messages: int = 1) -> Transfer:
    """Return an all-reduce level by level; half of it is a gather or a reduce-scatter.

    Args:
        size: bytes of each member, one number or one per level.
        messages: pieces that each make their own round trips.
    """
    sizes = size if isinstance(size, Sequence) else [size] * len(levels)
    sent = []
    seconds = []
    for whole, level in zip(sizes, levels, strict=True):
        if level.members == 1:
            sent.append(0.0)
            seconds.append(0.0)
            continue
        hops = 2 * (level.members - 1)
        sent.append(hops / level.members * whole)
        round_trips_s = messages * hops * level.round_trip_s / 2
        seconds.append(8e-9 * sent[-1] / level.gbit_per_s + round_trips_s)
    return Transfer(tuple(sent), tuple(seconds))


def shard_pattern(run: Run, levels: Sequence[Level], ranks: int) -> Pattern:
    """Return what FSDP2 sends over copies of `ranks` processes.

    Weights are gathered in DTYPE, block by block: once a step while gradients accumulate, if
    config.gathers_once; else for each pass, and those outside of blocks stay from forward to backward.
    Gradients are scattered in float32 within a copy (GRAD_SYNC), and once a step all-reduced between
    copies.
    """
    sent = run.model.sent
    groups = list(group_of(levels, ranks))
    inside = [within for within, _ in groups]
    across = [between for _, between in groups]
    forward = ring(sent.weights, inside, sent.blocks + 1) * 0.5
    again = ring(sent.again, inside, sent.blocks) * 0.5
    scattered = ring(sent.gradients, inside, sent.blocks + 1) * 0.5
    parts = []
    for i in range(len(levels)):
        parts.append(sent.gradients / math.prod(level.members for level in inside[i:]))
    reduced = ring(parts, across)
    count = micro_batches(run)
    if run.config.grad_sync == "micro-batch":
        return Pattern(count, forward, again + scattered, reduced)
    if count > 1 and run.config.gathers_once:
        return Pattern(count, first=forward, last=scattered + reduced)
    return Pattern(count, forward, again, last=scattered + reduced)


def diloco_pattern(
    run: Run, levels: Sequence[Level], schedule: Schedule, step_s: float | None
) -> Pattern:
    """Return FSDP2 within each site, and what training waits for between sites (Douillard et al. 2023, 2025)."""
    sites = levels[-1].members
    own = [*levels[:-1], dataclasses.replace(levels[-1], members=1)]
    site_processes = math.prod(level.members for level in own)
    pattern = Pattern(micro_batches(run))
    if site_processes > 1:
        pattern = shard_pattern(run, own, site_processes)
    sent = 2 * (sites - 1) / sites * diloco.pseudo_gradient_bytes(run) / schedule.every
    waited_s = diloco.wait_s(run, schedule, step_s) / schedule.every
    return dataclasses.replace(pattern, alone=Transfer((0.0, 0.0, sent), (0.0, 0.0, waited_s)))
