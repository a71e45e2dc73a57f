"""What a block of a model keeps for its backward pass, in bytes.

    x -> norm -> q, k, v -> rotate -> attention -> o, + x -> norm -> gate, up -> silu(gate) * up -> down, + x

The residual stream is kept by nothing but a norm. What a product reads is kept for the gradient of its weight, and
what the kernel of attention reads and gives for its own. A mixture sends each token through `used` of its experts, by
grouped products of rows that were sorted by expert; the largest of its blocks counts for all of its kind.
"""

import dataclasses

from plan.finetuning.hf_shape import ATTENTION, EXPERTS, MLP, ROUTER, Block, Matrix
from plan.finetuning.tuned import FLOAT
from plan.planned_step import COMPILED_ON_CPU, Implementation, Step

INDEX = 8  # bytes of an int64
# That of cpu_kernels.py, which imports torch; a test holds them equal.
SHORT = 512  # windows up to which a CPU in bfloat16 takes the products


@dataclasses.dataclass(frozen=True)
class Scores:
    """What the scores of attention take in bytes per token, in all heads.

    Attributes:
        saved: from forward to backward.
        product: what the matrix product gives, which is kept with ACTIVATION_CHECKPOINTING=selective.
        passing: the gradients before and after the softmax, beside `saved`.
    """

    saved: float
    product: float
    passing: float


def kept_bytes(step: Step, block: Block) -> float:
    """Return what a block keeps of a micro-batch with ACTIVATION_CHECKPOINTING as it is set."""
    shape = step.model.shape
    recompute = step.config.activation_checkpointing
    if recompute == "none":
        return saved_bytes(step, block)
    total: float = step.stream * shape.width
    if recompute == "full":
        if step.is_compiled:  # one number a row and one a head are not recomputed
            total += 2 * FLOAT + FLOAT * shape.heads
        return step.tokens * total
    # selective: the results of matrix products and of attention too (recompute.policy)
    scores = scores_of(step)
    total += step.item * queries_of(step)
    total += scores.product if scores else FLOAT * shape.heads
    if step.is_compiled:  # of the last product nobody reads the result
        total -= step.item * shape.width
    for matrix in block.of(ATTENTION) + block.of(MLP):
        total += step.item * matrix.rows
        if matrix.name in step.model.adapted and not step.model.is_merged(matrix):
            total += step.item * (step.config.lora_rank + matrix.rows)
    return step.tokens * total + step.item * step.model.merged(block)


def saved_bytes(step: Step, block: Block) -> float:
    """Return what a block keeps of a micro-batch without recomputation."""
    width = step.model.shape.width
    total: float = block.wide_norms * norm_bytes(step, step.code, width)
    total += attention_bytes(step, block) + mlp_bytes(step, block) + expert_bytes(step, block)
    # peft adds some adapters to their weights, and keeps these sums
    return step.tokens * total + step.item * step.model.merged(block)


# ---------------------------------------------------------------------------------------------------
# Of a token
# ---------------------------------------------------------------------------------------------------


def norm_bytes(step: Step, code: Implementation, width: int, rows: int = 1) -> float:
    """Return what a norm keeps: its input, a number a row, and what its weight is multiplied with."""
    total = code.norm_input * width + FLOAT * rows
    if step.trains_all:
        total += step.stream * width
    return total


def input_bytes(step: Step, matrices: tuple[Matrix, ...], width: int) -> float:
    """Return what these matrices read: one tensor for all of them, or a copy for each.

    With adapters also what dropout multiplies with, and what is between the two matrices of each.
    """
    read = [matrix for matrix in matrices if is_input_kept(step, matrix)]
    if not read:
        return 0.0
    apart = [matrix for matrix in read if not step.model.is_merged(matrix)]
    copies = 1
    if apart and (step.autocasts or step.drops):
        copies = len(apart)
    total = step.item * width * copies
    if step.model.lora:
        total += step.item * step.config.lora_rank * len(apart)
    if step.drops:  # on a GPU a mask says what stays, on a CPU it is a factor
        total += (step.adapter_item if step.on_cpu else 1) * width * len(apart)
    return total


