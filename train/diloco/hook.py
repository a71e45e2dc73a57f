"""What a run does about its other sites (SYNC=diloco): it finds them, exchanges with them, goes on from there.

    a step -> Site.advance -> exchanged        a `sync` event, with what the sites now have in common as a hash
                           -> it failed        back to the last exchange, its samples are passed over: `rollback`
                           -> this site was behind, and has the others' weights: `gap`, the steps it took no part in

A site counts steps as all do: step = exchanges * SYNC_EVERY / SYNC_FRAGMENTS + the steps since the last one was due.
"""

import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from settings import SettingsError
from train import timeouts
from train.diloco.result import APART, DoubleSite, Outcome, RunIsOver, SitesMissing, ToldToStop
from train.diloco.site_registry import SYNC_STREAMS, Desk, NoDesk
from train.distributed import rendezvous
from train.distributed.registry import WAITING, differences, named
from train.distributed.world import PeersDiffer, PeersMissing, from_all, from_first
from train.faults import recovery

if TYPE_CHECKING:
    from train.job import Job

log = logging.getLogger(__name__)

LOOK_S = 3.0  # between two looks at who has come


def join(job: "Job") -> None:
    """Take part in the run's exchanges from here on, once the other sites are there or START_TIMEOUT_S is over.

    Raises PeersMissing, PeersDiffer, SettingsError, RunIsOver, on all ranks.
    """
    from train.diloco.outer_step import Site  # it loads torchft, which takes seconds

    c, world = job.config, job.world
    kept = job.kept_outer[1] if job.kept_outer else {}
    if job.step >= c.last_step and kept.get("finished") == job.step:
        job.kept_outer = None
        return  # what is left is this site's own
    job.pace.allow(
        "waiting for other sites",
        2 * c.start_timeout_s + timeouts.SYNC_TIMEOUT_S,
        "START_TIMEOUT_S",
    )
    problem: Exception | None = None
    if world.is_first:
        facts = rendezvous.facts_of(c, world.local_size) | {
            "node_rank": c.node_rank,
            "nodes": c.nodes,
            "data": job.data_fingerprint,
            "processes": world.size,
            "last_step": c.last_step,
            "training": False,
            "common": "",
            "step": job.step,
        }
        job.desk = Desk(c.lighthouse, c.site_rank, c.sites, facts)
        problem = find_desk(job, job.desk)
    if problem := from_first(problem):
        raise problem
    try:
        job.site = Site(c, world, job.model, job.optimizer, lambda: job.interrupt.asked is not None)
    except SitesMissing as error:
        raise PeersMissing(str(error)) from None
    recovery.stand(job)
    apart = False
    if job.desk:
        try:
            job.late, apart = gather(job, job.desk)
        except (SettingsError, PeersDiffer, PeersMissing, RunIsOver) as error:
            problem = error
    problem, job.late, apart = from_first((problem, job.late, apart))
    if problem:
        raise problem
    if apart:
        job.site.fall_behind()
    job.pace.restore()


def find_desk(job: "Job", desk: Desk) -> PeersMissing | None:
    """Wait for the lighthouse, which may be started after its sites. Returns why it was not found."""
    c = job.config
    deadline, said = time.monotonic() + c.start_timeout_s, False
    job.status.phase(f"{WAITING} 1/{c.sites}")
    while True:
        try:
            desk.read()
            return None
        except NoDesk as error:
            trouble = str(error)
        if time.monotonic() > deadline:
            return PeersMissing(
                f"LIGHTHOUSE={c.lighthouse}: {trouble}, in START_TIMEOUT_S={c.start_timeout_s}; start "
                "make lighthouse there, and look at the network"
            )
        if not said:
            log.info("LIGHTHOUSE=%s: %s; trying for %d s", c.lighthouse, trouble, c.start_timeout_s)
            said = True
        job.status.beat()
        time.sleep(1.0)


