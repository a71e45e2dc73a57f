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

IGNORED = -1  # target of a position that is not scored
CHUNK_TOKENS = (
    2048  # 2048 x 50,304 float32 logits are 0.4 GiB; smaller chunks starve a GPU's matrix units
)
CHUNK_TOKENS_ON_CPU = (
    1536  # where memory is scarcer; 1,300 and more are as fast, with AMX 1,024 are not
)
ROWS_IN_CACHE = 8  # on CPU: 8 x 50,304 float32 are 1.5 MiB
COLUMNS = 8192  # of logits that a CPU computes at once in bfloat16: with AMX in half the time that all take
UNLIKELY = 87.0  # nats below the likeliest: beyond, a CPU is slow at exponentials (denormal); they count as here

# (logits (n, V), targets (n,)) -> sum of the losses, and by how much (n, 1) float32 each row of what is left where the
# logits were is to be multiplied to be the gradient by them
SoftmaxPart = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def softmax_part(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the losses in nats; the logits are overwritten, as SoftmaxPart says. Computed in float32.

    On CPU by few rows at a time, which then stay in the processor's cache for the passes over them.
    """
    rows = ROWS_IN_CACHE if logits.device.type == "cpu" else max(1, len(logits))
    total = torch.zeros((), dtype=torch.float32, device=logits.device)
    for part, target in zip(logits.split(rows), targets.split(rows), strict=True):
        scored, index = (target != IGNORED)[:, None], target.clamp(min=0)[:, None]  # (n, 1)
        values = part.float()
        largest, said = values.amax(dim=1, keepdim=True), values.gather(1, index)
        probability = torch.clamp(values, min=largest - UNLIKELY, out=values).softmax(dim=1)
        # log of the sum of exp, from the largest entry: its probability is at least 1 / V, so no precision is lost
        log_z = largest - probability.amax(dim=1, keepdim=True).log()
        total += torch.where(scored, log_z - said, 0.0).sum()
        probability.scatter_add_(1, index, torch.full_like(log_z, -1.0))  # softmax - one hot
        part.copy_(probability)
    return total, (targets != IGNORED)[:, None].float()


def softmax_part_to_compile(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The same as one formula, which torch.compile turns into two passes over the logits: it leaves the exponentials
    as they are, and what they add up to goes into the factors."""
    scored, index = (targets != IGNORED)[:, None], targets.clamp(min=0)[:, None]
    values = logits.float()
    largest, said = values.amax(dim=1, keepdim=True), values.gather(1, index)
    exponential = (values - largest).clamp(min=-UNLIKELY).exp()
    z = exponential.sum(dim=1, keepdim=True)
    total = torch.where(scored, largest + z.log() - said, 0.0).sum()
    unit = z.to(
        logits.dtype
    ).float()  # so that minus one, which outweighs the rest of a row, is exact
    logits.copy_(exponential)
    logits.scatter_(1, index, ((said - largest).exp() - unit).to(logits.dtype))
    return total, torch.where(scored, 1 / unit, 0.0)


def columns_at_once(x: Tensor, vocab_size: int) -> list[slice]:
    """The logits' columns, as they are best computed."""
    columns = COLUMNS if x.device.type == "cpu" and x.dtype == torch.bfloat16 else vocab_size
    return [
        slice(start, min(start + columns, vocab_size)) for start in range(0, vocab_size, columns)
    ]


def products(x: Tensor, w: Tensor, out: Tensor) -> Tensor:
    """x (n, C) times each row of w (V, C), in out (n, V)."""
    for part in columns_at_once(x, len(w)):
        torch.mm(x, w[part].t(), out=out[:, part])
    return out


def add_products(dw: Tensor, grad: Tensor, x: Tensor, first: bool) -> None:
    """To dw (V, C) float32 what each column of grad (n, V) gives with x (n, C); first: dw holds nothing yet.

    In float32 by one product, which adds; in bfloat16 by several, each rounded before it is added: a CPU computes one
    for all columns in float32 first, which would take as much memory as dw.
    """
    if dw.dtype == x.dtype:
        dw.addmm_(grad.t(), x, beta=0 if first else 1)
        return
    for part in columns_at_once(x, len(dw)):
        product = torch.mm(grad[:, part].t(), x)
        dw[part].copy_(product) if first else dw[part].add_(product)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int, part_of: SoftmaxPart
    ) -> Tensor:
        w = weight.to(x.dtype)
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if need_x else None
        dw = torch.empty_like(weight, dtype=torch.float32) if need_w else None  # a sum over chunks
        # a block of memory that all chunks use in turn: fresh ones would cost a CPU more than the softmax does
        block = x.new_empty(min(chunk, len(x)), len(w))
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        factors = torch.empty(len(x), 1, dtype=torch.float32, device=x.device)
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = products(x[part], w, block[: len(x[part])])
            loss, factors[part] = part_of(logits, targets[part])
            total += loss
            grad = logits  # but for the factors of its rows
            if dx is not None:
                torch.mm(grad, w, out=dx[part])
            if dw is not None:
                rows = torch.mul(x[part], factors[part], out=torch.empty_like(x[part]))
                add_products(dw, grad, rows, first=not start)
        ctx.gradients, ctx.factors, ctx.weight_dtype = (dx, dw), factors, weight.dtype
        return total

    @staticmethod
    def backward(
        ctx: Any, *grad_outputs: Tensor
    ) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx, dw = ctx.gradients
        ctx.gradients = (None, None)
        scale = grad_outputs[0].view(
            1, 1
        )  # of two dimensions, since torch rounds a scalar to the other's type first
        return (
            None if dx is None else dx.mul_(ctx.factors * scale),
            None if dw is None else dw.mul_(scale).to(ctx.weight_dtype),
            None,
            None,
            None,
        )


def chunk_of(tokens: int, device: torch.device) -> int:
    """Tokens of a chunk, of chunks that are as large as each other."""
    chunks = -(-tokens // (CHUNK_TOKENS_ON_CPU if device.type == "cpu" else CHUNK_TOKENS))
    return -(-tokens // max(1, chunks))


def summed_loss(
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    chunk: int | None = None,
    part: SoftmaxPart = softmax_part,
) -> tuple[Tensor, Tensor]:
    """(sum of the losses in nats, number of scored tokens), both scalars on the device.

    x (N, C) hidden states; weight (V, C) of the head, cast to x's type; targets (N,) int64, IGNORED where
    not scored. Softmax and sum in float32. Backward may be called once.
    """
    chunk = chunk or chunk_of(len(x), x.device)
    return _LinearCrossEntropy.apply(x, weight, targets, chunk, part), (targets != IGNORED).sum()


def scored_answers(
    x: Tensor, weight: Tensor, answers: Tensor, vocab_size: int, chunk: int = CHUNK_TOKENS
) -> tuple[Tensor, Tensor]:
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
