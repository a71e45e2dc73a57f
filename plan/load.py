"""The settings of a plan: those of the run, with links that were measured in the place of declared ones."""

from collections.abc import Callable, Collection
from typing import Any

from plan.network import links
from plan.run import is_finetuning
from settings import SettingsError, load_config
from settings.checks import CHECKS, PRETRAINING, check_batch
from settings.config import Config
from train.data.data_paths import fit_vocabulary

FINETUNE_PRESET = "finetune"  # if MODEL is set and PRESET is not
Rule = Callable[[Any], Any]


def load() -> Config:
    """Return the settings, for pretraining or for fine-tuning. Raises SettingsError."""
    asked = load_with({}, tuple(CHECKS))  # no rule applies before it is known what is planned
    if not is_finetuning(asked):
        return fit_vocabulary(load_with({}, (check_batch,)))
    preset = {"PRESET": FINETUNE_PRESET} if asked.preset == Config().preset else {}
    config = with_nodes(load_with(preset, (*PRETRAINING, check_batch)))
    if config.sweep:
        raise SettingsError(
            [f"SWEEP={config.sweep}: not available for fine-tuning. Leave SWEEP out."]
        )
    return config


def load_with(defaults: dict[str, str], without: Collection[Rule]) -> Config:
    """Load without some rules: a plan needs no address of node 0, and CARDS decides the processes."""

    def load_measured(measured: dict[str, str]) -> Config:
        return load_config(
            defaults={"MASTER_ADDR": "planned"} | defaults | measured, without=without
        )

    return links.loaded(load_measured)


def with_nodes(config: Config) -> Config:
    """Return the settings with NODES that follow from CARDS and NPROC, as the presets of fine-tuning have them."""
    if config.nodes > 1 or not config.nproc or config.cards in ("", "here", "cpu"):
        return config
    cards = sum(int(part.split("x", 1)[0]) for part in config.cards.split(","))
    if cards <= config.nproc or cards % config.nproc:
        return config
    return config.replace(nodes=cards // config.nproc)
