"""Rules that name more than one setting: each check returns its complaint, with a valid value, or None.

`c` is a Config whose values each keep their own rule; config.py calls the checks, so it is typed Any here.
"""

import importlib.util
from collections.abc import Callable
from typing import Any


def check_heads(c: Any) -> str | None:
    if c.n_embd % c.n_head or c.head_dim % 2:
        fits = [n for n in range(1, c.n_embd + 1) if c.n_embd % (2 * n) == 0]
        nearest = (
            f"for example N_HEAD={min(fits, key=lambda n: abs(n - c.n_head))}"
            if fits
            else "make N_EMBD even"
        )
        return f"N_EMBD={c.n_embd} must be an even multiple of N_HEAD={c.n_head} (rotary pairs); {nearest}"
    return None


def check_kv_heads(c: Any) -> str | None:
    if c.n_head % (c.n_kv_head or c.n_head):
        fits = [n for n in range(1, c.n_head + 1) if c.n_head % n == 0]
        return (
            f"N_HEAD={c.n_head} must be a multiple of N_KV_HEAD={c.n_kv_head}; "
            f"for example N_KV_HEAD={min(fits, key=lambda n: abs(n - (c.n_kv_head or 1)))}"
        )
    return None


def check_batch(c: Any) -> str | None:
    return batch_problem(c, c.nodes * (c.nproc or 1))


def batch_problem(c: Any, world_size: int) -> str | None:
    """Why BATCH_TOKENS cannot be split evenly over `world_size` processes, or None."""
    unit, micro = world_size * c.seq_len, c.micro_batch_size
    factors = f"SEQ_LEN * processes = {c.seq_len} * {world_size}"
    if c.batch_tokens > unit * micro:  # more than one micro-batch: each must be full
        unit, factors = unit * micro, f"MICRO_BATCH_SIZE * {factors.replace('= ', f'= {micro} * ')}"
    if c.batch_tokens % unit == 0:
        return None
    valid = max(1, round(c.batch_tokens / unit)) * unit
    return f"BATCH_TOKENS={c.batch_tokens} is not a multiple of {factors} = {unit}; nearest: BATCH_TOKENS={valid}"


def check_rates(c: Any) -> str | None:
    if (c.min_learning_rate or 0) > c.learning_rate:
        return (
            f"MIN_LEARNING_RATE={c.min_learning_rate:g} is above LEARNING_RATE={c.learning_rate:g}; "
            f"for example MIN_LEARNING_RATE={c.learning_rate / 10:g}"
        )
    return None


def check_horizon(c: Any) -> str | None:
    if c.train_tokens < c.batch_tokens:
        return (
            f"TRAIN_TOKENS={c.train_tokens} is less than one step of BATCH_TOKENS={c.batch_tokens}; "
            f"for example TRAIN_TOKENS={100 * c.batch_tokens}"
        )
    if c.warmup_tokens >= c.train_tokens:
        return (
            f"WARMUP_TOKENS={c.warmup_tokens} must be less than TRAIN_TOKENS={c.train_tokens}; "
            f"for example WARMUP_TOKENS={c.train_tokens // 100}"
        )
    return None


def check_attention(c: Any) -> str | None:
    if c.attention in ("flash-attn", "fa3") and c.device == "cpu":
        return f"ATTENTION={c.attention} runs on NVIDIA GPUs only, and DEVICE=cpu; set ATTENTION=auto or sdpa"
    if c.attention in ("flash-attn", "fa3") and c.dtype != "bfloat16":
        return f"ATTENTION={c.attention} has no DTYPE={c.dtype}; set DTYPE=bfloat16, or ATTENTION=auto or sdpa"
    return None


def check_mix(c: Any) -> str | None:
    names = [part.split(":")[0] for part in c.data_mix.split(",")]
    if len(set(names)) < len(names):
        return f"DATA_MIX={c.data_mix} names a source twice; add its weights up"
    return None


def check_init(c: Any) -> str | None:
    if c.init_from and c.tokenizer == "train":
        return (
            f"INIT_FROM={c.init_from}: its weights know the tokens of their own tokenizer, and TOKENIZER=train "
            f"makes another; set TOKENIZER={c.init_from.rstrip('/')}/tokenizer.json"
        )
    return None


