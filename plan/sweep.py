"""Runs beside the one that is planned, in a table, and which to take: make plan SWEEP=depth or SWEEP=gpus.

    depth    models of 64 times their depth in width and heads of 128 (the family of the presets d16 to d32), with 20
             tokens per parameter, and with what each can read in the hours that there are
    gpus     numbers of the same GPU, with DDP and with FSDP2

All of it is computed, with the MFU of the run that is planned.
"""

import dataclasses
from collections.abc import Iterator
from typing import Any

from hardware.gpu_specs import GpuSpec
from plan.checks import capacity_of, check_dtype, with_steps
from plan.fleet import Fleet
from plan.measured import Probe
from plan.report import table, wrapped
from plan.run import Run, added, changed, sharded
from plan.run_so_far import begun
from plan.scaling import TOKENS_PER_PARAMETER, loss_of, rule_tokens
from plan.speed import is_mfu_set
from plan.time import Pace, pace_of, steps_within, time_of
from record.number_formats import GIB, count, number, percent
from record.number_formats import hours as format_hours
from settings import SettingsError
from settings.checks import find_batch_problem
from settings.declare import format_value

DEPTHS = (12, 14, 16, 18, 20, 24, 28, 32)
WIDTH_PER_DEPTH, HEAD = 64, 128
MOST_GPUS = 64
GPUS_PER_NODE = 8
# Nats per token that the law cannot tell apart: its exponents are known to 0.02.
EQUAL_LOSS = 0.01
EQUAL_COST = 1.1  # GPU-hours over the fewest, which being done sooner is worth


@dataclasses.dataclass(frozen=True)
class Row:
    """A run. typed: settings to add for it; typed_within and the other two: with as many tokens as it reads in the
    hours that there are. None is what is not known."""

    label: str
    typed: str
    parameters: int
    tokens: int
    loss: float | None
    tokens_per_s: float | None
    hours: float | None
    gpu_hours: float | None
    waiting: float | None
    memory_bytes: float
    capacity_bytes: float
    gpus: int
    nodes: int
    sites: int
    parallel: str
    typed_within: str = ""
    tokens_within: int | None = None
    loss_within: float | None = None

    @property
    def fits(self) -> bool:
        return self.memory_bytes <= self.capacity_bytes


@dataclasses.dataclass(frozen=True)
class Sweep:
    """rows; recommended: the label of one, None where none can be; why: in words."""

    kind: str
    rows: list[Row]
    recommended: str | None
    why: str
    within_hours: float | None = None

    def as_json(self) -> dict[str, Any]:
        rows = [dataclasses.asdict(row) | {"fits": row.fits} for row in self.rows]
        return {"schema": 1, **dataclasses.asdict(self), "rows": rows}


def compare(run: Run, probe: Probe | None) -> Sweep:
    """Return what SWEEP asks for. Raises SettingsError where there is nothing to compare."""
    if without := check_dtype(run):
        raise SettingsError([f"{without.text}. {without.fix}"])
    if problem := find_batch_problem(run.config, run.fleet.processes):
        raise SettingsError([problem])
    planned = pace_of(run, probe).speed
    if planned.mfu_percent is not None:  # the same for all rows, whatever presets exist
        run = dataclasses.replace(run, mfu_percent=planned.mfu_percent)
    return compare_gpus(run, probe) if run.config.sweep == "gpus" else compare_depths(run, probe)


def row_of(run: Run, other: Run, label: str, pace: Pace, done: int = 0) -> Row:
    config, fleet = other.config, other.fleet
    time = time_of(config, pace, done)
    hours = time.total_seconds / 3600 if time else None
    return Row(
        label=label,
        typed=typed_for(run, other),
        parameters=other.model.shape.total,
        tokens=config.last_step * config.batch_tokens,
        loss=loss_of(config),
        tokens_per_s=pace.tokens_per_s,
        hours=hours,
        gpu_hours=None if hours is None or fleet.on_cpu else hours * fleet.processes,
        waiting=time.waiting_seconds / time.total_seconds if time and time.total_seconds else None,
        memory_bytes=other.memory.total,
        capacity_bytes=capacity_of(fleet),
        gpus=fleet.processes,
        nodes=fleet.nodes,
        sites=fleet.sites,
        parallel=config.parallel,
    )


def typed_for(run: Run, other: Run) -> str:
    """Return the settings to add for a row, and the MFU with which all rows are computed."""
    text = added(run, other)
    if text and run.mfu_percent is not None and not is_mfu_set(run.config):
        text += f" MFU={format_value(run.mfu_percent)}"
    return text


# ---------------------------------------------------------------------------------------------------
# Depths
# ---------------------------------------------------------------------------------------------------


