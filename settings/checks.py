"""Rules that involve several settings.

Each check returns the setting to change and why, with a valid value, or None. A command makes the
checks whose settings its target uses.
"""

import importlib.util
from collections.abc import Callable, Collection, Iterator, Set

from settings.config import Config
from settings.declare import SettingsError, format_value
from settings.targets import (
    ALL_SETTINGS,
    COMPUTE,
    NODE,
    OPEN,
    PREPARE_DATA,
    PRETRAIN,
    TRAIN,
)

Conflict = tuple[str, str] | None
Check = Callable[[Config], Conflict]

LEAST_TOKENS = 256  # that an evaluation scores


def check_heads(config: Config) -> Conflict:
    """Require heads of an even width, for the pairs of rotary embedding."""
    return require_multiple("N_EMBD", config.n_embd, 2 * config.n_head, "2 x N_HEAD")


def check_kv_heads(config: Config) -> Conflict:
    """Require groups of heads of equal size."""
    if config.n_head % config.n_kv_head == 0:
        return None
    return (
        "N_KV_HEAD",
        f"Must divide N_HEAD={config.n_head}, for example N_KV_HEAD={config.n_head}.",
    )


def check_batch(config: Config, world_size: int | None = None) -> Conflict:
    """Require a batch that so many processes can share, in full micro-batches.

    Args:
        world_size: by default NODES x NPROC.
    """
    world_size = world_size or config.nodes * (config.nproc or 1)
    if config.seq_len > config.batch_tokens:
        return "SEQ_LEN", f"Must be at most BATCH_TOKENS={config.batch_tokens}."
    one_sequence_each = config.seq_len * world_size
    one_micro_batch_each = one_sequence_each * config.micro_batch_size
    sizes = f"{config.seq_len} x {world_size}"
    if config.batch_tokens <= one_micro_batch_each:
        factors = f"SEQ_LEN x processes ({sizes})"
        return require_multiple("BATCH_TOKENS", config.batch_tokens, one_sequence_each, factors)
    sizes = f"{config.micro_batch_size} x {sizes}"
    factors = f"MICRO_BATCH_SIZE x SEQ_LEN x processes ({sizes})"
    return require_multiple("BATCH_TOKENS", config.batch_tokens, one_micro_batch_each, factors)


def require_multiple(name: str, value: int, unit: int, factors: str) -> Conflict:
    """Require a multiple of `unit`, and suggest the nearest."""
    if value % unit == 0:
        return None
    nearest = max(1, round(value / unit)) * unit
    return name, f"Must be a multiple of {factors} = {unit}. The nearest is {name}={nearest}."


def check_learning_rates(config: Config) -> Conflict:
    """Require a learning rate that does not rise."""
    peak = config.learning_rate
    if config.min_learning_rate <= peak:
        return None
    return "MIN_LEARNING_RATE", f"Must be at most LEARNING_RATE={peak}, for example {peak / 10:g}."


def check_schedule(config: Config) -> Conflict:
    """Require at least one step, and a warm-up and a decay that fit."""
    horizon = config.train_tokens
    if horizon < config.batch_tokens:
        return "TRAIN_TOKENS", f"Must be at least one step: TRAIN_TOKENS={config.batch_tokens}."
    if config.warmup_tokens >= horizon:
        return "WARMUP_TOKENS", f"Must be less than TRAIN_TOKENS={horizon}, for example 0."
    stable = horizon - config.warmup_tokens
    if (config.decay_tokens or 0) > stable:
        return "DECAY_TOKENS", f"Must be at most TRAIN_TOKENS - WARMUP_TOKENS = {stable}."
    return None


def check_attention(config: Config) -> Conflict:
    """Require a GPU and bfloat16 for FlashAttention."""
    if config.attention not in ("flash-attn", "fa3"):
        return None
    if config.device != "cpu" and config.dtype == "bfloat16":
        return None
    return "ATTENTION", "Needs an NVIDIA GPU and DTYPE=bfloat16. Otherwise use ATTENTION=auto."


def check_mixture(config: Config) -> Conflict:
    """Require each source once."""
    sources = [part.split(":")[0] for part in config.data_mix.split(",")]
    if len(sources) == len(set(sources)):
        return None
    return "DATA_MIX", "Names a source twice. Add up its weights, as in fineweb-edu:2."


def check_tokenizer(config: Config) -> Conflict:
    """Require the tokenizer that imported weights were trained with."""
    folder = config.init_from.rstrip("/")
    if not folder or config.tokenizer != "train":
        return None
    return "TOKENIZER", (
        f"INIT_FROM has its own, which was not found in {folder}. Correct INIT_FROM, or set "
        f"TOKENIZER={folder}/tokenizer.json if the folder is elsewhere."
    )


def check_sites(config: Config) -> Conflict:
    """Require several sites with equally many nodes."""
    sites = config.sites
    if config.sync == "ddp":
        return None
    if sites == 1:
        return "SITES", "SYNC=diloco needs at least two sites, for example NODES=2 SITES=2."
    if config.min_sites > sites:
        return "MIN_SITES", f"Must be at most SITES={sites}, for example MIN_SITES=1."
    return require_multiple("NODES", config.nodes, sites, "SITES")


