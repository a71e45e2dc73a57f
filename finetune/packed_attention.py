"""Attention of packed examples for transformers' models, without a mask of T x T.

    query (B, H, T, D), key and value (B, H_kv, T, D), bounds (K + 1,) -> (B, T, H, D)

transformers' models look up their attention by name and pass on keyword arguments, of which `bounds` says where each
example begins, as train/model/attention.py has it. On a GPU one kernel for sequences of varying length takes all
examples. Otherwise each example is a call of its own.
"""

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from settings import SettingsError
from train.model.attention import torch_varlen, ungrouped

NAME = "packed"
NOT_PASSED = -1  # a window that the model's class does not hand to its attention


def register() -> None:
    """Make it known to transformers. Models without a mask function of this name build no mask."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(NAME, partial(attend, torch_varlen()))


def attend(
    varlen: Callable[..., Tensor],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    bounds: Tensor,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = NOT_PASSED,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention within each example, with the signature of transformers' attention functions.

    Args:
        varlen: attention.torch_varlen's.
        bounds: (K + 1,) int32, as attention.document_mask has them.
        sliding_window: how many positions a query looks at, its own included.
        softcap: scores are softcap tanh(score / softcap).
        s_aux: (H,), a score of each head that takes its share of the softmax and has no value.

    Raises:
        SettingsError: the model has a mask that does not get here.
    """
    B, H, T, D = query.shape
    if sliding_window == NOT_PASSED:
        sliding_window = getattr(module.config, "sliding_window", None)
        if sliding_window is not None and sliding_window < T:
            raise SettingsError(
                [
                    f"SEQ_LEN={T}: {type(module).__name__} attends to the last {sliding_window} tokens "
                    f"in a way that is not supported. Set SEQ_LEN={sliding_window} or less."
                ]
            )
    if attention_mask is not None:
        raise SettingsError(
            [
                f"MODEL: {type(module).__name__} makes an attention mask of its own, which is not "
                "supported. Choose another model."
            ]
        )
    if torch.is_autocast_enabled(query.device.type):
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    is_plain = softcap is None and s_aux is None and not dropout
    fits_kernel = query.dtype != torch.float32 and D == value.shape[-1] <= 256 and D % 8 == 0
    if query.is_cuda and is_plain and fits_kernel:
        rows = [x.transpose(1, 2).reshape(B * T, -1, D) for x in (query, key, value)]
        y = varlen(*rows, bounds, bounds, T, T, scale=scaling, window=sliding_window)
        return y.view(B, T, H, D), None
    options: dict[str, Any] = {"scaling": scaling, "dropout": dropout, "window": sliding_window}
    if softcap is not None or s_aux is not None:
        options |= {"softcap": softcap, "sink": s_aux}
    return by_example(query, key, value, bounds, options), None


@torch.compiler.disable
def by_example(
    query: Tensor, key: Tensor, value: Tensor, bounds: Tensor, options: dict[str, Any]
) -> Tensor:
    """Attend within one example after the other. The compiler would make a graph for each number of examples."""
    B, _, T, _ = query.shape
    one = by_products if "sink" in options else by_sdpa
    results = []
    for begin, end in itertools.pairwise(bounds.tolist()):
        if begin < end:
            row, first = divmod(begin, T)
            part = (slice(row, row + 1), slice(None), slice(first, first + end - begin))
            results.append(one(query[part], key[part], value[part], **options).transpose(1, 2))
    return torch.cat(results, dim=1).view(B, T, -1, value.shape[-1])


def by_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
) -> Tensor:
    """Compute the attention of one example by torch's kernel; (1, H, n, D) each."""
    n = query.shape[2]
    mask = None
    if window is not None and window < n:
        mask = visible(n, window, query.device)
    return F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=mask,
        dropout_p=dropout,
        is_causal=mask is None,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )


def by_products(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scaling: float | None,
    dropout: float,
    window: int | None,
    softcap: float | None,
    sink: Tensor | None,
) -> Tensor:
    """Compute what no kernel of torch's has: capped scores, and sinks."""
    _, H, n, D = query.shape
    key = ungrouped(key.transpose(1, 2), H).transpose(1, 2)
    value = ungrouped(value.transpose(1, 2), H).transpose(1, 2)
    scores = (query @ key.mT) * (scaling or D**-0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.float().masked_fill(~visible(n, window or n, query.device), -torch.inf)
    if sink is not None:
        scores = torch.cat([scores, sink.float().view(1, H, 1, 1).expand(1, H, n, 1)], dim=-1)
    shares = F.dropout(scores.softmax(dim=-1)[..., :n], dropout)
    return shares.to(value.dtype) @ value


def visible(n: int, window: int, device: torch.device) -> Tensor:
    """Return (n, n) bool: whether a query (first) looks at a key (second)."""
    return torch.ones(n, n, dtype=torch.bool, device=device).tril().triu(1 - window)
