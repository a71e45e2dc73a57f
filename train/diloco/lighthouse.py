"""`make lighthouse`: what tells the sites of a run of each other, on any machine that all of them reach.

    python -m train.diloco.lighthouse      LIGHTHOUSE=host:port says on which port

It serves until SIGTERM or Ctrl-C; in a pod, where each site's pod writes how it ended
(RunPaths.last_word), until the run is over. torchft's lighthouse listens there, and the registry of
sites (site_registry.py) on the next port: on loopback if LIGHTHOUSE is not set. Neither keeps
anything: started again, both know within seconds what they knew. While it is away sites train on,
and wait at their next sync. The registry knows the run's sites by their secret, but nothing is
encrypted, and torchft's port asks nobody who he is: both belong into a private network.
"""

import contextlib
import logging
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from record.exit_codes import BAD_DATA, BAD_SETTING, DONE, INTERRUPTED
from record.run_paths import RunPaths
from record.wait import wait
from settings import ROOT, SettingsError, explain_error, load_config
from settings.addresses import is_loopback, join_address, split_address
from settings.config import Config
from settings.json_file import read_small
from settings.resolve import take_words
from settings.terminal import complain
from train import timeouts
from train.distributed.pod import in_pod

log = logging.getLogger(__name__)

TICK_MS = 100  # how often it looks whether a sync can begin
DEAD_MS = 5000  # who has not been heard of for so long is not waited for
LOOK_S = 2.0  # between two looks at whether the run is over
SIGNAL_S = 0.2  # between two looks at whether a signal has come
DEFAULT = "127.0.0.1:29510"


def main(words: Sequence[str] = ()) -> int:
    """Serve to the end. Returns the exit code: 0, or 143 in a pod whose run is not over."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    # Handlers only append: a lock here could be taken already by the code that a second signal interrupts.
    signals: list[int] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _: signals.append(number))
    try:
        take_words(words)
        config = load_config()
        since_ns = mark_begin() if in_pod() else 0
        servers = serve(config)
    except SettingsError as error:
        complain(explain_error(error))
        return BAD_SETTING
    code = DONE
    if in_pod():
        code = wait_for_run(config, signals, since_ns)
    else:
        while not signals:
            time.sleep(SIGNAL_S)
    for server in servers:
        server.shutdown()
    log.info("lighthouse: %s", "told to stop" if signals else "the run is over")
    return code


def serve(config: Config) -> tuple[Any, Any]:
    """Serve in threads. Returns both servers. Raises SettingsError where a port is taken."""
    from torchft.coordination import LighthouseServer  # these take seconds to import

    from train.diloco import site_registry
    from train.distributed import run_secret

    where = config.lighthouse or DEFAULT
    host, port = split_address(where, 0)
    try:
        with contextlib.suppress(OSError):  # pods may not write: node 0 does
            run_secret.make_secret(config)
        registry = site_registry.serve_sites(config, host, port + 1)
        bound = registry.socket.getsockname()[0]  # all addresses, where LIGHTHOUSE is a name
        lighthouse = LighthouseServer(
            join_address(bound, port),
            min_replicas=config.min_sites,
            join_timeout_ms=1000 * timeouts.SITE_WAIT_S,
            quorum_tick_ms=TICK_MS,
            heartbeat_timeout_ms=DEAD_MS,
        )
    except socket.gaierror as error:
        raise SettingsError(
            [
                f"LIGHTHOUSE={where}: This name has no address ({error.strerror}). Set an address of this "
                f"machine, for example LIGHTHOUSE=10.0.0.5:{port}."
            ]
        ) from None
    except Exception as error:
        raise SettingsError(
            [
                f"LIGHTHOUSE={where}: ports {port} and {port + 1} cannot be listened on here "
                f"({str(error).splitlines()[0]}); end what does, or choose others for all sites, "
                f"such as {port + 10} and {port + 11}"
            ]
        ) from None
    log.info(
        "lighthouse on %s, registry on port %d, MIN_SITES=%d; it serves until you press Ctrl-C",
        join_address(bound, port),
        port + 1,
        config.min_sites,
    )
    if is_loopback(bound):
        log.info(
            "Only this machine can reach it. For others: LIGHTHOUSE=ADDRESS:%d, an address of this "
            "machine in a private network.",
            port,
        )
    else:
        log.warning(
            "Anyone who can reach port %d can disturb the run: torchft's lighthouse asks for no "
            "secret. Use a private network or a VPN (docs/ports.md).",
            port,
        )
    if secret := run_secret.describe_file(config, sys.stdout.isatty()):
        log.info("%s", secret)
    return registry, lighthouse


# ---- In a pod


def wait_for_run(config: Config, signals: list[int], since_ns: int) -> int:
    """Return DONE when the run is over, INTERRUPTED when told to stop before."""
    run = RunPaths.of_node(config, ROOT)
    while not is_over(run, config.sites, since_ns):
        wait(lambda: bool(signals), LOOK_S, SIGNAL_S)
        if signals:
            return INTERRUPTED
    return DONE


def is_over(run: RunPaths, sites: int, since_ns: int) -> bool:
    """Whether no site will come back: all are done, or one ended the Job by its exit code.

    since_ns: what a site wrote before is from an earlier job.
    """
    done = 0
    for site in range(sites):
        word = run.of_site(site).last_word
        try:
            if word.stat().st_mtime_ns <= since_ns:
                continue
            code = int(read_small(word))
        except (OSError, ValueError):
            continue
        if code in (BAD_SETTING, BAD_DATA):
            return True
        done += code == DONE
    return done == sites


def mark_begin() -> int:
    """Return when this pod began, in ns, also if its container was restarted."""
    mark = Path(tempfile.gettempdir(), "lighthouse.begun")
    with contextlib.suppress(FileExistsError):
        mark.touch(exist_ok=False)
    return mark.stat().st_mtime_ns


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
