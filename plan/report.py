"""A plan as text: whether it fits, how long it takes and what it costs, then a line for each part.

`report(plan)` fits 24 lines of 100 columns, unless something is wrong. With `MORE=1` the tables follow: every layout of
the memory, every way to keep processes in step, milestones and data.
"""

import datetime
import math
import textwrap
from collections.abc import Iterator

from plan.memory import PART_NAMES
from plan.network import links
from plan.network.evidence import MEASURED_LOSS, PUBLISHED_FROM
from plan.planner import Layout, NetworkOption, Plan, SpeedPlan
from plan.scaling import TOKENS_PER_PARAMETER
from plan.speed import ASSUMED, MEASURED, OTHERS, PRESET, SCALED, SET
from plan.storage import wan_save_s
from record.number_formats import (
    GIB,
    MIB,
    binary,
    count,
    gib,
    hours,
    money,
    number,
    percent,
    rate,
    seconds,
    si,
    size,
)
from settings import terminal
from settings.config import Config
from settings.finding import FAIL, PASS, WARN, Finding

LABEL_WIDTH = 11
CHECK_WIDTH = 15
TOKEN_BYTES = 5  # of a token of fine-tuning data on disk, at most (docs/finetune.md)
# What a finding is about, in the words of the report.
SUBJECTS = {
    "batch": "Batch",
    "bf16": "bfloat16",
    "disk": "Disk",
    "epochs": "Data",
    "memory": "Memory",
    "sites": "Sites",
    "target-hours": "Time",
    "target-tokens-per-s": "Speed",
    "wan": "Network",
}
SOURCES = {
    SET: "as set",
    PRESET: "assumed, from the preset",
    OTHERS: "assumed, as others reached",
    ASSUMED: "assumed",
}
OF_THIS_MACHINE = (MEASURED, SCALED)
Table = list[list[str]]


def report(plan: Plan, more: bool = False) -> str:
    lines = [*title(plan), *checks(plan), ""]
    for label, text in facts(plan):
        lines += entry(label, text)
    if plan.run.fleet.sites > 1 and plan.network:
        lines += ["", *between_sites(plan)]
    if more:
        lines += [
            *memory_table(plan),
            *network_table(plan),
            *milestone_table(plan),
            *data_table(plan),
        ]
    hint = "MORE=1 adds every layout. JSON=1 is for programs."
    if not more:
        lines += ["", *wrapped(hint + measure_hint(plan))]
    return "\n".join(lines) + "\n"


def measure_hint(plan: Plan) -> str:
    is_here = plan.run.config.cards in ("", "here")
    if is_here and plan.speed.source not in OF_THIS_MACHINE:
        return " To measure this machine: make doctor PROBE=1"
    return ""


# ---------------------------------------------------------------------------------------------------
# At a glance
# ---------------------------------------------------------------------------------------------------


def title(plan: Plan) -> list[str]:
    fleet = plan.run.fleet
    where = fleet.text
    if fleet.nodes > 1:
        where += f", {fleet.nodes} nodes"
    if fleet.sites > 1:
        where += f" at {fleet.sites} sites"
    name = plan.run_name
    if plan.fine_tuning:
        name += f" fine-tunes {plan.model}"
    speed = "computed, not measured"
    if plan.speed.source in OF_THIS_MACHINE:
        speed = f"speed {plan.speed.why}"
    lines = wrapped(f"{name} on {where} ({speed})")
    if plan.begun:
        source = "is training now at" if plan.begun.running else "resumes at"
        lines += wrapped(
            f"It {source} step {plan.from_step:,} of {plan.steps or 0:,}. Hours, cost and dates are for the rest."
        )
    return lines


