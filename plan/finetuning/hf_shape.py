"""The shape of a model of transformers', by its config.json: how large each of its matrices is, and what they do.

    embedding -> blocks: attention, then an MLP, or of a mixture a router, experts and what all tokens pass -> head

Nothing of transformers is loaded. Kinds (model_type) are those whose classes are written down here, and tests hold each
weight equal to theirs; of another kind nothing is guessed.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

ATTENTION, MLP, EXPERTS, ROUTER = (
    "attention",
    "mlp",
    "experts",
    "router",
)  # as LORA_TARGETS has the first three
KINDS = ("glm4_moe", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "smollm3")
MIXTURES = ("glm4_moe", "mixtral", "qwen3_moe")


class UnknownShape(Exception):
    """config.json is of a kind that is not known here, or lacks something; in a sentence."""


@dataclasses.dataclass(frozen=True)
class Matrix:
    """One of a block's. name: within its block; rows x columns, `number` of them in one packed weight, of which a token
    passes `used`; bias: how many numbers that has."""

    name: str
    group: str
    rows: int
    columns: int
    number: int = 1
    used: int = 1
    bias: int = 0

    @property
    def size(self) -> int:
        return self.number * self.rows * self.columns

    @property
    def active(self) -> int:
        """Numbers that a token is multiplied with."""
        return self.used * self.rows * self.columns


@dataclasses.dataclass(frozen=True)
class Block:
    """times: how many blocks are like this one; norms: numbers in them."""

    times: int
    matrices: tuple[Matrix, ...]
    norms: int

    @property
    def size(self) -> int:
        return sum(matrix.size + matrix.bias for matrix in self.matrices) + self.norms

    def of(self, group: str) -> tuple[Matrix, ...]:
        return tuple(matrix for matrix in self.matrices if matrix.group == group)


@dataclasses.dataclass(frozen=True)
class Shape:
    """heads, keys: of attention, of head_dim numbers each; qk_norm: whether they are normalised; more: blocks behind
    the last that predict more tokens, which are in the files and are not trained; stored: bytes of a number there."""

    kind: str
    vocabulary: int
    width: int
    heads: int
    keys: int
    head_dim: int
    qk_norm: bool
    tied: bool
    blocks: tuple[Block, ...]
    more: int = 0
    stored: int = 2

    @property
    def layers(self) -> int:
        return sum(block.times for block in self.blocks)

    @property
    def table(self) -> int:
        """Numbers of the embedding, or of the head."""
        return self.vocabulary * self.width

    @property
    def outermost(self) -> int:
        """Numbers outside of blocks: embedding, head, the last norm."""
        return self.table * (1 if self.tied else 2) + self.width

    @property
    def total(self) -> int:
        return self.outermost + sum(block.times * block.size for block in self.blocks)

    @property
    def largest(self) -> Block:
        return max(self.blocks, key=lambda block: block.size)

    @property
    def active(self) -> int:
        """Weights that take part in a product for each token: the table counts as a head only."""
        return self.table + sum(block.times * matrix.active for block, matrix in self.matrices())

    @property
    def experts(self) -> int:
        """Of a block; 0 of a dense model."""
        return (
            max((matrix.number for _, matrix in self.matrices()), default=1)
            if self.kind in MIXTURES
            else 0
        )

    @property
    def passed(self) -> int:
        """Experts that a token passes, beside those that all do."""
        return max(matrix.used for _, matrix in self.matrices()) if self.experts else 0

    def matrices(self) -> Iterator[tuple[Block, Matrix]]:
        return ((block, matrix) for block in self.blocks for matrix in block.matrices)


def shape_of(facts: dict[str, Any]) -> Shape:
    """By what config.json says. Raises UnknownShape."""
    kind = facts.get("model_type")
    if kind not in KINDS:
        raise UnknownShape(
            f"no memory model for model_type={kind}; supported are {', '.join(KINDS)}"
        )

    def number(*names: str, default: int | None = None) -> int:
        value = next((facts[name] for name in names if facts.get(name) is not None), default)
        if not isinstance(value, int) or value < 0:
            raise UnknownShape(f"config.json says {names[0]}={value!r}, which must be a number")
        return value

    width, heads = number("hidden_size"), number("num_attention_heads")
    keys, layers = number("num_key_value_heads", default=heads), number("num_hidden_layers")
    head_dim = number("head_dim", default=128 if kind == "qwen3" else width // max(1, heads))
    qk_norm = kind in ("qwen3", "qwen3_moe") or (
        kind == "glm4_moe" and bool(facts.get("use_qk_norm"))
    )
    biased = kind == "qwen2" or (
        kind not in ("mistral", "mixtral") and bool(facts.get("attention_bias"))
    )
    out_biased = biased and kind not in ("qwen2", "glm4_moe")
    attention = tuple(
        Matrix(f"self_attn.{name}_proj", ATTENTION, rows, columns, bias=rows * has)
        for name, rows, columns, has in (
            ("q", heads * head_dim, width, biased),
            ("k", keys * head_dim, width, biased),
            ("v", keys * head_dim, width, biased),
            ("o", width, heads * head_dim, out_biased),
        )
    )
    norms = 2 * width + (2 * head_dim if qk_norm else 0)
    inner = number("intermediate_size")
    has_bias = kind in ("llama", "smollm3") and bool(facts.get("mlp_bias"))
    dense = Block(0, attention + swiglu("mlp.", width, inner, has_bias), norms)
    if kind not in MIXTURES:
        blocks: list[Block] = [dataclasses.replace(dense, times=layers)]
    else:
        experts = number("num_local_experts", "num_experts", "n_routed_experts")
        inside = inner if kind == "mixtral" else number("moe_intermediate_size")
        used = number("num_experts_per_tok")
        shared = number("n_shared_experts", default=1) if kind == "glm4_moe" else 0
        mixture = Block(
            0,
            (
                *attention,
                Matrix("mlp.gate", ROUTER, experts, width),
                Matrix("mlp.experts.gate_up_proj", EXPERTS, 2 * inside, width, experts, used),
                Matrix("mlp.experts.down_proj", EXPERTS, width, inside, experts, used),
                *(swiglu("mlp.shared_experts.", width, shared * inside) if shared else ()),
            ),
            norms,
        )
        plain = dense_blocks(kind, facts, layers)
        blocks = [
            dataclasses.replace(dense, times=plain),
            dataclasses.replace(mixture, times=layers - plain),
        ]
    return Shape(
        kind,
        number("vocab_size"),
        width,
        heads,
        keys,
        head_dim,
        qk_norm,
        bool(facts.get("tie_word_embeddings", kind == "smollm3")),
        tuple(block for block in blocks if block.times),
        number("num_nextn_predict_layers", default=0),
        4 if "float32" in (facts.get("dtype"), facts.get("torch_dtype")) else 2,
    )


def swiglu(where: str, width: int, inner: int, biased: bool = False) -> tuple[Matrix, ...]:
    """gate, up and down."""
    return (
        Matrix(f"{where}gate_proj", MLP, inner, width, bias=inner * biased),
        Matrix(f"{where}up_proj", MLP, inner, width, bias=inner * biased),
        Matrix(f"{where}down_proj", MLP, width, inner, bias=width * biased),
    )


def dense_blocks(kind: str, facts: dict[str, Any], layers: int) -> int:
    """How many blocks of a mixture have a plain MLP."""
    if kind == "glm4_moe":
        return min(layers, int(facts.get("first_k_dense_replace", 1)))
    if kind == "qwen3_moe":
        step, plain = (
            int(facts.get("decoder_sparse_step") or 1),
            set(facts.get("mlp_only_layers") or ()),
        )
        return sum(i in plain or (i + 1) % step != 0 for i in range(layers))
    return 0
