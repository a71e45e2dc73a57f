"""The plan of a run: what it will take in time, memory, disk, network and money, before it starts.

`make_plan(config, fleet, now)` computes it for pretraining and for fine-tuning. The fields of `Plan` and of the classes
below, but for `run` and `pace`, are the keys of its JSON: new ones do not change SCHEMA. Bytes, seconds, tokens, FLOPs
and FLOP/s are plain numbers; None is what is not known.
"""

import dataclasses
import datetime
import shutil
import time as clock
from collections.abc import Collection, Sequence
from typing import Any

from hardware.model_size import parameters
from plan import data_wanted, scaling, storage
from plan.checks import BUSY, capacity_of, find_problems
from plan.fleet import Fleet
from plan.gpu_groups import Choice, Group, choose, groups_of
from plan.measured import Probe, cpu_name, of_card, read
from plan.memory import loading_host_bytes
from plan.network.diloco import Schedule
from plan.network.evidence import find_evidence
from plan.network.traffic import Traffic, chosen_of, traffic_of, wait_of
from plan.past_runs import find_past_runs
from plan.run import RECOMPUTE, Run, added, changed, run_of, sharded, with_config
from plan.run_so_far import Begun, begun
from plan.speed import MEASURED, slowest_card, speed_of
from plan.storage import Place
from plan.this_machine import measure_tflops
from plan.time import Milestone, Pace, Time, milestones, time_of
from record.number_formats import hours, percent
from record.run_paths import RunPaths
from settings import ROOT
from settings.config import Config
from settings.finding import Finding
from settings.tuning_rules import HELD_OUT_CONVERSATIONS

SCHEMA = 1
OBJECTS = (
    "run",
    "pace",
    "begun",
    "fitted",
)  # of a plan: what it was made from, and not in its JSON
DDP_SUFFICES = 0.9  # of the time computing: nothing that costs loss is worth the rest


@dataclasses.dataclass(frozen=True)
class Layout:
    """What a process holds at its peak, in one way to shard and to recompute.

    Attributes:
        bytes: by part.
        moment: of the step at which the peak is.
        largest_micro_batch: MICRO_BATCH_SIZE that fits, 0 for none.
    """

    parallel: str
    optimizer: str
    activation_checkpointing: str
    bytes: dict[str, float]
    total_bytes: float
    moment: str
    fits: bool
    largest_micro_batch: int
    chosen: bool


@dataclasses.dataclass(frozen=True)
class MemoryPlan:
    """capacity_bytes: that a process may use; host_loading_bytes: of the host's memory while weights are loaded."""

    capacity_bytes: float
    host_loading_bytes: float | None
    ways: list[Layout]


@dataclasses.dataclass(frozen=True)
class SpeedPlan:
    """tokens_per_s and step_seconds include the wait for other nodes; those that end in _computing do not."""

    mfu_percent: float | None
    why: str
    source: str
    measured: bool
    peak_flops_per_s: float | None
    tokens_per_s: float | None
    tokens_per_s_computing: float | None
    step_seconds: float | None
    step_seconds_computing: float | None


