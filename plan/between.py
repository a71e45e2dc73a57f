"""Sites with a WAN between them: what each way to keep them together takes in hours and costs in loss, and which to
take. Hours are computed; what is said of loss was published (evidence.py), or it says that nobody did.
"""

import dataclasses
from collections.abc import Mapping

from hardware.model_size import parameters
from plan.choices import choice, given
from plan.hours import time_of
from plan.network import evidence
from plan.network.outer import GOOD, Outer, inner
from plan.network.traffic import Sync
from plan.planner import Plan
from record.number_formats import hours, percent
from settings.declare import format_value

ENOUGH = 0.9  # of the time computing with DDP: nothing that costs loss is worth the rest
CLUSTER_PRESET = "xlarge-8xa100"  # of make train-8xa100
# Of this command, or each machine's own: not to be typed where training starts.
NOT_OF_A_RUN = (
    "SITES",  # but with SYNC=diloco
    "CARDS",
    "RUNS_DIR",
    "DATA_DIR",
    "MFU",
    "WAN_GBIT",
    "WAN_RTT_MS",
    "LAN_GBIT",
    "TARGET_HOURS",
    "TARGET_TOKENS_PER_S",
    "PRICE_GPU_HOUR",
    "PRICE_KWH",
    "NODE_RANK",
    "MASTER_ADDR",
    "LIGHTHOUSE",
)


@dataclasses.dataclass(frozen=True)
class Option:
    """A way between sites. share: of the time computing, 0 to 1, what is inside nodes aside, as hours count it;
    hours: of the run, or of what is left; percent: of loss beyond DDP, None where nobody published it; says: whose
    figure that is. None: not known."""

    sync: Sync
    share: float | None
    hours: float | None
    percent: float | None
    says: str

    @property
    def loss(self) -> str:
        """'+0.5%', 'none', 'not published'"""
        return evidence.percent_told(self.percent)


@dataclasses.dataclass(frozen=True)
class Verdict:
    """option: to take; said: why, in sentences; typed: what to type for it, "" where it is what is set."""

    option: Option
    said: str
    typed: str


def options(p: Plan) -> list[Option]:
    """Each way of the plan, in its order."""
    return [option(p, sync) for sync in p.syncs]


def option(p: Plan, sync: Sync) -> Option:
    step_s = p.pace.fast.step_s
    share = None if step_s is None else step_s / (step_s + sync.between_nodes_s)
    time = time_of(p.c, p.pace.fast, sync.between_nodes_s, p.done)
    if sync.outer:
        costs = evidence.loss(
            parameters(p.c).total, p.fleet.sites, sync.outer.every, sync.outer.streaming
        )
        return Option(sync, share, time.total if time else None, *costs)
    return Option(sync, share, time.total if time else None, 0.0, "")


# ---------------------------------------------------------------------------------------------------
# What to take
# ---------------------------------------------------------------------------------------------------


def verdict(p: Plan) -> Verdict | None:
    """None at one site, and where the speed is not known, on which all hangs."""
    found = options(p)
    if p.fleet.sites == 1 or any(one.share is None for one in found):
        return None
    own = next((one for one in found if one.sync.chosen and not one.sync.outer), found[0])
    ddp = own if share(own) >= ENOUGH else found[0]
    if share(ddp) >= ENOUGH:
        return Verdict(
            ddp,
            f"DDP suffices: it computes for {computes(ddp)} of the time, and its steps are those of "
            "one site. DiLoCo could save the rest, and costs loss.",
            "" if ddp.sync.chosen else typed(p, {"sync": "ddp", "parallel": "ddp"}),
        )
    tried = sorted(
        (one for one in found if one.sync.outer),
        key=lambda one: (one.sync.outer.every, one.sync.outer.streaming),  # type: ignore[union-attr]
    )
    best = next((one for one in tried if share(one) >= GOOD), max(tried, key=share))
    return Verdict(
        best, reason(p, best, ddp, tried), "" if best.sync.chosen else typed_for(p, best.sync.outer)
    )


