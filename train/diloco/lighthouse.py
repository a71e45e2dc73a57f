"""`make lighthouse`: what tells the sites of a run of each other, on any machine that all of them reach.

    python -m train.diloco.lighthouse      until SIGTERM or Ctrl-C; LIGHTHOUSE=host:port says which port

torchft's lighthouse listens on that port, on all addresses, and the desk (site_registry.py) on the next. Neither keeps anything:
started again, both know within seconds what they knew. While it is away sites train on, and wait at their next
exchange. The desk knows the run's sites by their secret, but nothing is encrypted, and torchft's port asks
nobody who he is: both belong into a private network.
"""

import contextlib
import logging
import signal
import sys
import threading

from settings import SettingsError
from settings.addresses import split_address
from settings.config import Config
from train import timeouts

log = logging.getLogger(__name__)

TICK_MS = 100  # how often it looks whether an exchange can begin
DEAD_MS = 5000  # who has not been heard of for so long is not waited for
DEFAULT = "0.0.0.0:29510"


def main() -> int:
    """Serve until told to stop; returns the exit code."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    over = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: over.set())
    try:
        c = Config.load()
        port = int((c.lighthouse or DEFAULT).rpartition(":")[2])
        serve(c, port, over)
    except SettingsError as error:
        sys.stderr.write(f"{error}\n")
        return 64
    return 0


def serve(c: Config, port: int, over: threading.Event) -> None:
    """Listen until it is over. Raises SettingsError where a port is taken."""
    from torchft.coordination import LighthouseServer  # these take seconds to import

    from train.diloco import site_registry
    from train.distributed import run_secret

    try:
        server = LighthouseServer(
            f"[::]:{port}",
            min_replicas=c.min_sites,
            join_timeout_ms=1000 * timeouts.SITE_WAIT_S,
            quorum_tick_ms=TICK_MS,
            heartbeat_timeout_ms=DEAD_MS,
        )
        with contextlib.suppress(OSError):  # pods may not write: node 0 does
            run_secret.make_secret(c)
        visitors = site_registry.serve_sites(
            c, split_address(c.lighthouse or DEFAULT, port)[0], port + 1
        )
    except Exception as error:
        raise SettingsError(
            [
                f"LIGHTHOUSE={c.lighthouse or DEFAULT}: ports {port} and {port + 1} cannot be listened on "
                f"here ({str(error).splitlines()[0]}); end what does, or choose others for all sites, "
                f"such as {port + 10} and {port + 11}"
            ]
        ) from None
    log.info("lighthouse on port %d, desk on port %d, MIN_SITES=%d", port, port + 1, c.min_sites)
    if secret := run_secret.describe_file(c, sys.stdout.isatty()):
        log.info("%s", secret)
    over.wait()
    visitors.shutdown()
    server.shutdown()
    log.info("lighthouse: told to stop")


if __name__ == "__main__":
    sys.exit(main())
