"""One optimizer step: what is summed, what is read, and what happens when it is not finite."""

import copy
import dataclasses
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from train.data.batch import Batch
from train.distributed.world import World
from train.model.loss import IGNORED
from train.model.model import build
from train.optim import build_optimizer, set_rate
from train.step import Clock, train_step

ALONE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")


def masked_batch(c, sequences):
    """Sequences of which each scores another number of tokens, the last none."""
    g = torch.Generator().manual_seed(2)
    tokens = torch.randint(c.vocab_size, (sequences, c.seq_len), generator=g)
    targets = torch.randint(c.vocab_size, (sequences, c.seq_len), generator=g)
    for row in range(sequences):
        targets[row, : row * c.seq_len // (sequences - 1)] = IGNORED
    return tokens, targets


def as_batch(tokens, targets, micro):
    pairs = list(zip(tokens.split(micro), targets.split(micro), strict=True))
    return Batch(pairs, int((targets != IGNORED).sum()), range(100, 100 + len(tokens)))


@pytest.mark.parametrize("micro", [1, 3, 8])
def test_accumulated_gradient_is_that_of_the_mean_over_scored_tokens(tiny, micro):
    c = dataclasses.replace(tiny, grad_clip=0.0)
    tokens, targets = masked_batch(c, 8)
    model, reference = build(c, ALONE.device), build(c, ALONE.device)
    seen = {}
    optimizer = build_optimizer(model, c)
    optimizer.step = lambda: seen.update({n: w.grad.clone() for n, w in model.named_parameters()})
    numbers = train_step(model, optimizer, as_batch(tokens, targets, micro), c.grad_clip, ALONE)

    mean = F.cross_entropy(reference(tokens).flatten(0, 1), targets.flatten(), ignore_index=IGNORED)
    mean.backward()
    assert numbers.loss == pytest.approx(mean.item(), rel=1e-6)
    for name, weight in reference.named_parameters():
        torch.testing.assert_close(seen[name], weight.grad, rtol=1e-4, atol=1e-7)
    norm = torch.cat([w.grad.flatten() for w in reference.parameters()]).norm().item()
    assert numbers.grad_norm == pytest.approx(norm, rel=1e-5)


def test_clipping_scales_the_whole_gradient_to_the_limit(tiny):
    tokens, targets = masked_batch(tiny, 8)
    model = build(tiny, ALONE.device)
    optimizer = build_optimizer(model, tiny)
    lengths = []
    optimizer.step = lambda: lengths.append(
        torch.cat([w.grad.flatten() for w in model.parameters()]).norm().item()
    )
    numbers = train_step(model, optimizer, as_batch(tokens, targets, 4), 0.01, ALONE)
    assert numbers.grad_norm > 0.02
    assert lengths[0] == pytest.approx(0.01, rel=1e-3)


def test_a_nan_stops_before_weights_and_moments_are_touched(tiny):
    tokens, targets = masked_batch(tiny, 8)
    model = build(tiny, ALONE.device)
    optimizer = build_optimizer(model, tiny)
    set_rate(optimizer, 1e-2, tiny)
    train_step(model, optimizer, as_batch(tokens, targets, 4), 1.0, ALONE)
    row = int(tokens[6, -1])
    with torch.no_grad():
        model.embed_tokens.weight[row] = float("nan")
    names = [name for name, _ in model.named_parameters()]
    weights = copy.deepcopy(model.state_dict())
    moments = {name: copy.deepcopy(optimizer.moments(model.get_parameter(name))) for name in names}
    assert all(set(kept) == {"step", "exp_avg", "exp_avg_sq"} for kept in moments.values())
    numbers = train_step(model, optimizer, as_batch(tokens, targets, 4), 1.0, ALONE)
    assert numbers.refused == "nonfinite"
    for name, before in weights.items():
        assert torch.equal(model.state_dict()[name].nan_to_num(7), before.nan_to_num(7)), name
    for name in names:
        for key, value in optimizer.moments(model.get_parameter(name)).items():
            assert torch.equal(value, moments[name][key]), (name, key)


def test_the_samples_named_are_those_of_the_micro_batch_with_the_nan(tiny):
    c = dataclasses.replace(tiny, tie_embeddings=False)
    tokens = torch.arange(8 * c.seq_len).view(8, -1) % c.vocab_size
    targets = torch.ones_like(tokens)
    model = build(c, ALONE.device)
    with torch.no_grad():
        model.embed_tokens.weight[tokens[5, 3]] = float("inf")
    numbers = train_step(model, build_optimizer(model, c), as_batch(tokens, targets, 2), 1.0, ALONE)
    assert numbers.samples == (104, 105)


def test_a_step_that_is_refused_changes_nothing_and_names_all_its_samples(tiny):
    model = build(tiny, ALONE.device)
    optimizer = build_optimizer(model, tiny)
    before = copy.deepcopy(model.state_dict())
    asked = []
    numbers = train_step(
        model,
        optimizer,
        as_batch(*masked_batch(tiny, 8), 4),
        1.0,
        ALONE,
        judge=lambda *values: asked.append(values) or "loss",
    )
    assert asked == [(numbers.loss, numbers.grad_norm)]
    assert numbers.refused == "loss" and numbers.samples == tuple(range(100, 108))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(weight.grad is None for weight in model.parameters())


def test_the_clock_tells_what_a_rank_did_before_it_waits(tiny, monkeypatch):
    """By a clock of our own, in which only what the model does takes time."""
    now = [0.0]
    monkeypatch.setattr("train.step.time", SimpleNamespace(perf_counter=lambda: now[0]))

    class Slow(torch.nn.Module):
        def __init__(self, model, seconds):
            super().__init__()
            self.model, self.seconds = model, seconds

        def forward(self, *inputs):
            now[0] += self.seconds
            return self.model(*inputs)

    model = build(tiny, ALONE.device)
    optimizer, clock = build_optimizer(model, tiny), Clock(ALONE.device)
    own = []
    for seconds in (0.0, 0.1, 0.2):
        clock.start()
        own += train_step(
            Slow(model, seconds),
            optimizer,
            as_batch(*masked_batch(tiny, 8), 4),
            1.0,
            ALONE,
            clock=clock,
        ).own_s
    assert own == pytest.approx([0.0, 0.2, 0.4])  # two micro-batches


def test_what_a_rank_asks_for_is_read_back(tiny):
    tokens, targets = masked_batch(tiny, 4)
    model = build(tiny, ALONE.device)
    optimizer = build_optimizer(model, tiny)
    batch = as_batch(tokens, targets, 4)
    answers = [
        train_step(model, optimizer, batch, 1.0, ALONE, requests=requests)
        for requests in [(), {"stop"}, {"save"}, {"data"}, {"stop", "data"}]
    ]
    assert [set(a.requests) for a in answers] == [
        set(),
        {"stop"},
        {"save"},
        {"data"},
        {"stop", "data"},
    ]
    assert 0.05 < answers[0].mem_gib < 8


def test_matrices_decay_and_norms_do_not(tiny):
    model = build(tiny, ALONE.device)
    optimizer = build_optimizer(model, tiny)
    set_rate(optimizer, 0.1, tiny)
    before = {n: w.detach().clone() for n, w in model.named_parameters()}
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    for name, weight in model.named_parameters():
        factor = 1.0 if "norm" in name else 1 - 0.1 * tiny.weight_decay
        torch.testing.assert_close(weight.detach(), before[name] * factor)
