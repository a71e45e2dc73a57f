"""Which conversations are held out, and how sure the model is of them.

The subset is fixed by a seeded hash of what is said, so it is the same in every run and at every evaluation, whatever
else is in the data, in which order, and whatever the model. Copies have one hash: a conversation that is held out is
scored once, and no copy of it is trained on.
"""

import math
from typing import NamedTuple

import numpy as np

from train.data.mixture import key_of, mix64

MOST_HELD_OUT = 10  # at most one in so many different conversations


class Split(NamedTuple):
    """Examples to train on and to evaluate with, (n,) int64 each; copies: of held-out ones, in neither."""

    train: np.ndarray
    held_out: np.ndarray
    copies: int


def chosen(hashes: np.ndarray, seed: int, count: int | None) -> np.ndarray:
    """(n,) int64: one example of each of the `count` different conversations of least seeded hash; None: of all.

    hashes (examples,) uint64.
    """
    different, first = np.unique(hashes, return_index=True)
    order = np.argsort(mix64(different ^ key_of(seed, "held out")), kind="stable")
    return np.sort(first[order[:count]])


def split(hashes: np.ndarray, seed: int, count: int, beside: np.ndarray | None = None) -> Split:
    """Hold out `count` different conversations, at most one in MOST_HELD_OUT; or those of other data, by their hashes
    `beside`: then none is held out, and copies of them are not trained on either."""
    if beside is None:
        held_out = chosen(hashes, seed, min(count, len(np.unique(hashes)) // MOST_HELD_OUT))
        beside = hashes[held_out]
    else:
        held_out = np.empty(0, dtype=np.int64)
    train = np.flatnonzero(~np.isin(hashes, beside))
    return Split(train, held_out, len(hashes) - len(train) - len(held_out))


def perplexity(nats: float, scored: int) -> float:
    """exp of the mean loss of the scored tokens; inf where that is beyond any number. Raises ValueError for none."""
    if scored < 1:
        raise ValueError("no token was scored")
    try:
        return math.exp(nats / scored)
    except OverflowError:
        return math.inf
