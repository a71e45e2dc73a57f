"""SYNC=diloco: what a run does about its other sites. It finds them, exchanges with them, goes on from there.

    a step -> Site.advance -> exchanged        a `sync` event, with what the sites now have in common as a hash
                           -> it failed        back to the last exchange, its samples are passed over: `rollback`
                           -> this site was behind, and has the others' weights: `gap`, the steps it took no part in

A site counts steps as all do: step = exchanges * SYNC_EVERY / SYNC_FRAGMENTS + the steps since the last one was due.
"""

import contextlib
import logging
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from settings import SettingsError
from train import timeouts
from train.diloco.result import APART, DoubleSite, Outcome, RunIsOver, SitesMissing, ToldToStop
from train.diloco.site_registry import SYNC_STREAMS, Desk, NoDesk
from train.distributed import rendezvous
from train.distributed.registry import WAITING, differences, named
from train.distributed.world import PeersDiffer, PeersMissing, from_all, from_first
from train.faults import recovery
from train.faults.guard import MAX_ROLLBACKS
from train.hooks.hook import Hook, StopTraining
from train.step import StepNumbers

if TYPE_CHECKING:
    from train.diloco.outer_step import Site
    from train.job import Job

log = logging.getLogger(__name__)

LOOK_S = 3.0  # between two looks at who has come


