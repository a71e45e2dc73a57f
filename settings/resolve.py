"""Choose a value for every setting, and find all that is wrong with them."""

import dataclasses
import os
import shlex
from collections.abc import Collection, Set
from pathlib import Path
from typing import Any

from settings import sources
from settings.checks import Check, find_conflicts
from settings.config import DEFAULTS, ROOT, SETTINGS, Config, build_config
from settings.declare import FREE, PLACES, SettingsError, Texts, Values, format_value
from settings.init_from import take_shape
from settings.names import explain_name, explain_target, find_meant, list_targets
from settings.resume import compare_with_stored, list_lasting, read_run_config
from settings.sources import DEFAULT, ENVIRONMENT, Givens, give, parse
from settings.targets import (
    ALL_SETTINGS,
    CONTINUE,
    DRY_RUN,
    EITHER,
    FIND,
    PREVIEW,
    RESUME,
    START,
    TARGET_DEFAULTS,
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

    def check(self) -> "Resolved":
        """Return itself. Raises SettingsError if there are problems."""
        if self.problems:
            raise SettingsError(self.problems, self.warnings)
        return self


def resolve(
    environ: Texts | None = None,
    root: Path = ROOT,
    defaults: Texts | None = None,
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
    targets, problems = read_goals(environ)
    weakest = list_defaults(target, defaults or {})
    typed = sources.read_command_line(environ)
    environment = sources.read_environment(environ)
    env_file = sources.read_env_file((weakest | environment | typed)["ENV_FILE"], root, problems)
    explicit = {}
    ignored = {}
    for name, given in (env_file | environment | typed).items():
        if name in typed or name not in SETTINGS or is_taken(name, targets):
            explicit[name] = given
        elif name in environment or shapes_a_run(name, target):
            ignored[name] = given
    if target == "plan" and "MODEL" in explicit:  # planned as make finetune would start it
        weakest = list_defaults("finetune", defaults or {})
    place = ""
    stored: dict[str, Any] = {}
    run: Givens = {}
    if target in RESUME:
        place = find_run_config(weakest, explicit, root)
        stored = read_run_config(root / place).get("settings", {})
        named, _ = parse(explicit)
        run = give(list_lasting(stored, named), place)
        if "CARDS" in explicit:  # the plan is of other processes: one for each card
            run.pop("NPROC", None)
    preset = sources.read_preset(weakest | run | explicit, root, problems)
    chosen = weakest | preset | run | explicit
    if chosen["PRESET"].text != (weakest | run)["PRESET"].text:  # another one is named
        chosen = weakest | run | preset | explicit
    folder = chosen.get("INIT_FROM")
    if folder and is_used("INIT_FROM", targets):
        began = read_run_config(root / find_run_config(weakest, explicit, root)).get("settings", {})
        shape = take_shape(folder, root, began, explicit, problems, must_exist=target in START)
        chosen = chosen | shape | explicit
    values, invalid = parse(chosen)
    config = build_config(values, target)
    values = config.values()
    purpose = find_purpose(target, config)
    origins = dict.fromkeys(SETTINGS, DEFAULT)
    for name in SETTINGS.keys() & chosen.keys():
        origins[name] = chosen[name].place
    if environ is os.environ:
        texts = {name: f"{name}={format_value(values[name])}" for name in SETTINGS}
        PLACES.clear()
        PLACES.update({texts[name]: place for name, place in origins.items()})

    for name, given in chosen.items():
        problem = ""
        if name in typed:
            problem = refuse_typed(name, given.text, target, targets, purpose, values)
        elif name not in SETTINGS:
            problem = explain_name(name, given.text)
        elif name in explicit and not SETTINGS[name].has_effect(values, target):
            ignored[name] = given
        if problem:
            problems.append(f"{name} ({given.place}): {problem}")
    dry_run = (env_file | environment | typed).get("DRY_RUN")
    if dry_run and dry_run.text == "1" and target in TARGETS - DRY_RUN:  # it would do the thing
        problems.append(f"DRY_RUN ({dry_run.place}): {explain_users({target}, DRY_RUN)}")
    mixture = explicit.get("DATA_MIX")
    if mixture and config.pretrains_on_data and mixture.text != config.data_mix:
        problems.append(f"DATA_MIX ({mixture.place}): Cannot be set together with DATA.")
    problems += invalid.values()
    for name, sentence in find_conflicts(config, purpose, invalid, without):
        text = format_value(values[name])
        problems.append(f"{name}={text} ({origins[name]}): {sentence}")
    if stored and target in CONTINUE:
        now = {}
        for name in SETTINGS:
            is_kept = name in invalid or origins[name] in (place, DEFAULT)
            if not is_kept and is_used(name, targets):
                now[name] = values[name]
        refusals, _ = compare_with_stored(stored, now)
        problems += refusals
    warnings = find_warnings(environ, explicit, ignored)
    return Resolved(
        config,
        origins,
        SETTINGS.keys() & explicit,
        set(invalid),
        problems,
        warnings,
    )


def read_goals(environ: Texts) -> tuple[Set[str], list[str]]:
    """Return the targets that make was asked for, and what is wrong with that command line."""
    goals: list[str] = []
    if environ.get("MAKE_TARGET"):
        goals = environ.get("MAKE_GOALS", environ["MAKE_TARGET"]).split()
    problems = [explain_target(goal) for goal in goals if goal not in TARGETS]
    if "DATA" in environ.get("MAKE_SETTINGS", "").split() and not environ.get("DATA"):
        problems.append(
            "DATA (command line): Is empty. Name a file, a folder or hf:OWNER/NAME, or leave DATA out."
        )
    return TARGETS.intersection(goals), problems


def find_purpose(target: str, config: Config) -> str:
    """Return the target whose rules hold: `make plan` with MODEL plans what finetune does."""
    if config.model and (not target or target in EITHER):
        return "finetune"
    return target or "check-env"


def list_defaults(target: str, defaults: Texts) -> Givens:
    """Return what takes the place of declared defaults, and the two that name files."""
    texts = {
        "PRESET": DEFAULTS["PRESET"],
        "ENV_FILE": DEFAULTS["ENV_FILE"],
        **TARGET_DEFAULTS.get(target, {}),
        **defaults,
    }
    return give(texts, DEFAULT)


def find_run_config(weakest: Givens, explicit: Givens, root: Path) -> str:
    """Return the path of config.json in the folder of the run that is meant."""
    preset = sources.read_preset(weakest | explicit, root, [])
    values, _ = parse(weakest | preset | explicit)
    return f"{build_config(values).run_folder}/config.json"


# ---- What is used


def is_used(name: str, targets: Set[str]) -> bool:
    """Tell whether one of the targets uses a setting. Without a target, a command uses all."""
    return not targets or bool(targets & SETTINGS[name].used_by)


def is_taken(name: str, targets: Set[str]) -> bool:
    """Tell whether the value of an environment or env file counts: also where it only finds a run."""
    return is_used(name, targets) or (SETTINGS[name].finds_run and bool(targets & FIND))


def shapes_a_run(name: str, target: str) -> bool:
    """Tell whether a setting that this target does not use shapes a run: LORA_RANK for make train."""
    return target in TRAIN and SETTINGS[name].resume != FREE


def refuse_typed(
    name: str, text: str, target: str, targets: Set[str], purpose: str, values: Values
) -> str:
    """Say why a name cannot be set on the command line of these targets."""
    declared = SETTINGS.get(name)
    users = declared.used_by if declared else VARIABLES.get(name)
    if users is None:
        return explain_name(name, text)
    if declared and declared.secret:
        return "A secret belongs in the environment or in .env."
    readers = targets & users
    if purpose not in users:
        readers -= PREVIEW
    if targets and not readers and name != "DRY_RUN":
        hint = ""
        if declared and declared.finds_run and targets & FIND:
            hint = " To find the run of another node or site, set it in the environment or in .env."
        return explain_users(targets, users) + hint
    if declared and not declared.has_effect(values, target):
        return declared.explain_needs()
    return ""


def explain_users(targets: Set[str], users: Set[str]) -> str:
    """Say that targets do not use a setting, and which do."""
    others = list_targets(users - ALL_SETTINGS or users)
    return f"Not used by {list_targets(targets)}. Used by: {others}."


def find_warnings(environ: Texts, explicit: Givens, ignored: Givens) -> list[str]:
    """Say what comes from the environment, where nobody sees it, and what is ignored."""
    warnings = []
    shown = []
    for name, given in sorted(explicit.items()):
        if given.place == ENVIRONMENT and name not in ignored:
            shown.append(f"{name}={SETTINGS[name].show(given.text)}")
    if shown:
        warnings.append(f"From the environment: {' '.join(shown)}")
    used_prompt = is_used("PROMPT", {environ.get("MAKE_TARGET", "")})
    if environ.get("PROMPT") and "PROMPT" not in explicit and used_prompt:
        warnings.append(
            "PROMPT (environment) is not used, since shells export one. Set it as make PROMPT=..."
        )
    for name in sorted(environ.keys() - SETTINGS.keys() - explicit.keys()):
        meant = find_meant(name, 0.9)
        if meant and meant not in environ:
            warnings.append(f"Warning: {name} (environment) is ignored. Did you mean {meant}?")
    places = [f"{name} ({given.place})" for name, given in ignored.items()]
    if places:
        warnings.append(f"Warning: Not used here: {', '.join(places)}.")
    return warnings


# ---- For rooms that look at settings

# Words of env(1): what is started has settings of its own, not those of the target that was typed.
NO_TARGET = ("-u", "MAKE_TARGET", "-u", "MAKE_SETTINGS")


def set_target(target: str) -> None:
    """Do what a make target does, in a process that make did not start, and in those that it starts.

    An empty MAKE_TARGET stays: of that process all settings are meant (build_environment).
    """
    os.environ.setdefault("MAKE_TARGET", target)


def take_words(words: Collection[str], known: Collection[str] = ()) -> None:
    """Take NAME=value words as settings of the command line, as make does, for the processes it starts too.

    Args:
        words: what was typed after the name of a module.
        known: words of that module, which are not settings.

    Raises:
        SettingsError: a word is neither.
    """
    names = os.environ.get("MAKE_SETTINGS", "").split()
    problems = []
    for word in words:
        name, equals, text = word.partition("=")
        if equals and name.isidentifier():
            os.environ[name] = text
            names.append(name)
        elif word not in known:
            problems.append(f"{word}: Must be {' or '.join(['NAME=value', *known])}.")
    if problems:
        raise SettingsError(problems)
    if names:
        os.environ["MAKE_SETTINGS"] = " ".join(names)


def find_explicit() -> set[str]:
    """Return the settings that somebody gave for this command, or for all in an env file."""
    return resolve().explicit


def is_of_preset(name: str) -> bool:
    """Tell whether a setting has its value by the preset or the default, and not by the user or the run."""
    origin = resolve().origins[name]
    return origin == DEFAULT or origin.startswith("presets/")


def build_environment(settings: Texts, without: Collection[str] = ()) -> dict[str, str]:
    """Return this process's environment with these settings, for a process to start.

    The settings are for that process, and not for the target that was typed.
    """
    without = {"MAKE_SETTINGS", *without}
    kept = {name: value for name, value in os.environ.items() if name not in without}
    return kept | {"MAKE_TARGET": ""} | dict(settings)


def name_run(folder: Path) -> str:
    """Return the settings by which a command finds the run in a folder."""
    name = f"RUN_NAME={folder.name}"
    runs_dir = show_path(folder.parent)
    if runs_dir == DEFAULTS["RUNS_DIR"]:
        return name
    return f"RUNS_DIR={shlex.quote(runs_dir)} {name}"


def name_new_run(folder: Path) -> str:
    """Return the settings of a run that does not exist yet, in this folder or one of a similar name."""
    number = 2
    new = folder
    while new.exists():
        new = folder.with_name(f"{folder.name}-{number}")
        number += 1
    return name_run(new)


def repeat_typed(without: Collection[str]) -> str:
    """Return the settings of make's command line as they are typed, but those that the new command has itself."""
    words = []
    for name, given in sources.read_command_line(os.environ).items():
        if name not in without:
            words.append(f" {name}={shlex.quote(given.text)}")
    return "".join(words)


def show_path(path: Path) -> str:
    """Return a path for printing: relative to the repository if it is inside."""
    if path.is_relative_to(ROOT):
        path = path.relative_to(ROOT)
    return str(path)
