"""The memory of one process that fine-tunes, by part; as in plan/memory.py the largest of its moments counts.

    loading      the weights that are there so far, and one that is packed of its parts
    loss         all activations, and the chunks of the loss
    backward     all activations, and what the last block's backward adds
    sending      FSDP2: the gradients of a block as they were made and as they are sent
    end          all gradients, that of the embedding among them
    evaluation   a micro-batch, of which nothing is kept for backward

A block is that of transformers' classes as they are written: norms in float32, keys and values once for each head, a
mixture's experts by grouped products of rows that were sorted by expert. Of a mixture the largest block counts for all
of its kind. s is the bytes of DTYPE, C the width.
"""

import dataclasses
import math

from plan.activations import item_bytes
from plan.finetuning.hf_shape import ATTENTION, EXPERTS, MLP, ROUTER, Block, Matrix
from plan.finetuning.tuned import Tuned
from plan.memory import (
    CHUNK_TOKENS,
    CHUNK_TOKENS_ON_CPU,
    CUBLAS,
    FRAGMENTS,
    HOLES,
    HOLES_AT_LEAST,
    HOLES_COMPUTED_ANEW,
    HOLES_OF_LOGITS,
    HOLES_OF_ONE_MICRO_BATCH,
    JOINED,
    MORE_HOLES_OF_SEVERAL,
    PYTHON_AND_TORCH,
    ROWS_IN_CACHE,
    Memory,
)
from settings.checks import find_batch_problem
from settings.config import Config

FLOAT, INDEX = 4, 8
PARTS = (
    "frozen",
    "trained",
    "gradients",
    "optimizer",
    "gathered",
    "activations",
    "logits",
    "other",
)
TRANSFORMERS = (
    150 * 2**20
)  # of a process: 5.23 with peft 0.21 and what they import, measured at 128 MiB beside torch
AT_ONCE = 4  # weights that transformers' loader has in the making at once, on the host


@dataclasses.dataclass(frozen=True)
class Case:
    """shards: processes that share one copy of the weights; tokens: of a micro-batch; accumulates: whether a step has
    several."""

    t: Tuned
    processes: int
    shards: int
    on_cpu: bool
    tokens: int
    accumulates: bool

    @property
    def c(self) -> Config:
        return self.t.c

    @property
    def split(self) -> bool:
        return self.shards > 1

    @property
    def s(self) -> int:
        return item_bytes(self.c)

    @property
    def autocast(self) -> bool:
        """Whether torch makes copies in DTYPE where products need them; FSDP2 does so where it gathers."""
        return self.s < FLOAT and not self.split

    @property
    def stream(self) -> int:
        """Bytes of a number of the residual stream, which has the type of the embedding."""
        return FLOAT if self.autocast and not self.t.lora else self.s

    @property
    def trained(self) -> bool:
        """Whether all weights are."""
        return not self.t.lora

    @property
    def drops(self) -> bool:
        """Whether adapters read what dropout has left of their input."""
        return self.t.lora and self.c.lora_dropout > 0

    @property
    def mask(self) -> int:
        """Bytes of a number in a mask of dropout: on GPUs whether it stays, on CPUs by what it is multiplied with, in
        the type of peft's input."""
        return 1 if not self.on_cpu else FLOAT if self.autocast else self.s

    def read(self, matrix: Matrix) -> bool:
        """Whether what a matrix reads is kept, for the gradient of it or of its adapter."""
        return self.trained or matrix.name in self.t.adapted


def case(t: Tuned, processes: int, processes_of_a_node: int, on_cpu: bool) -> Case:
    c, shards = t.c, 1
    micro = max(1, c.micro_batch(processes))
    if processes > 1 and c.parallel != "ddp":
        shards = processes if c.parallel == "fsdp" else c.shard_ranks or processes_of_a_node
    return Case(
        t, processes, shards, on_cpu, micro * c.seq_len, c.batch_windows // processes > micro
    )


