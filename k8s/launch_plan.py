"""What a run will cost, before it is sent: the plan of plan/ on the GPUs that are asked for, and what it means for a volume.

It is planned for pods that are all at one site, LAN_GBIT apart, and beside that for a site of its own for each, with as
little and as much between them as WANs give (TYPICAL_GBIT); with SYNC=diloco for sites alone, WAN_GBIT apart. Computed,
and marked as such.
"""

import dataclasses
import datetime

from hardware.gpu_specs import GpuSpec, load_gpu_specs
from hardware.model_size import parameters
from k8s.cluster import nodes
from k8s.cluster.job_spec import pod_cpus, pod_memory_gb, shm_gb
from plan import storage
from plan.fleet import Fleet
from plan.network.traffic import TYPICAL_GBIT
from plan.planner import Plan, make_plan
from plan.published import published
from plan.report import brief
from plan.speed import slowest_card
from plan.time import Pace, Time, time_of
from record import number_formats
from settings.config import Config
from settings.finding import FAIL, Finding
from settings.resolve import find_fitted


def card_of_product(product: str) -> GpuSpec | None:
    """Return the GPU of a node's label, which has dashes where its name has blanks."""
    label = product.removeprefix("NVIDIA-")
    for spec in load_gpu_specs().values():
        if label in [name.replace(" ", "-") for name in spec.names]:
            return spec
    return None


def fleet_of(c: Config, spread: bool = False) -> Fleet | None:
    """The slowest of the GPUs that are asked for, as many times as pods ask; None where one of them is not known.

    spread: each pod at a site of its own.
    """
    number = c.nodes * (c.gpus_per_node or 1)
    fleet = Fleet((), number, c.nodes, c.nodes if spread else 1)
    if c.device == "cpu":
        return fleet
    cards = [card for product in nodes.products_of(c) if (card := card_of_product(product))]
    if len(cards) < len(nodes.products_of(c)):
        return None
    mixed = dataclasses.replace(fleet, cards=tuple((1, card) for card in cards))
    return fleet.all_of(slowest_card(c, mixed))


def plan(c: Config) -> Plan | None:
    """Of all pods at one site, or of sites under SYNC=diloco; None on CPUs and GPUs that are not known, and for a MODEL
    whose files only the pods can read. Raises SettingsError, CorpusError."""
    fleet = fleet_of(c, spread=c.sync == "diloco")
    if fleet is None or fleet.on_cpu or (c.model and not published(c.model)):
        return None
    now = datetime.datetime.now()
    return make_plan(c, fleet, now, places=(), fitted=find_fitted(), from_start=True)


def findings(c: Config, p: Plan | None, has_bytes: float | None) -> list[Finding]:
    """What cannot be: the limits of the plan, and a volume that will fill. has_bytes: of one that is there already.

    Pods count the data that they read, and of a MODEL only memory is known here.
    """
    found = p.findings if p else []
    if c.model:
        return [one for one in found if one.name == "memory"]
    return [*(one for one in found if one.name != "epochs"), *too_large(c, p, has_bytes)]


def disk_bytes(c: Config, p: Plan | None) -> float:
    """On the volume when it is fullest, with the checkpoints of every site. Raises CorpusError."""
    disk = p.disk.bytes if p else storage.disk(c)
    return sum(disk.values()) + (c.replicas - 1) * disk["checkpoints"]


def too_large(c: Config, p: Plan | None, has_bytes: float | None) -> list[Finding]:
    need_bytes = disk_bytes(c, p)
    has = has_bytes if has_bytes is not None else c.volume_gb * 2.0**30
    if need_bytes <= has:
        return []
    remedy = (
        "choose another VOLUME"
        if has_bytes is not None
        else f"set VOLUME_GB={-(-need_bytes // 2**30):.0f}"
    )
    return [
        Finding(
            "disk",
            FAIL,
            f"VOLUME={c.volume}: the plan needs up to {number_formats.size(need_bytes)} and the volume "
            f"has {number_formats.size(has)}",
            f"{remedy}, or set a smaller DATA_CACHE_GB, KEEP_LAST or KEEP_EVERY",
            64,
        )
    ]


# ---------------------------------------------------------------------------------------------------
# In words
# ---------------------------------------------------------------------------------------------------


def told(c: Config, p: Plan | None) -> str:
    """The plan as a table."""
    return table(
        "plan" if c.model else "plan (computed, not measured)",
        tuned(c, p) if c.model else planned(c, p),
    )


def tuned(c: Config, p: Plan | None) -> list[tuple[str, str]]:
    """Of a fine-tuning: what is asked for; hours hang on DATA, and memory on MODEL, which may be known."""
    memory = (
        brief(p, c).removeprefix("plan: ")
        if p
        else ("n/a: MODEL is read in the pods, which check it before weights are loaded")
    )
    fitted = find_fitted()
    most = "at most " if "BATCH_TOKENS" in fitted else ""
    epochs = "once" if c.epochs == 1 else f"{c.epochs} times"
    if "EPOCHS" in fitted:
        epochs = "EPOCHS as the pods choose by its size"
    trained = f"LORA_RANK={c.lora_rank} on {c.lora_targets}" if c.lora_rank else "all weights"
    return [
        (
            "shape",
            f"{c.nodes} {'pod' if c.nodes == 1 else 'pods'} of {units(c)}, PARALLEL={c.parallel}, each with "
            f"{pod_cpus(c)} CPUs and {pod_memory_gb(c)} GiB, {shm_gb(c)} of them shared memory",
        ),
        ("model", f"{c.model}: {trained}, in {c.dtype}"),
        (
            "data",
            f"{c.data}, {epochs}, {most}{c.batch_tokens:,} tokens a step",
        ),
        ("memory", memory),
        ("time", "n/a: DATA is read in the pods, whose log has the steps"),
        (
            "disk",
            f"on VOLUME={c.volume}: the model where it comes from the hub, 5 bytes a token of DATA, and "
            f"{c.keep_last} checkpoints, CHECKPOINT_MODE={c.checkpoint_mode}",
        ),
    ]


