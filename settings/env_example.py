"""The text of .env.example, from the declaration of the settings: `python -m settings.env_example` prints it."""

import sys

from settings.config import Config
from settings.declare import Declared, declared_fields, format_value, rule_of

# First setting of a group -> the group's title, in the order in which they are shown.
GROUPS = {
    "PRESET": "Run",
    "DEVICE": "Machine",
    "PARALLEL": "Parallel",
    "SYNC": "Sites",
    "VOCAB_SIZE": "Model",
    "SEQ_LEN": "Batch and schedule",
    "OPTIMIZER": "Optimizer",
    "DATA_MIX": "Data",
    "MODEL": "Fine-tuning",
    "MID_DATA": "Pipeline",
    "EVAL_EVERY": "Evaluation",
    "SAVE_EVERY": "Checkpoints",
    "MAX_RESTARTS": "Failures",
    "IMAGE": "Image",
    "WHERE": "Cluster",
    "CARDS": "Plan and doctor",
    "INTERVAL_MS": "Monitor",
    "LOG_DIR": "Plots",
    "PROMPT": "Text",
    "WAN_LAB": "WAN lab",
    "GPU_CHECK": "Benchmark",
    "BENCH_SHAPES": "Benchmark",
    "LOG_EVERY": "Log",
    "WANDB_MODE": "W&B",
    "HF_TOKEN": "Secrets",
}


def env_example() -> str:
    """Every setting with its help, rule, default and what a change of it means for a run that is resumed."""
    lines = [
        "# Written by `make env-example` from settings/config.py; copy to .env and uncomment what you change.",
        "# NAME=value, nothing else: no quotes, blanks, $ or # in a value. Empty means the default.",
        "# Precedence: make NAME=value > environment > this file > presets/PRESET.env > the default here.",
        "#",
        "# On resume a setting is frozen (a difference is refused), tracked (printed and recorded) or free.",
    ]
    groups: dict[str, list[str]] = {title: [] for title in GROUPS.values()}
    title = ""
    for name, field in declared_fields(Config).items():
        title = GROUPS.get(name, title)
        if name == "ENV_FILE":  # which file this is cannot be said in it
            continue
        declared: Declared = field.metadata["declared"]
        groups[title] += [
            f"# {declared.help}.",
            f"# {rule_of(field)}" + ("" if declared.secret else f"; {declared.resume}"),
            f"#{name}={format_value(field.default)}",
        ]
    for title, group in groups.items():
        lines += ["", f"# ==== {title}", *group]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(env_example())