def check_synchronization(config: Config) -> Conflict:
    """Require that each synchronization ends before the next one begins."""
    fragments = config.sync_fragments
    layers = config.n_layer
    if fragments > layers:
        return "SYNC_FRAGMENTS", f"Must be at most N_LAYER={layers}."
    interval = max(1, config.sync_every // fragments)
    if config.sync_delay >= interval:
        return "SYNC_DELAY", f"Must be less than SYNC_EVERY / SYNC_FRAGMENTS = {interval}."
    return require_multiple("SYNC_EVERY", config.sync_every, fragments, "SYNC_FRAGMENTS")


def check_sharding(config: Config, site_processes: int | None = None) -> Conflict:
    """Require whole matrices for Muon, and sharded weights of a site with several processes.

    Args:
        site_processes: by default the nodes of a site x NPROC.
    """
    if config.optimizer == "muon" and config.parallel != "ddp":
        return "OPTIMIZER", "Muon needs whole matrices. Set OPTIMIZER=adamw or PARALLEL=ddp."
    site_processes = site_processes or config.site_nodes * (config.nproc or 1)
    if config.sync == "ddp" or site_processes == 1 or config.parallel == "fsdp":
        return None
    return "PARALLEL", "With SYNC=diloco, each process must send its own shard: PARALLEL=fsdp."


def count_shard_ranks(config: Config, processes: int, node_processes: int) -> int:
    """Return the number of processes that share one copy of the weights with PARALLEL=hsdp.

    Args:
        processes: of the run, or of a site of it.
        node_processes: of one node.

    Raises:
        SettingsError: the processes cannot be divided so.
    """
    ranks = config.shard_ranks or node_processes
    if processes % ranks:
        problem = f"SHARD_RANKS={ranks}: Must divide the number of processes, {processes}."
        raise SettingsError([f"{problem} For example SHARD_RANKS={node_processes}."])
    return ranks


def check_nodes(config: Config) -> Conflict:
    """Require a rank for this node, and the address of the first."""
    if config.node_rank >= config.nodes:
        return "NODE_RANK", f"Nodes are counted from 0. The last is NODE_RANK={config.nodes - 1}."
    if config.site_nodes > 1 and not config.master_addr:
        rule = "Must be the address of node 0, for example MASTER_ADDR=10.0.0.5"
        return "MASTER_ADDR", f"{rule} (docs/two-nodes.md)."
    return None


def check_best(config: Config) -> Conflict:
    """Require checkpoints, if the best one is to be kept."""
    if config.keep_best and config.save_every == 0:
        return "KEEP_BEST", "Needs checkpoints, which SAVE_EVERY=0 turns off. Set SAVE_EVERY=1000."
    return None


def check_eval_tokens(config: Config) -> Conflict:
    """Require enough validation tokens, or none."""
    if config.eval_tokens >= LEAST_TOKENS:
        return None
    if config.eval_tokens:
        return "EVAL_TOKENS", f"Must be at least {LEAST_TOKENS}, or 0 for no evaluation."
    if config.keep_best:
        return "EVAL_TOKENS", "KEEP_BEST=1 compares evaluations. Set for example EVAL_TOKENS=65536."
    return None


# Rule -> the targets that use all settings in it.
CHECKS: dict[Check, Set[str]] = {
    check_heads: PRETRAIN | OPEN,
    check_kv_heads: PRETRAIN | OPEN,
    check_batch: TRAIN,
    check_learning_rates: TRAIN,
    check_schedule: PRETRAIN,
    check_attention: COMPUTE,
    check_mixture: PRETRAIN | PREPARE_DATA,
    check_tokenizer: PRETRAIN | {"eval", "sample"},
    check_sites: PRETRAIN,
    check_synchronization: PRETRAIN,
    check_sharding: PRETRAIN,
    check_nodes: PRETRAIN & NODE,
    check_best: TRAIN,
    check_eval_tokens: TRAIN | {"eval"},
}
# What a fine-tuned model, whose shape is given and whose steps are EPOCHS, is not asked.
PRETRAINING = (check_heads, check_kv_heads, check_schedule, check_tokenizer)


def explain(config: Config, conflict: Conflict) -> str | None:
    """Return a conflict as a sentence, with the value of the setting."""
    if conflict is None:
        return None
    name, sentence = conflict
    return f"{name}={format_value(config.values()[name])}: {sentence}"


def find_batch_problem(config: Config, world_size: int) -> str | None:
    """Say why BATCH_TOKENS cannot be shared by so many processes, or return None."""
    return explain(config, check_batch(config, world_size))


def find_site_problem(config: Config) -> str | None:
    """Say what this machine lacks to train with SYNC=diloco, or return None."""
    if config.sync == "ddp":
        return None
    if importlib.util.find_spec("torchft") is None:
        return (
            "SYNC=diloco: The package torchft is not installed. It has wheels for Linux on x86_64 only: run "
            "make setup there, or set SYNC=ddp."
        )
    if not config.lighthouse:
        return (
            "SYNC=diloco: LIGHTHOUSE is not set. Start make lighthouse on a machine that all sites can reach, "
            "and set its address, for example LIGHTHOUSE=10.0.0.5:29510."
        )
    return None


def find_conflicts(
    config: Config, target: str, invalid: Collection[str], without: Collection[Check]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong for a target between settings that are valid by themselves.

    Args:
        invalid: settings whose own value is wrong.
        without: checks that somebody else makes.
    """
    for check, users in CHECKS.items():
        conflict = check(config)
        if conflict is None or check in without or target not in users | ALL_SETTINGS:
            continue
        words = " ".join(conflict)
        if not any(name in words for name in invalid):
            yield conflict
