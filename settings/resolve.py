"""Choose a value for every setting, and find all that is wrong with them.

gather    read the sources of a command, and leave out what its target does not use
choose    take each value from the strongest source
judge     refuse names, values and combinations of them
"""

import dataclasses
import os
import shlex
from collections.abc import Collection, Set
from pathlib import Path

from settings import sources
from settings.checks import Check, find_conflicts
from settings.config import DEFAULTS, ROOT, SETTINGS, Config, build_config
from settings.declare import FREE, SettingsError, Texts, Values, format_value
from settings.init_from import SHAPE, explain_missing, read_folder
from settings.names import explain_name, explain_target, find_similar_setting, list_targets
from settings.resume import compare_with_stored, persisted_settings, read_run_config
from settings.sources import DEFAULT, ENVIRONMENT, SourcedValues, add_origin, parse
from settings.targets import (
    ALL_SETTINGS,
    CONTINUE,
    DRY_RUN,
    EITHER,
    FIND,
    FINETUNE,
    LISTS_RUNS,
    PRETRAIN,
    PREVIEW,
    READ_A_RUN,
    RESUME,
    START,
    TARGET_DEFAULTS,
    TARGETS,
    TRAIN,
    VARIABLES,
)
from settings.tuning_rules import FITTED, fit_to_model, is_finetuning, is_fitted


@dataclasses.dataclass(frozen=True)
class Resolved:
    """The settings of a target, where they come from, and what to print about them.

    Attributes:
        origins: NAME -> where its value comes from.
        explicit: names that are set on the command line, in the environment or in the env file.
        invalid: names whose own value is refused, and whose default stands in the config.
        fitted: names of FITTED that nobody has set, so fine-tuning chooses their values.
    """

    config: Config
    origins: dict[str, str]
    explicit: set[str]
    invalid: set[str]
    fitted: set[str]
    problems: list[str]
    warnings: list[str]

    def check(self) -> "Resolved":
        """Return itself. Raises SettingsError if there are problems."""
        if self.problems:
            raise SettingsError(self.problems, self.warnings)
        return self

    def add_origins(self, sentence: str) -> str:
        """Add where each NAME=value of a sentence comes from, unless it says so itself.

        Nobody looks for a value that he never set: `[OPTIMIZER: presets/tiny.env line 22]`.
        """
        values = self.config.values()
        origins = {}
        for word in sentence.split():
            text = word.rstrip(":;,.")
            name = text.partition("=")[0]
            if name not in values or text != f"{name}={format_value(values[name])}":
                continue
            if f"{text} (" not in sentence:
                origins[name] = f"{name}: {self.origins[name]}"
        return f"{sentence} [{', '.join(origins.values())}]" if origins else sentence


