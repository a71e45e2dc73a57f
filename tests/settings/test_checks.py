"""Rules between settings: what breaks each, and that the values in its sentence keep it."""

import re
from typing import Any

import pytest

from settings import Config
from settings.checks import CHECKS, check_batch, check_sharding, find_conflicts
from settings.config import build_config
from settings.resolve import resolve

DILOCO = {"SYNC": "diloco", "NODES": 4, "SITES": 4, "PARALLEL": "fsdp"}
BROKEN: list[tuple[str, dict[str, Any], str]] = [
    ("N_EMBD", {"N_EMBD": 100, "N_HEAD": 3}, "multiple of 2 x N_HEAD = 6"),
    ("N_EMBD", {"N_EMBD": 6, "N_HEAD": 2}, "multiple of 2 x N_HEAD = 4"),
    ("N_KV_HEAD", {"N_KV_HEAD": 3}, "divide N_HEAD=4"),
    ("SEQ_LEN", {"SEQ_LEN": 8193}, "at most BATCH_TOKENS=8192"),
    ("BATCH_TOKENS", {"BATCH_TOKENS": 1000}, "SEQ_LEN x processes (256 x 1) = 256"),
    ("BATCH_TOKENS", {"BATCH_TOKENS": 6144}, "MICRO_BATCH_SIZE x SEQ_LEN x processes"),
    ("BATCH_TOKENS", {"NPROC": 3, "BATCH_TOKENS": 1024}, "(256 x 3) = 768"),
    ("MIN_LEARNING_RATE", {"MIN_LEARNING_RATE": 0.1}, "at most LEARNING_RATE=0.001"),
    ("TRAIN_TOKENS", {"TRAIN_TOKENS": 8191}, "at least one step: TRAIN_TOKENS=8192"),
    ("WARMUP_TOKENS", {"WARMUP_TOKENS": 10_000_000}, "less than TRAIN_TOKENS=10000000"),
    (
        "DECAY_TOKENS",
        {"LR_SCHEDULE": "wsd", "DECAY_TOKENS": 9_000_001, "WARMUP_TOKENS": 1_000_000},
        "at most TRAIN_TOKENS - WARMUP_TOKENS = 9000000",
    ),
    ("ATTENTION", {"ATTENTION": "flash-attn"}, "DTYPE=bfloat16"),
    ("ATTENTION", {"ATTENTION": "fa3", "DTYPE": "bfloat16", "DEVICE": "cpu"}, "ATTENTION=auto"),
    ("DATA_MIX", {"DATA_MIX": "a:1,b:2,a:3"}, "twice"),
    ("TOKENIZER", {"INIT_FROM": "models/x/"}, "TOKENIZER=models/x/tokenizer.json"),
    ("SITES", {"SYNC": "diloco"}, "at least two sites"),
    (
        "NODES",
        DILOCO | {"NODES": 6, "BATCH_TOKENS": 6144, "MICRO_BATCH_SIZE": 4},
        "multiple of SITES = 4",
    ),
    ("MIN_SITES", DILOCO | {"MIN_SITES": 5}, "at most SITES=4"),
    ("SYNC_FRAGMENTS", DILOCO | {"SYNC_FRAGMENTS": 5}, "at most N_LAYER=4"),
    ("SYNC_EVERY", DILOCO | {"SYNC_EVERY": 31, "SYNC_FRAGMENTS": 2}, "SYNC_FRAGMENTS = 2"),
    ("SYNC_DELAY", DILOCO | {"SYNC_FRAGMENTS": 2, "SYNC_DELAY": 15}, "less than"),
    ("PARALLEL", DILOCO | {"PARALLEL": "ddp", "NPROC": 2}, "PARALLEL=fsdp"),
    ("OPTIMIZER", {"OPTIMIZER": "muon", "PARALLEL": "fsdp"}, "OPTIMIZER=adamw"),
    ("NODE_RANK", {"NODES": 2, "NODE_RANK": 2, "MASTER_ADDR": "a"}, "The last is NODE_RANK=1"),
    ("MASTER_ADDR", {"NODES": 2}, "MASTER_ADDR=10.0.0.5 (docs/two-nodes.md)"),
    ("MASTER_ADDR", DILOCO | {"SITES": 2}, "MASTER_ADDR=10.0.0.5"),
    ("KEEP_BEST", {"KEEP_BEST": True, "SAVE_EVERY": 0}, "SAVE_EVERY=1000"),
    ("EVAL_TOKENS", {"EVAL_TOKENS": 255}, "at least 256, or 0"),
    ("EVAL_TOKENS", {"EVAL_TOKENS": 0, "KEEP_BEST": True}, "EVAL_TOKENS=65536"),
]
KEPT: list[dict[str, Any]] = [
    {},
    DILOCO,
    {"NODES": 2, "NODE_RANK": 1, "MASTER_ADDR": "a"},
    {"OPTIMIZER": "muon", "NPROC": 2},
    {"KEEP_BEST": True},
    {"EVAL_TOKENS": 0},
    DILOCO | {"SYNC_EVERY": 32, "SYNC_FRAGMENTS": 4, "SYNC_DELAY": 7},
    {"LR_SCHEDULE": "wsd", "DECAY_TOKENS": 9_000_000, "WARMUP_TOKENS": 1_000_000},
    {"BATCH_TOKENS": 256},
    {"ATTENTION": "fa3", "DTYPE": "bfloat16"},
    {"WARMUP_TOKENS": 9_999_999, "TRAIN_TOKENS": 10_000_000},
]


def conflicts_of(settings):
    return list(find_conflicts(build_config(settings), "check-env", {}, ()))


@pytest.mark.fault(25)
@pytest.mark.parametrize(("name", "settings", "words"), BROKEN)
def test_a_broken_rule_is_explained_with_values_that_keep_it(name, settings, words):
    ((found, sentence),) = conflicts_of(settings)
    assert found == name and words in sentence
    proposed = re.findall(rf"\b({name})=(\S+?)[.,]?(?: |$)", sentence)[-1:]
    for proposal, text in proposed:
        value = int(text) if text.isdigit() else text
        assert name not in dict(conflicts_of(settings | {proposal: value}))


@pytest.mark.parametrize("settings", KEPT)
def test_a_kept_rule_says_nothing(settings):
    assert conflicts_of(settings) == []


def test_every_rule_is_broken_above():
    broken = set()
    for _, settings, _ in BROKEN:
        config = build_config(settings)
        broken |= {check for check in CHECKS if check(config) is not None}
    assert broken == CHECKS.keys()


def test_the_number_of_processes_may_be_known_better():
    config = Config().derived()
    assert check_batch(config, 32) is None
    assert "BATCH_TOKENS=8448" in str(check_batch(config, 33))
    assert [config.micro_batch(processes) for processes in (16, 32, 33)] == [2, 1, 1]
    diloco = build_config({"SYNC": "diloco", "NODES": 2})
    assert check_sharding(diloco, 1) is None and check_sharding(diloco, 2) is not None


def test_a_rule_whose_setting_is_invalid_is_not_checked():
    (problem,) = resolve({"N_HEAD": "x", "N_EMBD": "101", "ENV_FILE": ""}).problems
    assert problem.startswith("N_HEAD=x")
