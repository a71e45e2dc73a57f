"""Rules that involve several settings.

Each check returns the setting to change and why, with a valid value, or None. A command makes the
checks whose settings its target uses.
"""

from collections.abc import Callable, Collection, Iterator

from settings.config import SETTINGS, Config
from settings.declare import SettingsError, format_value

Conflict = tuple[str, str] | None
Check = Callable[[Config], Conflict]


def check_heads(config: Config) -> Conflict:
    """Require heads of an even width, for the pairs of rotary embedding."""
    model = config.architecture
    return require_multiple("N_EMBD", model.n_embd, 2 * model.n_head, "2 x N_HEAD")


def check_kv_heads(config: Config) -> Conflict:
    """Require groups of heads of equal size."""
    model = config.architecture
    if model.n_head % model.n_kv_head == 0:
        return None
    return "N_KV_HEAD", f"Must divide N_HEAD={model.n_head}, for example N_KV_HEAD={model.n_head}."


def check_batch(config: Config, world_size: int | None = None) -> Conflict:
    """Require a batch that so many processes can share, in full micro-batches.

    Args:
        world_size: by default NODES x NPROC.
    """
    training = config.training
    world_size = world_size or config.machine.nodes * (config.machine.nproc or 1)
    if training.seq_len > training.batch_tokens:
        return "SEQ_LEN", f"Must be at most BATCH_TOKENS={training.batch_tokens}."
    one_sequence_each = training.seq_len * world_size
    one_micro_batch_each = one_sequence_each * training.micro_batch_size
    sizes = f"{training.seq_len} x {world_size}"
    if training.batch_tokens <= one_micro_batch_each:
        factors = f"SEQ_LEN x processes ({sizes})"
        return require_multiple("BATCH_TOKENS", training.batch_tokens, one_sequence_each, factors)
    sizes = f"{training.micro_batch_size} x {sizes}"
    factors = f"MICRO_BATCH_SIZE x SEQ_LEN x processes ({sizes})"
    return require_multiple("BATCH_TOKENS", training.batch_tokens, one_micro_batch_each, factors)


def require_multiple(name: str, value: int, unit: int, factors: str) -> Conflict:
    """Require a multiple of `unit`, and suggest the nearest."""
    if value % unit == 0:
        return None
    nearest = max(1, round(value / unit)) * unit
    return name, f"Must be a multiple of {factors} = {unit}. The nearest is {name}={nearest}."


def check_learning_rates(config: Config) -> Conflict:
    """Require a learning rate that does not rise."""
    peak = config.training.learning_rate
    if config.training.min_learning_rate <= peak:
        return None
    return "MIN_LEARNING_RATE", f"Must be at most LEARNING_RATE={peak}, for example {peak / 10:g}."


def check_schedule(config: Config) -> Conflict:
    """Require at least one step, and a warm-up and a decay that fit."""
    training = config.training
    horizon = training.train_tokens
    if horizon < training.batch_tokens:
        return "TRAIN_TOKENS", f"Must be at least one step: TRAIN_TOKENS={training.batch_tokens}."
    if training.warmup_tokens >= horizon:
        return "WARMUP_TOKENS", f"Must be less than TRAIN_TOKENS={horizon}, for example 0."
    stable = horizon - training.warmup_tokens
    if (training.decay_tokens or 0) > stable:
        return "DECAY_TOKENS", f"Must be at most TRAIN_TOKENS - WARMUP_TOKENS = {stable}."
    return None


def check_attention(config: Config) -> Conflict:
    """Require a GPU and bfloat16 for FlashAttention."""
    machine = config.machine
    if machine.attention not in ("flash-attn", "fa3"):
        return None
    if machine.device != "cpu" and machine.dtype == "bfloat16":
        return None
    return "ATTENTION", "Needs an NVIDIA GPU and DTYPE=bfloat16. Otherwise use ATTENTION=auto."


def check_mixture(config: Config) -> Conflict:
    """Require each source once."""
    sources = [part.split(":")[0] for part in config.corpus.data_mix.split(",")]
    if len(sources) == len(set(sources)):
        return None
    return "DATA_MIX", "Names a source twice. Add up its weights, as in fineweb-edu:2."


def check_tokenizer(config: Config) -> Conflict:
    """Require the tokenizer that imported weights were trained with."""
    folder = config.architecture.init_from.rstrip("/")
    if not folder or config.corpus.tokenizer != "train":
        return None
    return "TOKENIZER", f"INIT_FROM has its own. Set TOKENIZER={folder}/tokenizer.json."


