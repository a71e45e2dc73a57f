"""Attention against products written out, documents kept apart, and which kernel is taken or refused."""

import dataclasses
import importlib.machinery
import importlib.util
import itertools
import math
import sys
import types

import numpy as np
import pytest
import torch

from settings import SettingsError
from settings.config import Config
from train.data.batch import document_bounds
from train.model import attention
from train.model.attention import MATH, SDPA, Kernel
from train.model.model import build

CPU = torch.device("cpu")
END = 3  # the token that begins a document here
ROWS = [[END, 9, 8, END, 7, 6, 5, END], [9, 9, END, 8, END, END, 7, 7], [END, 1, 2, 4, 5, 6, 7, 8]]


def by_hand(q, k, v, tokens=None):
    """Attention, a query at a time; with tokens within their documents only."""
    B, T, H, D = q.shape
    y = torch.zeros_like(q)
    for b in range(B):
        for t in range(T):
            first = 0
            if tokens:
                first = max([i for i in range(t + 1) if tokens[b][i] == END], default=0)
            for h in range(H):
                group = h // (H // k.shape[2])
                scores = torch.stack(
                    [q[b, t, h] @ k[b, s, group] / math.sqrt(D) for s in range(first, t + 1)]
                )
                y[b, t, h] = scores.softmax(0) @ v[b, first : t + 1, group]
    return y


def bounds_of(rows):
    return torch.from_numpy(document_bounds(np.array(rows), END))


def random_qkv(heads, kv_heads):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(3, 8, n, 8, generator=g) for n in (heads, kv_heads, kv_heads)]


@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("documents", [None, ROWS])
@pytest.mark.parametrize("kernel", [SDPA, MATH], ids=lambda kernel: kernel.name)
def test_attention_is_what_its_formula_says(heads, kv_heads, documents, kernel):
    qkv = random_qkv(heads, kv_heads)
    mask = kernel.apart(bounds_of(ROWS), 3, 8) if documents else None
    y = kernel.attend(*qkv, mask)
    torch.testing.assert_close(y, by_hand(*qkv, documents))
    half = kernel.attend(*(x.bfloat16() for x in qkv), mask)
    assert (half.float() - y).norm() < 0.01 * y.norm()


def test_bounds_are_where_documents_and_windows_begin_and_then_the_end():
    bounds = document_bounds(np.array(ROWS), END)
    assert bounds.dtype == np.int32
    assert bounds[:9].tolist() == [0, 3, 7, 8, 10, 12, 13, 16, 24]
    assert len(bounds) == 65 and set(bounds[8:].tolist()) == {24}
    for documents in (63, 64, 65, 128, 129, 2000):
        row = np.zeros((1, 5000), dtype=np.int64)
        row[0, 1:documents] = END
        bounds = document_bounds(row, END)
        assert len(bounds) - 1 == max(64, 2 ** math.ceil(math.log2(documents)))
        assert (
            bounds[: documents + 1].tolist() == [*range(documents), 5000]
            and (bounds[documents:] == 5000).all()
        )


