"""finetune/tuning_job.py: processes that have read different things are refused, by the name of what differs."""

import pytest
import torch

from finetune import tuning_job
from train.data.manifest import DataError
from train.distributed.world import World

MINE = [
    ("MODEL", "m", "weights or another config.json", "a" * 16),
    ("MODEL", "m", "tokenizer or chat template", "b" * 16),
    ("DATA", "d", "rows", "c" * 16),
    ("EVAL_DATA", "", "rows", "d" * 16),
]


def world(hosts: tuple[str, ...]) -> World:
    return World(0, 0, 0, len(hosts), torch.device("cpu"), "CPU", hosts[0], 2, hosts)


@pytest.mark.parametrize(
    ("which", "words"),
    [
        (
            0,
            r"MODEL=m: rank 2 on b \(node 1\) has other weights .* rank 0 on a \(hashes other and a{12}\); copy what MODEL "
            r"names .*MODEL=OWNER/NAME@COMMIT$",
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
    other = [(*one[:3], "other") if i == which else one for i, one in enumerate(MINE)]
    monkeypatch.setattr(tuning_job, "all_gather_object", lambda mine: [mine, mine, other, mine])
    with pytest.raises(DataError, match=words):
        tuning_job.refuse_others(MINE, here)
    monkeypatch.setattr(tuning_job, "all_gather_object", lambda mine: [mine] * 4)
    tuning_job.refuse_others(MINE, here)