def checks(plan: Plan) -> list[str]:
    """Return the lines that everybody reads: what is wrong, does it fit, hours, cost."""
    lines = []
    for level in (FAIL, WARN):
        for finding in plan.findings:
            if finding.level == level:
                lines += check_of(finding)
    if any(finding.name == "batch" for finding in plan.findings):
        return lines
    names = {finding.name for finding in plan.findings}
    each = "process" if plan.run.fleet.on_cpu else "GPU"
    if "memory" not in names:
        text = f"{gib(plan.layout.total_bytes)} of {gib(plan.memory.capacity_bytes)} GiB per {each}"
        lines += check(PASS, "Memory", text)
    if "target-hours" not in names:
        is_known = plan.speed.tokens_per_s is not None
        lines += check(PASS if is_known else "", "Time", time_text(plan))
    if cost := cost_text(plan):
        lines += check("", "Cost", cost)
    return lines


def check_of(finding: Finding) -> list[str]:
    subject = SUBJECTS.get(finding.name, finding.name)
    lines = check(finding.level, subject, finding.text)
    if finding.fix:
        lines += check("", "", finding.fix)
    return lines


def check(level: str, subject: str, text: str) -> list[str]:
    head = f"{level:4}  {subject:{CHECK_WIDTH - 6}}"
    return wrapped(head + text, " " * CHECK_WIDTH)


def time_text(plan: Plan) -> str:
    if plan.fine_tuning:
        step_s = plan.speed.step_seconds
        if step_s is None:
            return f"not known: {plan.speed.why}"
        if plan.steps:
            return f"{hours(plan.steps * step_s / 3600)} for {plan.steps:,} steps"
        return (
            f"{hours(100 * step_s / 3600)} per 100 steps; DATA and EPOCHS decide how many there are"
        )
    if plan.time is None:
        return f"not known: {plan.speed.why}"
    if plan.steps == plan.from_step:
        return "none: the run is complete"
    end = plan.milestones[-1].clock if plan.milestones else None
    text = hours(plan.time.total_seconds / 3600)
    if end:
        text += f"; if it starts now it ends {clock(end, plan.now)}"
    return text


def cost_text(plan: Plan) -> str:
    if plan.gpu_hours is None or plan.kwh is None:
        return ""
    text = f"{number(plan.gpu_hours)} GPU-hours and {number(plan.kwh)} kWh of the GPUs"
    if plan.cost is None:
        return f"{text}; set PRICE_GPU_HOUR or PRICE_KWH to see money"
    config = plan.run.config
    prices = []
    if config.price_gpu_hour:
        prices.append(f"PRICE_GPU_HOUR={config.price_gpu_hour:g}")
    if config.price_kwh:
        prices.append(f"PRICE_KWH={config.price_kwh:g}")
    return f"{money(plan.cost)} for {text} ({', '.join(prices)})"


# ---------------------------------------------------------------------------------------------------
# A line for each part
# ---------------------------------------------------------------------------------------------------


def facts(plan: Plan) -> Iterator[tuple[str, str]]:
    """Yield (label, text); a text without a label continues the one before."""
    yield from model_facts(plan)
    yield from training_facts(plan)
    yield "Speed", speed_text(plan)
    for number_of, text in enumerate(group_texts(plan)):
        yield "" if number_of else "Groups", text
    yield "Memory", memory_text(plan)
    yield "Disk", disk_text(plan)
    if plan.network and plan.run.fleet.sites == 1:
        yield "Network", network_text(plan)
    for number_of, one in enumerate(plan.data):
        there = (
            "of unknown size"
            if one.there_tokens is None
            else f"of {count(one.there_tokens)} tokens"
        )
        text = f"{one.source}: {count(one.wanted_tokens)} {there}"
        if one.epochs is not None:
            text += f", {epochs_text(one.epochs)} epochs"
        yield "" if number_of else "Data", text
    if plan.milestones:
        parts = []
        for milestone in plan.milestones:
            if milestone.name not in ("100%", "warm-up ends"):
                parts.append(f"{milestone.name} after {hours(milestone.seconds / 3600)}")
        yield "Progress", ", ".join(parts)


