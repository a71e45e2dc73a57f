"""The settings of a command, section by section, and what follows from them.

config = Config.load()
model = build_model(config.architecture)
print(config.training.batch_tokens, config.run_folder)
"""

import dataclasses
import typing
from collections.abc import Collection, Mapping
from typing import Any

from settings.cluster import Cluster
from settings.data import Corpus, name_of_data
from settings.declare import Setting, SettingsError, read_section, round_as_typed
from settings.finetune import LoRA, Tuning
from settings.planning import Planning
from settings.precision import choose_dtype
from settings.run import Checkpoints, Faults, Machine, Run, Sources
from settings.sampling import Sampling
from settings.training import Architecture, DiLoCo, Evaluation, Training, Wan
from settings.watching import Measuring, Tracking, Watching


@dataclasses.dataclass(frozen=True, init=False)
class Config:
    """A value for every setting. A room takes the section that it needs.

    Rooms that still read `config.batch_tokens` instead of `config.training.batch_tokens` can:
    a setting or a property of a section is found by its name alone, in reading, building and
    `dataclasses.replace`.
    """

    sources: Sources
    run: Run
    machine: Machine
    architecture: Architecture
    training: Training
    wan: Wan
    diloco: DiLoCo
    corpus: Corpus
    evaluation: Evaluation
    checkpoints: Checkpoints
    faults: Faults
    tuning: Tuning
    lora: LoRA
    sampling: Sampling
    planning: Planning
    watching: Watching
    tracking: Tracking
    measuring: Measuring
    cluster: Cluster

    def __init__(self, **given: Any):
        """Take whole sections, single settings in lower case, or both; the rest has its default."""
        for section, section_class in SECTIONS.items():
            fields = {field.name for field in dataclasses.fields(section_class)}
            changes = {name: given.pop(name) for name in fields & given.keys()}
            value = given.pop(section, None) or section_class()
            object.__setattr__(self, section, dataclasses.replace(value, **changes))
        if given:
            raise TypeError(f"unknown settings: {', '.join(given)}")

    @classmethod
    def load(cls, environ: Mapping[str, str] | None = None, root: Any = None) -> "Config":
        """Return the settings of this command. Raises SettingsError with all problems."""
        return cls.load_with_warnings(environ, root)[0]

    @classmethod
    def load_with_warnings(
        cls,
        environ: Mapping[str, str] | None = None,
        root: Any = None,
        defaults: Mapping[str, str] | None = None,
        without: Collection[Any] = (),
    ) -> tuple["Config", list[str]]:
        """Return the settings of this command, and what to print about them.

        The arguments are those of `resolve.resolve`. Raises SettingsError with all problems.
        """
        from settings import ROOT, resolve  # these import this module

        resolved = resolve.resolve(environ, root or ROOT, defaults, without)
        if resolved.problems:
            raise SettingsError(resolved.problems, resolved.warnings)
        return resolved.config, resolved.warnings

    @classmethod
    def of_preset(cls, **settings: str) -> "Config":
        """Return a preset with these settings, whatever is in the environment and in .env."""
        return cls.load_with_warnings(settings, defaults={"ENV_FILE": "of-nobody"})[0]

    def __getattr__(self, name: str) -> Any:
        """Find a setting or a property of a section by its name."""
        section = SECTION_OF.get(name)
        if section is None:
            raise AttributeError(f"Config has no {name}")
        return getattr(getattr(self, section), name)

    @property
    def replicas(self) -> int:
        """Number of sites that train on their own part of the batch: SITES with DiLoCo, else 1."""
        return self.wan.sites if self.wan.sync == "diloco" else 1

    @property
    def site_nodes(self) -> int:
        """Number of nodes in one process group: those of a site with DiLoCo, else all."""
        return max(1, self.machine.nodes // self.replicas)

    @property
    def site_rank(self) -> int:
        """Rank of this node's site."""
        return self.machine.node_rank // self.site_nodes

    @property
    def rank_in_site(self) -> int:
        """Rank of this node within its site."""
        return self.machine.node_rank % self.site_nodes

    @property
    def run_folder(self) -> str:
        """Folder of the run. Each site but the first has a folder of its own inside it."""
        folder = f"{self.run.runs_dir}/{self.run.run_name}"
        if self.site_rank > 0:
            folder += f"/site_{self.site_rank}"
        return folder

    @property
    def pretrains_on_data(self) -> bool:
        """Whether DATA is text to pretrain on, and not conversations to fine-tune a model on."""
        return is_pretrained_on(self.values())

    def micro_batch(self, world_size: int) -> int:
        """Return the number of sequences in a forward pass of one of `world_size` processes."""
        training = self.training
        return min(training.micro_batch_size, training.batch_windows // world_size)

    def replace(self, **changes: Any) -> "Config":
        """Return the same with other sections, or with other values of single settings."""
        return dataclasses.replace(self, **changes)

    def derived(self) -> "Config":
        """Return the same with the defaults that follow from other settings."""
        return build_config(self.values())

    def values(self) -> dict[str, Any]:
        """Return the value of every setting by its name."""
        return {name: getattr(self, name.lower()) for name in SETTINGS}

    def stored(self) -> dict[str, Any]:
        """Return what a run's config.json holds: every value but the secrets."""
        values = self.values()
        return {name: values[name] for name in SETTINGS if not SETTINGS[name].secret}


SECTIONS: dict[str, Any] = {
    name: section_class
    for name, section_class in typing.get_type_hints(Config).items()
    if dataclasses.is_dataclass(section_class)
}
SETTINGS: dict[str, Setting] = {}
SECTION_OF: dict[str, str] = {}  # setting or property, in lower case
for section_name, section_class in SECTIONS.items():
    SETTINGS |= read_section(section_name, section_class)
    SECTION_OF |= dict.fromkeys(
        (name for name in dir(section_class) if name.islower() and name[0] != "_"), section_name
    )
DEFAULTS: dict[str, Any] = {name: declared.default for name, declared in SETTINGS.items()}


def build_config(given: dict[str, Any]) -> Config:
    """Build the sections from the values that were given, by name.

    The other settings have their default, and so have those without effect: SYNC_EVERY is 30
    unless SYNC=diloco.
    """
    values = DEFAULTS | given
    for name in SETTINGS:
        if not has_effect(name, values):
            values[name] = DEFAULTS[name]
    if is_pretrained_on(values):
        values["DATA_MIX"] = f"{name_of_data(values['DATA'])}:1"
    for name, default in derive_defaults(values).items():
        if values[name] in (None, ""):
            values[name] = default
    if values["DTYPE"] == "auto":
        values["DTYPE"] = choose_dtype(values["DEVICE"])
    return Config(**{name.lower(): value for name, value in values.items()})


def is_pretrained_on(values: Mapping[str, Any]) -> bool:
    """Tell whether DATA is text for pretraining."""
    return bool(values["DATA"] and not values["MODEL"] and values["PRESET"] != "finetune")


def has_effect(name: str, values: Mapping[str, Any]) -> bool:
    """Tell whether the setting that this one needs has a value that makes use of it."""
    needs = SETTINGS[name].needs
    if not needs:
        return True
    if needs.endswith(">0"):
        return bool(values[needs.removesuffix(">0")] > 0)
    needed, _, allowed = needs.partition("=")
    return values[needed] in allowed.split("|")


def name_run(values: Mapping[str, Any]) -> str:
    """Return the name of a run that has none: its preset, and the data that was named."""
    if is_pretrained_on(values):
        return f"{values['PRESET']}-{name_of_data(values['DATA'])}"
    return str(values["PRESET"])


def derive_defaults(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults that follow from other settings."""
    derived = {
        "RUN_NAME": name_run(values),
        "N_KV_HEAD": values["N_HEAD"],
        "MLP_DIM": -(-8 * values["N_EMBD"] // (3 * 64)) * 64,
        "MIN_LEARNING_RATE": round_as_typed(values["LEARNING_RATE"] / 10),
    }
    if values["LR_SCHEDULE"] == "wsd":
        derived["DECAY_TOKENS"] = values["TRAIN_TOKENS"] // 5
    if values["LORA_RANK"] > 0:
        derived["LORA_ALPHA"] = 2.0 * values["LORA_RANK"]
    return derived
