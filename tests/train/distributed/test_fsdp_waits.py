"""train/distributed/fsdp_waits.py, and how often FSDP2 gathers weights in a step."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from train.distributed import fsdp_waits
from train.distributed.fsdp_waits import without_waits
from train.distributed.parallel import Sharding, grad_sync
from train.distributed.world import World
from train.model.model import build

LAYERS = 3


@pytest.mark.parametrize(
    ("seconds", "waited_s", "ranks", "worked"),
    [
        ([1.0, 1.5], [0.0, 0.0], 1, [1.0, 1.5]),  # no collectives: DDP
        ([2.0, 2.0], [0.25, 1.25], 2, [2.0, 1.0]),  # the first is slow; a transfer takes 0.25
        ([2.0, 2.0], [0.25, 0.25], 2, [2.0, 2.0]),  # all are
        # two copies, the second behind a slow network
        ([2.0, 2.0, 3.0, 3.0], [0.5, 1.5, 2.0, 2.5], 2, [2.0, 1.0, 3.0, 2.5]),
    ],
)
def test_the_shortest_time_in_collectives_is_the_transfer(seconds, waited_s, ranks, worked):
    assert without_waits(seconds, waited_s, ranks) == pytest.approx(worked)


@pytest.fixture
def four_ranks():
    """A process group of four in which nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def sharded(tiny, **settings):
    c = dataclasses.replace(tiny, tie_embeddings=False, n_layer=LAYERS, **settings).derived()
    world = World(0, 0, 0, 4, torch.device("cpu"), "CPU", "here")
    return build(c, world.device, sharding=Sharding(c, world))


@pytest.mark.parametrize(
    ("settings", "micro_batches", "gathered"),
    [
        ({"parallel": "fsdp"}, 4, LAYERS + 1),
        ({"parallel": "hsdp", "shard_ranks": 2}, 4, LAYERS + 1),
        # each block in forward and again in backward, the rest once
        ({"parallel": "fsdp"}, 1, 2 * LAYERS + 1),
        ({"parallel": "fsdp", "grad_sync": "micro-batch"}, 4, 4 * (2 * LAYERS + 1)),
    ],
)
def test_weights_are_gathered_once_a_step(
    tiny, four_ranks, monkeypatch, settings, micro_batches, gathered
):
    calls = []
    gather = dist.all_gather_into_tensor
    monkeypatch.setattr(
        fsdp_waits.dist, "all_gather_into_tensor", lambda *a: calls.append(a) or gather(*a)
    )
    model = sharded(tiny, **settings)
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    for _ in range(2):  # the second step begins as the first
        calls.clear()
        for i in range(micro_batches):
            with grad_sync(model, enabled=i == micro_batches - 1):
                model(tokens, tokens)[0].backward()
        assert len(calls) == gathered
        calls.clear()
        with torch.no_grad():  # an evaluation holds one block at a time
            model(tokens, tokens)
        assert len(calls) == LAYERS + 1
        model.reshard()


def test_what_a_rank_waits_for_is_no_work_of_its_own(tiny, four_ranks, monkeypatch):
    """By a clock of our own, in which each collective takes a second."""
    now = [0.0]
    monkeypatch.setattr(fsdp_waits.time, "perf_counter", lambda: now[0])
    gather = dist.all_gather_into_tensor

    def slow(*arguments):
        now[0] += 1.0
        return gather(*arguments)

    monkeypatch.setattr(fsdp_waits.dist, "all_gather_into_tensor", slow)
    model = sharded(tiny, parallel="fsdp")
    tokens = torch.zeros(2, 8, dtype=torch.int64)
    model(tokens, tokens)
    assert (model.waits.seconds, model.waits.ranks) == (LAYERS + 1.0, 4)
    model.waits.start()
    assert model.waits.seconds == 0