def check_decay(c: Any) -> str | None:
    if c.lr_schedule != "wsd":
        return (
            None
            if c.decay_tokens is None
            else (
                f"DECAY_TOKENS={c.decay_tokens}: LR_SCHEDULE={c.lr_schedule} has no such part; leave it out, or set "
                "LR_SCHEDULE=wsd"
            )
        )
    if c.decay_tokens + c.warmup_tokens > c.train_tokens:
        return (
            f"DECAY_TOKENS={c.decay_tokens} and WARMUP_TOKENS={c.warmup_tokens} do not fit into "
            f"TRAIN_TOKENS={c.train_tokens}; "
            f"for example DECAY_TOKENS={max(1, (c.train_tokens - c.warmup_tokens) // 5)}"
        )
    return None


def check_sites(c: Any) -> str | None:
    if c.sync != "diloco":
        return None
    if c.sites == 1:
        return (
            f"SYNC=diloco with SITES=1: there is nothing to exchange; say over how many sites the NODES={c.nodes} "
            f"are spread, for example SITES={max(2, c.nodes)}, or leave SYNC out"
        )
    if c.nodes % c.sites:
        return (
            f"SITES={c.sites}: NODES={c.nodes} cannot be spread evenly over them; for example "
            f"NODES={-(-c.nodes // c.sites) * c.sites}"
        )
    if c.min_sites > c.sites:
        return f"MIN_SITES={c.min_sites} is more than SITES={c.sites}; for example MIN_SITES=1"
    return None


def check_exchange(c: Any) -> str | None:
    if c.sync != "diloco":
        return None
    every, parts = c.sync_every, c.sync_fragments
    if parts > c.n_layer:
        return (
            f"SYNC_FRAGMENTS={parts}: there are only N_LAYER={c.n_layer} blocks; for example "
            f"SYNC_FRAGMENTS={c.n_layer}"
        )
    if every % parts:
        return (
            f"SYNC_EVERY={every} is not a multiple of SYNC_FRAGMENTS={parts}; for example "
            f"SYNC_EVERY={-(-every // parts) * parts}"
        )
    if c.sync_delay >= every // parts:
        return (
            f"SYNC_DELAY={c.sync_delay}: an exchange must end before the next begins, {every // parts} steps later "
            f"(SYNC_EVERY / SYNC_FRAGMENTS); for example SYNC_DELAY={(every // parts - 1) // 2}"
        )
    return None


def check_split(c: Any) -> str | None:
    return split_problem(c, (c.nproc or 1) * c.site_nodes)


def split_problem(c: Any, processes: int) -> str | None:
    """Why a site of so many processes cannot train, or None."""
    if c.sync == "diloco" and processes > 1 and c.parallel != "fsdp":
        return (
            f"PARALLEL={c.parallel} with SYNC=diloco: each process of a site would send all weights over the WAN; "
            "set PARALLEL=fsdp, with which each sends its part, or one process a site"
        )
    return None


def site_problem(c: Any) -> str | None:
    """What a machine lacks to be a part of a site, or None. Not one of CHECKS: in a cluster the pods have it."""
    if c.sync != "diloco":
        return None
    if importlib.util.find_spec("torchft") is None:
        return (
            "SYNC=diloco: torchft is not installed; it has wheels for Linux on x86_64 only: make setup there, or "
            "SYNC=ddp"
        )
    if not c.lighthouse:
        return (
            "SYNC=diloco: LIGHTHOUSE is not set; say where all sites reach it, for example "
            "LIGHTHOUSE=10.0.0.5:29510, and start make lighthouse there"
        )
    return None


def check_lighthouse(c: Any) -> str | None:
    port = int(c.lighthouse.rpartition(":")[2] or 29510)
    if not 1024 <= port < 65535:
        return f"LIGHTHOUSE={c.lighthouse}: the port must be from 1024 to 65534; for example 29510"
    return None


def check_nodes(c: Any) -> str | None:
    if c.node_rank >= c.nodes:
        return (
            f"NODE_RANK={c.node_rank} with NODES={c.nodes}: nodes are counted from 0; "
            f"the last is NODE_RANK={c.nodes - 1}"
        )
    if c.site_nodes > 1 and not c.master_addr:
        of = f"NODES={c.nodes}" + (f" at SITES={c.sites}" if c.replicas > 1 else "")
        where = "the site's first node" if c.replicas > 1 else "the first node"
        return (
            f"{of} needs MASTER_ADDR, {where}'s name or address; for example MASTER_ADDR=10.0.0.5"
        )
    return None