def check_sites(config: Config) -> Conflict:
    """Require several sites with equally many nodes."""
    sites = config.wan.sites
    if config.wan.sync == "ddp":
        return None
    if sites == 1:
        return "SITES", "SYNC=diloco needs at least two sites, for example NODES=2 SITES=2."
    if config.wan.min_sites > sites:
        return "MIN_SITES", f"Must be at most SITES={sites}, for example MIN_SITES=1."
    return require_multiple("NODES", config.machine.nodes, sites, "SITES")


def check_synchronization(config: Config) -> Conflict:
    """Require that each synchronization ends before the next one begins."""
    diloco = config.diloco
    fragments = diloco.sync_fragments
    layers = config.architecture.n_layer
    if fragments > layers:
        return "SYNC_FRAGMENTS", f"Must be at most N_LAYER={layers}."
    interval = max(1, diloco.sync_every // fragments)
    if diloco.sync_delay >= interval:
        return "SYNC_DELAY", f"Must be less than SYNC_EVERY / SYNC_FRAGMENTS = {interval}."
    return require_multiple("SYNC_EVERY", diloco.sync_every, fragments, "SYNC_FRAGMENTS")


def check_sharding(config: Config, site_processes: int | None = None) -> Conflict:
    """Require whole matrices for Muon, and sharded weights of a site with several processes.

    Args:
        site_processes: by default the nodes of a site x NPROC.
    """
    machine = config.machine
    if config.training.optimizer == "muon" and machine.parallel != "ddp":
        return "OPTIMIZER", "Muon needs whole matrices. Set OPTIMIZER=adamw or PARALLEL=ddp."
    site_processes = site_processes or config.site_nodes * (machine.nproc or 1)
    if config.wan.sync == "ddp" or site_processes == 1 or machine.parallel == "fsdp":
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
    ranks = config.machine.shard_ranks or node_processes
    if processes % ranks:
        problem = f"SHARD_RANKS={ranks}: Must divide the number of processes, {processes}."
        raise SettingsError([f"{problem} For example SHARD_RANKS={node_processes}."])
    return ranks


def check_nodes(config: Config) -> Conflict:
    """Require a rank for this node, and the address of the first."""
    machine = config.machine
    if machine.node_rank >= machine.nodes:
        return "NODE_RANK", f"Nodes are counted from 0. The last is NODE_RANK={machine.nodes - 1}."
    if config.site_nodes > 1 and not machine.master_addr:
        rule = "Must be the address of node 0, for example MASTER_ADDR=10.0.0.5"
        return "MASTER_ADDR", f"{rule} (docs/two-nodes.md)."
    return None


def check_best(config: Config) -> Conflict:
    """Require checkpoints, if the best one is to be kept."""
    if config.checkpoints.keep_best and config.checkpoints.save_every == 0:
        return "KEEP_BEST", "Needs checkpoints, which SAVE_EVERY=0 turns off. Set SAVE_EVERY=1000."
    return None


CHECKS: dict[Check, tuple[str, ...]] = {
    check_heads: ("N_EMBD", "N_HEAD"),
    check_kv_heads: ("N_HEAD", "N_KV_HEAD"),
    check_batch: ("BATCH_TOKENS", "SEQ_LEN", "MICRO_BATCH_SIZE", "NPROC", "NODES"),
    check_learning_rates: ("MIN_LEARNING_RATE", "LEARNING_RATE"),
    check_schedule: ("TRAIN_TOKENS", "BATCH_TOKENS", "WARMUP_TOKENS", "DECAY_TOKENS"),
    check_attention: ("ATTENTION", "DEVICE", "DTYPE"),
    check_mixture: ("DATA_MIX",),
    check_tokenizer: ("INIT_FROM", "TOKENIZER"),
    check_sites: ("SYNC", "SITES", "NODES", "MIN_SITES"),
    check_synchronization: ("SYNC_EVERY", "SYNC_FRAGMENTS", "SYNC_DELAY", "N_LAYER"),
    check_sharding: ("SYNC", "SITES", "NODES", "NPROC", "PARALLEL", "OPTIMIZER"),
    check_nodes: ("NODES", "NODE_RANK", "MASTER_ADDR", "SYNC", "SITES"),
    check_best: ("KEEP_BEST", "SAVE_EVERY"),
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


def find_conflicts(
    config: Config, target: str, invalid: Collection[str], without: Collection[Check]
) -> Iterator[tuple[str, str]]:
    """Yield what is wrong for a target between settings that are valid by themselves.

    Args:
        invalid: settings whose own value is wrong.
        without: checks that somebody else makes.
    """
    for check, names in CHECKS.items():
        is_used = all(target in SETTINGS[name].used_by for name in names)
        if is_used and check not in without and not set(names) & set(invalid):
            conflict = check(config)
            if conflict is not None:
                yield conflict
