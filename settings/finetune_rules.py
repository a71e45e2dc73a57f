"""The settings as fine-tuning takes them: some rules are of models of ours, and some settings mean nothing here."""

import math

from settings.config import Config
from settings.declare import SettingsError, declared_fields, format_value
from settings.rules import OF_PRETRAINING

# What fine-tuning does not do: setting -> the value that it must have, and what to do instead.
MUST_BE = {
    "SYNC": ("ddp", "all its nodes train in step"),
    "OPTIMIZER": ("adamw", "it is what fine-tuning takes"),
    "INIT_FROM": ("", "MODEL says what is fine-tuned"),
    "CORE_EVERY": (0, "make eval has CORE of its export"),
    "STEP": (
        None,
        "MODEL is read by its export; make export RUN_NAME=.. STEP=.. makes one of another step",
    ),
    "PROFILE": (False, "it is for pretraining"),
    "DOC_MASK": (False, "examples never see each other here"),
}
STEPS = 10  # that EPOCHS should come to at least
MOST_EPOCHS = int(declared_fields(Config)["EPOCHS"].metadata["declared"].maximum)
ALSO = {"COMPILE": ("auto", "0"), "ATTENTION": ("auto", "sdpa")}


def settings() -> tuple[Config, list[str]]:
    """The settings of this process, and what to say of them. Raises SettingsError."""
    c, remarks = Config.load_with_remarks(without=OF_PRETRAINING)
    refuse(c)
    return c, remarks


def refuse(c: Config) -> None:
    """Raises SettingsError with all settings that fine-tuning cannot follow."""
    problems = [
        f"{name}={format_value(getattr(c, name.lower()))}: not in fine-tuning: {why}; leave it out"
        for name, (value, why) in MUST_BE.items()
        if getattr(c, name.lower()) != value
    ]
    problems += [
        f"{name}={getattr(c, name.lower())}: not yet in fine-tuning, which leaves that to transformers' "
        "classes; leave it out"
        for name, values in ALSO.items()
        if getattr(c, name.lower()) not in values
    ]
    if problems:
        raise SettingsError(problems)


def refuse_idle(c: Config, windows: int) -> None:
    """Raises SettingsError where all that is asked for is one step, at the end of whose schedule the rate is zero.
    windows: of an epoch."""
    steps = math.ceil(c.epochs * windows / c.batch_windows)
    if steps > 1 or c.min_learning_rate:
        return
    enough = math.ceil(STEPS * c.batch_windows / windows)
    raise SettingsError(
        [
            f"BATCH_TOKENS={c.batch_tokens}: EPOCHS={c.epochs} of DATA are one such step, at whose end "
            "the learning rate is MIN_LEARNING_RATE=0, so that nothing would be learned; set a smaller "
            "BATCH_TOKENS, or give more DATA"
            + (f", or EPOCHS={enough} for {STEPS} steps" if enough <= MOST_EPOCHS else "")
        ]
    )