def is_input_kept(step: Step, matrix: Matrix) -> bool:
    """Tell whether what a matrix reads is kept, for the gradient of it or of its adapter."""
    return step.code.keeps_inputs and (step.trains_all or matrix.name in step.model.adapted)


def attention_bytes(step: Step, block: Block) -> float:
    """Return what attention keeps: its inputs, queries, keys, values, its result, a logarithm a head."""
    shape = step.model.shape
    queries, keys = queries_of(step), shape.keys * shape.head_dim
    *reading, out = block.of(ATTENTION)
    total = input_bytes(step, tuple(reading), shape.width)
    if shape.qk_norm:
        total += norm_bytes(step, step.code, queries + keys, shape.heads + shape.keys)
    of_out = input_bytes(step, (out,), queries)
    scores = scores_of(step)
    if scores:  # keys and values are repeated for the query heads that share them
        if step.code is COMPILED_ON_CPU:  # which keeps this input of a product
            of_out = step.item * queries
        return total + step.item * 3 * queries + scores.saved + of_out
    total += step.item * 2 * (queries + keys) + FLOAT * shape.heads
    if is_by_mask(step):  # made a number of DTYPE for each pair of positions
        total += step.item * step.config.seq_len
    if of_out and not (step.autocasts or step.drops or step.joins_examples):
        of_out -= step.item * queries  # the kernel keeps it too
    return total + of_out


def mlp_bytes(step: Step, block: Block) -> float:
    if not block.of(MLP):
        return 0.0
    *reading, down = block.of(MLP)
    total = input_bytes(step, tuple(reading), step.model.shape.width)
    total += step.code.mlp * step.item * down.columns
    return total + input_bytes(step, (down,), down.columns)


def expert_bytes(step: Step, block: Block) -> float:
    """Return what a token keeps in the experts that it passes, whose products know no autocast, and in the router."""
    if not block.of(EXPERTS):
        return 0.0
    up, down = block.of(EXPERTS)
    (router,) = block.of(ROUTER)
    width = step.model.shape.width
    numbers = width * is_input_kept(step, up) + step.model.shape.expert_numbers * down.columns
    numbers += down.columns * is_input_kept(step, down) + width
    total = up.used * (step.stream * numbers + FLOAT + 4 * INDEX) + 3 * FLOAT * router.rows
    if step.trains_all and step.item < FLOAT:
        total += FLOAT * width
    return total


def queries_of(step: Step) -> int:
    """Return the numbers of a token's queries, which are as many as those of attention's result."""
    return step.model.shape.heads * step.model.shape.head_dim


def scores_of(step: Step) -> Scores | None:
    """Return the bytes of attention's scores, None where a kernel never has them all in memory.

    transformers' models attend to one packed example at a time. Counted is an example that fills its window, which
    takes most.
    """
    if has_no_kernel(step):
        return scores_without_kernel(step)
    if not takes_products(step):
        return None
    pairs = step.model.shape.heads * step.config.seq_len
    saved = step.item * pairs
    windows = 1 if step.is_ours else step.micro_batch
    passing = 2 * saved / windows
    if step.code is COMPILED_ON_CPU:
        saved += 2 * FLOAT * step.model.shape.heads  # of a softmax that is recomputed
    return Scores(saved, saved, passing)


def scores_without_kernel(step: Step) -> Scores:
    """Return the bytes of scores as packed_attention.by_products makes them, with their softmax in float32."""
    shape = step.model.shape
    product = step.item * shape.heads * step.config.seq_len
    softmax = FLOAT * shape.heads * (step.config.seq_len + shape.has_sinks)
    saved = softmax + step.config.seq_len  # and a mask
    passing = 2 * softmax
    if step.item < FLOAT:  # the second product reads them in DTYPE, and is done before the softmax
        saved += product
        passing -= product
    if shape.is_capped:
        saved += product
    return Scores(saved, product, passing / step.micro_batch)


