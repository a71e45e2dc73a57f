"""Which settings are named where memory does not suffice."""

import dataclasses

import pytest

from settings import load_preset
from settings.config import Config
from tests.train.test_assemble import world
from train.faults.memory_advice import loading_advice, memory_advice

TRAINED = dataclasses.replace(
    Config(), micro_batch_size=12, seq_len=256, batch_tokens=24 * 256
).derived()
TUNED = load_preset(
    PRESET="finetune",
    MODEL="models/some",
    SEQ_LEN="1024",
    MICRO_BATCH_SIZE="1",
    PARALLEL="fsdp",
    ACTIVATION_CHECKPOINTING="full",
)
LEAST = {"micro_batch_size": 1, "parallel": "fsdp", "activation_checkpointing": "full"}
MORE = {"micro_batch_size": 4, "parallel": "ddp", "activation_checkpointing": "none"}


@pytest.mark.fault(34)
@pytest.mark.parametrize(
    ("config", "changes", "named", "unnamed"),
    [
        (
            TRAINED,
            {},
            "MICRO_BATCH_SIZE=6 ACTIVATION_CHECKPOINTING=selective PARALLEL=fsdp",
            "LORA",
        ),
        (TRAINED, LEAST | {"activation_checkpointing": "selective"}, "CHECKPOINTING=full", "BATCH"),
        (TRAINED, LEAST, "smaller", "BATCH"),
        (
            TUNED,
            {},
            "LORA_RANK=16 DTYPE=bfloat16 SEQ_LEN=512",
            "MICRO_BATCH_SIZE=0 ACTIVATION PARALLEL",
        ),
        (
            TUNED,
            {"lora_rank": 128, "dtype": "bfloat16"},
            "LORA_RANK=64 SEQ_LEN=512",
            "DTYPE LORA_RANK=16",
        ),
        (TUNED, {"lora_rank": 8}, "DTYPE=bfloat16", "LORA_RANK"),
        (
            TUNED,
            MORE | {"lora_rank": 8},
            "MICRO_BATCH_SIZE=2 ACTIVATION_CHECKPOINTING=selective PARALLEL=fsdp DTYPE=bfloat16",
            "SEQ_LEN",
        ),
    ],
)
def test_where_memory_is_short_the_settings_to_change_are_named(config, changes, named, unnamed):
    config = dataclasses.replace(config, **changes)
    problem, _, ways = memory_advice(config, world(1)).partition("; set ")
    size = config.micro_batch_size
    assert f"MICRO_BATCH_SIZE={size}: a step of {size} sequences of {config.seq_len} " in problem
    assert all(words in ways for words in named.split())
    assert not any(words in ways for words in unnamed.split())


@pytest.mark.parametrize(
    ("changes", "ways"),
    [
        (
            {"parallel": "ddp"},
            "PARALLEL=fsdp, on more processes, or LORA_RANK=16 with DTYPE=bfloat16",
        ),
        ({"lora_rank": 8, "dtype": "bfloat16"}, "more processes (NPROC, NODES)"),
    ],
)
def test_weights_that_do_not_fit_need_other_settings_than_a_step_does(changes, ways):
    text = loading_advice(dataclasses.replace(TUNED, **changes), world(1), 3 * 2**30)
    assert "its weights, 3.0 GiB in the files" in text and text.endswith(f"; set {ways}")