def compare_depths(run: Run, probe: Probe | None) -> Sweep:
    pace = pace_of(run, probe)
    own_time = time_of(run.config, pace)
    within = run.config.target_hours
    if within is None and own_time:
        within = own_time.total_seconds / 3600
    own = dataclasses.replace(row_of(run, run, "as set", pace), **in_hours(run, run, pace, within))
    rows = [own]
    for depth in DEPTHS:
        model = changed(run, **family_shape(depth))
        if model is None:
            continue
        if model.model.shape == run.model.shape:
            own = dataclasses.replace(own, label=f"d{depth} (as set)")
            rows[0] = own
            continue
        tokens = rule_tokens(model.model.shape.total)
        steps = max(1, round(tokens / run.config.batch_tokens))
        other = with_steps(model, steps)
        if other is None:
            continue
        model_pace = pace_of(other, probe)
        row = row_of(run, other, f"d{depth}", model_pace)
        rows.append(dataclasses.replace(row, **in_hours(run, model, model_pace, within)))
    rows.sort(key=lambda row: row.parameters)
    best = best_depth(rows, own)
    return Sweep("depth", rows, best.label if best else None, why_depth(best, within), within)


def family_shape(depth: int) -> dict[str, Any]:
    """Return the model of that depth. N_KV_HEAD and MLP_DIM follow from it, as in the presets."""
    width = depth * WIDTH_PER_DEPTH
    shape = {"n_layer": depth, "n_embd": width, "n_head": width // HEAD}
    return shape | {"n_kv_head": None, "mlp_dim": None}


def in_hours(run: Run, model: Run, pace: Pace, within: float | None) -> dict[str, Any]:
    """Return the fields of a row that say what its model reads in so many hours."""
    if within is None or pace.step_s is None:
        return {}
    steps = steps_within(model.config, pace, within)
    other = with_steps(model, steps) if steps else None
    if other is None:
        return {}
    return {
        "typed_within": typed_for(run, other),
        "tokens_within": other.config.last_step * other.config.batch_tokens,
        "loss_within": loss_of(other.config),
    }


def best_depth(rows: list[Row], own: Row) -> Row | None:
    """Return the row with the lowest expected loss in the hours that there are.

    Of those that the law cannot tell apart it is what is set, else the smallest model. None where
    nothing fits, or the speed or the law says nothing.
    """
    known = [row for row in rows if row.fits and row.loss_within is not None]
    if not known:
        return None
    lowest = min(row.loss_within or 0.0 for row in known)
    near = [row for row in known if (row.loss_within or 0.0) <= lowest + EQUAL_LOSS]
    return own if own in near else min(near, key=lambda row: row.parameters)


def why_depth(best: Row | None, within: float | None) -> str:
    if within is None:
        return "No recommendation: the speed of these devices is not known."
    if best is None:
        return (
            "No recommendation: none of these fits, or the scaling law covers none of what they reach in "
            f"{format_hours(within)}."
        )
    text = f"{best.label} has the lowest expected loss in {format_hours(within)}."
    return f"{text} Add: {best.typed_within}" if best.typed_within else f"{text} It is what is set."


# ---------------------------------------------------------------------------------------------------
# Numbers of GPUs
# ---------------------------------------------------------------------------------------------------


def compare_gpus(run: Run, probe: Probe | None) -> Sweep:
    if run.fleet.on_cpu:
        raise SettingsError(
            ["SWEEP=gpus compares numbers of a GPU. Name one, for example CARDS=8xa100-80gb-sxm."]
        )
    started = begun(run.config)
    done = started.step if started and started.step < run.config.last_step else 0
    rows: dict[str, Row] = {}
    for other in fleets_of(run):
        label = label_of(other)
        rows.setdefault(label, row_of(run, other, label, pace_of(other, probe), done))
    if not rows:
        raise SettingsError(
            [
                f"SWEEP=gpus: no number of GPUs can share BATCH_TOKENS={run.config.batch_tokens} evenly; "
                "set for example MICRO_BATCH_SIZE=1"
            ]
        )
    best = best_number(run, list(rows.values()))
    return Sweep("gpus", list(rows.values()), best.label if best else None, why_number(run, best))


def fleets_of(run: Run) -> Iterator[Run]:
    """Yield the run on powers of two of its fastest GPU, with DDP and with FSDP2.

    They are spread over nodes as they are now, and together in nodes of eight.
    """
    config = run.config
    card = max(
        (card for _, card in run.fleet.cards), key=lambda card: card.peak(config.dtype) or 0.0
    )
    most = min(MOST_GPUS, config.batch_windows)
    numbers = {2**n for n in range(most.bit_length()) if 2**n <= most} | {run.fleet.processes}
    spreads = [(max(GPUS_PER_NODE, run.fleet.processes_of_a_node), 1)]
    if run.fleet.nodes > 1:
        spreads.insert(0, (run.fleet.processes_of_a_node, run.fleet.sites))
    for each, sites in spreads:
        for number_of in sorted(numbers):
            fleet = fleet_with(card, number_of, each, sites)
            cards = {"cards": f"{number_of}x{card.key}", "nodes": fleet.nodes, "sites": fleet.sites}
            ddp = changed(run, fleet, **cards, parallel="ddp", grad_sync="step", shard_ranks=None)
            if ddp:
                yield ddp
            if number_of > 1:
                fsdp = changed(run, fleet, **cards, **sharded(run))
                if fsdp:
                    yield fsdp


def fleet_with(card: GpuSpec, number_of: int, each: int, sites: int) -> Fleet:
    """Return so many GPUs in nodes of `each`, over as many of the sites as there are nodes."""
    nodes = -(-number_of // each)
    while number_of % nodes:
        nodes += 1
    sites = min(sites, nodes)
    while nodes % sites:
        sites -= 1
    return Fleet(((number_of, card),), number_of, nodes, sites)


def label_of(run: Run) -> str:
    fleet = run.fleet
    text = f"{fleet.processes} GPU{'s' if fleet.processes > 1 else ''}"
    if fleet.nodes > 1:
        text += f" on {fleet.nodes} nodes"
    if fleet.sites > 1:
        text += f" at {fleet.sites} sites"
    return f"{text}, {run.config.parallel}"


def best_number(run: Run, rows: list[Row]) -> Row | None:
    """Return the fewest GPUs that are done in TARGET_HOURS; without it the fastest that waste few GPU-hours."""
    known = [row for row in rows if row.fits and row.hours is not None]
    target = run.config.target_hours
    if target is not None:
        known = [row for row in known if (row.hours or 0) <= target]
        return min(known, key=lambda row: (row.gpus, row.hours), default=None)
    fewest = min((row.gpu_hours or 0 for row in known), default=0.0)
    cheap = [row for row in known if (row.gpu_hours or 0) <= EQUAL_COST * fewest]
    return min(cheap, key=lambda row: (row.hours, row.gpus), default=None)


def why_number(run: Run, best: Row | None) -> str:
    target = run.config.target_hours
    if best is None:
        if target is None:
            return "No recommendation: none of these fits, or their speed is not known."
        return f"No recommendation: none of these fits and is done within {format_hours(target)}."
    if target is None:
        reason = f"is the fastest of those that take at most {EQUAL_COST - 1:.0%} more GPU-hours than the fewest"
    else:
        reason = f"is the fewest that are done within {format_hours(target)}"
    text = f"{best.label} {reason}."
    return f"{text} Add: {best.typed}" if best.typed else f"{text} It is what is set."


# ---------------------------------------------------------------------------------------------------
# As text
# ---------------------------------------------------------------------------------------------------


def report(swept: Sweep) -> str:
    """Return the table, the recommended row with a star, and why."""
    columns = depth_columns if swept.kind == "depth" else gpu_columns
    cells = [columns(row, swept) for row in swept.rows]
    rows = [["", *cells[0]]]
    for row, values in zip(swept.rows, cells, strict=True):
        rows.append(["*" if row.label == swept.recommended else "", *values.values()])
    title = f"{count(swept.rows[0].tokens)} tokens on numbers of GPUs. Computed, not measured."
    if swept.kind == "depth":
        title = "Models of different depth. Computed, not measured."
        title += f" Each with {TOKENS_PER_PARAMETER} tokens per parameter"
        if swept.within_hours is not None:
            title += f", and with what it reads in {format_hours(swept.within_hours)}"
        title += ". loss: expected nats per token; only differences mean something."
    lines = [*wrapped(title, ""), *table(rows, left=(0, 1)), *wrapped(swept.why, "")]
    return "\n".join(lines) + "\n"


def depth_columns(row: Row, swept: Sweep) -> dict[str, str]:
    columns = {
        "model": row.label,
        "size": count(row.parameters),
        "tokens": count(row.tokens),
        "hours": text_of(row.hours),
        "GPU-h": text_of(row.gpu_hours),
        "loss": loss_text(row.loss),
    }
    if swept.within_hours is not None:
        columns |= {
            f"in {format_hours(swept.within_hours)}: tokens": count(row.tokens_within or 0),
            "loss ": loss_text(row.loss_within),
        }
    return columns | {"GiB": f"{row.memory_bytes / GIB:.1f}", "fits": "yes" if row.fits else "no"}


def gpu_columns(row: Row, swept: Sweep) -> dict[str, str]:
    return {
        "GPUs": str(row.gpus),
        "nodes": str(row.nodes),
        "sites": str(row.sites),
        "PARALLEL": row.parallel,
        "tokens/s": "n/a" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}",
        "waiting": "n/a" if row.waiting is None else percent(row.waiting),
        "hours": text_of(row.hours),
        "GPU-hours": text_of(row.gpu_hours),
        "GiB": f"{row.memory_bytes / GIB:.1f}",
        "fits": "yes" if row.fits else "no",
    }


def text_of(value: float | None) -> str:
    return "n/a" if value is None else number(value)


def loss_text(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.3f}"