def reason(p: Plan, best: Option, ddp: Option, tried: list[Option]) -> str:
    """Time won, loss paid, and what the next in line would change."""
    said = (
        f"{best.sync.name} computes for {computes(best)} of the time where DDP does for {computes(ddp)}"
        + (
            f", {hours(best.hours)} in place of {hours(ddp.hours)}"
            if best.hours and ddp.hours
            else ""
        )
        + f"; loss {best.loss}."
    )
    if best.percent is None:
        said += " What it costs you only a run of yours can tell: compare its loss with one of DDP at equal tokens."
    if share(best) < GOOD:
        return (
            said
            + " Even so much time is lost to the WAN: fewer sites, or a faster link, would do more."
        )
    faster = [one for one in tried if share(one) > share(best) + 0.01 and one.hours is not None]
    if faster:
        said += (
            " Faster: "
            + ", ".join(
                f"{one.sync.name.removeprefix('DiLoCo, ')} ({computes(one)}, "
                f"{hours(one.hours or 0)}; loss {one.loss})"
                for one in faster
            )
            + "."
        )
    return said


def share(one: Option) -> float:
    assert one.share is not None
    return one.share


def computes(one: Option) -> str:
    """'78.4%'"""
    return percent(share(one))


# ---------------------------------------------------------------------------------------------------
# What to type
# ---------------------------------------------------------------------------------------------------


def typed_for(p: Plan, outer: Outer | None) -> str:
    """All of it, defaults included, so that it can be read what it does; "" where a rule forbids it."""
    assert outer
    changes = outer.settings | inner(p.c, p.fleet.processes // p.fleet.sites)
    if choice(p.c, p.fleet, **changes) is None:
        return ""
    if not outer.streaming:
        changes = {
            name: value
            for name, value in changes.items()
            if name not in ("sync_fragments", "sync_delay") or getattr(p.c, name) != value
        }
    return typed(p, changes)


def typed(p: Plan, changes: Mapping[str, object]) -> str:
    """The command of a cluster for its preset, else that of each node."""
    c, fleet = p.c, p.fleet
    named = {"NODES": str(fleet.nodes)}
    if changes.get("sync") == "diloco":
        named["SITES"] = str(fleet.sites)
    named |= {
        name.upper(): format_value(value) for name, value in changes.items() if value is not None
    }
    kept = {
        name: value
        for name, value in given(c).items()
        if value and name not in (*NOT_OF_A_RUN, *named)
    }
    if c.preset == CLUSTER_PRESET:
        target, ends = "make train-8xa100", {}
        if fleet.processes_of_a_node != 2:
            kept["GPUS_PER_NODE"] = str(fleet.processes_of_a_node)
    else:
        target = f"make train-node PRESET={c.preset}"
        ends = {"NODE_RANK": "i"}
        if changes.get("sync") != "diloco":
            ends |= {"MASTER_ADDR": "host"}
        elif fleet.nodes > fleet.sites:
            ends |= {"MASTER_ADDR": "first-of-the-site"}
        ends |= {"LIGHTHOUSE": "host:29510"} if changes.get("sync") == "diloco" else {}
    return " ".join([target, *(f"{name}={value}" for name, value in (named | kept | ends).items())])


# ---------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------


def pieces(outer: Outer) -> str:
    """Of what streams."""
    return (
        f" (SYNC_FRAGMENTS={outer.fragments} SYNC_DELAY={outer.delay})" if outer.streaming else ""
    )


def lines(p: Plan) -> list[str]:
    """Below the table: whose figures of loss these are, a paragraph for each; the verdict; and what to type."""
    found = [
        f"loss, {one.sync.name.removeprefix('DiLoCo, ')}{pieces(one.sync.outer)}: {one.says}"
        for one in options(p)
        if one.sync.outer
    ]
    if chosen := verdict(p):
        found.append(f"Take: {chosen.said}")
        found.append(f"  {chosen.typed}" if chosen.typed else "  It is what is set.")
        if "LIGHTHOUSE=" in chosen.typed:
            found.append("  and once, where all reach it: make lighthouse LIGHTHOUSE=host:29510")
    return found
