"""Parameters and FLOPs of a model from its settings, without building it. Standard library only."""

from dataclasses import dataclass

from hardware.flops import flops_per_token
from settings.config import Config


@dataclass(frozen=True)
class Parameters:
    """Parameters by part. The head has 0 where it is the embedding table (TIE_EMBEDDINGS)."""

    embedding: int
    attention: int
    mlp: int
    norms: int
    head: int

    @property
    def hidden(self) -> int:
        """Return those of the matrices in blocks, which Muon updates."""
        return self.attention + self.mlp

    @property
    def matmul(self) -> int:
        """Return those that are multiplied for each token: N of 6 N + 12 L d T. The table counts as head only."""
        return self.hidden + (self.head or self.embedding)

    @property
    def total(self) -> int:
        return self.hidden + self.embedding + self.norms + self.head


def parameters(c: Config) -> Parameters:
    """Return the size of the model that model.py builds from these settings."""
    assert c.n_kv_head and c.mlp_dim  # filled in by load_config
    table = c.padded_vocab_size * c.n_embd
    heads = 2 * c.n_head + 2 * c.n_kv_head  # queries and outputs, keys and values
    norms = 2 * c.n_embd
    if c.qk_norm:
        norms += 2 * c.head_dim
    return Parameters(
        embedding=table,
        attention=c.n_layer * c.n_embd * heads * c.head_dim,
        mlp=c.n_layer * 3 * c.n_embd * c.mlp_dim,
        norms=c.n_layer * norms + c.n_embd,
        head=0 if c.tie_embeddings else table,
    )


def flops_of(c: Config, causal: bool = False) -> float:
    """Return the model FLOPs of one token, forward and backward, as MFU counts them (flops.py)."""
    width = c.n_head * c.head_dim
    return flops_per_token(parameters(c).matmul, c.n_layer, width, c.seq_len, causal)
