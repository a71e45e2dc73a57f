"""How SYNC_FRAGMENTS divides the weights that sites synchronize."""

from hardware.model_size import parameters
from settings.config import Config


def fragment_shares(config: Config, count: int) -> list[float]:
    """Return the share of all weights in each fragment, as train/diloco/outer_step.py makes them.

    Blocks are dealt out by turns; embedding and head go with the smallest fragment.
    """
    sizes = parameters(config)
    outside = sizes.embedding + sizes.head
    each = (sizes.total - outside) / config.n_layer
    fragments = [each * len(range(first, config.n_layer, count)) for first in range(count)]
    fragments[fragments.index(min(fragments))] += outside
    return [fragment / sizes.total for fragment in fragments]
