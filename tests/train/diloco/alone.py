"""A site without others, whose syncs succeed or fail as told. All else of it is real."""

from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from tests.train.making import ALONE
from train.diloco.site import Site
from train.optim import build_optimizer


class Mean:
    """What torchft's manager is to a site.

    Args:
        sites: that take part.
        others: the sum of what the others have changed, for each of this site's sums in turn.

    Attributes:
        failing: whether the next syncs fail.
    """

    def __init__(self, sites=1, others=()):
        self.sites = sites
        self.others = list(others)
        self.failing: list[bool] = []
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
        if self.others:
            tensor.add_(self.others.pop(0))
        tensor.div_(self.sites)
        return SimpleNamespace(wait=lambda: None)

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
    """One that takes part in syncs of one site, from a checkpoint's step, tensors and facts on."""

    def __init__(self, config, model=None, step=0, tensors=None, facts=None):
        model = model or Blocks(config.sync_fragments)
        optimizer = build_optimizer(model, config)
        checkpoint = (step, tensors or {}, facts or {})
        super().__init__(config, ALONE, model, optimizer, lambda: False, *checkpoint)

    def connect(self, stop_requested):
        self.manager: Any = Mean()
        self.gloo: Any = SimpleNamespace(
            failed=None,
            sites=[0],
            is_double=False,
            bytes_sent=0,
            reset=lambda: None,
            abort=lambda: None,
        )

    def heal_from(self, other):
        """The next quorum brings the state of another site."""

        def start_quorum():
            self.take_over(other.hand_over())
            self.manager.count = other.syncs

        self.manager.start_quorum = start_quorum


def train(model, seed):
    """Change all weights, as inner steps do."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in model.parameters():
            weight.add_(0.1 * torch.randn(weight.shape, generator=source))
