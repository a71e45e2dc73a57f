"""A site's part in the registry that `make lighthouse` serves: who it is, how far it is, that it lives.

torchft's lighthouse knows who takes part in an exchange, not with which settings, nor whether
somebody is on the way. Here a thread of each site speaks every few seconds. The registry
(distributed/registry.py) is on the port after LIGHTHOUSE's. Standard library only.
"""

import contextlib
import functools
import socket
import threading
from collections.abc import Callable

from settings.addresses import split_address
from settings.config import Config
from train.distributed import run_secret
from train.distributed.registry import Client, Facts, Members, Unreachable, serve
from train.distributed.signed_http import SignedServer

SYNC_STREAMS = 16  # connections between two sites: one alone does not fill 1 Gbit/s at 30 ms
BEAT_S = 2.0  # between two beats
LOOK_S = 3 * BEAT_S  # who has not spoken by then is gone
NoDesk = Unreachable  # the registry of sites cannot be reached; the message says where it should be


def own_address(lighthouse: str) -> str:
    """Return the address from which this machine reaches the lighthouse: the other sites use it.

    Connecting a UDP socket sends nothing. The system only chooses the route, and with it the
    address. Raises OSError where the host does not resolve or no route leads to it.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(split_address(lighthouse, 0))
        return str(probe.getsockname()[0])


def serve_sites(config: Config, host: str, port: int) -> SignedServer:
    """Serve the registry of sites in a thread. Raises OSError."""
    return serve(Members(), host, port, functools.partial(run_secret.find_secret, config))


class Desk(Client):
    """What a site says and hears. One process of the site has it; `said` is what it says."""

    def __init__(self, config: Config, facts: Facts):
        """facts: who this is, beside `outer`, the number of exchanges that it has seen."""
        host, port = split_address(config.lighthouse, 0)
        advice = run_secret.describe_missing(config)
        find_secret = functools.partial(run_secret.find_secret, config)
        super().__init__(host, port + 1, config.site_rank, find_secret, advice)
        self.sites = config.sites
        self.said |= facts | {"outer": 0}
        self.over = threading.Event()
        self.thread = threading.Thread(target=self.speak, name="desk", daemon=True)

    def read(self) -> dict[int, Facts]:
        """Return what each site of the run says that has not left. Raises NoDesk."""
        members = super().read().items()
        return {site: said for site, said in members if site < self.sites and "left" not in said}

    def living(
        self, patience_s: float, enough: Callable[[dict[int, Facts]], object] = lambda heard: False
    ) -> dict[int, Facts]:
        """Return what those other sites say that live. Raises NoDesk.

        Looks for patience_s, or until what it heard is enough, or all live.
        """

        def others(heard: dict[int, Facts]) -> dict[int, Facts]:
            return {site: said for site, said in heard.items() if site != self.name}

        def is_enough(heard: dict[int, Facts]) -> object:
            return len(others(heard)) == self.sites - 1 or enough(others(heard))

        return others(self.listen_for(patience_s, is_enough))

    def double(self) -> Facts | None:
        """Return what another process says that is this site and lives. Ask before speaking."""
        if self.name not in self.read():
            return None
        return self.listen_for(LOOK_S, lambda heard: self.name in heard).get(self.name)

    def live(self) -> None:
        """Speak from now on, in a thread. Where the registry is away it goes on trying."""
        self.thread.start()

    def speak(self) -> None:
        while not self.over.wait(BEAT_S):
            with contextlib.suppress(NoDesk):
                self.say()

    def leave(self, done: bool) -> None:
        """This site ends: it leaves, or leaves behind that the run is done."""
        self.over.set()
        if self.thread.is_alive():
            self.thread.join()
        with contextlib.suppress(NoDesk):
            self.say(**{"done" if done else "left": True})