def memory(t: Tuned, processes: int, processes_of_a_node: int, on_cpu: bool) -> Memory:
    """Of one of so many processes, gradients of earlier micro-batches and moments being there."""
    k = case(t, processes, processes_of_a_node, on_cpu)
    found = {
        "loading": loading(k),
        "loss": at_loss(k),
        "backward": in_backward(k),
        "sending": at_sending(k),
        "end": at_end(k),
        "evaluation": at_evaluation(k),
    }
    moment, parts = max(found.items(), key=lambda entry: sum(entry[1].values()))
    there = held(k)
    parts = {name: parts.get(name, 0.0) + there.get(name, 0.0) for name in PARTS}
    parts["other"] = other(k, parts)
    return Memory(parts, moment)


def held(k: Case) -> dict[str, float]:
    """Weights and moments, which are there all the time."""
    t = k.t
    found = {
        "frozen" if t.lora else "trained": t.base_bytes * t.shape.total / k.shards,
        "optimizer": 2 * FLOAT * t.trained / k.shards,
    }
    return found | ({"trained": FLOAT * t.adapters / k.shards} if t.lora else {})


def standing(t: Tuned, processes: int, processes_of_a_node: int, on_cpu: bool) -> float:
    """Bytes of weights, gradients and moments of one process: a step has all of them at once when it ends."""
    k = case(t, processes, processes_of_a_node, on_cpu)
    return sum(held(k).values()) + gradients(k, whole=True)


# ---- What a block keeps


def kept(k: Case, block: Block) -> float:
    """Bytes of a micro-batch in one block, from its forward to its backward, with nothing computed anew."""
    return k.tokens * (
        attention_bytes(k, block) + mlp_bytes(k, block) + expert_bytes(k, block)
    ) + copies(k, block)


def norm_bytes(k: Case, width: int, rows: int = 1) -> int:
    """Of a token in a norm: its input in float32, a number a row, and what its weight is multiplied with."""
    return FLOAT * width + FLOAT * rows + (k.stream * width if k.trained else 0)


def inputs(k: Case, matrices: tuple[Matrix, ...], width: int) -> float:
    """Of a token: what these read, one tensor for all of them unless autocast or LORA_DROPOUT makes each a copy; what
    dropout multiplies with; and between the two matrices of their adapters."""
    read = [matrix for matrix in matrices if k.read(matrix)]
    if not read:
        return 0.0
    apart = [matrix for matrix in read if not k.t.is_merged(matrix)]
    each = len(apart) if k.autocast or k.drops else 0
    inside = sum(k.c.lora_rank for matrix in apart if k.t.lora)
    return k.s * (width * max(1, each) + inside) + (k.mask * width * len(apart) if k.drops else 0)


def attention_bytes(k: Case, block: Block) -> float:
    """Of a token, the norm before it included: queries, keys, values and results, for each head, a logarithm a head,
    and the mask as a number for each pair of positions."""
    shape = k.t.shape
    queries, keys = shape.heads * shape.head_dim, shape.keys * shape.head_dim
    *reading, out = block.of(ATTENTION)
    heads = norm_bytes(k, queries + keys, shape.heads + shape.keys) if shape.qk_norm else 0
    shared = k.read(out) and not k.autocast and not k.drops  # the kernel keeps it too
    of_o = inputs(k, (out,), queries) - (k.s * queries if shared else 0)
    return (
        norm_bytes(k, shape.width)
        + inputs(k, tuple(reading), shape.width)
        + heads
        + of_o
        + k.s * (4 * queries + k.c.seq_len)
        + FLOAT * shape.heads
    )


def mlp_bytes(k: Case, block: Block) -> float:
    """Of a token, the norm before it included: gate, its SiLU and up, and what down reads."""
    width = k.t.shape.width
    found: float = norm_bytes(k, width)
    if mlp := block.of(MLP):
        gate, up, down = mlp
        found += (
            inputs(k, (gate, up), width) + 3 * k.s * gate.rows + inputs(k, (down,), down.columns)
        )
    return found


