"""The outer step of DiLoCo (Douillard et al. 2023), for a fragment of the weights:

    change    = common - own                       after the site's inner steps
    mean      = mean of the changes over the sites that take part
    momentum  = OUTER_MOMENTUM x momentum + mean
    common   -= OUTER_LEARNING_RATE x (mean + OUTER_MOMENTUM x momentum)       Nesterov
    own       = common

With SYNC_DELAY training goes on while the changes travel (Douillard et al. 2025). The site then
goes on from halfway between the common weights and its own.
"""

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from settings.config import Config
from train.distributed.parallel import local, weights_of

if TYPE_CHECKING:
    from torchft.manager import Manager

OWN_SHARE = 0.5  # of a site's own weights, where it has trained while its changes traveled


class Fragment:
    """Weights that are exchanged together. Each process holds its own part of every weight.

    Attributes:
        common: name -> the weights that all sites have in common.
        momentum: name -> momentum of the outer step.
    """

    def __init__(self, model: nn.Module, names: list[str], config: Config):
        self.model = model
        self.names = names
        self.learning_rate = config.outer_learning_rate
        self.decay = config.outer_momentum
        self.is_delayed = config.sync_delay > 0
        self.changes: dict[str, Tensor] = {}
        self.pending: list[Any] = []
        self.common = {name: own.clone() for name, own in self.own().items()}
        self.momentum = {name: torch.zeros_like(own) for name, own in self.common.items()}

    def own(self) -> dict[str, Tensor]:
        """Return name -> the weights of this site, which change with them."""
        weights = weights_of(self.model)
        return {name: local(weights[name].detach()) for name in self.names}

    def send(self, manager: "Manager") -> None:
        """Begin to average what this site has changed since the last exchange."""
        for name, own in self.own().items():
            self.changes[name] = self.common[name] - own
            self.pending.append(manager.allreduce(self.changes[name]))

    def receive(self, manager: "Manager") -> bool:
        """Wait for the mean, and make the outer step. Returns False where the exchange failed.

        This site's steps are dropped then: it stands at the common weights.
        """
        for work in self.pending:
            work.wait()
        self.pending = []
        is_committed = manager.should_commit()
        is_alone = manager.num_participants() == 1
        for name, own in self.own().items():
            common = self.common[name]
            if not is_committed:
                own.copy_(common)
            elif is_alone and self.takes_the_mean and not self.is_delayed:
                common.copy_(own)  # of one site, the mean is its own weights, without rounding
            else:
                self.step(name)
                own.copy_(torch.lerp(common, own, OWN_SHARE) if self.is_delayed else common)
        self.changes = {}
        return is_committed

    @property
    def takes_the_mean(self) -> bool:
        """Whether the outer step only averages the weights of the sites."""
        return self.learning_rate == 1.0 and self.decay == 0.0

    def step(self, name: str) -> None:
        """Make Nesterov's step with the mean change of a weight."""
        mean = self.changes[name]
        momentum = self.momentum[name]
        momentum.mul_(self.decay).add_(mean)
        self.common[name].sub_(mean.add(momentum, alpha=self.decay), alpha=self.learning_rate)

    def take_common(self) -> None:
        """Replace this site's weights by the common ones."""
        for name, own in self.own().items():
            own.copy_(self.common[name])

    def declare_common(self) -> None:
        """Take this site's weights to be what all sites have in common. There is no momentum."""
        for name, own in self.own().items():
            self.common[name].copy_(own)
            self.momentum[name].zero_()


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
