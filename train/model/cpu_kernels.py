"""What a CPU does faster another way than the plain torch of model.py, attention.py and loss.py.

Each computes what the plain one does, up to rounding. Norms and loss choose them by the device, outside of
torch.compile, which makes its own kernels from the plain functions; attention.py chooses by the settings.

CPU time of a step without each of them, on one AMD EPYC core (Zen 4) without AMX, 4 layers of width 192 and 4,096
entries, without torch.compile, medians of 5:
                            bfloat16            float32
    rms_norm                1.06 (0.98-1.12)    1.02 (1.00-1.03)
    attend_by_products      1.20 (1.15-1.23)    not used
    softmax_part            1.00 (0.99-1.04)    1.01 (0.98-1.06)    against the plain one by 32 rows
    split_columns           0.98 (0.93-1.08)    not used            2 layers, 50,304 entries, medians of 3
At 6 layers of width 384 (s4k and s50k of make bench), on two shared cores of such a processor, CPU time of steps by
turns, medians of 3 to 5:
    rms_norm        s4k     1.05 (1.02-1.10)    1.02 (1.01-1.09)
                    s50k    1.00 (0.94-1.04)    1.03 (1.02-1.05)
    softmax_part    s50k    1.08 (1.07-1.08)    1.02 (1.02-1.05)    against the plain one by 8 rows, in float32 by 32
split_columns is kept for processors with AMX, where it takes half the time (docs/decisions/0022). The norm and the
softmax are kept for exactness: the plain functions round differently, so that a run would not go on to the bit.
"""

from typing import Any

import torch
from torch import Tensor

from settings.config import Config

SHORT = 512  # tokens up to which attend_by_products was measured to be the faster one
CHUNK_TOKENS_ON_CPU = 1536  # memory is scarcer; with AMX 1,024 are slower, 1,300 and more are not
ROWS_IN_CACHE = 8  # 8 x 50,304 float32 logits are 1.5 MiB
COLUMNS = 8192  # of the vocabulary at once in bfloat16: with AMX half the time of a single product
UNLIKELY = 87.0  # nats below the maximum; beyond, exp() is denormal, which a CPU is slow at


# ---------------------------------------------------------------------------------------------------
# Blocks
# ---------------------------------------------------------------------------------------------------


class _RMSNormOnCPU(torch.autograd.Function):
    """RMSNorm in few passes over memory. torch has no kernel of its own for it on a CPU."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        squares = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32).square_()
        scale = squares.div_(x.shape[-1]).add_(eps).rsqrt_()
        normal = torch.mul(x, scale, out=torch.empty_like(x))
        ctx.save_for_backward(normal, scale, weight)
        return normal * weight.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (dy,) = grad_outputs
        normal, scale, weight = ctx.saved_tensors
        d_weight = (dy * normal).flatten(0, -2).sum(0, dtype=torch.float32)
        dx = dy * weight.to(dy.dtype)
        # dx = scale (dy w - normal mean(dy w normal))
        dx.addcmul_(normal, (dx * normal).sum(-1, keepdim=True), value=-1 / dx.shape[-1])
        return torch.mul(dx, scale, out=dx), d_weight, None


rms_norm = _RMSNormOnCPU.apply


def prefers_products(c: Config) -> bool:
    """Return whether attention by products is faster than torch's flash kernel for CPUs."""
    return c.dtype == "bfloat16" and c.seq_len <= SHORT


def attend_by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute causal attention by its formula, with all T x T scores in memory; q, k and v are (B, T, H, D).

    In bfloat16 it is as precise as bfloat16 scores are.
    """
    B, T, H, D = q.shape
    q, k, v = (x.transpose(1, 2).reshape(B * H, T, D) for x in (q, k, v))
    future = torch.full((T, T), float("-inf"), dtype=q.dtype, device=q.device).triu(1)
    scores = torch.baddbmm(future, q, k.transpose(1, 2), alpha=D**-0.5)
    return (scores.softmax(dim=-1) @ v).view(B, H, T, D).transpose(1, 2)


# ---------------------------------------------------------------------------------------------------
# Loss
# ---------------------------------------------------------------------------------------------------


def softmax_part(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute what loss.softmax_part does, by few rows, which stay in the processor's cache."""
    total = torch.zeros((), dtype=torch.float32)
    scored = (targets >= 0)[:, None]
    index = targets.clamp(min=0)[:, None]
    for part, is_scored, target in zip(
        *(tensor.split(ROWS_IN_CACHE) for tensor in (logits, scored, index)), strict=True
    ):
        values = part.float()
        largest = values.amax(dim=1, keepdim=True)
        of_target = values.gather(1, target)
        probability = torch.clamp(values, min=largest - UNLIKELY, out=values).softmax(dim=1)
        # The largest probability is at least 1 / V, so that no precision is lost in its log.
        log_z = largest - probability.amax(dim=1, keepdim=True).log()
        total += torch.where(is_scored, log_z - of_target, 0.0).sum()
        probability.scatter_add_(1, target, torch.full_like(log_z, -1.0))
        part.copy_(probability)
    return total, scored.float()


def split_columns(x: Tensor, vocab_size: int) -> list[slice]:
    """Return the blocks in which the columns of the logits of x are computed fastest."""
    columns = vocab_size
    if x.device.type == "cpu" and x.dtype == torch.bfloat16:
        columns = COLUMNS
    return [slice(start, start + columns) for start in range(0, vocab_size, columns)]