def expert_bytes(k: Case, block: Block) -> float:
    """Of a token, through each expert that it passes; grouped products know no autocast. And the router's scores."""
    if not (experts := block.of(EXPERTS)):
        return 0.0
    up, down = experts
    s, width = expert_item(k), k.t.shape.width
    each = (
        s * (width * k.read(up) + 3 * down.columns + down.columns * k.read(down) + width)
        + FLOAT
        + 4 * INDEX
    )
    (router,) = block.of(ROUTER)
    return (
        up.used * each
        + 3 * FLOAT * router.rows
        + (FLOAT * width if k.trained and k.s < FLOAT else 0)
    )


def expert_item(k: Case) -> int:
    return k.t.base_bytes if k.autocast else k.s


def copies(k: Case, block: Block) -> float:
    """Of weights, kept for the gradient of what they are multiplied with: with their adapters in them, in DTYPE."""
    return k.s * k.t.merged(block) + casts(k, block)


def casts(k: Case, block: Block) -> float:
    """Of weights in float32 that autocast made copies of in DTYPE."""
    cast = sum(matrix.size for matrix in block.matrices if matrix.group in (ATTENTION, MLP))
    return float(k.s * cast) if k.autocast and k.trained else 0.0


def of_products(k: Case, block: Block) -> float:
    """What ACTIVATION_CHECKPOINTING=selective keeps of a micro-batch: results of matrix products and of attention."""
    shape = k.t.shape
    found = FLOAT * shape.heads + k.s * shape.heads * shape.head_dim
    for matrix in block.matrices:
        if matrix.group in (ATTENTION, MLP):
            beside = (
                k.c.lora_rank + matrix.rows
                if matrix.name in k.t.adapted and not k.t.is_merged(matrix)
                else 0
            )
            found += k.s * (matrix.rows + beside)
    return k.tokens * (found + k.stream * shape.width) + k.s * k.t.merged(block)


def stays(k: Case, block: Block) -> float:
    """What a block keeps with ACTIVATION_CHECKPOINTING as it is set."""
    how = k.c.activation_checkpointing
    if how == "none":
        return kept(k, block)
    return of_products(k, block) if how == "selective" else k.tokens * k.stream * k.t.shape.width


def passing(k: Case, block: Block) -> float:
    """What backward adds for a moment on top, at its largest: of the MLP, or of experts the gradients of what all that
    a token passes gave, in float32 as it was weighed, and as its order was restored."""
    width = k.t.shape.width
    found: float = k.s * (width + 2 * max((matrix.rows for matrix in block.of(MLP)), default=0))
    if (
        k.autocast and k.t.lora
    ):  # peft has an adapter's input in float32 before autocast has it in DTYPE again
        found += FLOAT * max(
            (
                matrix.columns
                for matrix in block.of(MLP)
                if k.read(matrix) and not k.t.is_merged(matrix)
            ),
            default=0,
        )
    if k.drops:  # and the gradient of what dropout gave beside that of what it read
        found += (FLOAT if k.autocast else k.s) * max(
            (matrix.columns for matrix in block.of(MLP) if k.read(matrix)), default=0
        )
    if experts := block.of(EXPERTS):
        found = max(found, experts[0].used * width * (2 * FLOAT + expert_item(k)))
    return k.tokens * found


def activations(k: Case) -> float:
    return sum(block.times * stays(k, block) for block in k.t.shape.blocks) + last_norm(k)


def last_norm(k: Case) -> float:
    return k.tokens * norm_bytes(k, k.t.shape.width)


# ---- Weights and gradients


def gathered(k: Case, blocks: int) -> float:
    """What FSDP2 gathers: the outermost weights for the whole pass, and so many blocks."""
    return k.s * (k.t.shape.outermost + blocks * of_block(k)) if k.split else 0.0


def of_block(k: Case) -> int:
    """Numbers of the largest block, adapters included."""
    return max(block.size + k.t.adapters_of(block) for block in k.t.shape.blocks)


def trained_of_block(k: Case) -> int:
    return max(k.t.adapters_of(block) if k.t.lora else block.size for block in k.t.shape.blocks)


