"""The settings as fine-tuning takes them, and those that it chooses for model and DATA.

Unless the user sets them, SEQ_LEN comes from the preset, up to the model's longest context. BATCH_TOKENS
gives an epoch 32 steps or more, and EPOCHS, 1 to 5, gives the run 100. If DATA is too small for that,
SEQ_LEN gets shorter, but no conversation is cut, and a step has one window of each process.
"""

import math
from collections.abc import Collection

import numpy as np

from settings import SettingsError, load_config
from settings.checks import PRETRAINING, find_batch_problem
from settings.config import SETTINGS, Config
from settings.resolve import find_fitted
from settings.targets import TARGET_DEFAULTS
from settings.tuning_rules import choose_batch, fit_to_model, refuse_unsupported
from train.distributed.world import read_number

STEPS_PER_EPOCH = 32
STEPS = 100
MOST_EPOCHS = 5
ENOUGH_STEPS = (
    10  # of a run whose BATCH_TOKENS is given, and of the advice about one of a single step
)


def load_settings() -> Config:
    """Return the settings of this process.

    Raises:
        SettingsError: a value is invalid, or fine-tuning cannot follow it.
    """
    config = load_config(defaults=TARGET_DEFAULTS["finetune"], without=PRETRAINING)
    refuse_unsupported(config)
    return fit_to_model(config, find_fitted(), None, read_number("WORLD_SIZE", 1))


def limit_seq_len(
    config: Config, fitted: Collection[str], longest: int | None, processes: int
) -> Config:
    """Return the settings for a model of this context. Raises SettingsError if given ones do not fit."""
    config = fit_to_model(config, fitted, longest, processes)
    if problem := find_batch_problem(config, processes):
        raise SettingsError([problem])
    return config


def shorten_windows(config: Config, fitted: Collection[str], positions: np.ndarray) -> Config:
    """Return the settings with windows so short that there are enough of them for an epoch.

    Args:
        positions: (n,), that each example takes in a window.
    """
    length = config.seq_len
    if {"SEQ_LEN", "BATCH_TOKENS"} <= set(fitted):
        while positions.sum() < STEPS_PER_EPOCH * length and positions.max() <= length // 2:
            length //= 2
    return config.replace(seq_len=length)


def fit_to_data(config: Config, fitted: Collection[str], windows: int, processes: int) -> Config:
    """Return the settings with a batch and epochs for data that fills so many windows."""
    if "BATCH_TOKENS" in fitted:
        most = min(config.batch_windows, windows // STEPS_PER_EPOCH)
        config = config.replace(batch_tokens=choose_batch(config, processes, most))
    if "EPOCHS" in fitted:
        steps_per_epoch = windows / config.batch_windows
        epochs = min(MOST_EPOCHS, math.ceil(STEPS / steps_per_epoch))
        epochs = max(epochs, math.ceil(ENOUGH_STEPS / steps_per_epoch))
        config = config.replace(epochs=min(epochs, int(SETTINGS["EPOCHS"].maximum)))
    return config


def refuse_single_step(config: Config, windows: int) -> None:
    """Raise SettingsError if the run is one step, whose learning rate is already zero.

    windows: how many of them one epoch has.
    """
    steps = math.ceil(config.epochs * windows / config.batch_windows)
    if steps > 1 or config.min_learning_rate:
        return
    advice = "Set a smaller BATCH_TOKENS, or give more DATA"
    epochs = math.ceil(ENOUGH_STEPS * config.batch_windows / windows)
    if epochs <= SETTINGS["EPOCHS"].maximum:
        advice += f", or set EPOCHS={epochs} for {ENOUGH_STEPS} steps"
    raise SettingsError(
        [
            f"BATCH_TOKENS={config.batch_tokens}: EPOCHS={config.epochs} of DATA make a single step, at "
            f"whose end the learning rate is MIN_LEARNING_RATE=0, so nothing would be learned. {advice}."
        ]
    )
