"""What is wrong with a plan across sites, and which settings would do: DDP that waits for the WAN in each step, and
exchanges of SYNC=diloco that take longer than what lies between two of them, or a way back longer than it is given."""

import math
from collections.abc import Iterator

from plan import storage
from plan.choices import Choice, choice
from plan.fleet import Fleet
from plan.hours import Pace, waiting_s
from plan.network.outer import (
    GOOD,
    OUTER_STEPS,
    Outer,
    exchange_s,
    inner,
    of_a_site,
    outer_of,
    streaming_of,
)
from plan.network.traffic import syncs
from plan.speed import speed
from record.number_formats import percent, seconds, size
from settings.config import Config
from settings.finding import FAIL, WARN, Finding
from train import timeouts

CODE = 64  # a setting is to be changed


def problems(c: Config, fleet: Fleet, pace: Pace) -> list[Finding]:
    """None at one site."""
    if fleet.sites == 1:
        return []
    diloco = (
        (copies(c, fleet), timeout(c, fleet), interval(c, fleet, pace))
        if c.sync == "diloco"
        else ()
    )
    found = diloco or (ddp(c, fleet, pace),)
    return [one for one in found if one]


def would(*choices: Choice | None) -> str:
    """What is to be typed, of those that no rule forbids."""
    typed = [one.typed for one in choices if one and one.typed]
    return f"what would do: {'; or '.join(typed)}" if typed else ""


# ---- SYNC=ddp


def ddp(c: Config, fleet: Fleet, pace: Pace) -> Finding | None:
    """Each step waits for the WAN, too long for GOOD."""
    step_s = pace.fast.step_s
    if step_s is None or step_s / (step_s + pace.wait_s) >= GOOD:
        return None
    better = next(
        (one for one in with_diloco(c, fleet, step_s) if share(one, step_s) >= GOOD), None
    )
    shown = f" ({percent(share(better, step_s))})" if better else ""
    return Finding(
        "wan",
        WARN,
        f"each step waits {seconds(pace.wait_s)} for the network between {fleet.sites} sites "
        f"and computes for {seconds(step_s)}, {percent(step_s / (step_s + pace.wait_s))} of the time",
        would(better) + shown,
        CODE,
    )


def share(found: Choice, step_s: float) -> float:
    """Of the time spent computing, 0 to 1."""
    return step_s / (step_s + waiting_s(syncs(found.c, found.fleet, step_s)))


def with_diloco(c: Config, fleet: Fleet, step_s: float | None = None) -> Iterator[Choice]:
    """The same with SYNC=diloco, from the interval that is known best to the longest; none at one site, or where it is
    set already."""
    if fleet.sites == 1 or c.sync == "diloco":
        return
    first, *longer = (Outer(every) for every in OUTER_STEPS)
    step_s = step_s or speed(c, fleet, None).step_s
    for outer in (first, streaming_of(c, fleet.sites, step_s), *longer):
        if found := choice(c, fleet, **outer.settings | inner(c, fleet.processes // fleet.sites)):
            yield found


# ---- SYNC=diloco


def copies(c: Config, fleet: Fleet) -> Finding | None:
    """Processes of a site that hold whole copies, or several: each would send all of it."""
    several = of_a_site(c, fleet.processes)
    changes = inner(c, several)
    if not changes:
        return None
    return Finding(
        "wan",
        FAIL,
        f"SYNC=diloco with PARALLEL={c.parallel}: each of {several} processes of a site would "
        "send the whole model to the other sites",
        would(choice(c, fleet, **changes)),
        CODE,
    )


def timeout(c: Config, fleet: Fleet) -> Finding | None:
    """A site that comes back, and is given up before it has what it missed: at most what a checkpoint holds."""
    needed = storage.wan_save_s(c) or 0.0
    if needed <= timeouts.SYNC_TIMEOUT_S:
        return None
    whole = size(storage.checkpoint_bytes(c))
    enough_gbit = 8e-9 * storage.checkpoint_bytes(c) / timeouts.SYNC_TIMEOUT_S
    return Finding(
        "wan",
        WARN,
        f"a site that comes back fetches up to {whole} from another, "
        f"{seconds(needed)} with WAN_GBIT={c.wan_gbit:g}, and gives up after "
        f"{seconds(timeouts.SYNC_TIMEOUT_S)}",
        f"a faster link between the sites; {enough_gbit:.2g} Gbit/s would do",
        CODE,
    )


def interval(c: Config, fleet: Fleet, pace: Pace) -> Finding | None:
    """An exchange, of the largest fragment, that takes longer than the steps between two."""
    step_s, outer = pace.fast.step_s, outer_of(c)
    if step_s is None:
        return None
    needed, between = exchange_s(c, outer, fleet.sites), outer.every / outer.fragments * step_s
    if needed <= between:
        return None
    least = outer.fragments * math.ceil(needed / step_s)
    every = next((n for n in OUTER_STEPS if n >= least and n % outer.fragments == 0), least)
    return Finding(
        "wan",
        WARN,
        f"an exchange between {fleet.sites} sites takes {seconds(needed)}, longer than the "
        f"{seconds(between)} of computing between two (SYNC_EVERY={c.sync_every}, SYNC_FRAGMENTS="
        f"{c.sync_fragments})",
        would(choice(c, fleet, sync_every=every)),
        CODE,
    )
