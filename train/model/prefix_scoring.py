"""Several continuations of one text, read in one pass: the text once, each continuation behind it.

    trunk  a b c d          position 0 1 2 3
    branch         e f                       4 5        sees the trunk and itself
    branch             g h i                 4 5 6      sees the trunk and itself, not e and f

A row of tokens holds a trunk and its branches one behind the other. What a token computes is what it would in the trunk
and its branch alone, but for the order of sums. Scored are tokens of branches only; the first of each is predicted
behind the last token of the trunk.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

PADDING = -1  # the branch of positions that hold nothing


@dataclasses.dataclass(frozen=True)
class Branches:
    """How rows of tokens (B, T) are trunks and branches.

    positions (B, T) int64; branch (B, T) int64: 0 in the trunk, from 1 in branches, PADDING behind them; at (n,) int64:
    which of the B T positions predict scored tokens; answers (n,) int64: those tokens.
    """

    positions: Tensor
    branch: Tensor
    at: Tensor
    answers: Tensor

    def mask(self) -> Tensor:
        """(B, 1, T, T) bool: whether a query (third) may look at a key (fourth)."""
        query, key = self.branch[:, :, None], self.branch[:, None, :]
        T = self.branch.shape[1]
        causal = torch.ones(T, T, dtype=torch.bool, device=self.branch.device).tril()
        return (((query == key) | (key == 0)) & causal)[:, None]

    def to(self, device: torch.device) -> "Branches":
        return Branches(
            *(getattr(self, field.name).to(device) for field in dataclasses.fields(self))
        )


def laid_out(
    rows: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], length: int
) -> tuple[Tensor, Branches]:
    """(tokens (B, length) int64, their Branches) of rows of (trunk, branches); scored are all tokens of branches, row
    by row, branch by branch. Raises ValueError where a row is longer than length, or has an empty trunk."""
    tokens = np.zeros((len(rows), length), dtype=np.int64)
    positions, branch = np.zeros_like(tokens), np.full_like(tokens, PADDING)
    at, answers = list[int](), list[int]()
    for row, (trunk, branches) in enumerate(rows):
        if not trunk or len(trunk) + sum(map(len, branches)) > length:
            raise ValueError(
                f"row {row} has {len(trunk)} tokens of trunk and {sum(map(len, branches))} of branches; "
                f"it must have a trunk, and at most {length} in all"
            )
        end = len(trunk)
        tokens[row, :end], positions[row, :end], branch[row, :end] = trunk, np.arange(end), 0
        for number, words in enumerate(branches, start=1):
            place = slice(end, end + len(words))
            tokens[row, place], branch[row, place] = words, number
            positions[row, place] = np.arange(len(trunk), len(trunk) + len(words))
            at += [
                row * length + i
                for i in [len(trunk) - 1, *range(end, end + len(words) - 1)][: len(words)]
            ]
            answers += words
            end += len(words)
    return torch.from_numpy(tokens), Branches(
        torch.from_numpy(positions),
        torch.from_numpy(branch),
        torch.tensor(at, dtype=torch.int64),
        torch.tensor(answers, dtype=torch.int64),
    )
