"""A plan in words, on one screen."""

import datetime
import math
import textwrap
from collections.abc import Sequence

from hardware.model_size import flops_of, parameters
from plan import between, scaling, storage
from plan.network import links
from plan.network.traffic import Sync
from plan.planner import Held, Plan
from plan.speed import Speed
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
from settings.finding import Finding, format_findings

INDENT = 9
Table = list[list[str]]


def told(p: Plan) -> str:
    """All of it."""
    parts = [
        title(p),
        model(p),
        run(p),
        pace(p),
        times(p),
        table(when(p)),
        memory(p),
        disk(p),
        network(p),
        sources(p),
        findings(p.findings),
    ]
    return "\n".join(line for part in parts for line in part) + "\n"


def title(p: Plan) -> list[str]:
    """What is planned, on what; and from which step on."""
    c, fleet = p.c, p.fleet
    where = (
        fleet.text
        + (f" on {fleet.nodes} nodes" if fleet.nodes > 1 else "")
        + (f" at {fleet.sites} sites" if fleet.sites > 1 else "")
    )
    preset = f" (PRESET={c.preset})" if c.run_name != c.preset else ""
    by = (
        "computed from a step that was measured"
        if p.pace.fast.measured
        else "computed, not measured"
    )
    found = wrapped(f"plan of {c.run_name}{preset} on {where}: {by}")
    if p.begun is None:
        return found
    source = "the step of its newest checkpoint"
    if p.begun.running:
        source = "it is being trained now"
    elif p.begun.recorded and p.begun.recorded > p.done:
        source += f"; its record goes to {p.begun.recorded:,}"
    return found + entry(
        "begun",
        f"step {p.done:,} of {c.last_step:,} is made ({source}): time, cost and dates are "
        "of what is left",
    )


def model(p: Plan) -> list[str]:
    c, parts = p.c, parameters(p.c)
    tables = f"embedding {count(parts.embedding)}" + (
        " (and head: one table)" if c.tie_embeddings else f", head {count(parts.head)}"
    )
    return [
        *entry(
            "model",
            f"{parts.total:,} parameters: {tables}, attention {count(parts.attention)}, "
            f"MLP {count(parts.mlp)}, norms {count(parts.norms)}",
        ),
        *entry(
            "",
            f"{si(flops_of(c))}FLOP a token, {si(flops_of(c, causal=True))}FLOP where attention counts its "
            "causal half only",
        ),
    ]


def run(p: Plan) -> list[str]:
    """How long it is, in work."""
    c, size_of = p.c, parameters(p.c).total
    share, best = p.tokens / scaling.rule_tokens(size_of), count(scaling.rule_tokens(size_of))
    beside = f"{100 * share:.2g}% of the compute-optimal {best}"
    if 0.95 <= share <= 1.05:
        beside = f"about the compute-optimal {best}"
    elif share >= 0.1:
        beside = f"{number(share)} times the compute-optimal {best}"
    limits = f"{count(scaling.SMALLEST)} to {count(scaling.LARGEST)} parameters"
    loss = f"n/a. The scaling law covers {limits}."
    if p.expected_loss:
        loss = f"{p.expected_loss:.2f} nats/token by a law of other data, for comparing only"
    elif scaling.SMALLEST <= size_of <= scaling.LARGEST:
        loss = "n/a: the law says nothing of so few tokens"
    steps = f"{c.last_step:,} step{'s' * (c.last_step > 1)} of {c.batch_tokens:,} tokens"
    return [
        *entry(
            "run",
            f"{steps}: {count(p.tokens)}, {number(p.tokens / size_of)} a parameter; {beside} "
            f"({scaling.RULE} a parameter)",
        ),
        *entry("", f"{flops_of(c) * p.tokens:.3g} FLOP; expected loss {loss}".replace("e+", "e")),
    ]


