"""The memory of one process of a training step, by part, computed from the settings alone.

    loss        all activations, and the blocks of the loss
    backward    all activations, and what the last block's backward adds
    end         all gradients, and what that of the embedding adds
    update      all gradients, and what the optimizer adds
    exchange    between sites, under SYNC=diloco: pseudo-gradients, and a copy of the site's own weights

The largest of these moments is the peak. On a GPU it is what torch's allocator holds, the CUDA context aside; on CPU
the resident memory of the process.
"""

import dataclasses
import math

from hardware.gpu_specs import GpuSpec
from hardware.model_size import Parameters, flops_of, parameters
from plan.activations import Block, block, by_mask, compiled, item_bytes, norm_bytes
from plan.network.outer import fragments, of_a_site
from settings.checks import find_batch_problem
from settings.config import Config

PARTS = ("weights", "gradients", "optimizer", "activations", "casts", "logits", "other")
GIB = 2**30

CHUNK_TOKENS, CHUNK_TOKENS_ON_CPU = (
    2048,
    1536,
)  # of the loss: loss.py's, which imports torch; a test holds them equal
ROWS_IN_CACHE, COLUMNS = 8, 8192  # and these
ROWS_AT_ONCE = 256  # and compilation.py's
FLOAT = 4  # bytes of a float32, which weights, gradients, moments and sums are
# Of each weight under SYNC=diloco, split over the processes of a site: what sites agreed on last, and the momentum of
# the outer step; and while they exchange, the pseudo-gradient of what is exchanged and a copy of its own weights.
OUTER_STANDING, OUTER_EXCHANGED = 2 * FLOAT, 2 * FLOAT

# What a process on CPU holds beside tensors, measured of a model of 0.1M parameters with torch 2.13, which is the
# peak resident memory of `bench.planned` less 6 MiB: Python, torch and its libraries, of which 65 MiB are what torch's
# optimizers import of the compiler (319 and 320 MiB in float32 and bfloat16); what joins several processes (325); and the
# rest of the compiler (423).
PYTHON_AND_TORCH = 315 * 2**20
JOINED = 5 * 2**20
COMPILER = 115 * 2**20
# Bytes of the heap in holes, for each byte of activations, on CPU. train/tune.py has glibc keep all memory; torch asks
# for aligned blocks, for which glibc 2.36 does not take a hole of just their size; probably gradients of an earlier
# micro-batch and moments lie where activations were freed, and what comes next does not fit between them: a float32 row
# of 570 MiB of tensors peaks at 735 MiB in its rehearsal, where nothing lies between, and at 1,290 from the third step.
# Measured with one and two threads, as (peak resident - live tensors - the above) / activations, by rows of
# bench.planned at one to three sizes of each: 0.9 to 1.7 in float32 (2.1 once, and where the logits are larger), 0.7 to
# 1.4 in bfloat16; selective 1.6 to 2.7, full 2.6 to 3.9; compiled, where few blocks are made, 0.3 to 0.6; with two
# processes, whose traffic goes through the same heap, 1.3 to 1.9 times as many. What is taken is near the middle. Runs
# of one row differ by 10%, at twice its size once by 18%, so that no constant says it more closely than that.
# Logits and the head's gradient, in blocks as large as its weight, leave holes of their own: rows with a vocabulary of
# 50,304 have 0.1 to 0.9 of them in float32 and up to 0.2 in bfloat16 beyond those of activations, or none.
HOLES = {"float32": 1.4, "bfloat16": 1.1}
# With one micro-batch a step no gradients lie between activations. make train of such a shape, in float32: its peak is
# 481 to 661 MiB in six runs of the tiny preset, and 1,060 with 384 by 6 layers and windows of 256. The least is what
# the first needs beyond its share of activations.
HOLES_OF_ONE_MICRO_BATCH = {"float32": 0.4, "bfloat16": 0.3}
HOLES_AT_LEAST = 120 * 2**20
HOLES_COMPUTED_ANEW = {"selective": 2.0, "full": 3.0}
HOLES_COMPILED = 0.45
MORE_HOLES_OF_SEVERAL = 1.5
HOLES_OF_LOGITS = 0.2
# A GPU's memory that torch's allocator never has: the CUDA context, 300 MiB before most kernels are loaded
# (pytorch#107667), and what NCCL takes, 544 to 688 MiB for a group of A100 (NVIDIA/nccl#964).
CUDA_CONTEXT = 500 * 2**20
NCCL = 700 * 2**20
# And of what it has: a workspace of cuBLAS for each of two threads, forward and backward, of the size that torch gives
# it on Hopper (pytorch#120925; 8 MiB before); and blocks that are free but too small, an assumption, not yet measured.
CUBLAS = 2 * 32 * 2**20
FRAGMENTS = 0.03  # of what comes and goes
MARGIN = 0.05  # of a card, which is left free: what is computed here may be too little by as much


