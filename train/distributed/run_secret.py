"""The secret that the machines of a run share, and by which they know each other (signed_http.py).

RUN_SECRET in the environment, in .env or in the cluster's Secret; else a file in the run's folder,
which node 0 or the lighthouse makes, and which only its owner can read. On loopback there is none.
"""

import contextlib
import os
import secrets
import tempfile
from pathlib import Path

from settings import ROOT
from settings.addresses import is_loopback, split_address
from settings.config import Config
from settings.json_file import read_small


def path_of(config: Config) -> Path:
    """Return the file that holds the secret, as a line that .env takes."""
    return (ROOT / config.runs_dir / config.run_name / ".run_secret").absolute()


def find_secret(config: Config) -> str | None:
    """Return the secret, "" on loopback, or None if this machine does not know it (yet)."""
    if config.run_secret:
        return config.run_secret
    addresses = [address for address in (config.master_addr, config.lighthouse) if address]
    hosts = [split_address(address, 0)[0] for address in addresses]
    if hosts and all(map(is_loopback, hosts)):
        return ""
    with contextlib.suppress(OSError):
        name, _, value = read_small(path_of(config)).decode().strip().partition("=")
        if name == "RUN_SECRET" and value:
            return value
    return None


def make_secret(config: Config) -> None:
    """Make the file on node 0, unless the secret is known. It appears as a whole. Raises OSError."""
    if config.node_rank or find_secret(config) is not None:
        return
    path = path_of(config)
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".run_secret.")  # mode 0600
    with open(descriptor, "w") as file:
        file.write(f"RUN_SECRET={secrets.token_hex(32)}\n")
    try:
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(name, path)
    finally:
        os.unlink(name)


def describe_file(config: Config, is_private: bool) -> str:
    """Say what to copy to machines without the shared folder.

    Args:
        is_private: whether a terminal shows it, and no log; then the secret itself is in it.
    """
    if config.run_secret or not find_secret(config):
        return ""
    line = f"the line in {path_of(config)}"
    if is_private:
        line = f"RUN_SECRET={find_secret(config)}"
    return f"machines that do not share RUNS_DIR need this in their .env: {line}"


def describe_missing(config: Config) -> str:
    """Say what a machine lacks whose requests were refused."""
    where = "node 0 prints"
    if config.replicas > 1:
        where = "make lighthouse prints"
    if config.run_secret:
        problem = "RUN_SECRET differs from the secret of the run"
    else:
        problem = f"RUN_SECRET is not set, and {path_of(config)} does not hold the run's secret"
    return (
        f"{problem}. Machines that do not share RUNS_DIR need it as a setting: copy the line "
        f"RUN_SECRET=... that {where} into .env here (docs/two-nodes.md)"
    )
