"""Four sites that train for real: DDP beside DiLoCo over a WAN, both beside DDP without one; a site killed, one cut.

The model is the tiny preset's and each site has a share of these cores, so the link is made slower until its traffic
takes as long beside a step as that of the xlarge preset does beside one of its own:

    rate = WAN_GBIT x parameters of tiny / of xlarge x seconds of a step of xlarge / of one here, without WAN

A step here is one of DiLoCo's, which has next to no traffic without a WAN. The delay stays as it is, and counts more
than it would. Each is compared with itself over the same namespaces without delay or cap. The loss of DDP there is that
of DDP over the WAN, too: the same sums, later; so DDP over the WAN takes few steps only. Loss is
that of the final evaluation, on the same text.
"""

import itertools
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench.run import spread
from bench.wan_lab.crew import prepare_data
from bench.wan_lab.network import Link, Network
from bench.wan_lab.ratio import Scaled, scaled
from bench.wan_lab.sites import TRAINER, AtSites, at_sites
from hardware.model_size import parameters
from settings import load_config

SITES = 4
OUTER_EVERY, ROUNDS = 30, 4  # steps from one sync to the next, and how many there are
LOST_EVERY = 10  # where sites are killed and cut off
DDP_STEPS = 8
CUT_S = 60.0
START_S, ROUND_S = 180.0, 240.0  # that starting, and whatever else is waited for, may take
DILOCO = {"SYNC": "diloco", "MIN_SITES": "1"}


def slower(link: Link, full: Scaled, here: int, step_s: float) -> Link:
    """The link at which a model of `here` parameters, a step of which takes step_s, is as `full` is at `link`."""
    return Link(
        link.gbit * here / full.parameters * full.step_s / step_s, link.one_way_ms, link.loss
    )


def found(link: Link, folder: Path) -> Iterator[dict[str, Any]]:
    """Runs that are compared, then a site that is killed and one that is cut off."""
    prepare_data(TRAINER)
    c = load_config({"PRESET": TRAINER["PRESET"]})
    steps = OUTER_EVERY * ROUNDS
    diloco = (
        DILOCO | {"MAX_STEPS": str(steps), "SYNC_EVERY": str(OUTER_EVERY)},
        OUTER_EVERY // 2,
        steps - OUTER_EVERY // 2,
    )
    with Network(SITES, Link()) as network:
        ddp_alone = measured(
            network, folder, "no-wan-ddp", {"MAX_STEPS": str(steps)}, steps // 4, steps - 1
        )
        yield ddp_alone | {"share": 100.0}
        alone = measured(network, folder, "no-wan-diloco", *diloco)
        yield alone | {"share": 100.0}
    wan = slower(link, scaled(), parameters(c).total, alone["step_s"])
    with Network(SITES, wan) as network:
        taken = measured(network, folder, "ddp", {"MAX_STEPS": str(DDP_STEPS)}, 2, DDP_STEPS - 1)
        yield taken | {
            "share": 100 * ddp_alone["step_s"] / taken["step_s"],
            "val_loss": ddp_alone["val_loss"],
            "tokens": ddp_alone["tokens"],
            "losses_differ_by": most_apart(ddp_alone["losses"], taken["losses"]),
        }
        taken = measured(network, folder, "diloco", *diloco)
        yield taken | {"share": 100 * alone["step_s"] / taken["step_s"]}
        yield from lost(network, folder)


def measured(
    network: Network, folder: Path, name: str, settings: dict[str, str], first: int, last: int
) -> dict[str, Any]:
    """One run to its end: what the steps behind `first` up to `last` took, and the loss that it ended with."""
    with at_sites(network, folder, name, settings) as run:
        run.wait_until("the first step", lambda: run.steps(0), START_S)
        run.to_the_end(START_S + ROUND_S)
        records = run.records(0)
    final = [r for r in records if r["event"] == "eval"][-1]
    return {
        "name": name,
        "link": str(network.link),
        "gbit": network.link.gbit,
        "val_loss": final["val_loss"],
        "tokens": final["tokens"],
        "losses": {r["step"]: r["loss"] for r in records if r["event"] == "step"},
        **run.between(first, last),
    }


