"""Read settings from the command line, the environment, the env file, a run and the preset.

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
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from settings.config import SETTINGS

ROOT = Path(__file__).resolve().parent.parent
DEFAULT = "default"  # label of the weakest source
ENV_LINE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=(.*)")


@dataclasses.dataclass(frozen=True)
class Source:
    """Settings from one place. An empty value counts as not set.

    Attributes:
        lines: for a file, the line of each setting.
        problems: what kept the file from being read, or some of its lines.
        is_public: others can read it, so it must not hold a secret.
    """

    label: str
    values: Mapping[str, str]
    lines: Mapping[str, int] = dataclasses.field(default_factory=dict)
    problems: list[str] = dataclasses.field(default_factory=list)
    is_public: bool = False

    def locate(self, name: str) -> str:
        """Say where a setting is: `environment`, or `.env line 3`."""
        line = self.lines.get(name)
        return f"{self.label} line {line}" if line else self.label


def find_source(name: str, sources: list[Source]) -> Source | None:
    """Return the strongest source that sets a setting."""
    for source in sources:
        if source.values.get(name):
            return source
    return None


def choose_values(
    sources: list[Source],
) -> tuple[dict[str, Any], dict[str, str], dict[str, str]]:
    """Take each setting from the strongest source that sets it.

    Returns:
        The values, the place of each, and a sentence for each setting whose value is invalid. Its
        default takes its place, so that other rules can still be checked.
    """
    values = {}
    origins = dict.fromkeys(SETTINGS, DEFAULT)
    invalid = {}
    for name, declared in SETTINGS.items():
        source = find_source(name, sources)
        if source is None:
            continue
        text = source.values[name]
        origins[name] = source.locate(name)
        try:
            values[name] = declared.parse(text)
        except ValueError as error:
            invalid[name] = f"{name}={declared.show(text)} ({origins[name]}): {error}"
    return values, origins, invalid


# ---- Command line and environment


def read_command_line(environ: Mapping[str, str]) -> Source:
    """Return what was typed after make."""
    names = environ.get("MAKE_SETTINGS", "").split()
    values = {name: environ.get(name, "") for name in names}
    if names:
        restore_blanks(values)
    return Source("command line", values, is_public=True)


def restore_blanks(values: dict[str, str]) -> None:
    """Restore blanks at the start of values, which make drops, from the arguments of make.

    They are known on Linux only.
    """
    process = os.getppid()
    while process > 1:
        try:
            arguments = Path(f"/proc/{process}/cmdline").read_bytes().split(b"\0")
            process = int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            return
        for argument in arguments:
            name, _, value = os.fsdecode(argument).partition("=")
            if values.get(name) == value.lstrip():
                values[name] = value


def read_environment(environ: Mapping[str, str], command_line: Source) -> Source:
    """Return the settings in the environment that make did not put there."""
    names = environ.keys() & SETTINGS.keys() - command_line.values.keys()
    return Source("environment", {name: environ[name] for name in names})


# ---- Files


def read_env_file(stronger: list[Source], root: Path) -> Source:
    """Read the file that ENV_FILE names. Nobody needs to have one."""
    source = find_source("ENV_FILE", stronger)
    name = source.values["ENV_FILE"] if source else ".env"
    if (source is None or source.label == DEFAULT) and not os.path.lexists(root / name):
        return Source(name, {})
    return read_file(root / name, name, ("ENV_FILE", "NAME"))


def read_preset(stronger: list[Source], root: Path) -> Source:
    """Read the file that PRESET names."""
    source = find_source("PRESET", stronger)
    preset = source.values["PRESET"] if source else "tiny"
    label = f"presets/{preset}.env"
    presets = sorted(Path(path).stem for path in glob.glob(f"{root}/presets/*.env"))
    if presets and preset not in presets:  # none where the folder cannot be listed
        problem = f"PRESET={preset}: Must be one of {', '.join(presets)}."
        return Source(label, {}, problems=[problem])
    source = read_file(root / label, label, ("ENV_FILE", "NAME", "PRESET"))
    return dataclasses.replace(source, is_public=True)


def read_file(path: Path, label: str, forbidden: Collection[str]) -> Source:
    """Read NAME=value lines. A value is everything after `=`, byte for byte.

    What other readers of env files understand differently is refused: quotes around a value, blanks
    at its ends, a comment after it.
    """
    values: dict[str, str] = {}
    lines: dict[str, int] = {}
    problems: list[str] = []
    try:
        text = read_text(path)
    except ValueError as error:
        return Source(label, {}, problems=[f"{label}: {error}"])
    if text.startswith("\ufeff") or "\r\n" in text:
        problems.append(f"{label}: Save it with Unix line ends and without a byte order mark.")
        text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip() or line.startswith("#"):
            continue
        match = ENV_LINE.fullmatch(line)
        if match is None:  # the line is not shown, since it may hold a secret
            problems.append(f"{label} line {number}: Must be NAME=value, without export or blanks.")
            continue
        name, value = match.groups()
        place = f"{name} ({label} line {number})"
        if name in forbidden:
            problems.append(f"{place}: Cannot be set in this file.")
        if name in lines:
            problems.append(f"{place}: Is already set in line {lines[name]}.")
        unwanted = {
            "quotes around the value": value.startswith(("'", '"')),
            "blanks around the value": value != value.strip(),
            "the comment after the value": " #" in value,
        }
        found = [words for words, is_there in unwanted.items() if is_there]
        if found:
            problems.append(f"{place}: Remove {' and '.join(found)}.")
            value = ""
        values[name] = value
        lines[name] = number
    return Source(label, values, lines, problems)


def read_text(path: Path) -> str:
    """Return the text of a file. Raises ValueError with a sentence."""
    try:
        if path.exists() and not path.is_file():  # reading a pipe or /dev/zero would not end
            raise ValueError("Must be a file with NAME=value lines.")
        return path.read_bytes().decode()
    except FileNotFoundError:
        raise ValueError(f"There is no file {path.resolve()}.") from None
    except OSError as error:
        raise ValueError(f"Cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError:
        raise ValueError("Must be text in UTF-8.") from None
