"""The roll call of sites before the first step: who is there, whether all fit, and who is ahead."""

import contextlib
import logging
import time
from typing import TYPE_CHECKING

from record.exit_codes import BAD_SETTING
from settings import SettingsError
from train.diloco.result import APART, RunIsOver
from train.diloco.site_registry import SYNC_STREAMS, Desk, NoDesk
from train.distributed import rendezvous
from train.distributed.registry import WAITING, Facts, differences, named
from train.distributed.world import PeersDiffer, PeersMissing

if TYPE_CHECKING:
    from train.diloco.site import Site
    from train.job import Job

log = logging.getLogger(__name__)

LOOK_S = 3.0  # between two looks at who has come


def facts_of(job: "Job") -> Facts:
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


def find_desk(job: "Job", desk: Desk) -> None:
    """Wait for the lighthouse, which may be started after its sites. Raises PeersMissing."""
    config = job.config
    deadline = time.monotonic() + config.start_timeout_s
    is_said = False
    job.status.phase(f"{WAITING} 1/{config.sites}")
    while True:
        try:
            desk.read()
            return
        except NoDesk as error:
            trouble = f"LIGHTHOUSE={config.lighthouse}: {error}"
        if time.monotonic() > deadline:
            raise PeersMissing(
                f"{trouble}, in START_TIMEOUT_S={config.start_timeout_s}; start make lighthouse "
                "there, and look at the network"
            )
        if not is_said:
            log.info("%s; trying for %d s", trouble, config.start_timeout_s)
            is_said = True
        job.status.beat()
        time.sleep(1.0)


def gather(job: "Job", site: "Site", desk: Desk) -> tuple[bool, bool]:
    """Say that this site is there, and wait for the others.

    Returns:
        Whether another site is ahead of this one, and whether that is because the two trained
        apart and the other's weights count.

    Raises PeersMissing, PeersDiffer, SettingsError, RunIsOver.
    """
    config = job.config
    try:
        if other := desk.double():
            raise PeersMissing(
                f"site {config.site_rank} is there already, on {other['host']}; stop one of them, "
                "or give each its own NODE_RANK"
            )
        desk.say(outer=site.exchanges, common=site.common)
        desk.live()
        found = wait_for_sites(job, desk)
    except NoDesk as error:
        raise PeersMissing(
            f"LIGHTHOUSE={config.lighthouse}: {error}; start make lighthouse there, and look at the "
            "network"
        ) from None
    if not has_begun(found) and len(found) + 1 < config.min_sites:
        raise PeersMissing(
            f"{len(found) + 1} of {config.sites} sites came in "
            f"START_TIMEOUT_S={config.start_timeout_s}, and MIN_SITES={config.min_sites}"
        )
    exchanges_ahead = max([0, *(said["outer"] - site.exchanges for said in found.values())])
    names = ", ".join(named(found[other]) for other in sorted(found)) or "none"
    log.info(
        "site %d of %d, on %s: others there: %s; exchanges every %d steps with H=%d, by %d "
        "connections, in %s",
        config.site_rank,
        config.sites,
        site.address,
        names,
        site.turn,
        config.sync_every,
        SYNC_STREAMS,
        config.sync_dtype,
    )
    is_apart = any(gives_way(desk.said, other) for other in found.values())
    if is_apart:
        log.info(
            "another site was trained apart from this one: after as many exchanges the two have "
            "not the same weights in common. This site takes over the other's"
        )
        with contextlib.suppress(NoDesk):
            desk.say(outer=APART)  # another would else see this one train, and give way in turn
    return exchanges_ahead > 0 or is_apart, is_apart


def wait_for_sites(job: "Job", desk: Desk) -> dict[int, Facts]:
    """Return what the other sites say: all of them, or those that came in START_TIMEOUT_S.

    If some train already, it is not waited for the rest. Raises NoDesk, PeersDiffer,
    SettingsError, RunIsOver.
    """
    config = job.config
    deadline = time.monotonic() + config.start_timeout_s
    said_missing = ""
    while True:
        if end := describe_end(job, desk.read()):
            raise RunIsOver(end)
        found = desk.living(LOOK_S, enough=has_begun)
        for other in found.values():
            refuse_other(desk.said, other)
        if has_begun(found) or len(found) + 1 == config.sites or time.monotonic() > deadline:
            return found
        others = [site for site in range(config.sites) if site != config.site_rank]
        missing = ", ".join(str(site) for site in others if site not in found)
        there = len(found) + 1
        job.status.phase(f"{WAITING} {there}/{config.sites}")
        if missing != said_missing:
            log.info("%d of %d sites are there; missing: %s", there, config.sites, missing)
            said_missing = missing


def has_begun(sites: dict[int, Facts]) -> bool:
    return any(said["training"] for said in sites.values())


def gives_way(mine: Facts, other: Facts) -> bool:
    """Return whether this site takes over the other's weights, since the two trained apart.

    They have seen equally many exchanges, but not the same: each was up while the other was down.
    A site gives way to one that trains, or has made more steps, or has the lower number.
    """

    def rank(said: Facts) -> tuple[bool, int, int]:
        return said["training"], said["step"], -said["node_rank"]

    is_apart = other["outer"] == mine["outer"] and other["common"] != mine["common"]
    return is_apart and rank(other) > rank(mine)


def describe_end(job: "Job", said: dict[int, Facts]) -> str:
    """Say who trained the run to its end while this site, which had a part in it, was away; or ""."""
    config = job.config
    for site, other in said.items():
        is_same_run = other["settings"]["RUN_NAME"] == config.run_name
        is_done = other.get("done") and other["last_step"] >= config.last_step
        if site != config.site_rank and job.step > 0 and is_same_run and is_done:
            return (
                f"run {config.run_name} is done: the other sites made its last step "
                f"{other['last_step']} without this one, which stands at step {job.step}; its "
                f"weights are at {named(other)}"
            )
    return ""


def refuse_other(mine: Facts, other: Facts) -> None:
    """Raise SettingsError or PeersDiffer unless two sites can train one model together."""
    first, second = sorted((mine, other), key=lambda said: said["node_rank"])
    for verdict in differences(first, second):
        why = verdict.why.replace("all nodes", "all sites")
        raise SettingsError([why]) if verdict.code == BAD_SETTING else PeersDiffer(why)
