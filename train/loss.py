"""Head and cross-entropy in one, in chunks of tokens, so that the full logits never exist.

    x (N, C), W (V, C) -> for each chunk: logits = x W^T, loss, d logits -> dx, dW -> next chunk

Logits of N tokens take 4 N V bytes, more than everything else in a small model together. Here the
gradient of a chunk is formed while its logits are at hand, in the forward pass; backward only scales it.
No product is computed twice.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

IGNORED = -1          # target of a position that is not scored
CHUNK_TOKENS = 2048   # 2048 x 50,304 float32 logits are 0.4 GiB; smaller chunks starve a GPU's matrix units
ROWS_IN_CACHE = 32    # on CPU: 32 x 50,304 float32 are 6 MiB

# (logits (n, V), targets (n,)) -> sum of the losses; leaves d loss / d logits where the logits were
SoftmaxPart = Callable[[Tensor, Tensor], Tensor]


def softmax_part(logits: Tensor, targets: Tensor) -> Tensor:
    """The sum of the losses in nats; overwrites the logits with its gradient by them. Computed in float32.

    On CPU by few rows at a time, which then stay in the processor's cache for the passes over them.
    """
    on_cpu = logits.device.type == "cpu"
    rows = ROWS_IN_CACHE if on_cpu else max(1, len(logits))
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for part, index in zip(logits.split(rows), targets.split(rows), strict=True):
        scored, index = (index != IGNORED)[:, None], index.clamp(min=0)[:, None]  # (n, 1)
        values = part.float()
        probability = values.softmax(dim=1)
        # log of the sum of exp, from the largest entry: its probability is at least 1 / V, so no precision is lost
        log_z = values.amax(dim=1, keepdim=True) - probability.amax(dim=1, keepdim=True).log()
        total += torch.where(scored, log_z - values.gather(1, index), 0.0).sum()
        probability.scatter_add_(1, index, torch.full_like(log_z, -1.0))  # softmax - one hot
        if on_cpu and bool(scored.all()):  # a GPU is not asked: the host would wait for it
            part.copy_(probability)
        else:
            torch.mul(probability, scored, out=part)
    return total


def softmax_part_to_compile(logits: Tensor, targets: Tensor) -> Tensor:
    """The same as one formula, which torch.compile turns into two passes over the logits."""
    scored, index = (targets != IGNORED)[:, None], targets.clamp(min=0)[:, None]
    values = logits.float()
    log_z = values.logsumexp(dim=1, keepdim=True)
    total = torch.where(scored, log_z - values.gather(1, index), 0.0).sum()
    hot = torch.arange(values.shape[1], device=values.device) == index
    logits.copy_(((values - log_z).exp() - hot.float()) * scored)
    return total


class _LinearCrossEntropy(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, part_of: SoftmaxPart) -> Tensor:
        w = weight.to(x.dtype)
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if need_x else None
        dw = torch.empty_like(weight, dtype=torch.float32) if need_w else None  # a sum over chunks
        # blocks of memory that all chunks use in turn: fresh ones would cost a CPU more than the softmax does
        block = x.new_empty(min(chunk, len(x)), len(w))
        dw_part = None if dw is None or dw.dtype == x.dtype else torch.empty_like(w)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = torch.mm(x[part], w.t(), out=block[:len(x[part])])
            total += part_of(logits, targets[part])
            grad = logits
            if dx is not None:
                torch.mm(grad, w, out=dx[part])
            if dw is not None and dw_part is None:
                dw.addmm_(grad.t(), x[part], beta=1 if start else 0)
            elif dw is not None:
                product = torch.mm(grad.t(), x[part], out=dw_part)
                dw = dw.add_(product) if start else dw.copy_(product)
        ctx.gradients, ctx.weight_dtype = (dx, dw), weight.dtype
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx, dw = ctx.gradients
        ctx.gradients = (None, None)
        scale = grad_outputs[0].view(1, 1)  # of two dimensions, since torch rounds a scalar to the other's type first
        return (None if dx is None else dx.mul_(scale), None if dw is None else dw.mul_(scale).to(ctx.weight_dtype),
                None, None, None)


def summed_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = CHUNK_TOKENS,
                part: SoftmaxPart = softmax_part) -> tuple[Tensor, Tensor]:
    """(sum of the losses in nats, number of scored tokens), both scalars on the device.

    x (N, C) hidden states; weight (V, C) of the head, cast to x's type; targets (N,) int64, IGNORED where
    not scored. Softmax and sum in float32. Backward may be called once.
    """
    return _LinearCrossEntropy.apply(x, weight, targets, chunk, part), (targets != IGNORED).sum()


def scored_answers(x: Tensor, weight: Tensor, answers: Tensor, vocab_size: int,
                   chunk: int = CHUNK_TOKENS) -> tuple[Tensor, Tensor]:
    """(nats (n,) float32, whether no entry is likelier (n,) bool; of several as likely the first counts).

    x (n, C) hidden states; weight (V, C) of the head, of which the first vocab_size rows are entries; answers (n,).
    """
    found = []
    for part, index in zip(x.split(chunk), answers.split(chunk), strict=True):
        logits = torch.mm(part, weight.to(part.dtype).t())[:, :vocab_size].float()
        nats = logits.logsumexp(dim=1) - logits.gather(1, index[:, None])[:, 0]
        found.append((nats, logits.argmax(dim=1) == index))
    if not found:
        return x.new_empty(0, dtype=torch.float32), x.new_empty(0, dtype=torch.bool)
    return torch.cat([nats for nats, _ in found]), torch.cat([hit for _, hit in found])
