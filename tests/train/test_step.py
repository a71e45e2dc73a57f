"""One optimizer step: what is summed, what is read, and what happens when it is refused."""

import copy
import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.train.making import ALONE
from train.data.batch import Batch
from train.model.loss import IGNORED
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.step import clock_of, not_finite, train_step


def masked_batch(c, sequences):
    """Sequences of which each scores another number of tokens, the last none."""
    g = torch.Generator().manual_seed(2)
    shape = (sequences, c.seq_len)
    tokens, targets = (torch.randint(c.vocab_size, shape, generator=g) for _ in range(2))
    for row in range(sequences):
        targets[row, : row * c.seq_len // (sequences - 1)] = IGNORED
    return tokens, targets


def as_batch(tokens, targets, micro):
    pairs = list(zip(tokens.split(micro), targets.split(micro), strict=True))
    return Batch(pairs, int((targets != IGNORED).sum()), range(100, 100 + len(tokens)))


def trainer(c):
    model = build(c, ALONE.device)
    return model, build_optimizer(model, c), *masked_batch(c, 8)


def step(model, optimizer, tokens, targets, micro=4, clip=1.0, **options):
    return train_step(model, optimizer, as_batch(tokens, targets, micro), clip, ALONE, **options)


def gradients(model):
    return {name: weight.grad.clone() for name, weight in model.named_parameters()}


def length(gradients):
    return torch.cat([grad.flatten() for grad in gradients.values()]).norm().item()


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_accumulated_gradient_is_that_of_the_mean_over_scored_tokens(tiny, micro):
    model, optimizer, tokens, targets = trainer(tiny)
    summed = {}
    optimizer.step = lambda: summed.update(gradients(model))
    numbers = step(model, optimizer, tokens, targets, micro, clip=0.0)
    reference = build(tiny, ALONE.device)
    mean = F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    mean.backward()
    assert numbers.loss == pytest.approx(mean.item(), rel=1e-6)
    torch.testing.assert_close(summed, gradients(reference), rtol=1e-4, atol=1e-7)
    assert numbers.grad_norm == pytest.approx(length(gradients(reference)), rel=1e-5)


def test_clipping_scales_a_gradient_that_is_too_long_and_no_other(tiny):
    model, optimizer, *batch = trainer(tiny)
    lengths = []
    optimizer.step = lambda: lengths.append(length(gradients(model)))
    assert step(model, optimizer, *batch, clip=0.01).grad_norm > 0.02
    assert lengths[0] == pytest.approx(0.01, rel=1e-3)
    for limit in (1000.0, 0.0):
        norm = step(model, optimizer, *batch, clip=limit).grad_norm
        assert lengths.pop() == pytest.approx(norm, rel=1e-5)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_loss_and_gradient_must_be_finite(bad):
    assert not_finite(2.0, 3.0) is None
    assert not_finite(bad, 3.0) == not_finite(2.0, bad) == "nonfinite"


@pytest.mark.parametrize("reason", ["nonfinite", "loss"])
def test_a_step_that_is_refused_touches_neither_weights_nor_moments(tiny, reason):
    model, optimizer, tokens, targets = trainer(tiny)
    set_rate(optimizer, 1e-2, tiny)
    step(model, optimizer, tokens, targets)
    judged, options = [], {}
    if reason == "nonfinite":
        with torch.no_grad():
            model.embed_tokens.weight[tokens[6, -1]] = float("nan")
    else:
        options["check_step"] = lambda *values: judged.append(values) or reason

    def state():
        weights = dict(model.named_parameters())
        moments = {name: optimizer.moments(weight) for name, weight in weights.items()}
        assert all(set(kept) == {"step", "exp_avg", "exp_avg_sq"} for kept in moments.values())
        return copy.deepcopy([weights, moments])

    before = state()
    numbers = step(model, optimizer, tokens, targets, **options)
    assert numbers.skipped == reason
    torch.testing.assert_close(state(), before, rtol=0, atol=0, equal_nan=True)
    assert all(weight.grad is None for weight in model.parameters())
    if reason == "loss":
        assert judged == [(numbers.loss, numbers.grad_norm)]
        assert numbers.samples == tuple(range(100, 108))  # no loss tells which samples it was


def test_the_samples_named_are_those_of_the_micro_batch_with_the_nan(tiny):
    c = dataclasses.replace(tiny, tie_embeddings=False)
    model, optimizer, *_ = trainer(c)
    tokens = torch.arange(8 * c.seq_len).view(8, -1) % c.vocab_size
    with torch.no_grad():
        model.embed_tokens.weight[tokens[5, 3]] = float("inf")
    assert step(model, optimizer, tokens, torch.ones_like(tokens), 2).samples == (104, 105)


def test_the_clock_tells_what_a_rank_did_before_it_waits(tiny, monkeypatch):
    """By a clock of our own, in which only what the model does takes time."""
    now = [0.0]
    monkeypatch.setattr("train.step.time", SimpleNamespace(perf_counter=lambda: now[0]))
    model, optimizer, *batch = trainer(tiny)
    clock, own = clock_of(model, ALONE.device), []
    for seconds in (0.0, 0.1, 0.2):

        def work(*_, seconds=seconds):
            now[0] += seconds

        hook = model.register_forward_pre_hook(work)
        clock.start()
        own += step(model, optimizer, *batch, clock=clock).compute_s
        hook.remove()
    assert own == pytest.approx([0.0, 0.2, 0.4])  # two micro-batches


def test_what_a_rank_asks_for_is_read_back(tiny):
    model, optimizer, *batch = trainer(tiny)
    for requests in (set(), {"stop"}, {"save"}, {"data"}, {"stop", "data"}):
        numbers = step(model, optimizer, *batch, requests=requests)
        assert numbers.requests == requests and 0.05 < numbers.mem_gib < 8