def gather(job: "Job", desk: Desk) -> tuple[bool, bool]:
    """Say that this site is there, and wait for the others. Returns whether any is further than this one, or has other
    weights that count; and whether it is for the latter.

    Raises PeersMissing, PeersDiffer, SettingsError, RunIsOver.
    """
    c, site = job.config, job.site
    assert site
    deadline, said = time.monotonic() + c.start_timeout_s, ""
    try:
        if other := desk.double():
            raise PeersMissing(
                f"site {c.site_rank} is there already, on {other['host']}; stop one of them, or give "
                "each its own NODE_RANK"
            )
        desk.say(outer=site.exchanges, common=site.common)
        desk.live()
        while True:
            if over := over_at(job, desk.read()):
                raise RunIsOver(over)
            found = desk.living(
                LOOK_S, enough=lambda living: any(said["training"] for said in living.values())
            )
            refuse_others(desk.said, found)
            begun = any(said["training"] for said in found.values())
            if begun or len(found) + 1 == c.sites or time.monotonic() > deadline:
                break
            missing = ", ".join(
                str(i) for i in range(c.sites) if i not in found and i != c.site_rank
            )
            job.status.phase(f"{WAITING} {len(found) + 1}/{c.sites}")
            if missing != said:
                log.info("%d of %d sites are there; missing: %s", len(found) + 1, c.sites, missing)
                said = missing
    except NoDesk as error:
        raise PeersMissing(
            f"LIGHTHOUSE={c.lighthouse}: {error}; start make lighthouse there, and look at the "
            "network"
        ) from None
    if not begun and len(found) + 1 < c.min_sites:
        raise PeersMissing(
            f"{len(found) + 1} of {c.sites} sites came in START_TIMEOUT_S={c.start_timeout_s}, and "
            f"MIN_SITES={c.min_sites}"
        )
    furthest = max((said["outer"] for said in found.values()), default=0)
    if apart := any(counts_before(other, desk.said) for other in found.values()):
        with contextlib.suppress(NoDesk):
            desk.say(outer=APART)  # or another would see this one train, and give way in turn
    names = ", ".join(named(found[other]) for other in sorted(found)) or "none"
    there = (
        f"{names} of the others there"
        if not begun
        else f"others train already, {max(0, furthest - site.exchanges)} exchanges ahead: {names}"
    )  # as far as was seen
    log.info(
        "site %d of %d, on %s: %s; exchanges every %d steps with H=%d, by %d connections, in %s",
        c.site_rank,
        c.sites,
        site.address,
        there,
        site.turn,
        c.sync_every,
        SYNC_STREAMS,
        c.sync_dtype,
    )
    if apart:
        log.info(
            "another site was trained apart from this one, which takes over its weights: after as many exchanges "
            "they have others in common"
        )
    return furthest > site.exchanges or apart, apart


def counts_before(other: dict[str, Any], mine: dict[str, Any]) -> bool:
    """Whether two sites have seen equally many exchanges and not the same ones, as when each was up while the other was
    down, and it is this one that gives way: to one that trains, or has made more steps, or has the lower number."""

    def rank(said: dict[str, Any]) -> tuple[int, int, int]:
        return said["training"], said["step"], -said["node_rank"]

    return (
        other["outer"] == mine["outer"]
        and other["common"] != mine["common"]
        and rank(other) > rank(mine)
    )


def over_at(job: "Job", said: dict[int, dict[str, Any]]) -> str:
    """What to say where the run was trained to its end while this site, which had a part in it, was away; else ""."""
    c = job.config
    for site, other in said.items():
        here = site != c.site_rank and job.step > 0
        if (
            here
            and other.get("done")
            and other["settings"]["RUN_NAME"] == c.run_name
            and other["last_step"] >= c.last_step
        ):
            return (
                f"run {c.run_name} is done: the other sites made its last step {other['last_step']} without this "
                f"one, which stands at step {job.step}; its weights are at {named(other)}"
            )
    return ""


def refuse_others(mine: dict[str, Any], found: dict[int, dict[str, Any]]) -> None:
    """Raises SettingsError or PeersDiffer unless the sites can train one model together."""
    for other in found.values():
        first, second = sorted((mine, other), key=lambda said: said["node_rank"])
        if unlike := differences(first, second):
            why = unlike[0].why.replace("all nodes", "all sites")
            raise SettingsError([why]) if unlike[0].code == 64 else PeersDiffer(why)
        for key, what in (("data", "data (fingerprint)"), ("processes", "processes at a site")):
            if mine[key] != other[key]:
                raise PeersDiffer(
                    f"{what}: {mine[key]} on {named(mine)} and {other[key]} on {named(other)}; give all "
                    "sites the same"
                )


# ---------------------------------------------------------------------------------------------------
# Behind a step
# ---------------------------------------------------------------------------------------------------


def begin(job: "Job") -> bool:
    """What is due before a step: a site that is late takes the others' weights, and one that was stopped while it
    waited for an exchange goes on with it, that behind the last step too. Returns whether it was told to stop."""
    assert job.site
    if job.desk:
        job.desk.said["training"] = True
    due = job.site.engine.position >= job.site.engine.opens and job.step < job.config.last_step
    if (job.late or due) and advance(job, now=True):
        return True
    return finish(job) if is_unfinished(job) else False


def is_unfinished(job: "Job") -> bool:
    """Whether all steps are made, and something is left that the sites have not in common."""
    return (
        job.site is not None and job.step >= job.config.last_step and job.site.finished != job.step
    )


def after_step(job: "Job", last: bool) -> bool:
    """What is due behind a step that is recorded; behind the last all that the sites have not in common yet. Returns
    whether the process was told to stop while it waited."""
    assert job.site
    if job.site.waits_next:
        if advance(job, now=False):
            return True
    else:
        job.site.advance(job.step)
    return finish(job) if last and job.step == job.config.last_step else False


