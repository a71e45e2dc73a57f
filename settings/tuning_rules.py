"""What fine-tuning holds out and refuses: finetune/, pipeline/, k8s/ and plan/ all need it."""

from typing import Any

from settings.config import Config
from settings.declare import SettingsError, format_value

# How many conversations fine-tuning is evaluated with, of EVAL_DATA or held out of DATA, which
# gives up one in ten at most. They are the same in every evaluation of a run.
HELD_OUT_CONVERSATIONS = 200


# Setting -> the values that fine-tuning can follow, and why it cannot follow others.
ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "SYNC": (("ddp",), "all nodes train in step"),
    "OPTIMIZER": (("adamw",), "it always uses AdamW"),
    "INIT_FROM": (("",), "MODEL names what is fine-tuned"),
    "CORE_EVERY": ((0,), "`make eval` measures CORE on the export"),
    "STEP": (
        (None,),
        "MODEL is read from its export; `make export RUN_NAME=... STEP=...` exports another step",
    ),
    "PROFILE": ((False,), "only pretraining can be profiled"),
    "DOC_MASK": ((False,), "examples never attend to each other anyway"),
    "COMPILE": (("auto", "0"), "transformers' model classes run uncompiled"),
    "ATTENTION": (("auto", "sdpa"), "transformers' model classes use SDPA"),
}


def refuse_unsupported(c: Config) -> None:
    """Raise SettingsError naming every setting that fine-tuning cannot follow."""
    problems = []
    for name, (values, reason) in ALLOWED.items():
        value = getattr(c, name.lower())
        if value not in values:
            problems.append(
                f"{name}={format_value(value)}: not available in fine-tuning, because {reason}. "
                f"Leave {name} out."
            )
    if problems:
        raise SettingsError(problems)
