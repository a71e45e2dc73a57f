"""Keys and values of the tokens that were read, so that one more token costs one pass over one token.

    cache.start(lengths)           texts of any lengths, in one pass         rows end together:    . . a b c|
    model(tokens, cache=cache)                                                                     d e f g h|
    model(one_each, cache=cache)   a token to each text; its keys and                              . . a b c|i
                                   values go to the next column                                    d e f g h|j

All rows write to the same column, so that memory allocated once takes a token without an index. A
mask, made once per start, hides what is before a shorter row. Positions count from the first token
of each row.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:  # model.py imports this module
    from train.model.model import Transformer

Attend = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]


class KVCache:
    """The memory of `rows` texts, of at most `length` tokens each.

    Attributes:
        column: number of columns that are filled, the same for all rows.
        starts: (rows,) int64, the column of each row's first token.
        mask: (rows, 1, 1, length) with -inf where a row has no text; None if all begin together.
    """

    def __init__(self, model: "Transformer", rows: int, length: int):
        self.length = length
        self.dtype = model.dtype
        self.device = model.rotary.device
        self.lengths: list[int] = []
        self.column = 0
        self.starts = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self.mask: Tensor | None = None
        attention: Any = model.layers[0].self_attn  # all layers have this shape
        width = attention.k_proj.out_features
        self.layers = [LayerCache(self, width, attention.head_dim) for _ in model.layers]

    @property
    def is_full(self) -> bool:
        return self.column == self.length

    def start(self, lengths: Sequence[int]) -> None:
        """Forget everything. The next pass reads texts of these lengths, padded at the end."""
        self.lengths = list(lengths)
        self.column = 0
        self.starts = max(lengths) - torch.tensor(self.lengths, device=self.device)
        self.mask = None
        if min(lengths) < max(lengths):
            hidden = torch.arange(self.length, device=self.device) < self.starts[:, None]
            mask = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device)
            self.mask = mask.masked_fill_(hidden, -math.inf)[:, None, None]

    def next_rows(self, rotary: Tensor, T: int) -> Tensor:
        """Return the rows of the rotary table (2, SEQ_LEN, 1, D) for the next T tokens of each text."""
        if self.column == 0:  # texts are padded at the end
            return rotary[:, :T]
        if self.mask is None:
            return rotary[:, self.column : self.column + T]
        return rotary[:, (self.column - self.starts)[:, None]]

    def advance(self, x: Tensor) -> Tensor:
        """Count the columns of x (B, T, C) as filled, and return (B, C) for each text's last token."""
        B, T, _ = x.shape
        is_start = self.column == 0
        self.column += T
        if not is_start:
            return x[:, 0]
        return x[torch.arange(B, device=self.device), T - 1 - self.starts]


class LayerCache:
    """Keys and values of one layer, (B, H_kv, length, D) each."""

    def __init__(self, cache: KVCache, width: int, head_dim: int):
        self.cache = cache
        shape = (len(cache.starts), width // head_dim, cache.length, head_dim)
        # Zeros: even what the mask hides is multiplied, and must be a finite number.
        self.keys = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        self.values = torch.zeros(shape, dtype=cache.dtype, device=cache.device)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, attend: Attend) -> Tensor:
        """Store keys and values, and compute attention over all that is stored.

        Args:
            q: (B, T, H, D). T is 1 except for the first pass.
            k: (B, T, H_kv, D), and so is v.
            attend: the model's kernel, which reads whole texts.
        """
        column = self.cache.column
        if column == 0:
            self.store_texts(k, v)
            return attend(q, k, v, None)
        self.keys[:, :, column] = k[:, 0]
        self.values[:, :, column] = v[:, 0]
        mask = self.cache.mask
        B, _, H, D = q.shape
        y = F.scaled_dot_product_attention(  # heads that share keys are rows of one product
            q.view(B, k.shape[2], -1, D),
            self.keys[:, :, : column + 1],
            self.values[:, :, : column + 1],
            attn_mask=None if mask is None else mask[..., : column + 1],
        )
        return y.view(B, 1, H, D)

    def store_texts(self, k: Tensor, v: Tensor) -> None:
        """Store whole texts so that all rows end at the same column."""
        longest = k.shape[1]
        for row, length in enumerate(self.cache.lengths):
            columns = slice(longest - length, longest)
            self.keys[row, :, columns] = k[row, :length].transpose(0, 1)
            self.values[row, :, columns] = v[row, :length].transpose(0, 1)
