"""What a run will cost, before it is sent: plan/ on the GPUs that are asked for, and what it means for a volume.

It is planned for pods that are all at one site, LAN_GBIT apart, and beside that for a site of its own for each, with as
little and as much between them as WANs give (wan.SPEEDS); with SYNC=diloco for sites alone, WAN_GBIT apart. Computed,
and marked as such.
"""

import dataclasses

from hardware.gpu_specs import GpuSpec, load_gpu_specs
from hardware.model_size import parameters
from k8s.cluster import nodes
from k8s.cluster.job_spec import pod_cpus, shm_gb
from plan import limits, storage
from plan.checks import capacity_bytes, memory_of
from plan.finetuning import tuned_report, tuning
from plan.fleet import Fleet
from plan.hours import Pace, Time, pace_of, time_of
from plan.network import wan
from plan.published import published
from record import number_formats
from settings.config import Config
from settings.finding import FAIL, Finding


@dataclasses.dataclass(frozen=True)
class Plan:
    """fleet: None where a GPU is not known; pace, time: of all pods at one site; at_sites: Gbit/s between sites ->
    hours of the whole run with a site for each pod, none where they are kept together; shard_bytes: of all tokens that
    the run reads; disk_bytes: on the volume when it is fullest."""

    fleet: Fleet | None
    pace: Pace | None
    time: Time | None
    at_sites: dict[float, float]
    shard_bytes: float
    disk_bytes: float

    @property
    def step_s(self) -> float | None:
        """Seconds that a step computes."""
        return self.pace.fast.step_s if self.pace else None


NONE = Plan(None, None, None, {}, 0.0, 0.0)  # of a fine-tuning, which of_tuning plans


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
    where = (number, c.nodes, c.nodes if spread else 1)
    if c.device == "cpu":
        return Fleet((), *where)
    cards = [card for product in nodes.products_of(c) if (card := card_of_product(product))]
    if len(cards) < len(nodes.products_of(c)):
        return None
    return Fleet(
        ((number, Fleet(tuple((1, card) for card in cards), len(cards)).slowest(c.dtype)),), *where
    )


def plan(c: Config) -> Plan:
    fleet = fleet_of(c, spread=c.sync == "diloco")
    pace = pace_of(c, fleet, None) if fleet else None
    step_s = pace.step_s if pace else None
    time = time_of(c, pace.fast, pace.wait_s) if pace else None
    at_sites: dict[float, float] = {}
    if time and c.nodes > 1 and not c.site:
        for speed in wan.SPEEDS:
            apart = c.replace(sites=c.nodes, wan_gbit=speed)
            spread = fleet_of(c, spread=True)
            assert spread and pace
            if found := time_of(c, pace.fast, pace_of(apart, spread, None).wait_s):
                at_sites[speed] = found.total
    return Plan(
        fleet,
        pace,
        time,
        at_sites,
        float(c.last_step * c.batch_tokens * storage.token_bytes(c)),
        sum(storage.disk(c, step_s).values())
        + (c.replicas - 1) * storage.disk_of_checkpoints(c, step_s),
    )


def of_tuning(c: Config) -> tuning.Tuning | None:
    """Of a MODEL that is known without its files, which only the pods can read, on GPUs that are; else None."""
    fleet = fleet_of(c)
    return tuning.plan(c, fleet) if published(c.model) and fleet and fleet.cards else None


def findings(c: Config, p: Plan, has_bytes: float | None) -> list[Finding]:
    """What cannot be: the limits of the plan, and a volume that will fill. has_bytes: of one that is there already."""
    if c.model:
        known = of_tuning(c)
        return [one for one in known.findings if one.name == "memory"] if known else []
    found = (
        limits.problems(c, p.fleet, None, capacity_bytes(p.fleet))
        if p.fleet and p.fleet.cards
        else []
    )
    return [*found, *too_large(c, p.disk_bytes, has_bytes)]


def too_large(c: Config, need_bytes: float, has_bytes: float | None) -> list[Finding]:
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


def told(c: Config, p: Plan) -> str:
    """The plan as a table."""
    return table(
        "plan" if c.model else "plan (computed, not measured)",
        tuned(c) if c.model else planned(c, p),
    )


