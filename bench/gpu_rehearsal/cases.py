"""The cases: words, and the settings that they stand for.

a100 fsdp                                   one word of some columns; DEFAULTS has the others
d16-2xh100 ACTIVATION_CHECKPOINTING=full    a preset as it is, and settings
"""

from collections.abc import Sequence

from settings import ROOT, SettingsError, load_preset
from settings.config import Config

ACCUMULATION = 2  # micro-batches in a step
# Two layers of gpt2-124m. A word of each column makes a case.
SMALL = {"PRESET": "gpt2-124m", "N_LAYER": "2"}
CARDS = {"rtx4090": "rtx4090", "a100": "a100-80gb-sxm", "h100": "h100-sxm"}
COLUMNS: dict[str, dict[str, dict[str, str]]] = {
    "card": {name: {} for name in CARDS},
    "heads": {
        "mha": {},
        "gqa": {"N_KV_HEAD": "4", "QK_NORM": "1", "TIE_EMBEDDINGS": "0"},  # as in Qwen3
    },
    "dtype": {"bfloat16": {"DTYPE": "bfloat16"}, "float32": {"DTYPE": "float32"}},
    "mask": {"whole": {}, "doc_mask": {"DOC_MASK": "1"}},
    "parallel": {
        "single": {},
        "ddp": {},
        "fsdp": {"PARALLEL": "fsdp"},
        "hsdp": {"PARALLEL": "hsdp", "SHARD_RANKS": "2"},
    },
    "recompute": {
        "none": {},
        "selective": {"ACTIVATION_CHECKPOINTING": "selective"},
        "full": {"ACTIVATION_CHECKPOINTING": "full"},
    },
}
PROCESSES = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}
DEFAULTS = ("h100", "mha", "bfloat16", "whole", "single", "none")
PAIRS = (
    "rtx4090 gqa bfloat16 whole single full",
    "rtx4090 mha float32 doc_mask ddp none",
    "rtx4090 gqa bfloat16 doc_mask fsdp selective",
    "rtx4090 mha float32 whole hsdp selective",
    "a100 mha float32 doc_mask single full",
    "a100 gqa bfloat16 whole ddp selective",
    "a100 gqa float32 whole fsdp full",
    "a100 mha bfloat16 doc_mask hsdp full",
    "h100 gqa bfloat16 whole single selective",
    "h100 mha float32 doc_mask ddp full",
    "h100 mha float32 whole fsdp none",
    "h100 gqa bfloat16 doc_mask hsdp none",
    "h100 mha bfloat16 whole single none",
    "a100 mha bfloat16 doc_mask ddp none OPTIMIZER=muon",
)
PRESETS = ("gpt2-124m", "d16-2xh100", "d20-2xh100", "d24-2xh100", "d32-8xh100", "xlarge-8xa100")


def settings_of(words: Sequence[str]) -> dict[str, str]:
    """Return the settings of a case. Raises SettingsError for a word that is unknown."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if len(names) == 1 and (ROOT / "presets" / f"{names[0]}.env").is_file():
        return {"PRESET": names[0]} | given
    settings = dict(SMALL)
    chosen = {}
    for (column, values), default in zip(COLUMNS.items(), DEFAULTS, strict=True):
        fitting = [name for name in names if name in values]
        chosen[column] = fitting[-1] if fitting else default
        settings |= values[chosen[column]]
    unknown = set(names) - set(chosen.values())
    if unknown:
        known = [name for values in COLUMNS.values() for name in values]
        raise SettingsError(
            [
                f"CASE={' '.join(words)}: {' and '.join(sorted(unknown))}: Must be the name of a preset, or one "
                f"word of each of these kinds: {', '.join(known)}."
            ]
        )
    settings["CARDS"] = f"{PROCESSES[chosen['parallel']]}x{CARDS[chosen['card']]}"
    return settings | given


def config_of(words: Sequence[str]) -> Config:
    """Return the settings of a case, with a batch of as many micro-batches as are rehearsed."""
    config = load_preset(COMPILE="0", SAVE_EVERY="0", **settings_of(words))
    processes = int(config.cards.split("x", 1)[0])
    windows = ACCUMULATION * config.micro_batch_size * processes
    return config.replace(batch_tokens=windows * config.seq_len)
