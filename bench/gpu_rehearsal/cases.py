"""The cases: words, and the settings that they stand for.

a100 fsdp                                   one word of some columns; of the others the first
a100 qwen3 lora fsdp                        the same, of fine-tuning a model
d16-2xh100 ACTIVATION_CHECKPOINTING=full    a preset as it is, and settings
"""

from collections.abc import Sequence
from typing import Any

from plan.published import PUBLISHED
from settings import ROOT, SettingsError, load_preset
from settings.config import Config

ACCUMULATION = 2  # micro-batches in a step
# Two layers of gpt2-124m. A word of each column makes a case.
SMALL = {"PRESET": "gpt2-124m", "N_LAYER": "2"}
CARDS = {"h100": "h100-sxm", "a100": "a100-80gb-sxm", "rtx4090": "rtx4090"}
Columns = dict[str, dict[str, dict[str, str]]]
SHARED: Columns = {
    "card": {name: {} for name in CARDS},
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
COLUMNS: Columns = SHARED | {
    "heads": {
        "mha": {},
        "gqa": {"N_KV_HEAD": "4", "QK_NORM": "1", "TIE_EMBEDDINGS": "0"},  # as in Qwen3
    },
    "dtype": {"bfloat16": {"DTYPE": "bfloat16"}, "float32": {"DTYPE": "float32"}},
    "mask": {"whole": {}, "doc_mask": {"DOC_MASK": "1"}},
}
# What config.json says of Llama-3.2-1B, Qwen3-1.7B and Gemma-3-1B. Fine-tuned are two layers of each, in bfloat16: in
# float32 the examples of a window are attended to one by one, and the host reads where each begins.
MODELS: dict[str, dict[str, Any]] = {
    "llama": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": True,
    },
    "qwen3": PUBLISHED["qwen3-1.7b"],
    "gemma3": {
        "model_type": "gemma3_text",
        "vocab_size": 262144,
        "hidden_size": 1152,
        "intermediate_size": 6912,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 512,
    },
}
TUNED = {"PRESET": "finetune", "DTYPE": "bfloat16"}
TUNING_COLUMNS: Columns = SHARED | {
    "model": {name: {"MODEL": name} for name in MODELS},
    "trained": {"all": {}, "lora": {"LORA_RANK": "16"}},
}
PROCESSES = {"single": 1, "ddp": 2, "fsdp": 2, "hsdp": 4}
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
TUNING = (
    "h100 llama all single none",
    "rtx4090 llama lora ddp selective",
    "a100 qwen3 all fsdp full",
    "h100 qwen3 lora hsdp none",
    "a100 gemma3 all ddp none",
    "rtx4090 gemma3 lora fsdp full",
)
COMPILED = (
    "rtx4090 gqa bfloat16 COMPILE=1",
    "a100 mha float32 fsdp COMPILE=1",
    "h100 gqa bfloat16 doc_mask ddp selective COMPILE=1",
)
CASES = (*PAIRS, *TUNING, *COMPILED)
PRESETS = ("gpt2-124m", "d16-2xh100", "d20-2xh100", "d24-2xh100", "d32-8xh100", "xlarge-8xa100")


def settings_of(words: Sequence[str]) -> dict[str, str]:
    """Return the settings of a case. Raises SettingsError for a word that is unknown."""
    given = dict(word.split("=", 1) for word in words if "=" in word)
    names = [word for word in words if "=" not in word]
    if len(names) == 1 and (ROOT / "presets" / f"{names[0]}.env").is_file():
        return {"PRESET": names[0]} | given
    settings, columns = dict(SMALL), COLUMNS
    if MODELS.keys() & set(names):
        settings, columns = dict(TUNED), TUNING_COLUMNS
    chosen = {}
    for column, values in columns.items():
        fitting = [name for name in names if name in values]
        chosen[column] = fitting[-1] if fitting else next(iter(values))
        settings |= values[chosen[column]]
    unknown = set(names) - set(chosen.values())
    if unknown:
        known = [name for values in columns.values() for name in values]
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
    config = load_preset(**({"COMPILE": "0", "SAVE_EVERY": "0"} | settings_of(words)))
    processes = int(config.cards.split("x", 1)[0])
    windows = ACCUMULATION * config.micro_batch_size * processes
    return config.replace(batch_tokens=windows * config.seq_len)