def tuned(c: Config) -> list[tuple[str, str]]:
    """Of a fine-tuning: what is asked for; hours hang on DATA, and memory on MODEL, which may be known."""
    known = of_tuning(c)
    memory = (
        tuned_report.brief(known).removeprefix("plan: ")
        if known
        else ("n/a: MODEL is read in the pods, which check it before weights are loaded")
    )
    trained = f"LORA_RANK={c.lora_rank} on {c.lora_targets}" if c.lora_rank else "all weights"
    return [
        (
            "shape",
            f"{c.nodes} {'pod' if c.nodes == 1 else 'pods'} of {units(c)}, PARALLEL={c.parallel}, each with "
            f"{pod_cpus(c)} CPUs and {c.pod_memory_gb} GiB, {shm_gb(c)} of them shared memory",
        ),
        ("model", f"{c.model}: {trained}, in {c.dtype}"),
        (
            "data",
            f"{c.data}, {'once' if c.epochs == 1 else f'{c.epochs} times'}, {c.batch_tokens:,} tokens a step",
        ),
        ("memory", memory),
        ("time", "n/a: DATA is read in the pods, whose log has the steps"),
        (
            "disk",
            f"on VOLUME={c.volume}: the model where it comes from the hub, 5 bytes a token of DATA, and "
            f"{c.keep_last} checkpoints, CHECKPOINT_MODE={c.checkpoint_mode}",
        ),
    ]


def planned(c: Config, p: Plan) -> list[tuple[str, str]]:
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
    if p.fleet and p.fleet.cards:
        rows.append(
            (
                "memory",
                f"{number_formats.gib(memory_of(c, p.fleet).total)} of {number_formats.gib(capacity_bytes(p.fleet))} GiB "
                "a GPU",
            )
        )
    rows += [
        ("data", data_told(c, p)),
        (
            "disk",
            f"up to {number_formats.size(p.disk_bytes)} on VOLUME={c.volume}: {shards_told(c)}, {saves_told(c, p)}",
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


def time_told(c: Config, p: Plan) -> list[tuple[str, str]]:
    if p.fleet is None:
        return [
            (
                "time",
                f"n/a: GPU_PRODUCTS={c.gpu_products} has one that is not known; docs/plans.md lists those "
                "that are",
            )
        ]
    if p.pace is None or p.time is None or p.pace.tokens_per_s is None:
        why = (
            "DEVICE=cpu: nothing is known of the cluster's processors"
            if p.fleet.on_cpu
            else (
                f"{p.fleet.slowest(c.dtype).key} has no {c.dtype} units; set DTYPE=float32, or other GPU_PRODUCTS"
            )
        )
        return [("time", f"n/a: {why}")]
    together = f" with LAN_GBIT={c.lan_gbit:g} between pods" if c.nodes > 1 else ""
    if c.sync == "diloco":
        together = f" with WAN_GBIT={c.wan_gbit:g} between sites"
    rows = [
        ("time", f"{cost(p, p.time.total)}{together}: {p.pace.tokens_per_s:,.0f} tokens/s"),
        ("MFU", f"{p.pace.fast.mfu_percent:.3g}% of {p.fleet.text}: {p.pace.fast.why}"),
    ]
    rows += [
        (
            f"at {c.nodes} sites",
            f"{cost(p, hours)} with {speed:g} Gbit/s between them: "
            f"{100 * p.time.training / hours:.0f}% of it computing",
        )
        for speed, hours in reversed(p.at_sites.items())
    ]
    return rows


def cost(p: Plan, hours: float) -> str:
    assert p.fleet
    return f"{number_formats.hours(hours)}, {p.fleet.processes * hours:,.0f} GPU-hours"


def data_told(c: Config, p: Plan) -> str:
    """Each pod reads every shard, since it checks their hashes; a volume is at one site."""
    said = f"{number_formats.size(p.shard_bytes)} of shards"
    if c.nodes == 1:
        return said + ", read from the volume"
    said += (
        f", which each pod reads from the volume: {number_formats.size(c.nodes * p.shard_bytes)}"
    )
    if c.site:
        return said
    return (
        f"{said}; where pods are at sites of their own {number_formats.size((c.nodes - 1) * p.shard_bytes)} of it cross the "
        "WAN"
    )


def shards_told(c: Config) -> str:
    known, unknown = storage.disk_of_shards(c) + storage.disk_of_downloads(c), storage.unknown(c)
    said = [f"{number_formats.size(known)} of shards and downloads"] if known else []
    if unknown:
        said.append(
            f"shards of {', '.join(unknown)}, as large as {'that is' if len(unknown) == 1 else 'those are'}"
        )
    return " and ".join(said)


def saves_told(c: Config, p: Plan) -> str:
    if c.save_every == 0:
        return "no checkpoints"
    of_sites = f" of {c.replicas} sites" if c.replicas > 1 else ""
    step_s = p.pace.step_s if p.pace else None
    return (
        f"{number_formats.size(c.replicas * storage.disk_of_checkpoints(c, step_s))} of checkpoints{of_sites}, "
        f"{number_formats.size(storage.checkpoint_bytes(c))} each"
    )
