"""The memory of one process that trains: what stands through a step, and what the largest of its moments adds.

    loading        a weight as it is read from the files
    forward        FSDP2: all activations, and what is gathered as one block follows another
    loss           all activations, a chunk of logits, and the gradients that are made of it
    backward       in the last block: all activations, and what its backward adds
    first block    in the first block: all gradients, and what its backward adds
    exchange       between sites, under SYNC=diloco
    evaluation     one block, of which nothing is kept

On a GPU it is what torch's allocator holds, the CUDA context aside; on a CPU the resident memory of the process.
"""

import dataclasses
import math

from hardware.gpu_specs import GpuSpec
from plan.activations import (
    INDEX,
    attention_bytes,
    evaluated_bytes,
    is_by_mask,
    kept_bytes,
    norm_bytes,
    passing_bytes,
    saved_bytes,
)
from plan.finetuning.hf_shape import ATTENTION, MLP, Block
from plan.finetuning.tuned import FLOAT
from plan.fragments import fragment_shares
from plan.planned_step import COMPILED_ON_CPU, Step

GIB = 2**30
MIB = 2**20
# Those of the modules that import torch: loss.py, cpu_kernels.py, compilation.py. A test holds them equal.
CHUNK_TOKENS = 2048
CHUNK_TOKENS_ON_CPU = 1536
ROWS_IN_CACHE = 8
COLUMNS = 8192
ROWS_AT_ONCE = 256
# For each weight under SYNC=diloco, split over the processes of a site: what sites agreed on last, and the momentum of
# the outer step; while they exchange, the pseudo-gradient of what is exchanged and a copy of the site's own weights.
OUTER_STANDING = 2 * FLOAT
OUTER_EXCHANGED = 2 * FLOAT

# What a process on CPU holds beside tensors, measured with torch 2.13 and a model of 0.1M parameters: Python, torch and
# the part of its compiler that its optimizers import; what joins processes; the rest of the compiler; transformers and
# peft with what they import.
PYTHON_AND_TORCH = 315 * MIB
JOINED = 5 * MIB
COMPILER = 115 * MIB
TRANSFORMERS = 150 * MIB
# Bytes of the heap in holes, for each byte that all blocks would keep if nothing were computed anew. torch asks for
# aligned blocks, for which glibc does not take a hole of just their size. Measured in rows of bench.planned, of one and
# two micro-batches, as (peak resident memory - tensors - the above): 0.5 to 1.6, compiled 0.5 to 0.8. What is taken is
# low, so that no run is refused that fits: these rows peak at 0.97 to 1.22 of what is planned.
HOLES = 0.6
HOLES_COMPILED = 0.5
# What torch's allocator never has of a GPU: the CUDA context, 300 MiB before most kernels are loaded (pytorch#107667),
# and what NCCL takes, 544 to 688 MiB for a group of A100 (NVIDIA/nccl#964).
CUDA_CONTEXT = 500 * MIB
NCCL = 700 * MIB
# And what it has beside tensors: a workspace of cuBLAS for each of two threads, forward and backward, as large as torch
# makes it on Hopper (pytorch#120925); and free blocks that are too small, an assumption.
CUBLAS = 2 * 32 * MIB
FRAGMENTS = 0.03  # of what comes and goes
MARGIN = 0.05  # of a card, left free: what is computed here may be too little by as much
AT_ONCE = 4  # weights that transformers' loader has in the making at once, on the host

Parts = dict[str, float]
# In the order in which they are read. A plan calls some of them otherwise, and people read PART_NAMES.
PARTS = (
    "frozen",
    "weights",
    "gradients",
    "optimizer",
    "outer",
    "activations",
    "copies",
    "logits",
    "other",
)
OUR_NAMES = {"copies": "casts"}
FINETUNING_NAMES = {"weights": "trained", "copies": "gathered"}
PART_NAMES = {"casts": "copies", "gathered": "copies"}


@dataclasses.dataclass(frozen=True)
class Memory:
    """Bytes by part at the peak, and the moment at which that is."""

    parts: Parts
    moment: str

    @property
    def total(self) -> float:
        return sum(self.parts.values())


def peak_memory(step: Step) -> Memory:
    """Return what a process holds at its peak: not in the first step, before which the optimizer has no state."""
    moments = {
        "loading": at_loading(step),
        "forward": in_forward(step),
        "loss": at_loss(step),
        "backward": in_last_block(step),
        "first block": in_first_block(step),
        "exchange": at_exchange(step),
        "evaluation": at_evaluation(step),
    }
    moment = max(moments, key=lambda name: sum(moments[name].values()))
    parts = dict.fromkeys(PARTS, 0.0)
    for part, size in (*standing_bytes(step).items(), *moments[moment].items()):
        parts[part] += size
    parts["other"] = other_bytes(step, parts)
    if step.is_ours:
        del parts["frozen"]
    if step.config.sync != "diloco":
        del parts["outer"]
    names = OUR_NAMES if step.is_ours else FINETUNING_NAMES
    return Memory({names.get(part, part): size for part, size in parts.items()}, moment)


