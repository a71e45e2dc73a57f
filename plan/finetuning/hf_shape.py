"""The shape of a model of transformers', by its config.json: how large each of its matrices is, and what they do.

    embedding -> blocks: attention, then an MLP, or of a mixture a router, experts and what all tokens pass -> head

Nothing of transformers is loaded. KINDS (model_type) are those whose classes are written down here, and tests hold each
weight equal to theirs. Another kind is planned as a Llama, or as a mixture where it names experts, and marked as a guess.
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
KINDS = (
    "gemma3_text",
    "glm4",
    "glm4_moe",
    "gpt_oss",
    "llama",
    "mistral",
    "mixtral",
    "olmo2",
    "phi3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "smollm3",
)
MIXTURES = ("glm4_moe", "gpt_oss", "mixtral", "qwen3_moe")
TIED = ("gemma", "gemma2", "gemma3_text", "smollm3")  # where config.json does not say it
EXPERT_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts")


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
    """times: how many blocks are like this one; norms: numbers in norms and sinks; norm_tensors: how many those are;
    wide_norms: how many of them are of the stream."""

    times: int
    matrices: tuple[Matrix, ...]
    norms: int
    norm_tensors: int = 2
    wide_norms: int = 2

    @property
    def size(self) -> int:
        return sum(matrix.size + matrix.bias for matrix in self.matrices) + self.norms

    def of(self, group: str) -> tuple[Matrix, ...]:
        return tuple(matrix for matrix in self.matrices if matrix.group == group)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model.

    Attributes:
        heads, keys: of attention, of head_dim numbers each; qk_norm: whether they are normalised.
        more: blocks after the last one that predict further tokens. The files have them; nothing trains them.
        stored: bytes of a number in the files.
        has_sinks: whether each head has a score that takes its share of the softmax and has no value.
        is_capped: whether scores go through a tanh; are_logits_capped: whether logits do.
        expert_numbers: numbers that an expert keeps for each of its width, what its products read aside: of gate, of
            its SiLU and of up; gpt_oss clips both, and keeps what goes in and what comes out.
    """

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
    has_sinks: bool = False
    is_capped: bool = False
    are_logits_capped: bool = False
    expert_numbers: int = 3

    @property
    def guessed(self) -> bool:
        """Whether no test holds this kind equal to transformers' class."""
        return self.kind not in KINDS

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
        return max(
            (matrix.number for _, matrix in self.matrices() if matrix.group == EXPERTS), default=0
        )

    @property
    def passed(self) -> int:
        """Experts that a token passes, beside those that all do."""
        return max(matrix.used for _, matrix in self.matrices()) if self.experts else 0

    def matrices(self) -> Iterator[tuple[Block, Matrix]]:
        return ((block, matrix) for block in self.blocks for matrix in block.matrices)