def finish(job: "Job") -> bool:
    """Exchange what the sites have not in common yet, fragment by fragment, so that all end with the same weights."""
    site, step = job.site, job.step
    assert site
    while not site.is_through(step):
        if advance(job, now=True):
            return True
        if job.step < step:  # it failed: the steps until here are made again
            return False
    site.finish(step)
    return False


def settle(job: "Job") -> None:
    """End the exchange that is in flight, as a checkpoint cannot hold it. The next comes when the others' does."""
    if job.site and job.site.engine.in_flight:
        advance(job, now=True)


def advance(job: "Job", now: bool) -> bool:
    """A step of Site.advance that waits for others, and what follows. Returns whether the process was told to stop.

    Raises PeersMissing.
    """
    site, called = job.site, time.perf_counter()
    assert site
    job.status.phase("exchanging", step=job.step)
    # until there is a quorum; until those that are behind have fetched weights; and for the rest
    job.pace.allow("an exchange between sites", 3 * timeouts.SYNC_TIMEOUT_S)
    try:
        outcome = site.advance(job.step, now)
    except ToldToStop:
        return True
    except (SitesMissing, DoubleSite) as error:
        raise PeersMissing(str(error)) from None
    job.late = False
    if outcome.behind:
        caught_up(job, outcome, called)
    if outcome.fragment is not None:
        if outcome.committed:
            exchanged(job, outcome)
        else:
            undone(job, outcome)
        site.engine.position = job.step - site.common_step
    if job.desk:
        job.desk.said |= {"outer": outcome.outer, "common": site.common, "step": job.step}
    job.pace.restore()
    job.status.phase("training")
    job.exchange_stall_s += time.perf_counter() - called
    return False


def exchanged(job: "Job", outcome: Outcome) -> None:
    """Record it; the steps since the exchange before are what all sites have now."""
    assert job.site
    job.recorder.event(
        "sync",
        job.step,
        job.tokens,
        replica=job.config.site_rank,
        outer_step=outcome.outer,
        fragment=outcome.fragment,
        sites=outcome.sites,
        committed=True,
        seconds=outcome.seconds,
        stall_s=outcome.stall_s,
        bytes=outcome.sent,
        hash=outcome.digest,
    )
    job.guard.exchanged(job.site.turn)
    others, job.exchanged_with = job.exchanged_with, outcome.sites
    if others != outcome.sites or outcome.outer % 10 == 0:
        away = ", ".join(map(str, job.site.away))
        job.recorder.say(
            f"exchange {outcome.outer} after step {job.step}: {outcome.sites} of {job.config.sites} "
            f"sites{f' (away: {away})' if away else ''}, {outcome.sent / 1e6:.1f} MB in "
            f"{outcome.seconds:.2f} s, of which training waited {outcome.stall_s:.2f} s; hash "
            f"{outcome.digest}"
        )


def undone(job: "Job", outcome: Outcome) -> None:
    """It failed, and the site has dropped what it trained since the one before."""
    c = job.config
    assert job.site
    why = next(
        (str(reason).splitlines()[0] for reason in from_all(job.site.striped.failed) if reason),
        "another process of this site failed"
        if outcome.sites >= c.min_sites
        else f"{outcome.sites} sites, and MIN_SITES={c.min_sites}",
    )
    recovery.back_to_common(
        job,
        f"the exchange after step {job.step} failed ({why})",
        time.perf_counter(),
        outcome.stall_s,
    )


def caught_up(job: "Job", outcome: Outcome, called: float) -> None:
    """This site was behind, and has the weights and the step of one that is not. called: when it began to ask."""
    assert outcome.behind and job.site
    begin, end = outcome.behind
    if end < begin:
        return recovery.back_to(
            job, end, "this site trained apart from the others and now has their weights", called
        )
    job.step, job.starved = end, job.feed is not None
    job.guard.exchanged(job.site.turn)
    job.evaluated_at, job.core_at = max(job.evaluated_at, end), max(job.core_at, end)
    job.away = (*job.away, (begin, end))
    job.save_soon = True
    job.recorder.event(
        "gap",
        job.step,
        job.tokens,
        replica=job.config.site_rank,
        reason="away",
        to=end,
        **{"from": begin},
    )
    job.recorder.say(
        f"this site was away at step {begin}. It continues after step {end} with the weights of the "
        f"others ({outcome.sites} of {job.config.sites} sites are there)"
    )


def leave(job: "Job", code: int) -> None:
    """No more part in the run, which ends with this exit code here."""
    if job.desk:
        job.desk.leave(done=code == 0)
    if job.site:
        job.site.leave()
