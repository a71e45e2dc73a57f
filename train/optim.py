"""What updates the weights: AdamW on all of them, or Muon on the matrices inside blocks and AdamW on the rest.

Matrices decay, vectors (the norms) do not. The rate and every other number are set anew at each step.
"""

import inspect

import torch
from torch import Tensor, nn

from settings import SettingsError
from settings.config import Config

MUON_MOMENTUM = 0.95  # decay of Muon's momentum (Nesterov)
ADAM_EPS = 1e-8  # added to the square root of Adam's second moment


class _Plain(torch.optim.Optimizer):
    """torch's optimizers without what keeps torch's compiler from looking inside.

    Those wrappers import the compiler when they are first called, which puts 3 s before the first step of
    a run that compiles nothing. The methods below are torch's own, unwrapped.
    """

    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


class AdamW(_Plain, torch.optim.AdamW):
    """Loshchilov and Hutter 2019."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))


class Muon(_Plain, torch.optim.Muon):
    """Jordan et al. 2024: the momentum of a matrix, made orthogonal by five Newton-Schulz iterations in bfloat16."""

    step = torch.no_grad()(inspect.unwrap(torch.optim.Muon.step))


class Optimizer:
    """One or more of torch's optimizers, each with weights of its own, used as one."""

    def __init__(self, parts: list[torch.optim.Optimizer]):
        self.parts = parts
        self.owner = {
            w: part for part in parts for group in part.param_groups for w in group["params"]
        }

    def step(self) -> None:
        for part in self.parts:
            part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none=set_to_none)

    def moments(self, weight: Tensor) -> dict[str, Tensor]:
        """What is kept about a weight between steps, by torch's names; empty before its first update."""
        return dict(self.owner[weight].state.get(weight, {}))

    def set_moments(self, weight: Tensor, moments: dict[str, Tensor]) -> None:
        self.owner[weight].state[weight] = moments


def build_optimizer(model: nn.Module, c: Config) -> Optimizer:
    """The optimizer that OPTIMIZER names, over all weights of the model that are trained."""
    weights = {name: w for name, w in model.named_parameters() if w.requires_grad}
    hidden = [
        w
        for name, w in weights.items()
        if c.optimizer == "muon" and w.ndim == 2 and "layers." in name
    ]
    if any(hasattr(w, "placements") for w in hidden):  # a DTensor, known without a second's import
        raise SettingsError(
            [
                "OPTIMIZER=muon: not yet with weights that are split over processes (FSDP2), since it "
                "needs whole matrices; set OPTIMIZER=adamw"
            ]
        )
    taken = set(map(id, hidden))
    rest = [w for w in weights.values() if id(w) not in taken]
    groups = [
        {"params": [w for w in rest if w.ndim >= 2], "weight_decay": c.weight_decay},
        {"params": [w for w in rest if w.ndim < 2], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]  # adapters are matrices only
    parts: list[torch.optim.Optimizer] = [
        AdamW(
            groups,
            lr=c.learning_rate,
            betas=(c.adam_beta1, c.adam_beta2),
            eps=ADAM_EPS,
            fused=True,
        )
    ]
    if hidden:
        # updates are scaled to the size of AdamW's (Liu et al. 2025), so that one rate serves both
        parts.append(
            Muon(
                hidden,
                lr=c.learning_rate,
                weight_decay=c.weight_decay,
                momentum=MUON_MOMENTUM,
                nesterov=True,
                adjust_lr_fn="match_rms_adamw",
            )
        )
    return Optimizer(parts)


def set_rate(optimizer: Optimizer, rate: float, c: Config) -> None:
    """Set what the settings say, over whatever a checkpoint brought along."""
    for part in optimizer.parts:
        for group in part.param_groups:
            group["lr"] = rate
            group["weight_decay"] = c.weight_decay if group["params"][0].ndim >= 2 else 0.0
            if isinstance(part, Muon):
                group["momentum"] = MUON_MOMENTUM
            else:
                group["betas"], group["eps"] = (c.adam_beta1, c.adam_beta2), ADAM_EPS
