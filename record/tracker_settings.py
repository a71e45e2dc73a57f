"""Which trackers of a run are on, and whether they can work here. train/hooks/trackers.py feeds them.

Standard library only.
"""

import importlib.util
import netrc
import os
import sys
from pathlib import Path
from urllib.parse import urlsplit

from settings import SettingsError
from settings.config import Config
from settings.resolve import show_path

BIN = show_path(Path(sys.executable).parent)  # where the commands of a tracker are
INSTALL = f"{BIN}/python -m pip install --no-deps -r requirements/trackers.txt"
DEFAULT_SERVER = "https://api.wandb.ai"


def list_trackers(config: Config) -> list[str]:
    """Return the names of the trackers that are on."""
    names = [name for name in config.trackers.split(",") if name]
    if find_mode(config) != "disabled":
        names.append("wandb")
    return names


def check_trackers(config: Config) -> None:
    """Refuse trackers that cannot work here. Called where training begins, before there is work to lose.

    Raises:
        SettingsError: WANDB_MODE=online has no key, or a package of TRACKERS is not installed.
    """
    problems = []
    if config.wandb_mode == "online" and not has_key(config):
        problems.append(
            "WANDB_MODE=online: there is no key. Set WANDB_API_KEY in the environment or ENV_FILE, run "
            "`wandb login`, or use WANDB_MODE=offline."
        )
    for name in config.trackers.split(","):
        if name and importlib.util.find_spec(name) is None:
            problems.append(
                f"TRACKERS={config.trackers}: the package {name} is not installed. Install it with "
                f"`{INSTALL}`, or remove {name} from TRACKERS."
            )
    if problems:
        raise SettingsError(problems)


def find_mode(config: Config) -> str:
    """Return the mode of W&B: online, offline or disabled. `auto` is online where there is a key."""
    if config.wandb_mode != "auto":
        return config.wandb_mode
    return "online" if has_key(config) else "disabled"


def has_key(config: Config) -> bool:
    """Return whether W&B will find a key or an identity token."""
    return has_identity() or find_key(config) != ""


def has_identity() -> bool:
    """Return whether a file with an identity token takes the place of a key."""
    return bool(os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))


def find_key(config: Config) -> str:
    """Return WANDB_API_KEY, or what `wandb login` wrote for this server; "" without a key."""
    if config.wandb_api_key:
        return config.wandb_api_key
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        host = netrc.netrc(path).hosts[urlsplit(find_server()).netloc]
    except (OSError, ValueError, KeyError, netrc.NetrcParseError):
        return ""  # no file, none that W&B could read, or no entry
    return host[2] or ""


def find_server() -> str:
    """Return the address of the server that W&B talks to."""
    return os.environ.get("WANDB_BASE_URL") or DEFAULT_SERVER
