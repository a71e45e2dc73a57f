"""The outer step of DiLoCo (Douillard et al. 2023), for a fragment of the weights at a time:

    change    = global - own                       after the site's inner steps
    mean      = mean of the changes over the sites that take part
    momentum  = OUTER_MOMENTUM x momentum + mean
    global   -= OUTER_LEARNING_RATE x (mean + OUTER_MOMENTUM x momentum)       Nesterov
    own       = global

With SYNC_DELAY training goes on while the changes travel (Douillard et al. 2025). The site then
goes on from halfway between the global weights and its own.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from settings.config import Config
from train.distributed.parallel import local, weights_of

if TYPE_CHECKING:
    from torchft.manager import Manager

OWN_SHARE = 0.5  # of a site's own weights, where it has trained while its changes traveled


class OuterOptimizer:
    """The global weights, and what optimizes them. Each process holds its own part of every weight.

    Attributes:
        fragments: names of the weights that are synced together, for each fragment.
        weights: name -> global weights: those that all sites have in common, sharded as the
            model's are.
        momentum: name -> momentum of the outer step, sharded alike.
        changes: name -> change of a weight that travels, or its mean.
    """

    def __init__(self, model: nn.Module, config: Config):
        """Take the model's weights to be the global ones. There is no momentum."""
        weights = weights_of(model)
        sizes = {name: weight.numel() for name, weight in weights.items()}
        self.model = model
        self.learning_rate = config.outer_learning_rate
        self.decay = config.outer_momentum
        self.is_delayed = config.sync_delay > 0
        self.fragments = divide(sizes, config.sync_fragments)
        self.weights = {name: weight.detach().clone() for name, weight in weights.items()}
        self.momentum = {name: torch.zeros_like(weight) for name, weight in self.weights.items()}
        self.changes: dict[str, Tensor] = {}
        self.pending: list[Any] = []

    def tensors(self) -> dict[str, Tensor]:
        """Return weights.NAME and momentum.NAME, as checkpoints have them."""
        tensors = {}
        for name, weights in self.weights.items():
            tensors[f"weights.{name}"] = weights
            tensors[f"momentum.{name}"] = self.momentum[name]
        return tensors

    def parts(self, names: Iterable[str]) -> list[tuple[str, Tensor, Tensor]]:
        """Return (name, own, global) of weights: this process's parts, which change with them."""
        weights = weights_of(self.model)
        return [(name, local(weights[name].detach()), local(self.weights[name])) for name in names]

    def send(self, fragment: int, manager: "Manager") -> None:
        """Begin to average what this site has changed since the last sync."""
        for name, own, common in self.parts(self.fragments[fragment]):
            self.changes[name] = common - own
            self.pending.append(manager.allreduce(self.changes[name]))

    def receive(self, manager: "Manager") -> bool:
        """Wait for the mean, and make the outer step. Returns False where the sync failed.

        This site's steps are dropped then: it has the global weights.
        """
        for work in self.pending:
            work.wait()
        self.pending = []
        is_committed = manager.should_commit()
        is_alone = manager.num_participants() == 1
        for name, own, common in self.parts(self.changes):
            if not is_committed:
                own.copy_(common)
            elif is_alone and self.takes_the_mean and not self.is_delayed:
                common.copy_(own)  # of one site, the mean is its own weights, without rounding
            else:
                self.step(name, common)
                own.copy_(torch.lerp(common, own, OWN_SHARE) if self.is_delayed else common)
        self.changes = {}
        return is_committed

    @property
    def takes_the_mean(self) -> bool:
        """Whether the outer step only averages the weights of the sites."""
        return self.learning_rate == 1.0 and self.decay == 0.0

    def step(self, name: str, common: Tensor) -> None:
        """Make Nesterov's step with the mean change of a weight."""
        mean = self.changes[name]
        momentum = local(self.momentum[name])
        momentum.mul_(self.decay).add_(mean)
        common.sub_(mean.add(momentum, alpha=self.decay), alpha=self.learning_rate)

    def reset_to_global(self) -> None:
        """Replace this site's weights by the global ones."""
        for _, own, common in self.parts(self.weights):
            own.copy_(common)


def divide(sizes: dict[str, int], count: int) -> list[list[str]]:
    """Divide weights into fragments: blocks in turn (Douillard et al. 2025), the rest with the smallest.

    Args:
        sizes: name -> numbers of a weight, of all weights.

    Returns:
        The names of each fragment.
    """
    fragments: list[list[str]] = [[] for _ in range(count)]
    rest = []
    for name in sizes:
        if name.startswith("layers."):
            block = int(name.split(".")[1])
            fragments[block % count].append(name)
        else:
            rest.append(name)
    smallest = min(fragments, key=lambda names: sum(sizes[name] for name in names))
    smallest.extend(rest)
    return fragments
