"""train/diloco/outer_step.py and what a site hands over, compared with the formulas worked out here."""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("torchft")
from plan.fragments import fragment_shares
from tests.train.diloco.alone import Alone, Blocks, Mean, train
from train.diloco.outer_step import OuterOptimizer, divide
from train.model.model import build

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layers", "count", "tied"), [(6, 1, True), (6, 4, True), (5, 2, False), (4, 4, False)]
)
def test_fragments_hold_each_weight_once_and_are_those_that_are_planned(tiny, layers, count, tied):
    config = dataclasses.replace(tiny, n_layer=layers, tie_embeddings=tied)
    sizes = {name: w.numel() for name, w in build(config, CPU).named_parameters()}
    fragments = divide(sizes, count)
    assert sorted(name for names in fragments for name in names) == sorted(sizes)
    shares = [sum(sizes[name] for name in names) / sum(sizes.values()) for names in fragments]
    # the last norm is counted elsewhere
    assert shares == pytest.approx(fragment_shares(config, count), abs=2e-3)


@pytest.mark.parametrize("delay", [0, 1])
def test_the_outer_step_is_nesterovs_with_the_mean_change_of_the_sites(tiny, delay):
    """Two sites, of which the other sends numbers; with a delay this one goes on meanwhile. One sync fails."""
    outer = {"outer_learning_rate": 0.5, "outer_momentum": 0.8}
    sync = {"sync_every": 8, "sync_fragments": 2, "sync_delay": delay}
    model = Blocks(2)
    optimizer = OuterOptimizer(model, dataclasses.replace(tiny, **outer | sync))
    assert optimizer.fragments == [["layers.0.weight", "embed_tokens"], ["layers.1.weight"]]
    own = model.embed_tokens.detach()
    other = model.get_parameter("layers.1.weight").detach().clone()
    common, momentum = 1.0, 0.0
    for mine, theirs, fails in ((0.2, 0.4, False), (0.3, torch.nan, True), (-0.1, 0.3, False)):
        own.fill_(common - mine)
        manager: Any = Mean(2, [torch.zeros(1, 2), torch.full((3,), theirs)])
        manager.failing = [fails]
        optimizer.send(0, manager)
        own.sub_(0.5 * delay)
        assert optimizer.receive(manager) is not fails
        expected = common
        if not fails:
            mean = (mine + theirs) / 2
            momentum = 0.8 * momentum + mean
            before = common - mine - 0.5 * delay
            common -= 0.5 * (mean + 0.8 * momentum)
            expected = (common + before) / 2 if delay else common
        assert own.tolist() == pytest.approx([expected] * 3)
        assert optimizer.weights["embed_tokens"].tolist() == pytest.approx([common] * 3)
        assert optimizer.momentum["embed_tokens"].tolist() == pytest.approx([momentum] * 3)
    assert torch.equal(model.get_parameter("layers.1.weight"), other)


def test_one_site_that_takes_the_mean_keeps_its_weights_to_the_bit(tiny):
    """Computed, global - 1.0 x (global - own) would differ from own by rounding."""
    config = dataclasses.replace(tiny, outer_learning_rate=1.0, outer_momentum=0.0, sync_every=8)
    model = build(tiny, CPU)
    optimizer = OuterOptimizer(model, config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1e-3).add_(1e-6)
    own = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    before = optimizer.weights
    rounded = [before[name] - (before[name] - own[name]) for name in own]
    assert not all(map(torch.equal, rounded, own.values()))
    manager: Any = Mean(1)
    optimizer.send(0, manager)
    assert optimizer.receive(manager)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, own[name]) and torch.equal(optimizer.weights[name], own[name])


def test_one_site_makes_nothing_global_that_it_has_trained_since_it_sent(tiny):
    """With a delay it takes the mean of what it sent, and keeps half of its steps since."""
    outer = {"outer_learning_rate": 1.0, "outer_momentum": 0.0}
    config = dataclasses.replace(tiny, sync_every=8, sync_delay=1, **outer)
    model = Blocks(1)
    optimizer = OuterOptimizer(model, config)
    own = model.embed_tokens.detach()
    own.fill_(0.75)
    manager: Any = Mean(1)
    optimizer.send(0, manager)
    own.fill_(0.25)
    assert optimizer.receive(manager)
    assert optimizer.weights["embed_tokens"].tolist() == [0.75] * 3
    assert own.tolist() == [0.5] * 3


