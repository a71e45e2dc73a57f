"""The optimizer: AdamW for all weights, or Muon for the matrices inside blocks and AdamW for the rest.

AdamW is Loshchilov and Hutter 2019. Muon (Jordan et al. 2024) makes the momentum of a matrix orthogonal by five
Newton-Schulz iterations in bfloat16. Float32Products makes them fast on any processor.

Matrices decay, vectors (the norms) do not. The learning rate and all other values are set anew at each step.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon
from torch.utils._python_dispatch import TorchDispatchMode

from settings.config import Config

MUON_MOMENTUM = 0.95  # decay of Muon's momentum (Nesterov)
ADAM_EPS = 1e-8  # added to the square root of Adam's second moment


# What torch's optimizers keep about a weight that they have updated, by torch's names.
KEPT = {
    AdamW: ("step", "exp_avg", "exp_avg_sq"),
    Muon: ("momentum_buffer",),
}


class Float32Products(TorchDispatchMode):
    """Multiplies bfloat16 matrices as float32 and rounds the result.

    A bfloat16 product sums in float32 too, so only the order of the sum may differ. Without AVX-512 torch has no
    fast one for x86: at 192 x 512 it takes 70 times as long as in float32.
    """

    PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)

    def __torch_dispatch__(
        self,
        function: Any,
        types: Any,
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in self.PRODUCTS and args[0].dtype == torch.bfloat16:
            return function(*[each.float() for each in args], **(kwargs or {})).bfloat16()
        return function(*args, **(kwargs or {}))


def has_fast_bfloat16(device: torch.device) -> bool:
    """Return whether torch has fast bfloat16 products for a device."""
    if device.type != "cpu":
        return True
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


class Optimizer:
    """One or more of torch's optimizers, each with weights of its own, used as one."""

    def __init__(self, parts: list[AdamW | Muon]):
        self.parts = parts
        self.owner: dict[Tensor, AdamW | Muon] = {}
        for part in parts:
            for group in part.param_groups:
                self.owner |= dict.fromkeys(group["params"], part)
        self.is_fast = all(has_fast_bfloat16(weight.device) for weight in self.owner)

    def step(self) -> None:
        with contextlib.nullcontext() if self.is_fast else Float32Products():
            for part in self.parts:
                part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def moments(self, weight: Tensor) -> dict[str, Tensor]:
        """Return what is kept about a weight between steps, by torch's names; empty before its first update."""
        return dict(self.owner[weight].state.get(weight, {}))

    def state_names(self, weight: Tensor) -> tuple[str, ...]:
        """Return the names of what is kept about a weight after its first update."""
        return KEPT[type(self.owner[weight])]

    def set_moments(self, weight: Tensor, moments: dict[str, Tensor]) -> None:
        self.owner[weight].state[weight] = moments


def build_optimizer(model: nn.Module, c: Config) -> Optimizer:
    """Build the optimizer that OPTIMIZER names, over all trained weights.

    Muon needs whole matrices; settings/checks.py refuses it where FSDP2 splits them.
    """
    hidden: list[Tensor] = []  # Muon's, hidden in the sense of a network's hidden layers
    matrices: list[Tensor] = []
    vectors: list[Tensor] = []
    for name, weight in model.named_parameters():
        if not weight.requires_grad:
            continue
        if weight.ndim < 2:
            vectors.append(weight)
        elif c.optimizer == "muon" and weight.ndim == 2 and "layers." in name:
            hidden.append(weight)
        else:
            matrices.append(weight)
    # AdamW takes no empty group; adapters are matrices only. Decay is set at each step.
    groups = [{"params": weights} for weights in (matrices, vectors) if weights]
    parts: list[AdamW | Muon] = [AdamW(groups, fused=True)]
    if hidden:
        # updates are scaled to the size of AdamW's (Liu et al. 2025), so that one rate serves both
        parts.append(Muon(hidden, nesterov=True, adjust_lr_fn="match_rms_adamw"))
    optimizer = Optimizer(parts)
    set_rate(optimizer, c.learning_rate, c)
    return optimizer


def set_rate(optimizer: Optimizer, rate: float, c: Config) -> None:
    """Set the learning rate, and all else that the settings say."""
    for part in optimizer.parts:
        for group in part.param_groups:
            group["lr"] = rate
            group["weight_decay"] = c.weight_decay if group["params"][0].ndim >= 2 else 0.0
            if isinstance(part, Muon):
                group["momentum"] = MUON_MOMENTUM
            else:
                group["betas"] = c.adam_beta1, c.adam_beta2
                group["eps"] = ADAM_EPS
