"""What is declared of each setting: its class on resume, its range, its sentence and its example."""

import re

import pytest

from settings import ROOT
from settings.cli import write_env_example
from settings.config import SETTINGS, Config
from settings.declare import FREE, FROZEN, TOKENS, TRACKED, format_value

NUMBERS = {name for name, declared in SETTINGS.items() if declared.kind in (int, float)}

# Stated a second time, by hand: what a resumed run may not change, and what it records.
FROZEN_NAMES = """
    SEED VOCAB_SIZE N_LAYER N_HEAD N_KV_HEAD N_EMBD MLP_DIM QK_NORM TIE_EMBEDDINGS ROPE_THETA
    SEQ_LEN BATCH_TOKENS OPTIMIZER DATA_MIX TOKENIZER DOC_MASK INIT_FROM MODEL DATA
    LORA_RANK LORA_ALPHA LORA_TARGETS STOP_TOKEN
"""
TRACKED_NAMES = """
    DEVICE NPROC DTYPE COMPILE ATTENTION ACTIVATION_CHECKPOINTING MICRO_BATCH_SIZE
    TRAIN_TOKENS LEARNING_RATE MIN_LEARNING_RATE WARMUP_TOKENS LR_SCHEDULE DECAY_TOKENS ADAM_BETA1
    ADAM_BETA2 WEIGHT_DECAY GRAD_CLIP EVAL_TOKENS PARALLEL SHARD_RANKS SYNC SITES SYNC_EVERY
    SYNC_FRAGMENTS SYNC_DELAY OUTER_LEARNING_RATE OUTER_MOMENTUM SYNC_DTYPE GRAD_SYNC NODES
    SPIKE_SIGMAS EVAL_DATA EPOCHS LORA_DROPOUT
"""
# The numbers for which zero has a meaning.
ZERO_NAMES = """
    SEED MIN_LEARNING_RATE WARMUP_TOKENS ADAM_BETA1 ADAM_BETA2 WEIGHT_DECAY GRAD_CLIP EVAL_EVERY EVAL_TOKENS
    SAMPLE_TEMPERATURE SAMPLE_TOKENS SAMPLE_TOP_K KEEP_EVERY NODE_RANK MAX_RESTARTS SPIKE_SIGMAS
    WAN_RTT_MS OUTER_MOMENTUM SYNC_DELAY CORE_EVERY EVAL_EXAMPLES LORA_RANK LORA_DROPOUT SAVE_EVERY
"""


def is_accepted(name, text):
    try:
        SETTINGS[name].parse(text)
    except ValueError:
        return False
    return True


def test_the_classes_on_resume_are_as_listed():
    for resume, names in ((FROZEN, FROZEN_NAMES), (TRACKED, TRACKED_NAMES)):
        assert {name for name in SETTINGS if SETTINGS[name].resume == resume} == set(names.split())
    assert all(declared.resume in (FROZEN, TRACKED, FREE) for declared in SETTINGS.values())


def test_there_is_room_for_the_settings_to_come():
    assert len(SETTINGS) <= 156


@pytest.mark.parametrize("name", SETTINGS)
def test_each_setting_has_a_sentence_and_an_example_that_is_accepted(name):
    declared = SETTINGS[name]
    assert re.fullmatch(r"[A-Z].*\.", declared.help)
    assert is_accepted(name, declared.example)
    if declared.default not in (None, ""):
        assert declared.parse(format_value(declared.default)) == declared.default


def list_bad_values(name):
    """Return texts that break the rule of a setting."""
    declared = SETTINGS[name]
    if declared.choices:
        return ["no-such-choice", declared.choices[0].upper()]
    if declared.kind is bool:
        return ["yes", "true", "2", "-1", "01", "on"]
    if declared.kind is str:
        return (
            ["a\nb", "a\tb", "a\x1b[31mb", "a\x85b", "\udcff"] if name != "PROMPT" else ["\udcff"]
        )
    bad = ["ten", "nan", "inf", "-inf", "-1", "0x10", "1,5", "1 000", "--1", ".", " 1", "1 "]
    bad += ["1_0", "\u0663", "2K", "1e99", format_value(declared.maximum * 2 + 1)]
    if declared.kind is int:
        bad += ["1e3", "1.0", "9" * 5000, str(declared.maximum + 1), str(int(declared.minimum) - 1)]
    if declared.unit != TOKENS:
        bad += ["2M", "1B"]
    return bad


@pytest.mark.fault(24)
@pytest.mark.parametrize("name", SETTINGS)
def test_a_bad_value_is_refused_with_the_rule_and_an_example(name):
    for text in list_bad_values(name):
        with pytest.raises(ValueError, match=r"^Must be ") as error:
            SETTINGS[name].parse(text)
        assert str(error.value).startswith(f"Must be {SETTINGS[name].rule()}.")
        assert len(SETTINGS[name].rule()) > len("0 or")


@pytest.mark.fault(24)
def test_zero_is_accepted_where_it_means_something():
    assert {name for name in NUMBERS if is_accepted(name, "0")} == set(ZERO_NAMES.split())


@pytest.mark.parametrize(
    ("text", "tokens"),
    [("2.5M", 2_500_000), ("10B", 10**10), ("1.5B", 1_500_000_000), ("0.000001M", 1), ("7", 7)],
)
def test_counts_of_tokens_take_millions_and_billions(text, tokens):
    assert SETTINGS["TRAIN_TOKENS"].parse(text) == tokens


@pytest.mark.parametrize(
    "text", ["0.0000001M", "2K", "M", "1.5", "1m", "1.M.", "-1M", "1 M", "1e3M"]
)
def test_a_fraction_of_a_token_is_refused(text):
    assert not is_accepted("TRAIN_TOKENS", text)


@pytest.mark.parametrize("value", [1e-8, 3e-4, 0.1, 1234567.0, 12345678.9, 2 / 3, True, 7, "x"])
def test_a_value_is_written_so_that_it_is_read_again(value):
    text = format_value(value)
    assert text == "1" if value is True else type(value)(text) == value


def test_a_tenth_of_a_learning_rate_reads_as_people_write_it():
    assert format_value(Config(learning_rate=3e-3).derived().min_learning_rate) == "0.0003"


def test_env_example_is_what_the_declarations_give():
    text = (ROOT / ".env.example").read_text()
    assert text == write_env_example() + "\n"
    for name, declared in SETTINGS.items():
        is_there = f"\n#{name}=" in text and f"# {declared.help}\n" in text
        assert is_there != (name in ("ENV_FILE", "NAME")), name
