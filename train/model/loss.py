"""Head and cross-entropy in one, in chunks of tokens, so that the full logits never exist.

    x (N, C), W (V, C) -> for each chunk: logits = x W^T, loss, d logits -> dx, dW -> next chunk

Logits of N tokens take 4 N V bytes, more than everything else in a small model together. The gradient of a chunk is
computed while its logits are in memory, in the forward pass; backward only scales it. No product is computed twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from train.model import cpu_kernels
from train.model.cpu_kernels import CHUNK_TOKENS_ON_CPU, UNLIKELY, split_columns

IGNORED = -1  # target of a position that is not scored
# 2048 x 50,304 float32 logits are 0.4 GiB; smaller chunks starve a GPU's matrix units
CHUNK_TOKENS = 2048

# (logits (n, V), targets (n,)) -> (loss, factors); see softmax_part
SoftmaxPart = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def softmax_part(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the summed cross-entropy, and overwrite the logits with their gradient.

    torch.compile makes two passes over the logits of it, since it writes exponentials and leaves their sum to the
    factors.

    Args:
        logits: (n, V) in any float type; the softmax is computed in float32.
        targets: (n,) int64, IGNORED where not scored.

    Returns:
        The sum of the losses in nats, and factors (n, 1) float32 by which each row of what is now in `logits` must be
        multiplied to be the gradient.
    """
    scored = (targets != IGNORED)[:, None]
    index = targets.clamp(min=0)[:, None]
    values = logits.float()
    largest = values.amax(dim=1, keepdim=True)
    of_target = values.gather(1, index)
    exponential = (values - largest).clamp(min=-UNLIKELY).exp()
    z = exponential.sum(dim=1, keepdim=True)
    total = torch.where(scored, largest + z.log() - of_target, 0.0).sum()
    # Rounded, so that the -1 of softmax - one_hot, which outweighs the rest of a row, is exact.
    unit = z.to(logits.dtype).float()
    logits.copy_(exponential)
    logits.scatter_(1, index, ((of_target - largest).exp() - unit).to(logits.dtype))
    return total, torch.where(scored, 1 / unit, 0.0)


def multiply(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """Write the logits of x (n, C) with w (V, C) into out (n, V)."""
    for part in split_columns(x, len(w)):
        torch.mm(x, w[part].t(), out=out[:, part])
    return out


def add_product(x: Tensor, grad: Tensor, dw: Tensor) -> None:
    """Add grad^T x to dw (V, C) float32; grad is (n, V), x (n, C).

    A CPU's single product in bfloat16 would hold all of its sum in float32 first: as much memory as dw.
    """
    if x.device.type == "cpu" and dw.dtype == x.dtype:
        dw.addmm_(grad.t(), x)
        return
    for part in split_columns(x, len(dw)):
        dw[part].add_(torch.mm(grad[:, part].t(), x))


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        vocab_size: int,
        chunk: int,
        softmax: SoftmaxPart,
    ) -> Tensor:
        w = weight.to(x.dtype)
        need_dx, need_dw = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if need_dx else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if need_dw else None
        # All chunks use one block of memory: new ones would cost a CPU more than the softmax does.
        block = x.new_empty(min(chunk, len(x)), len(w))
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        factors = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
        for start in range(0, len(x), chunk):
            part = slice(start, start + chunk)
            logits = multiply(x[part], w, block[: len(x[part])])
            logits[:, vocab_size:] = 0  # rows that pad the vocabulary have no share and no gradient
            loss, factors[part] = softmax(logits[:, :vocab_size], targets[part])
            total += loss
            grad = logits  # still to be multiplied by the factors of its rows
            if dx is not None:
                torch.mm(grad, w, out=dx[part])
            if dw is not None:
                add_product((x[part] * factors[part]).to(x.dtype), grad, dw)
        ctx.gradients = dx, dw
        ctx.factors = factors
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.gradients
        ctx.gradients = None, None
        # (1, 1), because torch would round a scalar to the type of the other tensor first
        scale = grad_outputs[0].view(1, 1)
        if dx is not None:
            dx.mul_(ctx.factors * scale)
        if dw is not None:
            dw = dw.mul_(scale).to(ctx.weight_dtype)
        return dx, dw, None, None, None, None


def chunk_of(tokens: int, device: torch.device) -> int:
    """Return the number of tokens in a chunk, so that chunks are equally large."""
    limit = CHUNK_TOKENS_ON_CPU if device.type == "cpu" else CHUNK_TOKENS
    chunks = max(1, -(-tokens // limit))
    return max(1, -(-tokens // chunks))


def summed_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    vocab_size: int | None = None,
    chunk: int | None = None,
    softmax: SoftmaxPart | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the cross-entropy of a head's logits, in float32. Backward may be called once.

    Args:
        x: (N, C) hidden states.
        weight: (V, C) of the head; cast to the type of x.
        targets: (N,) int64, IGNORED where not scored.
        vocab_size: rows of the weight that are entries of the vocabulary. Default: all.
        chunk: tokens in a chunk.
        softmax: softmax_part compiled. Default: the faster one of the device.

    Returns:
        The sum of the losses in nats, and the number of scored tokens; scalars on the device.
    """
    if softmax is None:
        softmax = cpu_kernels.softmax_part if x.device.type == "cpu" else softmax_part
    nats = _LinearCrossEntropy.apply(
        x,
        weight,
        targets,
        vocab_size or len(weight),
        chunk or chunk_of(len(x), x.device),
        softmax,
    )
    return nats, (targets != IGNORED).sum()


def scored_answers(
    x: Tensor, weight: Tensor, answers: Tensor, vocab_size: int, chunk: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
    """Score one token behind each hidden state.

    Args:
        x: (n, C) hidden states.
        weight: (V, C) of the head, of which the first vocab_size rows are entries.
        answers: (n,) int64 tokens.

    Returns:
        Their losses in nats (n,) float32, and whether no token is likelier (n,) bool; of equally likely ones the
        first counts.
    """
    nats = []
    is_likeliest = []
    w = weight.to(x.dtype).t()
    for part, index in zip(x.split(chunk), answers.split(chunk), strict=True):
        logits = torch.mm(part, w)[:, :vocab_size].float()
        nats.append(logits.logsumexp(dim=1) - logits.gather(1, index[:, None])[:, 0])
        is_likeliest.append(logits.argmax(dim=1) == index)
    return torch.cat(nats), torch.cat(is_likeliest)