def planned(c: Config, p: Plan | None) -> list[tuple[str, str]]:
    """Of a pretraining."""
    rows = [
        ("shape", f"{c.nodes} {'pod' if c.nodes == 1 else 'pods'} of {units(c)}, SYNC={c.sync}"),
        ("model", f"{parameters(c).total:,} parameters"),
        (
            "tokens",
            f"{number_formats.count(c.last_step * c.batch_tokens)} in {c.last_step:,} steps of {c.batch_tokens:,}",
        ),
        *time_told(c, p),
    ]
    if p:
        need, has = p.layout.total_bytes, p.memory.capacity_bytes
        rows.append(
            ("memory", f"{number_formats.gib(need)} of {number_formats.gib(has)} GiB a GPU")
        )
    rows += [
        ("data", data_told(c)),
        (
            "disk",
            f"up to {number_formats.size(disk_bytes(c, p))} on VOLUME={c.volume}: {shards_told(c)}, {saves_told(c, p)}",
        ),
    ]
    return rows


def table(title: str, rows: list[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return f"{title}:\n" + "".join(f"  {name.ljust(width)}  {text}\n" for name, text in rows)


def units(c: Config) -> str:
    number = c.gpus_per_node or 1
    if c.device == "cpu":
        return f"{number} {'process' if number == 1 else 'processes'} on CPU"
    return f"{number} {'GPU' if number == 1 else 'GPUs'} ({' or '.join(nodes.products_of(c))})"


def time_told(c: Config, p: Plan | None) -> list[tuple[str, str]]:
    if c.device == "cpu":
        return [("time", "n/a: DEVICE=cpu: nothing is known of the cluster's processors")]
    if p is None:
        return [
            (
                "time",
                f"n/a: GPU_PRODUCTS={c.gpu_products} has one that is not known; hardware/gpus.toml lists "
                "those that are",
            )
        ]
    if p.time is None or p.speed.tokens_per_s is None:
        return [("time", f"n/a: {p.speed.why}; set DTYPE=float32, or other GPU_PRODUCTS")]
    together = f" with LAN_GBIT={c.lan_gbit:g} between pods" if c.nodes > 1 else ""
    if c.sync == "diloco":
        together = f" with WAN_GBIT={c.wan_gbit:g} between sites"
    fleet = p.run.fleet
    rows = [
        (
            "time",
            f"{cost(fleet, p.time)}{together}: {p.speed.tokens_per_s:,.0f} tokens/s",
        ),
        ("MFU", f"{p.speed.mfu_percent:.3g}% of {fleet.text}: {p.speed.why}"),
    ]
    speeds = () if c.nodes == 1 or c.site else TYPICAL_GBIT
    for gbit in reversed(speeds):
        time = time_of(c, Pace(p.pace.speed, p.between(c.nodes, gbit).wait_s))
        assert time
        computing = 100 * time.training_seconds / time.total_seconds
        text = f"{cost(fleet, time)} with {gbit:g} Gbit/s between them: {computing:.0f}% of it computing"
        rows.append((f"at {c.nodes} sites", text))
    return rows


def cost(fleet: Fleet, time: Time) -> str:
    hours = time.total_seconds / 3600
    return f"{number_formats.hours(hours)}, {fleet.processes * hours:,.0f} GPU-hours"


def data_told(c: Config) -> str:
    """Each pod reads every shard, since it checks their hashes; a volume is at one site."""
    shards = c.last_step * c.batch_tokens * storage.token_bytes(c)
    said = f"{number_formats.size(shards)} of shards"
    if c.nodes == 1:
        return said + ", read from the volume"
    said += f", which each pod reads from the volume: {number_formats.size(c.nodes * shards)}"
    if c.site:
        return said
    across = number_formats.size((c.nodes - 1) * shards)
    return f"{said}; where pods are at sites of their own {across} of it cross the WAN"


def shards_told(c: Config) -> str:
    known, unknown = storage.disk_of_shards(c) + storage.disk_of_downloads(c), storage.unknown(c)
    said = [f"{number_formats.size(known)} of shards and downloads"] if known else []
    if unknown:
        said.append(
            f"shards of {', '.join(unknown)}, as large as {'that is' if len(unknown) == 1 else 'those are'}"
        )
    return " and ".join(said)


def saves_told(c: Config, p: Plan | None) -> str:
    if c.save_every == 0:
        return "no checkpoints"
    of_sites = f" of {c.replicas} sites" if c.replicas > 1 else ""
    step_s = p.pace.step_s if p else None
    return (
        f"{number_formats.size(c.replicas * storage.disk_of_checkpoints(c, step_s))} of checkpoints{of_sites}, "
        f"{number_formats.size(storage.checkpoint_bytes(c))} each"
    )