@dataclasses.dataclass(frozen=True)
class Memory:
    """parts: bytes by part (PARTS), at the peak; moment: when that is."""

    parts: dict[str, float]
    moment: str

    @property
    def total(self) -> float:
        return sum(self.parts.values())


@dataclasses.dataclass(frozen=True)
class Case:
    """What the moments are computed from. together: processes that meet in every step, under SYNC=diloco those of a
    site; shards: that share one copy of the weights; writers: that write a checkpoint together (parallel.writers);
    tokens: of a micro-batch; accumulates: whether a step has several."""

    c: Config
    processes: int
    together: int
    shards: int
    writers: int
    on_cpu: bool
    tokens: int
    accumulates: bool
    compiled: bool
    p: Parameters
    block: Block

    @property
    def split(self) -> bool:
        return self.shards > 1

    @property
    def table(self) -> int:
        """Numbers of the embedding, or of the head."""
        return self.c.padded_vocab_size * self.c.n_embd

    @property
    def block_weights(self) -> float:
        """Numbers in the matrices of a block."""
        return self.p.hidden / self.c.n_layer


def case(c: Config, processes: int, processes_of_a_node: int, on_cpu: bool) -> Case:
    micro = max(1, c.micro_batch(processes))
    tokens = micro * c.seq_len
    shards, together = 1, of_a_site(c, processes)
    if together > 1 and c.parallel != "ddp":
        shards = together if c.parallel == "fsdp" else c.shard_ranks or processes_of_a_node
    work = c.last_step * c.batch_tokens * flops_of(c)
    by_compiler = compiled(c, on_cpu, work)
    writers = (
        min(together, processes_of_a_node) if processes == 1 or c.parallel == "ddp" else shards
    )
    accumulates = c.batch_windows // processes > micro
    return Case(
        c,
        processes,
        together,
        shards,
        writers,
        on_cpu,
        tokens,
        accumulates,
        by_compiler,
        parameters(c),
        block(c, tokens, on_cpu, by_compiler),
    )


def memory(c: Config, processes: int, processes_of_a_node: int, on_cpu: bool) -> Memory:
    """Of one of so many processes at the peak of a step, gradients of earlier micro-batches and moments being there."""
    k = case(c, processes, processes_of_a_node, on_cpu)
    found = {
        "loss": at_loss(k),
        "backward": in_backward(k),
        "sending": at_sending(k),
        "end": at_end(k),
        "update": at_update(k),
        "exchange": at_exchange(k),
    }
    moment, parts = max(found.items(), key=lambda entry: sum(entry[1].values()))
    standing = {
        "weights": FLOAT * k.p.total / k.shards,
        "optimizer": moments(k),
        "outer": outer_standing(k),
    }
    parts = {name: parts.get(name, 0.0) + standing.get(name, 0.0) for name in parts_of(c)}
    parts["other"] = other(k, parts)
    return Memory(parts, moment)


# ---- What stands through a step


def moments(k: Case) -> float:
    """AdamW's two for each weight; Muon's one for matrices in blocks."""
    muon = k.p.hidden if k.c.optimizer == "muon" else 0
    return FLOAT * (2 * (k.p.total - muon) + muon) / k.shards


def parts_of(c: Config) -> tuple[str, ...]:
    """PARTS, and what sites keep for each other where they do."""
    return (*PARTS[:3], "outer", *PARTS[3:]) if c.sync == "diloco" else PARTS


def exchanging(k: Case) -> float:
    """What an exchange takes while it runs, of the weights that it is about."""
    if k.c.sync != "diloco":
        return 0.0
    return OUTER_EXCHANGED * k.p.total / k.shards * max(fragments(k.c, k.c.sync_fragments))


def outer_standing(k: Case) -> float:
    """Beside all moments; with SYNC_DELAY an exchange runs beside them as well."""
    if k.c.sync != "diloco":
        return 0.0
    return OUTER_STANDING * k.p.total / k.shards + (exchanging(k) if k.c.sync_delay else 0.0)


def gradients(k: Case, whole: bool) -> float:
    """Of all weights: DDP's buckets always, others where an earlier micro-batch left them or `whole`.

    FSDP2 keeps a whole gradient from one micro-batch to the next with GRAD_SYNC=step, else its part of it.
    """
    if k.split:
        if k.accumulates and k.c.grad_sync == "step":
            return FLOAT * k.p.total
        return FLOAT * k.p.total / k.shards if k.accumulates or whole else 0.0
    return FLOAT * k.p.total if whole or k.accumulates or k.together > 1 else 0.0


