"""train/diloco/outer_step.py and what a site hands over, compared with the formulas worked out here."""

import dataclasses
from typing import Any

import pytest
import torch

pytest.importorskip("torchft")
from plan.network import outer
from tests.train.diloco.alone import Alone, Blocks, Mean
from train.diloco.outer_step import Fragment, divide
from train.model.model import build

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("layers", "count", "tied"), [(6, 1, True), (6, 4, True), (5, 2, False), (4, 4, False)]
)
def test_fragments_hold_each_weight_once_and_are_those_that_are_planned(tiny, layers, count, tied):
    config = dataclasses.replace(tiny, n_layer=layers, tie_embeddings=tied)
    weights = dict(build(config, CPU).named_parameters())
    found = divide({name: w.numel() for name, w in weights.items()}, count)
    assert sorted(name for names in found for name in names) == sorted(weights)
    total = sum(w.numel() for w in weights.values())
    shares = [sum(weights[name].numel() for name in names) / total for names in found]
    # the last norm is counted elsewhere
    assert shares == pytest.approx(outer.fragments(config, count), abs=2e-3)


def train(model, seed):
    """Change all weights, as inner steps do."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=source))


@pytest.mark.parametrize("delay", [0, 1])
def test_the_outer_step_is_nesterovs_with_the_mean_change_of_the_sites(tiny, delay):
    """Two sites, of which the other sends numbers; with a delay this one goes on meanwhile."""
    config = dataclasses.replace(
        tiny, outer_learning_rate=0.7, outer_momentum=0.9, sync_every=8, sync_delay=delay
    )
    model = Blocks(2)
    names = ["layers.1.weight", "embed_tokens"]
    fragment = Fragment(model, names, config)
    common = {name: model.get_parameter(name).detach().double() for name in names}
    momentum = {name: torch.zeros_like(common[name]) for name in names}
    left = model.get_parameter("layers.0.weight")
    for turn in range(3):
        train(model, seed=turn)
        theirs = [torch.randn(common[name].shape) for name in names]
        mean = {}
        for name, change in zip(names, theirs, strict=True):
            own = model.get_parameter(name).detach().double()
            mean[name] = (common[name] - own + change.double()) / 2
        manager: Any = Mean(2, theirs)
        fragment.send(manager)
        if delay:
            train(model, seed=100 + turn)
        before = {name: model.get_parameter(name).detach().double() for name in names}
        other = left.detach().clone()
        assert fragment.receive(manager)
        for name in names:
            momentum[name] = 0.9 * momentum[name] + mean[name]
            common[name] = common[name] - 0.7 * (mean[name] + 0.9 * momentum[name])
            expected = (common[name] + before[name]) / 2 if delay else common[name]
            torch.testing.assert_close(model.get_parameter(name).detach().double(), expected)
            torch.testing.assert_close(fragment.common[name].double(), common[name])
            torch.testing.assert_close(fragment.momentum[name].double(), momentum[name])
        assert torch.equal(left, other)  # it belongs to another fragment


def test_an_exchange_that_fails_leaves_the_common_weights(tiny):
    config = dataclasses.replace(tiny, sync_every=8)
    model = Blocks(1)
    fragment = Fragment(model, ["embed_tokens"], config)
    train(model, seed=0)
    manager: Any = Mean(2, [torch.full((3,), torch.nan)])
    manager.failing = [True]
    fragment.send(manager)
    assert not fragment.receive(manager)
    assert model.embed_tokens.tolist() == fragment.common["embed_tokens"].tolist() == [1, 1, 1]
    assert fragment.momentum["embed_tokens"].tolist() == [0, 0, 0]


def test_one_site_that_takes_the_mean_keeps_its_weights_to_the_bit(tiny):
    """Computed, common - 1.0 x (common - own) would differ from own by rounding."""
    config = dataclasses.replace(tiny, outer_learning_rate=1.0, outer_momentum=0.0, sync_every=8)
    model = build(tiny, CPU)
    fragment = Fragment(model, [name for name, _ in model.named_parameters()], config)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1e-3).add_(1e-6)
    own = {name: weight.detach().clone() for name, weight in model.named_parameters()}
    rounded = [fragment.common[name] - (fragment.common[name] - own[name]) for name in own]
    assert not all(map(torch.equal, rounded, own.values()))
    manager: Any = Mean(1)
    fragment.send(manager)
    assert fragment.receive(manager)
    for name, weight in model.named_parameters():
        assert torch.equal(weight, own[name]) and torch.equal(fragment.common[name], own[name])


def test_a_site_that_is_behind_takes_all_of_another(tiny):
    """Weights, moments, common weights and momentum, and copies of them."""
    config = dataclasses.replace(tiny, sync_every=8, sync_fragments=2)
    ahead, behind = (Alone(config, build(config, CPU)) for _ in range(2))
    for seed in range(2):
        train(ahead.model, seed)
        ahead.exchange(4 * (seed + 1))
    for weight in ahead.model.parameters():
        weight.grad = torch.randn(weight.shape)
    ahead.optimizer.step()
    ahead.step, ahead.base = 11, 3
    given = ahead.hand_over()
    expected = {name: tensor.clone() for name, tensor in ahead.states().items()}
    train(ahead.model, 5)  # what was handed over is a copy
    behind.take_over(given)
    found = behind.states()
    assert set(found) == set(expected)
    assert {name.split(".")[0] for name in found} == {"model", "optimizer", "outer"}
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert (behind.healed_at, behind.base) == (11, 3)


def test_a_quorum_that_brings_other_weights_moves_the_count(tiny):
    config = dataclasses.replace(tiny, sync_every=8, sync_fragments=2)
    ahead, behind = Alone(config), Alone(config)
    ahead.exchange(4)
    ahead.step = 4

    def heal():
        behind.take_over(ahead.hand_over())
        behind.manager.count = 1

    behind.manager.start_quorum = heal
    assert behind.exchange(2) and behind.missed == (2, 4) and behind.number == 1
    assert (behind.exchanges, behind.common_step) == (2, 8)


def test_weights_that_are_declared_common_bring_no_momentum(tiny):
    """A run may go back to a checkpoint that has none of either."""
    config = dataclasses.replace(tiny, sync_every=8)
    model = Blocks(1)
    fragment = Fragment(model, ["embed_tokens"], config)
    fragment.momentum["embed_tokens"].fill_(3.0)
    train(model, seed=0)
    fragment.declare_common()
    assert fragment.common["embed_tokens"].tolist() == model.embed_tokens.tolist()
    assert fragment.momentum["embed_tokens"].tolist() == [0, 0, 0]