def gradients(k: Case, whole: bool) -> float:
    """As plan/memory.py's, of what is trained."""
    if k.split:
        if k.accumulates and k.c.grad_sync == "step":
            return FLOAT * k.t.trained
        return FLOAT * k.t.trained / k.shards if k.accumulates or whole else 0.0
    return FLOAT * k.t.trained if whole or k.accumulates or k.processes > 1 else 0.0


def table_gradient(k: Case) -> float:
    """Of the embedding, or of the head, where it is trained."""
    return FLOAT * k.t.shape.table if k.trained else 0.0


# ---- The moments


def loading(k: Case) -> dict[str, float]:
    """Less the room that the moments of the optimizer do not take yet."""
    part = (
        max((k.t.base_bytes * matrix.size for _, matrix in k.t.shape.matrices()), default=0)
        / k.shards
    )
    return {"gathered": part, "optimizer": -2.0 * FLOAT * k.t.trained / k.shards}


def at_loss(k: Case) -> dict[str, float]:
    s, shape, there = k.s, k.t.shape, activations(k)
    if k.c.activation_checkpointing != "none":  # autocast forgets its copies behind the loss only
        there += sum(block.times * casts(k, block) for block in shape.blocks)
    chunk, softmax = chunk_bytes(k, k.tokens)
    by_head = table_gradient(k) * (1 if s == FLOAT else 1 + s / FLOAT)
    head = s * shape.table if k.autocast and k.trained else 0
    tokens = k.tokens + (chunk_of(k, k.tokens) if k.trained else 0)
    return {
        "activations": there,
        "logits": by_head + chunk + softmax + s * tokens * shape.width + head,
        "gathered": gathered(k, 1),
        "gradients": gradients(k, whole=False),
    }


def chunk_of(k: Case, tokens: int) -> int:
    chunks = math.ceil(tokens / (CHUNK_TOKENS_ON_CPU if k.on_cpu else CHUNK_TOKENS))
    return math.ceil(tokens / max(1, chunks))


def chunk_bytes(k: Case, tokens: int) -> tuple[float, float]:
    """Of a chunk of logits, and of what the softmax makes of it in float32."""
    rows = ROWS_IN_CACHE if k.on_cpu else chunk_of(k, tokens)
    return (
        float(k.s * chunk_of(k, tokens) * k.t.shape.vocabulary),
        float(FLOAT * rows * (1 + (k.s < FLOAT) + k.on_cpu) * k.t.shape.vocabulary),
    )


def in_backward(k: Case) -> dict[str, float]:
    """In the backward of the last block."""
    last, there = k.t.shape.blocks[-1], gradients(k, whole=False)
    held = activations(k) - last_norm(k) - stays(k, last) + kept(k, last) + passing(k, last)
    largest = max(
        (matrix.size for matrix in last.matrices if k.trained or k.t.is_merged(matrix)), default=0
    )
    made = (FLOAT if k.trained and not k.split else k.s) * largest
    head = table_gradient(k) if k.t.shape.tied or not there else 0.0
    return {
        "activations": held,
        "logits": head,
        "gathered": gathered(k, 2),
        "gradients": there + made,
    }


def at_sending(k: Case) -> dict[str, float]:
    """As they were made, as they are sent, and the part that comes back."""
    if not k.split:
        return {}
    last, each = k.t.shape.blocks[-1], trained_of_block(k)
    return {
        "activations": activations(k) - last_norm(k) - stays(k, last),
        "logits": table_gradient(k) if k.t.shape.tied else 0.0,
        "gathered": gathered(k, 2),
        "gradients": gradients(k, whole=False) + each * (k.s + FLOAT + FLOAT / k.shards),
    }


def at_end(k: Case) -> dict[str, float]:
    """The gradient of an embedding that is trained is dense, beside that of an earlier micro-batch."""
    again = table_gradient(k) * (k.t.shape.tied + (gradients(k, whole=False) > 0))
    return {
        "activations": k.tokens * k.t.shape.width * k.stream,
        "logits": again,
        "gathered": gathered(k, 0),
        "gradients": gradients(k, whole=True),
    }


