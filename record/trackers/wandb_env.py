"""W&B's side of the environment: whether it is on, its key and server, and the variables that its process gets.

W&B reads dozens of WANDB_* variables by itself. Some would break the tracker of a run (WANDB_RUN_ID, WANDB_RESUME,
WANDB_DIR, WANDB_NAME), so only those of PASSED_ON reach it. Standard library only.
"""

import netrc
import os
from urllib.parse import urlsplit

from settings.config import Config

PASSED_ON = {
    # Settings of ours.
    "WANDB_PROJECT",
    "WANDB_ENTITY",
    # Where the server is.
    "WANDB_BASE_URL",
    "WANDB_APP_URL",
    "WANDB_INSECURE_DISABLE_SSL",
    "WANDB__PROXIES",
    # Who the user is.
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_CREDENTIALS_FILE",
    # W&B's own folders.
    "WANDB_CONFIG_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_DATA_DIR",
    # What the user calls the run.
    "WANDB_TAGS",
    "WANDB_NOTES",
    "WANDB_RUN_GROUP",
    "WANDB_JOB_TYPE",
    "WANDB_USERNAME",
}
DEFAULT_SERVER = "https://api.wandb.ai"


def find_mode(c: Config) -> str:
    """Return online, offline or disabled; `auto` is online where there is a key."""
    if c.wandb_mode != "auto":
        return c.wandb_mode
    return "online" if has_key(c) else "disabled"


def has_key(c: Config) -> bool:
    """Return whether W&B will find a key or an identity token."""
    return has_identity() or find_key(c) != ""


def has_identity() -> bool:
    """Return whether a file with an identity token takes the place of a key."""
    return bool(os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))


def find_key(c: Config) -> str:
    """Return WANDB_API_KEY, or what `wandb login` wrote for this server; "" without a key."""
    if c.wandb_api_key:
        return c.wandb_api_key
    path = os.environ.get("NETRC") or os.path.expanduser("~/.netrc")
    try:
        host = netrc.netrc(path).hosts[urlsplit(find_server()).netloc]
    except (OSError, ValueError, KeyError, netrc.NetrcParseError):
        return ""  # no file, none that W&B could read, or no entry
    return host[2] or ""


def find_server() -> str:
    """Return the address of the server that W&B talks to."""
    return os.environ.get("WANDB_BASE_URL") or DEFAULT_SERVER


def build_environment(c: Config) -> dict[str, str]:
    """Return the environment of the process of a tracker: ours, without the variables that could break a run."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or not name.startswith(("WANDB_", "_WANDB_"))
    }
    environment["WANDB_MODE"] = find_mode(c)
    environment["WANDB_ERROR_REPORTING"] = "false"
    if c.wandb_api_key:  # not as an argument: everybody sees those
        environment["WANDB_API_KEY"] = c.wandb_api_key
    return environment
