"""What a site needs to find the others, under SYNC=diloco: torchft, an address of its own, and the lighthouse."""

import socket

from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding, told
from settings.rules import site_problem
from train.diloco.site_registry import Desk, NoDesk
from train.distributed.rendezvous import is_here

NAME = "lighthouse"


def findings(c: Config, ask: bool = True) -> list[Finding]:
    """None where sites do not train apart. ask: the lighthouse too, which has ten seconds to answer."""
    if c.replicas == 1:
        return []
    if problem := site_problem(c):
        return [told(NAME, FAIL, problem, 64)]
    return [*address(c), reached(c)] if ask else address(c)


def address(c: Config) -> list[Finding]:
    """Whether SITE_ADDR is this machine's, on which the others call it."""
    name = c.site_addr or socket.gethostname()
    try:
        found = sorted(
            {str(entry[4][0]) for entry in socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)}
        )
    except OSError:
        found = []
    setting = (
        f"SITE_ADDR={name}" if c.site_addr else f"SITE_ADDR is not set, and this host's name {name}"
    )
    if not any(map(is_here, found)):
        return [
            Finding(
                NAME,
                FAIL,
                f"{setting}: {', '.join(found) or 'no address'} is none of this machine",
                "set SITE_ADDR to the address at which the other sites reach this machine, for example that of "
                "its VPN: SITE_ADDR=10.0.0.6",
                64,
            )
        ]
    if all(
        entry.startswith("127.") or entry == "::1" for entry in found
    ) and not c.lighthouse.startswith("127."):
        return [
            Finding(
                NAME,
                WARN,
                f"{setting} leads to {', '.join(found)}, at which only this machine reaches itself",
                "set SITE_ADDR to the address at which the other sites reach it",
            )
        ]
    return []


def reached(c: Config) -> Finding:
    desk = Desk(c.lighthouse, c.site_rank, c.sites, {})
    try:
        there = sorted(desk.read())
    except NoDesk as error:
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
