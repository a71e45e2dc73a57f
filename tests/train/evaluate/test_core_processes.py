"""CORE on two processes, with copies of the weights and with parts of them: the counts of one process, and one
sum over the processes for all of them."""

import dataclasses
import json

import pytest
import torch

from tests.core_bundle import TASKS, make_folder
from tests.finetune.models import as_rank
from tests.processes import run_ranks
from tests.train.making import ALONE
from train.data import prepare
from train.distributed.parallel import Sharding, is_split, parallelize
from train.distributed.world import leave
from train.evaluate import scoring
from train.evaluate.core.bundle import Bundle
from train.evaluate.core.score import Core
from train.model.model import build


def model_of(c, world):
    model = build(c, world.device, sharding=Sharding(c, world) if is_split(c, world) else None)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return model


def counts(core, model):
    return [list(dataclasses.astuple(score)[1:]) for score in core(model).scores.values()]


def rank(number, c, folder):
    """Score whole, interrupted on rank 1, and with a damaged file on rank 1."""
    world = as_rank(number, 2)
    model = parallelize(model_of(c, world), c, world)
    core = Core(c, Bundle(folder), prepare.vocabulary(c), world)
    sums, summed = [], scoring.sum_over_ranks

    def watched(values):
        sums.append(len(values))
        return summed(values)

    scoring.sum_over_ranks = watched
    found = [counts(core, model), sums.copy()]
    found.append(core(model, interrupted=lambda: world.rank == 1))
    if world.rank == 1:
        core.kept.clear()
        core.bundle.digests["eval_data/" + TASKS["piqa"][0]] = "another"
    try:
        core(model)
    except scoring.ScoringFailed as error:
        found.append(str(error))
    (folder / f"rank_{world.rank}.json").write_text(json.dumps(found))
    del model, core  # before the process group goes
    leave()


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_count_what_one_does(
    tiny,
    data,
    tmp_path,
    free_port,
    monkeypatch,
    how,
):
    monkeypatch.setenv("TEST_PORT", str(free_port))
    where = {"data_dir": data["DATA_DIR"], "tokenizer": data["TOKENIZER"], "device": "cpu"}
    shares = {"micro_batch_size": 5, "eval_examples": 11}  # 6 and 5 questions: 2 batches and 1
    c = dataclasses.replace(tiny, parallel=how, seq_len=64, **shares, **where)
    make_folder(tmp_path)
    alone = Core(c, Bundle(tmp_path), prepare.vocabulary(c), ALONE)
    expected = counts(alone, model_of(c, ALONE))
    right, asked, *_ = map(sum, zip(*expected, strict=True))
    assert 0 < right < asked
    run_ranks(rank, (c, tmp_path), 2)
    for number in range(2):
        found, sums, interrupted, why = json.loads((tmp_path / f"rank_{number}.json").read_text())
        assert found == expected
        assert interrupted is None
        assert (len(sums) > 1) == (how == "fsdp")  # which agrees before each batch
        assert why.startswith("rank 1: CoreError: ")
        assert "piqa.jsonl has changed since it was opened" in why