def pace(p: Plan) -> list[str]:
    """Tokens/s and MFU, and why; what waiting leaves of it."""
    fast = p.pace.fast
    if fast.tokens_per_s is None or fast.step_s is None:
        return entry("speed", f"n/a: {fast.why}")
    said = f"{rate(fast.tokens_per_s)}, {seconds(fast.step_s)} a step" + (
        " while computing" if p.pace.wait_s else ""
    )
    if fast.mfu_percent is not None and fast.peak_tflops is not None:
        said += f": {fast.mfu_percent:.3g}% MFU of {peak(p, fast.peak_tflops)}"
    found = [*entry("speed", said), *entry("", reason(fast))]
    if p.pace.wait_s and p.pace.tokens_per_s is not None:
        found += entry(
            "",
            f"{rate(p.pace.tokens_per_s)} with {seconds(p.pace.wait_s)} of waiting for the network "
            "in each step",
        )
    return found


def reason(fast: Speed) -> str:
    """Why this MFU."""
    if fast.measured:
        return fast.why
    if fast.why.startswith("MFU="):
        return f"MFU as set: {fast.why}"
    return f"MFU {fast.why}" if fast.why.startswith("assumed") else f"MFU: {fast.why}"


def peak(p: Plan, tflops: float) -> str:
    """What all devices can do together, and by whose word."""
    total, fleet = f"{si(tflops * 1e12)}FLOP/s", p.fleet
    if fleet.on_cpu:
        return f"{total}, what products in {p.c.dtype} reach here"
    card = fleet.slowest(p.c.dtype)
    each = (
        f"{fleet.processes} x {si(tflops * 1e12 / fleet.processes)}FLOP/s"
        if fleet.processes > 1
        else ""
    )
    whose = f" of the {card.key}, for which the others wait" if len(fleet.cards) > 1 else ""
    return f"{total} in {p.c.dtype} ({each}{whose}{'; ' if each else ''}{card.source})"


def times(p: Plan) -> list[str]:
    """Hours, GPU-hours, kWh, money."""
    c, time = p.c, p.time
    if time is None:
        return []
    if p.done >= c.last_step:
        return entry("time", "none: the run is through")
    parts = [f"training {hours(time.training)}"]
    if p.fleet.nodes > 1:
        parts.append(f"waiting for the network {hours(time.waiting)}")
    if time.evaluating:
        parts.append(f"evaluation up to {hours(time.evaluating)}")
    found = entry("time", f"{hours(time.total)}{' more' if p.done else ''}: {', '.join(parts)}")
    if p.gpu_hours is None or p.kwh is None:
        return found
    prices = [
        f"{name}={price:g}"
        for name, price in (("PRICE_GPU_HOUR", c.price_gpu_hour), ("PRICE_KWH", c.price_kwh))
        if price
    ]
    cost = (
        "cost n/a: set PRICE_GPU_HOUR or PRICE_KWH"
        if p.cost is None
        else (f"cost {money(p.cost)} at {' and '.join(prices)}")
    )
    return found + entry(
        "",
        f"{number(p.gpu_hours)} GPU-hours; {number(p.kwh)} kWh, the GPUs alone at their limit; "
        f"{cost}",
    )


def when(p: Plan) -> Table:
    if not p.milestones:
        return []
    return [
        ["when", "step", "tokens", "after", "if it goes on now" if p.done else "if it begins now"],
        *(
            [m.name, f"{m.step:,}", count(m.tokens), hours(m.hours), clock(m.clock, p.now)]
            for m in p.milestones
        ),
    ]


HEADINGS = {"casts": "copies"}  # of parts of memory, where the name in the JSON is none for people


def memory(p: Plan) -> list[str]:
    """A row for each way to spread the model and to recompute; the one that the run takes has a star."""
    unit, name = (GIB, "GiB") if max(held.need.total for held in p.memory) >= GIB else (MIB, "MiB")
    each, parts = "process" if p.fleet.on_cpu else "GPU", list(p.memory[0].need.parts)
    micro, c = p.c.micro_batch(p.fleet.processes), p.c
    headings = [HEADINGS.get(part, part) for part in parts]
    rows = [[f"{name} a {each}", "recompute", *headings, "total", "fits", "largest"]]
    rows += [
        [
            way(held, p),
            held.c.activation_checkpointing,
            *(binary(held.need.parts[part], unit) for part in parts),
            binary(held.need.total, unit),
            "yes" if held.fits else "no",
            str(held.largest_micro_batch or "none"),
        ]
        for held in p.memory
    ]
    there = f"of {binary(p.capacity_bytes, unit)} {name}"
    return [
        *table(rows, left=(0, 1)),
        *wrapped(
            f"* as set: {micro} x {c.seq_len:,} tokens at once; fits: {there}; largest: MICRO_BATCH_SIZE that "
            "does; recompute: ACTIVATION_CHECKPOINTING; copies: weights in DTYPE; other: workspaces, fragmentation",
            "  ",
        ),
    ]


