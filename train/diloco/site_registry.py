"""A site's part in the registry that `make lighthouse` serves: who it is, how far it is, that it lives.

torchft's lighthouse knows who takes part in a sync, not with which settings, nor whether
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

Sites = dict[int, Facts]


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


class SiteClient(Client):
    """What a site says and hears. One process of the site has it; `said` is what it says."""

    def __init__(self, config: Config, facts: Facts):
        host, port = split_address(config.lighthouse, 0)
        advice = run_secret.describe_missing(config)
        find_secret = functools.partial(run_secret.find_secret, config)
        super().__init__(host, port + 1, config.site_rank, find_secret, advice)
        self.sites = config.sites
        self.said |= facts
        self.over = threading.Event()
        self.heartbeat = threading.Thread(target=self.beat, name="site-heartbeat", daemon=True)

    def read(self) -> Sites:
        """Return what each site of the run says that has not left. Raises Unreachable."""
        members = super().read().items()
        return {site: facts for site, facts in members if site < self.sites and "left" not in facts}

    def listen(self, enough: Callable[[Sites], bool]) -> Sites:
        """Return the other sites that speak from now on, once they are enough or LOOK_S has passed.

        Raises Unreachable.
        """

        def others(heard: Sites) -> Sites:
            return {site: facts for site, facts in heard.items() if site != self.name}

        return others(self.listen_for(LOOK_S, lambda heard: enough(others(heard))))

    def find_duplicate(self) -> Facts | None:
        """Return what another process says that is this site and lives. Ask before speaking."""
        if self.name not in self.read():
            return None
        return self.listen_for(LOOK_S, lambda heard: self.name in heard).get(self.name)

    def beat(self) -> None:
        """Speak until this site leaves. Where the registry is away it goes on trying."""
        while not self.over.wait(BEAT_S):
            with contextlib.suppress(Unreachable):
                self.say()

    def leave(self, done: bool) -> None:
        """This site ends: it leaves, or leaves behind that the run is done."""
        self.over.set()
        if self.heartbeat.is_alive():
            self.heartbeat.join()
        with contextlib.suppress(Unreachable):
            self.say(**{"done" if done else "left": True})
