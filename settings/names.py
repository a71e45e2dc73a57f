"""What somebody means by a name that is no setting, or by a target that does not exist."""

import difflib
from collections.abc import Iterable

from settings.config import SETTINGS
from settings.targets import TARGETS, VARIABLES

# What other trainers call a setting.
OTHER_NAMES = {
    "BATCH_SIZE": "BATCH_TOKENS",
    "BLOCK_SIZE": "SEQ_LEN",
    "CHAT": "make chat, or make eval EVAL_DATA=questions.jsonl",
    "CHECKPOINT_EVERY": "SAVE_EVERY",
    "CLIP": "GRAD_CLIP",
    "CONTEXT_LENGTH": "SEQ_LEN",
    "DEPTH": "N_LAYER",
    "EVAL_STEPS": "EVAL_EVERY",
    "GLOBAL_BATCH_SIZE": "BATCH_TOKENS",
    "GPUS": "NPROC",
    "GRAD_ACCUM": "MICRO_BATCH_SIZE",
    "HIDDEN_SIZE": "N_EMBD",
    "LEARNINGRATE": "LEARNING_RATE",
    "LEARN_RATE": "LEARNING_RATE",
    "LORA": "LORA_RANK",
    "LR": "LEARNING_RATE",
    "MAX_ITERS": "MAX_STEPS",
    "MAX_LEARNING_RATE": "LEARNING_RATE",
    "MAX_LR": "LEARNING_RATE",
    "MAX_NEW_TOKENS": "SAMPLE_TOKENS",
    "MAX_SEQ_LEN": "SEQ_LEN",
    "MIN_LR": "MIN_LEARNING_RATE",
    "NUM_GPUS": "NPROC",
    "NUM_LAYERS": "N_LAYER",
    "NUM_STEPS": "MAX_STEPS",
    "OUTPUT_DIR": "RUNS_DIR",
    "PEAK_LR": "LEARNING_RATE",
    "PRECISION": "DTYPE",
    "SAVE_STEPS": "SAVE_EVERY",
    "STEPS": "MAX_STEPS",
    "TENSORBOARD": "TRACKERS=tensorboard",
    "TOKENS": "TRAIN_TOKENS",
    "TRACKIO": "TRACKERS=trackio",
    "WANDB": "WANDB_MODE",
    "WARMUP": "WARMUP_TOKENS",
    "WARMUP_STEPS": "WARMUP_TOKENS",
}
# What is typed after make in other projects.
OTHER_TARGETS = {
    "clean": "Nothing needs cleaning. To delete a run, delete its folder runs/RUN_NAME.",
    "build": "Did you mean make image?",
    "install": "Did you mean make setup?",
    "resume": "`make train RUN_NAME=...` resumes a run that exists.",
    "start": "Did you mean make train?",
    "tensorboard": "TRACKERS=tensorboard mirrors a run to TensorBoard (docs/trackers.md).",
}


def explain_name(name: str) -> str:
    """Say why a name cannot be set."""
    if name in VARIABLES:
        return (
            f"This is not a setting. It is a variable of {list_targets(VARIABLES[name])}: set it on "
            "the command line or in the environment."
        )
    similar = find_similar_setting(name)
    hint = f"Did you mean {similar}?" if similar else "`make settings` lists them."
    return f"There is no such setting. {hint}"


def explain_target(target: str) -> str:
    """Say that a target does not exist, and suggest another."""
    nearest = find_nearest(target, TARGETS)
    if target.upper() in SETTINGS:
        hint = f"`make settings NAME={target.upper()}` explains the setting."
    elif target in OTHER_TARGETS:
        hint = OTHER_TARGETS[target]
    elif nearest:
        hint = f"Did you mean make {nearest}?"
    else:
        hint = "`make help` lists them."
    return f"make {target}: There is no such target. {hint}"


def find_similar_setting(name: str, similarity: float = 0.7) -> str | None:
    """Return the setting that another trainer calls by this name, or the most similar one."""
    name = name.upper()
    return OTHER_NAMES.get(name) or find_nearest(name, SETTINGS, similarity)


def find_nearest(name: str, names: Iterable[str], similarity: float = 0.6) -> str | None:
    """Return the most similar of these names, if any is similar enough."""
    return next(iter(difflib.get_close_matches(name, list(names), 1, similarity)), None)


def list_targets(targets: Iterable[str]) -> str:
    """Return targets as they are typed: `make sample, train`."""
    return f"make {', '.join(sorted(targets))}"
