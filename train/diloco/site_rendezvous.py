"""The rendezvous of sites before the first step: who is there, whether all fit, and who is ahead."""

import logging
import time
from typing import TYPE_CHECKING

from record.exit_codes import BAD_SETTING
from settings import SettingsError
from settings.config import Config
from train.diloco.result import RunIsOver
from train.diloco.site_registry import SYNC_STREAMS, SiteClient, Sites
from train.distributed import rendezvous
from train.distributed.registry import WAITING, Facts, Unreachable, differences, named
from train.distributed.world import PeersDiffer, PeersMissing

if TYPE_CHECKING:
    from train.diloco.site import Site
    from train.job import Job

log = logging.getLogger(__name__)

RETRY_S = 1.0  # before the lighthouse is asked again


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
        "exchanges": -1,  # until Site.progress is known
    }


def wait_for_sites(
    job: "Job", client: SiteClient, deadline: float, site: "Site | None" = None
) -> Sites:
    """Wait for the lighthouse, which may be started after its sites, and then for the other sites.

    Args:
        deadline: START_TIMEOUT_S from when this site began to wait, by time.monotonic().
        site: this one, which says that it is there. Without, the lighthouse is enough.

    Returns:
        What the others say: all of them, or those that came by the deadline. If some train already,
        the rest is not waited for.

    Raises PeersMissing, PeersDiffer, SettingsError, RunIsOver.
    """
    config = job.config
    last_news = ""

    def is_enough(others: Sites) -> bool:
        return site is None or has_begun(others) or len(others) + 1 == config.sites

    while True:
        is_overdue = time.monotonic() > deadline
        there = 1
        try:
            if end := describe_end(job, client.read()):
                raise RunIsOver(end)
            if site and not client.heartbeat.is_alive():
                refuse_duplicate(config, client)
                client.say(**site.progress())
                client.heartbeat.start()
            others = client.listen(is_enough)
            for other in others.values():
                refuse_other(config, client.said, other)
            there = len(others) + 1
            if is_enough(others) or (is_overdue and there >= config.min_sites):
                return others
            missing_sites = set(range(config.sites)) - {config.site_rank, *others}
            missing = ", ".join(map(str, sorted(missing_sites)))
            news = f"{there} of {config.sites} sites are there; missing: {missing}"
            advice = f"start them, or lower MIN_SITES={config.min_sites}"
        except Unreachable as error:
            news = f"LIGHTHOUSE={config.lighthouse}: {error}"
            advice = "start make lighthouse there, and look at the network"
        if is_overdue:
            raise PeersMissing(f"{news}, after START_TIMEOUT_S={config.start_timeout_s}; {advice}")
        job.status.phase(f"{WAITING} {there}/{config.sites}")
        if news != last_news:
            log.info("%s; waiting for up to %d s", news, config.start_timeout_s)
            last_news = news
        time.sleep(RETRY_S)


def log_sites(config: Config, site: "Site", others: Sites) -> None:
    log.info(
        "site %d of %d, on %s: others there: %s; syncs every %d steps with H=%d, by %d "
        "connections, in %s",
        config.site_rank,
        config.sites,
        site.address,
        ", ".join(named(others[other]) for other in sorted(others)) or "none",
        site.sync_interval,
        config.sync_every,
        SYNC_STREAMS,
        config.sync_dtype,
    )


def has_begun(sites: Sites) -> bool:
    return any(facts["training"] for facts in sites.values())


def describe_end(job: "Job", sites: Sites) -> str:
    """Say who trained the run to its end while this site, which had a part in it, was away; or ""."""
    config = job.config
    for site, other in sites.items():
        is_same_run = other["settings"]["RUN_NAME"] == config.run_name
        is_done = other.get("done") and other["last_step"] >= config.last_step
        if site != config.site_rank and job.step > 0 and is_same_run and is_done:
            return (
                f"run {config.run_name} is done: the other sites made its last step "
                f"{other['last_step']} without this one, which stands at step {job.step}; its "
                f"weights are at {named(other)}"
            )
    return ""


def refuse_duplicate(config: Config, client: SiteClient) -> None:
    """Raise PeersMissing if another process is this site. Raises Unreachable."""
    other = client.find_duplicate()
    if other:
        raise PeersMissing(
            f"site {config.site_rank} is there already, on {other['host']}; stop one of them, "
            "or give each its own NODE_RANK"
        )


def refuse_other(config: Config, mine: Facts, other: Facts) -> None:
    """Raise SettingsError or PeersDiffer unless two sites can train one model together."""
    first, second = sorted((mine, other), key=lambda facts: facts["node_rank"])
    for verdict in differences(first, second):
        why = verdict.why.replace("all nodes", "all sites")
        raise SettingsError([why]) if verdict.code == BAD_SETTING else PeersDiffer(why)
    if mine["exchanges"] == other["exchanges"] and mine["weights"] != other["weights"]:
        raise PeersDiffer(describe_apart(config, named(other)))


def describe_apart(config: Config, other: str) -> str:
    """Say what to do where each of two sites was up while the other was down, and both trained."""
    return (
        f"site {config.site_rank} and {other} have trained apart, and their weights no longer fit "
        f"together. Choose one of them, and move away the run folder of the other (of site "
        f"{config.site_rank}: {config.run_folder}), which then takes over the weights of the first"
    )