def copies(k: Case, blocks: float, head: bool = False, gathered: int = 0) -> float:
    """Weights as they are used: casts of the matrices of so many blocks, and of the head; or what FSDP2 gathers, the
    outermost weights for the whole pass, and so many blocks."""
    s = item_bytes(k.c)
    if k.split:
        return s * (outermost(k) + gathered * k.block_weights)
    return 0.0 if s == FLOAT else s * (blocks * k.block_weights + head * k.table)


def outermost(k: Case) -> int:
    """Numbers of embedding and head."""
    return k.table * (1 if k.c.tie_embeddings else 2)


def waiting(k: Case) -> float:
    """What FSDP2 sent last in the micro-batch before, and holds until it sends again."""
    return (
        FLOAT * outermost(k)
        if k.split and k.accumulates and k.c.grad_sync == "micro-batch"
        else 0.0
    )


def casts_kept(k: Case) -> float:
    """Blocks whose casts are there at the end of forward: autograd keeps them, unless backward makes them anew, as
    compiled code does on a CPU."""
    return (
        k.c.n_layer
        if k.c.activation_checkpointing == "none" and not (k.compiled and k.on_cpu)
        else 0.0
    )


# ---- The moments


def at_loss(k: Case) -> dict[str, float]:
    """Within the loss: its gradient by the head's weight, a chunk of logits, the gradient by the hidden states, those
    of the chunk times their factors, and what the softmax makes of the chunk or, after that, its part of the gradient
    by the weight."""
    c, s = k.c, item_bytes(k.c)
    chunks = math.ceil(k.tokens / (CHUNK_TOKENS_ON_CPU if k.on_cpu else CHUNK_TOKENS))
    tokens = math.ceil(k.tokens / max(1, chunks))
    chunk = tokens * c.padded_vocab_size
    # as it is written: the logits in float32, where they are not, and their softmax; a CPU takes few rows at a time,
    # and has those before still. Compiled code makes neither; on a CPU it writes its rows beside the logits first
    rows = (
        ROWS_IN_CACHE * c.padded_vocab_size * (2 + (s < FLOAT))
        if k.on_cpu
        else chunk * (1 + (s < FLOAT))
    )
    beside = s * min(tokens, ROWS_AT_ONCE) * c.padded_vocab_size if k.on_cpu else 0
    softmax = beside if k.compiled else FLOAT * rows
    columns = min(c.padded_vocab_size, COLUMNS) if k.on_cpu else c.padded_vocab_size
    part = s * columns * c.n_embd if s < FLOAT else 0
    return {
        "activations": c.n_layer * k.block.kept + last_norm(k),
        "logits": FLOAT * k.table
        + s * chunk
        + s * (k.tokens + tokens) * c.n_embd
        + max(softmax, part),
        "casts": copies(k, casts_kept(k), head=True, gathered=1),
        "gradients": gradients(k, whole=False) + waiting(k),
    }


def last_norm(k: Case) -> float:
    return k.tokens * (norm_bytes(k.c, k.on_cpu) * k.c.n_embd + FLOAT)


def in_backward(k: Case) -> dict[str, float]:
    """In the backward of the last block. The gradient by a tied head waits for that of the embedding."""
    c, s = k.c, item_bytes(k.c)
    there = gradients(k, whole=False)
    kept = (c.n_layer - 1) * k.block.kept + k.block.whole + k.block.passing
    head = k.table * FLOAT if c.tie_embeddings or not there else 0
    # a product's gradient by its weight, in DTYPE and cast; compiled code gives those of a block at once
    largest = c.n_embd * max(c.n_embd, c.mlp_dim or 0)
    made: float = largest * (s if k.split else FLOAT + (s if s < FLOAT else 0))
    if k.compiled:
        made = max(s, 0 if k.split else FLOAT) * k.block_weights
    return {
        "activations": kept,
        "logits": head,
        "casts": copies(k, max(1.0, casts_kept(k)), gathered=2),
        "gradients": there + made + waiting(k),
    }


def at_sending(k: Case) -> dict[str, float]:
    """When FSDP2 sends the gradient of the last block: as it was made, as it is sent, and the part that comes back."""
    c, s = k.c, item_bytes(k.c)
    if not k.split:
        return {}
    return {
        "activations": (c.n_layer - 1) * k.block.kept,
        "logits": k.table * FLOAT if c.tie_embeddings else 0.0,
        "casts": copies(k, 0.0, gathered=2),
        "gradients": gradients(k, whole=False) + k.block_weights * (s + FLOAT + FLOAT / k.shards),
    }


