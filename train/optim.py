"""AdamW over two groups of weights: matrices decay, vectors (the norms) do not."""

import inspect

import torch
from torch import nn

from train.config import Config


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov and Hutter 2019) without what keeps torch's compiler from looking inside.

    Those wrappers import the compiler when they are first called, which puts 3 s before the first step of
    a run that compiles nothing. The methods below are torch's own, unwrapped.
    """

    step = torch.no_grad()(inspect.unwrap(torch.optim.AdamW.step))
    add_param_group = inspect.unwrap(torch.optim.Optimizer.add_param_group)
    zero_grad = inspect.unwrap(torch.optim.Optimizer.zero_grad)
    state_dict = inspect.unwrap(torch.optim.Optimizer.state_dict)
    load_state_dict = inspect.unwrap(torch.optim.Optimizer.load_state_dict)


def build_optimizer(model: nn.Module, c: Config) -> torch.optim.Optimizer:
    """AdamW with torch's fused kernel; the rate is set anew at each step."""
    weights = list(model.parameters())
    groups = [{"params": [w for w in weights if w.ndim >= 2], "weight_decay": c.weight_decay},
              {"params": [w for w in weights if w.ndim < 2], "weight_decay": 0.0}]
    return AdamW(groups, lr=c.learning_rate, betas=(c.adam_beta1, c.adam_beta2), eps=c.adam_eps, fused=True)


def set_rate(optimizer: torch.optim.Optimizer, rate: float, c: Config) -> None:
    """Set what the settings say, over whatever a checkpoint brought along."""
    for group in optimizer.param_groups:
        group["lr"], group["betas"], group["eps"] = rate, (c.adam_beta1, c.adam_beta2), c.adam_eps
        group["weight_decay"] = c.weight_decay if group["params"][0].ndim >= 2 else 0.0