def test_a_document_in_a_window_is_read_as_if_it_were_alone(tiny):
    """Only differences of positions count, so a document's logits do not depend on what stands before it."""
    c = dataclasses.replace(tiny, n_kv_head=1)
    model = build(c, CPU)
    g = torch.Generator().manual_seed(1)
    documents = [
        torch.cat((torch.tensor([END]), torch.randint(10, c.vocab_size, (length,), generator=g)))
        for length in (7, 3, 12)
    ]
    window = torch.cat(documents)[None]
    with torch.no_grad():
        packed = model.lm_head(
            model.hidden(window, torch.from_numpy(document_bounds(window.numpy(), END)))
        )[0]
        alone = torch.cat([model(document[None])[0] for document in documents])
        mixed = model(window)[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert (mixed[8:] - alone[8:]).abs().max() > 0.01


# ---- Kernels that are not here: called as their packages want it, and refused with a reason


def check_varlen(q, cu, longest):
    assert (
        q.dim() == 3
        and cu.dtype == torch.int32
        and cu[0] == 0
        and cu[-1] == len(q)
        and longest == 8
    )


def by_bounds(q, k, v, cu):
    """(N, H, D): each stretch between two bounds by itself."""
    parts = [
        by_hand(*(x[None, a:b] for x in (q, k, v)))[0] for a, b in itertools.pairwise(cu) if b > a
    ]
    return torch.cat(parts)


def fake_module(monkeypatch, name, **functions):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def test_flash_attn_is_called_as_its_package_wants_it(monkeypatch):
    def varlen(q, k, v, cu_q, cu_k, max_q, max_k, causal):
        assert causal and cu_q is cu_k and max_q == max_k
        check_varlen(q, cu_q, max_q)
        return by_bounds(q, k, v, cu_q)

    fake_module(
        monkeypatch,
        "flash_attn",
        flash_attn_varlen_func=varlen,
        flash_attn_func=lambda q, k, v, causal: by_hand(q, k, v),
    )
    q, k, v = random_qkv(4, 2)
    bounds = bounds_of(ROWS)
    kernel = Kernel("flash-attn", attention.flash_attn(), by_bounds=True)
    torch.testing.assert_close(
        kernel.attend(q, k, v, kernel.apart(bounds, 3, 8)), by_hand(q, k, v, ROWS)
    )
    torch.testing.assert_close(kernel.attend(q, k, v, None), by_hand(q, k, v))


def test_torchs_own_kernel_is_called_by_either_of_its_signatures(
    monkeypatch,
):
    def new(
        q,
        k,
        v,
        cu_q,
        cu_k,
        max_q,
        max_k,
        *,
        window_size=(-1, -1),
        enable_gqa=False,
    ):
        assert window_size == (-1, 0) and enable_gqa == (q.shape[1] != k.shape[1])
        check_varlen(q, cu_q, max_q)
        return by_bounds(q, k, v, cu_q)

    def old(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False):
        assert is_causal and q.shape == k.shape
        return by_bounds(q, k, v, cu_q)

    bounds = bounds_of(ROWS)
    for function in (new, old):
        fake_module(monkeypatch, "torch.nn.attention.varlen", varlen_attn=function)
        for kv_heads in (4, 2):
            q, k, v = random_qkv(4, kv_heads)
            torch.testing.assert_close(
                attention.sdpa_varlen()(q, k, v, bounds), by_hand(q, k, v, ROWS)
            )
            torch.testing.assert_close(attention.sdpa_varlen()(q, k, v, None), by_hand(q, k, v))


def recipe(**changes):
    changes = {"dtype": "bfloat16", "n_embd": 512, "n_head": 4} | changes
    return dataclasses.replace(Config(), **changes).derived()


def gpu(monkeypatch, capability, *modules, cudnn=0):
    """A GPU as far as the choice of a kernel looks, with these packages and this cuDNN."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a card")
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: cudnn)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in modules or None)
    return torch.device("cuda", 0)


REFUSED = [
    ((8, 0), "fa3", {}, "no Hopper card"),
    ((10, 0), "fa3", {}, "no Hopper card"),
    ((7, 5), "flash-attn", {}, "no Ampere or later card"),
    ((9, 0), "fa3", {}, "flash_attn_interface is not installed"),
    ((9, 0), "fa3", {"dtype": "float32"}, "it has no float32; set DTYPE=bfloat16"),
    ((9, 0), "flash-attn", {"n_embd": 2048}, "heads are 512 wide"),
]


@pytest.mark.parametrize(("capability", "kernel", "changes", "reason"), REFUSED)
def test_a_kernel_that_cannot_be_is_refused_with_the_reason(
    monkeypatch, capability, kernel, changes, reason
):
    c = recipe(attention=kernel, **changes)
    with pytest.raises(SettingsError, match=f"ATTENTION={kernel}: .*{reason}.*set ATTENTION=auto"):
        attention.choose(c, gpu(monkeypatch, capability))
    with pytest.raises(SettingsError, match=r"it runs on NVIDIA GPUs only.*set ATTENTION=auto"):
        attention.choose(c, CPU)


BOTH = ("flash_attn", "flash_attn_interface")
ON_GPUS = [
    ((9, 0), BOTH, 0, {}, "fa3"),
    ((8, 0), BOTH, 0, {}, "flash-attn"),
    ((7, 0), BOTH, 0, {}, "sdpa"),
    ((9, 0), (), 0, {}, "sdpa"),
    ((9, 0), ("flash_attn",), 91500, {}, "flash-attn"),
    ((9, 0), ("flash_attn",), 91501, {}, "sdpa"),  # torch takes cuDNN's
    ((8, 0), ("flash_attn",), 91501, {}, "flash-attn"),
    ((9, 0), ("flash_attn",), 91501, {"doc_mask": True}, "flash-attn"),
    ((9, 0), ("flash_attn",), 91501, {"attention": "flash-attn"}, "flash-attn"),
    ((9, 0), BOTH, 91501, {"attention": "sdpa"}, "sdpa"),
]


@pytest.mark.parametrize(("capability", "modules", "cudnn", "changes", "expected"), ON_GPUS)
def test_auto_takes_the_fastest_that_fits(
    monkeypatch, capability, modules, cudnn, changes, expected
):
    activated, cudnn_enabled = [], []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn_enabled.append)
    fake_module(monkeypatch, "flash_attn", flash_attn_varlen_func=None, flash_attn_func=None)
    device = gpu(monkeypatch, capability, *modules, cudnn=cudnn)
    kernel = attention.choose(recipe(**changes), device)
    assert (kernel.name, kernel.by_bounds) == (expected, True)
    is_fa3 = expected == "fa3"  # torch would take cuDNN's before it
    assert (activated, cudnn_enabled) == ((["FA3"], [False]) if is_fa3 else ([], []))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"seq_len": 512}, "math"),
        ({"seq_len": 513}, "sdpa"),
        ({"seq_len": 512, "dtype": "float32"}, "sdpa"),
        ({"seq_len": 512, "attention": "sdpa"}, "sdpa"),
        ({"dtype": "float32", "attention": "math"}, "math"),
    ],
    ids=str,
)
def test_a_cpu_takes_the_products_for_short_windows_in_bfloat16(changes, expected):
    assert attention.choose(recipe(**changes), CPU).name == expected
