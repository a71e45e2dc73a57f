"""Activation checkpointing: what backward computes anew instead of keeping it (Chen et al. 2016).

full        a block keeps its input only and runs forward once more: about a third more work
selective   it keeps the results of matrix products and of attention too, and computes the cheap rest anew
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

aten = torch.ops.aten

# The costly operations, by the names that torch's dispatcher gives them; of each, every overload counts.
KEPT = {
    aten.mm,
    aten.addmm,
    aten.bmm,
    aten.baddbmm,
    aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_efficient_attention,
    aten._scaled_dot_product_cudnn_attention,
    aten._scaled_dot_product_flash_attention_for_cpu,
}
KEPT_NAMES = ("flash_attn", "varlen_attn")  # operations of packages, which may not be there


def recomputed(
    body: Callable[..., Tensor], how: str, *inputs: Tensor | None, draws: bool = False
) -> Tensor:
    """body(*inputs), keeping what `how` ("selective" or "full") says. draws: whether it draws numbers, as dropout does,
    which must be the same again."""
    options: dict[str, Any] = {}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(body, *inputs, use_reentrant=False, preserve_rng_state=draws, **options)


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Whether the result of an operation is kept."""
    packet = getattr(operation, "overloadpacket", operation)
    if packet in KEPT or any(name in str(packet) for name in KEPT_NAMES):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
