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
from train.model.attention import MATH, SDPA
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


def fake_module(monkeypatch, name, **functions):
    module = types.ModuleType(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(module).update(functions)
    monkeypatch.setitem(sys.modules, name, module)


def varlen_by_hand(q, k, v, cu_q, cu_k, max_q, max_k):
    """(N, H, D): each stretch between two bounds by itself."""
    assert cu_q is cu_k and cu_q.dtype == torch.int32 and max_q == max_k == 8
    assert cu_q[0] == 0 and cu_q[-1] == len(q)
    stretches = [slice(a, b) for a, b in itertools.pairwise(cu_q) if b > a]
    return torch.cat([by_hand(*(x[None, part] for x in (q, k, v)))[0] for part in stretches])


def fake_flash_attn(monkeypatch):
    def varlen(*inputs, causal):
        assert causal
        return varlen_by_hand(*inputs)

    def whole(q, k, v, causal):
        assert causal
        return by_hand(q, k, v)

    fake_module(monkeypatch, "flash_attn", flash_attn_varlen_func=varlen, flash_attn_func=whole)
    return attention.flash_attn()


def fake_varlen_of_torch_211(monkeypatch):
    def varlen(q, k, *inputs, is_causal=False):
        assert is_causal and q.shape == k.shape
        return varlen_by_hand(q, k, *inputs)

    fake_module(monkeypatch, "torch.nn.attention.varlen", varlen_attn=varlen)
    return attention.sdpa_varlen()


def fake_varlen_with_a_window_but_no_groups(monkeypatch):
    def varlen(q, k, *inputs, window_size=(-1, -1)):
        assert window_size == (-1, 0) and q.shape == k.shape
        return varlen_by_hand(q, k, *inputs)

    fake_module(monkeypatch, "torch.nn.attention.varlen", varlen_attn=varlen)
    return attention.sdpa_varlen()


def fake_varlen_of_torch_212(monkeypatch):
    def varlen(q, k, *inputs, window_size=(-1, -1), enable_gqa=False):
        assert window_size == (-1, 0) and enable_gqa == (q.shape[1] != k.shape[1])
        return varlen_by_hand(q, k, *inputs)

    fake_module(monkeypatch, "torch.nn.attention.varlen", varlen_attn=varlen)
    return attention.sdpa_varlen()


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("attend", [SDPA.attend, MATH.attend], ids=["sdpa", "math"])
def test_attention_is_what_its_formula_says(kv_heads, attend):
    qkv = random_qkv(4, kv_heads)
    y = attend(*qkv, None)
    torch.testing.assert_close(y, by_hand(*qkv))
    half = attend(*(x.bfloat16() for x in qkv), None)
    assert (half.float() - y).norm() < 0.01 * y.norm()


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize(
    "make",
    [
        fake_flash_attn,
        fake_varlen_of_torch_211,
        fake_varlen_with_a_window_but_no_groups,
        fake_varlen_of_torch_212,
    ],
)
def test_kernels_with_bounds_are_called_as_their_packages_want_it(monkeypatch, make, kv_heads):
    attend, qkv = make(monkeypatch), random_qkv(4, kv_heads)
    torch.testing.assert_close(attend(*qkv, bounds_of(ROWS)), by_hand(*qkv, ROWS))
    torch.testing.assert_close(attend(*qkv, None), by_hand(*qkv))


@pytest.mark.parametrize(
    ("documents", "length"), [(63, 64), (64, 64), (65, 128), (129, 256), (2000, 2048)]
)
def test_bounds_are_padded_to_few_lengths(documents, length):
    row = np.zeros((1, 5000), dtype=np.int64)
    row[0, 1:documents] = END
    bounds = document_bounds(row, END)
    assert bounds.dtype == np.int32
    assert bounds.tolist() == [*range(documents), *[5000] * (length + 1 - documents)]


@pytest.mark.parametrize("kernel", [SDPA, MATH], ids=["sdpa", "math"])
def test_a_document_in_a_window_is_read_as_if_it_were_alone(tiny, kernel):
    """Only differences of positions count, so a document's logits do not depend on what stands before it."""
    model = build(dataclasses.replace(tiny, n_kv_head=1), CPU, kernel)
    g = torch.Generator().manual_seed(1)
    documents = [
        torch.cat((torch.tensor([END]), torch.randint(10, tiny.vocab_size, (length,), generator=g)))
        for length in (7, 3, 12)
    ]
    window = torch.cat(documents)[None]
    with torch.no_grad():
        packed = model.lm_head(model.hidden(window, bounds_of(window.tolist())))[0]
        alone = torch.cat([model(document[None])[0] for document in documents])
        mixed = model(window)[0]
    torch.testing.assert_close(packed, alone, rtol=1e-4, atol=1e-5)
    assert (mixed[8:] - alone[8:]).abs().max() > 0.01


# ---- The choice


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
CHOSEN = [  # None: a CPU
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
    (None, BOTH, 0, {"seq_len": 512}, "math"),
    (None, BOTH, 0, {"seq_len": 513}, "sdpa"),
    (None, BOTH, 0, {"seq_len": 512, "dtype": "float32"}, "sdpa"),
    (None, BOTH, 0, {"seq_len": 512, "attention": "sdpa"}, "sdpa"),
    (None, BOTH, 0, {"dtype": "float32", "attention": "math"}, "math"),
]


@pytest.mark.parametrize(("capability", "modules", "cudnn", "changes", "expected"), CHOSEN)
def test_auto_takes_the_fastest_that_fits(
    monkeypatch, capability, modules, cudnn, changes, expected
):
    activated, cudnn_enabled = [], []
    monkeypatch.setattr(torch.nn.attention, "activate_flash_attention_impl", activated.append)
    monkeypatch.setattr(torch.backends.cuda, "enable_cudnn_sdp", cudnn_enabled.append)
    fake_module(monkeypatch, "flash_attn", flash_attn_varlen_func=len, flash_attn_func=len)
    device = gpu(monkeypatch, capability, *modules, cudnn=cudnn)
    kernel = attention.choose(recipe(**changes), device if capability else CPU)
    assert (kernel.name, kernel.by_bounds) == (expected, capability is not None)
    is_fa3 = expected == "fa3"  # torch would take cuDNN's before it
    assert (activated, cudnn_enabled) == ((["FA3"], [False]) if is_fa3 else ([], []))