def has_no_kernel(step: Step) -> bool:
    """Tell whether a model has what no kernel of torch's has (packed_attention.by_products)."""
    return step.model.shape.has_sinks or step.model.shape.is_capped


def takes_products(step: Step) -> bool:
    """Tell whether attention is two products of matrices (attention.choose)."""
    config, shape = step.config, step.model.shape
    if not step.on_cpu and config.dtype == "float32" and shape.keys < shape.heads:
        return True  # of torch's kernels for GPUs none has heads that share keys in float32
    if not step.is_ours or config.doc_mask:
        return False
    is_short = step.on_cpu and config.dtype == "bfloat16" and config.seq_len <= SHORT
    return config.attention == "math" or (config.attention == "auto" and is_short)


def is_by_mask(step: Step) -> bool:
    """Tell whether a mask of T x T keeps documents apart, rather than their bounds (attention.choose)."""
    config = step.config
    has_kernel = not step.on_cpu and config.dtype == "bfloat16" and config.head_dim % 8 == 0
    return step.is_ours and config.doc_mask and (config.attention == "math" or not has_kernel)


# ---------------------------------------------------------------------------------------------------
# In the backward pass
# ---------------------------------------------------------------------------------------------------


def passing_bytes(step: Step, block: Block) -> float:
    """Return what a block's backward pass adds for a moment to `saved_bytes`, at its largest.

    In the MLP: the gradients of the stream, of gate's SiLU and of up. In experts the gradients of what all that a token
    passes gave, in float32 as they were weighed, and as their order was restored. With scores see `scores_passing_bytes`.
    """
    width = step.model.shape.width
    inner = max((matrix.columns for matrix in block.of(MLP)), default=0)
    total = step.item * (width + (step.code.mlp - 1) * inner) + adapter_passing_bytes(step, block)
    if scores := scores_of(step):
        total = max(total, scores_passing_bytes(step, block, scores))
    if experts := block.of(EXPERTS):
        total = max(total, experts[0].used * width * (2 * FLOAT + step.stream))
    return step.tokens * total


def scores_passing_bytes(step: Step, block: Block, scores: Scores) -> float:
    """Return what it adds to a token's bytes in the softmax of attention: the gradients of its result and its input.

    What is behind attention is gone by then, and so are the values.
    """
    width = step.model.shape.width
    gone = (block.wide_norms - 1) * norm_bytes(step, step.code, width)
    gone += mlp_bytes(step, block) + expert_bytes(step, block) + step.item * queries_of(step)
    return step.item * width + scores.passing - gone


def adapter_passing_bytes(step: Step, block: Block) -> float:
    """Return what an adapter adds: peft's copy of its input, and the gradient of what dropout gave."""
    widths = [
        matrix.columns
        for matrix in block.of(MLP)
        if matrix.name in step.model.adapted and not step.model.is_merged(matrix)
    ]
    copies = step.autocasts + step.drops
    return max(widths, default=0) * copies * step.adapter_item


# ---------------------------------------------------------------------------------------------------
# In an evaluation
# ---------------------------------------------------------------------------------------------------


def evaluated_bytes(step: Step, block: Block) -> float:
    """Return what a token has at once in the MLP of a block where nothing is kept.

    The stream, what the norm gave and what comes out beside up, the SiLU and their product; or what experts gave, in
    float32 as it is weighed and as its order is restored.
    """
    width = step.model.shape.width
    stream = 2 * step.stream * width
    inner = max((matrix.columns for matrix in block.of(MLP)), default=0)
    total = stream + step.item * (2 * width + 3 * inner)
    if experts := block.of(EXPERTS):
        each = step.stream * (width + 3 * experts[1].columns) + 2 * FLOAT * width
        total = max(total, stream + experts[0].used * each)
    return total