def at_evaluation(k: Case) -> dict[str, float]:
    """Of a block what it has at once, and its weights with adapters in them; or of the loss a chunk. No gradient."""
    micro = max(1, k.tokens // k.c.seq_len)
    tokens, width = micro * k.c.seq_len, k.t.shape.width
    in_block = {
        "activations": max(
            tokens * at_once(k, block) + k.s * k.t.merged(block) for block in k.t.shape.blocks
        ),
        "gathered": gathered(k, 2),
    }
    in_loss = {
        "activations": 2.0 * tokens * k.stream * width,
        "logits": sum(chunk_bytes(k, tokens)),
        "gathered": gathered(k, 1),
    }
    return max(in_block, in_loss, key=lambda parts: sum(parts.values()))


def at_once(k: Case, block: Block) -> float:
    """Bytes of a token in the MLP of a block where nothing is kept: the stream, what the norm gave and what comes out
    beside up, the SiLU and their product; or what experts gave, as it is weighed and as its order is restored."""
    width = k.t.shape.width
    found = k.stream * 2 * width + k.s * (
        2 * width + 3 * max((matrix.rows for matrix in block.of(MLP)), default=0)
    )
    if experts := block.of(EXPERTS):
        each = expert_item(k) * (width + 3 * experts[1].columns) + 2 * FLOAT * width
        found = max(found, 2 * k.stream * width + experts[0].used * each)
    return float(found + k.s * k.c.seq_len)


def other(k: Case, parts: dict[str, float]) -> float:
    """What no tensor of the model explains; the batch, masks and angles."""
    batch = 4 * INDEX * (k.c.batch_windows / k.processes) * k.c.seq_len + k.tokens * k.c.seq_len
    angles = 2 * FLOAT * k.tokens * k.t.shape.head_dim
    if not k.on_cpu:
        return (
            CUBLAS
            + batch
            + angles
            + FRAGMENTS * (parts["activations"] + parts["gathered"] + parts["logits"])
        )
    writers = k.shards if k.split else 1
    saved = 3 * FLOAT * k.t.trained / writers if k.c.save_every != 0 else 0.0
    how = k.c.activation_checkpointing
    holes = (
        HOLES_COMPUTED_ANEW[how]
        if how != "none"
        else (HOLES if k.accumulates else HOLES_OF_ONE_MICRO_BATCH)[k.c.dtype]
    )
    holes *= MORE_HOLES_OF_SEVERAL if k.processes > 1 else 1
    return (
        PYTHON_AND_TORCH
        + TRANSFORMERS
        + JOINED * (k.processes > 1)
        + batch
        + angles
        + saved
        + holes * parts["activations"]
        + (0 if k.accumulates else HOLES_AT_LEAST)
        + HOLES_OF_LOGITS * parts["logits"]
    )


# ---- While loading, and what fits


def host_bytes(t: Tuned, shards: int) -> float:
    """Of the host's memory, what a process with a GPU takes while weights are loaded, beside Python's: its parts of the
    weights that are in the making. Pages of the files are the system's, which it gives back."""
    largest = max((matrix.size for _, matrix in t.shape.matrices()), default=t.shape.table)
    return float(PYTHON_AND_TORCH + TRANSFORMERS + AT_ONCE * t.base_bytes * largest / shards)


def largest_micro_batch(
    t: Tuned, processes: int, processes_of_a_node: int, on_cpu: bool, capacity: float
) -> int:
    """The largest MICRO_BATCH_SIZE that fits into so many bytes and divides the batch; 0 where none does."""
    share = t.c.batch_windows // processes
    for micro in sorted(
        (size for size in range(1, min(share, 4096) + 1) if share % size == 0), reverse=True
    ):
        other_t = dataclasses.replace(t, c=t.c.replace(micro_batch_size=micro))
        if (
            find_batch_problem(other_t.c, processes) is None
            and memory(other_t, processes, processes_of_a_node, on_cpu).total <= capacity
        ):
            return micro
    return 0
