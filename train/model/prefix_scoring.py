"""Several continuations of one text, computed in one pass: the text once, then each continuation.

    trunk  a b c d          position 0 1 2 3
    branch         e f                       4 5        sees the trunk and itself
    branch             g h i                 4 5 6      sees the trunk and itself, not e and f

A row of tokens holds a trunk and its branches one after the other. Each token computes what it would
in the trunk and its branch alone, up to the order of sums. Only tokens of branches are scored. The
last token of the trunk predicts the first one of each branch.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PADDING = -1  # the branch of positions that hold nothing
ROUND = 64  # row lengths are multiples of it, so that few shapes occur

Row = tuple[Sequence[int], Sequence[Sequence[int]]]  # a trunk and its branches


@dataclasses.dataclass(frozen=True)
class Branches:
    """How rows of tokens (B, T) are trunks and branches.

    Attributes:
        positions: (B, T) int64.
        branch: (B, T) int64: 0 in the trunk, from 1 in branches, then PADDING.
        at: (n,) int64: which of the B T positions predict scored tokens.
        answers: (n,) int64: those tokens.
    """

    positions: Tensor
    branch: Tensor
    at: Tensor
    answers: Tensor

    def mask(self) -> Tensor:
        """Return (B, 1, T, T) bool: whether a query (third) may look at a key (fourth)."""
        query = self.branch[:, :, None]
        key = self.branch[:, None, :]
        T = self.branch.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=self.branch.device).tril()
        return (((query == key) | (key == 0)) & causal)[:, None]

    def to(self, device: torch.device) -> "Branches":
        parts = (self.positions, self.branch, self.at, self.answers)
        return Branches(*(part.to(device) for part in parts))


def lay_out(rows: Sequence[Row]) -> tuple[Tensor, Branches]:
    """Lay rows of (trunk, branches) out in tokens (B, T) int64, all tokens of branches scored.

    Scores come row by row, branch by branch. T is a multiple of ROUND. No trunk is empty.
    """
    longest = max(len(trunk) + sum(map(len, branches)) for trunk, branches in rows)
    length = math.ceil(longest / ROUND) * ROUND
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    positions = np.zeros_like(tokens)
    branch = np.full_like(tokens, PADDING)
    at: list[int] = []
    answers: list[int] = []
    for row, (trunk, branches) in enumerate(rows):
        start = 0
        for number, words in enumerate([trunk, *branches]):
            end = start + len(words)
            first = len(trunk) if number else 0
            tokens[row, start:end] = words
            positions[row, start:end] = np.arange(first, first + len(words))
            branch[row, start:end] = number
            if number:
                before = [first - 1, *range(start, end)][: len(words)]
                at += [row * length + place for place in before]
                answers += words
            start = end
    return torch.from_numpy(tokens), Branches(
        torch.from_numpy(positions),
        torch.from_numpy(branch),
        torch.tensor(at, dtype=torch.int64),
        torch.tensor(answers, dtype=torch.int64),
    )