@dataclasses.dataclass(frozen=True)
class DiskPlan:
    """bytes: by part, at most; unknown: sources whose size is not known; save_seconds: of a checkpoint."""

    bytes: dict[str, float]
    unknown: list[str]
    checkpoint_bytes: float | None
    lite_bytes: float | None
    full_bytes: float | None
    save_seconds: float | None
    bytes_per_s: float
    why: str
    other_site_save_seconds: float | None
    places: list[dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class NetworkOption:
    """A way to keep processes in step.

    Attributes:
        bytes: per step, that leave a site, else a node, else a process.
        computing: share of the time, 0 to 1, if nothing hides; computing_overlapped if all does that may.
        busy: the same as `total_seconds` counts it: an MFU includes what is inside nodes.
        total_seconds: of the run.
        loss_percent: above data parallelism, as published; loss_evidence: by whom.
        outer: of DiLoCo: every, fragments, delay.
    """

    name: str
    bytes: float
    seconds: float | None
    computing: float | None
    computing_overlapped: float | None
    offered: bool
    chosen: bool
    note: str
    total_seconds: float | None
    loss_percent: float | None
    loss_evidence: str
    outer: dict[str, int] | None
    busy: float | None


@dataclasses.dataclass(frozen=True)
class Recommendation:
    """Which network option to take between sites; command: the settings to add, "" where it is what is set."""

    name: str
    why: str
    command: str


@dataclasses.dataclass(frozen=True)
class Plan:
    """What a run will take, or what is left of it.

    Attributes:
        from_step: steps that a run of this name has made; time, cost and milestones are for the rest.
        kwh: of the GPUs alone, at their power limit.
        cost: at PRICE_GPU_HOUR and PRICE_KWH.
        groups: of a mixed fleet, the fastest first; group_choice: whether to take all of them.
    """

    run: Run
    pace: Pace
    begun: Begun | None
    fitted: Collection[str]
    schema: int
    fine_tuning: bool
    preset: str
    run_name: str
    model: str
    source: str
    now: str
    from_step: int
    settings: dict[str, Any]
    devices: dict[str, Any]
    parameters: dict[str, Any]
    tokens: int | None
    steps: int | None
    batch_tokens: int
    flops_per_token: float
    flops_per_token_causal: float
    flops: float | None
    compute_optimal_tokens: float | None
    expected_loss: float | None
    speed: SpeedPlan
    time: Time | None
    evaluation_seconds: float | None
    gpu_hours: float | None
    kwh: float | None
    cost: float | None
    milestones: list[Milestone]
    memory: MemoryPlan
    disk: DiskPlan
    network: list[NetworkOption]
    between_sites: Recommendation | None
    groups: list[Group]
    group_choice: Choice | None
    data: list[data_wanted.Epochs]
    findings: list[Finding]

    @property
    def layout(self) -> Layout:
        """The layout that the settings choose."""
        return next(layout for layout in self.memory.ways if layout.chosen)

    def between(self, sites: int, gbit: float) -> Traffic:
        """Return what the same processes send and wait for if their nodes are at so many sites."""
        apart = dataclasses.replace(
            self.run,
            config=self.run.config.replace(sites=sites, wan_gbit=gbit),
            fleet=dataclasses.replace(self.run.fleet, sites=sites),
        )
        way = chosen_of(traffic_of(apart, self.pace.speed.step_s))
        assert way
        return way

    def as_json(self) -> dict[str, Any]:
        content = {}
        for field in dataclasses.fields(self):
            if field.name not in OBJECTS:
                content[field.name] = plain(getattr(self, field.name))
        return content


def plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    return [plain(one) for one in value] if isinstance(value, list) else value


# ---------------------------------------------------------------------------------------------------
# The parts
# ---------------------------------------------------------------------------------------------------


def make_plan(
    config: Config,
    fleet: Fleet,
    now: datetime.datetime,
    places: Sequence[Place] | None = None,
    may_measure: bool = True,
    fitted: Collection[str] = (),
    from_start: bool = False,
) -> Plan:
    """Return the plan of a run on these devices.

    Args:
        places: file systems that the run writes to; None looks at this machine's, if it is planned for.
        may_measure: take a few seconds to measure a CPU of which nothing is known.
        fitted: settings that nobody has set, and that fine-tuning chooses for MODEL and DATA.
        from_start: plan all steps, whatever a run of this name has made on this machine.

    Raises:
        SettingsError: of a MODEL that is not known, or SHARD_RANKS that cannot be.
        CorpusError: of a source that is not declared.
        FolderError: RUNS_DIR or DATA_DIR cannot be read.
    """
    run = with_past_runs(run_of(config, fleet, fitted))
    config = run.config
    has_target = config.target_hours or config.target_tokens_per_s
    needs_peak = bool(has_target) or speed_of(run, None).step_s is None
    probe = probe_of(config, fleet, may_measure and needs_peak)
    started = None if run.is_finetuning or from_start else begun(config)
    done = started.step if started else 0
    speed = speed_of(run, probe)
    ways = traffic_of(run, speed.step_s, probe.link_gb_s if probe else None)
    pace = Pace(speed, wait_of(ways))
    time = None if run.is_finetuning else time_of(config, pace, done)
    left = config.last_step - done
    recurring_s = time.total_seconds / left if time and left else None
    capacity = capacity_of(fleet)
    if places is None:
        places = places_of(run) if config.cards in ("", "here") else ()
    if not run.is_finetuning:
        places = [storage.at_pace(config, place, pace.step_s) for place in places]
    epochs = [] if run.is_finetuning else data_wanted.epochs(config)
    network = [network_option(run, way, pace, done) for way in ways]
    gpu_hours, kwh, cost = costs_of(run, time)
    findings = find_problems(run, probe, pace, capacity, places, done)
    if not run.is_finetuning:
        findings += data_wanted.findings(config, epochs)
    tokens = run.steps * config.batch_tokens if run.steps else None
    size = run.model.shape.total
    groups = groups_of(run)
    return Plan(
        run=run,
        pace=pace,
        begun=started,
        fitted=fitted,
        schema=SCHEMA,
        fine_tuning=run.is_finetuning,
        preset=config.preset,
        run_name=config.run_name,
        model=run.model_name,
        source=run.source,
        now=now.isoformat(timespec="minutes"),
        from_step=done,
        settings=settings_of(run),
        devices=devices_of(run),
        parameters=parameters_of(run),
        tokens=tokens,
        steps=run.steps,
        batch_tokens=config.batch_tokens,
        flops_per_token=run.model.flops(),
        flops_per_token_causal=run.model.flops(causal=True),
        flops=run.model.flops() * tokens if tokens else None,
        compute_optimal_tokens=None if run.is_finetuning else scaling.rule_tokens(size),
        expected_loss=None if run.is_finetuning else scaling.loss_of(config),
        speed=speed_plan(pace),
        time=time,
        evaluation_seconds=evaluation_s(run, speed.tokens_per_s),
        gpu_hours=gpu_hours,
        kwh=kwh,
        cost=cost,
        milestones=milestones(config, recurring_s, now, done) if recurring_s else [],
        memory=memory_plan(run, capacity),
        disk=disk_plan(run, pace, probe, places),
        network=network,
        between_sites=recommend(run, network),
        groups=groups,
        group_choice=choose(run, groups, done),
        data=epochs,
        findings=findings,
    )


def probe_of(config: Config, fleet: Fleet, may_measure: bool = False) -> Probe | None:
    """Return what was measured of the slowest device; of a CPU, if nothing was, its matrix products now."""
    if fleet.cards:
        return of_card(config, slowest_card(config, fleet))
    name = cpu_name()
    probe = read(config, name)
    if not may_measure or (probe and config.dtype in probe.matmul_tflops):
        return probe
    tflops = measure_tflops(config.dtype)
    if tflops is None:
        return probe
    return Probe(name, clock.time(), "", {config.dtype: tflops})


def with_past_runs(run: Run) -> Run:
    """Return the run with those in RUNS_DIR that tell how fast devices are."""
    past_runs = find_past_runs(run.config, run.is_finetuning)
    return dataclasses.replace(run, past_runs=tuple(past_runs))


def places_of(run: Run) -> Sequence[Place]:
    """Return the file systems of this machine that the run writes to."""
    if not run.is_finetuning:
        return storage.places(run.config)
    paths = RunPaths.of(run.config.runs_dir, run.config.run_name, ROOT)
    try:
        folder = storage.existing("RUNS_DIR", paths.folder)
        free = float(shutil.disk_usage(folder).free)
    except (storage.FolderError, OSError):
        return ()
    checkpoints = storage.disk_of(run, None)["checkpoints"] - storage.saved_bytes(paths)
    return [Place(("RUNS_DIR",), folder, {"checkpoints": max(0.0, checkpoints)}, free)]


def settings_of(run: Run) -> dict[str, Any]:
    config = run.config
    return {
        "dtype": config.dtype,
        "parallel": config.parallel,
        "optimizer": config.optimizer,
        "seq_len": config.seq_len,
        "micro_batch_size": run.micro_batch,
        "activation_checkpointing": config.activation_checkpointing,
        "lora_rank": config.lora_rank if run.is_finetuning else 0,
        "lora_targets": config.lora_targets,
    }


def devices_of(run: Run) -> dict[str, Any]:
    cards = []
    for number, card in run.fleet.cards:
        peak = card.peak(run.config.dtype)
        cards.append(
            {
                "count": number,
                "card": card.key,
                "peak_flops_per_s": None if peak is None else peak * 1e12,
                "memory_bytes": card.memory_gib * 2.0**30,
                "watts": card.watts,
                "source": card.source,
            }
        )
    fleet = run.fleet
    return {
        "processes": fleet.processes,
        "nodes": fleet.nodes,
        "sites": fleet.sites,
        "cards": cards,
    }


def parameters_of(run: Run) -> dict[str, Any]:
    model = run.model
    common = {
        "total": model.shape.total,
        "active": model.shape.active,
        "trained": model.trained,
        "adapters": model.adapters,
        "blocks": [
            {
                "times": block.times,
                "total": block.size,
                "active": sum(matrix.active for matrix in block.matrices),
            }
            for block in model.shape.blocks
        ],
    }
    if run.is_finetuning:
        return common
    parts = parameters(run.config)
    return common | dataclasses.asdict(parts) | {"matmul": parts.matmul}


def speed_plan(pace: Pace) -> SpeedPlan:
    speed = pace.speed
    return SpeedPlan(
        mfu_percent=speed.mfu_percent,
        why=speed.why,
        source=speed.source,
        measured=speed.source == MEASURED,
        peak_flops_per_s=speed.peak_flops,
        tokens_per_s=pace.tokens_per_s,
        tokens_per_s_computing=speed.tokens_per_s,
        step_seconds=pace.step_s,
        step_seconds_computing=speed.step_s,
    )


def evaluation_s(run: Run, tokens_per_s: float | None) -> float | None:
    """Return the seconds that one evaluation of a fine-tuning takes at most."""
    if not run.is_finetuning or not tokens_per_s:
        return None
    tokens = HELD_OUT_CONVERSATIONS * run.config.seq_len
    return tokens / tokens_per_s * run.model.forward_flops / run.model.flops()


def costs_of(run: Run, time: Time | None) -> tuple[float | None, float | None, float | None]:
    """Return (GPU-hours, kWh, money). A GPU draws its power limit: the lab's H100 drew 673 to 681 of 700 W."""
    if time is None or run.fleet.on_cpu:
        return None, None, None
    hours_planned = time.total_seconds / 3600
    gpu_hours = hours_planned * run.fleet.processes
    kwh = hours_planned * sum(number * card.watts for number, card in run.fleet.cards) / 1000
    config = run.config
    if not config.price_gpu_hour and not config.price_kwh:
        return gpu_hours, kwh, None
    cost = gpu_hours * (config.price_gpu_hour or 0) + kwh * (config.price_kwh or 0)
    return gpu_hours, kwh, cost


def memory_plan(run: Run, capacity: float) -> MemoryPlan:
    host_bytes = None
    if run.is_finetuning:
        host_bytes = loading_host_bytes(run.step)
    ways = [layout_of(run, other, capacity) for other in layouts(run)]
    return MemoryPlan(capacity, host_bytes, ways)


def layouts(run: Run) -> list[Run]:
    """Return the run as set and in the other ways to shard it, each with each ACTIVATION_CHECKPOINTING.

    One process has nothing to shard. Under SYNC=diloco a site's copies would each send everything to the
    other sites, so DDP is left out there unless it is set.
    """
    config = run.config
    as_ddp = {"parallel": "ddp", "grad_sync": "step", "shard_ranks": None}
    tried: list[dict[str, Any]] = []
    if config.parallel == "ddp" or config.sync != "diloco":
        tried.append({} if config.parallel == "ddp" else as_ddp)
    if run.site_processes > 1:
        tried.append({} if config.parallel == "fsdp" else sharded(run))
        if config.parallel == "hsdp":
            tried.append({})
        elif run.is_finetuning and run.fleet.nodes > 1:
            tried.append({"parallel": "hsdp", "shard_ranks": None})
    elif not tried:
        tried.append({})
    runs = []
    for changes in tried:
        for how in RECOMPUTE:
            other = dataclasses.replace(config, **changes, activation_checkpointing=how)
            runs.append(with_config(run, other, run.fleet))
    return runs


def layout_of(run: Run, other: Run, capacity: float) -> Layout:
    need = other.memory
    config = other.config
    is_same = config.activation_checkpointing == run.config.activation_checkpointing
    return Layout(
        parallel=config.parallel,
        optimizer=config.optimizer,
        activation_checkpointing=config.activation_checkpointing,
        bytes=need.parts,
        total_bytes=need.total,
        moment=need.moment,
        fits=need.total <= capacity,
        largest_micro_batch=other.largest_micro_batch(capacity),
        chosen=is_same and (config.parallel == run.config.parallel or run.site_processes == 1),
    )


def disk_plan(run: Run, pace: Pace, probe: Probe | None, places: Sequence[Place]) -> DiskPlan:
    config = run.config
    saves = config.save_every != 0
    megabytes_per_s, why = storage.write_mb_s(probe)
    size = run.checkpoint_bytes
    return DiskPlan(
        bytes=storage.disk_of(run, pace.step_s),
        unknown=[] if run.is_finetuning else storage.unknown(config),
        checkpoint_bytes=size if saves else None,
        lite_bytes=run.model.lite_bytes if run.is_finetuning else None,
        full_bytes=run.model.full_bytes if run.is_finetuning else None,
        save_seconds=size / (1e6 * megabytes_per_s) if saves else None,
        bytes_per_s=1e6 * megabytes_per_s,
        why=why,
        other_site_save_seconds=storage.wan_save_s(config) if saves else None,
        places=[
            {"settings": list(one.settings), "needs_bytes": one.needs, "free_bytes": one.free}
            for one in places
        ],
    )


# ---------------------------------------------------------------------------------------------------
# The network
# ---------------------------------------------------------------------------------------------------


def network_option(run: Run, way: Traffic, pace: Pace, done: int) -> NetworkOption:
    pace = Pace(pace.speed, way.wait_s)
    time = None if run.is_finetuning else time_of(run.config, pace, done)
    percent_more: float | None = 0.0
    evidence = ""
    if way.schedule:
        schedule = way.schedule
        row = find_evidence(
            run.model.shape.total, run.fleet.sites, schedule.every, schedule.is_streaming
        )
        percent_more = row.percent if row else None
        evidence = row.source if row else ""
    note = ""
    if way.wan_bytes:
        note = "every pass waits for the WAN; PARALLEL=hsdp shards within a site only"
    return NetworkOption(
        name=way.name,
        bytes=way.bytes_per_step,
        seconds=way.seconds_per_step,
        computing=way.efficiency,
        computing_overlapped=way.overlapped,
        offered=way.is_offered,
        chosen=way.is_chosen,
        note=note,
        total_seconds=time.total_seconds if time else None,
        loss_percent=percent_more,
        loss_evidence=evidence,
        outer=dataclasses.asdict(way.schedule) if way.schedule else None,
        busy=pace.busy,
    )


def recommend(run: Run, options: list[NetworkOption]) -> Recommendation | None:
    """Return which option to take between sites; None at one site, or if the speed is not known.

    Data parallelism if it keeps the devices busy DDP_SUFFICES of the time; else DiLoCo with the shortest
    interval, of equal ones without streaming, that keeps them busy BUSY of the time.
    """
    if run.fleet.sites == 1 or run.is_finetuning or any(one.busy is None for one in options):
        return None
    in_step = [one for one in options if not one.outer]
    own = next((one for one in in_step if one.chosen), in_step[0])
    best = own if (own.busy or 0) >= DDP_SUFFICES else in_step[0]
    if (best.busy or 0) >= DDP_SUFFICES:
        why = f"it keeps the GPUs busy {percent(best.busy or 0)} of the time and costs no loss"
        return Recommendation(
            best.name, why, "" if best.chosen else to_add(run, {"sync": "ddp", "parallel": "ddp"})
        )
    sparse = [one for one in options if one.outer]
    if not sparse:
        return Recommendation(best.name, "no DiLoCo is possible with sites as unequal as these", "")
    sparse.sort(key=lambda one: (one.outer or {}).get("every", 0))
    enough = [one for one in sparse if (one.busy or 0) >= BUSY]
    choice = enough[0] if enough else max(sparse, key=lambda one: one.busy or 0)
    why = f"it keeps the GPUs busy {percent(choice.busy or 0)} of the time"
    if choice.total_seconds and best.total_seconds:
        why += (
            f": {hours(choice.total_seconds / 3600)} instead of {hours(best.total_seconds / 3600)}"
        )
    if not enough:
        why += ". Fewer sites or a faster link help more"
    if choice.chosen:
        return Recommendation(choice.name, why, "")
    schedule = Schedule(**(choice.outer or {}))
    return Recommendation(choice.name, why, to_add(run, schedule.settings(run)))


def to_add(run: Run, changes: dict[str, Any]) -> str:
    other = changed(run, **changes)
    return added(run, other) if other else ""