def model_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    flops = f"{si(plan.flops_per_token)}FLOP per token"
    model = plan.run.model
    shape = model.shape
    if not plan.fine_tuning:
        yield "Model", f"{count(shape.total)} parameters, {flops}"
        return
    guess = ", planned as a Llama: a guess" if shape.guessed else ""
    text = f"{count(shape.total)} parameters ({shape.kind}, {shape.layers} blocks{guess})"
    if shape.experts:
        text += f", {count(shape.active)} active: {shape.passed} of {shape.experts} experts"
    yield "Model", f"{text}, {flops}; from {plan.source}"
    if model.lora:
        share = 100 * model.adapters / shape.total
        yield (
            "Trained",
            f"{count(model.adapters)} in adapters of LORA_RANK={plan.run.config.lora_rank} "
            f"({share:.2g}%); the rest is frozen in {plan.run.config.dtype}",
        )
    else:
        yield "Trained", "all, in float32"


def training_facts(plan: Plan) -> Iterator[tuple[str, str]]:
    if plan.tokens is None or plan.steps is None:
        most = "at most " if "BATCH_TOKENS" in plan.fitted else ""
        text = f"{most}{plan.batch_tokens:,} tokens per step"
        if "EPOCHS" in plan.fitted:
            text += "; EPOCHS follows from the size of DATA"
        yield "Training", text
        return
    steps = f"{plan.steps:,} step{'s' if plan.steps > 1 else ''} x {plan.batch_tokens:,} tokens"
    text = f"{steps} = {count(plan.tokens)} tokens"
    if plan.fine_tuning:
        yield "Training", text
        return
    per_parameter = number(plan.tokens / plan.run.model.shape.total)
    text += f", {per_parameter} per parameter (compute-optimal: {TOKENS_PER_PARAMETER})"
    yield "Training", text
    if plan.expected_loss:
        yield (
            "",
            f"expected loss about {plan.expected_loss:.2f} nats per token (Chinchilla law, fitted on other data)",
        )


def speed_text(plan: Plan) -> str:
    speed = plan.speed
    if speed.tokens_per_s is None or speed.step_seconds is None:
        return f"not known: {speed.why}"
    text = f"{rate(speed.tokens_per_s)}, {seconds(speed.step_seconds)} per step"
    if plan.pace.wait_s >= 0.01 * speed.step_seconds:
        text += f" of which {seconds(plan.pace.wait_s)} wait for other nodes"
    if speed.mfu_percent is not None:
        text += f", {speed.mfu_percent:.3g}% MFU"
    return f"{text} ({source_text(speed, with_reason=True)})"


def source_text(speed: SpeedPlan, with_reason: bool = False) -> str:
    """Say where a speed that is known is from."""
    if speed.source in OF_THIS_MACHINE:
        return speed.why
    text = SOURCES[speed.source]
    return f"{text}; {speed.why}" if with_reason and speed.source in (OTHERS, ASSUMED) else text


def group_texts(plan: Plan) -> Iterator[str]:
    """Yield what each group does, what they wait for, and whether to take all of them."""
    need = gib(plan.layout.total_bytes)
    for group in plan.groups:
        text = f"{group.count} x {group.card}"
        if group.sites:
            text += f", {group.sites} site{'s' if group.sites > 1 else ''}"
        text += f": {group.batch_tokens:,} tokens per step"
        if group.step_seconds:
            text += f" in {seconds(group.step_seconds)}"
        yield f"{text}; {need} of {gib(group.capacity_bytes)} GiB per GPU"
    if plan.groups:
        what = "synchronization" if plan.groups[0].sites else "step"
        yield f"each GPU has an equal part of the batch, so every {what} waits for the slowest"
    if choice := plan.group_choice:
        some = " and ".join(choice.leave_out)
        without = hours(choice.without_seconds / 3600)
        everything = "none, since together they cannot train this"
        if choice.all_seconds is not None:
            everything = hours(choice.all_seconds / 3600)
        if choice.settings:
            yield f"leave out {some}: {without} instead of {everything}. Add {choice.settings}"
        else:
            yield f"take all of them: {everything} instead of {without} without {some}"


