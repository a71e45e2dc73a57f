"""Read settings from the command line, the environment, the env file and the preset.

    make NAME=value  >  environment  >  ENV_FILE (.env)  >  presets/PRESET.env  >  default

A run that is resumed also has the settings that it was started with: they come before the preset.

The Makefile passes on the values from its command line in the environment, byte for byte. Their
names are in MAKE_SETTINGS, the target is in MAKE_TARGET, and all targets of the command line are in
MAKE_GOALS. Nothing else reads an env file.
"""

import dataclasses
import glob
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from settings.config import SETTINGS
from settings.declare import Texts
from settings.json_file import read_small
from settings.names import find_nearest

ENV_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")
NOT_IN_FILES = {"ENV_FILE", "NAME"}
SECRETS = {name for name, declared in SETTINGS.items() if declared.secret}
DEFAULT = "default"
COMMAND_LINE = "command line"
ENVIRONMENT = "environment"


@dataclasses.dataclass(frozen=True)
class SourcedValue:
    """The text of a value, and where it comes from: `environment`, or `.env line 3`."""

    text: str
    origin: str


SourcedValues = dict[str, SourcedValue]  # by name


def add_origin(texts: Texts, origin: str) -> SourcedValues:
    """Return the values of one source. An empty one counts as not set."""
    return {name: SourcedValue(text, origin) for name, text in texts.items() if text}


def parse(sourced: SourcedValues) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values of settings by name, and a sentence for each that is invalid."""
    values = {}
    invalid = {}
    for name, declared in SETTINGS.items():
        if name not in sourced:
            continue
        text = sourced[name].text
        try:
            values[name] = declared.parse(text)
        except ValueError as error:
            invalid[name] = f"{name}={declared.show(text)} ({sourced[name].origin}): {error}"
    return values, invalid


def read_command_line(environ: Texts) -> SourcedValues:
    """Read what was typed after make."""
    names = environ.get("MAKE_SETTINGS", "").split()
    return add_origin({name: environ.get(name, "") for name in names}, COMMAND_LINE)


def read_environment(environ: Texts) -> SourcedValues:
    """Read what is exported.

    NAME is not read: some systems export one of their own. So do some shells with PROMPT, which under
    make comes from the command line or the env file.
    """
    texts = {name: environ.get(name, "") for name in SETTINGS}
    del texts["NAME"]
    if environ.get("MAKE_TARGET"):
        del texts["PROMPT"]
    return add_origin(texts, ENVIRONMENT)


def read_env_file(named: SourcedValue, root: Path, problems: list[str]) -> SourcedValues:
    """Read the file that ENV_FILE names. Nobody needs to have one."""
    path = root / named.text
    if named.origin == DEFAULT and not os.path.lexists(path):
        return {}
    return read_file(path, named.text, problems, NOT_IN_FILES)


def read_preset(stronger: SourcedValues, root: Path, problems: list[str]) -> SourcedValues:
    """Read the file that PRESET names."""
    name = stronger["PRESET"].text
    paths = glob.glob(f"{root}/presets/*.env")
    presets = sorted(Path(path).stem for path in paths)
    if presets and name not in presets:  # none where the folder cannot be listed
        meant = find_nearest(name, presets)
        hint = f" Did you mean {meant}?" if meant else ""
        problems.append(f"PRESET={name}: Must be one of {', '.join(presets)}.{hint}")
        return {}
    label = f"presets/{name}.env"
    forbidden = {"PRESET", *NOT_IN_FILES, *SECRETS}
    return read_file(root / label, label, problems, forbidden)


def read_file(
    path: Path, label: str, problems: list[str], forbidden: Collection[str] = ()
) -> SourcedValues:
    """Read NAME=value lines. A value is everything after `=`, byte for byte.

    Args:
        problems: gets a sentence for all that is wrong.
        forbidden: names that cannot be set here.
    """
    values: SourcedValues = {}
    for number, line in enumerate(read_lines(path, label, problems), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        origin = f"{label} line {number}"
        match = ENV_LINE.fullmatch(line)
        if match is None:  # the line is not shown, since it may hold a secret
            problems.append(f"{origin}: Must be NAME=value, without export or blanks.")
            continue
        name, text = match.groups()
        is_quoted = text.startswith(("'", '"'))
        problem = ""
        if name in forbidden:
            problem = "Cannot be set in this file, but in the environment."
        elif name in values:
            problem = f"Is already set in {values[name].origin}."
        elif is_quoted or text != text.strip() or " #" in text:  # which readers take differently
            problem = "Remove what is around the value: quotes, blanks or a comment."
        if problem:
            problems.append(f"{name} ({origin}): {problem}")
            text = ""
        values |= add_origin({name: text}, origin)
    return values


def read_lines(path: Path, label: str, problems: list[str]) -> list[str]:
    """Return the lines of a file; none if it cannot be read."""
    fault = "Must be a file with NAME=value lines, in UTF-8"
    text = ""
    try:
        if path.is_file() or not path.exists():  # reading a pipe or /dev/zero would not end
            text = read_small(path).decode()
            fault = ""
    except OSError as error:
        fault = f"Cannot be read: {error.strerror}"
    except UnicodeDecodeError:
        pass
    if fault:
        problems.append(f"{label}: {fault}.")
    plain = text.removeprefix("\ufeff").replace("\r\n", "\n")
    if plain != text:
        problems.append(f"{label}: Save it with Unix line ends and without a byte order mark.")
    return plain.split("\n")
