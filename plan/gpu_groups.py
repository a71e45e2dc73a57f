"""GPUs of several kinds in one run: what each kind does, and whether to take all of them.

The trainer gives every process an equal part of the batch. The slowest kind therefore sets the pace of every step, or under
SYNC=diloco, where each site has GPUs of one kind, of every synchronization. The least memory decides what fits.
"""

import dataclasses
import math
from collections.abc import Collection

from plan.fleet import Fleet, divisor
from plan.measured import of_card
from plan.memory import usable_bytes
from plan.network.diloco import longest_interval, schedule_of
from plan.run import Run, added, changed
from plan.speed import slowest_card, step_s_of_all
from plan.time import pace_of, time_of


@dataclasses.dataclass(frozen=True)
class Group:
    """GPUs of one kind.

    Attributes:
        sites: that they make up under SYNC=diloco, else None.
        batch_tokens: of each step that are theirs.
        step_seconds: in which they compute these; None without units for DTYPE.
        capacity_bytes: of memory that a process may use.
    """

    card: str
    count: int
    sites: int | None
    batch_tokens: int
    step_seconds: float | None
    capacity_bytes: float
    fits: bool


@dataclasses.dataclass(frozen=True)
class Choice:
    """All groups, or without some of them. A time is None if these GPUs cannot train the run.

    Attributes:
        leave_out: cards that the alternative does without.
        settings: to add for the alternative; "" if it is better to take all.
    """

    leave_out: list[str]
    all_seconds: float | None
    without_seconds: float
    settings: str


def groups_of(run: Run) -> list[Group]:
    """Return the groups of a mixed fleet, the fastest first; none if all GPUs are of one kind."""
    fleet = run.fleet
    if len(fleet.cards) < 2:
        return []
    need = run.memory.total
    groups = []
    for count, card in fleet.cards:
        share = count / fleet.processes
        groups.append(
            Group(
                card=card.key,
                count=count,
                sites=round(fleet.sites * share) if run.config.sync == "diloco" else None,
                batch_tokens=round(run.config.batch_tokens * share),
                step_seconds=step_s_of_all(run, card),
                capacity_bytes=usable_bytes(card),
                fits=need <= usable_bytes(card),
            )
        )
    return sorted(groups, key=lambda group: group.step_seconds or math.inf)


def choose(run: Run, groups: list[Group], done: int) -> Choice | None:
    """Compare all groups with the fastest of them. None for one group, fine-tuning, or if no part can train the run.

    done: steps that the run has made already.
    """
    if run.is_finetuning:
        return None
    fitting = [group.card for group in groups if group.fits]
    best = None
    for number in range(1, len(fitting) + 1):
        other = taking(run, fitting[:number])
        if other is None or number == len(groups):
            continue
        seconds = total_s(other, done * run.config.batch_tokens // other.config.batch_tokens)
        if seconds is not None and (best is None or seconds < best[0]):
            best = seconds, other, fitting[:number]
    if best is None:
        return None
    seconds, other, cards = best
    everything = total_s(run, done)
    takes_all = everything is not None and everything <= seconds
    return Choice(
        leave_out=[group.card for group in groups if group.card not in cards],
        all_seconds=everything,
        without_seconds=seconds,
        settings="" if takes_all else added(run, other),
    )


def taking(run: Run, cards: Collection[str]) -> Run | None:
    """Return the run on some of its GPUs, with the nearest batch that these can share."""
    config, fleet = run.config, run.fleet
    chosen = tuple((count, card) for count, card in fleet.cards if card.key in cards)
    processes = sum(count for count, _ in chosen)
    nodes = divisor(processes, math.ceil(processes / fleet.processes_of_a_node))
    sites = divisor(nodes, math.ceil(nodes * fleet.sites / fleet.nodes))
    unit = config.seq_len * config.micro_batch(processes) * processes
    return changed(
        run,
        Fleet(chosen, processes, nodes, sites),
        cards=",".join(f"{count}x{card.key}" for count, card in chosen),
        nodes=nodes,
        sites=sites,
        nproc=config.nproc and processes // nodes,
        min_sites=min(config.min_sites, sites),
        batch_tokens=max(1, round(config.batch_tokens / unit)) * unit,
    )


def total_s(run: Run, done: int) -> float | None:
    """Return the seconds of a run, or None if its GPUs cannot train it."""
    config, fleet = run.config, run.fleet
    if run.memory.total > usable_bytes(fleet.smallest):
        return None
    if config.replicas > 1 and schedule_of(run).interval > longest_interval(run):
        return None
    time = time_of(config, pace_of(run, of_card(config, slowest_card(config, fleet))), done)
    return time.total_seconds if time else None
