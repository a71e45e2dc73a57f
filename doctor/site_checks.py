"""What a site needs to find the others, under SYNC=diloco: torchft, an address of its own, and the lighthouse."""

from settings.checks import find_site_problem
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding
from train.diloco.site_registry import SiteClient, own_address
from train.distributed.registry import Unreachable

NAME = "lighthouse"


def findings(c: Config, ask: bool = True) -> list[Finding]:
    """None where sites do not train apart. ask: the lighthouse too, which has ten seconds to answer."""
    if c.replicas == 1:
        return []
    if problem := find_site_problem(c):
        return [Finding(NAME, FAIL, problem, code=64)]
    return [*address(c), reached(c)] if ask else address(c)


def address(c: Config) -> list[Finding]:
    """Whether the address that the other sites are given leads to this machine from there."""
    host = c.lighthouse.rpartition(":")[0]
    try:
        own = own_address(c.lighthouse)
    except OSError:  # reached() says it
        return []
    if not own.startswith("127.") or host == "localhost" or host.startswith("127."):
        return []
    return [
        Finding(
            NAME,
            WARN,
            f"LIGHTHOUSE={c.lighthouse} leads to this machine's {own}, at which only this machine reaches itself: "
            "the other sites would not find this one",
            "set LIGHTHOUSE to the address at which all sites reach it, for example LIGHTHOUSE=10.0.0.5:29510",
        )
    ]


def reached(c: Config) -> Finding:
    try:
        there = sorted(SiteClient(c, {}).read())
    except Unreachable as error:
        return Finding(
            NAME,
            WARN,
            f"LIGHTHOUSE={c.lighthouse}: {error}",
            "start make lighthouse there, on a machine "
            "that all sites reach; a site waits START_TIMEOUT_S for it",
        )
    return Finding(
        NAME,
        PASS,
        f"LIGHTHOUSE={c.lighthouse} answers; sites that it has heard of: "
        f"{', '.join(map(str, there)) or 'none'}",
    )
