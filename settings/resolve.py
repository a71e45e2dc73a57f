"""Choose a value for every setting, and find all that is wrong with them."""

import dataclasses
import difflib
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

from settings.checks import Check, find_conflicts
from settings.config import SETTINGS, Config, build_config, has_effect
from settings.declare import FREE, format_value
from settings.removed import explain_removed, is_removed
from settings.sources import (
    DEFAULT,
    ROOT,
    Source,
    choose_values,
    find_source,
    read_command_line,
    read_env_file,
    read_environment,
    read_run_and_preset,
)
from settings.targets import ALL_SETTINGS, DEFAULTS, EITHER, PREVIEW, TRAIN, VARIABLES

OTHER_NAMES = {  # in other trainers
    "BATCH_SIZE": "BATCH_TOKENS",
    "GPUS": "NPROC",
    "LR": "LEARNING_RATE",
    "MIN_LR": "MIN_LEARNING_RATE",
    "STEPS": "MAX_STEPS",
    "TOKENS": "TRAIN_TOKENS",
}


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The settings of a target, where they come from, and what to print about them.

    Attributes:
        origins: NAME -> place of its value.
        explicit: names that are set on the command line, in the environment or in the env file.
        invalid: names whose own value is refused, and whose default stands in the config.
    """

    config: Config
    origins: dict[str, str]
    explicit: set[str]
    invalid: set[str]
    problems: list[str]
    warnings: list[str]


def resolve(
    environ: Mapping[str, str] | None = None,
    root: Path = ROOT,
    defaults: Mapping[str, str] | None = None,
    without: Collection[Check] = (),
) -> Resolved:
    """Read every setting, from the strongest source to the weakest, and collect all problems.

    Args:
        defaults: text that takes the place of the declared defaults.
        without: checks that somebody else makes.
    """
    environ = os.environ if environ is None else environ
    target = environ.get("MAKE_TARGET", "")
    command_line = read_command_line(environ)
    environment = read_environment(environ, command_line)
    weakest = Source(DEFAULT, DEFAULTS.get(target, {}) | dict(defaults or {}))
    env_file = read_env_file([command_line, environment, weakest], root)
    explicit = [command_line, environment, env_file]
    sources = [*explicit, *read_run_and_preset(explicit, weakest, target, root)]
    problems = []
    for source in sources:
        problems += [*source.problems, *find_misplaced(source, target)]

    values, origins, invalid = choose_values(sources)
    problems += invalid.values()
    config = build_config(values)
    purpose = find_purpose(target, config)
    for name, sentence in find_conflicts(config, purpose, invalid, without):
        text = format_value(config.values()[name])
        problems.append(f"{name}={text} ({origins[name]}): {sentence}")

    warnings = [*list_environment(environment, sources), *find_near_misses(environ)]
    for source in explicit:
        for name, sentence in explain_unused(source, config, target, purpose):
            if source is command_line or name == "DRY_RUN":  # the target would do the thing
                problems.append(sentence)
            else:
                warnings.append(sentence)
    named = {name for name in SETTINGS if find_source(name, explicit)}
    return Resolved(config, origins, named, set(invalid), problems, warnings)


def find_purpose(target: str, config: Config) -> str:
    """Return the target whose rules hold: `make plan` with MODEL plans what finetune does."""
    if config.tuning.model and (not target or target in EITHER):
        return "finetune"
    return target or "check-env"


# ---- What is wrong


def find_misplaced(source: Source, target: str) -> Iterator[str]:
    """Yield what does not belong in a source: unknown names and secrets."""
    for name, text in sorted(source.values.items()):
        place = f"{name} ({source.locate(name)})"
        if name in SETTINGS:
            if SETTINGS[name].secret and source.is_public:
                yield f"{place}: A secret belongs in the environment or in .env."
        elif name in VARIABLES and not source.lines:
            users = VARIABLES[name] or {target}
            if target not in users:
                yield explain_users(place, target, users)
        elif is_removed(name):
            problem = explain_removed(name, text)
            if problem:
                yield f"{place}: {problem}"
        else:
            yield f"{place}: There is no such setting. {suggest(name)}"


def explain_unused(
    source: Source, config: Config, target: str, purpose: str
) -> Iterator[tuple[str, str]]:
    """Yield the settings of a source that have no influence on what a target does, and why.

    An env file serves all targets: of those that a target does not read, only what shapes a run
    looks meant for it.
    """
    values = config.values()
    for name in sorted(source.values.keys() & SETTINGS.keys()):
        declared = SETTINGS[name]
        place = f"{name} ({source.locate(name)})"
        users = declared.used_by
        is_read = not target or (target in users and (target not in PREVIEW or purpose in users))
        looks_meant = not source.lines or (declared.resume != FREE and target in TRAIN)
        if name == "DRY_RUN":
            looks_meant = config.run.dry_run
        if is_read and source.values[name] and not has_effect(name, values):
            yield name, f"{place}: Has no effect without {declared.needs}."
        elif not is_read and looks_meant:
            yield name, explain_users(place, target, users - ALL_SETTINGS)


def explain_users(place: str, target: str, users: Iterable[str]) -> str:
    """Say that a target does not use a setting, and which do."""
    return f"{place}: make {target} does not use it. It is for make {', '.join(sorted(users))}."


def suggest(name: str, similarity: float = 0.6) -> str:
    """Name the setting that is most similar to an unknown name, if any is."""
    nearest = find_nearest(OTHER_NAMES.get(name.upper(), name.upper()), SETTINGS, similarity)
    return f"Did you mean {nearest}?" if nearest else "`make settings` lists them."


def find_nearest(name: str, names: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the most similar of these names, if any is similar enough."""
    similar = difflib.get_close_matches(name, list(names), n=1, cutoff=similarity)
    return similar[0] if similar else None


def list_environment(environment: Source, sources: list[Source]) -> Iterator[str]:
    """Yield a line with the settings that come from the environment, where nobody sees them."""
    settings = []
    for name, text in sorted(environment.values.items()):
        if find_source(name, sources) is environment:
            settings.append(f"{name}={SETTINGS[name].redact(text)}")
    if settings:
        yield f"From the environment: {' '.join(settings)}"


def find_near_misses(environ: Mapping[str, str]) -> list[str]:
    """Warn about variables of the environment that look like a misspelled setting."""
    warnings = []
    typed = environ.get("MAKE_SETTINGS", "").split()
    for name in sorted(environ.keys() - SETTINGS.keys() - set(typed)):
        nearest = find_nearest(name.upper(), SETTINGS, 0.9)
        if nearest and nearest not in environ:
            warnings.append(f"{name} (environment): Did you mean {nearest}?")
    return warnings


# ---- For rooms that look at settings

# Words of env(1): what is started has settings of its own, not those of the target that was typed.
NO_TARGET = ("-u", "MAKE_TARGET", "-u", "MAKE_SETTINGS")


def find_explicit() -> set[str]:
    """Return the settings that somebody gave for this command, or for all in an env file."""
    return resolve().explicit


def build_environment(settings: Mapping[str, str], without: Collection[str] = ()) -> dict[str, str]:
    """Return this process's environment with these settings, for a process to start.

    The settings are for that process, and not for the target that was typed.
    """
    without = {"MAKE_TARGET", "MAKE_SETTINGS", *without}
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return kept | dict(settings)


def show_path(path: Path) -> str:
    """Return a path for printing: relative to the repository if it is inside."""
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