@dataclasses.dataclass(frozen=True)
class StoredRun:
    """What a run was started with.

    Attributes:
        path: of its config.json, below the repository; "" if no run is looked for.
        settings: by name; {} if the run has none yet.
    """

    path: str = ""
    settings: Values = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a command was given.

    Attributes:
        environ: the environment of the process.
        root: of the repository.
        target: of make; "" for a command without one.
        targets: all that make was asked for.
        defaults: what takes the place of declared defaults.
        typed: values of make's command line.
        explicit: values of the command line, the environment and the env file that count.
        ignored: those that do not, although they look meant.
        problems: a sentence for all that is wrong.
    """

    environ: Texts
    root: Path
    target: str
    targets: Set[str]
    defaults: SourcedValues
    typed: SourcedValues
    explicit: SourcedValues
    ignored: SourcedValues
    problems: list[str]


def load_config(
    environ: Texts | None = None,
    root: Path = ROOT,
    defaults: Texts | None = None,
    without: Collection[Check] = (),
) -> Config:
    """Return the settings of this command. Raises SettingsError with all problems.

    The arguments are those of `resolve`, which also knows where values come from.
    """
    return resolve(environ, root, defaults, without).check().config


def load_preset(**settings: str) -> Config:
    """Return a preset with these settings, whatever is in the environment and in .env."""
    return load_config(settings, defaults={"ENV_FILE": "of-nobody"})


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
    inputs = gather(environ, root, defaults or {})
    run = read_run(inputs) if inputs.target in RESUME else StoredRun()
    return judge(inputs, choose(inputs, run), run, without)


# ---- Gather


def gather(environ: Texts, root: Path, defaults: Texts) -> Inputs:
    """Read the command line, the environment and the env file."""
    target = environ.get("MAKE_TARGET", "")
    goals = environ.get("MAKE_GOALS", target).split() if target else []
    targets = TARGETS.intersection(goals)
    problems = [explain_target(goal) for goal in goals if goal not in TARGETS]
    if "DATA" in environ.get("MAKE_SETTINGS", "").split() and not environ.get("DATA"):
        problems.append(
            "DATA (command line): Is empty. Name a file, a folder or hf:OWNER/NAME, or leave DATA out."
        )
    weakest = list_defaults(target, defaults)
    typed = sources.read_command_line(environ)
    environment = sources.read_environment(environ)
    env_file = sources.read_env_file((weakest | environment | typed)["ENV_FILE"], root, problems)
    explicit = {}
    ignored = {}
    for name, value in (env_file | environment | typed).items():
        if name == "DRY_RUN" and value.text == "1" and target in TARGETS - DRY_RUN:
            problems.append(f"DRY_RUN ({value.origin}): {explain_users({target}, DRY_RUN)}")
        if name in typed or name not in SETTINGS or is_accepted(name, targets):
            explicit[name] = value
        elif name in environment or is_training_setting(name, target):
            ignored[name] = value
    if target == "plan" and "MODEL" in explicit:  # planned as make finetune would start it
        weakest = list_defaults("finetune", defaults)
    return Inputs(environ, root, target, targets, weakest, typed, explicit, ignored, problems)


def list_defaults(target: str, defaults: Texts) -> SourcedValues:
    """Return what takes the place of declared defaults, and the two that name files."""
    texts = {
        "PRESET": DEFAULTS["PRESET"],
        "ENV_FILE": DEFAULTS["ENV_FILE"],
        **TARGET_DEFAULTS.get(target, {}),
        **defaults,
    }
    return add_origin(texts, DEFAULT)


def is_used(name: str, targets: Set[str]) -> bool:
    """Tell whether one of the targets uses a setting. Without a target, a command uses all."""
    return not targets or bool(targets & SETTINGS[name].used_by)


def is_accepted(name: str, targets: Set[str]) -> bool:
    """Tell whether the value of an environment or env file counts: also where it only finds a run."""
    return is_used(name, targets) or (SETTINGS[name].finds_run and bool(targets & FIND))


def is_training_setting(name: str, target: str) -> bool:
    """Tell whether a setting that this target does not use is of training: LORA_RANK for make train."""
    return target in TRAIN and SETTINGS[name].resume != FREE


# ---- Choose


def read_run(inputs: Inputs) -> StoredRun:
    """Read the config.json of the run that is meant. Raises RunConfigError."""
    preset = sources.read_preset(inputs.defaults | inputs.explicit, inputs.root, [])
    values, _ = parse(inputs.defaults | preset | inputs.explicit)
    path = f"{build_config(values).run_folder}/config.json"
    return StoredRun(path, read_run_config(inputs.root / path).get("settings", {}))


def choose(inputs: Inputs, run: StoredRun) -> SourcedValues:
    """Return the strongest value of each name that has one."""
    explicit = inputs.explicit
    explicit_values, _ = parse(explicit)
    persisted = add_origin(persisted_settings(run.settings, explicit_values), run.path)
    if "CARDS" in explicit:  # the plan is of other processes: one for each card
        persisted.pop("NPROC", None)
    weaker = inputs.defaults | persisted
    preset = sources.read_preset(weaker | explicit, inputs.root, inputs.problems)
    chosen = inputs.defaults | preset | persisted | explicit
    if chosen["PRESET"].text != weaker["PRESET"].text:  # another one is named
        chosen = weaker | preset | explicit
    return chosen | take_shape(inputs, chosen) | explicit


def take_shape(inputs: Inputs, chosen: SourcedValues) -> SourcedValues:
    """Return what INIT_FROM sets: the shape that the run began with, or else that of the folder.

    Nothing is set if the folder is not on this machine, as for a run in a cluster.
    """
    folder = chosen.get("INIT_FROM")
    if folder is None or not is_used("INIT_FROM", inputs.targets):
        return {}
    # transformers opens a model that is asked questions, whatever its shape.
    asks = inputs.target == "eval" and {"EVAL_DATA", "BENCHMARKS"} & inputs.explicit.keys()
    if asks or inputs.target == "chat":
        return {}
    stored = read_run(inputs).settings
    if stored.get("INIT_FROM") == folder.text:
        names = stored.keys() & {*SHAPE, "TOKENIZER"}
        texts = {name: format_value(stored[name]) for name in names}
        return add_origin(texts, "the run's config.json")
    problem = explain_closed(inputs.root / folder.text)
    if problem:
        inputs.problems.append(f"INIT_FROM={folder.text}: {problem}")
        return {}
    if (inputs.root / folder.text).is_dir():
        return read_folder(folder, inputs.root, inputs.explicit, inputs.problems)
    if inputs.target in START:
        inputs.problems.append(explain_missing(folder.text))
    return {}


def explain_closed(folder: Path) -> str:
    """Say what to do if a folder is there and this user may not look into it; "" if all is well."""
    if not os.path.isdir(folder) or os.access(folder, os.R_OK | os.X_OK):
        return ""
    return f"You may not read {show_path(folder)}. Ask its owner to allow it (chmod a+rX), or choose another."


def explain_link(folder: Path) -> str:
    """Say what to do if a run has a link in place of a folder of its own, which it would write to and clear.

    "" if it has none.
    """
    if not os.path.isdir(folder):
        return ""
    for entry in sorted(folder.iterdir()):
        if entry.is_symlink() and entry.is_dir():
            return (
                f"{show_path(entry)} is a link to a folder, and a run writes and deletes in its own folders "
                "only. Put the folder itself there, or keep the whole run elsewhere with RUNS_DIR."
            )
    return ""


# ---- Judge


def judge(
    inputs: Inputs, chosen: SourcedValues, run: StoredRun, without: Collection[Check]
) -> Resolved:
    """Parse the chosen values, and find all that is wrong with them."""
    parsed, invalid = parse(chosen)
    config = build_config(parsed, inputs.target)
    values = config.values()
    purpose = find_purpose(inputs.target, config)
    origins = dict.fromkeys(SETTINGS, DEFAULT)
    for name in SETTINGS.keys() & chosen.keys():
        origins[name] = chosen[name].origin
    fitted = {name for name in FITTED if is_fitted(origins[name])}
    if is_finetuning(purpose):
        config = fit_to_model(config, fitted, None, config.nodes * (config.nproc or 1))
        given, values = values, config.values()
        for name in fitted:
            if values[name] != given[name]:
                origins[name] = "chosen by make finetune"

    problems = inputs.problems
    if inputs.target in SETTINGS["RUN_NAME"].used_by - LISTS_RUNS:
        folder = inputs.root / config.run_folder
        problem = explain_closed(folder)
        if not problem and inputs.target not in READ_A_RUN:
            problem = explain_link(folder)
        if problem:
            problems.append(f"RUN_NAME={config.run_name} ({origins['RUN_NAME']}): {problem}")
    for name, value in chosen.items():
        problem = ""
        if name in inputs.typed:
            problem = refuse_typed(name, inputs, purpose, values)
        elif name not in SETTINGS:
            problem = explain_name(name)
        if problem:
            problems.append(f"{name} ({value.origin}): {problem}")
    mixture = inputs.explicit.get("DATA_MIX")
    if mixture and config.pretrains_on_data and mixture.text != config.data_mix:
        problems.append(f"DATA_MIX ({mixture.origin}): Cannot be set together with DATA.")
    problems += invalid.values()
    for name, sentence in find_conflicts(config, purpose, invalid, without):
        problems.append(f"{name}={format_value(values[name])} ({origins[name]}): {sentence}")
    if inputs.target in CONTINUE and run.settings:
        now = {}
        for name in SETTINGS:
            is_kept = name in invalid or origins[name] in (run.path, DEFAULT)
            if not is_kept and is_used(name, inputs.targets):
                now[name] = values[name]
        refusals, _ = compare_with_stored(run.settings, now)
        problems += refusals
    return Resolved(
        config,
        origins,
        explicit=SETTINGS.keys() & inputs.explicit,
        invalid=set(invalid),
        fitted=fitted,
        problems=problems,
        warnings=find_warnings(inputs, values),
    )


def find_purpose(target: str, config: Config) -> str:
    """Return the target whose rules hold: `make plan` with MODEL plans what finetune does."""
    if config.model and (not target or target in EITHER):
        return "finetune"
    return target or "check-env"


def refuse_typed(name: str, inputs: Inputs, purpose: str, values: Values) -> str:
    """Say why a name cannot be set on the command line of these targets; "" if it can."""
    targets = inputs.targets
    declared = SETTINGS.get(name)
    users = declared.used_by if declared else VARIABLES.get(name)
    if users is None:
        return explain_name(name)
    if declared and declared.secret:
        return "A secret belongs in the environment or in .env."
    readers = targets & users
    # A preview reads what the command that it previews reads, and switches of its own.
    if purpose not in users and users & (PRETRAIN | FINETUNE) - PREVIEW:
        readers -= PREVIEW
    if targets and not readers and name != "DRY_RUN":
        hint = ""
        if declared and declared.finds_run and targets & FIND:
            hint = " To find the run of another node or site, set it in the environment or in .env."
        if name == "DATA" and "eval" in targets:
            hint = " EVAL_DATA names questions to ask a fine-tuned run."
        return explain_users(targets, users) + hint
    if declared and not declared.has_effect(values, inputs.target):
        return declared.explain_needs()
    return ""


def explain_users(targets: Set[str], users: Set[str]) -> str:
    """Say that targets do not use a setting, and which do."""
    others = list_targets(users - ALL_SETTINGS or users)
    return f"Not used by {list_targets(targets)}. Used by: {others}."


def find_warnings(inputs: Inputs, values: Values) -> list[str]:
    """Say what comes from the environment, where nobody sees it, and what is ignored."""
    environ = inputs.environ
    explicit = inputs.explicit
    ignored = dict(inputs.ignored)
    for name, value in explicit.items():
        is_typed = name in inputs.typed or name not in SETTINGS  # and refused
        if not is_typed and not SETTINGS[name].has_effect(values, inputs.target):
            ignored[name] = value
    warnings = []
    shown = []
    for name, value in sorted(explicit.items()):
        if value.origin == ENVIRONMENT and name not in ignored:
            shown.append(f"{name}={SETTINGS[name].show(value.text)}")
    if shown:
        warnings.append(f"From the environment: {' '.join(shown)}")
    if environ.get("PROMPT") and "PROMPT" not in explicit and is_used("PROMPT", {inputs.target}):
        warnings.append(
            "PROMPT (environment) is not used, since shells export one. Set it as make PROMPT=..."
        )
    for name in sorted(environ.keys() - SETTINGS.keys() - explicit.keys()):
        similar = find_similar_setting(name, 0.9)
        if similar and similar not in environ:
            warnings.append(f"Warning: {name} (environment) is ignored. Did you mean {similar}?")
    if ignored:
        names = [f"{name} ({value.origin})" for name, value in ignored.items()]
        warnings.append(f"Warning: Not used here: {', '.join(names)}.")
    return warnings


def explain_error(error: Exception) -> str:
    """Return the text of an error that a command ends with.

    Where settings are wrong, it says of each value in it where this process has it from.
    """
    text = str(error)
    if not isinstance(error, SettingsError):
        return text
    try:
        resolved = resolve()
    except SettingsError:  # the run's config.json cannot be used: there are no settings
        return text
    for problem in error.problems:
        text = text.replace(problem, resolved.add_origins(problem))
    return text


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


def find_fitted() -> set[str]:
    """Return the settings of fine-tuning that follow from others and DATA, since nobody has set them."""
    return resolve(defaults=TARGET_DEFAULTS["finetune"]).fitted


def is_of_preset(name: str) -> bool:
    """Tell whether a setting has its value by the preset or the default, and not by the user or the run."""
    origin = resolve().origins[name]
    return origin == DEFAULT or origin.startswith("presets/")


def build_environment(settings: Texts, without: Collection[str] = ()) -> dict[str, str]:
    """Return this process's environment with these settings, for a process to start.

    The settings are for that process, and not for the target that was typed.
    """
    without = {"MAKE_SETTINGS", *without}
    environment = {name: value for name, value in os.environ.items() if name not in without}
    return environment | {"MAKE_TARGET": ""} | dict(settings)


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


def repeat_typed(target: str, without: Collection[str] = ()) -> str:
    """Return the settings of make's command line that a target uses, as they are typed.

    without: those that the new command has itself.
    """
    words = []
    for name, given in sources.read_command_line(os.environ).items():
        is_of_target = name not in SETTINGS or is_used(name, {target})
        if is_of_target and name not in without:
            words.append(f" {name}={shlex.quote(given.text)}")
    return "".join(words)


def show_path(path: Path) -> str:
    """Return a path for printing: relative to the repository if it is inside."""
    if path.is_relative_to(ROOT):
        path = path.relative_to(ROOT)
    return str(path)
