"""Training against an independent loop: transformers' Llama, torch's AdamW, a schedule and clipping of its own."""

import dataclasses
import math

import pytest
import torch

from tests.train.making import ALONE
from tests.train.model.test_model import hugging_face
from train.data.batch import Batch
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.schedule import lr_at
from train.step import train_step


def batches(c, steps):
    g = torch.Generator().manual_seed(5)
    shape = (c.batch_windows, c.seq_len + 1)
    return [torch.randint(c.vocab_size, shape, generator=g) % 97 for _ in range(steps)]


def train(c, model, data, rate=lr_at):
    """The losses of our step."""
    optimizer = build_optimizer(model, c)
    losses = []
    for step, windows in enumerate(data, 1):
        set_rate(optimizer, rate(step, c), c)
        micro = [(part[:, :-1], part[:, 1:]) for part in windows.split(c.micro_batch(1))]
        batch = Batch(micro, c.batch_tokens, range(len(windows)))
        losses.append(train_step(model, optimizer, batch, c.grad_clip, ALONE).loss)
    return losses, optimizer


def theirs(c, data):
    model = hugging_face(build(c, ALONE.device), c).train()
    norms = [w for name, w in model.named_parameters() if "norm" in name]
    rest = [w for name, w in model.named_parameters() if "norm" not in name]
    optimizer = torch.optim.AdamW(
        [{"params": rest, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}],
        lr=1.0,
        betas=(0.9, 0.95),
        eps=1e-8,
        fused=False,
        foreach=False,
    )
    losses = []
    for step, windows in enumerate(data, 1):
        tokens = step * 512
        rate = 3e-3 * tokens / 2048
        if tokens >= 2048:
            rate = 3e-4 + 2.7e-3 * (1 + math.cos(math.pi * (tokens - 2048) / (30_720 - 2048))) / 2
        for group in optimizer.param_groups:
            group["lr"] = rate
        inputs, targets = windows[:, :-1], windows[:, 1:].contiguous()
        loss = model(input_ids=inputs, labels=inputs, shift_labels=targets).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    "changes", [{}, {"qk_norm": True, "tie_embeddings": False}], ids=["llama", "qwen3"]
)
def test_fifty_steps_follow_an_independent_loop(tiny, changes):
    c = dataclasses.replace(tiny, grad_clip=0.5, train_tokens=30_720, **changes)
    data = batches(c, 50)
    mine, _ = train(c, build(c, ALONE.device), data)
    assert mine[-1] < mine[0] - 0.5  # it learned, so that rate, decay and clipping had their effect
    assert mine == pytest.approx(theirs(c, data), abs=1e-4)
