"""Head and cross-entropy in one, in chunks of tokens, so that the full logits never exist.

    x (N, C), W (V, C) -> for each chunk: logits = x W^T, loss, d logits -> dx, dW -> next chunk

Logits of N tokens take 4 N V bytes, more than everything else in a small model together. Here the
gradient of a chunk is formed while its logits are at hand, in the forward pass; backward only scales it.
No product is computed twice.
"""

from typing import Any

import torch
from torch import Tensor

IGNORED = -1          # target of a position that is not scored
CHUNK_TOKENS = 2048   # 2048 x 50,304 float32 logits are 0.4 GiB; smaller chunks starve a GPU's matrix units


class _LinearCrossEntropy(torch.autograd.Function):

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, chunk: int) -> Tensor:
        w = weight.to(x.dtype)
        need_x, need_w = ctx.needs_input_grad[:2]
        dx = torch.empty_like(x) if need_x else None
        dw = torch.zeros_like(weight) if need_w else None
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        for start in range(0, x.shape[0], chunk):
            part = slice(start, start + chunk)
            logits = (x[part] @ w.t()).float()                                    # (n, V)
            scored = targets[part] != IGNORED                                     # (n,)
            index = targets[part].clamp(min=0)[:, None]                           # (n, 1)
            log_z = torch.logsumexp(logits, dim=1, keepdim=True)                  # (n, 1)
            losses = (log_z - logits.gather(1, index)).squeeze(1)
            total += torch.where(scored, losses, 0.0).sum()
            if dx is None and dw is None:
                continue
            # d loss / d logits = softmax - one hot, in place of the logits; zero where not scored
            grad = logits.sub_(log_z).exp_()
            grad.scatter_add_(1, index, torch.full_like(log_z, -1.0))
            grad = grad.mul_(scored[:, None]).to(x.dtype)
            if dx is not None:
                torch.mm(grad, w, out=dx[part])
            if dw is not None:
                if x.dtype == dw.dtype:
                    dw.addmm_(grad.t(), x[part])
                else:
                    dw += grad.t() @ x[part]
        ctx.gradients = (dx, dw)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, Tensor | None, None, None]:
        dx, dw = ctx.gradients
        if dx is None and dw is None:
            return None, None, None, None
        ctx.gradients = (None, None)
        scale = grad_outputs[0]
        return (None if dx is None else dx.mul_(scale.to(dx.dtype)), None if dw is None else dw.mul_(scale), None, None)


def summed_loss(x: Tensor, weight: Tensor, targets: Tensor, chunk: int = CHUNK_TOKENS) -> tuple[Tensor, Tensor]:
    """(sum of the losses in nats, number of scored tokens), both scalars on the device.

    x (N, C) hidden states; weight (V, C) of the head, cast to x's type; targets (N,) int64, IGNORED where
    not scored. Softmax and sum in float32. Backward may be called once.
    """
    return _LinearCrossEntropy.apply(x, weight, targets, chunk), (targets != IGNORED).sum()
