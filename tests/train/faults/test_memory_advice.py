"""Which settings are named where memory does not suffice."""

import dataclasses

import pytest

from settings.config import Config
from tests.train.test_assemble import world
from train.faults.memory_advice import loading_advice, memory_advice


@pytest.mark.fault(34)
def test_where_memory_is_short_the_settings_to_change_are_named():
    c = dataclasses.replace(
        Config(), micro_batch_size=12, seq_len=256, batch_tokens=24 * 256
    ).derived()
    text = memory_advice(c, world(1))
    assert "MICRO_BATCH_SIZE=12: a step of 12 sequences of 256 tokens does not fit" in text
    assert (
        "set MICRO_BATCH_SIZE=6" in text
        and "ACTIVATION_CHECKPOINTING=selective" in text
        and "PARALLEL=fsdp" in text
    )
    assert "LORA" not in text
    c = dataclasses.replace(
        c, micro_batch_size=1, activation_checkpointing="selective", parallel="fsdp"
    )
    assert "set ACTIVATION_CHECKPOINTING=full" in memory_advice(c, world(1))
    c = dataclasses.replace(c, activation_checkpointing="full")
    assert "set a smaller model" in memory_advice(c, world(1))


TUNED = Config.of_preset(
    PRESET="finetune",
    MODEL="models/some",
    SEQ_LEN="1024",
    MICRO_BATCH_SIZE="1",
    PARALLEL="fsdp",
    ACTIVATION_CHECKPOINTING="full",
)


@pytest.mark.parametrize(
    ("changes", "named", "unnamed"),
    [
        (
            {},
            ["LORA_RANK=16 with DTYPE=bfloat16", "SEQ_LEN=512"],
            ["MICRO_BATCH_SIZE=0", "ACTIVATION", "PARALLEL"],
        ),
        (
            {"lora_rank": 128, "dtype": "bfloat16"},
            ["LORA_RANK=64", "SEQ_LEN=512"],
            ["DTYPE", "LORA_RANK=16"],
        ),
        ({"lora_rank": 8}, ["DTYPE=bfloat16"], ["LORA_RANK"]),
        (
            {
                "lora_rank": 8,
                "micro_batch_size": 4,
                "parallel": "ddp",
                "activation_checkpointing": "none",
            },
            [
                "set MICRO_BATCH_SIZE=2",
                "ACTIVATION_CHECKPOINTING=selective",
                "PARALLEL=fsdp",
                "DTYPE=bfloat16",
            ],
            ["SEQ_LEN"],
        ),
    ],
)
def test_of_a_fine_tuning_those_of_its_model_too(changes, named, unnamed):
    told = memory_advice(dataclasses.replace(TUNED, **changes), world(1)).partition("; set ")
    assert all(words in "".join(told) for words in named) and not any(
        words in told[2] for words in unnamed
    )


def test_weights_that_do_not_fit_need_other_settings_than_a_step_does():
    text = loading_advice(dataclasses.replace(TUNED, parallel="ddp"), world(1), 3 * 2**30)
    assert (
        "its weights, 3.0 GiB in the files" in text
        and "PARALLEL=fsdp" in text
        and "LORA_RANK=16" in text
    )
    assert "MICRO_BATCH_SIZE" not in text
    text = loading_advice(
        dataclasses.replace(TUNED, lora_rank=8, dtype="bfloat16"), world(1), 2**30
    )
    assert text.endswith("set more processes (NPROC, NODES)")