def check_shards(c: Any) -> str | None:
    if c.parallel != "hsdp" and c.shard_ranks is not None:
        return f"SHARD_RANKS={c.shard_ranks}: PARALLEL={c.parallel} has no groups; leave it out, or set PARALLEL=hsdp"
    if c.parallel == "ddp" and c.grad_sync != "step":
        return f"GRAD_SYNC={c.grad_sync}: PARALLEL=ddp reduces once a step; set GRAD_SYNC=step, or PARALLEL=fsdp"
    if c.parallel != "ddp" and c.optimizer == "muon":
        return (
            f"OPTIMIZER=muon needs whole matrices, and PARALLEL={c.parallel} splits them over processes; set "
            "OPTIMIZER=adamw, or PARALLEL=ddp"
        )
    return None


def check_shutdown(c: Any) -> str | None:
    if c.shutdown_timeout_s >= c.grace_period_s:
        return (
            f"SHUTDOWN_TIMEOUT_S={c.shutdown_timeout_s} must be less than GRACE_PERIOD_S={c.grace_period_s}, or "
            f"the cluster ends a save half-way; for example GRACE_PERIOD_S={c.shutdown_timeout_s + 60}"
        )
    return None


def check_best(c: Any) -> str | None:
    if c.keep_best and c.save_every == 0:
        return (
            "KEEP_BEST=1 keeps the best checkpoint, and SAVE_EVERY=0 saves none; for example "
            "SAVE_EVERY=1000"
        )
    if c.keep_best and not c.eval_every:
        return (
            "KEEP_BEST=1 keeps the best checkpoint, and EVAL_EVERY=0 evaluates none; for example "
            "EVAL_EVERY=1000"
        )
    return None


def check_lora(c: Any) -> str | None:
    if c.checkpoint_mode == "lite" and not c.lora_rank:
        return (
            "CHECKPOINT_MODE=lite saves adapters alone, and without LORA_RANK there are none; set LORA_RANK=16, or "
            "CHECKPOINT_MODE=full"
        )
    if (c.lora_alpha or c.lora_dropout) and not c.lora_rank:
        name = "LORA_ALPHA" if c.lora_alpha else "LORA_DROPOUT"
        return f"{name}={getattr(c, name.lower()):g}: without LORA_RANK there are no adapters; set LORA_RANK=16"
    return None


CHECKS: list[tuple[tuple[str, ...], Callable[[Any], str | None]]] = [
    (("N_EMBD", "N_HEAD"), check_heads),
    (("N_HEAD", "N_KV_HEAD"), check_kv_heads),
    (("BATCH_TOKENS", "SEQ_LEN", "MICRO_BATCH_SIZE", "NPROC", "NODES"), check_batch),
    (("MIN_LEARNING_RATE", "LEARNING_RATE"), check_rates),
    (("TRAIN_TOKENS", "BATCH_TOKENS", "WARMUP_TOKENS"), check_horizon),
    (("LR_SCHEDULE", "DECAY_TOKENS", "WARMUP_TOKENS", "TRAIN_TOKENS"), check_decay),
    (("ATTENTION", "DEVICE", "DTYPE"), check_attention),
    (("SYNC", "SITES", "NODES", "MIN_SITES"), check_sites),
    (("SYNC", "SYNC_EVERY", "SYNC_FRAGMENTS", "SYNC_DELAY", "N_LAYER"), check_exchange),
    (("SYNC", "SITES", "NODES", "NPROC", "PARALLEL"), check_split),
    (("LIGHTHOUSE",), check_lighthouse),
    (("NODES", "NODE_RANK", "MASTER_ADDR", "SYNC", "SITES"), check_nodes),
    (("PARALLEL", "SHARD_RANKS", "GRAD_SYNC", "OPTIMIZER"), check_shards),
    (("SHUTDOWN_TIMEOUT_S", "GRACE_PERIOD_S"), check_shutdown),
    (("DATA_MIX",), check_mix),
    (("INIT_FROM", "TOKENIZER"), check_init),
    (("KEEP_BEST", "EVAL_EVERY", "SAVE_EVERY"), check_best),
    (("LORA_RANK", "LORA_ALPHA", "LORA_DROPOUT", "CHECKPOINT_MODE"), check_lora),
]

# Of a model whose shape the settings say, and of steps whose number they do: neither is so in fine-tuning.
OF_PRETRAINING = (
    check_heads,
    check_kv_heads,
    check_horizon,
    check_decay,
    check_init,
)
