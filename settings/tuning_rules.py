"""What fine-tuning holds out and refuses: finetune/, pipeline/, k8s/ and plan/ all need it."""

from typing import Any

from settings.config import DEFAULTS, Config
from settings.declare import SettingsError, format_value

# How many conversations fine-tuning is evaluated with, of EVAL_DATA or held out of DATA, which
# gives up one in ten at most. They are the same in every evaluation of a run.
HELD_OUT_CONVERSATIONS = 200


# Setting -> why fine-tuning can follow only its default.
REASONS = {
    "SYNC": "all nodes train in step",
    "OPTIMIZER": "it always uses AdamW",
    "INIT_FROM": "MODEL names what is fine-tuned",
    "CORE_EVERY": "`make eval` measures CORE on the export",
    "STEP": (
        "MODEL is read from its export; `make export RUN_NAME=... STEP=...` exports another step"
    ),
    "PROFILE": "only pretraining can be profiled",
    "DOC_MASK": "examples never attend to each other anyway",
    "COMPILE": "transformers' model classes run uncompiled",
    "ATTENTION": "transformers' model classes use SDPA",
}
SAME_AS_DEFAULT = {"COMPILE": "0", "ATTENTION": "sdpa"}  # there


def find_unsupported(c: Config) -> dict[str, Any]:
    """Return the settings that fine-tuning cannot follow, with their values."""
    unsupported = {}
    for name in REASONS:
        value = getattr(c, name.lower())
        if value not in (DEFAULTS[name], SAME_AS_DEFAULT.get(name)):
            unsupported[name] = value
    return unsupported


NO_MODEL = (
    "MODEL is not set; give a run of ours, the folder of a model with its tokenizer, or its name on "
    "the Hugging Face hub, for example MODEL=models/qwen3-1.7b"
)


def refuse_unsupported(c: Config) -> None:
    """Raise SettingsError naming every setting that fine-tuning cannot follow."""
    problems = []
    for name, value in find_unsupported(c).items():
        problems.append(
            f"{name}={format_value(value)}: not available in fine-tuning, because {REASONS[name]}. "
            f"Leave {name} out."
        )
    if problems:
        raise SettingsError(problems)
