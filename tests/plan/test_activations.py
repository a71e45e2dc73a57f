"""plan/activations.py against what autograd keeps of a block of the model."""

import dataclasses
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.attention import SDPBackend, sdpa_kernel

from plan.activations import kept_bytes
from settings.config import Config
from tests.plan.live import Live, as_on_gpu, step_of
from train.model import attention, compilation
from train.model.model import Transformer

CPU = torch.device("cpu")
B = 3

CASES: list[dict[str, Any]] = [
    {},
    {"dtype": "bfloat16"},
    {"dtype": "bfloat16", "seq_len": 1024},
    {"qk_norm": True, "n_kv_head": 2},
    {"qk_norm": True, "n_kv_head": 2, "dtype": "bfloat16"},
    {"doc_mask": True},
    {"doc_mask": True, "dtype": "bfloat16"},
    {"attention": "math"},
    {"activation_checkpointing": "full"},
    {"activation_checkpointing": "selective"},
    {"activation_checkpointing": "selective", "dtype": "bfloat16", "n_kv_head": 1},
]


def of_block(**changes: Any) -> Config:
    shape = {
        "vocab_size": 512,
        "n_layer": 1,
        "n_embd": 128,
        "n_head": 4,
        "mlp_dim": 448,
        "seq_len": 64,
        "compile": "0",
        "micro_batch_size": B,
    }
    c = dataclasses.replace(Config(), **(shape | changes))
    return dataclasses.replace(c, batch_tokens=B * c.seq_len).derived()


def planned(c: Config, on_cpu: bool) -> float:
    step = step_of(c, on_cpu)
    (block,) = step.model.shape.blocks
    return kept_bytes(step, block)


def kept(c: Config) -> tuple[int, int]:
    """(bytes that autograd keeps between forward and backward of a block, those of casts of weights)"""
    net = Transformer(c, attention.choose(c, CPU))
    layer: Any = net.layers[0]
    if c.compile == "1":
        compilation.compile_model(net)
    x = torch.randn(B, c.seq_len, c.n_embd).to(getattr(torch, c.dtype)).requires_grad_()
    rotary = net.rotary[:, : c.seq_len].to(x.dtype)
    bounds = torch.tensor([0, 40] + [B * c.seq_len] * 63, dtype=torch.int32)
    mask = attention.document_mask(bounds, B, c.seq_len) if c.doc_mask else None
    standing = {
        t.untyped_storage()._cdata
        for t in (*net.parameters(), rotary, *([mask] if c.doc_mask else []))
    }
    shapes = {tuple(w.shape) for w in layer.parameters()} | {
        tuple(w.shape[::-1]) for w in layer.parameters()
    }
    found: dict[int, tuple[int, bool]] = {}
    alive = []

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in standing:
            found[storage._cdata] = (
                storage.nbytes(),
                tuple(t.shape) in shapes and t.dtype != torch.float32,
            )
            alive.append(storage)  # or the next one could be taken for it
        return t

    if c.activation_checkpointing == "selective" and c.compile != "1":
        # it keeps results beside autograd: what lives on, and the input
        with Live([*net.parameters(), rotary]) as live:
            before = live.now
            y = layer(x, rotary, None, mask)
        return live.now - before - y.untyped_storage().nbytes() + x.untyped_storage().nbytes(), 0
    with saved_tensors_hooks(keep, lambda t: t):
        layer(x, rotary, None, mask)
    return sum(size for size, cast in found.values() if not cast), sum(
        size for size, cast in found.values() if cast
    )


@pytest.mark.parametrize("changes", CASES, ids=str)
def test_a_block_keeps_what_is_computed(changes: dict[str, Any]) -> None:
    c = of_block(**changes)
    measured, casts = kept(c)
    mask = (
        2 * c.seq_len**2
    )  # that selective checkpointing keeps beside scores: of T x T only, and not computed
    assert planned(c, True) == pytest.approx(measured, abs=mask if c.dtype == "bfloat16" else 0)
    hidden = 2 * (
        c.n_embd * (2 * c.n_embd + 2 * (c.n_kv_head or 1) * c.head_dim)
        + 3 * c.n_embd * (c.mlp_dim or 0)
    )
    assert casts == (
        hidden if c.dtype == "bfloat16" and c.activation_checkpointing == "none" else 0
    )


@pytest.mark.parametrize("changes", CASES[:5], ids=str)
def test_a_block_on_a_gpu_keeps_what_is_computed(
    changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the norms as they go there. Of torch's kernels for GPUs none shares keys in float32; others keep the same."""
    as_on_gpu(monkeypatch)
    c = dataclasses.replace(of_block(**changes), attention="sdpa")
    backend = SDPBackend.FLASH_ATTENTION
    if c.dtype == "float32" and c.n_kv_head != c.n_head:
        backend = SDPBackend.MATH
    with FakeTensorMode(allow_non_fake_inputs=True), sdpa_kernel(backend):
        measured, _ = kept(c)
    assert planned(c, False) == measured


@pytest.mark.slow
@pytest.mark.parametrize("changes", [*CASES[:5], *CASES[8:10]], ids=str)
def test_a_compiled_block_keeps_what_is_computed(changes: dict[str, Any]) -> None:
    c = dataclasses.replace(of_block(**changes), compile="1")
    measured, casts = kept(c)
    few = (
        0.01 if c.activation_checkpointing == "full" else 0
    )  # some hundred bytes that are not computed
    assert planned(c, True) == pytest.approx(measured, rel=few, abs=0)
    assert casts == 0  # weights are cast anew
