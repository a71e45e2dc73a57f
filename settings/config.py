"""The settings of a command, and what follows from them.

config = load_config()  # settings/resolve.py
model = build_model(config)
print(config.batch_tokens, config.run_folder)
"""

import dataclasses
from pathlib import Path
from typing import Any

from settings.cluster import Cluster
from settings.data import Corpus, name_of_data
from settings.declare import Setting, Values, read_section, round_as_typed
from settings.finetune import LoRA, Tuning
from settings.planning import Planning
from settings.precision import choose_dtype
from settings.run import Checkpoints, Faults, Machine, Run, Sources
from settings.sampling import Sampling
from settings.training import Architecture, DiLoCo, Evaluation, Training, Wan
from settings.watching import Measuring, Tracking, Watching

ROOT = Path(__file__).resolve().parent.parent


@dataclasses.dataclass(frozen=True)
class Config(
    Sources,
    Run,
    Machine,
    Architecture,
    Training,
    Wan,
    DiLoCo,
    Corpus,
    Evaluation,
    Checkpoints,
    Faults,
    Tuning,
    LoRA,
    Sampling,
    Planning,
    Watching,
    Tracking,
    Measuring,
    Cluster,
):
    """A value for every setting of these sections, and their properties."""

    @property
    def replicas(self) -> int:
        """Number of sites that train on their own part of the batch: SITES with DiLoCo, else 1."""
        return self.sites if self.sync == "diloco" else 1

    @property
    def site_nodes(self) -> int:
        """Number of nodes in one process group: those of a site with DiLoCo, else all."""
        return max(1, self.nodes // self.replicas)

    @property
    def site_rank(self) -> int:
        """Rank of this node's site."""
        return self.node_rank // self.site_nodes

    @property
    def rank_in_site(self) -> int:
        """Rank of this node within its site."""
        return self.node_rank % self.site_nodes

    @property
    def run_folder(self) -> str:
        """Folder of the run. Each site but the first has a folder of its own inside it."""
        folder = f"{self.runs_dir}/{self.run_name}"
        if self.site_rank > 0:
            folder += f"/site_{self.site_rank}"
        return folder

    @property
    def pretrains_on_data(self) -> bool:
        """Whether DATA is text to pretrain on, and not conversations to fine-tune a model on."""
        return is_pretrained_on(self.values())

    @property
    def gathers_once(self) -> bool:
        """Whether FSDP2 gathers weights once a step, rather than for each pass, while gradients accumulate.

        It then holds all weights in DTYPE. It does where it holds whole gradients, in float32: with
        GRAD_SYNC=step, if all weights are trained.
        """
        return self.grad_sync == "step" and not self.lora_rank

    def micro_batch(self, world_size: int) -> int:
        """Return the number of sequences in a forward pass of one of `world_size` processes.

        At least 1: an evaluation may have more processes than a batch has sequences.
        """
        return max(1, min(self.micro_batch_size, self.batch_windows // world_size))

    def replace(self, **changes: Any) -> "Config":
        """Return the same with other values of these settings, in lower case."""
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


SECTIONS: tuple[Any, ...] = Config.__bases__
SETTINGS: dict[str, Setting] = {}
for section in SECTIONS:
    SETTINGS |= read_section(section)
DEFAULTS = Config().values()


def build_config(given: Values, target: str = "") -> Config:
    """Return a config with the values that were given, by name.

    The other settings have their default, and so have those without effect for this target of make:
    SYNC_EVERY is 30 unless SYNC=diloco.
    """
    values = {**DEFAULTS, **given}
    for name, declared in SETTINGS.items():
        if not declared.has_effect(values, target):
            values[name] = DEFAULTS[name]
    values["DATA"] = values["DATA"].rstrip("/") or values["DATA"]  # papers/ is papers
    if is_pretrained_on(values):
        values["DATA_MIX"] = f"{name_of_data(values['DATA'])}:1"
    for name, default in derive_defaults(values).items():
        if values[name] in (None, ""):
            values[name] = default
    if values["DTYPE"] == "auto":
        values["DTYPE"] = choose_dtype(values["DEVICE"])
    return Config(**{name.lower(): value for name, value in values.items()})


def is_default(name: str, values: Values) -> bool:
    """Tell whether a setting has the value that it would have if nobody set it.

    Args:
        values: of all settings, by name.
    """
    others = {other: value for other, value in values.items() if other != name}
    return bool(build_config(others).values()[name] == values[name])


def is_pretrained_on(values: Values) -> bool:
    """Tell whether DATA is text for pretraining."""
    return bool(values["DATA"] and not values["MODEL"] and values["PRESET"] != "finetune")


def derive_defaults(values: Values) -> dict[str, Any]:
    """Return the defaults that follow from other settings."""
    derived = {
        "RUN_NAME": values["PRESET"],
        "N_KV_HEAD": values["N_HEAD"],
        "MLP_DIM": -(-8 * values["N_EMBD"] // (3 * 64)) * 64,
        "MIN_LEARNING_RATE": round_as_typed(values["LEARNING_RATE"] / 10),
    }
    if is_pretrained_on(values):
        derived["RUN_NAME"] += f"-{name_of_data(values['DATA'])}"
    if values["LR_SCHEDULE"] == "wsd":
        derived["DECAY_TOKENS"] = values["TRAIN_TOKENS"] // 5
    if values["LORA_RANK"] > 0:
        derived["LORA_ALPHA"] = 2.0 * values["LORA_RANK"]
    return derived
