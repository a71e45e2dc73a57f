"""A site without others, whose exchanges succeed or fail as told. All else of it is real."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from train.diloco.outer_step import Fragment, divide
from train.diloco.site import Site
from train.optim import build_optimizer


class Mean:
    """What torchft's manager is to a site.

    Args:
        sites: that take part.
        others: the sum of what the others have changed, for each of this site's sums in turn.
    """

    def __init__(self, sites=1, others=None):
        self.sites = sites
        self.others = list(others or [])
        self.failing: list[bool] = []  # whether the next exchanges fail
        self.count = 0

    def start_quorum(self):
        pass

    def num_participants(self):
        return self.sites

    def current_step(self):
        return self.count

    def load_state_dict(self, state):
        self.count = state["step"]

    def allreduce(self, tensor):
        def wait():
            if self.others:
                tensor.add_(self.others.pop(0))
            tensor.div_(self.sites)

        return SimpleNamespace(wait=wait)

    def should_commit(self):
        fails = bool(self.failing) and self.failing.pop(0)
        self.count += not fails
        return not fails


class Blocks(nn.Module):
    """Numbers, named as a model's weights are."""

    compiled = False

    def __init__(self, blocks):
        super().__init__()
        self.embed_tokens = nn.Parameter(torch.ones(3))
        self.layers = nn.ModuleList([nn.Linear(2, 1, bias=False) for _ in range(blocks)])


class Alone(Site):
    """One that takes part in exchanges of one site."""

    def __init__(self, config, model=None):
        model = model or Blocks(config.sync_fragments)
        self.config = config
        self.world: Any = SimpleNamespace(size=1)
        self.model = model
        self.optimizer = build_optimizer(model, config)
        self.step = self.exchanges = self.base = self.lands_at = 0
        self.turn = config.sync_every // config.sync_fragments
        self.finished = -1
        self.in_flight = None
        self.present = 1
        self.healed_at = None
        self.manager: Any = Mean()
        self.striped: Any = SimpleNamespace(
            failed=None,
            sites=[0],
            is_double=False,
            bytes_sent=0,
            reset=lambda: None,
            abort=lambda: None,
        )
        sizes = {name: weight.numel() for name, weight in model.named_parameters()}
        names = divide(sizes, config.sync_fragments)
        self.fragments = [Fragment(model, part, config) for part in names]
        self.digests = [self.digest(fragment) for fragment in self.fragments]