def least_bytes(step: Step) -> float:
    """Return what a process holds at least when a step ends: weights, gradients, optimizer state, what sites keep."""
    return sum(standing_bytes(step).values()) + gradient_bytes(step, all_made=True)


# ---------------------------------------------------------------------------------------------------
# Weights, optimizer state, gradients
# ---------------------------------------------------------------------------------------------------


def standing_bytes(step: Step) -> Parts:
    """Return the bytes that stay through a step: weights, optimizer state, frozen weights, DiLoCo's copies."""
    model = step.model
    averages = 2 * model.trained  # AdamW's for each weight; Muon has one for matrices inside blocks
    if step.config.optimizer == "muon":
        averages -= all_blocks_numbers(step)
    parts = {
        "weights": FLOAT * model.trained / step.shards,
        "optimizer": FLOAT * averages / step.shards,
    }
    if model.lora:
        parts["frozen"] = model.base_bytes * model.shape.total / step.shards
    if step.config.sync == "diloco":
        parts["outer"] = OUTER_STANDING * model.trained / step.shards
        if step.config.sync_delay:
            parts["outer"] += exchanged_bytes(step)
    return parts


def exchanged_bytes(step: Step) -> float:
    """Return what an exchange between sites takes while it runs, of the largest fragment."""
    share = max(fragment_shares(step.config, step.config.sync_fragments))
    return OUTER_EXCHANGED * step.model.trained / step.shards * share


def gradient_bytes(step: Step, all_made: bool = False) -> float:
    """Return what gradients take: DDP's buckets always, others where an earlier micro-batch left them, or all are made.

    FSDP2 keeps a whole gradient from one micro-batch to the next with GRAD_SYNC=step, else its part of it.
    """
    total = float(FLOAT * step.model.trained)
    if step.is_sharded:
        if step.accumulates and step.config.grad_sync == "step":
            return total
        return total / step.shards if step.accumulates or all_made else 0.0
    return total if step.accumulates or all_made or step.together > 1 else 0.0


def waiting_bytes(step: Step) -> float:
    """Return what FSDP2 sent last in the micro-batch before: the outermost gradients."""
    return sent_bytes(step, outer_numbers(step)) if step.accumulates else 0.0


def sent_bytes(step: Step, numbers: int) -> float:
    """Return what FSDP2 has of so many gradients that it sends, and holds until it sends the next."""
    is_kept = step.accumulates and step.config.grad_sync == "step"
    if not step.is_sharded or not step.trains_all or is_kept:
        return 0.0
    return float(FLOAT * numbers)


def copies_bytes(step: Step, cast: float, gathered: int) -> float:
    """Return what weights take as they are used.

    Args:
        cast: numbers that are there in DTYPE where weights are cast.
        gathered: blocks that FSDP2 has gathered, beside the outermost weights, which stay for the whole pass. It has
            all of them where it gathers once a step.
    """
    if not step.is_sharded:
        return step.item * cast if step.casts_weights else 0.0
    sizes = [block_numbers(step, block) for block in step.model.shape.blocks]
    in_use = gathered * max(sizes)
    if step.accumulates and step.config.gathers_once:
        in_use = all_blocks_numbers(step)
    return float(step.item * (outer_numbers(step) + in_use))


def cast_numbers(step: Step) -> int:
    """Return the numbers in the matrices of blocks of which autograd keeps copies in DTYPE from forward to backward."""
    if step.code is COMPILED_ON_CPU or step.config.activation_checkpointing != "none":
        return 0
    return sum(block.times * castable(block) for block in step.model.shape.blocks)


def castable(block: Block) -> int:
    """Return the numbers in matrices that are cast: grouped products of experts take them as they are."""
    return sum(matrix.size for matrix in block.of(ATTENTION) + block.of(MLP))


def outer_numbers(step: Step) -> int:
    """Return the numbers of embedding and head."""
    return step.model.shape.outermost - step.model.shape.width


def block_numbers(step: Step, block: Block) -> int:
    """Return the numbers in the matrices of a block, and in their adapters."""
    return sum(matrix.size for matrix in block.matrices) + step.model.adapters_of(block)


