"""What fine-tuning chooses, holds out and refuses: finetune/, k8s/ and plan/ all need it."""

from collections.abc import Collection
from typing import Any

from settings.config import DEFAULTS, Config
from settings.declare import SettingsError, format_value
from settings.sources import DEFAULT
from settings.targets import FINETUNE, PREVIEW

# How many conversations fine-tuning is evaluated with, of EVAL_DATA or held out of DATA, which
# gives up one in ten at most. They are the same in every evaluation of a run.
HELD_OUT_CONVERSATIONS = 200

NO_BENCHMARKS = "none"  # BENCHMARKS, where they are not wanted

# These follow from model, DATA and LORA_RANK, unless they are given: on the command line, in the
# environment, in .env, by another preset, or by the run that is resumed.
FITTED = ("SEQ_LEN", "BATCH_TOKENS", "EPOCHS", "LEARNING_RATE")
PRESET = "presets/finetune.env"  # has the largest SEQ_LEN and BATCH_TOKENS that are chosen
# Ten times what the preset has for all weights (Schulman et al. 2025, LoRA Without Regret).
LORA_LEARNING_RATE = 2e-4


def is_fitted(origin: str) -> bool:
    """Tell whether a value of FITTED is nobody's choice, by where it comes from."""
    return origin == DEFAULT or origin.startswith(f"{PRESET} ")


def is_finetuning(purpose: str) -> bool:
    """Tell whether the rules of fine-tuning hold for a target."""
    return purpose in FINETUNE - PREVIEW - {"pipeline"}


def choose_batch(config: Config, processes: int, most: int) -> int:
    """Return the largest BATCH_TOKENS that all processes can share in full micro-batches.

    It is at least a window of SEQ_LEN tokens for each process.

    Args:
        most: windows.
    """
    each = 1
    while True:
        larger = 2 * each
        if each < config.micro_batch_size < larger:
            larger = config.micro_batch_size
        if larger * processes > most:
            return each * processes * config.seq_len
        each = larger


def fit_to_model(
    config: Config, fitted: Collection[str], longest: int | None, processes: int
) -> Config:
    """Return the settings for a model of this context, or for adapters, on so many processes.

    Args:
        fitted: names of FITTED that are not given.
        longest: tokens that the model was made for, None if it does not say.

    Raises:
        SettingsError: SEQ_LEN is given, and longer.
    """
    if "SEQ_LEN" in fitted and "BATCH_TOKENS" not in fitted:
        shortest = max(1, config.batch_tokens // processes)  # a window for each process
        config = config.replace(seq_len=min(config.seq_len, shortest))
    if longest and config.seq_len > longest:
        if "SEQ_LEN" not in fitted:
            raise SettingsError(
                [
                    f"SEQ_LEN={config.seq_len}: MODEL={config.model} was made for {longest} tokens "
                    f"(max_position_embeddings). Set SEQ_LEN={longest} or less."
                ]
            )
        config = config.replace(seq_len=longest)
    if "BATCH_TOKENS" in fitted:
        batch = choose_batch(config, processes, config.batch_windows)
        config = config.replace(batch_tokens=batch)
    if "LEARNING_RATE" in fitted and config.lora_rank:
        config = config.replace(learning_rate=LORA_LEARNING_RATE)
    return config


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
    "ATTENTION": "transformers' model classes use an attention of their own",
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
