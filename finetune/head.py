"""What a model of transformers' makes of its last hidden states, found by computing it once.

    hidden (N, C), W (V, C) -> logits = cap tanh(scale hidden W^T / cap), or without the tanh where there is no cap

So the loss is computed in chunks of the logits (train/model/loss.py), which never exist as a whole.
"""

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from train.model import cpu_kernels, loss


class Head(NamedTuple):
    """Logits that are a product, scaled and capped. cap: 0 for none."""

    scale: float
    cap: float

    def summed_loss(self, hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what loss.summed_loss does, of these logits."""
        if self.scale != 1:
            hidden = hidden * self.scale
        softmax = self.capped_softmax if self.cap else None
        return loss.summed_loss(hidden, weight, targets, softmax=softmax)

    def capped_softmax(self, logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Compute what loss.softmax_part does, of the capped logits."""
        part = cpu_kernels.softmax_part if logits.device.type == "cpu" else loss.softmax_part
        share = logits.div(self.cap).tanh_()
        nats, factors = part(torch.mul(share, self.cap, out=logits), targets)
        logits.mul_(share.square_().neg_().add_(1))
        return nats, factors


class Given(nn.Module):
    """A decoder that gives these hidden states, whatever it reads."""

    def __init__(self, hidden: Tensor):
        super().__init__()
        self.hidden = hidden

    def forward(self, *_: Any, **__: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=self.hidden)


@torch.no_grad()
def find_head(lm: Any) -> Head | None:
    """Return what a model's logits are, None if they are something else.

    The model's forward runs with another decoder and a small matrix in place of its own, so the weights do not matter
    and may be on the meta device.
    """
    output = lm.get_output_embeddings()
    if output is None or output.bias is not None:
        return None
    generator = torch.Generator().manual_seed(0)
    with torch.device("cpu"):
        matrix = nn.Linear(output.weight.shape[1], 16, bias=False, dtype=torch.float64)
        matrix.weight.normal_(generator=generator).div_(matrix.in_features)
        hidden = torch.empty(1, 4, matrix.in_features, dtype=torch.float64)
        hidden.normal_(generator=generator)
        tokens = torch.zeros(1, 4, dtype=torch.int64)
    probe = lm
    for part, new in ((lm.get_decoder(), Given(hidden)), (output, matrix)):
        (name,) = (name for name, module in lm.named_modules() if module is part)
        probe = with_part(probe, name, new)
    try:
        logits = probe(input_ids=tokens).logits.double()
    except Exception:  # it needs more of the decoder, or has weights between it and the matrix
        return None
    cap = float(getattr(lm.config.get_text_config(), "final_logit_softcapping", None) or 0)
    if cap:
        logits = cap * torch.atanh(logits / cap)
    ratios = logits / matrix(hidden)
    scale = ratios.median().item()
    if not torch.allclose(ratios, torch.full_like(ratios, scale), rtol=1e-4):
        return None
    return Head(1.0 if abs(scale - 1) < 1e-6 else scale, cap)


def with_part(module: nn.Module, name: str, new: nn.Module) -> nn.Module:
    """Return a module with another part of that name, and else the same parts."""
    first, _, rest = name.partition(".")
    result = copy.copy(module)
    result._modules = dict(module._modules)
    result._modules[first] = with_part(module.get_submodule(first), rest, new) if rest else new
    return result
