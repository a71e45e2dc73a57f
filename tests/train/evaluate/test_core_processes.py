"""CORE on two processes, with copies of the weights and with parts of them: the counts of one process, and one
collective operation for all of them."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch

from settings.config import Config
from tests.core_bundle import TASKS, make_folder
from tests.processes import run_ranks
from train.data import prepare
from train.distributed import world as distributed
from train.distributed.parallel import Sharding, is_split, parallelize
from train.distributed.world import World
from train.evaluate import scoring
from train.evaluate.core.bundle import Bundle
from train.evaluate.core.score import Core
from train.model.model import build


def model_of(c: Config, world: World) -> torch.nn.Module:
    model = build(c, world.device, sharding=Sharding(c, world) if is_split(c, world) else None)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(4)
    return model


def found(c: Config, folder: Path, world: World, model: torch.nn.Module) -> dict[str, list[int]]:
    core = Core(c, Bundle(folder), prepare.vocabulary(c), world)
    return {
        label: list(dataclasses.astuple(counts)) for label, counts in (core(model) or {}).items()
    }


def rank(number: int, c: Config, folder: Path, port: int) -> None:
    os.environ.update(
        RANK=str(number),
        WORLD_SIZE="2",
        LOCAL_RANK=str(number),
        LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    world = distributed.join(c, trains=False)
    score_with_a_fault(c, folder, world)  # its model goes before the process group does
    distributed.leave()


def score_with_a_fault(c: Config, folder: Path, world: World) -> None:
    """Score whole, interrupted on rank 1, and with a damaged file on rank 1."""
    model = parallelize(model_of(c, world), c, world)
    sums, summed = 0, scoring.sum_over_ranks

    def counted(values: torch.Tensor) -> torch.Tensor:
        nonlocal sums
        sums += 1
        return summed(values)

    scoring.sum_over_ranks = counted
    counts = found(c, folder, world, model)
    once = sums
    interrupted = Core(c, Bundle(folder), prepare.vocabulary(c), world)(
        model, interrupted=lambda: world.rank == 1
    )
    damaged = Core(c, Bundle(folder), prepare.vocabulary(c), world)
    if world.rank == 1:  # of this rank only
        damaged.bundle.digests["eval_data/" + TASKS["piqa"][0]] = "another"
    try:
        said = str(damaged(model))
    except scoring.ScoringFailed as error:
        said = str(error)
    (folder / f"rank_{world.rank}.json").write_text(json.dumps([counts, once, interrupted, said]))


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_processes_count_what_one_does(
    tiny: Config, data: dict[str, str], tmp_path: Path, free_port: int, how: str
) -> None:
    c = dataclasses.replace(
        tiny,
        data_dir=data["DATA_DIR"],
        tokenizer=data["TOKENIZER"],
        parallel=how,
        seq_len=64,
        device="cpu",
        micro_batch_size=5,
    )
    make_folder(tmp_path)
    alone = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")
    expected = found(c, tmp_path, alone, model_of(c, alone))
    assert (
        0
        < sum(counts[0] for counts in expected.values())
        < sum(counts[1] for counts in expected.values())
    )
    run_ranks(rank, (c, tmp_path, free_port), 2)
    for number in range(2):
        counts, sums, interrupted, said = json.loads((tmp_path / f"rank_{number}.json").read_text())
        assert counts == expected and interrupted is None
        assert sums == 1 or how == "fsdp"  # which agrees before each batch
        assert (
            said.startswith("rank 1: CoreError: ")
            and "piqa.jsonl has changed since it was opened" in said
        )
