"""Activation checkpointing: what backward recomputes instead of keeping it (Chen et al. 2016).

full        a block keeps its input only and runs forward once more: about a third more work
selective   it keeps the results of matrix products and of attention too, and recomputes the cheap rest
"""

import functools
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

# The costly operations: matrix products, by the names that torch's dispatcher gives them, and any kernel of attention,
# some of which packages bring.
PRODUCTS = ("aten.mm", "aten.addmm", "aten.bmm", "aten.baddbmm")
ATTENTION = ("attention", "flash_attn", "varlen_attn")


def recomputed(
    body: Callable[..., Tensor], how: str, *inputs: Tensor | None, draws: bool = False
) -> Tensor:
    """Return body(*inputs), keeping for backward what `how` says.

    Args:
        body: a block's forward pass.
        how: "selective" or "full".
        inputs: of body.
        draws: whether body draws random numbers, as dropout does, which must be the same again.
    """
    options: dict[str, Any] = {}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
    return checkpoint(body, *inputs, use_reentrant=False, preserve_rng_state=draws, **options)


def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """Return whether the result of an operation is kept; of each, every overload counts."""
    name = str(getattr(operation, "overloadpacket", operation))
    if name in PRODUCTS or any(part in name for part in ATTENTION):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
