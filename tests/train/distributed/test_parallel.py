"""Gradients of two processes: synchronized once a step, those of the whole batch, and in memory once."""

import dataclasses
import os

import torch
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from tests.processes import run_ranks
from tests.train.test_step import as_batch, masked_batch
from train.distributed import world as distributed
from train.distributed.parallel import bare, clear_gradients, parallelize
from train.model.loss import IGNORED
from train.model.model import build
from train.optim import build_optimizer
from train.step import rehearse, train_step

STEPS, MICRO_BATCHES = 3, 4


def train_with_ddp(rank, c):
    """In a process of its own: look at gradients before each forward pass, and where they are synchronized."""
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
    torch.set_num_threads(1)
    world = distributed.join(c)
    model = parallelize(build(c, world.device), c, world)
    buckets = {}  # address -> how often it was synchronized

    def synchronize(state, bucket):
        address = bucket.buffer().untyped_storage().data_ptr()
        buckets[address] = buckets.get(address, 0) + 1
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, synchronize)
    optimizer = build_optimizer(bare(model), c)
    tokens, targets = masked_batch(c, 8)
    share = slice(4 * rank, 4 * rank + 4)
    batch = as_batch(tokens[share], targets[share], 1)
    batch = dataclasses.replace(batch, scored=int((targets != IGNORED).sum()))
    assert len(batch.micro_batches) == MICRO_BATCHES
    rehearse(model, optimizer, batch.micro_batches[0])
    buckets.clear()

    reference = build(c, world.device)
    logits = reference(tokens).flatten(0, 1)
    F.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED).backward()

    def compare():
        for weight, expected in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(weight.grad, expected.grad, rtol=1e-4, atol=1e-6)

    places = set()
    bare(model).register_forward_pre_hook(
        lambda *_: places.update(w.grad.untyped_storage().data_ptr() for w in model.parameters())
    )
    optimizer.step = compare
    for _ in range(STEPS):
        train_step(model, optimizer, batch, 0.0, world)
    assert set(buckets.values()) == {STEPS}  # and not in each micro-batch
    assert places == set(buckets)  # and nowhere beside them
    clear_gradients(model)
    assert not any(weight.grad.any() for weight in model.parameters())
    os._exit(0)


def test_gradients_are_synchronized_once_a_step_and_exist_once(tiny, free_port, monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free_port))
    run_ranks(train_with_ddp, (dataclasses.replace(tiny, device="cpu"),), 2)