def most_apart(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest difference of losses at steps that both have."""
    return max(abs(one[step] - other[step]) for step in one.keys() & other.keys())


# ---------------------------------------------------------------------------------------------------
# Sites that go and come back
# ---------------------------------------------------------------------------------------------------


def lost(network: Network, folder: Path) -> Iterator[dict[str, Any]]:
    """One run in which a site is killed and started again, then another one cut off for CUT_S."""
    settings = DILOCO | {"MAX_STEPS": "6000", "SYNC_EVERY": str(LOST_EVERY)}
    with at_sites(network, folder, "lost", settings) as run:
        run.wait_until(
            "exchanges of all",
            lambda: [site for site in range(SITES) if together(run, site, 0.0)],
            START_S,
        )
        run.wait_until("another", lambda: len(together(run, 0, 0.0)) >= 2, ROUND_S)

        def kill() -> None:
            network.kill(SITES - 1)
            run.start(SITES - 1)

        def cut() -> None:
            network.cut(1)
            deadline = time.monotonic() + CUT_S
            run.wait_until("the end of the cut", lambda: time.monotonic() > deadline, CUT_S + 5)
            network.join(1)

        yield gone(run, f"site {SITES - 1} killed, started again", SITES - 1, kill)
        yield gone(run, f"site 1 cut off for {CUT_S:.0f} s", 1, cut)


def together(run: AtSites, site: int, since: float) -> list[dict[str, Any]]:
    """Syncs that all sites took part in, as this site recorded them, from a time on."""
    return [
        r
        for r in run.records(site)
        if r["event"] == "sync" and r["committed"] and r["sites"] == SITES and r["time"] > since
    ]


def gone(run: AtSites, what: str, site: int, happen: Callable[[], None]) -> dict[str, Any]:
    """What it takes until this site takes part again, and until all have had two more exchanges."""
    began = time.time()
    happen()
    ended = time.time()
    run.wait_until(f"site {site} back ({what})", lambda: together(run, site, ended), ROUND_S)
    back = together(run, site, ended)[0]["time"]
    run.wait_until(
        "two more exchanges",
        lambda: all(len(together(run, other, back - 1)) >= 2 for other in range(SITES)),
        ROUND_S,
    )
    others = [run.records(other) for other in range(SITES) if other != site]
    return {
        "name": what,
        "site": site,
        "away_s": ended - began,
        "back_s": back - ended,
        "paused_s": max(longest_pause(records, began, back) for records in others),
        "others_syncs": len(
            [
                r
                for r in others[0]
                if r["event"] == "sync"
                and r["committed"]
                and began < r["time"] < back
                and r["sites"] < SITES
            ]
        ),
        "others_lost_steps": max(steps_lost(records, began, back) for records in others),
        "site_gaps": [
            [r["from"], r["to"], r["reason"]]
            for r in run.records(site)
            if r["event"] == "gap" and r["time"] > began
        ],
        **hashes([run.records(other) for other in range(SITES)], back - 1),
    }


def longest_pause(records: list[dict[str, Any]], began: float, ended: float) -> float:
    """Seconds of the longest wait from one step to the next in that time, beyond a usual step."""
    times = [r["time"] for r in records if r["event"] == "step"]
    waits = [(later, later - before) for before, later in itertools.pairwise(times)]
    usual = statistics.median(seconds for _, seconds in waits)
    return max((seconds - usual for later, seconds in waits if began < later <= ended), default=0.0)


def steps_lost(records: list[dict[str, Any]], began: float, ended: float) -> int:
    """Inner steps of a site that were taken back in that time, since a sync failed."""
    return sum(
        r["to"] - r["from"]
        for r in records
        if r["event"] == "gap" and r["reason"] == "failed sync" and began < r["time"] <= ended
    )


def hashes(records: list[list[dict[str, Any]]], since: float) -> dict[str, int]:
    """Syncs that all sites recorded since then, and those of them whose hashes are equal at all."""
    by_site = [
        {
            (r["outer_step"], r["fragment"]): r["hash"]
            for r in site
            if r["event"] == "sync" and r["committed"] and r["time"] > since
        }
        for site in records
    ]
    common = set.intersection(*(set(site) for site in by_site))
    return {
        "exchanges": len(common),
        "equal": sum(len({site[key] for site in by_site}) == 1 for key in common),
    }


# ---------------------------------------------------------------------------------------------------
# The table
# ---------------------------------------------------------------------------------------------------

HEADER = (
    "| run | a step, s | tokens/s, of those without WAN, % | sent by a site in a step, MB | "
    "loss at equal tokens | back in, s | others paused, s; lost steps | the site's gap, steps | equal hashes |",
    "|---|---|---|---|---|---|---|---|---|",
)
NAMES = {
    "no-wan-ddp": "DDP",
    "ddp": "DDP",
    "no-wan-diloco": f"DiLoCo, H={OUTER_EVERY}",
    "diloco": f"DiLoCo, H={OUTER_EVERY}",
}


def row(taken: dict[str, Any]) -> str:
    if "step_s" in taken:
        sent = [size / 1e6 for size in taken["sent_bytes_per_step"]]
        cells = [
            f"{NAMES[taken['name']]}, {taken['link']}",
            f"{taken['step_s']:.3f}",
            f"{taken['share']:.0f}",
            spread(sent, 2),
            f"{taken['val_loss']:.3f} at {taken['tokens']:,}",
            "",
            "",
            "",
            "",
        ]
    else:
        gaps = ", ".join(f"{begin}-{end}" for begin, end, _ in taken["site_gaps"]) or "none"
        cells = [
            f"DiLoCo, H={LOST_EVERY}: {taken['name']}",
            "",
            "",
            "",
            "",
            f"{taken['back_s']:.1f}",
            f"{taken['paused_s']:.1f}; {taken['others_lost_steps']}",
            gaps,
            f"{taken['equal']} of {taken['exchanges']}",
        ]
    return "| " + " | ".join(cells) + " |"