class Facts:
    """What config.json says."""

    def __init__(self, values: dict[str, Any]):
        self.values = values
        self.kind = str(values.get("model_type"))

    def has(self, name: str, default: Any = None) -> bool:
        return bool(self.values.get(name, default))

    def number(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Return the first of these that is given. Raises UnknownShape."""
        given = [self.values[name] for name in names if self.values.get(name) is not None]
        value = given[0] if given else default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise UnknownShape(f"config.json says {names[0]}={value!r}, which must be a number")
        return value


def shape_of(values: dict[str, Any]) -> Shape:
    """Return the shape of the model that config.json describes. Raises UnknownShape."""
    facts = Facts(values)
    kind = facts.kind
    width = facts.number("hidden_size")
    heads = facts.number("num_attention_heads")
    keys = facts.number("num_key_value_heads", default=heads)
    layers = facts.number("num_hidden_layers")
    width_of_head = 128 if kind == "qwen3" else width // max(1, heads)
    head_dim = facts.number("head_dim", default=width_of_head)
    qk_norm = kind in ("gemma3_text", "olmo2", "qwen3", "qwen3_moe") or facts.has("use_qk_norm")
    attention = attention_of(facts, width, heads * head_dim, keys * head_dim)

    wide_norms = 4 if kind in ("gemma2", "gemma3_text", "glm4") else 2
    of_heads = 0
    if qk_norm:
        of_heads = (heads + keys) * head_dim if kind == "olmo2" else 2 * head_dim
    has_sinks = kind == "gpt_oss"
    norms = wide_norms * width + of_heads + heads * has_sinks
    norm_tensors = wide_norms + 2 * qk_norm + has_sinks

    inner = facts.number("intermediate_size")
    has_bias = kind in ("llama", "smollm3") and facts.has("mlp_bias")
    mlp = swiglu("mlp.", width, inner, has_bias, is_fused=kind in ("phi3", "glm4"))
    dense = Block(layers, attention + mlp, norms, norm_tensors, wide_norms)
    blocks = [dense]
    if any(map(facts.has, EXPERT_COUNTS)):
        experts = experts_of(facts, width, inner)
        plain = dense_blocks(kind, values, layers)
        blocks = [
            dataclasses.replace(dense, times=plain),
            dataclasses.replace(dense, times=layers - plain, matrices=attention + experts),
        ]
    return Shape(
        kind=kind,
        vocabulary=facts.number("vocab_size"),
        width=width,
        heads=heads,
        keys=keys,
        head_dim=head_dim,
        qk_norm=qk_norm,
        tied=facts.has("tie_word_embeddings", kind in TIED),
        blocks=tuple(block for block in blocks if block.times),
        more=facts.number("num_nextn_predict_layers", default=0, least=0),
        stored=4 if "float32" in (values.get("dtype"), values.get("torch_dtype")) else 2,
        has_sinks=has_sinks,
        is_capped=facts.has("attn_logit_softcapping", kind == "gemma2"),
        are_logits_capped=facts.has("final_logit_softcapping", kind == "gemma2"),
        expert_numbers=6 if kind == "gpt_oss" else 3,
    )


def attention_of(facts: Facts, width: int, queries: int, keys: int) -> tuple[Matrix, ...]:
    """Return what reads queries, keys and values, and what writes. queries, keys: numbers of all heads."""
    kind = facts.kind
    is_biased = kind == "qwen2" or (
        kind not in ("mistral", "mixtral")
        and facts.has("attention_bias", kind in ("glm4", "gpt_oss"))
    )
    is_output_biased = is_biased and kind not in ("qwen2", "glm4", "glm4_moe")
    reading = [("q", queries), ("k", keys), ("v", keys)]
    if kind == "phi3":
        reading = [("qkv", queries + 2 * keys)]
    return (
        *(
            Matrix(f"self_attn.{name}_proj", ATTENTION, rows, width, bias=rows * is_biased)
            for name, rows in reading
        ),
        Matrix("self_attn.o_proj", ATTENTION, width, queries, bias=width * is_output_biased),
    )


def experts_of(facts: Facts, width: int, inner: int) -> tuple[Matrix, ...]:
    """Return the router of a mixture, its experts, and those that every token passes."""
    experts = facts.number(*EXPERT_COUNTS)
    used = facts.number("num_experts_per_tok")
    inside = facts.number("moe_intermediate_size", default=inner)
    biased = experts if facts.kind == "gpt_oss" else 0  # how many have biases
    router = "mlp.router" if facts.kind == "gpt_oss" else "mlp.gate"
    both, down = "mlp.experts.gate_up_proj", "mlp.experts.down_proj"
    shared: tuple[Matrix, ...] = ()
    if facts.kind == "glm4_moe":
        number = facts.number("n_shared_experts", default=1)
        shared = swiglu("mlp.shared_experts.", width, number * inside)
    return (
        Matrix(router, ROUTER, experts, width, bias=biased),
        Matrix(both, EXPERTS, 2 * inside, width, experts, used, bias=2 * inside * biased),
        Matrix(down, EXPERTS, width, inside, experts, used, bias=width * biased),
        *shared,
    )


def swiglu(
    where: str, width: int, inner: int, is_biased: bool = False, is_fused: bool = False
) -> tuple[Matrix, ...]:
    """gate, up and down; gate and up may be one matrix."""
    reading = [("gate", inner), ("up", inner)]
    if is_fused:
        reading = [("gate_up", 2 * inner)]
    return (
        *(
            Matrix(f"{where}{name}_proj", MLP, rows, width, bias=rows * is_biased)
            for name, rows in reading
        ),
        Matrix(f"{where}down_proj", MLP, width, inner, bias=width * is_biased),
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