def memory_text(plan: Plan) -> str:
    layout = plan.layout
    unit, name = unit_of(layout.total_bytes)
    parts = []
    for part, part_bytes in layout.bytes.items():
        if part_bytes >= 0.005 * layout.total_bytes:
            parts.append(f"{PART_NAMES.get(part, part)} {binary(part_bytes, unit)}")
    each = "process" if plan.run.fleet.on_cpu else "GPU"
    text = f"{', '.join(parts)} {name} per {each}"
    now = plan.run.micro_batch
    if layout.largest_micro_batch > now:
        text += f"; MICRO_BATCH_SIZE can be up to {layout.largest_micro_batch} (now {now})"
    return text


def unit_of(largest_bytes: float) -> tuple[float, str]:
    return (GIB, "GiB") if largest_bytes >= GIB else (MIB, "MiB")


def disk_text(plan: Plan) -> str:
    parts = [
        f"{size(part_bytes)} of {part}"
        for part, part_bytes in plan.disk.bytes.items()
        if part_bytes
    ]
    parts += [f"shards of {name}, of unknown size" for name in plan.disk.unknown]
    if plan.fine_tuning:
        parts.append(f"{TOKEN_BYTES} bytes per token of DATA")
    text = f"up to {', '.join(parts)}"
    free = [f"{size(place['free_bytes'])} are free" for place in plan.disk.places]
    if free:
        text += f"; {' and '.join(free)}"
    if plan.disk.checkpoint_bytes is not None and plan.disk.save_seconds is not None:
        text += (
            f". A checkpoint is {size(plan.disk.checkpoint_bytes)} and takes "
            f"{seconds(plan.disk.save_seconds)} in the background"
        )
    return text


def network_text(plan: Plan) -> str:
    chosen = next(option for option in plan.network if option.chosen)
    between = "processes" if plan.run.fleet.on_cpu else "GPUs"
    if plan.run.fleet.nodes > 1:
        between = f"nodes (LAN_GBIT={plan.run.config.lan_gbit:g})"
    text = f"{size(chosen.bytes)} per step between the {between}"
    if chosen.seconds is not None:
        text += f" in {seconds(chosen.seconds)}"
    if chosen.computing is not None:
        text += f", which leaves {busy_range(chosen)} of the time for computing"
    return text


def busy_range(option: NetworkOption) -> str:
    assert option.computing is not None and option.computing_overlapped is not None
    least = share_text(option.computing)
    most = share_text(option.computing_overlapped)
    return least if least == most else f"{least[:-1]} to {most}"


def share_text(share: float) -> str:
    return "<0.1%" if share < 0.0005 else percent(share)


def epochs_text(epochs: float) -> str:
    return f"{epochs:.2g}" if epochs < 10 else f"{epochs:.0f}"


def clock(iso: str, now: str) -> str:
    """Return 'Sun 22 Nov 05:10', with the year if it is another."""
    at = datetime.datetime.fromisoformat(iso)
    this_year = datetime.datetime.fromisoformat(now).year
    return at.strftime("%a %d %b %H:%M" if at.year == this_year else "%a %d %b %Y %H:%M")


# ---------------------------------------------------------------------------------------------------
# Between sites
# ---------------------------------------------------------------------------------------------------


def between_sites(plan: Plan) -> list[str]:
    """Return what each way to train across sites takes, for somebody who has never read about DiLoCo."""
    config = plan.run.config
    measured = links.describe(config)
    lines = wrapped(
        f"{plan.run.fleet.sites} sites with {config.wan_gbit:g} Gbit/s and {config.wan_rtt_ms:g} ms between "
        f"them{measured}. How often they synchronize decides how long they wait:"
    )
    devices = "CPUs" if plan.run.fleet.on_cpu else "GPUs"
    rows = [["", "sent per step", f"{devices} busy", "hours", "more loss"]]
    for option in plan.network:
        if option.chosen or option.outer or option.name == "DDP":
            rows.append(
                [
                    how_often(option) + (", now" if option.chosen else ""),
                    size(option.bytes),
                    "n/a" if option.busy is None else share_text(option.busy),
                    "n/a" if option.total_seconds is None else number(option.total_seconds / 3600),
                    loss_text(option),
                ]
            )
    lines += table(rows, left=(0,), indent="  ")
    if plan.run.model.shape.total < PUBLISHED_FROM:
        lines += wrapped(
            f"Small models lose more than large ones: {MEASURED_LOSS.source} lost {MEASURED_LOSS.percent}% "
            f"at {MEASURED_LOSS.sites} sites with SYNC_EVERY={MEASURED_LOSS.every}."
        )
    wan_save = wan_save_s(config)
    if wan_save is not None and config.sync == "diloco":
        lines += wrapped(f"A site that rejoins fetches a checkpoint in {seconds(wan_save)}.")
    chosen = plan.between_sites
    if chosen:
        lines += wrapped(f"Take {chosen.name}: {chosen.why}.")
        if chosen.command:
            lines.append(f"  {chosen.command}")
    return lines