def at_end(k: Case) -> dict[str, float]:
    """The gradient of the embedding is dense: beside what a tied head waits with, and beside that of an earlier
    micro-batch. That of the stream is made float32 for it."""
    table = k.table * FLOAT * (k.c.tie_embeddings + (gradients(k, whole=False) > 0))
    stream = k.tokens * k.c.n_embd * (FLOAT + (item_bytes(k.c) if item_bytes(k.c) < FLOAT else 0))
    return {
        "activations": stream,
        "logits": table,
        "casts": copies(k, 0.0) if k.split else 0.0,
        "gradients": gradients(k, whole=True) + waiting(k),
    }


def at_update(k: Case) -> dict[str, float]:
    """AdamW in one pass over all makes nothing. Muon has the update of a matrix in float32, and in bfloat16 the matrix
    that it makes orthogonal, the next of it, and their product with the square of its smaller side."""
    largest = k.c.n_embd * max(k.c.n_embd, k.c.mlp_dim or 0) if k.c.optimizer == "muon" else 0
    return {"gradients": gradients(k, whole=True), "casts": largest * (FLOAT + 3 * 2.0)}


def at_exchange(k: Case) -> dict[str, float]:
    """Behind an optimizer step, with gradients still there; beside other moments outer_standing() has it."""
    if k.c.sync != "diloco" or k.c.sync_delay:
        return {}
    return {"outer": exchanging(k), "gradients": gradients(k, whole=True)}


def other(k: Case, parts: dict[str, float]) -> float:
    """What no tensor of the model explains, beside the batch, the rotary angles, and a mask of documents."""
    mask = k.tokens * k.c.seq_len if by_mask(k.c, k.on_cpu) else 0
    batch = 8 * (k.c.batch_windows / k.processes) * (k.c.seq_len + 1) + mask
    rotary = 2 * k.c.seq_len * k.c.head_dim * (FLOAT + item_bytes(k.c))
    if not k.on_cpu:
        return (
            CUBLAS
            + batch
            + rotary
            + FRAGMENTS * (parts["activations"] + parts["casts"] + parts["logits"])
        )
    # the copy that a thread writes: of weights and moments, this process's part
    saved = (FLOAT * k.p.total + k.shards * moments(k)) / k.writers if k.c.save_every != 0 else 0.0
    standing = PYTHON_AND_TORCH + COMPILER * k.compiled + JOINED * (k.processes > 1)
    heap = holes(k) * parts["activations"] + (0 if k.accumulates else HOLES_AT_LEAST)
    return standing + batch + rotary + saved + heap + HOLES_OF_LOGITS * parts["logits"]


def holes(k: Case) -> float:
    """Bytes of the heap in holes for each byte of activations."""
    if k.compiled:
        found = HOLES_COMPILED
    elif k.c.activation_checkpointing != "none":
        found = HOLES_COMPUTED_ANEW[k.c.activation_checkpointing]
    else:
        found = (HOLES if k.accumulates else HOLES_OF_ONE_MICRO_BATCH)[k.c.dtype]
    return found * (MORE_HOLES_OF_SEVERAL if k.processes > 1 else 1)


# ---- What fits


def usable_bytes(card: GpuSpec) -> float:
    """Of a card, for what `memory` counts: all but the CUDA context, what NCCL takes, and a margin."""
    return card.memory_gib * GIB * (1 - MARGIN) - CUDA_CONTEXT - NCCL


def largest_micro_batch(
    c: Config, processes: int, processes_of_a_node: int, on_cpu: bool, capacity_bytes: float
) -> int:
    """The largest MICRO_BATCH_SIZE that fits into so many bytes and divides the batch; 0 where none does."""
    share = c.batch_windows // processes
    # no other size splits it evenly, and of the largest batches there are too many to try each
    small = [size for size in range(1, math.isqrt(share) + 1) if share % size == 0]
    for micro in sorted({*small, *(share // size for size in small)}, reverse=True):
        other_c = c.replace(micro_batch_size=micro)
        if (
            find_batch_problem(other_c, processes) is None
            and memory(other_c, processes, processes_of_a_node, on_cpu).total <= capacity_bytes
        ):
            return micro
    return 0


def activation_bytes_per_token(c: Config, on_cpu: bool) -> float:
    """What all blocks and the last norm keep for backward of a token, with ACTIVATION_CHECKPOINTING as it is set."""
    k = case(c, 1, 1, on_cpu)
    return (c.n_layer * k.block.kept + last_norm(k)) / k.tokens
