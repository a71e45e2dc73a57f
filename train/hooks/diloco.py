"""SYNC=diloco: what a run does about its other sites. It finds them, and syncs with them.

a step -> Site.sync -> it counts      a `sync` event, with a hash of the global weights
                        -> it failed      back to the last sync: `rollback`, samples passed over
                        -> it was behind  the weights of the others: `gap`, the steps it missed
"""

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from settings import SettingsError
from train import timeouts
from train.checkpoint.checkpoint import cause
from train.checkpoint.resume import quarantine_later_checkpoints
from train.diloco import site_rendezvous
from train.diloco.result import Interrupted, RunIsOver
from train.diloco.site_registry import SiteClient
from train.distributed.world import (
    PeersDiffer,
    PeersMissing,
    all_gather_object,
    broadcast_object,
    raise_on_all_ranks,
)
from train.faults.guard import MAX_ROLLBACKS
from train.hooks.hook import STOP, Hook, Requests
from train.step import StepNumbers

if TYPE_CHECKING:
    from train.diloco.site import Site
    from train.job import Job


class DiLoCo(Hook):
    """This site among the others. It is no hook of a run that has nothing left to sync.

    Attributes:
        site: on all ranks, once they have joined.
        client: what the sites say of themselves, on the first rank.
        is_behind: whether the other sites had made more syncs when this one started.
        missed: steps that this site took no part in, as [from, to].
        stall_s: of syncs that no step has reported yet.
        sites_before: that took part in the last sync.
        stored: tensors and facts of a checkpoint, until the site continues there.
    """

    site: "Site"

    def __init__(self) -> None:
        self.client: SiteClient | None = None
        self.is_behind = False
        self.missed: list[list[int]] = []
        self.stall_s = 0.0
        self.sites_before = 0
        self.stored: tuple[dict[str, Tensor], Mapping[str, Any]] = ({}, {})

    # ---- Before the first step

    def join(self, job: "Job") -> None:
        """Find the other sites: all of them, or those that come in START_TIMEOUT_S.

        Raises PeersMissing, PeersDiffer, SettingsError, RunIsOver, on all ranks.
        """
        from train.diloco.site import Site  # it loads torchft, which takes seconds

        config, world = job.config, job.world
        tensors, facts = self.stored
        if job.step >= config.last_step and facts.get("finished") == job.step:
            job.hooks = [hook for hook in job.hooks if hook is not self]
            return
        deadline = time.monotonic() + config.start_timeout_s
        limit_s = config.start_timeout_s + timeouts.SYNC_TIMEOUT_S
        with job.activity("waiting for other sites", limit_s, "START_TIMEOUT_S"):
            with raise_on_all_ranks(PeersMissing, RunIsOver):
                if world.is_first:
                    self.client = SiteClient(config, site_rendezvous.facts_of(job))
                    site_rendezvous.wait_for_sites(job, self.client, deadline)
            self.site = Site(
                config,
                world,
                job.model,
                job.optimizer,
                lambda: job.interrupt.asked is not None,
                job.step,
                tensors,
                facts,
            )
            self.stored = ({}, {})
            with raise_on_all_ranks(SettingsError, PeersDiffer, PeersMissing, RunIsOver):
                if self.client:
                    others = site_rendezvous.wait_for_sites(job, self.client, deadline, self.site)
                    site_rendezvous.log_sites(config, self.site, others)
                    syncs = [other["exchanges"] for other in others.values()]
                    self.is_behind = max(syncs, default=0) > self.site.syncs
            self.is_behind = broadcast_object(self.is_behind)

    def at_start(self, job: "Job") -> Requests | None:
        """Take the others' weights if this site is behind; make the sync in which it was stopped."""
        site = self.site
        if self.client:
            self.client.said["training"] = True
        is_due = site.is_due(job.step) and job.step < job.config.last_step
        if (self.is_behind or is_due) and self.sync(job):
            return STOP
        if job.step >= job.config.last_step and site.finished != job.step:
            return self.finish(job)
        return None

    # ---- After a step

    def after_step(self, job: "Job", numbers: StepNumbers) -> dict[str, Any]:
        values: dict[str, Any] = {"replica": job.config.site_rank}
        if self.stall_s:
            values["exchange_stall_s"] = self.stall_s
        self.stall_s = 0.0
        return values

    def between_steps(self, job: "Job", requests: Requests) -> Requests | None:
        if self.site.is_due(job.step) and self.sync(job):
            return STOP
        if job.step == job.config.last_step and "stop" not in requests:
            return self.finish(job)
        return None

    def finish(self, job: "Job") -> Requests | None:
        """Sync what the sites do not have in common yet, so that all end with the same weights."""
        step, site = job.step, self.site
        while not site.is_all_synced(step):
            if self.sync(job):
                return STOP
            if job.step < step:  # it failed: the steps until here are made again
                return None
        site.finish(step)
        return None

    def finish_in_flight(self, job: "Job") -> None:
        """End the sync that is in flight, which a checkpoint cannot hold. The next comes as usual."""
        if self.site.in_flight:
            self.sync(job)

    def sync(self, job: "Job") -> Requests | None:
        """Begin or end a sync, and do what follows from it. Raises PeersMissing, PeersDiffer.

        Returns:
            "stop" if told so while waiting for others to begin it.
        """
        site, called = self.site, time.perf_counter()
        # Until there is a quorum, until those that are behind have fetched weights, and for the rest.
        limit_s = 3 * timeouts.SYNC_TIMEOUT_S
        job.status.beat(step=job.step)
        with job.activity("a sync between sites", limit_s, phase="syncing"):
            try:
                counts = site.sync(job.step)
            except Interrupted:
                return STOP
            job.rates.sites = site.present
            if site.healed_at is not None:
                self.catch_up(job, site.healed_at)
            if counts:
                self.record_sync(job)
            elif counts is not None:
                self.undo(job)
            if self.client:
                self.client.said |= site.progress()
        self.stall_s += time.perf_counter() - called
        return None

    def record_sync(self, job: "Job") -> None:
        """Record a sync that counts."""
        site = self.site
        digest = site.digests[site.number]
        sent = site.gloo.bytes_sent
        job.recorder.event(
            "sync",
            job.step,
            job.tokens,
            replica=job.config.site_rank,
            outer_step=site.syncs,
            fragment=site.number,
            sites=site.present,
            committed=True,
            seconds=site.seconds,
            stall_s=site.waited_s,
            bytes=sent,
            hash=digest,
        )
        job.guard.synchronized(site.sync_interval)
        has_changed = site.present != self.sites_before
        self.sites_before = site.present
        if not has_changed and site.syncs % 10:
            return
        away = ", ".join(map(str, site.away))
        missing = f" (away: {away})" if away else ""
        job.recorder.say(
            f"sync {site.syncs} after step {job.step}: {site.present} of "
            f"{job.config.sites} sites{missing}, {sent / 1e6:.1f} MB in {site.seconds:.2f} s, of which "
            f"training waited {site.waited_s:.2f} s; hash {digest}"
        )

    def catch_up(self, job: "Job", step: int) -> None:
        """Continue with the weights and from the step of a site that this one was behind."""
        step_before = job.step
        job.step = step
        job.guard.synchronized(self.site.sync_interval)
        self.missed.append([step_before, step])
        job.requests.add("save")
        for hook in job.hooks:
            hook.after_jump(job)
        facts = {"replica": job.config.site_rank, "reason": "away", "from": step_before, "to": step}
        job.recorder.event("gap", step, job.tokens, **facts)
        job.recorder.say(
            f"this site was away at step {step_before}. It continues after step {step} with the weights "
            f"of the others ({self.site.present} of {job.config.sites} sites are there)"
        )

    # ---- Going back, saving, leaving

    def undo(self, job: "Job") -> None:
        """Go on from the sync before one that failed. The site has dropped its steps since."""
        failed = self.site.gloo.failed
        causes = all_gather_object(cause(failed) if failed else "")  # not every error can be sent
        if any(causes):
            reason = next(filter(None, causes))
        elif self.site.present < job.config.min_sites:
            reason = f"{self.site.present} sites, and MIN_SITES={job.config.min_sites}"
        else:
            reason = "another process of this site failed"
        reason = f"the sync after step {job.step} failed ({reason})"
        self.go_back(job, reason, time.perf_counter(), self.site.waited_s)

    def roll_back(self, job: "Job", reason: str) -> bool:
        """Go back to the global weights, where a run without sites goes back to a checkpoint."""
        began = time.perf_counter()
        self.finish_in_flight(job)
        step_before = job.step
        self.site.outer.reset_to_global()
        job.guard.went_back(step_before, min(step_before, self.site.last_sync_step))
        reason = f"{reason} (rollback {job.guard.rollbacks} of {MAX_ROLLBACKS})"
        self.go_back(job, reason, began, stall_s=0.0)
        return True

    def go_back(self, job: "Job", reason: str, began: float, stall_s: float) -> None:
        """Continue from the step of the last sync, whose weights are there.

        began: time.perf_counter() when that began. Raises CheckpointError, on all ranks.
        """
        step_before = job.step
        # It may be due at a later step, where it was made early.
        job.step = min(step_before, self.site.last_sync_step)
        # Checkpoints in between know of steps that are lost.
        quarantine_later_checkpoints(job)
        job.guard.synchronized(self.site.sync_interval)
        job.recovery.skip_samples(job, step_before, job.step, began, stall_s=stall_s)
        job.recorder.say(
            f"{reason}: back to step {job.step}, what the sites have in common; {step_before - job.step} "
            "steps of this site are lost, and their samples are passed over"
        )

    def before_save(self, job: "Job", manifest: dict[str, Any]) -> dict[str, Tensor]:
        self.finish_in_flight(job)
        manifest["sites"] = self.site.facts() | {"away": self.missed}
        return self.site.outer.tensors()

    def after_load(
        self, job: "Job", manifest: Mapping[str, Any], tensors: dict[str, Tensor]
    ) -> None:
        facts = manifest.get("sites", {})
        if tensors:
            self.stored = (tensors, facts)
        self.missed = list(facts.get("away", ()))

    def close(self, job: "Job", code: int, is_hurried: bool) -> bool:
        if self.client:
            self.client.leave(done=code == 0)
        return hasattr(self, "site") and self.site.leave()
