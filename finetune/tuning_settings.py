"""The settings as fine-tuning takes them, and the check that a run is long enough to learn."""

import math

from settings import SettingsError, load_config
from settings.checks import PRETRAINING
from settings.config import SETTINGS, Config
from settings.targets import TARGET_DEFAULTS
from settings.tuning_rules import refuse_unsupported

ENOUGH_STEPS = 10  # what the advice about a run of one step aims at


def load_settings() -> Config:
    """Return the settings of this process.

    Raises:
        SettingsError: a value is invalid, or fine-tuning cannot follow it.
    """
    c = load_config(defaults=TARGET_DEFAULTS["finetune"], without=PRETRAINING)
    refuse_unsupported(c)
    return c


def refuse_single_step(c: Config, windows: int, epochs_are_fixed: bool = False) -> None:
    """Raise SettingsError if the run is one step, whose learning rate is already zero.

    Args:
        windows: how many windows one epoch has.
        epochs_are_fixed: EPOCHS is not the user's to set, as in a pipeline.
    """
    steps = math.ceil(c.epochs * windows / c.batch_windows)
    if steps > 1 or c.min_learning_rate:
        return
    advice = "Set a smaller BATCH_TOKENS, or give more DATA"
    epochs = math.ceil(ENOUGH_STEPS * c.batch_windows / windows)
    most_epochs = SETTINGS["EPOCHS"].maximum
    if epochs <= most_epochs and not epochs_are_fixed:
        advice += f", or set EPOCHS={epochs} for {ENOUGH_STEPS} steps"
    raise SettingsError(
        [
            f"BATCH_TOKENS={c.batch_tokens}: EPOCHS={c.epochs} of DATA make a single step, at whose "
            f"end the learning rate is MIN_LEARNING_RATE=0, so nothing would be learned. {advice}."
        ]
    )
