"""finetune/main.py: processes that have read or chosen different things are refused, by the name of what differs."""

import contextlib
import dataclasses

import pytest
import torch

from finetune import main
from finetune.main import Hash
from settings import SettingsError, load_preset
from settings.tuning_rules import FITTED
from train.data.manifest import DataError
from train.distributed.world import World

MINE = [
    Hash("MODEL", "m", "weights or another config.json", "a" * 16),
    Hash("MODEL", "m", "tokenizer or chat template", "b" * 16),
    Hash("DATA", "d", "rows", "c" * 16),
    Hash("EVAL_DATA", "", "rows", "d" * 16),
]


def world(hosts: tuple[str, ...], rank: int = 0) -> World:
    return World(rank, 0, 0, len(hosts), torch.device("cpu"), "CPU", hosts[0], 2, hosts)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (
            0,
            r"MODEL=m: rank 2 on b \(node 1\) has other weights .* rank 0 on a \(hashes other and a{12}\)\. Copy what "
            r"MODEL names .*MODEL=OWNER/NAME@COMMIT$",
        ),
        (1, r"MODEL=m: rank 2 on b \(node 1\) has other tokenizer or chat template than"),
        (
            2,
            r"DATA=d: rank 2 on b \(node 1\) has other rows than .*DATA=OWNER/NAME:CONFIG:SPLIT@COMMIT$",
        ),
        (3, r"EVAL_DATA=: rank 2 on b"),
    ],
)
def test_what_differs_is_named(monkeypatch: pytest.MonkeyPatch, which: int, words: str) -> None:
    here = world(("a", "a", "b", "b"))
    other = list(MINE)
    other[which] = dataclasses.replace(MINE[which], digest="other")
    monkeypatch.setattr(main, "all_gather_object", lambda mine: [mine, mine, other, mine])
    with pytest.raises(DataError, match=words):
        main.refuse_differences(MINE, here)
    monkeypatch.setattr(main, "all_gather_object", lambda mine: [mine] * 4)
    main.refuse_differences(MINE, here)


def test_a_node_without_the_runs_folder_takes_what_the_first_one_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An earlier attempt chose it, which is in the run's folder on the first node only."""
    own = load_preset(PRESET="finetune")
    first = {"SEQ_LEN": 128, "BATCH_TOKENS": 256, "EPOCHS": 4, "LEARNING_RATE": 1e-5}
    here = world(("a", "b"), rank=1)
    monkeypatch.setattr(main, "broadcast_object", lambda value: (set(), first))
    config, fitted = main.agree(own, set(FITTED), here)
    assert {name: config.values()[name] for name in FITTED} == first
    assert fitted == set()
    monkeypatch.setattr(main, "broadcast_object", lambda value: ({"EPOCHS"}, first))
    assert main.agree(own, set(FITTED), here)[1] == {"EPOCHS"}


@pytest.mark.parametrize("first_fitted", [set(), {"EPOCHS"}], ids=["another value", "not given"])
def test_a_value_that_is_given_must_be_that_of_the_first_node(
    monkeypatch: pytest.MonkeyPatch, first_fitted: set[str]
) -> None:
    own = load_preset(PRESET="finetune", EPOCHS="7")
    first = {"SEQ_LEN": 1024, "BATCH_TOKENS": 32768, "EPOCHS": 7 if first_fitted else 4}
    first["LEARNING_RATE"] = own.learning_rate
    monkeypatch.setattr(main, "broadcast_object", lambda value: (first_fitted, first))
    monkeypatch.setattr(main, "raise_on_all_ranks", lambda *kinds: contextlib.nullcontext())
    with pytest.raises(SettingsError, match=r"EPOCHS=7: It is not set like this on a\. Set the"):
        main.agree(own, {"SEQ_LEN", "BATCH_TOKENS"}, world(("a", "b"), rank=1))