class DiLoCo(Hook):
    """This site among the others.

    Attributes:
        site: on all ranks; None where all that is left of the run is this site's own.
        desk: what the sites say of themselves, on the first rank.
        is_late: whether the other sites are further than this one.
        away: steps that this site took no part in, as [from, to].
        stall_s: of exchanges that no step has reported yet.
        sites_before: that took part in the last exchange.
        kept: tensors and facts of a checkpoint, until the site stands there.
    """

    def __init__(self) -> None:
        self.site: Site | None = None
        self.desk: Desk | None = None
        self.is_late = False
        self.away: list[list[int]] = []
        self.stall_s = 0.0
        self.sites_before = 0
        self.kept: tuple[dict[str, Tensor], Mapping[str, Any]] = ({}, {})

    @property
    def is_stuck(self) -> bool:
        return self.site is not None and self.site.is_stuck

    # ---- Before the first step

    def join(self, job: "Job") -> None:
        """Take part in the run's exchanges, once the other sites are there or START_TIMEOUT_S is over.

        Raises PeersMissing, PeersDiffer, SettingsError, RunIsOver, on all ranks.
        """
        from train.diloco.outer_step import Site  # it loads torchft, which takes seconds

        config, world = job.config, job.world
        if job.step >= config.last_step and self.kept[1].get("finished") == job.step:
            return
        limit_s = 2 * config.start_timeout_s + timeouts.SYNC_TIMEOUT_S
        with job.activity("waiting for other sites", limit_s, "START_TIMEOUT_S"):
            problem: Exception | None = None
            if world.is_first:
                self.desk = Desk(config, facts_of(job))
                problem = find_desk(job, self.desk)
            if problem := from_first(problem):
                raise problem
            try:
                self.site = Site(
                    config,
                    world,
                    job.model,
                    job.optimizer,
                    lambda: job.interrupt.asked is not None,
                )
            except SitesMissing as error:
                raise PeersMissing(str(error)) from None
            self.stand(job.step)
            is_apart = False
            if self.desk:
                try:
                    self.is_late, is_apart = gather(job, self.site, self.desk)
                except (SettingsError, PeersDiffer, PeersMissing, RunIsOver) as error:
                    problem = error
            problem, self.is_late, is_apart = from_first((problem, self.is_late, is_apart))
            if problem:
                raise problem
            if is_apart:
                self.site.fall_behind()

    def stand(self, step: int) -> None:
        """Have the site stand where the checkpoint does that was taken up, or at the run's start."""
        assert self.site
        turn = self.site.turn
        tensors, facts = self.kept
        if facts.get("turn") == turn:
            exchanges, base = facts["exchanges"], facts["base"]
        else:  # none was kept, or exchanges come in another rhythm now
            exchanges, base = step // turn, 0
        self.site.adopt(tensors, step, exchanges, base)
        self.site.finished = facts.get("finished", -1)
        self.kept = ({}, {})

    def at_start(self, job: "Job") -> None:
        """Take the others' weights if this site is late, and end an exchange in which it was stopped."""
        site = self.site
        if site is None:
            return
        if self.desk:
            self.desk.said["training"] = True
        is_due = site.engine.position >= site.engine.opens and job.step < job.config.last_step
        if self.is_late or is_due:
            self.advance(job, now=True)
        if job.step >= job.config.last_step and site.finished != job.step:
            self.finish(job)

    # ---- Behind a step

    def after_step(self, job: "Job", numbers: StepNumbers) -> dict[str, Any]:
        if self.site is None:
            return {}
        values: dict[str, Any] = {"replica": job.config.site_rank}
        if self.stall_s:
            values["exchange_stall_s"] = self.stall_s
        self.stall_s = 0.0
        return values

    def between_steps(self, job: "Job", agreed: set[str]) -> None:
        if self.site is None:
            return
        if self.site.waits_next:
            self.advance(job, now=False)
        else:
            self.site.advance(job.step)
        if job.step == job.config.last_step and "stop" not in agreed:
            self.finish(job)

    def finish(self, job: "Job") -> None:
        """Exchange what the sites have not in common yet, so that all end with the same weights."""
        step, site = job.step, self.site
        assert site
        while not site.is_through(step):
            self.advance(job, now=True)
            if job.step < step:  # it failed: the steps until here are made again
                return
        site.finish(step)

    def settle(self, job: "Job") -> None:
        """End the exchange that is in flight, as a checkpoint cannot hold it. The next comes when the others' does."""
        if self.site and self.site.engine.in_flight:
            self.advance(job, now=True)

    def advance(self, job: "Job", now: bool) -> None:
        """A step of Site.advance that waits for others, and what follows.

        Raises StopTraining if told to stop while it waited, PeersMissing.
        """
        site, called = self.site, time.perf_counter()
        assert site
        # Until there is a quorum, until those that are behind have fetched weights, and for the rest.
        limit_s = 3 * timeouts.SYNC_TIMEOUT_S
        job.status.beat(step=job.step)
        with job.activity("an exchange between sites", limit_s, phase="exchanging"):
            try:
                outcome = site.advance(job.step, now)
            except ToldToStop:
                raise StopTraining from None
            except (SitesMissing, DoubleSite) as error:
                raise PeersMissing(str(error)) from None
            self.is_late = False
            job.rates.sites = outcome.sites
            if outcome.behind:
                self.catch_up(job, outcome, called)
            if outcome.fragment is not None:
                if outcome.committed:
                    self.record_exchange(job, outcome)
                else:
                    self.undo(job, outcome)
                site.engine.position = job.step - site.common_step
            if self.desk:
                self.desk.said |= {
                    "outer": outcome.outer,
                    "common": site.common,
                    "step": job.step,
                }
        self.stall_s += time.perf_counter() - called

    def record_exchange(self, job: "Job", outcome: Outcome) -> None:
        """The steps since the exchange before are what all sites have now."""
        assert self.site
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
        job.guard.exchanged(self.site.turn)
        before = self.sites_before
        self.sites_before = outcome.sites
        if before == outcome.sites and outcome.outer % 10:
            return
        away = ", ".join(map(str, self.site.away))
        missing = f" (away: {away})" if away else ""
        job.recorder.say(
            f"exchange {outcome.outer} after step {job.step}: {outcome.sites} of {job.config.sites} "
            f"sites{missing}, {outcome.sent / 1e6:.1f} MB in {outcome.seconds:.2f} s, of which training "
            f"waited {outcome.stall_s:.2f} s; hash {outcome.digest}"
        )

    def undo(self, job: "Job", outcome: Outcome) -> None:
        """The exchange failed, and the site has dropped what it trained since the one before."""
        assert self.site
        failed = [reason for reason in from_all(self.site.striped.failed) if reason]
        if failed:
            reason = str(failed[0]).splitlines()[0]
        elif outcome.sites >= job.config.min_sites:
            reason = "another process of this site failed"
        else:
            reason = f"{outcome.sites} sites, and MIN_SITES={job.config.min_sites}"
        reason = f"the exchange after step {job.step} failed ({reason})"
        self.back_to_common(job, reason, time.perf_counter(), outcome.stall_s)

    def catch_up(self, job: "Job", outcome: Outcome, called: float) -> None:
        """This site was behind, and has the weights and the step of one that is not. called: when it began to ask."""
        assert outcome.behind and self.site
        begin, end = outcome.behind
        if end < begin:
            reason = "this site trained apart from the others and now has their weights"
            self.back_to(job, end, reason, called)
            return
        job.step = end
        job.guard.exchanged(self.site.turn)
        self.away.append([begin, end])
        job.requests.add("save")
        for hook in job.hooks:
            hook.after_skip(job)
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

    # ---- Going back, saving, leaving

    def roll_back(self, job: "Job", reason: str) -> bool:
        """To what the sites have in common, where a run without sites takes up a checkpoint."""
        if self.site is None:
            return False
        began = time.perf_counter()
        self.settle(job)
        here = job.step
        self.site.step = here
        self.site.drop()
        job.guard.went_back(here, min(here, self.site.common_step))
        reason = f"{reason} (rollback {job.guard.rollbacks} of {MAX_ROLLBACKS})"
        self.back_to_common(job, reason, began)
        return True

    def back_to_common(self, job: "Job", reason: str, began: float, stall_s: float = 0.0) -> None:
        """This site has dropped what it trained since the last exchange."""
        assert self.site
        # That may be due at a later step, where it ended early.
        self.back_to(job, min(job.step, self.site.common_step), reason, began, stall_s)

    def back_to(
        self, job: "Job", step: int, reason: str, began: float, stall_s: float = 0.0
    ) -> None:
        """Stand at an earlier step with the weights that are there.

        began: time.perf_counter() when that began. Raises CheckpointError, on all ranks.
        """
        assert self.site
        here = job.step
        job.step = step
        # Checkpoints in between know of steps that are lost.
        recovery.put_aside_later_checkpoints(job)
        job.guard.exchanged(self.site.turn)
        recovery.pass_over(job, here, step, began, stall_s=stall_s)
        job.recorder.say(
            f"{reason}: back to step {job.step}, what the sites have in common; {here - job.step} steps of this "
            "site are lost, and their samples are passed over"
        )

    def before_save(self, job: "Job", manifest: dict[str, Any]) -> dict[str, Tensor] | None:
        if self.site is None:
            return None
        self.settle(job)
        manifest["sites"] = self.site.small() | {"away": self.away}
        return self.site.states()

    def after_load(
        self, job: "Job", manifest: Mapping[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        facts = manifest.get("sites", {})
        if tensors:
            self.kept = (tensors, facts)
        # Until schema 2 they were among what is kept of the data.
        self.away = list(facts.get("away", manifest["data"].get("away", ())))

    def close(self, job: "Job", code: int, is_hurried: bool) -> None:
        if self.desk:
            self.desk.leave(done=code == 0)
        if self.site:
            self.site.leave()


def facts_of(job: "Job") -> dict[str, Any]:
    """What this site says of itself to the others."""
    config = job.config
    return rendezvous.facts_of(config, job.world.local_size) | {
        "node_rank": config.node_rank,
        "nodes": config.nodes,
        "data": job.data_fingerprint,
        "processes": job.world.size,
        "last_step": config.last_step,
        "training": False,
        "common": "",
        "step": job.step,
    }


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


def gather(job: "Job", site: "Site", desk: Desk) -> tuple[bool, bool]:
    """Say that this site is there, and wait for the others. Returns whether any is further than this one, or has other
    weights that count; and whether it is for the latter.

    Raises PeersMissing, PeersDiffer, SettingsError, RunIsOver.
    """
    c = job.config
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