def step_by_sgd(model, tokens):
    logits = model(tokens[:, :-1]).flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten())
    weights = list(model.parameters())
    with torch.no_grad():
        for weight, gradient in zip(weights, torch.autograd.grad(loss, weights), strict=True):
            weight -= 0.3 * gradient


def test_four_sites_that_average_each_step_of_sgd_train_as_ddp_does(tiny):
    """Up to rounding: the mean of what SGD does with four gradients is what it does with their mean."""
    config = dataclasses.replace(tiny, outer_learning_rate=1.0, outer_momentum=0.0, sync_every=1)
    ddp, *models = (build(tiny, CPU) for _ in range(5))
    initial = ddp.embed_tokens.weight.detach().clone()
    sites = [OuterOptimizer(model, config) for model in models]
    for _ in range(8):
        tokens = torch.randint(512, (4, 2, 33))
        step_by_sgd(ddp, tokens.flatten(0, 1))
        changes = []
        for site, part in zip(sites, tokens, strict=True):
            step_by_sgd(site.model, part)
            changes.append([common - own for _, own, common in site.parts(site.fragments[0])])
        for rank, site in enumerate(sites):
            others = changes[:rank] + changes[rank + 1 :]
            manager: Any = Mean(4, [sum(each) for each in zip(*others, strict=True)])
            site.send(0, manager)
            assert site.receive(manager)
    for name, weight in ddp.named_parameters():
        for model in models:
            torch.testing.assert_close(model.get_parameter(name), weight, rtol=1e-5, atol=1e-6)
    assert (ddp.embed_tokens.weight - initial).abs().max() > 0.01


def test_a_site_that_is_behind_takes_all_of_another(tiny):
    """Weights, moments, global weights, momentum and the count. Each is a copy."""
    config = dataclasses.replace(tiny, sync_every=8, sync_fragments=2)
    ahead, behind = (Alone(config, build(config, CPU)) for _ in range(2))
    for seed in range(3):
        train(ahead.model, seed)
        ahead.sync(4 * (seed + 1))
    for weight in ahead.model.parameters():
        weight.grad = torch.randn(weight.shape)
    ahead.optimizer.step()
    ahead.step, ahead.base = 11, 3
    given = ahead.hand_over()
    expected = {name: tensor.clone() for name, tensor in ahead.states().items()}
    train(ahead.model, 5)  # what was handed over is a copy
    behind.take_over(given)
    states = behind.states()
    assert set(states) == set(expected)
    assert {name.split(".")[0] for name in states} == {"model", "optimizer", "outer"}
    assert all(torch.equal(states[name], expected[name]) for name in expected)
    behind.heal_from(ahead)
    assert behind.sync(2) and (behind.healed_at, behind.step, behind.number) == (11, 11, 1)
    assert (behind.syncs, behind.last_sync_step) == (4, 3 + 4 * 4)
    assert behind.digests == behind.digest_all()


@pytest.mark.parametrize(
    ("step", "facts", "syncs", "last_sync_step"),
    [
        (21, {"exchanges": 4, "turn": 8, "base": -9, "finished": 20}, 4, 23),
        (21, {"exchanges": 4, "turn": 5, "base": -9, "finished": 20}, 4, 11),  # another interval
        (21, {}, 1, 16),  # without sites
        (0, {}, 0, 0),
    ],
)
def test_a_site_counts_on_from_a_checkpoint(tiny, step, facts, syncs, last_sync_step):
    config = dataclasses.replace(tiny, sync_every=8)
    site = Alone(config, step=step, facts=facts)
    assert (site.syncs, site.last_sync_step) == (syncs, last_sync_step)
    assert site.finished == facts.get("finished", -1)


def test_a_checkpoint_brings_the_global_weights_and_one_without_sites_makes_its_own_global(tiny):
    config = dataclasses.replace(tiny, sync_every=8)
    saved = Alone(config)
    train(saved.model, 0)
    saved.sync(8)
    train(saved.model, 1)
    again = Alone(config, saved.model, 9, saved.outer.tensors(), saved.facts())
    for name, tensor in saved.outer.tensors().items():
        assert torch.equal(tensor, again.outer.tensors()[name])
    assert again.progress() == saved.progress() and again.facts() == saved.facts()
    alone = Alone(config, saved.model, 9)
    assert all(torch.equal(w, alone.outer.weights[n]) for n, w in saved.model.named_parameters())
    assert alone.progress()["weights"] != saved.progress()["weights"]
