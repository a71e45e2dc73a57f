"""What a run will cost, before it is sent: hours, GPU-hours, disk and traffic. Computed, and marked as such.

The speed is the MFU that the preset's own arithmetic states, times the peak of the GPUs that are asked for; what is not
known of either is not guessed. Across sites every step waits for its gradients (train/wan.py), which nothing hides.
"""

import dataclasses
import itertools
import re

from k8s import sites
from train import wan
from train.config import Config
from train.corpus.source import Source, declared
from train.flops import flops_per_token, peak_tflops
from train.settings import ROOT, format_value

DOWNLOAD_BYTES = 5e9     # of a source on the hub: the file that is read and the next one, of about 2 GB each
BYTES_OF_A_WEIGHT = 4    # float32, as are moments


@dataclasses.dataclass(frozen=True)
class Plan:
    """hours and step_s are None where the speed is not known."""

    gpus: int
    parameters: int
    mfu_percent: float | None
    step_s: float | None
    hours: float | None
    at_sites: dict[float, float]   # Gbit/s -> share of time spent computing, with a site for each pod
    shard_bytes: float             # of all tokens that the run reads
    disk_bytes: float              # on the volume when it is fullest


def stated_mfu(preset: str) -> float | None:
    """Per cent, from the line `hours ... at 50% MFU of ...` at the top of a preset."""
    text = (ROOT / "presets" / f"{preset}.env").read_text(encoding="utf-8")
    found = re.search(r"^#   hours +[0-9.,]+ +at ([0-9.]+)% MFU of ", text, re.MULTILINE)
    return float(found[1]) if found else None


def device_of(product: str) -> str:
    """A GPU's own name, as torch has it, of its label, in which blanks are dashes; "" if it is not known."""
    parts = product.split("-")
    for joints in itertools.product(" -", repeat=min(len(parts) - 1, 10)):
        name = "".join(part + joint for part, joint in itertools.zip_longest(parts, joints, fillvalue=""))
        if peak_tflops(name, "bfloat16"):
            return name
    return ""


def slowest_device(c: Config) -> str:
    """The GPU that sets the pace of those asked for; "" where one of them is not known, or there is none."""
    names = [device_of(product) for product in sites.products_of(c)] if c.device != "cpu" else [""]
    return min(names, key=lambda name: peak_tflops(name, "bfloat16") or 0.0)


def plan(c: Config) -> Plan:
    gpus = c.nodes * (c.gpus_per_node or 1)
    parameters, matmul = wan.weights(c)
    peak, percent = peak_tflops(slowest_device(c), c.dtype), stated_mfu(c.preset)
    step_s = None
    if peak and percent:
        flops = c.batch_tokens * flops_per_token(matmul, c.n_layer, c.n_head * c.head_dim, c.seq_len)
        step_s = flops / (gpus * peak * 1e12 * percent / 100)
    at_sites = {speed: wan.sync_efficiency(step_s, wan.gradient_bytes(c), c.nodes, speed)
                for speed in wan.SPEEDS if step_s and c.nodes > 1 and not c.site}
    tokens = c.last_step * c.batch_tokens
    shard_bytes = float(tokens * token_bytes(c))
    return Plan(gpus, parameters, percent, step_s, step_s * c.last_step / 3600 if step_s else None, at_sites,
                shard_bytes, disk_of_shards(c) + disk_of_checkpoints(c))


def token_bytes(c: Config) -> int:
    """Of a token in a shard, as shards.py writes it."""
    return 2 if c.vocab_size <= 2**16 else 4


def sources(c: Config) -> list[Source]:
    """The sources of the mixture. Raises CorpusError."""
    return [declared(name, ROOT / c.sources_dir) for name in c.mixture]


def disk_of_shards(c: Config) -> float:
    """Shards and downloads of sources on the hub, at most; others are as large as they are, which is not known here."""
    total = sum(c.mixture.values())
    wanted = {source.name: (c.data_tokens or c.train_tokens) * c.mixture[source.name] / total * token_bytes(c)
              for source in sources(c) if source.kind == "hub"}
    if c.data_stream == "0":
        return sum(wanted.values()) + len(wanted) * DOWNLOAD_BYTES
    # While streaming the cache is kept to, but for two groups of each source, which are there whatever it takes.
    least = 2 * c.group_shards * c.shard_tokens * token_bytes(c)
    return (min(sum(wanted.values()), max(c.data_cache_gb * 1e9, sum(min(least, size) for size in wanted.values())))
            + len(wanted) * DOWNLOAD_BYTES)


def disk_of_checkpoints(c: Config) -> float:
    """Those that are kept, and the one that is being written."""
    if c.checkpoints == "off":
        return 0.0
    parameters, _ = wan.weights(c)
    kept_for_ever = c.last_step // c.keep_every if c.keep_every else 0
    return (c.keep_last + 1 + kept_for_ever) * checkpoint_bytes(c, parameters)


