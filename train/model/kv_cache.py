"""A model that remembers keys and values of the tokens it has read, so that one more costs one pass over one token.

    read    texts of any lengths, in one pass           rows end together:    . . a b c|
            whose last logits come back                                       d e f g h|
    add     a token to each text; its keys and values                         . . a b c|i
            go behind, its query sees the row                                 d e f g h|j

All rows write to the same column, so that memory laid out once takes a token without an index; what is before a
shorter row is hidden by a mask, also made once. Positions count from each row's own first token.

The modules are the model's own: copies that share their weights, but for attention's kernel, which is a cache's here.
Only where DTYPE is not float32 the weights are cast, once and not for each token; that takes half as much again.
"""

import copy
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from train.model.attention import Kernel
from train.model.model import Transformer


class Cache:
    """A model and its memory of `rows` texts, of at most `length` tokens each: (layers, B, H_kv, length, D) twice.

    For a model that is whole in this process; it is left as it is, and must not train meanwhile.
    """

    def __init__(self, model: Transformer, rows: int, length: int):
        self.model, self.length = twin(model, model.dtype, {}), length
        self.lengths, self.column = list[int](), 0
        self.mask: Tensor | None = None
        self.starts = torch.zeros(rows, dtype=torch.int64, device=model.rotary.device)
        for layer in self.model.layers:
            attention: Any = layer.self_attn
            heads = attention.k_proj.weight.shape[0] // attention.head_dim
            memory = torch.zeros(
                2,
                rows,
                heads,
                length,
                attention.head_dim,
                dtype=model.dtype,
                device=model.rotary.device,
            )
            attention.kernel = Kernel(
                "cache", Remembering(self, model.kernel, memory), by_bounds=False
            )

    @property
    def is_full(self) -> bool:
        return self.column == self.length

    @torch.inference_mode()
    def read(self, texts: Sequence[Sequence[int]]) -> Tensor:
        """(B, padded V) logits behind each text, none of which is empty; what was read before is forgotten."""
        self.lengths, device = list(map(len, texts)), self.starts.device
        self.column = 0
        longest = max(self.lengths)
        tokens = torch.tensor(
            [[*text, *[0] * (longest - len(text))] for text in texts], device=device
        )
        x = self.model.through(tokens, self.model.rotary[:, :longest])
        last = torch.tensor(self.lengths, device=device) - 1
        self.column, self.mask = longest, None
        self.starts = longest - 1 - last
        if min(self.lengths) < longest:
            hidden = torch.arange(self.length, device=device) < self.starts[:, None]
            self.mask = torch.zeros(
                hidden.shape, dtype=self.model.dtype, device=device
            ).masked_fill_(hidden, -math.inf)[:, None, None]
        return self.model.lm_head(x[torch.arange(len(texts), device=device), last])

    @torch.inference_mode()
    def add(self, tokens: Tensor) -> Tensor:
        """(B, padded V) logits behind one more token of each text, (B,) int64."""
        rotary = self.model.rotary
        at = (
            rotary[:, self.column : self.column + 1]
            if self.mask is None
            else rotary[:, (self.column - self.starts)[:, None]]
        )
        x = self.model.through(tokens[:, None], at)
        self.column += 1
        return self.model.lm_head(x[:, 0])


class Remembering:
    """The attention of one layer: keys and values are written down, and queries see those of their row."""

    def __init__(self, cache: Cache, kernel: Kernel, memory: Tensor):
        self.cache, self.kernel = cache, kernel
        self.keys, self.values = memory

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, apart: Tensor | None) -> Tensor:
        """As attention.Kernel has it: of whole texts where nothing is remembered, else of a token each."""
        column = self.cache.column
        if column == 0:
            self.write(k, v)
            return self.kernel.attend(q, k, v, None)
        self.keys[:, :, column] = k[:, 0]
        self.values[:, :, column] = v[:, 0]
        seen, mask = column + 1, self.cache.mask
        B, _, H, D = q.shape
        y = F.scaled_dot_product_attention(  # heads that share keys are rows of one product
            q.view(B, k.shape[2], -1, D),
            self.keys[:, :, :seen],
            self.values[:, :, :seen],
            attn_mask=None if mask is None else mask[..., :seen],
        )
        return y.view(B, 1, H, D)

    def write(self, k: Tensor, v: Tensor) -> None:
        """Have all rows end at one column. What is before a row must be a number: even a hidden one is multiplied."""
        longest = k.shape[1]
        for row, length in enumerate(self.cache.lengths):
            for memory, new in ((self.keys, k), (self.values, v)):
                memory[row, :, longest - length : longest] = new[row, :length].transpose(0, 1)


def twin(module: Any, dtype: torch.dtype, cast: dict[Tensor, Tensor]) -> Any:
    """A module of the same weights, in this type, whose parts can be changed without changing the first.

    cast: what was cast already, so that a tied head stays the table. Not compiled, though the first may be.
    """
    made = copy.copy(module)
    made.__dict__.pop("forward", None)  # compilation.py puts it there, bound to the first
    made._parameters = {
        name: cast.setdefault(weight, in_type(weight, dtype))
        for name, weight in module._parameters.items()
        if weight is not None
    }
    made._buffers = {name: buffer.to(dtype) for name, buffer in module._buffers.items()}
    made._modules = {name: twin(part, dtype, cast) for name, part in module._modules.items()}
    return made


def in_type(weight: Tensor, dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(weight.detach().to(dtype), requires_grad=False)
