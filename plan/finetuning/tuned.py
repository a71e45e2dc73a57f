"""What a fine-tuning trains, and what follows from it: parameters, work, what processes send, what a checkpoint takes.

    all weights    float32, with moments                              LORA_RANK=0
    adapters       rank x (rows + columns) beside a matrix, float32   LORA_RANK above 0; what they adapt is of DTYPE

finetune/adapter.py joins them and finetune/main.py counts the work; tests hold both equal to this.
"""

import dataclasses

from plan.finetuning.hf_shape import ATTENTION, EXPERTS, MLP, ROUTER, Block, Matrix, Shape
from plan.storage import TENSOR_BYTES
from settings import SettingsError
from settings.config import Config

FLOAT = 4  # bytes of a float32
OF_MIXTURES = (
    "gate_proj",
    "up_proj",
    "down_proj",
)  # of a mixture's kind peft adapts them as parameters (adapter.py)
HEADER_BYTES = 150  # of a tensor in a safetensors file, at most


def item_bytes(c: Config) -> int:
    """Of a number in DTYPE."""
    return {"float32": FLOAT, "bfloat16": 2}[c.dtype]


@dataclasses.dataclass(frozen=True)
class Sent:
    """What the processes of a copy send each other in a step, in bytes.

    Attributes:
        gradients: of what is trained, in float32.
        weights: that FSDP2 gathers in a forward pass.
        again: of these, those that it gathers once more in the backward pass: the blocks.
        blocks: how many there are.
    """

    gradients: float
    weights: float
    again: float
    blocks: int


@dataclasses.dataclass(frozen=True)
class Tuned:
    """A shape with what is trained of it. adapted: names within a block."""

    c: Config
    shape: Shape
    adapted: frozenset[str]

    @property
    def lora(self) -> bool:
        return self.c.lora_rank > 0

    @property
    def base_bytes(self) -> int:
        """Of a number of the weights that adapters are beside, or of one that is trained."""
        return item_bytes(self.c) if self.lora else FLOAT

    def adapter(self, matrix: Matrix) -> int:
        """Numbers in the adapter of a matrix, or of a stack of them."""
        if matrix.name not in self.adapted:
            return 0
        return self.c.lora_rank * matrix.number * (matrix.rows + matrix.columns)

    def adapters_of(self, block: Block) -> int:
        return sum(map(self.adapter, block.matrices))

    @property
    def adapters(self) -> int:
        return sum(block.times * self.adapters_of(block) for block in self.shape.blocks)

    @property
    def trained(self) -> int:
        return self.adapters if self.lora else self.shape.total

    @property
    def trained_tensors(self) -> int:
        """How many weights that are."""
        if self.lora:
            return sum(
                2 * block.times * (matrix.name in self.adapted)
                for block, matrix in self.shape.matrices()
            )
        return (2 if self.shape.tied else 3) + sum(
            block.times
            * (
                block.norm_tensors
                + len(block.matrices)
                + sum(matrix.bias > 0 for matrix in block.matrices)
            )
            for block in self.shape.blocks
        )

    def merged(self, block: Block) -> int:
        """Numbers of the weights of a block that exist once more where they are used, with their adapters in them:
        peft does so with what it adapts as parameters."""
        return sum(matrix.size for matrix in block.matrices if self.is_merged(matrix))

    def is_merged(self, matrix: Matrix) -> bool:
        named = self.shape.experts > 0 and matrix.name.rpartition(".")[2] in OF_MIXTURES
        return matrix.name in self.adapted and (named or matrix.group == EXPERTS)

    # ---- Work

    def flops(self, causal: bool = False) -> float:
        """Of a token, forward and backward: 6 for a weight that is trained, 4 for one that is not."""
        each, total = 4.0 if self.lora else 6.0, each_table(self)
        for block, matrix in self.shape.matrices():
            share = matrix.used / matrix.number
            total += block.times * (each * matrix.active + 6.0 * self.adapter(matrix) * share)
        return total + (6.0 if causal else 12.0) * self.attention

    @property
    def attention(self) -> int:
        """Layers x width of attention x SEQ_LEN."""
        return self.shape.layers * self.shape.heads * self.shape.head_dim * self.c.seq_len

    @property
    def forward_flops(self) -> float:
        """Of a token, forward alone."""
        total = 2.0 * self.shape.table + 4.0 * self.attention
        for block, matrix in self.shape.matrices():
            total += (
                2.0
                * block.times
                * (matrix.active + self.adapter(matrix) * matrix.used / matrix.number)
            )
        return total

    # ---- Between processes, and on disk

    @property
    def sent(self) -> Sent:
        """What processes send each other in a step."""
        width, whole = item_bytes(self.c), self.shape.total + self.adapters
        return Sent(
            float(FLOAT * self.trained),
            float(width * whole),
            float(width * (whole - self.shape.outermost)),
            self.shape.layers,
        )

    @property
    def lite_bytes(self) -> float:
        """Of a checkpoint that holds adapters alone."""
        return float(FLOAT * self.adapters + HEADER_BYTES * self.trained_tensors)

    @property
    def full_bytes(self) -> float:
        """Of one that holds what is trained, two moments and a count of each."""
        return float(3 * FLOAT * self.trained + 4 * TENSOR_BYTES * self.trained_tensors)


def each_table(t: Tuned) -> float:
    """The head's work; of an embedding that is the head as well."""
    return (4.0 if t.lora else 6.0) * t.shape.table


def tuned_of(c: Config, shape: Shape) -> Tuned:
    """c on a model of that shape. Raises SettingsError where one of LORA_TARGETS is nowhere in it."""
    if not c.lora_rank:
        return Tuned(c, shape, frozenset())
    chosen, nowhere = set[str](), []
    for target in c.lora_targets.split(","):
        matches = {matrix.name for _, matrix in shape.matrices() if is_target(target, matrix)}
        nowhere += [] if matches else [target]
        chosen |= matches
    if nowhere == [MLP] and shape.experts and chosen:
        nowhere = []  # of a mixture that has experts alone, as finetune/adapter.py has it
    if nowhere:
        groups = {matrix.group for _, matrix in shape.matrices()}
        there = sorted(
            {
                matrix.name.rpartition(".")[2]
                for _, matrix in shape.matrices()
                if matrix.group != ROUTER
            }
        )
        raise SettingsError(
            [
                f"LORA_TARGETS={c.lora_targets}: the model has no {', '.join(nowhere)}; there are "
                f"{', '.join([*(one for one in (ATTENTION, MLP, EXPERTS) if one in groups), *there])}"
            ]
        )
    return Tuned(c, shape, frozenset(chosen))


def is_target(target: str, matrix: Matrix) -> bool:
    """Whether one of LORA_TARGETS means this matrix."""
    if matrix.group == ROUTER:
        return False
    if target in (ATTENTION, MLP, EXPERTS):
        return matrix.group == target
    return f".{matrix.name}".endswith(f".{target}")