def how_often(option: NetworkOption) -> str:
    if not option.outer:
        return f"every step ({option.name})"
    is_streaming = option.outer["fragments"] > 1 or option.outer["delay"] > 0
    return f"every {option.outer['every']} steps ({'streaming' if is_streaming else 'DiLoCo'})"


def loss_text(option: NetworkOption) -> str:
    if option.loss_percent is None:
        return "not known"
    return f"{option.loss_percent:+g}%" if option.loss_percent else "none"


# ---------------------------------------------------------------------------------------------------
# MORE=1
# ---------------------------------------------------------------------------------------------------


def memory_table(plan: Plan) -> list[str]:
    layouts = plan.memory.ways
    unit, name = unit_of(max(layout.total_bytes for layout in layouts))
    each = "process" if plan.run.fleet.on_cpu else "GPU"
    parts = list(layouts[0].bytes)
    headings = [PART_NAMES.get(part, part) for part in parts]
    rows = [["PARALLEL", "recompute", *headings, "total", "fits", "largest"]]
    for layout in layouts:
        rows.append(
            [
                layout_name(plan, layout),
                layout.activation_checkpointing,
                *(binary(layout.bytes[part], unit) for part in parts),
                binary(layout.total_bytes, unit),
                "yes" if layout.fits else "no",
                str(layout.largest_micro_batch or "none"),
            ]
        )
    text = (
        f"Memory in {name} per {each}, of {binary(plan.memory.capacity_bytes, unit)}, with "
        f"{plan.run.micro_batch} x {plan.run.config.seq_len:,} tokens at once. recompute is "
        "ACTIVATION_CHECKPOINTING; largest is the largest MICRO_BATCH_SIZE; * is as set."
    )
    if plan.memory.host_loading_bytes and not plan.run.fleet.on_cpu:
        text += (
            f" While weights are loaded, a process takes up to {gib(plan.memory.host_loading_bytes)} GiB "
            "of the host's memory."
        )
    return ["", *wrapped(text), *table(rows, left=(0, 1))]


def layout_name(plan: Plan, layout: Layout) -> str:
    name = layout.parallel if plan.run.fleet.processes > 1 else "one process"
    if layout.optimizer != plan.run.config.optimizer:
        name += f", {layout.optimizer}"
    return f"{name} *" if layout.chosen else name


def network_table(plan: Plan) -> list[str]:
    if not plan.network:
        return []
    unit = "process" if plan.run.fleet.on_cpu else "GPU"
    if plan.run.fleet.nodes > 1:
        unit = "node"
    if plan.run.fleet.sites > 1:
        unit = "site"
    rows = [["", f"sent per {unit} and step", "takes", "computing", ""]]
    for option in plan.network:
        remark = option.note
        if not option.offered:
            remark = "needs OPTIMIZER=adamw"
        rows.append(
            [
                option.name + (" *" if option.chosen else ""),
                size(option.bytes),
                "n/a" if option.seconds is None else seconds(option.seconds),
                "n/a" if option.computing is None else busy_range(option),
                remark,
            ]
        )
    text = "Ways to keep the processes in step, and the share of the time that they compute:"
    return ["", *wrapped(text), *table(rows, left=(0, 4))]


def milestone_table(plan: Plan) -> list[str]:
    if not plan.milestones:
        return []
    rows = [["", "step", "tokens", "after", "if it starts now"]]
    for one in plan.milestones:
        at = clock(one.clock, plan.now) if one.clock else "n/a"
        rows.append([one.name, f"{one.step:,}", count(one.tokens), hours(one.seconds / 3600), at])
    return ["", *table(rows)]