def all_blocks_numbers(step: Step) -> int:
    return sum(block.times * block_numbers(step, block) for block in step.model.shape.blocks)


# ---------------------------------------------------------------------------------------------------
# The moments
# ---------------------------------------------------------------------------------------------------


def at_loading(step: Step) -> Parts:
    """Return what loading adds: the largest weight as it is read. The optimizer has no state yet."""
    sizes = [matrix.size for _, matrix in step.model.shape.matrices()]
    largest = step.model.base_bytes * max(sizes) / step.shards
    return {"copies": largest, "optimizer": -standing_bytes(step)["optimizer"]}


def at_loss(step: Step) -> Parts:
    """A chunk of logits, what its softmax or its part of the head's gradient adds, and these gradients."""
    shape, item = step.model.shape, step.item
    limit = CHUNK_TOKENS_ON_CPU if step.on_cpu else CHUNK_TOKENS
    chunk = math.ceil(step.tokens / math.ceil(step.tokens / limit))
    # in float32, without the largest of a row, and clamped; compiled code makes none of them
    rows = ROWS_IN_CACHE if step.on_cpu else chunk
    softmax = FLOAT * rows * shape.vocabulary * (2 + (item < FLOAT))
    if step.is_compiled:  # on a CPU it writes its rows beside the logits first
        softmax = item * min(chunk, ROWS_AT_ONCE) * shape.vocabulary if step.on_cpu else 0
    logits = item * chunk * shape.vocabulary
    if shape.are_logits_capped:
        logits *= 2
    hidden = item * step.tokens * shape.width  # their gradients
    by_head = 0
    if step.trains_all:
        logits += FLOAT * shape.table
        hidden += item * chunk * shape.width  # times their factors
        columns = shape.vocabulary
        if step.on_cpu:  # which adds a product in float32 in place
            columns = min(columns, COLUMNS) if item < FLOAT else 0
        by_head = item * columns * shape.width
    casts = shape.table + cast_numbers(step)
    if step.autocasts:  # it forgets its copies behind the loss
        casts = shape.table + sum(block.times * castable(block) for block in shape.blocks)
    return {
        "activations": activation_bytes(step) + last_norm_bytes(step),
        "logits": logits + hidden + max(softmax, by_head),
        "copies": copies_bytes(step, casts, gathered=1),
        "gradients": gradient_bytes(step) + waiting_bytes(step),
    }


def activation_bytes(step: Step) -> float:
    """Return what all blocks keep."""
    blocks = step.model.shape.blocks
    return sum(block.times * kept_bytes(step, block) for block in blocks) - idle_bytes(step)


def idle_bytes(step: Step) -> float:
    """Return what the first block does not keep: in front of the first adapter nothing has a gradient."""
    if step.trains_all or step.config.activation_checkpointing != "none":
        return 0.0
    first = step.model.shape.blocks[0]
    total = norm_bytes(step, step.code, step.model.shape.width)
    if not any(matrix.name in step.model.adapted for matrix in first.of(ATTENTION)):
        total += attention_bytes(step, first)
    return step.tokens * total


def last_norm_bytes(step: Step) -> float:
    width = step.model.shape.width
    return step.tokens * (norm_bytes(step, step.eager_code, width) + step.item * width)


def in_last_block(step: Step) -> Parts:
    """The backward pass begins: all other blocks keep what they kept."""
    last = step.model.shape.blocks[-1]
    gradients = gradient_bytes(step)
    if not gradients and step.trains_all and not step.model.shape.tied:
        gradients = FLOAT * step.model.shape.table  # of the head
    return in_block(step, last, activation_bytes(step) - kept_bytes(step, last), gradients)


def in_first_block(step: Step) -> Parts:
    """Return what the end of the backward pass adds: all gradients but the embedding's exist.

    In a mixture of experts it may be more in the first block that has any.
    """
    candidates = []
    to_come = step.model.shape.table
    others = 0.0
    for block in step.model.shape.blocks:
        gradients = gradient_bytes(step, all_made=True)
        if not gradient_bytes(step) and step.trains_all:
            gradients -= FLOAT * (to_come + block_numbers(step, block)) / step.shards
        candidates.append(in_block(step, block, others, gradients))
        to_come += block.times * block_numbers(step, block)
        others += block.times * kept_bytes(step, block)
    return max(candidates, key=lambda parts: sum(parts.values()))


