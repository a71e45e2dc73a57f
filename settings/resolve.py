"""Choose a value for every setting, and find all that is wrong with them."""

import dataclasses
import os
from collections.abc import Collection, Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from settings.checks import Check, find_conflicts
from settings.config import SETTINGS, Config, build_config, has_effect
from settings.declare import FREE, format_value
from settings.names import explain_name, explain_target, find_meant, list_targets
from settings.resume import compare_with_stored, find_lasting, read_run_config
from settings.sources import (
    DEFAULT,
    ROOT,
    Source,
    choose_values,
    find_source,
    read_command_line,
    read_env_file,
    read_environment,
    read_preset,
)
from settings.targets import (
    ALL_SETTINGS,
    CONTINUE,
    DEFAULTS,
    DRY_RUN,
    EITHER,
    PREVIEW,
    RESUME,
    TARGETS,
    TRAIN,
    VARIABLES,
)


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

    Raises:
        RunConfigError: the config.json of the run cannot be used.
    """
    environ = os.environ if environ is None else environ
    target = environ.get("MAKE_TARGET", "")
    goals = set(environ.get("MAKE_GOALS", target).split()) if target else set()
    command_line = read_command_line(environ)
    environment = read_environment(environ, command_line)
    weakest = Source(DEFAULT, DEFAULTS.get(target, {}) | dict(defaults or {}))
    env_file = read_env_file([command_line, environment, weakest], root)
    explicit = [command_line, environment, env_file]
    if target in TRAIN:
        explicit[1:] = [drop_unused(source, target) for source in explicit[1:]]
    preset = read_preset([*explicit, weakest], root)
    sources = [*explicit, preset, weakest]
    stored: dict[str, Any] = {}
    if target in RESUME:
        label = f"{build_config(choose_values(sources)[0]).run_folder}/config.json"
        stored = read_run_config(root / label).get("settings", {})
        run = Source(label, find_lasting(stored, choose_values(explicit)[0]))
        preset_is_explicit = find_source("PRESET", explicit) is not None
        if preset_is_explicit and preset.label != f"presets/{run.values.get('PRESET')}.env":
            sources = [*explicit, preset, run, weakest]  # the values of the other preset are wanted
        else:
            sources = [*explicit, run, read_preset([*explicit, run, weakest], root), weakest]
    values, origins, invalid = choose_values(sources)
    config = build_config(values)
    values = config.values()
    purpose = find_purpose(target, config)

    problems = [explain_target(goal) for goal in sorted(goals - TARGETS)]
    for source in sources:
        problems += source.problems
    ignored = {}  # place -> why
    for source in (command_line, environment, env_file, preset):
        for place, problem, reason in find_useless(source, config, goals & TARGETS, purpose):
            if not reason or source is command_line:
                problems.append(f"{place}: {problem}")
            elif source is not preset:
                ignored[place] = reason
    warnings = [
        *list_environment(explicit[1], sources, ignored),
        *find_misnomers(environ, command_line),
        *(f"Warning: {place} is ignored: {reason}." for place, reason in ignored.items()),
    ]
    if config.run.dry_run and target in TARGETS - DRY_RUN:  # it would do the thing
        place = f"DRY_RUN ({origins['DRY_RUN']})"
        instead = " `make plan` shows what a run will take." if target in TRAIN - PREVIEW else ""
        problems.append(f"{place}: {explain_users({target}, DRY_RUN)}{instead}")
    mixture = find_source("DATA_MIX", explicit)
    if config.pretrains_on_data and mixture and mixture.values["DATA_MIX"] != config.data_mix:
        problems.append(f"DATA_MIX ({origins['DATA_MIX']}): Cannot be set together with DATA.")
    problems += invalid.values()
    for name, sentence in find_conflicts(config, purpose, invalid, without):
        problems.append(f"{name}={format_value(values[name])} ({origins[name]}): {sentence}")
    if stored and target in CONTINUE:
        valid = {name: values[name] for name in SETTINGS if name not in invalid}
        problems += compare_with_stored(stored, valid)[0]
    named = {name for name in SETTINGS if find_source(name, explicit)}
    return Resolved(config, origins, named, set(invalid), problems, warnings)


def find_purpose(target: str, config: Config) -> str:
    """Return the target whose rules hold: `make plan` with MODEL plans what finetune does."""
    if config.tuning.model and (not target or target in EITHER):
        return "finetune"
    return target or "check-env"


def drop_unused(source: Source, target: str) -> Source:
    """Leave out what shapes a run but not one of this target, such as LORA_RANK for make train."""
    values = {}
    for name, text in source.values.items():
        declared = SETTINGS.get(name)
        if declared is None or declared.resume == FREE or target in declared.used_by:
            values[name] = text
    return dataclasses.replace(source, values=values)


# ---- What is wrong


def find_useless(
    source: Source, config: Config, targets: set[str], purpose: str
) -> Iterator[tuple[str, str, str]]:
    """Yield the place of each name of a source that cannot be used, and why not.

    Once more why not if it is a setting without influence on what make does. An env file serves all
    targets: of those that a target does not read, only what shapes a run looks meant for it.
    """
    values = config.values()
    for name, text in sorted(source.values.items()):
        place = f"{name} ({source.locate(name)})"
        declared = SETTINGS.get(name)
        if declared is None:
            is_variable = name in VARIABLES and not source.lines
            if not is_variable and explain_name(name, text):
                yield place, explain_name(name, text), ""
            elif is_variable and not targets & VARIABLES[name]:
                yield place, explain_users(targets, VARIABLES[name]), ""
            continue
        if declared.secret and source.is_public:
            yield place, "A secret belongs in the environment or in .env.", ""
        readers = targets & declared.used_by
        if purpose not in declared.used_by:
            readers -= PREVIEW
        if targets and not readers:
            looks_meant = not source.lines or (declared.resume != FREE and targets & TRAIN)
            if looks_meant and name != "DRY_RUN":
                reason = f"{list_targets(targets)} does not use it"
                yield place, explain_users(targets, declared.used_by), reason
        elif text and not has_effect(name, values):
            reason = f"no effect without {declared.needs}"
            yield place, f"Has {reason}.", f"it has {reason}"


def explain_users(targets: set[str], users: Set[str]) -> str:
    """Say that targets do not use a setting, and which do."""
    return f"Not used by {list_targets(targets)}. Used by: {list_targets(users - ALL_SETTINGS)}."


def list_environment(
    environment: Source, sources: list[Source], ignored: Collection[str]
) -> Iterator[str]:
    """Yield a line with the settings that come from the environment, where nobody sees them.

    Args:
        ignored: places of settings that have a warning of their own.
    """
    settings = []
    for name, text in sorted(environment.values.items()):
        is_ignored = f"{name} ({environment.label})" in ignored
        if find_source(name, sources) is environment and not is_ignored:
            settings.append(f"{name}={SETTINGS[name].show(text)}")
    if settings:
        yield f"From the environment: {' '.join(settings)}"


def find_misnomers(environ: Mapping[str, str], command_line: Source) -> Iterator[str]:
    """Warn about variables of the environment that look like a misspelled setting."""
    for name in sorted(environ.keys() - SETTINGS.keys() - command_line.values.keys()):
        meant = find_meant(name, 0.9)
        if meant and meant not in environ:
            yield f"Warning: {name} (environment) is ignored. Did you mean {meant}?"


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
