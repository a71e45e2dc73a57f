"""How large a model is, by part, without building it; model.py builds it. Standard library only."""

import dataclasses

from hardware.flops import flops_per_token
from settings.config import Config


@dataclasses.dataclass(frozen=True)
class Parameters:
    """How many numbers each part of the model has. head is 0 where it is the embedding table (TIE_EMBEDDINGS)."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def total(self) -> int:
        return self.embedding + self.attention + self.mlp + self.norms + self.head

    @property
    def matmul(self) -> int:
        """Those that take part in a product for each token: N of 6 N + 12 L d T. The table counts as a head only."""
        return self.attention + self.mlp + (self.head or self.embedding)

    @property
    def hidden(self) -> int:
        """Of the matrices inside blocks, which Muon updates."""
        return self.attention + self.mlp


def parameters(c: Config) -> Parameters:
    assert c.n_kv_head and c.mlp_dim  # filled in by Config.load
    queries, keys = c.n_head * c.head_dim, c.n_kv_head * c.head_dim
    table = c.padded_vocab_size * c.n_embd
    return Parameters(
        table,
        c.n_layer * c.n_embd * (2 * queries + 2 * keys),
        c.n_layer * 3 * c.n_embd * c.mlp_dim,
        c.n_layer * (2 * c.n_embd + (2 * c.head_dim if c.qk_norm else 0)) + c.n_embd,
        0 if c.tie_embeddings else table,
    )


def flops_of(c: Config, causal: bool = False) -> float:
    """Model FLOPs of one token, forward and backward, as MFU counts them (flops.py)."""
    return flops_per_token(
        parameters(c).matmul, c.n_layer, c.n_head * c.head_dim, c.seq_len, causal
    )
