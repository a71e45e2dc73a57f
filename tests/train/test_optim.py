"""Muon against its formula in numpy, AdamW beside it, and who updates what."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.train.making import ALONE
from train.model.model import build
from train.optim import Muon, build_optimizer, set_rate


@pytest.fixture
def muon(tiny):
    return dataclasses.replace(tiny, optimizer="muon", tie_embeddings=False).derived()


def orthogonal(matrix):
    """What five Newton-Schulz iterations make of a matrix: its singular vectors, each value put through the quintic."""
    u, s, vt = np.linalg.svd(matrix / np.linalg.norm(matrix), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ vt


def by_hand(weight, gradients, rates, decay):
    """A matrix after Muon's updates."""
    weight, momentum = weight.copy(), np.zeros_like(weight)
    for grad, rate in zip(gradients, rates, strict=True):
        momentum = 0.95 * momentum + 0.05 * grad
        weight *= 1 - rate * decay
        update = orthogonal(0.05 * grad + 0.95 * momentum)
        weight -= rate * 0.2 * np.sqrt(max(weight.shape)) * update
    return weight


def three_steps(c):
    """Name -> (weight before, the gradients, weight after), by random gradients and rates of 0.01, 0.02 and 0.03."""
    model = build(c, ALONE.device)
    optimizer, g = build_optimizer(model, c), torch.Generator().manual_seed(4)
    weights = dict(model.named_parameters())
    before = {name: weight.detach().double().numpy().copy() for name, weight in weights.items()}
    grads = {name: [] for name in weights}
    for step in range(1, 4):
        set_rate(optimizer, 0.01 * step, c)
        for name, weight in weights.items():
            weight.grad = torch.randn(weight.shape, generator=g)
            grads[name].append(weight.grad.double().numpy())
        optimizer.step()
    return {name: (before[name], grads[name], weights[name].detach().numpy()) for name in weights}


class Products(TorchDispatchMode):
    """Notes the types of the matrices that are multiplied."""

    def __init__(self):
        super().__init__()
        self.types = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.types |= {each.dtype for each in args}
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("is_fast", "multiplied"), [(True, torch.bfloat16), (False, torch.float32)]
)
def test_muon_multiplies_in_float32_where_bfloat16_is_slow(muon, monkeypatch, is_fast, multiplied):
    plain = three_steps(muon)
    monkeypatch.setattr("train.optim.has_fast_bfloat16", lambda device: is_fast)
    with Products() as products:
        weights = three_steps(muon)
    assert products.types == {multiplied}
    for name, (before, _, after) in weights.items():
        moved = np.abs(plain[name][2] - before).mean()
        assert np.abs(after - plain[name][2]).mean() < 5e-3 * moved, (
            name
        )  # one bfloat16 in hundreds


@pytest.mark.parametrize("is_fast", [True, False])
def test_muon_follows_its_formula_on_hidden_matrices_and_adamw_updates_the_rest(
    muon, monkeypatch, is_fast
):
    monkeypatch.setattr("train.optim.has_fast_bfloat16", lambda device: is_fast)
    found = three_steps(muon)
    plain = three_steps(dataclasses.replace(muon, optimizer="adamw"))
    hidden = {name for name, (w, _, _) in found.items() if w.ndim == 2 and "layers." in name}
    assert len(hidden) == 7 * muon.n_layer
    for name, (before, grads, after) in found.items():
        assert np.array_equal(after, plain[name][2]) == (name not in hidden), name
        if name in hidden:
            expected = by_hand(before, grads, (0.01, 0.02, 0.03), muon.weight_decay)
            moved = np.abs(expected - before).mean()
            assert np.abs(after - expected).mean() < 0.02 * moved  # its products are in bfloat16


def test_the_settings_reach_the_optimizers_at_each_step(muon):
    model = build(muon, ALONE.device)
    optimizer = build_optimizer(model, muon)
    changed = dataclasses.replace(muon, adam_beta1=0.8, adam_beta2=0.9, weight_decay=0.3)
    for part in optimizer.parts:  # as if a checkpoint had brought others
        for group in part.param_groups:
            group |= {"momentum": 0.5} if isinstance(part, Muon) else {"eps": 1e-3}
    set_rate(optimizer, 0.5, changed)
    covered = []
    for part in optimizer.parts:
        for group in part.param_groups:
            covered += group["params"]
            expected = {"lr": 0.5, "weight_decay": 0.3 if group["params"][0].ndim == 2 else 0.0}
            if isinstance(part, Muon):
                expected |= {"momentum": 0.95, "nesterov": True}
            else:
                expected |= {"betas": (0.8, 0.9), "eps": 1e-8}
            assert expected.items() <= group.items()
    assert len(covered) == len(list(model.parameters())) == len({id(w) for w in covered})