def in_block(step: Step, block: Block, others: float, gradients: float) -> Parts:
    """In the backward pass of a block, computed anew where it was not kept.

    Args:
        others: bytes that other blocks keep.
        gradients: bytes of those that are there. That of a tied head waits for the embedding's beside them.
    """
    model, item = step.model, step.item
    sizes = [matrix.size for matrix in block.matrices if step.trains_all or model.is_merged(matrix)]
    # a gradient by a weight is made in DTYPE, and cast; compiled code makes those of a block at once
    each = FLOAT if step.trains_all and not step.is_sharded else item
    made = max(sizes, default=0) * (each + item * step.casts_weights)
    if step.is_compiled:
        made = sum(sizes) * each
    # the block behind this one has been sent, and keeps nothing any more
    sent = sent_bytes(step, block_numbers(step, block)) - kept_bytes(step, block)
    casts = max(cast_numbers(step), castable(block))
    return {
        "activations": others + saved_bytes(step, block) + passing_bytes(step, block),
        "logits": FLOAT * model.shape.table if step.trains_all and model.shape.tied else 0.0,
        "copies": copies_bytes(step, casts, gathered=2),
        "gradients": gradients + made + max(waiting_bytes(step), sent),
    }


def in_forward(step: Step) -> Parts:
    """FSDP2 holds what it gathered last until the next block is gathered and laid out."""
    if not step.is_sharded:
        return {}
    last = step.model.shape.blocks[-1]
    return {
        "activations": activation_bytes(step) - kept_bytes(step, last),
        "copies": copies_bytes(step, 0, gathered=3),
        "gradients": gradient_bytes(step) + waiting_bytes(step),
    }


def at_exchange(step: Step) -> Parts:
    """Return what a synchronization of sites adds after a step, whose gradients still exist.

    Nothing with SYNC_DELAY, which holds its part all the time (standing_bytes).
    """
    if step.config.sync != "diloco" or step.config.sync_delay:
        return {}
    return {
        "outer": exchanged_bytes(step),
        "gradients": gradient_bytes(step, all_made=True),
    }


def at_evaluation(step: Step) -> Parts:
    """In a block of which nothing is kept, with its weights that have adapters in them."""
    model = step.model
    inside = [
        step.tokens * evaluated_bytes(step, block) + step.item * model.merged(block)
        for block in model.shape.blocks
    ]
    return {"activations": max(inside), "copies": copies_bytes(step, 0, gathered=2)}


# ---------------------------------------------------------------------------------------------------
# Beside the model's tensors
# ---------------------------------------------------------------------------------------------------


def other_bytes(step: Step, parts: Parts) -> float:
    """Return the batch, the rotary angles, and what no tensor of the model explains."""
    config = step.config
    indices, rows = 1, config.seq_len
    if not step.is_ours:  # targets, positions and more, and angles of each
        indices, rows = 4, step.tokens
    total = indices * INDEX * (config.batch_windows / step.processes) * (config.seq_len + 1)
    total += 2 * rows * step.model.shape.head_dim * (FLOAT + step.item)
    if is_by_mask(step):
        total += step.tokens * config.seq_len
    if not step.on_cpu:
        passing = parts["activations"] + parts["copies"] + parts["logits"]
        return total + CUBLAS + FRAGMENTS * passing
    total += PYTHON_AND_TORCH
    if not step.is_ours:
        total += TRANSFORMERS
    if step.is_compiled:
        total += COMPILER
    if step.processes > 1:
        total += JOINED
    if config.save_every != 0:
        total += saved_copy_bytes(step)
    return total + heap_bytes(step)


def saved_copy_bytes(step: Step) -> float:
    """Return the copy of weights and optimizer state that a thread writes: of a checkpoint, this process's part."""
    writers = step.shards
    if not step.is_sharded:
        writers = min(step.together, step.node_processes)
    standing = standing_bytes(step)
    return (standing["weights"] + standing["optimizer"]) * step.shards / writers


def heap_bytes(step: Step) -> float:
    """Return the holes in a CPU's heap."""
    passing = sum(block.times * saved_bytes(step, block) for block in step.model.shape.blocks)
    return passing * (HOLES_COMPILED if step.is_compiled else HOLES)


def loading_host_bytes(step: Step) -> float:
    """Return what a process with a GPU takes of the host's memory while a fine-tuning loads its weights.

    Its parts of those that are in the making, beside Python. Pages of the files are the system's, which it gives back.
    """
    largest = max(matrix.size for _, matrix in step.model.shape.matrices())
    at_once = AT_ONCE * step.model.base_bytes * largest / step.shards
    return PYTHON_AND_TORCH + TRANSFORMERS + at_once


def usable_bytes(card: GpuSpec) -> float:
    """Return what a card has for `peak_memory`: all but the CUDA context, what NCCL takes, and a margin."""
    return card.memory_gib * GIB * (1 - MARGIN) - CUDA_CONTEXT - NCCL
