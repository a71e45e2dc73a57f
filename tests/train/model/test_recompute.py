"""Activation checkpointing: the same gradients from less memory, and what is computed twice."""

import collections
import dataclasses

import pytest
import torch

from train.model.model import build

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
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with Counting() as counting:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            loss, _ = model(tokens, tokens)
        loss.backward()
    for weight in model.parameters():
        kept.pop(weight.untyped_storage().data_ptr(), None)
    return [weight.grad for weight in model.parameters()], counting.calls, sum(kept.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("how", "times"), [("selective", 1), ("full", 2)])
def test_gradients_are_the_same_and_what_is_cheap_is_computed_again(tiny, dtype, how, times):
    expected, calls, size = gradients(dataclasses.replace(tiny, dtype=dtype))
    c = dataclasses.replace(tiny, activation_checkpointing=how, dtype=dtype)
    found, calls_again, size_kept = gradients(c)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    assert size_kept < 0.3 * size
    assert calls_again["aten.silu"] == 2 * calls["aten.silu"] > 0
    flash = "aten._scaled_dot_product_flash_attention_for_cpu"
    assert calls_again[flash] == times * calls[flash] == times * tiny.n_layer

    def products(calls):
        return sum(calls[f"aten.{name}"] for name in ("mm", "addmm", "bmm"))

    if how == "full":
        assert products(calls_again) > products(calls)
    else:
        assert products(calls_again) == products(calls)


def test_nothing_is_kept_or_computed_again_without_gradients(tiny):
    c = dataclasses.replace(tiny, activation_checkpointing="full")
    model = build(c, CPU)
    with torch.no_grad(), Counting() as counting:
        model(torch.zeros(1, c.seq_len, dtype=torch.int64))
    assert counting.calls["aten.silu"] == c.n_layer
