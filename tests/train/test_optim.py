"""Muon against its formula in numpy, AdamW beside it, and who updates what."""

import dataclasses

import numpy as np
import pytest
import torch

from train.distributed.world import World
from train.model.model import build
from train.optim import Muon, build_optimizer, set_rate

ALONE = World(0, 0, 0, 1, torch.device("cpu"), "CPU", "here")


@pytest.fixture
def muon(tiny):
    return dataclasses.replace(tiny, optimizer="muon", tie_embeddings=False).derived()


def orthogonal(matrix):
    """What five Newton-Schulz iterations make of a matrix: its singular vectors, each value put through the quintic."""
    u, s, vt = np.linalg.svd(matrix / np.linalg.norm(matrix), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return u @ np.diag(s) @ vt


def test_muon_follows_its_formula_on_hidden_matrices(muon):
    model = build(muon, ALONE.device)
    optimizer = build_optimizer(model, muon)
    g = torch.Generator().manual_seed(4)
    hidden = {name: w for name, w in model.named_parameters() if "layers." in name and w.ndim == 2}
    assert len(hidden) == 7 * muon.n_layer
    expected = {name: w.detach().double().numpy().copy() for name, w in hidden.items()}
    momentum = {name: np.zeros_like(value) for name, value in expected.items()}
    for step in range(1, 4):
        rate = 0.01 * step
        set_rate(optimizer, rate, muon)
        for w in model.parameters():
            w.grad = torch.randn(w.shape, generator=g)
        for name, w in hidden.items():
            grad = w.grad.double().numpy()
            momentum[name] = 0.95 * momentum[name] + 0.05 * grad
            update = orthogonal(0.05 * grad + 0.95 * momentum[name])
            expected[name] *= 1 - rate * muon.weight_decay
            expected[name] -= rate * 0.2 * np.sqrt(max(w.shape)) * update
        optimizer.step()
    for name, w in hidden.items():
        moved = np.abs(
            expected[name] - build(muon, ALONE.device).get_parameter(name).detach().numpy()
        ).mean()
        assert (
            np.abs(w.detach().numpy() - expected[name]).mean() < 0.02 * moved
        )  # its products are in bfloat16


def test_the_rest_is_updated_as_by_adamw_alone(muon):
    plain = dataclasses.replace(muon, optimizer="adamw")
    models = [build(c, ALONE.device) for c in (muon, plain)]
    for model, c in zip(models, (muon, plain), strict=True):
        optimizer, g = build_optimizer(model, c), torch.Generator().manual_seed(4)
        set_rate(optimizer, 0.01, c)
        for _ in range(3):
            for w in model.parameters():
                w.grad = torch.randn(w.shape, generator=g)
            optimizer.step()
    one, other = (dict(model.named_parameters()) for model in models)
    same = {name for name in one if torch.equal(one[name], other[name])}
    assert same == {name for name, w in one.items() if w.ndim == 1 or "layers." not in name}


def test_the_settings_reach_the_optimizers_at_each_step(muon):
    model = build(muon, ALONE.device)
    optimizer = build_optimizer(model, muon)
    changed = dataclasses.replace(muon, adam_beta1=0.8, adam_beta2=0.9, weight_decay=0.3)
    for part in optimizer.parts:  # as if a checkpoint had brought others
        for group in part.param_groups:
            group |= {"momentum": 0.5} if isinstance(part, Muon) else {"eps": 1e-3}
    set_rate(optimizer, 0.5, changed)
    for part in optimizer.parts:
        for group in part.param_groups:
            assert group["lr"] == 0.5
            assert group["weight_decay"] == (0.3 if group["params"][0].ndim == 2 else 0.0)
            if isinstance(part, Muon):
                assert group["momentum"] == 0.95 and group["nesterov"]
            else:
                assert group["betas"] == (0.8, 0.9) and group["eps"] == 1e-8
    covered = [
        w for part in optimizer.parts for group in part.param_groups for w in group["params"]
    ]
    assert len(covered) == len(list(model.parameters())) == len({id(w) for w in covered})
