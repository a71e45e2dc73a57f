"""Keys and values of the tokens that were read, so that one more token costs one pass over one token.

    cache.start(lengths)           texts of any lengths, in one pass         rows end together:    . . a b c|
    model(tokens, cache=cache)                                                                     d e f g h|
    model(one_each, cache=cache)   a token to each text; its keys and                              . . a b c|i
                                   values go to the next column                                    d e f g h|j

All rows write to the same column, so that memory allocated once takes a token without an index. A
mask, made once per start, hides what is before a shorter row. Positions count from the first token
of each row. `Transformer.new_cache` makes one.
"""

import math
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


class KVCache:
    """The memory of some texts.

    Args:
        n_layer: layers of the model.
        shape: (rows, H_kv, length, D) of the keys of a layer: so many texts, of at most `length` tokens.
        dtype: of keys and values.
        device: where they are.

    Attributes:
        column: number of columns that are filled, the same for all rows.
        starts: (rows,) int64, the column of each row's first token.
        mask: (rows, 1, 1, length) with -inf where a row has no text; None if all begin together.
    """

    def __init__(
        self,
        n_layer: int,
        shape: tuple[int, int, int, int],
        dtype: torch.dtype,
        device: torch.device,
    ):
        self.length = shape[2]
        self.dtype = dtype
        self.device = device
        self.lengths: list[int] = []
        self.column = 0
        self.starts = torch.zeros(shape[0], dtype=torch.int64, device=device)
        self.mask: Tensor | None = None
        self.layers = [LayerCache(self, shape) for _ in range(n_layer)]

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
        return rotary[:, (self.column - self.starts)[:, None]]

    def advance(self, x: Tensor) -> Tensor:
        """Count the columns of x (B, T, C) as filled, and return (B, C) for each text's last token."""
        B, T, _ = x.shape
        last = T - 1 - self.starts if self.column == 0 else 0
        self.column += T
        return x[torch.arange(B, device=self.device), last]


class LayerCache:
    """Keys and values of one layer."""

    def __init__(self, cache: KVCache, shape: tuple[int, int, int, int]):
        self.cache = cache
        # Zeros: even what the mask hides is multiplied, and must be a finite number.
        self.keys = torch.zeros(shape, dtype=cache.dtype, device=cache.device)
        self.values = torch.zeros(shape, dtype=cache.dtype, device=cache.device)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, attend_whole: Callable[..., Tensor]
    ) -> Tensor:
        """Store keys and values, and compute attention over all that is stored.

        Args:
            q: (B, T, H, D). T is 1 except for the first pass.
            k: (B, T, H_kv, D), and so is v.
            attend_whole: the model's kernel, which reads whole texts.
        """
        B, T, H, D = q.shape
        column = self.cache.column
        if column == 0:  # rows end at the same column
            for row, length in enumerate(self.cache.lengths):
                self.keys[row, :, T - length : T] = k[row, :length].transpose(0, 1)
                self.values[row, :, T - length : T] = v[row, :length].transpose(0, 1)
            return attend_whole(q, k, v, None)
        self.keys[:, :, column] = k[:, 0]
        self.values[:, :, column] = v[:, 0]
        mask = self.cache.mask
        y = F.scaled_dot_product_attention(  # heads that share keys are rows of one product
            q.reshape(B, k.shape[2], -1, D),
            self.keys[:, :, : column + 1],
            self.values[:, :, : column + 1],
            attn_mask=None if mask is None else mask[..., : column + 1],
        )
        return y.reshape(B, 1, H, D)  # kernels differ in its strides