def checkpoint_bytes(c: Config, parameters: int) -> float:
    """Weights and two moments of each; Muon keeps one of the matrices inside blocks."""
    table = c.padded_vocab_size * c.n_embd
    inside = wan.weights(c)[1] - table if c.optimizer == "muon" else 0
    return float(BYTES_OF_A_WEIGHT * (3 * parameters - inside))


# ---------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------

def told(c: Config, p: Plan) -> str:
    """The plan as a table."""
    rows = [("shape", f"{c.nodes} {'pod' if c.nodes == 1 else 'pods'} of {units(c)}, SYNC={c.sync}"),
            ("model", f"{p.parameters:,} parameters"),
            ("tokens", f"{c.last_step * c.batch_tokens:,} in {c.last_step:,} steps of {c.batch_tokens:,}"),
            ("time", time_told(c, p))]
    rows += [(f"at {c.nodes} sites", f"with {speed:g} Gbit/s between them {100 * share:.0f}% of that speed: "
              f"{hours_told(p.hours / share)}, {p.gpus * p.hours / share:,.0f} GPU-hours")
             for speed, share in reversed(p.at_sites.items()) if p.hours]
    rows += [("data", data_told(c, p)),
             ("disk", f"up to {size_told(p.disk_bytes)} on VOLUME={c.volume}: {shards_told(c)}, "
              f"{size_told(disk_of_checkpoints(c))} of checkpoints")]
    width = max(len(name) for name, _ in rows)
    return "plan (computed, not measured):\n" + "".join(f"  {name.ljust(width)}  {text}\n" for name, text in rows)


def units(c: Config) -> str:
    number = c.gpus_per_node or 1
    if c.device == "cpu":
        return f"{number} {'process' if number == 1 else 'processes'} on CPU"
    return f"{number} {'GPU' if number == 1 else 'GPUs'} ({' or '.join(sites.products_of(c))})"


def time_told(c: Config, p: Plan) -> str:
    if p.hours is None or p.step_s is None:
        what = "DEVICE=cpu" if c.device == "cpu" else f"GPU_PRODUCTS={c.gpu_products} with DTYPE={c.dtype}"
        why = f"no peak is known for {what}" if p.mfu_percent else f"PRESET={c.preset} states no MFU"
        return f"n/a: {why}"
    return (f"{hours_told(p.hours)} at the {format_value(p.mfu_percent)}% MFU that presets/{c.preset}.env states: "
            f"{c.batch_tokens / p.step_s:,.0f} tokens/s, {p.gpus * p.hours:,.0f} GPU-hours")


def data_told(c: Config, p: Plan) -> str:
    """Each pod reads every shard, since it checks their hashes; a volume is at one site."""
    said = f"{size_told(p.shard_bytes)} of shards"
    if c.nodes == 1:
        return said + ", read from the volume"
    said += f", which each pod reads from the volume: {size_told(c.nodes * p.shard_bytes)}"
    if c.site:
        return said
    return (said + f"; where pods are at sites of their own {size_told((c.nodes - 1) * p.shard_bytes)} of it cross the "
            "WAN" + (f", {rate_told((c.nodes - 1) * p.shard_bytes / (3600 * p.hours))} on average" if p.hours else ""))


def too_large(c: Config, p: Plan, has_bytes: float | None) -> str | None:
    """What is to be said where the plan does not fit the volume; has_bytes: of one that is there already."""
    has = has_bytes if has_bytes is not None else c.volume_gb * 2.0**30
    if p.disk_bytes <= has:
        return None
    remedy = ("choose another VOLUME" if has_bytes is not None else
              f"set VOLUME_GB={-(-p.disk_bytes // 2**30):.0f}")
    return (f"VOLUME={c.volume}: the plan needs up to {size_told(p.disk_bytes)} and the volume has {size_told(has)}; "
            f"{remedy}, or set a smaller DATA_CACHE_GB, KEEP_LAST or KEEP_EVERY")


def hours_told(hours: float) -> str:
    return f"{hours:,.0f} hours" if hours >= 100 else f"{hours:.2g} hours"


def size_told(size: float) -> str:
    """Decimal units, as disks and networks are sold in."""
    for unit, power in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if size >= power:
            return f"{size / power:.3g} {unit}"
    return f"{size / 1e3:.3g} kB"


def shards_told(c: Config) -> str:
    known = disk_of_shards(c)
    return f"{size_told(known)} of shards and downloads" if known else "shards as large as their sources"


def rate_told(bytes_per_s: float) -> str:
    return f"{8 * bytes_per_s / 1e6:.3g} Mbit/s"
