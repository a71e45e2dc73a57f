"""Gradients of several processes: synchronized once a step, those of the whole batch, and in memory once."""

import dataclasses
import os

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.processes import run_ranks
from tests.train.test_step import as_batch, masked_batch
from train import step
from train.distributed import world as distributed
from train.distributed.parallel import (
    Sharding,
    clear_gradients,
    is_split,
    parallelize,
    unwrap,
    weights_of,
)
from train.model.loss import IGNORED
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.step import dry_run, train_step

STEPS = 3


def whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


class Gradients:
    """Where DistributedDataParallel keeps gradients, and how often it synchronizes each bucket."""

    def __init__(self, model):
        self.model = model
        self.buckets: dict[int, int] = {}  # address -> how often it was synchronized
        self.places: set[int] = set()
        model.register_comm_hook(None, self.synchronize)

    def synchronize(self, state, bucket):
        address = bucket.buffer().untyped_storage().data_ptr()
        self.buckets[address] = self.buckets.get(address, 0) + 1
        return allreduce_hook(None, bucket)

    def look(self, *_):
        weights = self.model.parameters()
        self.places |= {weight.grad.untyped_storage().data_ptr() for weight in weights}

    def check(self):
        assert set(self.buckets.values()) == {STEPS}  # and not in each micro-batch
        assert self.places == set(self.buckets)  # and nowhere beside them
        clear_gradients(self.model)
        assert not any(weight.grad.any() for weight in self.model.parameters())


def train(rank, size, c):
    """In a process of its own: train on a part of a batch whose sequences score unequal numbers of tokens."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    world = distributed.join(c)
    sharding = Sharding(c, world) if is_split(c, world) else None
    model = parallelize(build(c, world.device, sharding=sharding), c, world)
    gradients = None if sharding else Gradients(model)
    optimizer = build_optimizer(unwrap(model), c)
    tokens, targets = masked_batch(c, 8)
    share = slice(rank * 8 // size, (rank + 1) * 8 // size)
    batch = as_batch(tokens[share], targets[share], 1)
    batch = dataclasses.replace(batch, scored=int((targets != IGNORED).sum()))
    dry_run(model, optimizer, batch.micro_batches[0])
    if gradients:
        gradients.buckets.clear()
        unwrap(model).register_forward_pre_hook(gradients.look)

    reference = build(c, world.device)
    logits = reference(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED)
    loss.backward()
    norm = torch.cat([weight.grad.flatten() for weight in reference.parameters()]).norm()

    def compare():
        for name, weight in weights_of(model).items():
            expected = reference.get_parameter(name).grad
            torch.testing.assert_close(whole(weight.grad), expected, rtol=1e-4, atol=1e-6)

    update = optimizer.step
    optimizer.step = compare
    step.peak_memory_gib = lambda _: 8.0 - rank  # the first rank's is the largest
    for _ in range(STEPS):
        # Only the first may ask to save.
        numbers = train_step(model, optimizer, batch, 0.0, world, requests={"save", "data"})
        assert numbers.loss == pytest.approx(loss.item(), rel=1e-5)
        assert numbers.grad_norm == pytest.approx(norm.item(), rel=1e-4)
        assert (numbers.mem_gib, set(numbers.requests)) == (8.0, {"save", "data"})
    if gradients:
        gradients.check()
    optimizer.step = update
    set_rate(optimizer, 1e-2, c)
    for _ in range(STEPS):
        requests = {"stop"} if world.rank == size - 1 else set()
        numbers = train_step(model, optimizer, batch, 1.0, world, requests=requests)
        assert set(numbers.requests) == {"stop"}
    for weight in weights_of(model).values():
        copies = distributed.all_gather_object(whole(weight).detach())
        assert all(torch.equal(copy, copies[0]) for copy in copies)
    distributed.broadcast_object(None)
    os._exit(0)  # a process group that FSDP2 uses cannot be left in order


@pytest.mark.parametrize(
    ("size", "how"),
    [
        (2, {"parallel": "ddp"}),
        pytest.param(4, {"parallel": "fsdp"}, marks=pytest.mark.slow),
        pytest.param(4, {"parallel": "hsdp", "shard_ranks": 2}, marks=pytest.mark.slow),
        pytest.param(2, {"parallel": "fsdp", "grad_sync": "micro-batch"}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_gradients_are_those_of_the_whole_batch_and_ranks_stay_equal(
    tiny, free_port, monkeypatch, size, how
):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    run_ranks(train, (size, dataclasses.replace(tiny, device="cpu", **how)), size)
