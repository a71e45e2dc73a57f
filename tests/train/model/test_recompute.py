"""Activation checkpointing: the same gradients from less memory, and what is computed twice."""

import collections
import dataclasses

import pytest
import torch

from train.model.model import Transformer, build

CPU = torch.device("cpu")


class Counting(torch.utils._python_dispatch.TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self):
        super().__init__()
        self.calls: collections.Counter[str] = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[str(func.overloadpacket)] += 1
        return func(*args, **(kwargs or {}))


def gradients(c):
    """(gradients, operations of forward and backward, bytes that autograd keeps in between)"""
    model = build(c, CPU)
    tokens = torch.randint(c.vocab_size, (4, c.seq_len), generator=torch.Generator().manual_seed(0))
    own = {w.untyped_storage().data_ptr() for w in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Counting() as counting:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss, _ = model(tokens, tokens)
        loss.backward()
    return (
        {name: w.grad for name, w in model.named_parameters()},
        counting.calls,
        sum(kept.values()),
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_gradients_are_the_same_and_what_is_cheap_is_computed_anew(tiny, dtype):
    found = {
        how: gradients(dataclasses.replace(tiny, activation_checkpointing=how, dtype=dtype))
        for how in ("none", "selective", "full")
    }
    none, calls, bytes_kept = found["none"]
    for how in ("selective", "full"):
        for name, grad in found[how][0].items():
            assert torch.equal(grad, none[name]), (how, name)
        assert found[how][1]["aten.silu"] == 2 * calls["aten.silu"] > 0
        assert found[how][2] < 0.3 * bytes_kept
    products = {
        how: sum(calls[f"aten.{name}"] for name in ("mm", "addmm", "bmm"))
        for how, (_, calls, _) in found.items()
    }
    flash = {
        how: calls["aten._scaled_dot_product_flash_attention_for_cpu"]
        for how, (_, calls, _) in found.items()
    }
    assert products["selective"] == products["none"] < products["full"]
    assert flash["selective"] == flash["none"] == tiny.n_layer and flash["full"] == 2 * tiny.n_layer


def test_nothing_is_kept_or_computed_anew_without_gradients(tiny):
    c = dataclasses.replace(tiny, activation_checkpointing="full")
    model: Transformer = build(c, CPU)
    with torch.no_grad(), Counting() as counting:
        model(torch.zeros(1, c.seq_len, dtype=torch.int64))
    assert counting.calls["aten.silu"] == c.n_layer
