"""What became of a name that is no setting, or which setting is meant by it (names.toml)."""

import difflib
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from settings.config import SETTINGS
from settings.declare import format_value
from settings.targets import TARGETS, VARIABLES

PATH = Path(__file__).with_name("names.toml")
NAMES = tomllib.loads(PATH.read_text(encoding="utf-8"))
CONSTANTS: dict[str, Any] = NAMES["constants"]
REPLACEMENTS: dict[str, str] = NAMES["replacements"]
OTHER_NAMES: dict[str, str] = NAMES["other_names"]
OTHER_TARGETS: dict[str, str] = NAMES["other_targets"]


def explain_name(name: str, text: str | None = None) -> str:
    """Say why a name cannot be set. "" if it is a removed setting with the value that is built in.

    Args:
        text: the value it was given, if any.
    """
    if name in CONSTANTS or name in REPLACEMENTS:
        constant = format_value(CONSTANTS.get(name))
        if text in ("", constant):
            return ""
        always = f" Its value is always {constant}." if constant else ""
        return f"This is no longer a setting.{always} {REPLACEMENTS.get(name, 'Leave it out.')}"
    if name in VARIABLES:
        return f"This is not a setting. It is a variable of {list_targets(VARIABLES[name])}."
    nearest = find_meant(name)
    hint = f"Did you mean {nearest}?" if nearest else "`make settings` lists them."
    return f"There is no such setting. {hint}"


def explain_target(target: str) -> str:
    """Name what somebody meant who typed a target that does not exist."""
    name = target.upper()
    nearest = find_nearest(target, TARGETS)
    if name in SETTINGS:
        hint = f"`make settings NAME={name}` explains the setting."
    elif target in OTHER_TARGETS:
        hint = OTHER_TARGETS[target]
    elif nearest:
        hint = f"Did you mean make {nearest}?"
    else:
        hint = "`make help` lists them."
    return f"make {target}: There is no such target. {hint}"


def find_meant(name: str, similarity: float = 0.7) -> str | None:
    """Return the setting that another trainer calls by this name, or the most similar one."""
    name = name.upper()
    return OTHER_NAMES.get(name) or find_nearest(name, SETTINGS, similarity)


def find_nearest(name: str, names: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the most similar of these names, if any is similar enough."""
    return next(iter(difflib.get_close_matches(name, list(names), 1, similarity)), None)


def list_targets(targets: Iterable[str]) -> str:
    names = sorted(targets)
    return f"make {', '.join(names)}"