def way(held: Held, p: Plan) -> str:
    name = held.c.parallel if p.fleet.processes > 1 else "one process"
    changed = f", {held.c.optimizer}" if held.c.optimizer != p.c.optimizer else ""
    return f"{name}{changed}{' *' if held.chosen else ''}"


def disk(p: Plan) -> list[str]:
    c = p.c
    parts = [
        f"{size(number)} of {name}"
        for name, number in storage.disk(c, p.pace.step_s).items()
        if number
    ]
    if unknown := storage.unknown(c):
        parts.append(f"shards of {' and '.join(unknown)}, whose size is unknown")
    free = [f"{size(place.free)} free for {' and '.join(place.settings)}" for place in p.places]
    found = entry("disk", f"up to {', '.join(parts)}" + (f" ({', '.join(free)})" if free else ""))
    if c.sync == "diloco" and c.sites > 1 and c.save_every != 0:
        found += entry("", f"each of {c.sites} sites writes as many checkpoints, its own")
    if p.save_s is not None:
        found += entry(
            "",
            f"a checkpoint is {size(storage.checkpoint_bytes(c))}, safe on disk after "
            f"{seconds(p.save_s)} at {p.write_mb_s:g} MB/s ({p.write_why})",
        )
    if p.save_s is not None and (far := storage.wan_save_s(c)) is not None:
        found += entry(
            "", f"to a volume at another site it takes {seconds(far)} with WAN_GBIT={c.wan_gbit:g}"
        )
    return found


# ---------------------------------------------------------------------------------------------------
# Network, data, findings
# ---------------------------------------------------------------------------------------------------


def network(p: Plan) -> list[str]:
    """Each way to keep processes together, with the bytes that leave one of the widest kind there is; between sites
    also the hours and the loss of each, and which to take."""
    if not p.syncs:
        return []
    c, fleet = p.c, p.fleet
    unit = "process" if fleet.on_cpu else "GPU"
    if fleet.sites > 1:
        unit = "site"
    elif fleet.nodes > 1:
        unit = "node"
    joined = [f"WAN_GBIT={c.wan_gbit:g} WAN_RTT_MS={c.wan_rtt_ms:g}{links.said(c)}"] * (
        fleet.sites > 1
    ) + [f"LAN_GBIT={c.lan_gbit:g}"] * (fleet.nodes > fleet.sites)
    rows = [
        ["network, in each step", f"leaves a {unit}", "takes", "time computing", ""],
        *(
            [
                sync.name + (" *" if sync.chosen else ""),
                size(sync.bytes_per_step),
                "n/a" if sync.seconds_per_step is None else seconds(sync.seconds_per_step),
                shares(sync),
                offered(sync),
            ]
            for sync in p.syncs
        ),
    ]
    said = [*joined, *(sync.note for sync in p.syncs if sync.chosen and sync.note)]
    if fleet.sites == 1:
        said += ["one site, which DDP suffices for"] * (fleet.nodes > 1)
        return [
            *table(rows, left=(0, 4)),
            *(wrapped("; ".join(["* as set", *said]), "  ") if said else []),
        ]
    more = [
        ("hours", "loss, published"),
        *(
            ("n/a" if way.hours is None else number(way.hours), way.loss)
            for way in between.options(p)
        ),
    ]
    named = [True, *(sync.chosen or not sync.name.startswith(("FSDP", "HSDP")) for sync in p.syncs)]
    rows = [
        [*row[:4], column, row[4] or loss]
        for row, (column, loss), shown in zip(rows, more, named, strict=True)
        if shown
    ]
    return [
        *table(rows, left=(0, 5)),
        *wrapped("; ".join(["* as set", *said]), "  "),
        *(part for line in between.lines(p) for part in wrapped(line, "  ")),
    ]


