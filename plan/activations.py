"""What one block keeps for backward, in bytes, by what train/model/model.py and torch's autograd do with it.

    x -> norm -> q, k, v -> rotate -> attention -> o, + x -> norm -> gate, up -> silu(gate) * up -> down, + x

The residual stream is kept by nothing but a norm; what a product reads is kept for the gradient of its weight. n is the
tokens of a micro-batch, C the width, K that of keys, M inside the SwiGLU, s bytes of DTYPE.
"""

import dataclasses

from settings.config import Config

SHORT = 512  # cpu_kernels.SHORT: windows up to which a CPU in bfloat16 takes the products
FLOPS_WORTH_COMPILING_ON_CPU = (
    5e13  # compilation.py's; both modules import torch, and a test holds these equal
)


def item_bytes(c: Config) -> int:
    """Of a number in DTYPE."""
    return {"float32": 4, "bfloat16": 2}[c.dtype]


def by_products(c: Config, on_cpu: bool) -> bool:
    """Whether attention holds all T x T scores (attention.choose)."""
    return c.attention == "math" or (
        c.attention == "auto" and on_cpu and c.dtype == "bfloat16" and c.seq_len <= SHORT
    )


def by_mask(c: Config, on_cpu: bool) -> bool:
    """Whether documents are kept apart by a mask of T x T rather than by their bounds (attention.choose)."""
    return c.doc_mask and (
        on_cpu or c.dtype != "bfloat16" or c.attention == "math" or c.head_dim % 8 != 0
    )


@dataclasses.dataclass(frozen=True)
class Block:
    """Bytes of one block for a micro-batch of so many tokens.

    kept: from its forward to its backward; whole: what its backward starts from, which is more where it computes anew;
    passing: what backward adds for a moment on top of that, at its largest.
    """

    kept: float
    whole: float
    passing: float


def block(c: Config, tokens: int, on_cpu: bool, compiled: bool) -> Block:
    """A block with ACTIVATION_CHECKPOINTING as it is set."""
    s, C, M = item_bytes(c), c.n_embd, c.mlp_dim or 0
    whole = (kept_compiled if compiled else kept_eager)(c, on_cpu)
    scores = scores_bytes(c, on_cpu)
    # the MLP's backward: d product, d silu and d up at once while the product itself is gone, and the gradient of the
    # stream; compiled code writes two of them in place. With scores, theirs: d probability and d score
    mlp = s * C + s * (1 if compiled else 2) * M
    attention = s * C + 2 * scores - s * (4 if not compiled else 3) * M
    passing = max(mlp, attention)
    # compiled code keeps of what it computes anew the numbers a row and a head, and no product that is never read
    few = 8 + 4 * c.n_head if compiled else 0
    kept = {
        "none": whole,
        "full": s * C + few,
        "selective": s * C + products(c, on_cpu) - (s * C if compiled else 0),
    }[c.activation_checkpointing]
    return Block(tokens * kept, tokens * whole, tokens * passing)


def widths(c: Config) -> tuple[int, int]:
    """(K, query heads a key head serves)"""
    heads = c.n_kv_head or c.n_head
    return heads * c.head_dim, c.n_head // heads


def scores_bytes(c: Config, on_cpu: bool) -> float:
    """Of a token's T scores in all heads, where they are in memory."""
    return (
        item_bytes(c) * c.n_head * c.seq_len if by_products(c, on_cpu) and not c.doc_mask else 0.0
    )


def attention_bytes(c: Config, on_cpu: bool) -> float:
    """Of a token: what the kernel reads and gives, and a logarithm a head; or copies for the products and their scores.
    A mask is made a number of DTYPE for each pair of positions."""
    s, C, (K, _) = item_bytes(c), c.n_embd, widths(c)
    if scores := scores_bytes(c, on_cpu):
        return s * 4 * C + scores
    mask = s * c.seq_len if by_mask(c, on_cpu) else 0
    return s * (2 * C + 2 * K) + 4 * c.n_head + mask


def norm_bytes(c: Config, on_cpu: bool) -> float:
    """What a norm of a width of one keeps, its result included, as it is written: on CPU its result before and behind
    its weight; on a GPU in float32 its input and its result, in bfloat16 its input made float32 and both results."""
    return 8 if c.dtype == "bfloat16" and not on_cpu else 2 * item_bytes(c)


def kept_eager(c: Config, on_cpu: bool) -> float:
    """Of a token in a block as it is written."""
    s, C, M, (K, _) = item_bytes(c), c.n_embd, c.mlp_dim or 0, widths(c)
    norm = norm_bytes(c, on_cpu)
    heads = (norm - s) * (C + K) + 4 * (c.n_head + (c.n_kv_head or c.n_head)) if c.qk_norm else 0
    return 2 * (norm * C + 4) + heads + attention_bytes(c, on_cpu) + 4 * s * M


def kept_compiled(c: Config, on_cpu: bool) -> float:
    """Of a token in a compiled block: what torch's partitioner keeps is what products read or gave, the stream before
    each norm, and of each norm a number a row; the rest it computes anew. On a CPU that is also what a norm and the
    MLP's two products give to the next product, and of scores it then keeps two numbers a row more
    (compilation.compile_model)."""
    s, C, M, (K, _) = item_bytes(c), c.n_embd, c.mlp_dim or 0, widths(c)
    heads = s * (C + K) + 4 * (c.n_head + (c.n_kv_head or c.n_head)) if c.qk_norm else 0
    kept = 4 * s * C + 8 + heads + attention_bytes(c, on_cpu) + 3 * s * M
    if not on_cpu or c.activation_checkpointing != "none":
        return kept
    return kept - s * (2 * C + M) + (8 * c.n_head if scores_bytes(c, on_cpu) and s < 4 else 0)


def products(c: Config, on_cpu: bool) -> float:
    """Of a token: the results of products and attention (recompute.policy)."""
    s, C, M, (K, _) = item_bytes(c), c.n_embd, c.mlp_dim or 0, widths(c)
    scores = scores_bytes(c, on_cpu)
    return s * (3 * C + 2 * K + 2 * M) + (scores + s * C if scores else s * C + 4 * c.n_head)


def compiled(c: Config, on_cpu: bool, work: float) -> bool:
    """Whether a run of `work` FLOPs is compiled (compilation.wanted, where a compiler is there)."""
    return c.compile == "1" or (
        c.compile == "auto" and (not on_cpu or work >= FLOPS_WORTH_COMPILING_ON_CPU)
    )