def data_table(plan: Plan) -> list[str]:
    if not plan.data:
        return []
    rows = [["data", "needed", "available", "epochs", ""]]
    for one in plan.data:
        available = "n/a" if one.there_tokens is None else count(one.there_tokens)
        epochs = "n/a" if one.epochs is None else epochs_text(one.epochs)
        rows.append([one.source, count(one.wanted_tokens), available, epochs, one.origin])
    return ["", *table(rows, left=(0, 4))]


# ---------------------------------------------------------------------------------------------------
# One line
# ---------------------------------------------------------------------------------------------------


def brief(plan: Plan, config: Config) -> str:
    """Return one line for the start of a run."""
    fleet = plan.run.fleet
    each = " per GPU"
    if fleet.on_cpu:
        each = "" if fleet.processes == 1 else " per process"
    memory = (
        f"{gib(plan.layout.total_bytes)} of {gib(plan.memory.capacity_bytes)} GiB of memory{each}"
    )
    if plan.fine_tuning:
        trained = f"{count(plan.run.model.trained)} of {count(plan.run.model.shape.total)} parameters are trained"
        step = (
            f", {seconds(plan.speed.step_seconds)} per step ({source_text(plan.speed)})"
            if plan.speed.step_seconds
            else ""
        )
        return f"plan: {memory}, {trained}{step}. make plan shows all of it"
    steps = config.last_step - plan.from_step
    if steps <= 0:
        return f"plan: all {config.last_step:,} steps are done"
    more = " more" if plan.from_step else ""
    run = f"plan: {steps:,}{more} steps of {config.batch_tokens:,} tokens"
    # What is assumed of a CPU can be off by a half; the first line of training is not.
    if fleet.on_cpu and plan.speed.source not in (*OF_THIS_MACHINE, SET):
        every = "every step" if config.log_every == 1 else f"every {config.log_every} steps"
        left = f"; time left is printed {every}"
        return f"{run}, {memory}{left if steps > config.log_every else ''}"
    if plan.time is None or plan.speed.tokens_per_s is None:
        return f"{run}, {memory}. The hours are not known: {plan.speed.why}"
    source = source_text(plan.speed)
    if plan.speed.source not in OF_THIS_MACHINE:
        source = f"{plan.speed.mfu_percent:.3g}% MFU {source}"
    time = hours(plan.time.total_seconds / 3600)
    return f"{run}, about {time} ({rate(plan.speed.tokens_per_s)}, {source}), {memory}"


# ---------------------------------------------------------------------------------------------------
# Paragraphs and tables
# ---------------------------------------------------------------------------------------------------


def entry(label: str, text: str) -> list[str]:
    """Return a paragraph beside its label."""
    return wrapped(label.ljust(LABEL_WIDTH) + text, " " * LABEL_WIDTH)


def wrapped(text: str, indent: str = "  ") -> list[str]:
    """Return lines as wide as the terminal, all but the first indented."""
    return textwrap.wrap(
        text,
        terminal.find_width(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(rows: Table, left: tuple[int, ...] = (0,), indent: str = "") -> list[str]:
    """Return columns under their headings, those in `left` aligned to the left, the others to the right.

    Columns that the terminal has no room for follow below, after the same first columns.
    """
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    most = (terminal.find_columns() or math.inf) - len(indent)
    first = [i for i in left if i < len(left) and set(range(i)) <= set(left)]
    blocks = [list(first)]
    for i in range(len(first), len(widths)):
        needed = sum(widths[j] + 2 for j in [*blocks[-1], i]) - 2
        if needed > most and blocks[-1] != first:
            blocks.append(list(first))
        blocks[-1].append(i)
    lines = []
    for block in blocks:
        for row in rows:
            cells = []
            for i in block:
                cells.append(row[i].ljust(widths[i]) if i in left else row[i].rjust(widths[i]))
            lines.append((indent + "  ".join(cells)).rstrip())
    return lines
