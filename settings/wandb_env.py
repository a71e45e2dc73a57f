"""W&B's side of the environment: which of its variables are handed on, whether there is a key, which GPUs are ours.

W&B reads dozens of WANDB_* names by itself. Some would break the mirror of a run (WANDB_RUN_ID, WANDB_RESUME,
WANDB_DIR, WANDB_NAME); those that say where the server is, how to reach it and what to call things are kept.
Standard library only.
"""

import netrc
import os
from collections.abc import Mapping
from urllib.parse import urlsplit

HANDED_ON = {
    "WANDB_BASE_URL",
    "WANDB_APP_URL",
    "WANDB_INSECURE_DISABLE_SSL",
    "WANDB__PROXIES",  # where it is
    "WANDB_IDENTITY_TOKEN_FILE",
    "WANDB_CREDENTIALS_FILE",  # who we are
    "WANDB_CONFIG_DIR",
    "WANDB_CACHE_DIR",
    "WANDB_DATA_DIR",  # W&B's own folders
    "WANDB_TAGS",
    "WANDB_NOTES",
    "WANDB_RUN_GROUP",
    "WANDB_JOB_TYPE",
    "WANDB_USERNAME",  # what a user calls it
}
DEFAULT_URL = "https://api.wandb.ai"


def has_key(setting: str) -> bool:
    """Whether W&B will find a key: the setting, an identity token, or the entry that `wandb login` writes."""
    return bool(has_identity() or key(setting))


def has_identity() -> bool:
    """Whether a file with an identity token takes the place of a key."""
    return bool(os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))


def key(setting: str) -> str:
    """The key itself: the setting, or the entry that `wandb login` writes; "" if there is none."""
    if setting:
        return setting
    host = urlsplit(server()).netloc
    paths = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for path in map(os.path.expanduser, paths):
        try:
            if entry := netrc.netrc(path).hosts.get(host):
                return entry[2] or ""
        except (OSError, UnicodeDecodeError, netrc.NetrcParseError):
            continue  # no file, or none that W&B could read
    return ""


def server() -> str:
    """The address of the server that W&B talks to."""
    return os.environ.get("WANDB_BASE_URL") or DEFAULT_URL


def environment(values: Mapping[str, str]) -> dict[str, str]:
    """The environment of the process that talks to W&B: ours, of WANDB_* only what is handed on, and these values."""
    ours = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("WANDB_", "_WANDB_")) or name in HANDED_ON
    }
    return (
        ours
        | {"WANDB_ERROR_REPORTING": "false"}
        | {name: value for name, value in values.items() if value}
    )


def visible_gpus() -> list[str] | None:
    """Indices or UUIDs in CUDA_VISIBLE_DEVICES; None where that is not set, and all are ours."""
    text = os.environ.get("CUDA_VISIBLE_DEVICES")
    return None if text is None else [name.strip() for name in text.split(",") if name.strip()]