def offered(sync: Sync) -> str:
    """Muon has no split weights; the rest that is not offered is not written yet."""
    if sync.offered:
        return ""
    return "not in this version" if sync.name.startswith("DDP") else "with OPTIMIZER=adamw"


def shares(sync: Sync) -> str:
    """Of the time: where nothing hides behind computing, and where all does that may."""
    if sync.efficiency is None or sync.overlapped is None:
        return "n/a"
    least, most = percent(sync.efficiency), percent(sync.overlapped)
    return least if least == most else f"{least[:-1]} to {most}"


def write_epochs(epochs: float | None) -> str:
    """Two digits, or all of a larger number."""
    if epochs is None:
        return "n/a"
    return f"{epochs:.2g}" if epochs < 10 else f"{epochs:.0f}"


def sources(p: Plan) -> list[str]:
    return table(
        [
            ["data", "wanted", "there is", "epochs", ""],
            *(
                [
                    one.source,
                    count(one.wanted_tokens),
                    "n/a" if one.there_tokens is None else count(one.there_tokens),
                    write_epochs(one.epochs),
                    one.origin,
                ]
                for one in p.epochs
            ),
        ],
        left=(0, 4),
    )


def findings(found: Sequence[Finding]) -> list[str]:
    return [part for line in format_findings(found) for part in wrapped(line)]


# ---------------------------------------------------------------------------------------------------
# The one line, and what all of it is made of
# ---------------------------------------------------------------------------------------------------


def brief(p: Plan, c: Config) -> str:
    """One line for the start of a run."""
    each = " per GPU"
    if p.fleet.on_cpu:
        each = "" if p.fleet.processes == 1 else " per process"
    memory = f"{gib(p.chosen.need.total)} of {gib(p.capacity_bytes)} GiB of memory{each}"
    steps = c.last_step - p.done
    if steps <= 0:
        return f"plan: all {c.last_step:,} steps are done"
    more = " more" if p.done else ""
    run = f"plan: {steps:,}{more} steps of {c.batch_tokens:,} tokens"
    fast = p.pace.fast
    # what is assumed of a CPU can be off by a half; the first line of training is not
    if p.fleet.on_cpu and not fast.measured and c.mfu is None:
        every = "every step" if c.log_every == 1 else f"every {c.log_every} steps"
        left = f"; time left is printed {every}"
        return f"{run}, {memory}{left if steps > c.log_every else ''}"
    if p.time is None or p.pace.tokens_per_s is None:
        return f"{run}, {memory}. The hours are not known: {fast.why}"
    speed = f"{rate(p.pace.tokens_per_s)}, "
    if fast.measured:
        speed += "measured"
    elif fast.why.startswith("assumed"):
        speed += f"an assumed MFU of {fast.mfu_percent:.3g}%"
    else:
        speed += f"an MFU of {fast.mfu_percent:.3g}%"
    return f"{run}, about {hours(p.time.total)} ({speed}), {memory}"


def entry(name: str, text: str) -> list[str]:
    """A paragraph beside its name."""
    return textwrap.wrap(
        text,
        terminal.find_width(),
        initial_indent=name.ljust(INDENT),
        subsequent_indent=INDENT * " ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def wrapped(text: str, indent: str = "      ") -> list[str]:
    """Lines, all but the first indented."""
    return textwrap.wrap(
        text,
        terminal.find_width(),
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def table(rows: Table, left: tuple[int, ...] = (0,)) -> list[str]:
    """Columns under their heads, those in `left` to the left and the others to the right.

    What a terminal has no room for stands below, after the same first columns.
    """
    if not rows:
        return []
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    most = terminal.find_columns() or math.inf
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
            cells = [
                row[i].ljust(widths[i]) if i in left else row[i].rjust(widths[i]) for i in block
            ]
            lines.append("  ".join(cells).rstrip())
    return lines


def clock(iso: str | None, now: datetime.datetime) -> str:
    """'Sun 22 Nov 05:10', with the year where it is another than now; n/a beyond the calendar."""
    if iso is None:
        return "n/a"
    at = datetime.datetime.fromisoformat(iso)
    return at.strftime("%a %d %b %H:%M" if at.year == now.year else "%a %d %b %Y %H:%M")
